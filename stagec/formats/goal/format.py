"""The format of LogGOPSim and ATLAHS: one schedule of messages and computations of all ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from stagec.formats.base import (
    Durations,
    JobFile,
    JobFormat,
    Layout,
    Need,
    TraceJob,
    all_ranks,
    check_choice,
    nanoseconds,
)
from stagec.formats.goal.encode import Patched, binary_bytes, binary_head, binary_of, text_of
from stagec.formats.goal.ops import LOADS, Expander, Place
from stagec.formats.messages import ALGORITHMS, Shape
from stagec.machines import Machine
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Ints, Node, Program
from stagec.support.diagnostics import error

#: A rank class, and the shapes of a rank's groups, by which the operations of its members differ.
_Kind = tuple[int, tuple[tuple[GroupAxes, Shape], ...]]


@dataclass(frozen=True)
class GoalFormat(JobFormat):
    """A GOAL file, `NAME.goal`, or with `binary` the form that LogGOPSim reads, `NAME.bin`.

    `collectives` is the algorithm by which collectives become messages: `ring`, `tree` or
    `pairwise`. Streams are cpus: 0 for computations, 1 for collectives, 2 for sends, 3 for
    receives, 4 and 5 for copies to and from the host.
    """

    collectives: str = "ring"
    binary: bool = False
    name: ClassVar[str] = "goal"
    needs: ClassVar[frozenset[Need]] = frozenset({"durations"})
    pods: ClassVar[bool] = True

    def check(self, job: TraceJob) -> None:
        """Raises `DiagnosticError` for an unknown algorithm."""
        check_choice(self, "collectives", ALGORITHMS)

    def drops(self, program: Program, layout: Layout) -> Sequence[str]:
        losses = [
            "what nodes are: names, FLOPs, bytes of memory, which messages are a collective",
            "the levels of a network: LogGOPSim has one latency and one bandwidth for all ranks",
        ]
        nodes = [n for n in program.prototypes if n.is_collective]
        if any(n.kind in ("all_reduce", "reduce_scatter") for n in nodes):
            losses.append("the time of additions inside reductions")
        if any(n.size < n.group.size(layout.mesh) for n in nodes):
            losses.append("collectives of fewer bytes than members get as many")
        return losses

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[JobFile]:
        all_ranks(self, ranks)
        schedule = GoalSchedule(job, self.collectives)
        if self.binary:
            yield f"{job.name}.bin", schedule.binary()
        else:
            yield f"{job.name}.goal", schedule.text()


class GoalSchedule:
    """The parts of a job's file, rank by rank. The bytes of a class are kept until its last
    rank."""

    def __init__(self, job: TraceJob, algorithm: str) -> None:
        self._job, self._algorithm = job, algorithm
        self._ranks = job.layout.groups.ranks
        self._axes: dict[int, list[GroupAxes]] = {}
        self._class = np.zeros(self._ranks, dtype=np.int64)
        for number, members in enumerate(job.members):
            self._class[members] = number

    def text(self) -> Iterator[bytes | memoryview]:
        """`num_ranks N`, and the statements of each rank."""
        yield f"num_ranks {self._ranks}\n".encode()
        for place, encoded in self._encoded(lambda e: text_of(e.ops(), self._ranks)):
            yield f"rank {place.rank} {{\n".encode()
            yield encoded.rank(place)
            yield b"}\n"

    def binary(self) -> Iterator[bytes | memoryview]:
        """The table of ranks, and the operations of each."""
        sizes = self._sizes()
        yield binary_head(sizes, LOADS + 1)
        for place, encoded in self._encoded(lambda e: binary_of(e.ops())):
            yield encoded.rank(place)

    def _encoded(self, encode: Callable[[Expander], Patched]) -> Iterator[tuple[Place, Patched]]:
        known: dict[_Kind, Patched] = {}
        last = [int(members[-1]) for members in self._job.members]
        for rank, number in enumerate(self._class.tolist()):
            place = Place(self._job.layout_of(number), rank)
            kind = self._kind(number, place)
            if kind not in known:
                known[kind] = encode(self._expander(kind))
            yield place, known[kind]
            if rank == last[number]:
                known = {k: v for k, v in known.items() if k[0] != number}

    def _sizes(self) -> list[int]:
        """The bytes of the binary of every rank."""
        sizes = np.zeros(self._ranks, dtype=np.int64)
        for number, members in enumerate(self._job.members):
            known: dict[_Kind, int] = {}
            layout = self._job.layout_of(number)
            for rank in members.tolist():
                kind = self._kind(number, Place(layout, rank))
                if kind not in known:
                    counts = self._expander(kind).counts()
                    known[kind] = binary_bytes(counts)
                sizes[rank] = known[kind]
        return sizes.tolist()

    def _kind(self, number: int, place: Place) -> _Kind:
        if self._algorithm != "tree":
            return number, ()
        if number not in self._axes:
            self._axes[number] = self._job.program(number).groups
        return number, tuple(place.shapes(self._axes[number], self._algorithm).items())

    def _expander(self, kind: _Kind) -> Expander:
        program, layout = self._job.program(kind[0]), self._job.layout_of(kind[0])
        time = partial(self._nanoseconds, self._job.durations_of(kind[0]))
        return Expander(program, layout, time, self._algorithm, dict(kind[1]))

    def _nanoseconds(self, durations: Durations | None, node: Node) -> int:
        if node.is_copy:
            return _copied(node, self._job.machine)
        return nanoseconds(durations)(node) if durations is not None else 0


def _copied(node: Node, machine: Machine | None) -> int:
    """The nanoseconds of a copy between device and host. Raises `DiagnosticError` without a
    machine."""
    if machine is None:
        raise error(
            f"'{node.name}' copies between device and host, which takes a machine's time",
            remedy="add --machine h100-sxm, for example",
        )
    seconds = machine.host.latency.value + node.size / machine.host.bandwidth.value
    return round(1e9 * seconds)


GOAL = GoalFormat()
