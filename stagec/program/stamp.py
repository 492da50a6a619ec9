"""Templates of the steps of a schedule, and their instances.

What a step makes is the same for every microbatch, up to the nodes that it takes from outside, the
numbers of its messages and of the microbatch. It is unrolled once, with placeholders for what comes
from outside; an instance is the template and a table of what the placeholders stand for.

Nodes are known by handles: an instance owns a range of them, in the order of the template.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from stagec.ir.alike import captured
from stagec.ir.core import Operation, Region, Value
from stagec.program.buckets import Bucketed
from stagec.program.nodes import Ints, Node, Ref, Stack

#: Shape of a value: None, a node, or a stack of shapes with the index of its last item.
Shape: TypeAlias = "str | tuple[object, ...] | None"
NODE = "node"
#: A value that an earlier part of the same step makes.
INSIDE = "inside"
#: Which end of messages, and the number of their channel.
Stream = tuple[str, int]


@dataclass(frozen=True, slots=True)
class StampedValue:
    """A value that an instance made: its shape, and where its nodes are in the instance's table."""

    shape: Shape
    instance: StepInstance
    places: Sequence[int]

    @property
    def handles(self) -> list[int]:
        """The nodes of the value."""
        return [self.instance.handle(place) for place in self.places]


ValueRef = Ref | StampedValue


@dataclass(frozen=True, eq=False)
class RegionUse:
    """A region without the operations to `skip`, that is run again and again: the values that it
    makes, and what it yields for each. Actions that are alike have one region: `outside` are the
    values that stand for some of those that it takes."""

    body: Region
    results: Sequence[Value]
    yielded: Sequence[Value]
    skip: frozenset[Operation] = frozenset()
    outside: Mapping[Value, Value] = field(default_factory=dict[Value, Value])

    def __bool__(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.results) or any(op not in self.skip for op in self.body.ops[:-1])

    @cached_property
    def inside(self) -> tuple[Value, ...]:
        """What it takes from outside, as it is called in the region."""
        return captured(self.body, self.skip)

    @cached_property
    def captured(self) -> tuple[Value, ...]:
        """What it takes from outside, as it is called there."""
        return tuple(self.outside.get(value, value) for value in self.inside)

    @cached_property
    def places(self) -> Mapping[Value, int]:
        """Where each of its results is among them."""
        return {value: place for place, value in enumerate(self.results)}

    @cached_property
    def looks_back(self) -> bool:
        """Whether it may refer to computations before it, as receives that are posted do not."""
        ops = (op for op in self.body.ops[:-1] if op not in self.skip)
        return any(op.name != "et.recv" or op.flag("overlapped") for op in ops)


@dataclass(frozen=True, slots=True, eq=False)
class TemplatePart:
    """One run of a region in a step. `slot` distinguishes the microbatches of the step, `action`
    the actions."""

    seen: RegionUse
    prefix: str
    slot: int
    action: int

    @property
    def key(self) -> Hashable:
        """What distinguishes it from the parts of other templates of the graph."""
        seen = self.seen
        return seen.body.owner, seen.skip, self.prefix, self.slot, self.action


class Frontier(NamedTuple):
    """What is seen of the computations before a step: the last one, the last matrix product and the
    one right before that, in order, and whether each is a matrix product. They are `places` in a
    table, or handles."""

    places: tuple[int, ...]
    products: tuple[bool, ...]

    @classmethod
    def of(cls, nodes: Iterable[tuple[int, bool]]) -> Frontier:
        """From a row for each."""
        rows = list(nodes)
        return cls(tuple(place for place, _ in rows), tuple(product for _, product in rows))


NO_FRONT = Frontier((), ())


@dataclass(slots=True, eq=False)
class Template:
    """A step unrolled once, whatever class runs it.

    Nodes are identified by their place; `nodes[:ordered]` are in the order of issue, the rest are
    buckets, whose place comes later.

    Edges lead to places in the table of an instance: what comes from outside, then the nodes.
    `front` is what later nodes refer to of its computations, if these are all in it. `channels` are
    those of the job, of which the messages `sent` use some.
    """

    nodes: list[Node]
    ordered: int
    outside: int
    made: list[list[tuple[Shape, Sequence[int]]]]
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

    def stream(self, node: Node) -> Stream:
        """The stream of a message of it."""
        return node.kind, node.tag % self.channels

    def place(self, node: Node) -> int:
        """Where a node, or a placeholder, is in the table."""
        return -node.id - 1 if node.id < 0 else self.outside + node.id


class Stamped(NamedTuple):
    """What a part of an instance made; `origin` is the same for all instances of the template."""

    instance: StepInstance
    part: int
    origin: tuple[Template, int]

    def values(self) -> Iterator[StampedValue]:
        """The values of it, in order."""
        for shape, places in self.instance.template.made[self.part]:
            yield StampedValue(shape, self.instance, places)


