"""Walks a lowered graph, unrolls its repeats and makes nodes of its operations.

Nodes refer to each other as objects. Gathers of parameters are issued some iterations early,
reductions are split into buckets, messages are numbered per channel.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from stagec.ir.core import Attr, Operation, Region, Value
from stagec.ir.expr import evaluate
from stagec.ir.layers import LayerStack, in_order
from stagec.ir.queries import IsPositive, NumberOf, ask, plain
from stagec.ir.recompute_window import replays
from stagec.program.buckets import Bucketed, BucketPiece, Filled, label, pieces, readiness
from stagec.program.columns import Columns
from stagec.program.groups import Channel, channel_of, crosses_pods, group_axes
from stagec.program.nodes import Node, Ref, Stack, item, last_node
from stagec.program.sizes import Layered, OpNumbers
from stagec.program.stamp import StampedValue, StepInstance, Stream, ValueRef, build


@dataclass(slots=True)
class _Kind:
    """The state of a repeat in a stack while it is unrolled. `inputs` are the values that it
    slices, `early` its gathers of parameters, which are issued `ahead` layers early, `again` the
    operations of recomputation, `first` the number of its first layer, `stacks` the values that its
    layers have yielded, `last` the last layer that has run."""

    op: Operation
    count: int
    inputs: Sequence[Ref]
    early: frozenset[Operation]
    ahead: int
    again: frozenset[Operation]
    first: int | None
    stacks: list[list[Ref]]
    last: int = 0

    def stacked(self) -> list[Ref]:
        """The values that its layers have yielded, without those that it carries."""
        return [Stack(s, self.last) if any(r is not None for r in s) else None for s in self.stacks]


class Unroller:
    """Walks regions and makes nodes of their operations.

    Everything that determines which nodes exist is read with `ask`, so that `TrackedValues` can
    record it. The sizes of nodes are not: `stagec.program.sizes` computes them for other values
    too.

    `joined` is the axis of pipeline stages whose sums wait for the end of the schedule, see
    `stagec.schedule.attached.joined_axis`. `slot` is the index of the stage among those of the
    graph. `_in_template` is true while a template is unrolled, not the program itself.
    """

    def __init__(
        self,
        env: Mapping[str, int],
        channels: Mapping[Channel, int],
        loads: Layered | None,
        joined: str = "",
        slot: int = 0,
    ) -> None:
        self._env, self._channels, self._joined = env, channels, joined
        self._sizes, self._loads, self._layer = OpNumbers(plain(env), loads), loads, 0
        self._slot = slot
        self._turn: int = 0
        self._refs: dict[Value, ValueRef] = {}
        self._in_order: dict[Region, Sequence[Operation | LayerStack]] = {}
        self._order: list[Node | StepInstance] = []
        self._bucketed: list[Bucketed | StepInstance] = []
        self._places: dict[Node, tuple[int, ...]] = {}
        self._prefix = ""
        self._place = -1  # index of the layer in the outermost stack
        self._replays = True
        self._sent: Counter[Stream] = Counter()
        self._asked: set[Attr] = set()
        self._columns = Columns()
        self._in_template = False

    # -- regions -----------------------------------------------------------------------------------

    def region(self, region: Region, skip: frozenset[Operation] = frozenset()) -> list[Ref]:
        """Add the nodes of a region, and return what it yields."""
        if region not in self._in_order:
            self._in_order[region] = in_order(region)
        for step in self._in_order[region]:
            if isinstance(step, LayerStack):
                if step.members[0] not in skip:
                    self._stack(step)
            elif step not in skip:
                self._op(step)
        return [self._ref(v) for v in region.terminator.operands]

    def _op(self, op: Operation) -> None:
        if op.name == "et.recall":
            self._refs[op.result] = self._refs.get(op.operands[0 if self._replays else 1])
            return
        if op.region is not None:
            self._refs.update(zip(op.results, self.accumulate(op, op.region), strict=True))
            return
        self._refs[op.result] = self._node(op)

    def _ref(self, value: Value) -> Ref:
        """The nodes of a value, also if an instance of a template produces it."""
        reference = self._refs.get(value)
        if not isinstance(reference, StampedValue):
            return reference
        return build(reference.shape, map(self._columns.node, reference.handles))

    def _number(self, op: Operation, name: str) -> int:
        """A size, on which the existence of nodes does not depend."""
        return self._sizes.number(op, name, self._layer)

    def _count(self, op: Operation, name: str) -> int:
        """A number that nodes or edges depend on: recorded by tracked values. 0 without the
        attribute."""
        return ask(NumberOf(op.expr(name)), self._env) if name in op.attrs else 0

    def _stack(self, stack: LayerStack) -> None:
        """Run the layers of a stack. Gathers of parameters are issued early across its repeats."""
        carry, prefix, outer, layer = stack.carried, self._prefix, self._replays, self._layer
        turn, at = self._turn, self._place
        kinds = [self._kind(op, carry) for op in stack.members]
        carried = [self._ref(v) for v in stack.inputs]
        turns = stack.turns(kinds[0].count)
        ahead = max(k.ahead for k in kinds)
        ready: list[dict[Value, Ref]] = []
        for step, (place, m, i) in enumerate(turns):
            kind = kinds[m]
            self._layer = layer if kind.first is None else kind.first + i
            self._turn = turn * kind.count + i
            while len(ready) < min(step + ahead + 1, len(turns)):
                later = turns[len(ready)]
                self._place = later.place if at < 0 else at
                early = kinds[later.member].early
                ready.append(self._prefetch(early, f"{prefix}L{later.place}/", len(ready)))
            self._prefix = f"{prefix}L{place}/"
            self._place = place if at < 0 else at
            values = carried + [item(r, i) for r in kind.inputs]
            self._refs.update(zip(kind.op.body.args, values, strict=True))
            self._refs.update(ready[step])
            self._replays = replays(kind.op, i)
            idle = frozenset[Operation]() if self._replays else kind.again - kind.early
            self._refs.update(dict.fromkeys(r for o in idle for r in o.results))
            yielded = self.region(kind.op.body, kind.early | idle)
            carried, kind.last = yielded[:carry], i
            for items, ref in zip(kind.stacks, yielded[carry:], strict=True):
                items[i] = ref
        self._prefix, self._replays, self._layer, self._turn = prefix, outer, layer, turn
        self._place = at
        for kind in kinds:
            self._refs.update(zip(kind.op.results, carried + kind.stacked(), strict=True))

    def _kind(self, op: Operation, carry: int) -> _Kind:
        count = self._count(op, "count")
        early = frozenset(o for o in op.body.ops if "ahead" in o.attrs)
        return _Kind(
            op,
            count,
            [self._ref(v) for v in op.operands[carry:]],
            early,
            max((self._count(o, "ahead") for o in early), default=0),
            frozenset(o for o in op.body.ops if o.phase == "recompute"),
            self._first_layer(op),
            [[None] * count for _ in op.results[carry:]],
        )

    def _first_layer(self, op: Operation) -> int | None:
        """The number of a repeat's first layer on this stage, if sizes differ by layer."""
        if self._loads is None or "first" not in op.attrs:
            return None
        return evaluate(op.exprs("first")[self._loads.slot], self._env)

    def _prefetch(self, early: frozenset[Operation], prefix: str, step: int) -> dict[Value, Ref]:
        """Issue the gathers of parameters and the copies from the host for the layer that runs as
        number `step`. They wait for the last computation issued so far."""
        refs: dict[Value, Ref] = {}
        last = self._last_computation() if early else None
        self._prefix = prefix
        for op in sorted(early, key=lambda o: o.position()):
            if step < self._count(op, "kept"):
                refs[op.result] = (
                    None  # kept since forward; the computations of backward come after it
                )
                continue
            node = self._node(op)
            if isinstance(node, Node) and last is not None and last not in node.after:
                node.after = (*node.after, last)
            refs[op.result] = self._refs[op.result] = node
        return refs

    def _computations(self) -> Iterator[tuple[StepInstance | Node, int, bool]]:
        """The computations so far, last one first, as arguments of `node_of`, and whether each is a
        matrix product."""
        for thing in reversed(self._order):
            if isinstance(thing, StepInstance):
                yield from thing.computations()
            elif thing.is_computation:
                yield thing, 0, bool(thing.matmul)

    def _last_computation(self) -> Node | None:
        return next((node_of(*computation[:2]) for computation in self._computations()), None)

    def accumulate(self, op: Operation, region: Region) -> list[Ref]:
        """Run a region for each microbatch, and return what it yields at last."""
        inputs = [self._ref(v) for v in op.operands]
        self._refs.update(zip(region.args, inputs, strict=True))
        prefix, yielded = self._prefix, list[Ref]()
        for i in range(self._count(op, "count")):
            self._prefix = f"{prefix}mb{i}/"
            yielded = self.region(region)
        self._prefix = prefix
        return yielded

    # -- nodes -------------------------------------------------------------------------------------

    def _issue(self, node: Node) -> None:
        node.layer = self._place
        if self._in_template:
            node.id = len(self._order)  # `make_template` renumbers them
        else:
            self._columns.add_node(node)
        self._order.append(node)

    def _deps(self, op: Operation) -> tuple[Node, ...]:
        nodes: list[Node] = []
        for value in op.operands:
            ref = self._refs.get(value)
            if isinstance(ref, Node):
                nodes.append(ref)
            elif ref is not None and (last := last_node(self._ref(value))) is not None:
                nodes.append(last)
        return tuple(nodes)

    def _scope(self, op: Operation) -> str:
        return f"{op.phase}/{self._prefix}"

    def _node(self, op: Operation) -> Ref:
        if op.name == "et.comp":
            return self._computation(op)
        if op.name == "et.coll":
            return self._collective(op)
        return self._copy(op) if op.name == "et.copy" else self._message(op)

    def _copy(self, op: Operation) -> Node:
        """A copy to or from the host. It waits for the last computation before it, so that a load
        does not come early."""
        to = op.text("to")
        kind = "store" if to == "host" else "load"
        last = self._last_computation()
        after = () if last is None else (last,)
        return self._made(op, kind, f"{op.result.name}.{kind}", to=to, after=after)

    def _made(self, op: Operation, kind: str, name: str, **about: Any) -> Node:
        """Issue a node that moves bytes, with data dependencies on its operands."""
        scope, size = self._scope(op), self._number(op, "bytes")
        about |= {"scope": scope, "op": op, "deps": self._deps(op), "index": self._layer}
        node = Node(kind, scope + name, op.phase, size, **about)
        self._issue(node)
        return node

    def _computation(self, op: Operation) -> Node:
        matmul = op.attrs.get("matmul")
        if matmul is not None and matmul not in self._asked:
            self._asked.add(matmul)  # `_before_last_product` depends on it
            ask(IsPositive(op.expr("matmul")), self._env)
        kind, phase, *_ = work = self._sizes.work(op, self._layer)
        scope, deps = f"{phase}/{self._prefix}", self._deps(op)
        name = scope + op.results[0].name
        node = Node(kind, name, phase, *work[2:], scope=scope, op=op, deps=deps, index=self._layer)
        self._issue(node)
        return node

    def _message(self, op: Operation) -> Node:
        kind = op.name.removeprefix("et.")
        by, tag = self._crossing(op) if crosses_pods(op) else self._numbered(op, kind)
        name = f"{op.result.name}.{kind}" if kind == "send" else op.result.name
        after = tuple(self._before_last_product() if op.flag("overlapped") else ())
        return self._made(op, kind, name, over=channel_of(op)[0], by=by, tag=tag, after=after)

    def _numbered(self, op: Operation, kind: str) -> tuple[int, int]:
        """The distance of a message along its axis, and its tag, from its number in its stream."""
        channel = channel_of(op)
        number = self._channels[channel]
        tag = self._sent[kind, number] * len(self._channels) + number
        self._sent[kind, number] += 1
        return self._count(op, "by") % self._env[channel[0]], tag

    def _crossing(self, op: Operation) -> tuple[int, int]:
        """The number of a message between pods, and its tag in the first microbatch, from the
        number of its layer among all that are transferred."""
        layers, shares = op.integers("layers"), op.integers("shares") or (0,)
        layer = self._turn + (layers[self._slot] if layers else 0)
        share = bisect_right(shares, layer) - 1
        number = self._count(op, "by") + share * op.integer("ways", 0)
        streams, stream = op.integer("streams"), op.integer("channel", 0)
        return number, op.integer("turn", 0) * streams + stream + layer

    def _before_last_product(self) -> list[Node]:
        """The computation right before the last matrix product: a node that waits for it overlaps
        with that product."""
        computations = self._computations()
        for _, _, product in computations:
            if product:
                return [node_of(*computation[:2]) for computation in islice(computations, 1)]
        return []

    def _collective(self, op: Operation) -> Ref:
        if "bucket" in op.attrs:
            return self._buckets(op)
        return self._made(
            *(op, op.text("kind"), op.result.name),
            group=group_axes(op),
            blocking=op.flag("blocking"),
            after=self._behind_schedule(op),
            dealt=(self._count(op, "copies"), self._count(op, "groups")),
        )

    def _joins_stages(self, op: Operation) -> bool:
        return not self._in_template and self._joined in op.names("group")

    def _behind_schedule(self, op: Operation) -> tuple[Node, ...]:
        """The control dependencies of a sum over pipeline stages: the last computation. All sends
        of the rank have been issued by then."""
        last = self._last_computation() if self._joins_stages(op) else None
        return () if last is None else (last,)

    def _last_issued(self) -> Node | None:
        for thing in reversed(self._order):
            if isinstance(thing, Node):
                return thing
            if thing.template.ordered:
                return thing.node(thing.template.ordered - 1)
        return None

    def _buckets(self, op: Operation) -> Ref:
        """Add the calls of a reduction in buckets. Returns the last one, after which all are
        complete."""
        refs, names = [self._ref(v) for v in op.operands], [v.name for v in op.operands]
        cut = Bucketed([], [])
        late = self._last_issued() if self._joins_stages(op) else None
        order = readiness(op)
        for runs, counts in zip(order, ask(Filled(op, order), self._env), strict=True):
            given: list[BucketPiece] = []
            for run in runs:
                given += pieces(run, refs, names, evaluate(run.times, plain(self._env)))
            gradients = iter(given)
            for count in counts:
                inside = list(islice(gradients, count))
                node = self._bucket(op, inside, len(cut.nodes))
                ready = late or max((p.node for p in reversed(inside)), key=self._issued_at)
                self._places[node] = (*self._issued_at(ready), len(self._places))
                cut.nodes.append(node)
                cut.ready.append(ready)
        self._bucketed.append(cut)
        return max(reversed(cut.nodes), key=self._issued_at, default=None)

    def _issued_at(self, node: Node | None) -> tuple[int, ...]:
        """The sort key of the order of issue: inputs of a template come first, and a bucket right
        after the node that completes it, which may be a bucket too."""
        if node is None:
            return ()
        return self._places.get(node, (max(node.id, -1),))

    def _bucket(self, op: Operation, inside: Sequence[BucketPiece], number: int) -> Node:
        layers, name = label(inside)
        scope = f"{self._scope(op)}{layers}/" if layers else self._scope(op)
        node = Node(
            op.text("kind"),
            scope + name,
            op.phase,
            self._sizes.buckets(op)[number],
            scope=scope,
            group=group_axes(op),
            bucket=True,
            op=op,
            deps=tuple(dict.fromkeys(p.node for p in inside if p.node is not None)),
            after=self._behind_schedule(op),
            index=number,
            layer=next((p.layer for p in (inside[0], inside[-1]) if p.layer >= 0), -1),
        )
        if not self._in_template:
            self._columns.add_node(node)
        return node


def node_of(thing: StepInstance | Node, place: int) -> Node:
    """The node itself, or the node at an index of an instance."""
    return thing if isinstance(thing, Node) else thing.node(place)


def handle_of(thing: StepInstance | Node, place: int) -> int:
    """The handle of the node itself, or of the node at an index of an instance."""
    return thing.id if isinstance(thing, Node) else thing.base + place
