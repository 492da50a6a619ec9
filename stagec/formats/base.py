"""The interface of file formats of traces, which turn the program of a rank class into the files of
its ranks.

Ranks of a class differ only in the identifiers of their communicators and in their peers. An
encoder may encode each rank separately, or serialise a class once and overwrite the few bytes in
which ranks differ:

    class          ... pg_name="9" ... comm_dst=  ...      serialised once: a `Variant`
    rank 5         ... pg_name="3" ... comm_dst=6 ...      the same memory, written over

A format that does not have one file per rank (but one per job or stage, or a table) is a
`JobFormat`: it names its files and makes the bytes of each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from stagec.program.groups import GroupAxes, Groups, neighbours
from stagec.program.nodes import Ints, Node, Program
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.ir.module import Module
    from stagec.machines import Machine
    from stagec.program.classes import RankClass
    from stagec.time.costs.nodes import Measurements

#: A mesh axis and a difference of coordinates along it.
Neighbour = tuple[str, int]
Bytes = npt.NDArray[np.uint8]
#: The name of a file, and its content in parts.
JobFile = tuple[str, Iterable[bytes | memoryview]]
#: Returns the seconds that a computation takes.
Durations = Callable[[Node], float]


class RankBytes(Protocol):
    """Makes the file of any rank of a class."""

    def rank(self, rank: int) -> bytes | memoryview:
        """The bytes of a rank, valid until the next call."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """The communicators and peers of a job, by which the bytes of a rank differ from those of its
    class.

    In a job of several pods, it is the layout of `pod`, whose ranks begin with `start`.
    `other_pods` has, by the name of another pod and the number of the message, the rank there that
    each rank exchanges a message with. `sizes` are the values of the model's symbols; empty for an
    archive.
    """

    mesh: Mapping[str, int]
    groups: Groups
    start: int = 0
    other_pods: Mapping[str, Sequence[Ints]] = field(default_factory=dict[str, "Sequence[Ints]"])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    pod: str = ""

    def peer(self, rank: int, over: str, by: int) -> int:
        """The rank whose coordinate along an axis is larger by `by`, modulo the size of the axis;
        or the rank of another pod that message `by` goes to or comes from."""
        return int(self.peers(np.array([rank], dtype=np.int64), over, by)[0])

    def peers(self, ranks: Ints, over: str, by: int) -> Ints:
        """The peers of several ranks, as in `peer`."""
        places = ranks - self.start
        if over in self.other_pods:
            return self.other_pods[over][abs(by)][places]
        return self.start + neighbours(self.mesh, over, by, places)


class TraceJob(Protocol):
    """A job as formats see it: rank classes with their ranks, and further data if available."""

    @property
    def name(self) -> str:
        """The name of its files."""
        ...

    @property
    def layout(self) -> Layout:
        """Its mesh, communicators and peers; with several pods, without the peers: use
        `layout_of`."""
        ...

    def layout_of(self, number: int) -> Layout:
        """The mesh, communicators and peers of the ranks of a class."""
        ...

    @property
    def members(self) -> Sequence[Ints]:
        """The ranks of each class, ascending."""
        ...

    @property
    def machine(self) -> Machine | None:
        """The machine of `--machine`, or of `--peak-tflops` and `--memory-gbps`."""
        ...

    @property
    def durations(self) -> Durations | None:
        """The durations of computations on that machine; with several pods, in the first one."""
        ...

    def durations_of(self, number: int) -> Durations | None:
        """The durations of computations of a class: pods may have different software."""
        ...

    @property
    def model(self) -> ModelJob | None:
        """The model that it was compiled from; None for an archive, which contains only
        programs."""
        ...

    @property
    def models(self) -> Sequence[ModelJob]:
        """The models of all pods, in order."""
        ...

    def program(self, number: int) -> Program:
        """The program of a class. Only the latest few are cached: go through the classes once."""
        ...


@dataclass(frozen=True, slots=True)
class ModelJob:
    """The data of a compiled job that an archive does not contain: the lowered module, with its
    sizes and schedules, and the rank classes in the order of `TraceJob.members`. `flops` are the
    FLOPs of a step of the model on all ranks, if the format `wants_flops` and they are known.
    `measured` are times that replace those of cost models. `graphs` says whether hosts launch
    serving steps as a whole. `pod` is the name of the pod, if there are several."""

    module: Module
    classes: Sequence[RankClass]
    flops: int | None = None
    measured: Measurements | None = None
    graphs: bool = True
    pod: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The approximate size of a job's files in bytes, and a description of their content."""

    bytes: int
    text: str


#: The data that a format may require: the times of computations, a machine, or the model. An
#: archive contains neither the model nor the kernels of nodes.
Need = Literal["durations", "machine", "model"]


