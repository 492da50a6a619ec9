"""What a file format of traces is: from the program of a rank class to the bytes of any of its
ranks.

Ranks of a class differ in the identifiers of their communicators and in their peers only. An
encoder may make every rank anew, or serialise a class once and write over the few bytes in which
ranks differ:

    class          ... pg_name="9" ... comm_dst=  ...      serialised once: a `Variant`
    rank 5         ... pg_name="3" ... comm_dst=6 ...      the same memory, written over

A format that is not one file per rank (a file of the job, one per stage, a table) is a
`JobFormat`: it names its files and makes the bytes of each of them.
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

#: A mesh axis, and a difference of coordinates along it.
Neighbour = tuple[str, int]
Bytes = npt.NDArray[np.uint8]
#: The name of a file and its parts in order.
JobFile = tuple[str, Iterable[bytes | memoryview]]
#: The seconds of a computation.
Durations = Callable[[Node], float]


class RankBytes(Protocol):
    """Makes the file of any rank of a class."""

    def rank(self, rank: int) -> bytes | memoryview:
        """The bytes of a rank, good until the next is made."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """Who talks to whom in a job: what the bytes of a rank need beside those of its class.

    Of a job of several pods it is the layout of one, `pod`, whose ranks begin with `start`;
    `other_pods` are the ranks of another pod that each of its ranks exchanges values with, by the
    name of that pod and the number of the message. `sizes` are the numbers of the symbols of the
    model, none of an archive.
    """

    mesh: Mapping[str, int]
    groups: Groups
    start: int = 0
    other_pods: Mapping[str, Sequence[Ints]] = field(default_factory=dict[str, "Sequence[Ints]"])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    pod: str = ""

    def peer(self, rank: int, over: str, by: int) -> int:
        """The rank that is `by` places further along an axis, round the ring; or the one of another
        pod that message `by` goes to or comes from."""
        return int(self.peers(np.array([rank], dtype=np.int64), over, by)[0])

    def peers(self, ranks: Ints, over: str, by: int) -> Ints:
        """The same of several ranks."""
        places = ranks - self.start
        if over in self.other_pods:
            return self.other_pods[over][abs(by)][places]
        return self.start + neighbours(self.mesh, over, by, places)


class TraceJob(Protocol):
    """A job as formats see it: rank classes, who runs them, and what else is known."""

    @property
    def name(self) -> str:
        """The name of its files."""
        ...

    @property
    def layout(self) -> Layout:
        """Its mesh, its communicators, and, but of several pods, who talks to whom."""
        ...

    def layout_of(self, number: int) -> Layout:
        """The mesh and the communicators of the ranks of a class, and whom they talk to."""
        ...

    @property
    def members(self) -> Sequence[Ints]:
        """The ranks of each class, in order."""
        ...

    @property
    def machine(self) -> Machine | None:
        """That of `--machine`, or of `--peak-tflops` and `--memory-gbps`."""
        ...

    @property
    def durations(self) -> Durations | None:
        """Seconds of computations on that machine; of several pods those of the first one."""
        ...

    def durations_of(self, number: int) -> Durations | None:
        """The same of the ranks of a class: the software of pods may differ."""
        ...

    @property
    def model(self) -> ModelJob | None:
        """What it was compiled from; None of an archive, which holds programs only."""
        ...

    @property
    def models(self) -> Sequence[ModelJob]:
        """The same of each pod, in order."""
        ...

    def program(self, number: int) -> Program:
        """The nodes of a class. The latest few are kept: go over the classes once."""
        ...


@dataclass(frozen=True, slots=True)
class ModelJob:
    """What a compiled job has and an archive has not: the lowered module, with its sizes and
    schedules, and the rank classes in the order of `TraceJob.members`. `flops` are those of a step
    by the model's text, of all ranks, if the format `wants_flops` and they are known. `measured`
    are times that win over models, `graphs` says whether hosts launch steps of serving as a whole;
    `pod` is the name of the pod, if there are several."""

    module: Module
    classes: Sequence[RankClass]
    flops: int | None = None
    measured: Measurements | None = None
    graphs: bool = True
    pod: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """About how many bytes the files of a job take, and what they hold, in words."""

    bytes: int
    text: str


#: What a format may ask for: the times of computations, a machine, or the model, which an archive
#: does not hold; nor does it hold the kernels of nodes.
Need = Literal["durations", "machine", "model"]


class Format:
    """Base of file formats. One is brought by `Plugin(formats=...)`, and chosen by `--format`.

    `suffix` ends the names of files, `NAME.RANK.SUFFIX`. What has `patched` makes encoders that are
    `PatchedEncoder`s: its jobs can be kept in archives, and be written by clusters, which get them
    as archives. What takes `pods` writes jobs of several meshes: whom ranks talk to, `layout_of`
    their class knows; one that looks at the mesh or the model of the job does not, and `one_pod`
    says why. All formats go with worker processes, `--only-ranks` and `--resume`. A job without
    what it `needs` is refused.

    A format that is a dataclass has options, its fields: `--format 'NAME{max-ranks=4}'` sets the
    field `max_ranks`. They are texts, integers, floats or flags, as their defaults are.
    """

    name: ClassVar[str] = ""
    suffix: ClassVar[str] = ""
    patched: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset()
    wants_flops: ClassVar[bool] = False
    pods: ClassVar[bool] = False
    one_pod: ClassVar[str] = "is of one mesh and one model"

    def encoder(self, program: Program, layout: Layout, durations: Durations | None) -> RankBytes:
        """Makes the files of the ranks that run a program; with `durations` the times of its
        computations are known."""
        raise error(f"the format '{self.name}' has no encoder", remedy="define 'encoder' in it")

    def peer(self, rank: int, ranks: int) -> bytes:
        """How a peer is written into patched bytes: by as many bytes for all ranks of a job."""
        raise error(f"the format '{self.name}' writes no peers", remedy="define 'peer' in it")

    def check(self, job: TraceJob) -> None:
        """Refuse a job that the consumer cannot take, before anything is written. Raises
        `DiagnosticError`."""

    def drops(self, program: Program, layout: Layout) -> Sequence[str]:
        """What it cannot carry of the ranks that run a program, a sentence for each kind of loss.
        Users read it as `remark: NAME: SENTENCE`, the manifest has it."""
        return ()

    def tables(self, name: str, groups: Groups) -> Mapping[str, bytes]:
        """The files that a job has beside those of its ranks, by name: its communicator groups."""
        return {f"{name}.json": json.dumps(groups.table()).encode()}

    def companions(self, job: TraceJob) -> Mapping[str, bytes]:
        """Further files beside those of ranks, which are made from more than the groups: what a
        simulator reads, for example."""
        return {}

    def warnings(self, path: Path, groups: Groups, nodes: int) -> Sequence[str]:
        """What consumers cannot take of a job at this path, whose ranks have up to `nodes`
        nodes."""
        return ()

    def with_options(self, options: Mapping[str, str]) -> Self:
        """The format with these options. Raises `DiagnosticError` for unknown ones, and for values
        of another type."""
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
    """Base of formats that are not one file per rank: it says which files a job has.

    They are written one after the other by one process, so their number and size are free; a part
    is written as soon as it is made. `suffix` is not used, `tables` and `companions` are.
    """

    suffix = "txt"

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[JobFile]:
        """The files of a job: their names, which begin with `job.name`, and their parts in order.
        `ranks` are those of `--only-ranks`, in order, or None for all: `all_ranks` refuses some."""
        raise error(f"the format '{self.name}' has no files", remedy="define 'files' in it")

    def estimate(self, job: TraceJob, ranks: Ints | None) -> Estimate | None:
        """The size to print before files are written and to compare with the free space of the
        disk; None for small files."""
        return None

    def tables(self, name: str, groups: Groups) -> Mapping[str, bytes]:
        """None but what a format adds: its files hold the groups in their own way."""
        return {}


def nanoseconds(durations: Durations) -> Callable[[Node], int]:
    """Computations in whole nanoseconds, each of them rounded."""
    return lambda node: round(1e9 * durations(node))


def check_choice(format_: Format, option: str, choices: Sequence[str], remedy: str = "") -> None:
    """Refuse an option that is not one of these words; the remedy is the nearest of them, if none
    is given. Raises `DiagnosticError`."""
    value: str = getattr(format_, option)
    if value not in choices:
        nearest = did_you_mean(value, choices) or f"for example {option}={choices[1]}"
        raise error(
            f"option '{option}' of format '{format_.name}' expects {', '.join(choices)}, found "
            f"'{value}'",
            remedy=remedy or nearest,
        )


def all_ranks(format_: Format, ranks: Ints | None) -> None:
    """Refuse some ranks, for a format whose files are of all. Raises `DiagnosticError`."""
    if ranks is not None:
        raise error(
            f"the format '{format_.name}' writes all ranks of a job", remedy="drop --only-ranks"
        )


def check_needs(format_: Format, job: TraceJob) -> None:
    """Refuse a job without what the format needs. Raises `DiagnosticError`."""
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
    """The error for a format that archives and clusters cannot take."""
    return error(
        f"the format '{format_.name}' encodes each rank on its own, which archives and clusters "
        "do not support",
        remedy="write to a folder from this machine: -o DIR, without --archive and --scheduler",
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """A serialised program; for each axes and each neighbour, the positions of the last byte of
    its identifiers, and what is written there now."""

    data: Bytes
    ends: Mapping[GroupAxes, Ints]
    peers: Mapping[Neighbour, Ints]
    _there: dict[Hashable, bytes] = field(default_factory=dict[Hashable, bytes])

    def put(self, key: Hashable, ends: Ints, text: bytes) -> None:
        """Write an identifier at its places, as far as another one is there."""
        there = self._there.get(key, b"")
        for place in range(1, len(text) + 1):
            if text[-place:][:1] != there[-place:][:1]:
                self.data[ends - (place - 1)] = text[-place]
        self._there[key] = text


class PatchedEncoder:
    """Writes what ranks differ in over the bytes of their class.

    A program is serialised once for each combination of the widths of its groups' identifiers,
    which are decimal numbers of `axes`.
    """

    def __init__(self, format_: Format, layout: Layout, axes: Sequence[GroupAxes]) -> None:
        self.format, self.layout, self.axes = format_, layout, axes
        self._variants: dict[tuple[int, ...], Variant] = {}

    def serialised(self, widths: Mapping[GroupAxes, int]) -> Variant:
        """The program for identifiers of these widths. Raises `DiagnosticError`: an encoder has
        its own."""
        raise error(
            f"the encoder of format '{self.format.name}' does not say how it serialises",
            remedy="give it a method serialised(widths)",
        )

    def rank(self, rank: int) -> memoryview:
        """The bytes of a rank, good until the next rank is made: the same places are written over
        for every rank."""
        variant, layout = self.variant(self.widths(rank)), self.layout
        for axes, ends in variant.ends.items():
            variant.put(axes, ends, str(layout.groups.of_rank(axes, rank)).encode())
        for way, ends in variant.peers.items():
            peer = self.format.peer(layout.peer(rank, *way), layout.groups.ranks)
            variant.put(way, ends, peer)
        return variant.data.data

    def widths(self, rank: int) -> tuple[int, ...]:
        """Digits of the identifiers of the rank's groups, in the order of `axes`."""
        return tuple(len(str(self.layout.groups.of_rank(axes, rank))) for axes in self.axes)

    def variant(self, widths: tuple[int, ...]) -> Variant:
        """The same, made once."""
        if widths not in self._variants:
            given = dict(zip(self.axes, widths, strict=True))
            self._variants[widths] = self.serialised(given)
        return self._variants[widths]
