"""Timelines: the times of the nodes of some ranks of a job, and the base class of their formats.

A job has many ranks but few classes, and viewers can open some hundred thousand nodes. So ranks are
chosen: those of --only-ranks, all ranks of a small job, the first of each class of a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar

from stagec.formats.base import Estimate, JobFormat, Layout, Need, TraceJob
from stagec.ir.serving_step import DECODE
from stagec.machines import Level, Machine
from stagec.program.groups import GroupAxes, crosses_pods
from stagec.program.nodes import Events, Ints, Node
from stagec.support.diagnostics import error
from stagec.time.clock.intervals import NodeTimes, node_times
from stagec.time.clock.residency import ResidentBytes, residency
from stagec.time.clock.times import ClassTimes
from stagec.time.costs.network import level_between_pods
from stagec.time.costs.replay_options import ReplayOptions
from stagec.time.pods_step import IssuedPods
from stagec.time.step import Issued, StepTime, step_time
from stagec.time.streams import COMPUTE, Stream

#: The most nodes of all ranks in a file together: viewers can open about as many.
MOST_NODES = 500_000
#: The kind of an op of the host in recorded traces, and of its stream.
HOST = "host op"


@dataclass(frozen=True, slots=True)
class ShownRank:
    """A rank: the name of its class, the times of its nodes, and its bytes in memory, if known."""

    rank: int
    name: str
    times: NodeTimes
    memory: ResidentBytes | None = None


@dataclass(frozen=True)
class Timeline:
    """The timelines of ranks of a job: `chosen` has the class of each rank that is shown, in order.

    `mesh`, `name`, `times` and `memory` are functions of a class; `memory` may return None. `group`
    returns the name and the ranks of a collective's group on a rank, `peer` the peer of a message,
    and `way` a key that both ends of a message share, which distinguishes streams between two
    ranks.
    """

    mesh: Callable[[int], Mapping[str, int]]
    ranks: int
    device: str
    chosen: Mapping[int, int]
    name: Callable[[int], str]
    times: Callable[[int], NodeTimes]
    memory: Callable[[int], ResidentBytes | None]
    group: Callable[[Node, int], tuple[str, Sequence[int]]]
    peer: Callable[[Node, int], int]
    way: Callable[[Node, int], Hashable] = field(default=lambda node, rank: ())

    def traces(self) -> Iterator[ShownRank]:
        """The shown ranks, one by one; those of a class share its times."""
        return map(self.trace, self.chosen)

    def message(self, node: Node, rank: int, tag: int) -> Hashable | None:
        """A key that both ends of a message share; None if the other end is not shown."""
        other = self.peer(node, rank)
        ends = (rank, other) if node.kind == "send" else (other, rank)
        return (*ends, self.way(node, rank), tag) if other in self.chosen else None

    def trace(self, rank: int) -> ShownRank:
        """The data of one shown rank."""
        number = self.chosen[rank]
        return ShownRank(rank, self.name(number), self.times(number), self.memory(number))


def streams_in(times: NodeTimes) -> list[Stream]:
    """The streams of a rank: that of its computations first, the others in the order of use."""
    numbers: list[int] = times.kind.tolist()
    used = (times.kinds[number] for number in dict.fromkeys(numbers))
    streams = dict.fromkeys(stream for placed in used for stream in placed.streams)
    return sorted(streams, key=lambda stream: stream != COMPUTE)


# -- of jobs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """A replayed step of a job, or of one of its pods: its classes, its layout, the number of its
    first class, its start in picoseconds, and a prefix for the names of its classes. `span` is the
    time of devices, `end` that of the step, which hosts may delay."""

    issued: Issued
    classes: Sequence[ClassTimes]
    span: int
    end: int
    layout: Layout
    first: int = 0
    start: int = 0
    name: str = ""

    @classmethod
    def of(cls, issued: Issued, step: StepTime) -> Replay:
        """The replay of a job without pods."""
        times = step.devices, step.devices.end, step.picoseconds
        return cls(issued, *times, Layout(issued.mesh, issued.groups))


def replayed_timeline(
    replays: Sequence[Replay],
    chosen: Mapping[int, int],
    device: str,
    events: Callable[[int], Events | None],
) -> Timeline:
    """The timeline of replayed steps; `events` returns the memory events of a class, if they are
    known."""

    def of(number: int) -> Replay:
        return next(each for each in reversed(replays) if each.first <= number)

    @lru_cache(maxsize=2)
    def times(number: int) -> NodeTimes:
        each = of(number)
        place = number - each.first
        moments = node_times(each.issued.programs[place], each.classes[place])
        moments = moments.spread(each.span, each.end)
        return moments._replace(start=moments.start + each.start, end=moments.end + each.start)

    @lru_cache(maxsize=2)
    def memory(number: int) -> ResidentBytes | None:
        changes = events(number)
        return None if changes is None else residency(changes, times(number))

    def peer(node: Node, rank: int) -> int:
        return of(chosen[rank]).layout.peer(rank, *node.way)

    def way(node: Node, rank: int) -> Hashable:
        if crosses_pods(node.op):  # these messages have different tags
            return ""
        return node.over, node.by % of(chosen[rank]).layout.mesh[node.over]

    def name(number: int) -> str:
        each = of(number)
        return each.name + each.issued.classes[number - each.first].name

    return Timeline(
        lambda number: of(number).layout.mesh,
        sum(each.issued.groups.ranks for each in replays),
        device,
        dict(sorted(chosen.items())),
        name,
        times,
        memory,
        lambda node, rank: _group(of(chosen[rank]).layout, node.group, rank),
        peer,
        way,
    )


def _group(layout: Layout, axes: GroupAxes, rank: int) -> tuple[str, Sequence[int]]:
    groups = layout.groups
    return str(groups.of_rank(axes, rank)), groups.row(axes, rank).tolist()


def count_nodes(classes: Sequence[ClassTimes]) -> list[int]:
    """The nodes per rank of each class."""
    return [*map(len, classes)]


def first_ranks(
    members: Sequence[Ints], classes: Sequence[ClassTimes], end: int, room: int | None
) -> dict[int, int]:
    """The first rank of each class of a step that ends at `end`, ordered by how long they are busy,
    the longest first, as long as they have at most `room` nodes together."""
    counts, ranks, left = count_nodes(classes), dict[int, int](), room
    busy = [each.busy_time(end) for each in classes]
    for number in sorted(range(len(busy)), key=lambda number: -busy[number]):
        if left is not None:
            left -= counts[number]
            if ranks and left < 0:
                break
        ranks[int(members[number][0])] = number
    return ranks


def classes_of(members: Sequence[Ints]) -> dict[int, int]:
    """The class of each rank."""
    return {rank: number for number, ranks in enumerate(members) for rank in ranks.tolist()}


# -- formats ---------------------------------------------------------------------------------------


#: The last job that was replayed, with its replays, which several formats of one compile share.
_last: dict[str, tuple[tuple[object, ...], list[Replay]]] = {}


def replays_of(job: TraceJob) -> list[Replay]:
    """The replayed step of a job, or the steps of its pods: those of parts run concurrently; that
    of the decode pod starts after the others, when all caches have arrived. Raises
    `DiagnosticError` without a model and a machine."""
    models, machine = job.models, job.machine
    if not models or machine is None:
        raise error("a timeline needs the model and a machine", remedy="compile it with --machine")
    asked = machine, *(p for m in models for p in (m.module, m.measured, m.graphs))
    before = _last.get("")
    if before is None or [*map(id, before[0])] != [*map(id, asked)]:
        issued = {model.pod: Issued.of(model.module) for model in models}
        layouts = {pod: job.layout_of(number) for pod, number in _first(issued).items()}
        how = ReplayOptions(graphs=models[0].graphs, measured=models[0].measured)
        before = _last[""] = asked, replayed(issued, layouts, machine, how)
    return before[1]


def _first(issued: Mapping[str, Issued]) -> dict[str, int]:
    counts = [len(each.classes) for each in issued.values()]
    return dict(zip(issued, accumulate([0, *counts[:-1]]), strict=True))


def replayed(
    issued: Mapping[str, Issued],
    layouts: Mapping[str, Layout],
    machine: Machine,
    how: ReplayOptions,
) -> list[Replay]:
    """The replayed steps of pods: concurrent, except that of the decode pod, which starts after the
    others. Raises `DiagnosticError` if the machine cannot run them."""
    first, levels = _first(issued), dict[str, Level]()
    ahead = {pod: each for pod, each in issued.items() if pod != DECODE}
    other_pods = {
        pod: {
            n: [ranks - layouts[n].start for ranks in met] for n, met in layout.other_pods.items()
        }
        for pod, layout in layouts.items()
    }
    if DECODE in issued:
        levels[DECODE] = level_between_pods(machine, [each.mesh for each in issued.values()])
    together = IssuedPods(ahead, other_pods) if len(ahead) > 1 else next(iter(ahead.values()))
    step = step_time(together, machine, how, pods=levels)
    replays: list[Replay] = []
    for pod, each in issued.items():
        begins, mine, at = 0, step, first[pod]
        if pod == DECODE:
            begins, mine, at = step.picoseconds, step_time(each, machine, how), 0
        classes = mine.devices[at : at + len(each.classes)]
        about = layouts[pod], first[pod], begins, f"{pod}/" if len(issued) > 1 else ""
        replays.append(Replay(each, classes, mine.devices.end, mine.picoseconds, *about))
    return replays


@dataclass(frozen=True)
class TimelineFormat(JobFormat):
    """Base class of formats for timelines, with the times of `stagec time`. `ranks` is `all`, or
    `classes` for the first rank of each class."""

    ranks: str = ""
    needs: ClassVar[frozenset[Need]] = frozenset({"machine", "model"})
    pods: ClassVar[bool] = True
    #: The approximate number of bytes per node.
    node_bytes: ClassVar[int] = 0
    #: Whether all ranks are in one file, whose size viewers limit.
    one_file: ClassVar[bool] = True

    def check(self, job: TraceJob) -> None:
        if self.ranks not in ("", "all", "classes"):
            raise error(
                f"option 'ranks' of format '{self.name}' expects all or classes, found "
                f"'{self.ranks}'",
                remedy="name ranks with --only-ranks 0-7",
            )

    def estimate(self, job: TraceJob, ranks: Ints | None) -> Estimate:
        chosen, nodes, why = self._chosen(job, ranks)
        text = f"{len(chosen)} of {job.layout.groups.ranks} ranks{why}, {nodes:,} nodes"
        if any(each.span < each.end for each in replays_of(job)):
            text += "; hosts hold up the step, and the gaps between kernels are theirs"
        return Estimate(nodes * self.node_bytes, text)

    def timeline(self, job: TraceJob, ranks: Ints | None) -> Timeline:
        """The timeline of the chosen ranks. Raises `DiagnosticError` for more nodes than viewers
        can open."""
        machine = job.machine
        chosen, nodes, _ = self._chosen(job, ranks)
        if self.one_file and len(chosen) > 1 and nodes > MOST_NODES:
            raise too_many(f"the format '{self.name}'", nodes, len(chosen))
        replays = replays_of(job)
        counts = _counts(replays)

        def events(number: int) -> Events | None:
            program = job.program(number)
            return program.events if len(program) == counts[number] else None

        device = machine.title if machine is not None else ""
        return replayed_timeline(replays, chosen, device, events)

    def _chosen(self, job: TraceJob, ranks: Ints | None) -> tuple[dict[int, int], int, str]:
        """The chosen ranks with their classes, the number of their nodes, and the reason for the
        choice."""
        replays = replays_of(job)
        counts, of = _counts(replays), classes_of(job.members)
        every = sum(len(m) * n for m, n in zip(job.members, counts, strict=True))
        why = ""
        if ranks is not None:
            chosen = {rank: of[rank] for rank in ranks.tolist() if rank in of}
        elif self.ranks == "all" or (not self.ranks and every <= MOST_NODES):
            chosen = of
        else:
            chosen = dict[int, int]()
            for each in replays:
                room = MOST_NODES // len(replays) if self.one_file else None
                members = job.members[each.first :]
                more = first_ranks(members, each.classes, each.span, room)
                chosen |= {rank: each.first + number for rank, number in more.items()}
            why = ", the first of each class (--only-ranks names others)"
            if left := len(job.members) - len(chosen):
                why = (
                    f", the first of the busiest classes, without {left} (--only-ranks names them)"
                )
        return chosen, sum(counts[number] for number in chosen.values()), why


def too_many(what: str, nodes: int, ranks: int) -> Exception:
    """The error for more nodes than viewers can open."""
    return error(
        f"{what}: {nodes:,} nodes, but viewers open about {MOST_NODES:,}",
        remedy=f"choose {MOST_NODES * ranks // nodes} of the {ranks} ranks, or fewer",
    )


def _counts(replays: Sequence[Replay]) -> list[int]:
    """The nodes per rank of each class of all replays."""
    return [count for each in replays for count in count_nodes(each.classes)]


def microseconds(picoseconds: int) -> str:
    """The exact decimal of a time in microseconds."""
    return f"{picoseconds // 10**6}.{picoseconds % 10**6:06d}"


def joined(parts: Iterable[str]) -> Iterator[bytes]:
    """Texts as bytes, in blocks of about a megabyte."""
    waiting: list[str] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= 1 << 20:
            yield "".join(waiting).encode()
            waiting, size = [], 0
    yield "".join(waiting).encode()