class Format:
    """Base class of file formats. A plug-in adds one with `Plugin(formats=...)`, users choose it
    with `--format`.

    `suffix` is the end of file names, `NAME.RANK.SUFFIX`. A format with `patched` makes encoders
    that are `PatchedEncoder`s: its jobs can be stored in archives, and be written by clusters,
    which get them as archives. A format with `pods` can write jobs of several pods: it takes meshes
    and peers from `layout_of` a class. A format that uses the mesh or the model of the whole job
    cannot; `one_pod` says why. All formats support worker processes, `--only-ranks` and `--resume`.
    A job without the data that the format `needs` is an error.

    The fields of a format that is a dataclass are its options: `--format 'NAME{max-ranks=4}'` sets
    the field `max_ranks`. They are strings, integers, floats or flags, by the type of their
    defaults.
    """

    name: ClassVar[str] = ""
    suffix: ClassVar[str] = ""
    patched: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset()
    wants_flops: ClassVar[bool] = False
    pods: ClassVar[bool] = False
    one_pod: ClassVar[str] = "is of one mesh and one model"

    def encoder(self, program: Program, layout: Layout, durations: Durations | None) -> RankBytes:
        """The encoder of the ranks that run a program. `durations` are the times of its
        computations, if known."""
        raise error(f"the format '{self.name}' has no encoder", remedy="define 'encoder' in it")

    def peer(self, rank: int, ranks: int) -> bytes:
        """The bytes of a peer in patched data: the same number of bytes for all ranks of a job."""
        raise error(f"the format '{self.name}' writes no peers", remedy="define 'peer' in it")

    def check(self, job: TraceJob) -> None:
        """Raises `DiagnosticError`, before anything is written, for a job that the consumer cannot
        read."""

    def drops(self, program: Program, layout: Layout) -> Sequence[str]:
        """The information about the ranks that run a program that the format loses: a phrase for
        each kind of loss. Users read it as `remark: NAME: PHRASE`, and it is in the manifest."""
        return ()

    def tables(self, name: str, groups: Groups) -> Mapping[str, bytes]:
        """Files with the communicator groups, by name."""
        return {f"{name}.json": json.dumps(groups.table()).encode()}

    def companions(self, job: TraceJob) -> Mapping[str, bytes]:
        """Further files of the job, by name, such as the configuration of a simulator."""
        return {}

    def warnings(self, path: Path, groups: Groups, nodes: int) -> Sequence[str]:
        """Limits of consumers that a job at this path exceeds; its ranks have up to `nodes`
        nodes."""
        return ()

    def with_options(self, options: Mapping[str, str]) -> Self:
        """The format with these options. Raises `DiagnosticError` for unknown options, and for
        values of a wrong type."""
        given: Any = self
        own = [f.name for f in fields(given)] if is_dataclass(given) else []
        known = {name.replace("_", "-"): name for name in own}
        for name in options:
            if name not in known:
                shown = f"its options are: {', '.join(known)}" if known else "it has none"
                raise error(
                    f"format '{self.name}' has no option '{name}'",
                    remedy=did_you_mean(name, known) or shown,
                )
        values = {known[n]: self._value(n, known[n], text) for n, text in options.items()}
        return cast("Self", replace(cast("Any", self), **values)) if values else self

    def _value(self, option: str, field_: str, text: str) -> object:
        default: object = getattr(self, field_)
        try:
            if isinstance(default, bool):
                return {"": True, "true": True, "yes": True, "false": False, "no": False}[text]
            return type(default)(text) if isinstance(default, int | float) else text
        except (KeyError, ValueError):
            kinds = {"bool": "true or false", "int": "an integer", "float": "a number"}
            raise error(
                f"option '{option}' of format '{self.name}' expects "
                f"{kinds[type(default).__name__]}, found '{text}'",
                remedy=f"for example {option}={default}".lower(),
            ) from None


class JobFormat(Format):
    """Base class of formats that do not have one file per rank.

    One process writes the files one after the other, so their number and size are not limited; each
    part is written as soon as it is made. `suffix` is not used; `tables` and `companions` are.
    """

    suffix = "txt"

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[JobFile]:
        """The files of a job: their names, which begin with `job.name`, and their parts in order.
        `ranks` are those of `--only-ranks`, ascending, or None for all; a format that needs all
        calls `all_ranks`."""
        raise error(f"the format '{self.name}' has no files", remedy="define 'files' in it")

    def estimate(self, job: TraceJob, ranks: Ints | None) -> Estimate | None:
        """The size, which is printed before files are written and compared with the free disk
        space; None for small files."""
        return None

    def tables(self, name: str, groups: Groups) -> Mapping[str, bytes]:
        """No files by default: a `JobFormat` includes the groups in its own files."""
        return {}


