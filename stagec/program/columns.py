"""Columns of a program: collects nodes and instances of templates while a graph is unrolled, and
sorts them into their final order at the end.

This module also adds the control dependencies that keep each stream in order: the computations, the
collectives, the copies of each direction, the sends to each rank and the receives from each rank.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from stagec.program.buckets import Bucketed, with_buckets
from stagec.program.nodes import Ints, Node, Program
from stagec.program.stamp import Inputs, StepInstance, Template, edge_ends


class Columns:
    """The nodes of a program by handle. The handles of nodes other than buckets increase in the
    order of issue."""

    def __init__(self) -> None:
        self._prototypes: list[Node] = []
        self._plain: dict[int, tuple[Node, int]] = {}
        self._bases: list[int] = []
        self._instances: list[StepInstance] = []
        self._uses: dict[Template, _Use] = {}
        self._next = 0

    def add_node(self, node: Node) -> None:
        """Add a node outside of templates, and set its `id` to its handle."""
        node.id, self._next = self._next, self._next + 1
        self._plain[node.id] = node, len(self._prototypes)
        self._prototypes.append(node)

    def add_instance(
        self,
        inputs: Inputs,
        sources: Sequence[StepInstance | None],
        microbatches: Sequence[int],
        sent: Sequence[int],
    ) -> StepInstance:
        """Add an instance of a template; `inputs` and `sources` say which nodes its placeholders
        represent, `sent` how many messages there are before it in each of its streams."""
        template, base = inputs.template, self._next
        instance = StepInstance(inputs, sources, base, microbatches, sent)
        use = self._uses.get(template)
        if use is None:
            use = self._uses[template] = _Use(len(self._prototypes))
            self._prototypes += template.nodes
        use.instances.append(instance)
        self._bases.append(base)
        self._instances.append(instance)
        self._next = base + len(template.nodes)
        return instance

    def node(self, handle: int) -> Node:
        """The node with a handle; for a node of an instance, a copy without edges."""
        if handle in self._plain:
            return self._plain[handle][0]
        instance = self._instances[bisect_right(self._bases, handle) - 1]
        return instance.node(handle - instance.base)

    def program(
        self,
        name: str,
        order: Sequence[Node | StepInstance],
        bucketed: Sequence[Bucketed | StepInstance],
    ) -> Program:
        """The program with its nodes in their final order."""
        facts = _Facts(self._next)
        facts.put_nodes(self._plain.values())
        for template, use in self._uses.items():
            facts.put_instances(template, use)
        issued = with_buckets(_issued(order), list(cut_buckets(bucketed)))
        issued = _as_sent(issued, self._prototypes, facts)
        place = np.zeros(self._next, dtype=np.int64)
        place[issued] = np.arange(1, len(issued) + 1)
        prototype = facts.prototype[issued]
        sources, targets, control = facts.edges()
        streams = stream_edges(self._prototypes, prototype)
        starts, middle, edges = sorted_edges(
            len(issued),
            np.concatenate([place[sources], streams[0]]),
            np.concatenate([place[targets], streams[1]]),
            np.concatenate([control, np.ones(len(streams[0]), dtype=np.int64)]),
        )
        columns = prototype, facts.microbatch[issued], facts.tag[issued]
        return Program(name, self._prototypes, *columns, starts, middle, edges)


@dataclass(frozen=True, slots=True)
class _Use:
    """A template's instances, and the index of its first node among the prototypes."""

    first_prototype: int
    instances: list[StepInstance] = field(default_factory=list[StepInstance])


class _Facts:
    """The attributes of nodes by handle, and all edges."""

    def __init__(self, count: int) -> None:
        self.prototype = np.zeros(count, dtype=np.int64)
        self.microbatch = np.zeros(count, dtype=np.int64)
        self.tag = np.zeros(count, dtype=np.int64)
        self._parts: list[tuple[Ints, Ints, Ints]] = []

    def put_nodes(self, numbered: Collection[tuple[Node, int]]) -> None:
        """Enter the nodes outside of templates, each with its prototype, and their edges."""
        nodes = [node for node, _ in numbered]
        handles = np.array([node.id for node in nodes], dtype=np.int64)
        self.prototype[handles] = [prototype for _, prototype in numbered]
        self.tag[handles] = [node.tag for node in nodes]
        for control, edges in enumerate(([n.deps for n in nodes], [n.after for n in nodes])):
            sources = np.repeat(handles, np.array([*map(len, edges)], dtype=np.int64))
            targets = np.array([end.id for ends in edges for end in ends], dtype=np.int64)
            self._parts.append((sources, targets, np.full(len(targets), control, dtype=np.int64)))

    def put_instances(self, template: Template, use: _Use) -> None:
        """Enter all instances of a template."""
        nodes, instances = template.nodes, use.instances
        if not nodes or not instances:
            return
        bases = np.array([i.base for i in instances], dtype=np.int64)[:, None]
        handles = bases + np.arange(len(nodes))
        self.prototype[handles] = use.first_prototype + np.arange(len(nodes))
        of = template.columns
        numbers = np.array([[*i.microbatches, 0] for i in instances], dtype=np.int64)
        self.microbatch[handles] = numbers[:, of.slots]
        if len(of.messages):
            sent = np.array([[*i.sent, 0] for i in instances], dtype=np.int64)
            tags = of.tags + sent[:, of.streams] * template.channels
            tags += numbers[:, of.slots[of.messages]] * of.crossing
            self.tag[bases + of.messages] = tags
        if len(of.sources):
            ends = edge_ends(template, instances, bases)
            row = np.broadcast_to(of.control, ends.shape)
            self._parts.append(((bases + of.sources).ravel(), ends.ravel(), row.ravel()))

    def edges(self) -> tuple[Ints, Ints, Ints]:
        """All edges as three arrays: the sources, the targets, and 0 for data or 1 for control."""
        columns = zip(*self._parts, strict=True)
        sources, targets, control = (np.concatenate(column) for column in columns)
        return sources, targets, control


