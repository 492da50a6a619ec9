"""Checks of the program of one rank, independent of its peers: ids, dependencies, order.

A program is analysed once for all ranks that share it; groups and peers are numbered by first
occurrence ("slots"), so that ranks which differ in nothing else have the same program.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise

from stagec.check.nodes import NodeProblem, Severity, node_problems
from stagec.formats.chakra.nodes import AttrValue, NodeKind, TraceNode


@dataclass(frozen=True, slots=True)
class IssuedCall:
    """A collective or one end of a message in a program: the index of its node, what both sides
    have to agree on (the `CollKind` of a collective, the tag of a message), and its bytes."""

    index: int
    what: int
    size: int

    @property
    def content(self) -> tuple[int, int]:
        """What the other ranks have to issue too."""
        return self.what, self.size


#: The collectives or messages of a program by the slot of their group or peer, in order of issue.
BySlot = Mapping[int, tuple[IssuedCall, ...]]


@dataclass(frozen=True, slots=True)
class TraceProgram:
    """The nodes of a rank in file order, with the slots of their groups and peers by index."""

    nodes: tuple[TraceNode, ...]
    group_slots: Mapping[int, int]
    peer_slots: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Analysis:
    """The properties of a program that the comparison of ranks uses.

    `deps` are node indices. `collectives`, `sends` and `receives` are listed by slot, in the order
    in which the rank issues them: by dependencies, then by node id. `valid` is false if the
    dependencies are not an acyclic graph. `unordered` has, by slot, two sends to a peer, or two
    receives from it, that dependencies do not order.
    """

    program: TraceProgram
    deps: tuple[tuple[int, ...], ...]
    valid: bool
    problems: tuple[NodeProblem, ...]
    collectives: BySlot
    sends: BySlot
    receives: BySlot
    unordered: Mapping[int, tuple[int, int]]


def analyse(program: TraceProgram) -> Analysis:
    """Check a program by itself and collect its communication by slot."""
    nodes = program.nodes
    problems = [problem for node in nodes for problem in node_problems(node)]
    graph_problems = list(_graph_problems(nodes))
    deps = _indexed_deps(nodes)
    order = issue_order(nodes, deps)
    if len(order) < len(nodes):
        graph_problems.append(_cycle_problem(nodes, deps, order))
        order += sorted(set(range(len(nodes))) - set(order))
    valid = not any(p.code in _INVALID for p in graph_problems)
    kinds = (NodeKind.COLL, NodeKind.SEND, NodeKind.RECV)
    collectives, sends, receives = (_by_slot(program, order, kind) for kind in kinds)
    unordered: dict[int, tuple[int, int]] = {}
    if valid:
        for slot, messages in (*sends.items(), *receives.items()):
            pair = first_unordered(deps, order, [m.index for m in messages])
            if pair is not None:
                unordered[slot] = pair
        problems += _unordered_collectives(program, deps, order)
        channels = (*sends.values(), *receives.values())
        problems += _unordered_messages(program, deps, order, channels)
    every = (*graph_problems, *problems)
    if is_recorded(nodes):
        every = tuple(replace(p, severity=Severity.GAP) if p.code in _GAPS else p for p in every)
    return Analysis(program, deps, valid, every, collectives, sends, receives, unordered)


_INVALID = frozenset({"duplicate-id", "missing-dependency", "dependency-cycle"})
#: Problems that are gaps in recorded traces: recorders omit parents of nodes and the costs of
#: operations, and let a host operation wait for the kernels that it launched.
_GAPS = frozenset(
    {
        *("missing-dependency", "missing-attribute", "dependency-cycle", "no-start"),
        *("metadata-node", "unsupported-collective"),
    }
)


def is_recorded(nodes: Iterable[TraceNode]) -> bool:
    """Whether a trace was recorded from a run: it contains operations of the host, which simulators
    do not need."""
    ran = (NodeKind.COMP, NodeKind.COLL)
    return any(node.kind in ran and node.attrs.get("is_cpu_op") is True for node in nodes)


def issue_order(nodes: Sequence[TraceNode], deps: Sequence[tuple[int, ...]]) -> list[int]:
    """Node indices in topological order, by id among ready nodes. Nodes on or behind a cycle are
    left out."""
    waiting = [len(sources) for sources in deps]
    users = _users(deps)
    ready = [(node.id, index) for index, node in enumerate(nodes) if not waiting[index]]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heappop(ready)
        order.append(index)
        for user in users[index]:
            waiting[user] -= 1
            if not waiting[user]:
                heappush(ready, (nodes[user].id, user))
    return order


def _users(deps: Sequence[tuple[int, ...]]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in deps]
    for index, sources in enumerate(deps):
        for source in sources:
            users[source].append(index)
    return users


def _indexed_deps(nodes: Sequence[TraceNode]) -> tuple[tuple[int, ...], ...]:
    index_of = {node.id: index for index, node in enumerate(nodes)}
    sources = ((index_of[d] for d in _deps(node) if d in index_of) for node in nodes)
    return tuple(tuple(dict.fromkeys(each)) for each in sources)


def _deps(node: TraceNode) -> tuple[int, ...]:
    return (*node.data_deps, *node.ctrl_deps)


def _graph_problems(nodes: Sequence[TraceNode]) -> Iterator[NodeProblem]:
    counts = Counter(node.id for node in nodes)
    for node_id, count in counts.items():
        if count > 1:
            message = f"expected one node with id {node_id}, found {count}"
            remedy = "number the nodes of a rank uniquely"
            yield NodeProblem(node_id, "duplicate-id", message, remedy)
    for node in nodes:
        for dep in _deps(node):
            if dep not in counts:
                message = f"{node.label} depends on node {dep}, which is not in the file"
                remedy = "drop the dependency or write the node"
                yield NodeProblem(node.id, "missing-dependency", message, remedy)
    if not nodes:
        message = "expected at least one node, found only the metadata"
        yield NodeProblem(None, "no-nodes", message, "give an idle rank one node of minimal work")
    elif all(map(_deps, nodes)):
        message = "expected a node without dependencies to start with, found none"
        yield NodeProblem(None, "no-start", message, "remove the dependencies of the first node")


def _cycle_problem(
    nodes: Sequence[TraceNode], deps: Sequence[tuple[int, ...]], order: Sequence[int]
) -> NodeProblem:
    stuck = set(range(len(nodes))) - set(order)
    seen: dict[int, None] = {}
    index = min(stuck)
    while index not in seen:
        seen[index] = None
        index = next(source for source in deps[index] if source in stuck)
    cycle = [*seen][[*seen].index(index) :]
    path = " waits for ".join(nodes[i].label for i in [*cycle, index])
    message = f"expected dependencies without a cycle, found {path}"
    remedy = "remove one of these dependencies"
    return NodeProblem(nodes[index].id, "dependency-cycle", message, remedy)


def _by_slot(program: TraceProgram, order: Sequence[int], kind: NodeKind) -> BySlot:
    """The communication of one kind by the slot of its group or peer, in the order of issue."""
    calls = kind == NodeKind.COLL
    slots, about = (program.group_slots, "comm_type") if calls else (program.peer_slots, "comm_tag")
    by_slot: dict[int, list[IssuedCall]] = defaultdict(list)
    for index in order:
        node = program.nodes[index]
        if node.kind == kind and index in slots:
            facts = (_integer(node.attrs, name) for name in (about, "comm_size"))
            by_slot[slots[index]].append(IssuedCall(index, *facts))
    return {slot: tuple(each) for slot, each in by_slot.items()}


def _integer(attrs: Mapping[str, AttrValue], name: str) -> int:
    value = attrs.get(name)
    return value if isinstance(value, int) else 0


def _unordered_collectives(
    program: TraceProgram, deps: Sequence[tuple[int, ...]], order: Sequence[int]
) -> Iterator[NodeProblem]:
    every = [index for index in order if program.nodes[index].kind == NodeKind.COLL]
    across = first_unordered(deps, order, every)
    if across is None:
        return
    for slot in sorted(set(program.group_slots.values())):
        own = [i for i in every if program.group_slots.get(i) == slot]
        inside = first_unordered(deps, order, own)
        if inside is not None:
            yield _unordered(program, "unordered-in-group", inside, "two collectives of one group")
    if program.group_slots.get(across[0]) != program.group_slots.get(across[1]):
        what = "two collectives of different groups"
        yield _unordered(program, "unordered-across-groups", across, what)


def _unordered_messages(
    program: TraceProgram,
    deps: Sequence[tuple[int, ...]],
    order: Sequence[int],
    channels: Sequence[tuple[IssuedCall, ...]],
) -> Iterator[NodeProblem]:
    for channel in channels:
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for message in channel:
            alike[message.content].append(message.index)
        for indices in alike.values():
            pair = _first_swappable(program.nodes, deps, order, indices)
            if pair is not None:
                what = "two messages of the same peer, tag and size"
                yield _unordered(program, "unordered-messages", pair, what)


def _unordered(program: TraceProgram, code: str, pair: tuple[int, int], what: str) -> NodeProblem:
    first, second = (program.nodes[index] for index in pair)
    message = (
        f"expected dependencies to order {what}, found {first.label} and {second.label} free to "
        "swap; ranks that choose differently deadlock"
    )
    remedy = f"add a control dependency of node {second.id} on node {first.id}"
    if code == "unordered-messages":
        remedy += ", or give them different tags"
    return NodeProblem(second.id, code, message, remedy, Severity.WARNING)


def first_unordered(
    deps: Sequence[tuple[int, ...]], order: Sequence[int], chosen: Sequence[int]
) -> tuple[int, int] | None:
    """The first two successive nodes in `chosen` of which the second does not depend on the first.

    `chosen` is a subsequence of `order`, which is topological.
    """
    rank = {index: number for number, index in enumerate(chosen, start=1)}
    if len(rank) < 2:
        return None
    longest = [0] * len(deps)
    for index in order:
        best = 0
        for source in deps[index]:
            best = max(best, longest[source])
        if index in rank:
            best += 1
            if best != rank[index]:
                return chosen[rank[index] - 2], index
        longest[index] = best
    return None


def _first_swappable(
    nodes: Sequence[TraceNode],
    deps: Sequence[tuple[int, ...]],
    order: Sequence[int],
    chosen: Sequence[int],
) -> tuple[int, int] | None:
    """The first two successive nodes in `chosen` that a simulator may issue in either order.

    A simulator issues ready nodes in order of id, so a node that is ready no later than another and
    has the lower id goes first even without a dependency.
    """
    if first_unordered(deps, order, chosen) is None:
        return None
    marks = [0] * len(deps)
    bit = {source: 1 << number for number, source in enumerate(_barriers(deps, chosen))}
    for index in order:
        mask = bit.get(index, 0)
        for source in deps[index]:
            mask |= marks[source]
        marks[index] = mask
    for first, second in pairwise(chosen):
        ready = all(marks[second] & bit[source] for source in deps[first])
        follows = marks[second] & bit[first]
        if not follows and not (ready and nodes[first].id < nodes[second].id):
            return first, second
    return None


def _barriers(deps: Sequence[tuple[int, ...]], chosen: Sequence[int]) -> dict[int, None]:
    return dict.fromkeys(i for index in chosen for i in (index, *deps[index]))
