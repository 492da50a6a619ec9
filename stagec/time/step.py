"""The time of a training step on a machine, and where it goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from stagec.ir.decisions import Decisions, Watched
from stagec.ir.module import Module
from stagec.machines import Level, Machine
from stagec.program.classes import RankClass, rank_classes
from stagec.program.groups import GroupAxes, Groups, number_groups
from stagec.program.nodes import Ints, Node
from stagec.program.runs import Run
from stagec.program.sizes import Resizable, what_it_does
from stagec.time.clock.hosts import HostTimes, host_costs, never_late
from stagec.time.clock.join import joined
from stagec.time.clock.replay import ClassReplay
from stagec.time.clock.replayed import Plans, Replayed
from stagec.time.clock.shapes import Shape
from stagec.time.clock.weights import NodeNumbers
from stagec.time.costs.network import spans
from stagec.time.costs.nodes import CostTable, Measurements, picoseconds
from stagec.time.streams import PICOSECONDS, Cost, Part

T = TypeVar("T")
#: Coordinates that sizes depend on.
Inner = tuple[tuple[str, int], ...]


class _Programs:
    """The programs of a job, for all sizes with which they consist of the same nodes: what was
    asked to make them is in `decisions`. `samples` are nodes that differ in what they do, or in the
    coordinates that their sizes depend on; `number` tells which one a node is like."""

    def __init__(self, module: Module) -> None:
        self.decisions, before = Decisions(), module.decisions
        module.decisions = self.decisions
        try:
            self.classes = rank_classes(module)
            runs = [each.issued() for each in self.classes]
            self.used = [(each.groups, each.ways) for each in self.classes]
        finally:
            module.decisions = before
        self.by_layers, self.serves = bool(module.loads), bool(module.serving)
        self.samples: list[Node] = []
        self._inner: list[Inner] = []
        self.number: dict[Node, int] = {}
        self._sampled: dict[Hashable, int] = {}
        self.size = sum(map(len, runs))
        self._runs: list[list[Run]] | None = runs
        self._sample(runs)
        self._plans: dict[tuple[bool, bool, frozenset[int]], Plans] = {}
        self._asked = False
        self._replayed: tuple[Hashable, Replayed] | None = None
        self._numbers: dict[Shape, list[int]] = {}

    def _sample(self, every: Sequence[Sequence[Run]]) -> None:
        """Give numbers to the nodes of the runs of all classes."""
        for each, runs in zip(self.classes, every, strict=True):
            inner = tuple(each.inner.items())
            for node in (n for kind in dict.fromkeys(r.kind for r in runs) for n in kind.nodes):
                key = (each.name, node.op) if self.by_layers else inner, what_it_does(node)
                if key not in self._sampled:
                    self._sampled[key] = len(self.samples)
                    self.samples.append(node)
                    self._inner.append(inner)
                self.number[node] = self._sampled[key]

    @property
    def runs(self) -> list[list[Run]]:
        """The runs of each class; unrolled again, if they were forgotten."""
        if self._runs is None:
            self._runs = [each.issued() for each in self.classes]
            self._sample(self._runs)
        return self._runs

    def forget(self) -> None:
        """Keep what evaluations need: plans, and when hosts end."""
        if self._plans:
            self._runs = None
        if self._replayed is not None:
            self._replayed[1].forget()

    def samples_at(self, values: Mapping[str, int]) -> list[Node]:
        """The samples in other sizes."""
        found: dict[int, Node] = {}
        for inner, (numbers, nodes) in self._resizable.items():
            sized = nodes.at({**values, **dict(inner)})
            found.update(zip(numbers, sized, strict=True))
        return [found[i] for i in range(len(found))]

    @cached_property
    def _resizable(self) -> dict[Inner, tuple[list[int], Resizable]]:
        numbers: dict[Inner, list[int]] = {}
        for number, inner in enumerate(self._inner):
            numbers.setdefault(inner, []).append(number)
        return {i: (n, Resizable([self.samples[k] for k in n])) for i, n in numbers.items()}

    def numbers(self, shape: Shape) -> list[int]:
        """The samples that the nodes of a shape are like."""
        found = self._numbers.get(shape)
        if found is None:
            found = self._numbers[shape] = [self.number[step.node] for step in shape.steps]
        return found

    def plans(
        self,
        mesh: Mapping[str, int],
        *,
        overlap: bool,
        one_stream: bool,
        waiting: frozenset[int] = frozenset(),
    ) -> Plans:
        """The plans, where samples with the numbers `waiting` are messages that wait for their
        receivers. What waits has no paths."""
        key = overlap, one_stream, waiting
        if key not in self._plans:
            watched = Watched(mesh, self.decisions)
            how: dict[str, Any] = {"overlap": overlap, "one_stream": one_stream}
            if waiting:

                def waits(node: Node) -> bool:
                    return self.number[node] in waiting

                how["waits"] = waits
            plans = joined(self.classes, self.runs, watched, **how)
            self._plans[key] = Plans(plans, None if waiting else self.numbers)
        return self._plans[key]

    def late_hosts(
        self,
        mesh: Mapping[str, int],
        spent: HostTimes,
        devices: Sequence[ClassReplay],
        *,
        overlap: bool,
        one_stream: bool,
    ) -> Replayed | None:
        """The replay of hosts that spend so much time; None if they are surely never behind these
        devices, which is looked at the first time. Who asks again, for other sizes, gets a replay:
        it is kept, and the same for all. Hosts that compare what they call wait for each
        collective."""
        how = overlap and not spent.checks, one_stream
        if self._replayed is not None and self._replayed[0] == (spent, how):
            return self._replayed[1]
        first, self._asked = not self._asked, True
        if first and not spent.checks and never_late(devices, spent):
            return None
        plans = self.plans(mesh, overlap=how[0], one_stream=one_stream)
        cost = 0, partial(host_costs, spent)
        self._replayed = (spent, how), Replayed(plans, [cost] * len(plans))
        return self._replayed[1]


class NodesOf(Generic[T]):
    """What a function finds of nodes, by their `numbers` among the samples; found once for those
    that are alike."""

    def __init__(
        self,
        numbers: NodeNumbers,
        samples: Sequence[Node],
        of: Callable[[Node], T],
        known: Mapping[int, T],
    ) -> None:
        self.numbers, self._samples, self._of = numbers, samples, of
        self._found = {**known}

    def __call__(self, shape: Shape, /) -> list[T]:
        """What it finds of the nodes of a shape."""
        return self.numbered(self.numbers(shape))

    def numbered(self, numbers: Sequence[int], /) -> list[T]:
        """What it finds of the samples of these numbers."""
        found, of, samples = self._found, self._of, self._samples
        try:
            return [found[i] for i in numbers]
        except KeyError:
            found.update((i, of(samples[i])) for i in {*numbers} - found.keys())
            return [found[i] for i in numbers]


class Issued:
    """What the ranks of a job issue, whatever the machine: classes, their runs and their ranks.

    `samples` are nodes in the sizes of the job, one for each that does something else; nodes of
    runs and plans may be those of the same programs in other sizes.
    """

    def __init__(self, programs: _Programs, mesh: Mapping[str, int], samples: list[Node]) -> None:
        self._programs, self.mesh, self.samples = programs, mesh, samples

    @classmethod
    def of(cls, module: Module) -> Issued:
        """What the ranks of a lowered module issue. Raises `DiagnosticError` if a size is open."""
        programs, mesh = _Programs(module), module.mesh
        sizes = {a: n or 1 for a, n in mesh.sizes.items()} if mesh else {}
        return cls(programs, sizes, programs.samples)

    def at(self, values: Mapping[str, int]) -> Issued | None:
        """What the ranks issue for other values of all symbols and axes, with which the module was
        compiled alike; None if that are other programs, or sizes go by layers."""
        programs = self._programs
        if programs.by_layers or not programs.decisions.same(values):
            return None
        mesh = {a: values[a] for a in self.mesh}
        return Issued(programs, mesh, programs.samples_at(values))

    def forget(self) -> None:
        """Keep what evaluations need; what else is asked for is found again."""
        self._programs.forget()

    @property
    def size(self) -> int:
        """How many runs the programs have."""
        return self._programs.size

    @property
    def serves(self) -> bool:
        """Whether it is a step of serving."""
        return self._programs.serves

    @property
    def classes(self) -> Sequence[RankClass]:
        """The classes of ranks."""
        return self._programs.classes

    @property
    def runs(self) -> list[list[Run]]:
        """The runs of each class."""
        return self._programs.runs

    def each(
        self, of: Callable[[Node], T], known: Mapping[int, T] = MappingProxyType({})
    ) -> NodesOf[T]:
        """What a function finds of the nodes of a shape, in the sizes of the job. Of the samples of
        some numbers it is `known`."""
        return NodesOf(self._programs.numbers, self.samples, of, known)

    def plans(self, *, overlap: bool, one_stream: bool = False, eager: int | None = None) -> Plans:
        """The plans of all classes, where messages of more than `eager` bytes wait for their
        receivers; None: none does."""
        waiting = frozenset[int]()
        if eager is not None:
            sends = ((i, node) for i, node in enumerate(self.samples) if node.kind == "send")
            waiting = frozenset(i for i, node in sends if node.size > eager)
        how: dict[str, Any] = {"overlap": overlap, "one_stream": one_stream}
        return self._programs.plans(self.mesh, **how, waiting=waiting)

    def late_hosts(
        self,
        spent: Sequence[HostTimes],
        devices: Sequence[ClassReplay],
        *,
        overlap: bool,
        one_stream: bool = False,
    ) -> Replayed | None:
        """The replay of hosts that spend so much time and do nothing else: the same in all sizes.
        None if they are never behind these devices."""
        return self._programs.late_hosts(
            self.mesh, spent[0], devices, overlap=overlap, one_stream=one_stream
        )

    @property
    def jobs(self) -> Sequence[Issued]:
        """This one."""
        return [self]

    def between(self, machine: Machine) -> Mapping[str, Level]:
        """None: it is one job."""
        return {}

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
    collectives were matched, interpolated and modelled (`stagec.time.measured.tables`). Where
    hosts hold up the step, `classes` are those of hosts; `devices` are always those of devices."""

    picoseconds: int
    classes: Replayed
    ways: Mapping[int, int]
    devices: Replayed

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return self.picoseconds / PICOSECONDS

    @cached_property
    def slowest(self) -> ClassReplay:
        """The class that ends last; of several, the one that computes longest."""
        classes, ends = self.classes, self.classes.ends
        latest = max(ends)
        last = [i for i, end in enumerate(ends) if end == latest]
        return classes.alone(max(last, key=classes.computing))

    def parts(self, each: ClassReplay) -> dict[Part, int]:
        """Where the time of a class goes, in picoseconds that add up to the step; the largest
        first."""
        found = each.parts(self.picoseconds)
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


