"""Templates of the steps of a schedule, and their instances.

The nodes of a step are the same for every microbatch, except for their inputs, the numbers of
messages and the number of the microbatch. A step is unrolled once, with placeholders for its
inputs; an instance is the template and a table of the nodes that the placeholders represent.

Nodes are identified by handles: an instance has a contiguous range of them, in the order of the
template.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from stagec.ir.core import Operation, Region, Value
from stagec.program.buckets import Bucketed
from stagec.program.groups import crosses_pods, tag_step
from stagec.program.nodes import MICROBATCH, Ints, Node, Ref, Stack, marker_of

#: The shape of a value: None, NODE, or a tuple of the index of a stack's last item and the shapes
#: of its items.
Shape: TypeAlias = "str | tuple[object, ...] | None"
NODE = "node"
#: In place of a source or shape: an earlier part of the same step produces the value.
INSIDE = "inside"
#: A stream of messages in one direction: `send` or `recv`, and the number of the channel.
Stream = tuple[str, int]


@dataclass(frozen=True, slots=True)
class StampedValue:
    """A value that an instance produces: its shape, and the indices of its nodes in the instance's
    table."""

    shape: Shape
    instance: StepInstance
    places: Sequence[int]

    @property
    def handles(self) -> list[int]:
        """The handles of its nodes."""
        return [self.instance.handle(place) for place in self.places]


ValueRef = Ref | StampedValue


@dataclass(frozen=True, eq=False)
class RegionUse:
    """A region that runs many times, without the operations `skip`: the values that it produces
    outside (`results`), and the value that it yields for each. It captures the values `inside`, as
    the region refers to them. Equal actions share a region: `outside` maps values that the region
    uses to those that they represent outside."""

    body: Region
    results: Sequence[Value]
    yielded: Sequence[Value]
    inside: Sequence[Value]
    skip: frozenset[Operation] = frozenset()
    outside: Mapping[Value, Value] = field(default_factory=dict[Value, Value])

    def __bool__(self) -> bool:
        """Whether it has any operation to run or result."""
        return bool(self.results) or any(op not in self.skip for op in self.body.ops[:-1])

    @cached_property
    def captured(self) -> tuple[Value, ...]:
        """The values that it captures, as they exist outside, in the order of `inside`."""
        return tuple(self.outside.get(value, value) for value in self.inside)

    @cached_property
    def places(self) -> Mapping[Value, int]:
        """The index of each of its results."""
        return {value: place for place, value in enumerate(self.results)}

    @cached_property
    def looks_back(self) -> bool:
        """Whether it may depend on earlier computations. Receives that are posted early do not."""
        ops = (op for op in self.body.ops[:-1] if op not in self.skip)
        return any(op.name != "et.recv" or op.flag("overlapped") for op in ops)


@dataclass(frozen=True, slots=True, eq=False)
class TemplatePart:
    """One execution of a region in a step. `slot` is the index of its microbatch, `action` that of
    its action among those of the step."""

    seen: RegionUse
    prefix: str
    slot: int
    action: int

    @property
    def key(self) -> Hashable:
        """A key that is different for parts of different templates of the graph."""
        seen = self.seen
        return seen.body.owner, seen.skip, self.prefix, self.slot, self.action


class Frontier(NamedTuple):
    """The earlier computations that a step may depend on: the last one, the last matrix product and
    the one right before that, in order, and whether each is a matrix product. `places` are indices
    in a table, or handles."""

    places: tuple[int, ...]
    products: tuple[bool, ...]

    @classmethod
    def of(cls, nodes: Iterable[tuple[int, bool]]) -> Frontier:
        """From pairs of a place and whether it is a matrix product."""
        rows = list(nodes)
        return cls(tuple(place for place, _ in rows), tuple(product for _, product in rows))


NO_FRONT = Frontier((), ())


@dataclass(frozen=True, slots=True, eq=False)
class PartValues:
    """The values that one part of a template produces: the shape of each, and its indices in the
    table of an instance."""

    values: Sequence[tuple[Shape, Sequence[int]]]


class NodeColumns(NamedTuple):
    """What the nodes of a template have in all instances. `slots` are the indices of their
    microbatches in the step, -1 without one. `messages` are the nodes with tags: their `tags`, the
    index of their `stream` in `Template.sent` (behind its end: none), and the number of tags of a
    microbatch (`crossing`). `sources` and `places` are the ends of all edges, the latter in the
    table of an instance; `control` is 0 for data, 1 for control."""

    slots: Ints
    messages: Ints
    tags: Ints
    streams: Ints
    crossing: Ints
    sources: Ints
    places: Ints
    control: Ints


@dataclass(eq=False)
class Template:
    """A step that is unrolled once for all classes that run it.

    Nodes are identified by their index. `nodes[:ordered]` are in the order of issue; the rest are
    buckets, which are inserted into the order later.

    Edges lead to indices in the table of an instance, which contains the `outside` inputs and then
    the nodes. `made` has for each part of the step the values that it produces. `buckets` has for
    each bucket its index and that of the node that completes it. `sent` is the number of messages
    in each stream, `channels` the number of channels of the job. `front` is None if it has too few
    computations to determine the frontier.
    """

    nodes: list[Node]
    ordered: int
    outside: int
    made: list[PartValues]
    buckets: list[tuple[int, int | None]]
    sent: Mapping[Stream, int]
    channels: int
    computations: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    front: Frontier | None = None

    def __post_init__(self) -> None:
        ordered = enumerate(self.nodes[: self.ordered])
        self.computations = [(i, bool(n.matmul)) for i, n in ordered if n.is_computation][::-1]
        front, complete = front_of(iter(self.computations))
        if complete:
            self.front = Frontier.of((self.outside + i, product) for i, product in front)

    @cached_property
    def columns(self) -> NodeColumns:
        """What its nodes have in all instances."""
        nodes, numbers = self.nodes, {stream: i for i, stream in enumerate(self.sent)}
        marks = [marker_of(n.name) for n in nodes]
        messages = [n for n in nodes if n.is_message]
        within = (None if crosses_pods(n.op) else (n.kind, n.tag % self.channels) for n in messages)
        deps = [(n.id, self.place(other)) for n in nodes for other in n.deps]
        after = [(n.id, self.place(other)) for n in nodes for other in n.after]
        sources, places = np.array([*deps, *after], dtype=np.int64).reshape(-1, 2).T
        columns = (
            [MICROBATCH.index(mark) if mark else -1 for mark in marks],
            [n.id for n in messages],
            [n.tag for n in messages],
            [len(numbers) if stream is None else numbers[stream] for stream in within],
            [tag_step(n.op) for n in messages],
            sources,
            places,
            np.repeat([0, 1], [len(deps), len(after)]),
        )
        return NodeColumns(*(np.array(column, dtype=np.int64) for column in columns))

    def place(self, node: Node) -> int:
        """The index of a node, or of a placeholder, in the table."""
        return -node.id - 1 if node.id < 0 else self.outside + node.id


class Stamped(NamedTuple):
    """The values that one part of an instance produces."""

    instance: StepInstance
    origin: PartValues

    def values(self) -> Iterator[StampedValue]:
        """The values of the part, in order."""
        for shape, places in self.origin.values:
            yield StampedValue(shape, self.instance, places)


class Inputs:
    """The origin of each placeholder of a template, shared by all steps whose sources are instances
    of the same templates. An origin is the index of a source and an index in its table, or None and
    a handle."""

    def __init__(self, template: Template, origins: Sequence[tuple[int | None, int]]) -> None:
        self.template, self.origins = template, origins

    @cached_property
    def _rows(self) -> Sequence[tuple[int | None, Ints, Ints]]:
        """The origins grouped by source: the source, its placeholders, and their indices in its
        table."""
        rows: dict[int | None, list[tuple[int, int]]] = {}
        for where, (source, place) in enumerate(self.origins):
            rows.setdefault(source, []).append((where, place))
        tables = ((s, np.array(pairs, dtype=np.int64)) for s, pairs in rows.items())
        return [(source, table[:, 0], table[:, 1]) for source, table in tables]

    def handles(self, instances: Sequence[StepInstance]) -> Ints:
        """The handles that the placeholders represent in these instances, a row each. All instances
        have sources of the same templates."""
        handles = np.empty((len(instances), self.template.outside), dtype=np.int64)
        for source, where, places in self._rows:
            made = [] if source is None else [m for i in instances if (m := i.sources[source])]
            if not made:
                handles[:, where] = places
                continue
            first = made[0].template.outside
            bases = np.array([m.base for m in made], dtype=np.int64)[:, None]
            handles[:, where] = bases + places - first
            for given in np.flatnonzero(places < first).tolist():
                handles[:, where[given]] = [m.handle(int(places[given])) for m in made]
        return handles


@dataclass(slots=True, eq=False)
class StepInstance:
    """One use of a template in the program. Its own nodes have the handles from `base` on, its
    `inputs` come from `sources`. Its table contains the handles of its inputs, and then those of
    its own nodes. `sent` is the number of earlier messages in each stream of the template."""

    inputs: Inputs
    sources: Sequence[StepInstance | None]
    base: int
    microbatches: Sequence[int]
    sent: Sequence[int]
    _nodes: dict[int, Node] | None = None

    @property
    def template(self) -> Template:
        """Its template."""
        return self.inputs.template

    def handle(self, place: int) -> int:
        """The handle at an index of the table. An input may be an input of its source too."""
        instance = self
        while place < instance.inputs.template.outside:
            source, place = instance.inputs.origins[place]
            outer = None if source is None else instance.sources[source]
            if outer is None:
                return place
            instance = outer
        return instance.base + place - instance.inputs.template.outside

    def node(self, place: int) -> Node:
        """A copy, without edges, of the node at an index of the template."""
        if self._nodes is None:
            self._nodes = {}
        if place not in self._nodes:
            original = self.template.nodes[place]
            self._nodes[place] = replace(original, deps=(), after=(), id=self.base + place)
        return self._nodes[place]

    def computations(self) -> Iterator[tuple[StepInstance, int, bool]]:
        """The indices of its computations, last one first, and whether each is a matrix product."""
        return ((self, place, product) for place, product in self.template.computations)

    def buckets(self) -> Iterator[tuple[int, int | None]]:
        """The handle of each bucket, and that of the node that completes it, or None."""
        for place, ready in self.template.buckets:
            yield self.base + place, None if ready is None else self.handle(ready)


def edge_ends(template: Template, instances: Sequence[StepInstance], bases: Ints) -> Ints:
    """The handles to which the edges of instances of a template lead: a row per instance. `bases`
    is the column of their first handles."""
    places, first = template.columns.places, template.outside
    ends: Ints = bases + (places - first)
    if (given := np.flatnonzero(places < first)).size:
        rows: dict[Inputs, list[int]] = {}
        for row, instance in enumerate(instances):
            rows.setdefault(instance.inputs, []).append(row)
        for inputs, mine in rows.items():
            handles = inputs.handles([instances[row] for row in mine])
            ends[np.array(mine)[:, None], given] = handles[:, places[given]]
    return ends


T = TypeVar("T")


def front_of(computations: Iterator[tuple[T, bool]]) -> tuple[list[tuple[T, bool]], bool]:
    """The `Frontier` of computations that are passed last one first: the last one, the last matrix
    product and the one right before that, in order; and whether all of them exist. It does not
    matter whether the one before the product is a product too: it is marked as none, so that steps
    which differ only in that share a template."""
    front: list[tuple[T, bool]] = []
    for which, product in computations:
        if front and front[-1][1]:
            return [(which, False), *front[::-1]], True
        if not front or product:
            front.append((which, product))
    return front[::-1], False


def shape_of(ref: Ref) -> Shape:
    """The shape of a value."""
    if isinstance(ref, Stack):
        return (ref.last, *(shape_of(i) for i in ref.items))
    return None if ref is None else NODE


def leaves(ref: Ref) -> Iterator[Node]:
    """The nodes of a value, depth first."""
    if isinstance(ref, Stack):
        for inner in ref.items:
            yield from leaves(inner)
    elif ref is not None:
        yield ref


def flat(ref: ValueRef) -> tuple[Shape, Sequence[int]]:
    """The shape of a value and the handles of its nodes."""
    if isinstance(ref, StampedValue):
        return ref.shape, ref.handles
    return shape_of(ref), [n.id for n in leaves(ref)]


def build(shape: Shape, nodes: Iterator[Node]) -> Ref:
    """The value of a shape that consists of these nodes."""
    if shape is None:
        return None
    if isinstance(shape, tuple):
        last, items = cast("int", shape[0]), cast("tuple[Shape, ...]", shape[1:])
        return Stack([build(s, nodes) for s in items], last)
    return next(nodes)


class Placeholders:
    """An endless iterator of placeholder nodes for successive indices of a table."""

    def __init__(self) -> None:
        self.given: list[Node] = []

    def __iter__(self) -> Iterator[Node]:
        return self

    def __next__(self) -> Node:
        self.given.append(Node("", "", "", 0, id=-len(self.given) - 1))
        return self.given[-1]


def make_template(
    ordered: list[Node],
    bucketed: Sequence[Bucketed],
    made: Sequence[Sequence[Ref]],
    outside: int,
    sent: Mapping[Stream, int],
    channels: int,
) -> Template:
    """The template of nodes that were unrolled with `outside` placeholders."""
    nodes = [*ordered, *(n for cut in bucketed for n in cut.nodes)]
    for place, node in enumerate(nodes):
        node.id = place
    template = Template(nodes, len(ordered), outside, [], [], sent, channels)
    for values in made:
        template.made.append(PartValues([(shape_of(r), _places(template, r)) for r in values]))
    for cut in bucketed:
        for node, ready in zip(cut.nodes, cut.ready, strict=True):
            template.buckets.append((node.id, None if ready is None else template.place(ready)))
    return template


def _places(template: Template, ref: Ref) -> list[int]:
    return [template.place(n) for n in leaves(ref)]
