"""The program of a rank class: the nodes of one rank, in order, from a lowered and bound graph.

Repeats, accumulations and the actions of a pipeline schedule are unrolled here and only here. Nodes
refer to each other as objects; identifiers and the control order of the two streams come last, when
the order is final. Messages are in neither stream: they wait for their data only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import islice, repeat

import numpy as np

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import Expr, evaluate
from stagec.ir.replay import replays
from stagec.schedule.action import RankActions, steps
from stagec.schedule.attached import regions_of
from stagec.support.diagnostics import error
from stagec.trace.buckets import Bucketed, cut_into_buckets
from stagec.trace.columns import Columns
from stagec.trace.groups import Channel, channel_of, group_axes
from stagec.trace.nodes import MICROBATCH, Ints, Node, Program, Ref, Stack, item, last_node
from stagec.trace.stamp import (
    INSIDE,
    Held,
    Instance,
    Made,
    Part,
    Placeholders,
    Shape,
    Stream,
    Template,
    build,
    captured,
    cuts_buckets,
    flat,
    make_template,
)

#: More calls than this in one reduction are a mistake: no consumer takes them.
MOST_BUCKETS = 100_000
#: More nodes per rank than this are a mistake: no consumer takes them.
MOST_NODES = 20_000_000


def unroll(
    graph: Operation,
    name: str,
    env: Mapping[str, int],
    order: RankActions = (),
    channels: Mapping[Channel, int] | None = None,
    loads: Layered | None = None,
) -> Program:
    """Unroll an et.graph with the known sizes.

    `order` are the actions of its pipeline stage, `channels` the numbers of all streams of
    messages, `loads` sizes that differ from layer to layer. Raises `DiagnosticError` if there are
    no nodes, or far too many.
    """
    count = _count(graph.body, env)
    if count > MOST_NODES:
        raise error(
            f"the program has {count:,} nodes per rank, expected at most {MOST_NODES:,}",
            graph.loc,
            remedy="choose fewer layers or microbatches",
        )
    unroller = _Unroller(env, order, channels or {}, loads)
    unroller.region(graph.body)
    program = unroller.finish(name)
    if not len(program):
        raise error(
            "the program has no nodes", graph.loc, remedy="compute something in the function"
        )
    return program


def _count(region: Region, env: Mapping[str, int]) -> int:
    """Nodes of a region, buckets not cut."""
    return sum(
        _times(op, env) * _count(op.region, env) if op.region else 1 for op in region.ops[:-1]
    )


def _times(op: Operation, env: Mapping[str, int]) -> int:
    return evaluate(op.expr("count"), env) if "count" in op.attrs else 1


@dataclass(frozen=True)
class Layered:
    """Sizes that differ from layer to layer; `slot` is the place of the stage among those that
    share the program."""

    at: Callable[[int], Mapping[str, Fraction]]
    slot: int


class _Unroller:
    def __init__(
        self,
        env: Mapping[str, int],
        order: RankActions,
        channels: Mapping[Channel, int],
        loads: Layered | None,
    ) -> None:
        self._env, self._actions, self._channels = env, order, channels
        self._loads, self._layer = loads, 0
        self._refs: dict[Value, Held] = {}
        self._order: list[Node | Instance] = []
        self._bucketed: list[Bucketed | Instance] = []
        self._prefix = ""
        self._replays = True
        self._costs: dict[tuple[Operation, int], dict[str, int]] = {}
        self._sent: Counter[Stream] = Counter()
        self._posted: Node | None = None  # what a receive without operands waits for
        self._columns = Columns()
        self._templates: dict[Hashable, Template] = {}
        self._outside: dict[Node, int] | None = None  # in a template: positions of placeholders

    def finish(self, name: str) -> Program:
        """All nodes in their final order, with identifiers and control dependencies."""
        return self._columns.program(
            name, self._order, self._bucketed, self._templates.values(), self._channels
        )

    # -- regions -----------------------------------------------------------------------------------

    def region(self, region: Region, skip: frozenset[Operation] = frozenset()) -> list[Ref]:
        """Emit the nodes of a region; what it yields."""
        for op in region.ops[:-1]:
            if op not in skip:
                self._op(op)
        return [self._ref(v) for v in region.terminator.operands]

    def _op(self, op: Operation) -> None:
        if op.name == "et.recall":
            self._refs[op.result] = self._refs.get(op.operands[0 if self._replays else 1])
            return
        if op.region is not None:
            run = self._repeat if op.name == "et.repeat" else self._accumulate
            self._refs.update(zip(op.results, run(op, op.region), strict=True))
            return
        self._refs[op.result] = self._node(op)

    def _ref(self, value: Value) -> Ref:
        """The nodes of a value, for what is not stamped."""
        held = self._refs.get(value)
        if not isinstance(held, Made):
            return held
        return build(held.shape, map(self._columns.node, held.handles.tolist()))

    def _number(self, op: Operation, name: str) -> int:
        known = self._costs.setdefault((op, self._layer), {})
        if name not in known:
            env: Mapping[str, int | Fraction] = self._env
            if self._loads is not None:
                env = {**env, **self._loads.at(self._layer)}
            known[name] = evaluate(op.expr(name), env) if name in op.attrs else 0
        return known[name]

    def _repeat(self, op: Operation, region: Region) -> list[Ref]:
        count, carry = self._number(op, "count"), op.integer("carry", 1)
        early = frozenset(o for o in region.ops if "ahead" in o.attrs)
        ahead = max((self._number(o, "ahead") for o in early), default=0)
        inputs = [self._ref(v) for v in op.operands]
        carried, prefix, outer = inputs[:carry], self._prefix, self._replays
        order = range(count - 1, -1, -1) if op.flag("reverse") else range(count)
        stacks: list[list[Ref]] = [[None] * count for _ in range(len(op.results) - carry)]
        ready: list[dict[Value, Ref]] = []
        first, layer = self._first_layer(op), self._layer
        for step, i in enumerate(order):
            self._layer = layer if first is None else first + i
            while len(ready) < min(step + ahead + 1, count):
                ready.append(self._prefetch(early, prefix, order[len(ready)], len(ready)))
            self._prefix = f"{prefix}L{i}/"
            self._refs.update(
                zip(region.args, carried + [item(r, i) for r in inputs[carry:]], strict=True)
            )
            self._refs.update(ready[step])
            self._replays = replays(op, i)
            again = frozenset(o for o in region.ops if o.phase == "recompute")
            yielded = self.region(region, early if self._replays else early | again)
            carried = yielded[:carry]
            for stack, ref in zip(stacks, yielded[carry:], strict=True):
                stack[i] = ref
        self._prefix, self._replays, self._layer = prefix, outer, layer
        last = order[-1] if count else 0
        return carried + [Stack(s, last) if any(r is not None for r in s) else None for s in stacks]

    def _first_layer(self, op: Operation) -> int | None:
        """The number of a repeat's first layer on this stage, where loads go by it."""
        if self._loads is None or "first" not in op.attrs:
            return None
        return evaluate(op.exprs("first")[self._loads.slot], self._env)

    def _prefetch(
        self, early: frozenset[Operation], prefix: str, i: int, step: int
    ) -> dict[Value, Ref]:
        """Issue the parameter gathers of iteration i, the `step`th that runs, now: iterations
        early, not at the start of the step."""
        found: dict[Value, Ref] = {}
        last = self._last_computation() if early else None
        self._prefix = f"{prefix}L{i}/"
        for op in sorted(early, key=lambda o: o.position()):
            if step < self._number(op, "kept"):
                found[op.result] = None  # still there from forward, for whose end all waits
                continue
            node = self._collective(op)
            if isinstance(node, Node) and last is not None:
                node.after.append(last)
            found[op.result] = node
        return found

    def _computations(self) -> Iterator[tuple[Instance | Node, int, bool]]:
        """The computations so far, last one first: which, and whether it is a matrix product."""
        for thing in reversed(self._order):
            if isinstance(thing, Instance):
                yield from thing.computations()
            elif thing.is_computation:
                yield thing, 0, bool(thing.matmul)

    def _last_computation(self) -> Node | None:
        return next((_node_of(*found[:2]) for found in self._computations()), None)

    def _accumulate(self, op: Operation, region: Region) -> list[Ref]:
        inputs = [self._ref(v) for v in op.operands]
        self._refs.update(zip(region.args, inputs, strict=True))
        if self._outside is not None:  # in a template there are nodes only
            return self._looped(self._number(op, "count"), region)
        latest: dict[Value, Held] = {}
        if "schedule" in op.attrs:
            self._scheduled(region, latest)
        else:
            seen = _Seen(region, region.terminator.operands)
            for i in range(self._number(op, "count")):
                part = seen.part(f"{self._prefix}mb{MICROBATCH[0]}/", 0, 0, i)
                self._step([part], {}, latest)
        # sums are complete with the last microbatch
        self._refs.update(latest)
        return [self._ref(v) for v in region.terminator.operands]

    def _looped(self, count: int, region: Region) -> list[Ref]:
        prefix, yielded = self._prefix, list[Ref]()
        for i in range(count):
            self._prefix = f"{prefix}mb{i}/"
            yielded = self.region(region)
        self._prefix = prefix
        return yielded

    # -- actions of a pipeline schedule ------------------------------------------------------------

    def _scheduled(self, region: Region, latest: dict[Value, Held]) -> None:
        """Run the actions as ordered. What an action makes is there for later ones of its
        microbatch; what the region yields is complete with the last action that adds to it."""
        actions = {
            (op.text("kind"), op.integer("chunk")): _Seen(op.body, op.results)
            for op in region.ops[:-1]
        }
        held: dict[int, dict[Value, Held]] = {}
        before: int | None = None
        for step in steps(self._actions):
            posted, before = before, next((_handle_of(*c[:2]) for c in self._computations()), None)
            numbers = list(dict.fromkeys(action.microbatch for action in step))
            parts: list[Part] = []
            for which, action in enumerate(step):
                slot = numbers.index(action.microbatch)
                chunk = f"c{action.chunk}/" if action.chunk else ""
                prefix = f"{self._prefix}mb{MICROBATCH[slot]}/{chunk}"
                for seen in filter(None, map(actions.get, regions_of(action))):
                    parts.append(seen.part(prefix, slot, which, action.microbatch))
            if parts:
                self._step(parts, held, latest, posted)

    def _step(
        self,
        parts: Sequence[Part],
        held: dict[int, dict[Value, Held]],
        latest: dict[Value, Held],
        posted: int | None = None,
    ) -> None:
        """Run the regions of one step: stamp what it was when it was first seen."""
        inputs = self._inputs(parts, held)
        shapes = [shape for shape, _ in inputs]
        handles = [h for _, h in inputs]
        front = self._front()
        extra = [*(handle for handle, _ in front), *([] if posted is None else [posted])]
        outside = np.concatenate([*handles, np.array(extra, dtype=np.int64)])
        ranks = self._ranks(outside) if any(p.cuts for p in parts) else ()
        fronts = tuple(product for _, product in front)
        key = (
            *((p.body.owner, p.prefix, p.slot, p.action) for p in parts),
            *shapes,
            fronts,
            posted is not None,
            ranks,
        )
        template = self._templates.get(key)
        if template is None:
            template = self._unrolled(parts, shapes, fronts, ranks, posted is not None)
            self._templates[key] = template
        for part, made in zip(parts, self._stamp(template, parts, outside), strict=True):
            self._refs.update(made)
            latest.update(made)
            held.setdefault(part.microbatch, {}).update(made)

    def _inputs(
        self, parts: Sequence[Part], held: dict[int, dict[Value, Held]]
    ) -> list[tuple[Shape, Ints]]:
        """Shapes and nodes of what the parts of a step take from outside, part by part."""
        made: set[Value] = set()
        mine_made: set[tuple[Value, int]] = set()
        found: list[tuple[Shape, Ints]] = []
        for part in parts:
            mine = held.setdefault(part.microbatch, {})
            self._refs.update(mine)
            for value in part.captured:
                own = (value, part.slot) in mine_made
                inside = own or (value in made and value not in mine)
                found.append((INSIDE, _NONE) if inside else flat(self._refs.get(value)))
            made.update(part.results)
            mine_made.update((value, part.slot) for value in part.results)
        return found

    def _front(self) -> list[tuple[int, bool]]:
        """What is seen of the computations before a step: the last one, the last matrix product
        and the one right before that; in order, and whether they are matrix products."""
        found: list[tuple[int, bool]] = []
        for thing, place, product in self._computations():
            after_product = bool(found) and found[-1][1]
            if not found or product or after_product:
                found.append((_handle_of(thing, place), product))
            if after_product:
                break
        return found[::-1]

    def _ranks(self, handles: Ints) -> tuple[int, ...]:
        """The order of nodes that were issued; -1 for buckets, whose place comes later."""
        found = [self._columns.position(h) for h in handles.tolist()]
        place = {h: i for i, h in enumerate(sorted(set(found) - {-1}))}
        return tuple(place.get(h, -1) for h in found)

    def _unrolled(
        self,
        parts: Sequence[Part],
        shapes: Sequence[Shape],
        fronts: Sequence[bool],
        ranks: Sequence[int],
        posted: bool,
    ) -> Template:
        """Unroll a step with placeholders for what comes from outside."""
        kept = self._refs, self._order, self._bucketed, self._sent, self._posted, self._prefix
        source = Placeholders()
        refs = [None if s == INSIDE else build(s, source) for s in shapes]
        front = [replace(next(source), matmul=int(product)) for product in fronts]
        self._posted = next(source) if posted else None
        self._outside = dict(zip(source.given, ranks or repeat(-1), strict=False))
        self._refs, self._order, self._bucketed, self._sent = {}, [*front], [], Counter()
        pieces: list[list[Node]] = []
        made: list[Mapping[Value, Ref]] = []
        start, given, last = len(front), iter(zip(shapes, refs, strict=True)), -1
        by_slot: dict[int, dict[Value, Ref]] = {}
        for part in parts:
            mine = by_slot.setdefault(part.slot, {})
            self._refs.update(mine)
            for value, (shape, ref) in zip(
                part.captured, islice(given, len(part.captured)), strict=True
            ):
                if shape != INSIDE:
                    self._refs[value] = ref
            if part.action != last:
                pieces.append([])
                last = part.action
                del self._order[start:]
            before = len(self._order)
            self._prefix = part.prefix
            yielded = self.region(part.body)
            values = dict(zip(part.results, yielded, strict=False))
            self._refs.update(values)
            mine.update(values)
            made.append(values)
            pieces[-1] += [n for n in self._order[before:] if isinstance(n, Node)]
        cut = [b for b in self._bucketed if isinstance(b, Bucketed)]
        ordered = _interleaved(pieces)
        template = make_template(ordered, cut, made, len(source.given), dict(self._sent))
        template.first_prototype = self._columns.add_prototypes(template.nodes)
        self._refs, self._order, self._bucketed, self._sent, self._posted, self._prefix = kept
        self._outside = None
        return template

    def _stamp(
        self, template: Template, parts: Sequence[Part], outside: Ints
    ) -> list[dict[Value, Held]]:
        """Add an instance; the values that each of its parts makes."""
        slots = {p.slot: p.microbatch for p in parts}
        tags = {stream: self._sent[stream] * len(self._channels) for stream in template.sent}
        instance = self._columns.add_instance(template, outside, list(slots.values()), tags)
        self._sent.update(template.sent)
        self._order.append(instance)
        if template.buckets:
            self._bucketed.append(instance)
        return [
            {v: Made(shape, instance.table, places) for v, (shape, places) in values.items()}
            for values in template.made
        ]

    # -- nodes -------------------------------------------------------------------------------------

    def _issue(self, node: Node) -> None:
        if self._outside is None:
            self._columns.add_node(node)
        self._order.append(node)

    def _deps(self, op: Operation) -> list[Node]:
        return [n for v in op.operands if (n := last_node(self._ref(v))) is not None]

    def _name(self, op: Operation) -> str:
        return f"{op.phase}/{self._prefix}{op.result.name}"

    def _node(self, op: Operation) -> Ref:
        if op.name == "et.comp":
            return self._computation(op)
        return self._collective(op) if op.name == "et.coll" else self._message(op)

    def _computation(self, op: Operation) -> Node:
        node = Node(
            op.text("kind"),
            self._name(op),
            op.phase,
            self._number(op, "bytes"),
            self._number(op, "flops"),
            self._number(op, "matmul"),
            self._number(op, "out"),
            deps=self._deps(op),
        )
        self._issue(node)
        return node

    def _message(self, op: Operation) -> Node:
        channel, kind = channel_of(op), op.name.removeprefix("et.")
        count = self._sent[kind, channel]
        self._sent[kind, channel] += 1
        node = Node(
            kind,
            f"{self._name(op)}.{kind}" if kind == "send" else self._name(op),
            op.phase,
            self._number(op, "bytes"),
            over=channel[0],
            by=channel[1],
            tag=count * len(self._channels) + self._channels[channel],
            deps=self._deps(op),
        )
        if kind == "recv" and not node.deps and self._posted is not None:
            node.after.append(self._posted)
        if op.flag("beside"):
            node.after += self._before_last_product()
        self._issue(node)
        return node

    def _before_last_product(self) -> list[Node]:
        """The computation right before the last matrix product, which starts when it is done."""
        computations = self._computations()
        for _, _, product in computations:
            if product:
                return [_node_of(*found[:2]) for found in islice(computations, 1)]
        return []

    def _collective(self, op: Operation) -> Ref:
        size, bucket = self._number(op, "bytes"), self._number(op, "bucket")
        if bucket and size > bucket:
            return self._buckets(op, bucket)
        node = Node(
            op.text("kind"),
            self._name(op),
            op.phase,
            size,
            group=group_axes(op),
            blocking=op.flag("blocking"),
            deps=self._deps(op),
        )
        self._issue(node)
        return node

    def _buckets(self, op: Operation, bucket: int) -> Ref:
        """Cut a reduction into calls of `bucket` bytes, in the order of their readiness."""
        count = -(-self._number(op, "bytes") // bucket)
        if count > MOST_BUCKETS:
            raise error(
                f"buckets of {bucket:,} bytes cut a reduction into {count:,} calls",
                op.loc,
                remedy=f"choose larger ones: at most {MOST_BUCKETS:,} calls are written",
            )
        parts = op.attrs.get("parts")
        sizes = (
            [evaluate(p, self._env) for p in parts if isinstance(p, Expr)]
            if isinstance(parts, tuple)
            else []
        )
        values = [(self._ref(v), size) for v, size in zip(op.operands, sizes, strict=True)]
        cut = Bucketed([], [])
        for number, (size, ready) in enumerate(cut_into_buckets(values, bucket, self._position)):
            node = Node(
                op.text("kind"),
                f"{self._name(op)}.{number}",
                op.phase,
                size,
                group=group_axes(op),
                deps=[ready] if ready is not None else [],
            )
            if self._outside is None:
                self._columns.add_bucket(node)
            cut.nodes.append(node)
            cut.ready.append(ready)
        self._bucketed.append(cut)
        return cut.nodes[-1]

    def _position(self, node: Node) -> int:
        """Where a node is in the order of issue; -1 for a bucket, whose place comes later."""
        if self._outside is None:
            return self._columns.position(node.id)
        if node in self._outside:
            return self._outside[node]
        inside = self._order.index(node) if node in self._order else -1
        return inside if inside < 0 else len(self._outside) + inside


_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class _Seen:
    """A region that is run again and again, and what there is to know of it."""

    body: Region
    results: Sequence[Value]

    @cached_property
    def captured(self) -> tuple[Value, ...]:
        return captured(self.body)

    @cached_property
    def cuts(self) -> bool:
        return cuts_buckets(self.body)

    def part(self, prefix: str, slot: int, action: int, microbatch: int) -> Part:
        """One run of it."""
        return Part(
            self.body, self.results, self.captured, prefix, slot, action, microbatch, self.cuts
        )


def _node_of(thing: Instance | Node, place: int) -> Node:
    return thing if isinstance(thing, Node) else thing.node(place)


def _handle_of(thing: Instance | Node, place: int) -> int:
    return thing.id if isinstance(thing, Node) else thing.base + place


def _interleaved(parts: Sequence[list[Node]]) -> list[Node]:
    """The nodes of an overlapped pair: one goes on where the other starts to communicate."""
    queues = [_between_collectives(part) for part in parts]
    longest = max((len(q) for q in queues), default=0)
    return [n for i in range(longest) for q in queues if i < len(q) for n in q[i]]


def _between_collectives(nodes: Sequence[Node]) -> list[list[Node]]:
    """Pieces that end in a collective each."""
    pieces: list[list[Node]] = [[]]
    for node in nodes:
        pieces[-1].append(node)
        if node.is_collective:
            pieces.append([])
    return pieces