class IssuedStep(Protocol):
    """What the ranks of a step issue: those of one job, or of several pods."""

    @property
    def jobs(self) -> Sequence[Issued]:
        """The jobs, whose classes follow each other."""
        ...

    @property
    def mesh(self) -> Mapping[str, int]:
        """The axes of all jobs."""
        ...

    def between(self, machine: Machine) -> Mapping[str, Level]:
        """The levels of the network to pods that are among the jobs."""
        ...

    def plans(self, *, overlap: bool, one_stream: bool = False, eager: int | None = None) -> Plans:
        """The plans of all classes, where messages of more than `eager` bytes wait for their
        receivers; None: none does."""
        ...

    def late_hosts(
        self,
        spent: Sequence[HostTimes],
        devices: Sequence[ClassReplay],
        *,
        overlap: bool,
        one_stream: bool = False,
    ) -> Replayed | None:
        """The replay of hosts that spend so much time, by job; None if they are never late."""
        ...


def step_time(
    issued: IssuedStep,
    machine: Machine,
    *,
    overlap: bool = True,
    communicates: bool = True,
    graphs: bool = True,
    measured: Measurements | None = None,
    pods: Mapping[str, Level] = MappingProxyType({}),
) -> StepTime:
    """Replay a job on a machine. Without overlap all collectives are blocking; where nothing
    communicates, collectives and messages take no time. What is `measured` wins over models.
    `pods` has the levels of the network to pods that are not replayed; messages to one without a
    level take no time.

    There are two clocks, that of the devices and that of the hosts, which issue one computation
    after the other and wait for each other where the devices do. The step is the longer one.
    Engines capture steps of serving as `graphs`, each of which a host launches as a whole: it does
    not hold devices up. Without them it issues those as it does steps of training.

    Raises `DiagnosticError` for a type that the machine does not compute, ranks that its network
    does not join, and classes that wait for each other in a ring.
    """
    levels = {**pods, **issued.between(machine)}
    how: dict[str, Any] = {"overlap": overlap, "communicates": communicates}
    how |= {"measured": measured, "pods": levels}
    tables = [CostTable(machine, job.mesh, **how) for job in issued.jobs]
    costs = [
        ((number, key), of_shape)
        for number, (job, table) in enumerate(zip(issued.jobs, tables, strict=True))
        for key, of_shape in _costs(job, table)
    ]
    efficiency = machine.efficiency
    slowdown = round(efficiency.interference.computations * 1024)
    one_stream = efficiency.streams == "one"
    waiting = efficiency.rendezvous
    eager = waiting.above if waiting is not None and communicates else None
    plans = issued.plans(overlap=overlap, one_stream=one_stream, eager=eager)
    found = Replayed(plans, costs, slowdown, numbered=[of for _, of in costs])
    ways = sum((table.ways for table in tables), Counter[int]())
    devices = StepTime(found.end, found, ways, found)
    issue = picoseconds(efficiency.host.issue)
    spent = [
        HostTimes(0)
        if graphs and job.serves
        else HostTimes(issue, _checks(job, machine) if communicates else ())
        for job in issued.jobs
    ]
    if efficiency.kernels == "roofline" or not any(map(any, spent)):
        return devices
    hosts = issued.late_hosts(spent, devices.classes, overlap=overlap, one_stream=one_stream)
    if hosts is None or hosts.end <= found.end:
        return devices
    return StepTime(hosts.end, hosts, ways, found)


def _costs(job: Issued, table: CostTable) -> Iterator[tuple[Hashable, NodesOf[Cost]]]:
    """The costs of the classes of a job."""
    computations = table.prepare(job.samples)
    known: dict[int, NodesOf[Cost]] = {}
    for each, ranks in zip(job.classes, job.members, strict=True):
        key, cost = table.of_class(ranks, job.groups, each.groups, each.ways)
        yield key, known.setdefault(key, job.each(cost, computations))


def _checks(issued: Issued, machine: Machine) -> tuple[tuple[GroupAxes, int], ...]:
    """What hosts spend on a collective of each group, where they compare what they call."""
    levels = machine.efficiency.network
    if not any(level.check for level in levels.values()):
        return ()
    found: list[tuple[GroupAxes, int]] = []
    machine = machine.for_mesh(issued.mesh)
    for axes, members in issued.groups.members.items():
        over = spans(machine, np.sort(members[0]))
        reached = [0, *(span.size for span in over)]
        ranks = zip(over, pairwise(reached), strict=True)
        time = sum((b - a) * levels[span.level.name].check for span, (a, b) in ranks)
        found.append((axes, picoseconds(time)))
    return tuple(found)
