"""The time of a training step on a machine, and where it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from stagec.ir.module import Module
from stagec.machines import Machine
from stagec.program.classes import RankClass, rank_classes
from stagec.program.groups import Groups, number_groups
from stagec.program.nodes import Ints, Node
from stagec.program.runs import Run
from stagec.time.costs import CostTable, Measurements
from stagec.time.join import Joined, joined
from stagec.time.pieces import Piece, Shape
from stagec.time.replay import ClassReplay, replay
from stagec.time.streams import PICOSECONDS, Cost, Part

Costs = Callable[[Node], Cost]


@dataclass(frozen=True)
class Issued:
    """What the ranks of a job issue, whatever the machine: classes, their runs and their ranks."""

    classes: Sequence[RankClass]
    mesh: Mapping[str, int]
    _plans: dict[tuple[bool, bool], list[Joined]] = field(
        default_factory=dict[tuple[bool, bool], list[Joined]]
    )

    @classmethod
    def of(cls, module: Module) -> Issued:
        """What the ranks of a lowered module issue. Raises `DiagnosticError` if a size is open."""
        mesh = module.mesh
        return cls(rank_classes(module), {a: n or 1 for a, n in mesh.sizes.items()} if mesh else {})

    @cached_property
    def runs(self) -> list[list[Run]]:
        """The runs of each class."""
        return [each.issued() for each in self.classes]

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes that others are runs of."""
        return [
            node for kind in {r.kind for runs in self.runs for r in runs} for node in kind.nodes
        ]

    def plans(self, *, overlap: bool, one_stream: bool = False) -> list[Joined]:
        """The plans of all classes."""
        key = overlap, one_stream
        if key not in self._plans:
            self._plans[key] = joined(
                self.classes, self.runs, self.mesh, overlap=overlap, one_stream=one_stream
            )
        return self._plans[key]

    @cached_property
    def members(self) -> list[Ints]:
        """The ranks of each class."""
        return [each.members(self.mesh) for each in self.classes]

    @cached_property
    def groups(self) -> Groups:
        """The numbered communicator groups."""
        used = zip((each.groups for each in self.classes), self.members, strict=True)
        return number_groups(self.mesh, used)


@dataclass(frozen=True)
class StepTime:
    """The time of a step: `picoseconds`, the replays of all classes, and how many kernels and
    collectives were matched, interpolated and modelled (`stagec.time.tables`)."""

    picoseconds: int
    classes: Sequence[ClassReplay]
    ways: Mapping[int, int]

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return self.picoseconds / PICOSECONDS

    @cached_property
    def slowest(self) -> ClassReplay:
        """The class that ends last; of several, the one that waits least for others."""
        return max(self.classes, key=lambda c: (c.end, c.busy_time(self.picoseconds)))

    def parts(self, each: ClassReplay) -> dict[Part, int]:
        """Where the time of a class goes, in picoseconds that add up to the step; the largest
        first."""
        found = each.parts(self.picoseconds)
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def step_time(
    issued: Issued,
    machine: Machine,
    *,
    overlap: bool = True,
    communicates: bool = True,
    measured: Measurements | None = None,
) -> StepTime:
    """Replay a job on a machine. Without overlap all collectives are blocking; where nothing
    communicates, collectives and messages take no time. What is `measured` wins over models.

    Raises `DiagnosticError` for a type that the machine does not compute, ranks that its network
    does not join, and classes that wait for each other in a ring.
    """
    table = CostTable(
        machine, issued.mesh, overlap=overlap, communicates=communicates, measured=measured
    )
    table.prepare(issued.nodes)
    one_stream = machine.efficiency.streams == "one"
    plans = issued.plans(overlap=overlap, one_stream=one_stream)
    known: dict[tuple[int, Shape], Piece] = {}
    classes: list[ClassReplay] = []
    for i, (each, ranks) in enumerate(zip(issued.classes, issued.members, strict=True)):
        key, costs = table.of_class(ranks, issued.groups, each.groups, each.ways)

        def piece(shape: Shape, key: int = key, costs: Costs = costs) -> Piece:
            found = known.get((key, shape))
            if found is None:
                found = known[key, shape] = Piece(shape, costs)
            return found

        classes.append(ClassReplay(i, plans[i], piece))
    slowdown = round(machine.efficiency.interference.computations * 1024)
    return StepTime(replay(classes, slowdown), classes, table.ways)
