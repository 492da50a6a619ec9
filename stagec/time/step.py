"""The time of a training step on a machine, and where it goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.module import Module
from stagec.ir.queries import Queries, TrackedValues, plain
from stagec.ir_spec.strategy.hosts import NEVER
from stagec.machines import Level, Machine
from stagec.program.buckets import contents, readiness
from stagec.program.classes import RankClass, rank_classes
from stagec.program.groups import GroupAxes, Groups
from stagec.program.nodes import Ints, Node, Program
from stagec.program.sizes import OpNumbers, what_it_does
from stagec.time.clock.graph import ClassIssue, ClassNodes, StepGraph, step_graph
from stagec.time.clock.hosts import HostTimes, delay_kernels
from stagec.time.clock.join import issues_of
from stagec.time.clock.times import ClassTimes, ClockedStep, NodeCosts
from stagec.time.costs.network import spans
from stagec.time.costs.nodes import CostTable, PodEnd, picoseconds
from stagec.time.costs.on_mesh import OnMesh
from stagec.time.costs.replay_options import USUAL, ReplayOptions
from stagec.time.costs.software import Software
from stagec.time.streams import BUBBLE, LAUNCH, PICOSECONDS, SCHEDULER, TRAINER, Cost, Part

#: Programs of more nodes are not kept once the graph is built, but unrolled again when needed. A
#: node takes 55 bytes.
_MANY = 1_000_000
#: Coordinates that sizes depend on.
Inner = tuple[tuple[str, int], ...]


class _Programs:
    """The programs of a job, for all sizes in which they consist of the same nodes: `decisions`
    records the questions about sizes on which they depend. `samples` are the nodes that differ in
    what they do, or in the coordinates that their sizes depend on. `numbers` has, for each class,
    the samples that its prototypes equal, and for each prototype its place among these."""

    def __init__(self, module: Module) -> None:
        self.decisions, before = Queries(), module.decisions
        module.decisions = self.decisions
        try:
            self.classes = rank_classes(module)
            self._programs: list[Program] | None = [each.program() for each in self.classes]
            self.meets = [(each.groups, each.ways) for each in self.classes]
        finally:
            module.decisions = before
        self.by_layers = bool(module.loads)
        self.software = Software.of(module)
        self.samples: list[Node] = []
        self._inner: list[Inner] = []
        self._sizes = OpNumbers({})
        self.numbers = self._numbered()
        self.size = sum(map(len, self.programs))
        self._graphs: dict[Hashable, StepGraph] = {}
        self._hosts: tuple[Hashable, ClockedStep] | None = None
        self._on_mesh: OnMesh | None = None

    def on(self, mesh: Mapping[str, int]) -> OnMesh:
        """What the classes have on a mesh; that of the last mesh is kept."""
        if self._on_mesh is None or self._on_mesh.mesh != mesh:
            self._on_mesh = OnMesh(self.classes, mesh)
        return self._on_mesh

    def _numbered(self) -> list[tuple[list[int], Ints]]:
        known: dict[Hashable, int] = {}
        runs: dict[Hashable, int] = {}  # nodes of one operation do the same
        numbered: list[tuple[list[int], Ints]] = []
        for each, program in zip(self.classes, self.programs, strict=True):
            inner = tuple(each.inner.items())
            where = each.name if self.by_layers else inner
            inside = cache(partial(_contents, plain(each.env)))
            numbers: list[int] = []
            for node in program.prototypes:
                run = where, node.op or node, node.by, node.index
                number = runs.get(run)
                if number is None:
                    key = (where, node.op) if self.by_layers else inner, what_it_does(node, inside)
                    number = runs[run] = known.setdefault(key, len(known))
                    if number == len(self.samples):
                        self.samples.append(node)
                        self._inner.append(inner)
                numbers.append(number)
            used, place = np.unique(numbers, return_inverse=True)
            numbered.append((used.tolist(), place))
        return numbered

    @property
    def programs(self) -> list[Program]:
        """The program of each class; unrolled again after `forget`."""
        if self._programs is None:
            self._programs = [each.program() for each in self.classes]
        return self._programs

    def forget(self) -> None:
        """Keep what evaluations need: graphs, and the ends of hosts."""
        if self._graphs and self._programs is not None:
            for each, program in zip(self.classes, self._programs, strict=True):
                each.templates.clear()
                for node in program.prototypes:
                    node.deps = node.after = ()  # columns have them
            self._programs = None
        if self._hosts is not None:
            self._hosts[1].forget()

    def samples_at(self, values: Mapping[str, int]) -> list[Node]:
        """The samples for other values of symbols and axes."""
        numbers = {i: self._sizes.at({**values, **dict(i)}) for i in set(self._inner)}
        each = zip(self.samples, self._inner, strict=True)
        return [numbers[inner].resized(node) for node, inner in each]

    def issues(self, mesh: Mapping[str, int]) -> list[ClassIssue]:
        """What the classes issue, and the classes that they meet."""
        return issues_of(self.classes, self.programs, TrackedValues(mesh, self.decisions))

    def graph(self, mesh: Mapping[str, int], waiting: frozenset[int], **how: Any) -> StepGraph:
        """The graph, in which messages like the samples `waiting` (by number) wait for their
        receivers."""
        key = waiting, *how.items()
        if key not in self._graphs:
            late = self.nodes_like(waiting)
            self._graphs[key] = step_graph(self.issues(mesh), waits=late.__contains__, **how)
            if self.size > _MANY:
                self._programs = None
        return self._graphs[key]

    def nodes_like(self, samples: frozenset[int]) -> set[Node]:
        """The prototypes that equal one of these samples, given by number."""
        if not samples:
            return set()
        nodes: set[Node] = set()
        for program, (used, place) in zip(self.programs, self.numbers, strict=True):
            like = zip(program.prototypes, place.tolist(), strict=True)
            nodes |= {node for node, i in like if used[i] in samples}
        return nodes

    def hosts(self, spent: HostTimes, graph: StepGraph) -> ClockedStep:
        """The clock of hosts that spend these times, which is the same in all sizes."""
        if self._hosts is None or self._hosts[0] != (spent, graph):
            times = ClockedStep(graph, host_costs(graph, [spent] * len(graph.classes)))
            self._hosts = (spent, graph), times
        return self._hosts[1]


def _contents(values: Mapping[str, int], op: Operation) -> Sequence[Hashable]:
    """The contents of the buckets of a reduction."""
    return contents(op, readiness(op), values)


def host_costs(graph: StepGraph, spent: Sequence[HostTimes]) -> NodeCosts:
    """The costs of nodes for the hosts of each class."""
    runs: dict[tuple[HostTimes, object], int] = {}  # nodes of one operation cost the same
    rows: list[Cost] = []
    places: list[int] = []
    for nodes, times in zip(graph.classes, spent, strict=True):
        for node in (placed.node for placed in nodes.prototypes):
            place = runs.setdefault((times, node.op or node), len(rows))
            if place == len(rows):
                rows.append(times.cost(node))
            places.append(place)
    return NodeCosts.of(rows).take(np.array(places, dtype=np.int64))


class Issued:
    """What the ranks of a job issue, independent of the machine: classes, programs and ranks.

    `samples` are the distinct nodes in the sizes of this job; the nodes of `programs` may have the
    sizes of another job with the same programs. `software` is what the strategy states about times.
    """

    def __init__(
        self,
        programs: _Programs,
        mesh: Mapping[str, int],
        samples: list[Node],
        software: Software | None = None,
    ) -> None:
        self._programs, self.mesh, self.samples = programs, mesh, samples
        self.software = software or programs.software

    @classmethod
    def of(cls, module: Module) -> Issued:
        """What the ranks of a lowered module issue. Raises `DiagnosticError` if a size is open."""
        programs = _Programs(module)
        return cls(programs, module.axis_sizes, programs.samples)

    def at(self, values: Mapping[str, int]) -> Issued | None:
        """What the ranks issue for other values of all symbols and axes, for which the module
        compiles to the same operations; None if their programs differ, or sizes differ between
        layers."""
        programs = self._programs
        if programs.by_layers or not programs.decisions.same(values):
            return None
        mesh = {a: values[a] for a in self.mesh}
        return Issued(programs, mesh, programs.samples_at(values))

    def run_by(self, software: Software) -> Issued:
        """The same, run by other software."""
        return Issued(self._programs, self.mesh, self.samples, software)

    def forget(self) -> None:
        """Keep what evaluations need; all else is computed again when it is needed."""
        self._programs.forget()

    @property
    def size(self) -> int:
        """The number of nodes of all programs."""
        return self._programs.size

    @property
    def classes(self) -> Sequence[RankClass]:
        """The classes of ranks."""
        return self._programs.classes

    @property
    def programs(self) -> list[Program]:
        """The program of each class. The sizes of its nodes may be those of another job."""
        return self._programs.programs

    def issues(self) -> list[ClassIssue]:
        """What the classes issue, and whom they meet."""
        return self._programs.issues(self.mesh)

    def graph(
        self, *, overlap: bool, one_stream: bool = False, eager: int | None = None
    ) -> StepGraph:
        """The graph of all classes, where messages of more than `eager` bytes wait for their
        receivers; None: none does."""
        how = {"overlap": overlap, "one_stream": one_stream}
        return self._programs.graph(self.mesh, self._waiting(eager), **how)

    def waiting(self, eager: int | None) -> set[Node]:
        """The prototypes of messages that wait for their receivers."""
        return self._programs.nodes_like(self._waiting(eager))

    def _waiting(self, eager: int | None) -> frozenset[int]:
        if eager is None:
            return frozenset()
        sends = ((i, node) for i, node in enumerate(self.samples) if node.kind == "send")
        return frozenset(i for i, node in sends if node.size > eager)

    def costs(self, table: CostTable) -> NodeCosts:
        """The costs of the prototypes of all classes, computed once for each sample."""
        computations = table.prepare(self.samples)
        of = self._programs
        pairs, places = self._on_mesh.costed(of.samples, of.numbers, table)
        table.prepare_collectives((self.samples[i], distances) for distances, i in pairs)
        rows = [
            computations[i] if i in computations else table.cost(self.samples[i], distances)
            for distances, i in pairs
        ]
        return NodeCosts.of(rows).take(places)

    def executed(self, number: int, nodes: ClassNodes, of: Callable[[Node], int]) -> int:
        """The sum of a figure over all nodes that the compute stream of a class runs, in the sizes
        of this job. `number` is that of the class in the job."""
        used, place = self._programs.numbers[number]
        counts = np.bincount(place, nodes.computed, len(used)).astype(np.int64).tolist()
        return sum(count * of(self.samples[i]) for i, count in zip(used, counts, strict=True))

    def hosts(self, spent: Sequence[HostTimes], graph: StepGraph) -> ClockedStep:
        """The clock of hosts that spend these times; `spent` has one entry."""
        return self._programs.hosts(spent[0], graph)

    @property
    def jobs(self) -> Sequence[Issued]:
        """This job alone."""
        return [self]

    def between(self, machine: Machine) -> Mapping[str, Level]:
        """Empty, since there is one job."""
        return {}

    def elsewhere(self, machine: Machine, own: Machine) -> Mapping[str, PodEnd]:
        """Empty, since there is one job."""
        return {}

    @cached_property
    def _on_mesh(self) -> OnMesh:
        return self._programs.on(self.mesh)

    @property
    def members(self) -> list[Ints]:
        """The ranks of each class."""
        return self._on_mesh.members

    @property
    def groups(self) -> Groups:
        """The numbered communicator groups."""
        return self._on_mesh.groups


@dataclass(frozen=True)
class StepTime:
    """The time of a step.

    `classes` are the clocks that determine it: those of hosts where they hold up the step, else
    those of devices, which are always in `devices`. `ways` counts how many kernels and collectives
    were matched, interpolated and modelled (`stagec.time.measured.tables`). `scheduler` is the
    share of `picoseconds` in which devices wait for the scheduler of a server, or for a trainer;
    `behind` is its name. `request` is what a request takes outside of its steps, in picoseconds.
    """

    picoseconds: int
    classes: ClockedStep
    ways: Mapping[int, int]
    devices: ClockedStep
    scheduler: int = 0
    request: int = 0
    behind: Part = SCHEDULER

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return self.picoseconds / PICOSECONDS

    @cached_property
    def slowest(self) -> ClassTimes:
        """The class that ends last; of several, the one with most time of computations."""
        classes = self.classes
        last = [i for i, end in enumerate(classes.ends) if end == classes.end]
        return classes[max(last, key=classes.computing)]

    @property
    def waits_for_hosts(self) -> bool:
        """Whether hosts hold up the step: they issue more slowly than devices run."""
        return self.classes is not self.devices

    def parts(self, each: ClassTimes) -> dict[Part, int]:
        """Where the time of a class goes, in picoseconds that add up to the step; the largest
        first. Where hosts hold up the step, it is what the device does, and launch gaps are all
        that it waits for its host."""
        step = self.picoseconds - self.scheduler
        times = {**each.parts(step), self.behind: self.scheduler}
        if self.waits_for_hosts:
            device = self.devices[each.number].parts(step)
            idle = device.pop(BUBBLE, 0)
            bubble = min(times.get(BUBBLE, 0), idle)
            gaps = device.get(LAUNCH, 0) + idle - bubble
            times = {**device, LAUNCH: gaps, BUBBLE: bubble, self.behind: self.scheduler}
        times = {part: time for part, time in times.items() if time}
        return dict(sorted(times.items(), key=lambda item: (-item[1], item[0])))


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
        """The levels of the network between those of the jobs that are pods."""
        ...

    def elsewhere(self, machine: Machine, own: Machine) -> Mapping[str, PodEnd]:
        """The ends of messages of a job on its `own` machine to pods on other ones."""
        ...

    def graph(
        self, *, overlap: bool, one_stream: bool = False, eager: int | None = None
    ) -> StepGraph:
        """The graph of all classes, where messages of more than `eager` bytes wait for their
        receivers; None: none does."""
        ...

    def hosts(self, spent: Sequence[HostTimes], graph: StepGraph) -> ClockedStep:
        """The clock of hosts that spend these times; `spent` has one entry for each job."""
        ...


def step_time(
    issued: IssuedStep,
    machine: Machine,
    replay: ReplayOptions = USUAL,
    *,
    communicates: bool = True,
    hosts: bool = True,
    pods: Mapping[str, Level] = MappingProxyType({}),
    table: Callable[..., CostTable] = CostTable,
) -> StepTime:
    """Replay a job on a machine. Without `communicates`, collectives and messages take no time.
    `pods` has the levels of the network to pods that are not replayed; messages to a pod without a
    level take no time. `table` constructs the cost table of a job. Jobs may have machines of their
    own (`stg.machine`); streams, interference and rendezvous are those of `machine`.

    There are two clocks: that of the devices, and that of the hosts, which issue one computation
    after the other and wait for each other where the devices do. The step takes as long as the
    slower of them. A host launches a captured step of serving as a whole (`Software.is_graph`), so
    it does not hold devices up; without `replay.graphs` it issues the step op by op. Without
    `hosts`, hosts take no time. A host that waits for its device (`stg.hosts[waits = ...]`) also
    adds gaps to the clock of the devices. Behind a step devices wait for the scheduler of the
    engine (`stg.hosts[step = ..., scheduler = ...]`), or for the trainer (`between`).

    Raises `DiagnosticError` for a type that the machine does not compute, ranks that its network
    does not join, and classes that wait for each other in a ring.
    """
    costed = partial(table, replay=replay, communicates=communicates)
    machines = [job.software.machine_of(machine) for job in issued.jobs]
    tables = [
        costed(
            own,
            mesh=job.mesh,
            software=job.software,
            pods={**pods, **issued.between(own)},
            elsewhere=issued.elsewhere(machine, own),
        )
        for job, own in zip(issued.jobs, machines, strict=True)
    ]
    efficiency = machine.efficiency
    waiting = efficiency.rendezvous
    graph = issued.graph(
        overlap=replay.overlap,
        one_stream=efficiency.streams == "one",
        eager=waiting.above if waiting is not None and communicates else None,
    )
    columns = zip(*map(Issued.costs, issued.jobs, tables), strict=True)
    costs = NodeCosts(*map(np.concatenate, columns))
    spent = [
        HostTimes(0)
        if not hosts or (replay.graphs and job.software.is_graph)
        else _spent(job, own, communicates)
        for job, own in zip(issued.jobs, machines, strict=True)
    ]
    if any(each.waits != NEVER for each in spent):
        of_jobs = zip(issued.jobs, spent, strict=True)
        costs = delay_kernels(graph, costs, [times for job, times in of_jobs for _ in job.classes])
    devices = ClockedStep(graph, costs, round(efficiency.interference.computations * 1024))
    ways = sum((table.ways for table in tables), Counter[int]())
    software = [job.software for job in issued.jobs]
    request = max(picoseconds(each.request_seconds) for each in software)

    def behind(clocked: ClockedStep) -> StepTime:
        """The step with the time that devices wait behind it."""
        end = clocked.end / PICOSECONDS
        wait = max(picoseconds(each.waiting_seconds(end)) for each in software)
        name = SCHEDULER if software[0].serving else TRAINER
        return StepTime(clocked.end + wait, clocked, ways, devices, wait, request, name)

    alone = behind(devices)
    if efficiency.kernels == "roofline" or not any(map(any, spent)):
        return alone
    checks = any(each.checks for each in spent)  # hosts that compare what they call wait for it
    overlap = replay.overlap and not checks
    graph = issued.graph(overlap=overlap, one_stream=efficiency.streams == "one")
    clocked = issued.hosts(spent, graph)
    if clocked.end <= devices.end:
        clocked.forget()
        return alone
    return behind(clocked)


def _spent(issued: Issued, machine: Machine, communicates: bool) -> HostTimes:
    """The times that the hosts of a job spend on a machine."""
    rule = issued.software.hosts
    backward = rule.issue_backward_seconds
    product = rule.product_seconds if machine.family == "blackwell" else None
    return HostTimes(
        picoseconds(issued.software.on(machine).efficiency.host.issue),
        _checks(issued, machine) if communicates else (),
        None if backward is None else picoseconds(backward),
        rule.waits,
        picoseconds(rule.microbatch_seconds),
        None if product is None else picoseconds(product),
        rule.product_bits,
    )


def _checks(issued: Issued, machine: Machine) -> tuple[tuple[GroupAxes, int], ...]:
    """Picoseconds that hosts spend on a collective of each group, where they compare their calls
    (`check` of a level, in seconds for each rank)."""
    levels = machine.efficiency.network
    if not any(level.check for level in levels.values()):
        return ()
    checks: list[tuple[GroupAxes, int]] = []
    machine = machine.for_mesh(issued.mesh)
    for axes, members in issued.groups.members.items():
        over = spans(machine, np.sort(members[0]))
        reached = [0, *(span.size for span in over)]
        ranks = zip(over, pairwise(reached), strict=True)
        time = sum((b - a) * levels[span.level.name].check for span, (a, b) in ranks)
        checks.append((axes, picoseconds(time)))
    return tuple(checks)