def nanoseconds(durations: Durations) -> Callable[[Node], int]:
    """A function that returns the duration of a computation, rounded to nanoseconds."""
    return lambda node: round(1e9 * durations(node))


def check_choice(format_: Format, option: str, choices: Sequence[str], remedy: str = "") -> None:
    """Raises `DiagnosticError` for an option that is not one of `choices`. The default remedy is
    the most similar choice."""
    value: str = getattr(format_, option)
    if value not in choices:
        nearest = did_you_mean(value, choices) or f"for example {option}={choices[1]}"
        raise error(
            f"option '{option}' of format '{format_.name}' expects {', '.join(choices)}, found "
            f"'{value}'",
            remedy=remedy or nearest,
        )


def all_ranks(format_: Format, ranks: Ints | None) -> None:
    """Raises `DiagnosticError` for a selection of ranks, for a format that writes all."""
    if ranks is not None:
        raise error(
            f"the format '{format_.name}' writes all ranks of a job", remedy="drop --only-ranks"
        )


def check_needs(format_: Format, job: TraceJob) -> None:
    """Raises `DiagnosticError` for a job without the data that the format `needs`."""
    if "machine" in format_.needs and job.machine is None:
        raise error(
            f"the format '{format_.name}' needs a machine",
            remedy="add --machine h100-sxm, for example",
        )
    if "durations" in format_.needs and job.durations is None:
        raise error(
            f"the format '{format_.name}' needs the times of computations",
            remedy="compile the job with --machine h100-sxm, for example",
        )
    if "model" in format_.needs and not (job.models if format_.pods else job.model):
        raise error(
            f"the format '{format_.name}' needs the model, which an archive does not contain",
            remedy="compile the model with this --format instead",
        )


def not_patched(format_: Format) -> DiagnosticError:
    """The error for a format that archives and clusters do not support."""
    return error(
        f"the format '{format_.name}' encodes each rank on its own, which archives and clusters "
        "do not support",
        remedy="write to a folder from this machine: -o DIR, without --archive and --scheduler",
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """A serialised program, with the positions of the last byte of each identifier of a group
    (`ends`) and of each peer (`peers`), and the values that are written there now."""

    data: Bytes
    ends: Mapping[GroupAxes, Ints]
    peers: Mapping[Neighbour, Ints]
    _there: dict[Hashable, bytes] = field(default_factory=dict[Hashable, bytes])

    def put(self, key: Hashable, ends: Ints, text: bytes) -> None:
        """Write an identifier at its positions; only bytes that change are written."""
        there = self._there.get(key, b"")
        for place in range(1, len(text) + 1):
            if text[-place:][:1] != there[-place:][:1]:
                self.data[ends - (place - 1)] = text[-place]
        self._there[key] = text


class PatchedEncoder:
    """Overwrites the bytes of a class where its ranks differ.

    A program is serialised once for each combination of the widths of its group identifiers, which
    are decimal numbers; `axes` are its groups.
    """

    def __init__(self, format_: Format, layout: Layout, axes: Sequence[GroupAxes]) -> None:
        self.format, self.layout, self.axes = format_, layout, axes
        self._variants: dict[tuple[int, ...], Variant] = {}

    def serialised(self, widths: Mapping[GroupAxes, int]) -> Variant:
        """Serialise the program for identifiers of these widths. Encoders override this method; the
        base class raises `DiagnosticError`."""
        raise error(
            f"the encoder of format '{self.format.name}' does not say how it serialises",
            remedy="give it a method serialised(widths)",
        )

    def rank(self, rank: int) -> memoryview:
        """The bytes of a rank, valid until the next call, which overwrites them."""
        variant, layout = self.variant(self.widths(rank)), self.layout
        for axes, ends in variant.ends.items():
            variant.put(axes, ends, str(layout.groups.of_rank(axes, rank)).encode())
        for way, ends in variant.peers.items():
            peer = self.format.peer(layout.peer(rank, *way), layout.groups.ranks)
            variant.put(way, ends, peer)
        return variant.data.data

    def widths(self, rank: int) -> tuple[int, ...]:
        """The number of digits of the identifiers of the rank's groups, in the order of `axes`."""
        return tuple(len(str(self.layout.groups.of_rank(axes, rank))) for axes in self.axes)

    def variant(self, widths: tuple[int, ...]) -> Variant:
        """The serialised program for identifiers of these widths, cached."""
        if widths not in self._variants:
            given = dict(zip(self.axes, widths, strict=True))
            self._variants[widths] = self.serialised(given)
        return self._variants[widths]
