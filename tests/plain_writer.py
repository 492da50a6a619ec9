"""A slow and plain writer: every node of a rank class is made and serialised by itself.

What stagec writes must be equal, byte for byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from stagec.formats.chakra.encode import SCHEMA_VERSION, TraceWriter
from stagec.formats.chakra.nodes import encode_metadata, encode_node, varint
from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import evaluate
from stagec.ir.replay import replays
from stagec.program.classes import RankClass
from stagec.program.groups import Channel, Groups, channel_of, group_axes, neighbours
from stagec.program.nodes import Node, Ref, Stack, item, last_node
from stagec.program.roofline import Roofline
from stagec.schedule.action import Action, RankActions, steps
from stagec.schedule.attached import actions_of, receives_of, regions_of


@dataclass(slots=True)
class PlainProgram:
    """The nodes of a class in issue order, identified from 1."""

    name: str
    nodes: list[Node]


@dataclass(slots=True)
class Bucketed:
    """A collective cut into buckets; its place is where its pieces become ready."""

    nodes: list[Node]
    ready: list[Node | None]


@dataclass(slots=True)
class Piece:
    """A gradient: the chunk of the model that it is of, its bytes, what completes it, its layer and
    name."""

    chunk: int
    size: int
    node: Node | None
    layer: str
    name: str


def cut_into_buckets(
    given: Sequence[Piece], bucket: int, order: Sequence[Node]
) -> list[list[Piece]]:
    """Gradients of a chunk fill buckets in the order of issue (`order`) of what completes them."""
    rank = {node: i for i, node in enumerate(order)}
    found: list[list[Piece]] = []
    for chunk in sorted({p.chunk for p in given}):
        held: list[Piece] = []
        mine = (p for p in given if p.chunk == chunk)
        for piece in sorted(mine, key=lambda p: rank.get(p.node, -1) if p.node else -1):
            held.append(piece)
            if sum(p.size for p in held) >= bucket:
                found.append(held)
                held = []
        found += [held] if held else []
    return sorted(found, key=lambda ps: rank.get(ps[-1].node, -1) if ps[-1].node else -1)


def with_buckets(order: Sequence[Node], bucketed: Sequence[Bucketed]) -> list[Node]:
    """The nodes with each bucket right after the node that completes it."""
    waiting: dict[Node | None, list[Node]] = {}
    for cut in bucketed:
        for node, ready in zip(cut.nodes, cut.ready, strict=True):
            waiting.setdefault(ready, []).append(node)
    result: list[Node] = []
    pending = [*reversed(order), *reversed(waiting.get(None, []))]
    while pending:  # a bucket may in turn complete another one
        node = pending.pop()
        result.append(node)
        pending += reversed(waiting.get(node, []))
    return result


def _pieces(value: Value, ref: Ref, size: int) -> list[Piece]:
    """The parts of a gradient: one for each layer, if it is stacked."""
    chunk, name = 0, value.name
    while (op := value.producer) is not None and op.region is not None:
        chunk = op.integer("chunk", chunk)
        value = op.body.terminator.operands[value.index]
    if not isinstance(ref, Stack):
        return [Piece(chunk, size, ref, "", name)]
    each = size // len(ref.items)
    return [Piece(chunk, each, last_node(r), f"L{i}", name) for i, r in enumerate(ref.items)]


def _label(inside: Sequence[Piece]) -> str:
    one, other = inside[0], inside[-1]
    layers = [one.layer] if one.layer == other.layer else [one.layer, other.layer]
    names = one.name if len(inside) == 1 else f"{one.name}..{other.name}"
    return "/".join(filter(None, ("..".join(filter(None, layers)), f"{names}.reduce")))


def plain_program(
    graph: Operation,
    name: str,
    env: Mapping[str, int],
    order: RankActions = (),
    receives: Mapping[int, Sequence[Action]] | None = None,
    channels: Mapping[Channel, int] | None = None,
) -> PlainProgram:
    """Unroll an et.graph with the known sizes.

    `order` are the actions of its pipeline stage, `receives` those whose receives stand before the
    action at a place, `channels` the numbers of all streams of messages.
    """
    unroller = _Unroller(env, order, receives or {}, channels or {})
    unroller.region(graph.body)
    nodes = unroller.finish()
    return PlainProgram(name, nodes)


class _Unroller:
    def __init__(
        self,
        env: Mapping[str, int],
        order: RankActions,
        receives: Mapping[int, Sequence[Action]],
        channels: Mapping[Channel, int],
    ) -> None:
        self._env, self._actions, self._channels = env, order, channels
        self._receives = receives
        self._refs: dict[Value, Ref] = {}
        self._order: list[Node] = []
        self._bucketed: list[Bucketed] = []
        self._prefix = ""
        self._replays = True
        self._costs: dict[Operation, dict[str, int]] = {}
        self._sent: Counter[tuple[str, Channel]] = Counter()

    # -- order -------------------------------------------------------------------------------------

    def finish(self) -> list[Node]:
        """All nodes in their final order, with identifiers and control dependencies."""
        order = with_buckets(self._order, self._bucketed)
        previous: dict[str, Node] = {}
        waiting: Node | None = None  # a blocking collective that no computation follows yet
        for number, node in enumerate(order, 1):
            node.id = number
            if node.blocking:
                node.after += [previous["comp"]] if "comp" in previous else []
                waiting = node
            elif waiting is not None and _computes(node):
                node.after.append(waiting)
                waiting = None
            stream = node.kind if node.to else "comp" if _computes(node) else "coll"
            if node.is_message:
                stream = f"{node.kind} {node.over} {node.by % self._env[node.over]}"
            before = previous.get(stream)
            if before is not None:
                node.after.append(before)
            previous[stream] = node
        for node in order:
            node.deps = list(dict.fromkeys(node.deps))
            node.after = [a for a in dict.fromkeys(node.after) if a not in node.deps]
        return order

    # -- regions -----------------------------------------------------------------------------------

    def region(self, region: Region, skip: frozenset[Operation] = frozenset()) -> list[Ref]:
        """Emit the nodes of a region; what it yields."""
        for op in region.ops[:-1]:
            if op not in skip:
                self._op(op)
        return [self._refs.get(v) for v in region.terminator.operands]

    def _op(self, op: Operation) -> None:
        if op.name == "et.recall":
            self._refs[op.result] = self._refs.get(op.operands[0 if self._replays else 1])
            return
        if op.region is not None:
            run = self._repeat if op.name == "et.repeat" else self._accumulate
            self._refs.update(zip(op.results, run(op, op.region), strict=True))
            return
        self._refs[op.result] = self._node(op)

    def _number(self, op: Operation, name: str) -> int:
        known = self._costs.setdefault(op, {})
        if name not in known:
            known[name] = evaluate(op.expr(name), self._env) if name in op.attrs else 0
        return known[name]

    def _repeat(self, op: Operation, region: Region) -> list[Ref]:
        count, carry = self._number(op, "count"), op.integer("carry", 1)
        early = frozenset(o for o in region.ops if "ahead" in o.attrs)
        ahead = max((self._number(o, "ahead") for o in early), default=0)
        inputs = [self._refs.get(v) for v in op.operands]
        carried, prefix, outer = inputs[:carry], self._prefix, self._replays
        order = range(count - 1, -1, -1) if op.flag("reverse") else range(count)
        stacks: list[list[Ref]] = [[None] * count for _ in range(len(op.results) - carry)]
        ready: list[dict[Value, Ref]] = []
        for step, i in enumerate(order):
            while len(ready) < min(step + ahead + 1, count):
                ready.append(self._prefetch(early, prefix, order[len(ready)], len(ready)))
            self._prefix = f"{prefix}L{i}/"
            self._refs.update(
                zip(region.args, carried + [item(r, i) for r in inputs[carry:]], strict=True)
            )
            self._refs.update(ready[step])
            self._replays = replays(op, i)
            again = frozenset(o for o in region.ops if o.phase == "recompute")
            if not self._replays:
                self._refs.update(dict.fromkeys(r for o in again - early for r in o.results))
            yielded = self.region(region, early if self._replays else early | again)
            carried = yielded[:carry]
            for stack, ref in zip(stacks, yielded[carry:], strict=True):
                stack[i] = ref
        self._prefix, self._replays = prefix, outer
        last = order[-1] if count else 0
        return carried + [Stack(s, last) if any(r is not None for r in s) else None for s in stacks]

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

    def _last_computation(self) -> Node | None:
        return next(filter(_computes, reversed(self._order)), None)

    def _accumulate(self, op: Operation, region: Region) -> list[Ref]:
        inputs = [self._refs.get(v) for v in op.operands]
        self._refs.update(zip(region.args, inputs, strict=True))
        if "schedule" in op.attrs:
            return self._scheduled(region)
        prefix, yielded = self._prefix, list[Ref]()
        for i in range(self._number(op, "count")):
            self._prefix = f"{prefix}mb{i}/"
            self._refs.update(zip(region.args, inputs, strict=True))
            yielded = self.region(region)
        self._prefix = prefix
        return yielded  # sums are complete with the last microbatch

    # -- actions of a pipeline schedule ------------------------------------------------------------

    def _scheduled(self, region: Region) -> list[Ref]:
        """Run the actions as ordered. What an action makes is there for later ones of its
        microbatch; what the region yields is complete with the last action that adds to it."""
        actions = {(op.text("kind"), op.integer("chunk")): op for op in region.ops[:-1]}
        held: dict[int, dict[Value, Ref]] = {}
        latest: dict[Value, Ref] = {}
        place = 0
        for step in steps(self._actions):
            for action in self._receives.get(place, ()):
                for op in filter(None, map(actions.get, regions_of(action))):
                    self._action(op, action, held, _receives(op.body))
            place += len(step)
            start, parts, leaving = len(self._order), list[list[Node]](), list[Node]()
            for action in step:
                for op in filter(None, map(actions.get, regions_of(action))):
                    self._refs.update(held.setdefault(action.microbatch, {}))
                    rest = [o for o in op.body.ops[:-1] if o not in _receives(op.body)]
                    latest.update(self._action(op, action, held, rest))
                    sent = [self._refs[o.result] for o in op.body.ops if o.name == "et.send"]
                    leaving += [n for n in self._order[start:] if any(n is s for s in sent)]
                parts.append(self._order[start:])
                del self._order[start:]
            if len(parts) > 1:  # what an overlapped pair sends leaves after both
                parts = [[n for n in part if n not in leaving] for part in parts]
                self._order += _interleaved(parts) + leaving
            else:
                self._order += parts[0]
        return [latest.get(v, self._refs.get(v)) for v in region.terminator.operands]

    def _action(
        self,
        op: Operation,
        action: Action,
        held: dict[int, dict[Value, Ref]],
        ops: Sequence[Operation],
    ) -> dict[Value, Ref]:
        """Run some operations of an action; what it makes."""
        prefix = self._prefix
        chunk = f"c{action.chunk}/" if action.chunk else ""
        self._prefix = f"{prefix}mb{action.microbatch}/{chunk}"
        for inner in ops:
            self._op(inner)
        self._prefix = prefix
        made = {r: self._refs[r] for o in ops for r in o.results}
        values = zip(op.results, op.body.terminator.operands, strict=True)
        results = {r: self._refs.get(v) for r, v in values}
        self._refs.update(results)
        held.setdefault(action.microbatch, {}).update(made | results)
        return results

    # -- nodes -------------------------------------------------------------------------------------

    def _deps(self, op: Operation) -> list[Node]:
        return [n for v in op.operands if (n := last_node(self._refs.get(v))) is not None]

    def _name(self, op: Operation) -> str:
        return f"{op.phase}/{self._prefix}{op.result.name}"

    def _node(self, op: Operation) -> Ref:
        if op.name == "et.comp":
            return self._computation(op)
        if op.name == "et.copy":
            return self._copy(op)
        return self._collective(op) if op.name == "et.coll" else self._message(op)

    def _copy(self, op: Operation) -> Node:
        kind, last = "store" if op.text("to") == "host" else "load", self._last_computation()
        node = Node(
            kind,
            f"{self._name(op)}.{kind}",
            op.phase,
            self._number(op, "bytes"),
            to=op.text("to"),
            deps=[n for v in op.operands if (n := last_node(self._refs.get(v))) is not None],
            after=[last] if last is not None else [],
        )
        self._order.append(node)
        return node

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
        self._order.append(node)
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
        if op.flag("overlapped"):
            node.after += self._before_last_product()
        self._order.append(node)
        return node

    def _before_last_product(self) -> list[Node]:
        """The computation right before the last matrix product, which starts when it is done."""
        computations = filter(_computes, reversed(self._order))
        for node in computations:
            if node.matmul:
                return list(islice(computations, 1))
        return []

    def _collective(self, op: Operation) -> Ref:
        if "bucket" in op.attrs:
            return self._buckets(op)
        node = Node(
            op.text("kind"),
            self._name(op),
            op.phase,
            self._number(op, "bytes"),
            group=group_axes(op),
            blocking=op.flag("blocking"),
            deps=self._deps(op),
        )
        self._order.append(node)
        return node

    def _buckets(self, op: Operation) -> Ref:
        """The calls of a reduction; the last one to be issued."""
        sizes = [evaluate(part, self._env) for part in op.exprs("parts")]
        values = zip(op.operands, sizes, strict=True)
        given = [p for v, size in values for p in _pieces(v, self._refs.get(v), size)]
        cut = Bucketed([], [])
        for inside in cut_into_buckets(given, self._number(op, "bucket"), self._order):
            node = Node(
                op.text("kind"),
                f"{op.phase}/{self._prefix}{_label(inside)}",
                op.phase,
                sum(p.size for p in inside),
                group=group_axes(op),
                deps=list({id(p.node): p.node for p in inside if p.node is not None}.values()),
            )
            cut.nodes.append(node)
            cut.ready.append(inside[-1].node)
        self._bucketed.append(cut)
        return cut.nodes[-1]


def _receives(body: Region) -> list[Operation]:
    return [op for op in body.ops if op.name == "et.recv" and not op.operands]


def _computes(node: Node) -> bool:
    return not (node.group or node.over or node.to)


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


def program_of(rank_class: RankClass) -> PlainProgram:
    """The program of a class."""
    where = rank_class.module, rank_class.graph, rank_class.stage
    order, receives = actions_of(*where), receives_of(*where)
    return plain_program(
        rank_class.graph, rank_class.name, rank_class.env, order, receives, rank_class.channels
    )


def plain_trace(
    program: PlainProgram,
    mesh: Mapping[str, int],
    groups: Groups,
    rank: int,
    roofline: Roofline | None = None,
) -> bytes:
    """The file of a rank."""
    width = len(varint(groups.ranks - 1))
    parts = [encode_metadata(SCHEMA_VERSION)]
    for node in program.nodes:
        group = str(groups.of_rank(node.group, rank)) if node.group else ""
        found = TraceWriter(mesh, groups.ranks, roofline).trace_node(node, group)
        record = encode_node(found)
        if node.over:
            towards = node.by if node.kind == "send" else -node.by
            peer = int(neighbours(mesh, node.over, towards, np.array([rank]))[0])
            digits = [peer >> (7 * i) & 0x7F for i in range(width)]
            record = record[:-width] + bytes([*(d | 0x80 for d in digits[:-1]), digits[-1]])
        parts.append(record)
    return b"".join(parts)