def _as_sent(issued: Ints, prototypes: Sequence[Node], facts: _Facts) -> Ints:
    """Move the receives of caches from another pod to the start of the step, in the order in which
    they are sent. The sender runs through its layers for each of its microbatches, sends the parts
    of each layer, and finally the token that it has sampled:

        two microbatches there, one here    mb0: k0 v0 k1 v1    mb1: k0 v0 k1 v1
        one there, two here                 k0 of mb0, mb1, v0 of mb0, mb1, k1 ...

    The caches are complete before the step, so these receives have no dependencies.
    """
    prototype = facts.prototype[issued]
    splits = np.array([cache_splits(node) for node in prototypes], dtype=np.int64)[prototype]
    early = np.flatnonzero(splits)
    if not len(early):
        return issued
    streams = np.array([n.op.integer("streams", 1) if n.op else 1 for n in prototypes])
    part, layer = np.divmod(facts.tag[issued[early]], streams[prototype[early]])
    _, first, number = np.unique(layer, return_index=True, return_inverse=True)
    last = np.array([n.op is not None and n.op.flag("last") for n in prototypes])[prototype[early]]
    turn, split = np.divmod(part, splits[early])
    order = early[np.lexsort((split, first[number], last, turn))]
    return np.concatenate([issued[order], np.delete(issued, early)])


def cache_splits(node: Node) -> int:
    """For a receive of a cache, the number of microbatches here per microbatch of the sender; 0 for
    other nodes."""
    op = node.op
    return op.integer("splits", 0) if node.kind == "recv" and op is not None else 0


def _issued(order: Sequence[Node | StepInstance]) -> Ints:
    first = np.array([t.id if isinstance(t, Node) else t.base for t in order], dtype=np.int64)
    lengths = [1 if isinstance(t, Node) else t.template.ordered for t in order]
    number = np.array(lengths, dtype=np.int64)
    skipped = first - (np.cumsum(number) - number)  # handles of buckets
    each: Ints = np.arange(int(number.sum()), dtype=np.int64)
    each += np.repeat(skipped, number)
    return each


def cut_buckets(bucketed: Sequence[Bucketed | StepInstance]) -> Iterator[tuple[int, int | None]]:
    """The handle of each bucket, and that of the node that completes it, or None."""
    for cut in bucketed:
        if isinstance(cut, StepInstance):
            yield from cut.buckets()
        else:
            for node, ready in zip(cut.nodes, cut.ready, strict=True):
                yield node.id, None if ready is None else ready.id


def stream_edges(prototypes: Sequence[Node], prototype: Ints) -> tuple[Ints, Ints]:
    """The edges that keep each stream in order, by final identifiers. The first are those between
    blocking collectives and computations."""
    ways: dict[tuple[str, str, int], int] = {}
    kind = np.array([_stream(n, ways) for n in prototypes], dtype=np.int64)[prototype]
    identifiers = np.arange(1, len(kind) + 1)
    computations = identifiers[kind == 0]
    blocking = identifiers[kind == 3]
    before = np.searchsorted(computations, blocking)
    follows = before > 0
    sources, targets = [blocking[follows]], [computations[before[follows] - 1]]
    latest = np.searchsorted(blocking, computations) - 1
    previous = np.concatenate([[0], computations[:-1]])[: len(computations)]
    waited = np.where(latest >= 0, blocking[latest] if len(blocking) else 0, 0)
    waits = waited > previous
    sources.append(computations[waits])
    targets.append(waited[waits])
    stream = np.where(kind == 3, 1, kind).astype(np.int16)
    order = np.argsort(stream, kind="stable")
    same = stream[order[1:]] == stream[order[:-1]]
    sources.append(order[1:][same] + 1)
    targets.append(order[:-1][same] + 1)
    return np.concatenate(sources), np.concatenate(targets)


def _stream(node: Node, ways: dict[tuple[str, str, int], int]) -> int:
    """The number of a node's stream: 0 for computations, 1 for collectives (3 if they are
    blocking), 4 and 5 for copies to the host and to the device. From 6 on, messages have one for
    each rank that is sent to or received from; the caches that go to another pod, or come from it,
    have one for all its ranks."""
    if node.is_copy:
        return 4 if node.to == "host" else 5
    if node.is_message:
        caches = node.op is not None and "splits" in node.op.attrs
        by = 0 if caches else node.by
        return ways.setdefault((node.kind, node.over, by), 6 + len(ways))
    return 0 if node.is_computation else 1 + 2 * node.blocking


def sorted_edges(
    count: int, sources: Ints, targets: Ints, control: Ints
) -> tuple[Ints, Ints, Ints]:
    """Sort edges by source, data before control, without duplicates. Returns the columns `starts`,
    `control` and `edges` of a `Program`."""
    order = np.argsort(2 * sources + control, kind="stable")
    sources, targets, control = sources[order], targets[order], control[order]
    first = np.zeros(len(order), dtype=bool)
    first[np.unique(sources * (count + 1) + targets, return_index=True)[1]] = True
    sources, targets, control = sources[first], targets[first], control[first]
    numbers = np.bincount(2 * sources + control, minlength=2 * count + 2)[2:]
    bounds = np.concatenate([[0], np.cumsum(numbers)])
    return bounds[::2], bounds[1::2], targets