class Inputs:
    """What the placeholders of a template stand for, in all steps that take the same from instances
    of the same templates: a place in the table of one of the instances that a step takes from, by
    the number of that, or a handle by None."""

    def __init__(self, template: Template, origins: Sequence[tuple[int | None, int]]) -> None:
        self.template, self.origins = template, origins

    @cached_property
    def _rows(self) -> Sequence[tuple[int | None, Ints, Ints]]:
        """The origins in rows: those of one source, the placeholders, and the places of these."""
        rows: dict[int | None, list[tuple[int, int]]] = {}
        for where, (source, place) in enumerate(self.origins):
            rows.setdefault(source, []).append((where, place))
        tables = ((s, np.array(pairs, dtype=np.int64)) for s, pairs in rows.items())
        return [(source, table[:, 0], table[:, 1]) for source, table in tables]

    def handles(self, instances: Sequence[StepInstance]) -> Ints:
        """What they stand for in these steps, a row each. What all take from a source is made by
        one template."""
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
    """A template at one place of the program: its own nodes have the handles from `base` on, its
    `inputs` come from `sources`. Its table has the handles of what comes from outside, and then
    those of its own nodes."""

    inputs: Inputs
    sources: Sequence[StepInstance | None]
    base: int
    microbatches: Sequence[int]
    tags: Mapping[Stream, int]
    _nodes: dict[int, Node] | None = None

    @property
    def template(self) -> Template:
        """What it is an instance of."""
        return self.inputs.template

    def handle(self, place: int) -> int:
        """One handle of the table. What it was given may have been given to its source as well."""
        instance = self
        while place < instance.inputs.template.outside:
            source, place = instance.inputs.origins[place]
            outer = None if source is None else instance.sources[source]
            if outer is None:
                return place
            instance = outer
        return instance.base + place - instance.inputs.template.outside

    def node(self, place: int) -> Node:
        """A node that stands for the one at a place of the template."""
        if self._nodes is None:
            self._nodes = {}
        if place not in self._nodes:
            original = self.template.nodes[place]
            self._nodes[place] = replace(original, deps=(), after=(), id=self.base + place)
        return self._nodes[place]

    def computations(self) -> Iterator[tuple[StepInstance, int, bool]]:
        """The places of its computations, last one first, and whether they are matrix products."""
        return ((self, place, product) for place, product in self.template.computations)

    def buckets(self) -> Iterator[tuple[int, int | None]]:
        """Handles of its buckets, and of what completes them."""
        for place, ready in self.template.buckets:
            yield self.base + place, None if ready is None else self.handle(ready)


def tables(template: Template, instances: Sequence[StepInstance]) -> Ints:
    """The tables of instances of a template, a row each."""
    rows: dict[Inputs, list[int]] = {}
    for row, instance in enumerate(instances):
        rows.setdefault(instance.inputs, []).append(row)
    first, nodes = template.outside, len(template.nodes)
    table = np.empty((len(instances), first + nodes), dtype=np.int64)
    for inputs, mine in rows.items():
        table[mine, :first] = inputs.handles([instances[row] for row in mine])
    bases = np.array([i.base for i in instances], dtype=np.int64)[:, None]
    table[:, first:] = bases + np.arange(nodes)
    return table


T = TypeVar("T")


def front_of(computations: Iterator[tuple[T, bool]]) -> tuple[list[tuple[T, bool]], bool]:
    """What later nodes refer to of computations that are given last one first: the last one, the
    last matrix product and the one right before that, in order; and whether all were found. Nobody
    asks whether the one before the product is a product as well: it is noted as if it was not, so
    that steps which differ in that alone share a template."""
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
    """The nodes of a value, in order."""
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
    """A value of a shape from its nodes."""
    if shape is None:
        return None
    if isinstance(shape, tuple):
        last, items = cast("int", shape[0]), cast("tuple[Shape, ...]", shape[1:])
        return Stack([build(s, nodes) for s in items], last)
    return next(nodes)


class Placeholders:
    """Nodes that stand for the places of a table, one after the other."""

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
    """The template of what was unrolled with `outside` placeholders."""
    nodes = [*ordered, *(n for cut in bucketed for n in cut.nodes)]
    for place, node in enumerate(nodes):
        node.id = place
    template = Template(nodes, len(ordered), outside, [], [], sent, channels)
    for values in made:
        template.made.append([(shape_of(r), _places(template, r)) for r in values])
    for cut in bucketed:
        for node, ready in zip(cut.nodes, cut.ready, strict=True):
            template.buckets.append((node.id, None if ready is None else template.place(ready)))
    return template


def _places(template: Template, ref: Ref) -> list[int]:
    return [template.place(n) for n in leaves(ref)]
