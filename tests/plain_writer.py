"""What the trace of a rank is, said plainly and slowly. What stagec writes must be equal, byte for
byte.

A trace is the runs of the operations of a lowered graph. A run is an operation and the iterations
of the regions around it, outermost first:

    %y = et.repeat[count = 2, carry = 1] (%h: node = %x, %w: node = %W) {
      %a = et.comp[einsum, ...](%h, %w) : node         its runs are (%a, 0) and (%a, 1)
      et.yield(%a)
    }

`_Origins` says what a run waits for: it follows an operand back through the text to the run that
makes it, here %h of (%a, 1) to (%a, 0). `_Issue` says in which order runs are issued. Nodes are
made last, one for each run. No value is remembered on the way, and no node is made twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stagec.formats.base import Durations
from stagec.formats.chakra.encode import SCHEMA_VERSION, TraceWriter
from stagec.formats.chakra.nodes import encode_metadata, encode_node, varint
from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import evaluate
from stagec.ir.recompute_window import replays
from stagec.program.classes import RankClass
from stagec.program.groups import Groups, channel_of, group_axes, neighbours
from stagec.program.nodes import Node
from stagec.schedule.action import Action, steps
from stagec.schedule.attached import actions_of, placement_of, receives_of, regions_of
from tests.stacks import as_they_run, beside, layers_of, place_of

Iterations = tuple[int, ...]


class Run(NamedTuple):
    """An operation, and the iterations of the repeats and accumulations around it."""

    op: Operation
    at: Iterations


class Gradient(NamedTuple):
    """A part of what a reduction in buckets takes: its bytes, what completes it, layer, name."""

    size: int
    run: Run | None
    layer: str
    name: str


@dataclass
class Bucket:
    """One call of a reduction, and the run that it is issued behind: the one that completes its
    last gradient, or the last of all if it joins stages."""

    call: Run
    ready: Run | None = None
    inside: list[Gradient] = field(default_factory=list[Gradient])


def _around(op: Operation) -> list[Operation]:
    """The operations around one, outermost first; without the graph."""
    outer = op.parent_op
    return [] if outer is None or outer.name == "et.graph" else [*_around(outer), outer]


def _counts(op: Operation) -> bool:
    return op.name in ("et.repeat", "et.accumulate")


def _computes(run: Run) -> bool:
    return run.op.name == "et.comp"


class _Origins:
    """Which run makes a value. `last` is the last microbatch for which an action runs."""

    def __init__(self, env: Mapping[str, int], last: Mapping[Operation, int]) -> None:
        self._env, self._last = env, last
        self._sizes: dict[tuple[Operation, str], int] = {}

    def size(self, op: Operation, name: str) -> int:
        """The value of an attribute, 0 if there is none."""
        if (op, name) not in self._sizes:
            actual = evaluate(op.expr(name), self._env) if name in op.attrs else 0
            self._sizes[op, name] = actual
        return self._sizes[op, name]

    def iterations(self, op: Operation) -> list[int]:
        """Of a repeat or an accumulation, in the order in which they run."""
        return list(range(self.size(op, "count")))[:: -1 if op.flag("reverse") else 1]

    def layers(self, op: Operation) -> list[tuple[Operation, int]]:
        """The iterations of a repeat and of all that run among them."""
        return layers_of(op) if "order" in op.attrs else [(op, i) for i in self.iterations(op)]

    def idle(self, op: Operation, at: Iterations) -> bool:
        """Whether an operation in a repeat does not run in this iteration: what was gathered is
        still there from forward, or the iteration does not recompute."""
        repeat = op.parent_op
        if repeat is None or repeat.name != "et.repeat":
            return False
        if "ahead" in op.attrs:
            return self.layers(repeat).index((repeat, at[-1])) < self.size(op, "kept")
        return op.phase == "recompute" and not replays(repeat, at[-1])

    def run(self, value: Value, at: Iterations, slices: Iterations = ()) -> Run | None:
        """The run that completes a value, or these slices of it, outermost first, if it is stacked.
        None for what is there when the step begins."""
        owner = value.producer
        if owner is None:
            return self._argument(value, value.region.owner, at, slices)
        at = at[: sum(map(_counts, _around(owner)))]
        if self.idle(owner, at):
            return None
        if owner.name == "et.recall":
            again, stashed = owner.operands
            repeats = [(o, i) for o, i in _numbered(owner, at) if o.name == "et.repeat"]
            return self.run(again if not repeats or replays(*repeats[-1]) else stashed, at, slices)
        if owner.region is None:
            return Run(owner, at)
        inner = owner.region.terminator.operands[value.index]
        if not _counts(owner):  # an action
            return self.run(inner, at, slices)
        order = self.iterations(owner)
        if owner.name == "et.accumulate":
            maker = inner.producer
            microbatch = self._last.get(maker, order[-1]) if maker else order[-1]
            return self.run(inner, (*at, microbatch), slices)
        carried = value.index < owner.integer("carry", 1)
        if not order:
            return self.run(owner.operands[value.index], at, slices) if carried else None
        if carried:
            last, i = self.layers(owner)[-1]
            return self.run(last.body.terminator.operands[value.index], (*at, i), slices)
        if not slices:
            return self.run(inner, (*at, order[-1]), slices)
        return self.run(inner, (*at, slices[0]), slices[1:])

    def _argument(
        self, value: Value, owner: Operation, at: Iterations, slices: Iterations
    ) -> Run | None:
        if not _counts(owner):
            return None
        outside = sum(map(_counts, _around(owner)))
        outer, i = at[:outside], at[outside]
        given = owner.operands[value.index]
        if owner.name == "et.accumulate":
            return self.run(given, outer, slices)
        if value.index >= owner.integer("carry", 1):
            return self.run(given, outer, (i, *slices))
        layers = self.layers(owner)
        if (owner, i) == layers[0]:
            return self.run(beside(owner)[0].operands[value.index], outer, slices)
        maker, before = layers[layers.index((owner, i)) - 1]
        return self.run(maker.body.terminator.operands[value.index], (*outer, before), slices)

    def gradients(self, call: Run) -> dict[int, list[Gradient]]:
        """What a reduction takes, by the chunk of the model; each layer by itself."""
        actual: dict[int, list[Gradient]] = {}
        for value, part in zip(call.op.operands, call.op.exprs("parts"), strict=True):
            size, chunk, inner, layers, repeat = evaluate(part, self._env), 0, value, 0, call.op
            while not layers and (op := inner.producer) is not None and op.region is not None:
                stacked = op.name == "et.repeat" and inner.index >= op.integer("carry", 1)
                layers, repeat = (self.size(op, "count") if stacked else 0), op
                chunk = op.integer("chunk", chunk)
                inner = op.region.terminator.operands[inner.index]
            mine = actual.setdefault(chunk, [])
            if not layers:
                mine.append(Gradient(size, self.run(value, call.at), "", value.name))
            for i in range(layers):
                run = self.run(value, call.at, (i,))
                label = f"L{place_of(repeat, i)}"
                mine.append(Gradient(size // layers, run, label, value.name))
        return {chunk: actual[chunk] for chunk in sorted(actual)}


def _numbered(op: Operation, at: Iterations) -> list[tuple[Operation, int]]:
    """The repeats and accumulations around an operation, and their iterations."""
    return list(zip(filter(_counts, _around(op)), at, strict=True))


class _Issue:
    """The order of issue: `runs`, and `calls` of reductions that are cut into buckets. `behind`
    are runs that another one was issued behind, whatever their streams. What joins stages, along
    the axis `joined`, is issued behind all runs so far: `late` are the last ones before calls."""

    def __init__(
        self,
        origins: _Origins,
        actions: Sequence[Action],
        receives: Mapping[int, Sequence[Action]],
        joined: str,
    ) -> None:
        self._origins, self._actions, self._receives = origins, actions, receives
        self._joined = joined
        self.runs: list[Run] = []
        self.calls: list[Run] = []
        self.behind: dict[Run, list[Run]] = {}
        self.late: dict[Run, Run] = {}

    def region(self, region: Region, at: Iterations) -> None:
        """Issue what a region runs."""
        for op in as_they_run(region):
            if not (op.name == "et.recall" or "ahead" in op.attrs or self._origins.idle(op, at)):
                self._op(op, at)

    def _op(self, op: Operation, at: Iterations) -> None:
        if op.region is None:
            self._run(Run(op, at))
        elif "schedule" in op.attrs:
            self._schedule(op.region, at)
        else:
            order = self._origins.layers(op)
            early = {o: [g for g in o.body.ops if "ahead" in g.attrs] for o, _ in order}
            all_early = [gather for gathers in early.values() for gather in gathers]
            ahead = max((self._origins.size(o, "ahead") for o in all_early), default=0)
            for step, (layer, i) in enumerate(order):
                for later, soon in order[step + ahead if step else 0 : step + ahead + 1]:
                    for gather in early[later]:
                        if not self._origins.idle(gather, (*at, soon)):
                            self._run(Run(gather, (*at, soon)))
                self.region(layer.body, (*at, i))

    def _schedule(self, region: Region, at: Iterations) -> None:
        """Actions as ordered, messages received before the action that the schedule says."""
        actions = {(op.text("kind"), op.integer("chunk")): op for op in region.ops[:-1]}

        def received(action: Action) -> list[Operation]:
            ops = filter(None, map(actions.get, regions_of(action)))
            return [o for op in ops for o in op.body.ops if _posted(o)]

        place = 0
        for step in steps(self._actions):
            for action in self._receives.get(place, ()):
                for op in received(action):
                    self._run(Run(op, (*at, action.microbatch)))
            place += len(step)
            parts: list[list[Run]] = []
            for action in step:
                start = len(self.runs)
                for op in filter(None, map(actions.get, regions_of(action))):
                    for inner in as_they_run(op.body):
                        if not _posted(inner):
                            self._op(inner, (*at, action.microbatch))
                parts.append(self.runs[start:])
                del self.runs[start:]
            if len(parts) == 1:
                self.runs += parts[0]
                continue
            pair = _overlapped(parts, region)
            self._tie(pair, [Run(o, (*at, a.microbatch)) for a in step for o in received(a)])
            self.runs += pair

    def _tie(self, pair: Sequence[Run], received: Sequence[Run]) -> None:
        """A pair starts when all is there that both actions need, and sends at its end."""
        computations = [run for run in pair if _computes(run)]
        self.behind.setdefault(computations[0], []).extend(received)
        for run in pair[::-1]:
            if run.op.name != "et.send":
                break
            self.behind.setdefault(run, []).append(computations[-1])

    def _run(self, run: Run) -> None:
        before = filter(_computes, reversed(self.runs))
        if "ahead" in run.op.attrs or run.op.name == "et.copy":
            self.behind[run] = [r for r in [next(before, None)] if r]
        elif run.op.flag("overlapped"):  # it goes while the last product is computed
            product = next((r for r in before if self._origins.size(r.op, "matmul")), None)
            self.behind[run] = [r for r in [next(before, None)] if r and product]
        elif run.op.name == "et.coll" and self._joined in run.op.names("group"):
            self.behind[run] = [r for r in [next(before, None)] if r]
            self.late[run] = self.runs[-1]
        (self.calls if "bucket" in run.op.attrs else self.runs).append(run)

    def buckets(self) -> list[Bucket]:
        """The calls of all reductions, each in the order in which they are complete."""
        place: dict[Run | None, int] = {run: i for i, run in enumerate(self.runs)}
        when: dict[Run | None, tuple[int, ...]] = {run: (i,) for run, i in place.items()}
        actual: list[Bucket] = []
        for call in self.calls:
            mine: list[Bucket] = []
            for given in self._origins.gradients(call).values():
                full = True
                for gradient in sorted(given, key=lambda g: place.get(g.run, -1)):
                    if full:
                        mine.append(Bucket(call))
                    mine[-1].inside.append(gradient)
                    kept = sum(g.size for g in mine[-1].inside)
                    full = kept >= self._origins.size(call.op, "bucket")
            for bucket in mine:
                runs = [g.run for g in bucket.inside]
                last = max(runs[::-1], key=lambda r: when.get(r, (-1,)))
                bucket.ready = self.late.get(call, last)
            mine.sort(key=lambda b: when.get(b.ready, (-1,)))
            if mine:
                when[call] = (*when.get(mine[-1].ready, (-1,)), len(actual + mine))
            actual += mine
        return actual


def _posted(op: Operation) -> bool:
    """Whether it is a receive that waits for nothing in its action."""
    return op.name == "et.recv" and not op.operands


def _overlapped(parts: Sequence[list[Run]], scheduled: Region) -> list[Run]:
    """A pair of actions takes turns, each up to its next collective. What leaves goes last."""
    bodies = [op.region for op in scheduled.ops]
    leaving = [r for p in parts for r in p if r.op.name == "et.send" and r.op.parent in bodies]
    turns: list[tuple[int, int, Run]] = []
    for which, part in enumerate(parts):
        turn = 0
        for run in part:
            turns += [] if run in leaving else [(turn, which, run)]
            turn += run.op.name == "et.coll"
    return [run for _, _, run in sorted(turns, key=lambda t: t[:2])] + leaving


@dataclass(slots=True)
class PlainProgram:
    """The nodes of a class in issue order, identified from 1."""

    name: str
    nodes: list[Node]


def program_of(rank_class: RankClass) -> PlainProgram:
    """The program of a class."""
    graph, where = rank_class.graph, (rank_class.module, rank_class.graph, rank_class.stage)
    actions = actions_of(*where)
    regions = {
        (op.text("kind"), op.integer("chunk")): op
        for op in graph.body.walk()
        if op.name == "et.action"
    }
    last = {regions[r]: a.microbatch for a in actions for r in regions_of(a) if r in regions}
    origins = _Origins(rank_class.env, last)
    placement = placement_of(rank_class.module, graph)
    one_copy = placement is not None and placement.copies == 1
    joined = graph.text("over") if one_copy else ""
    issue = _Issue(origins, actions, receives_of(*where), joined)
    issue.region(graph.body, ())
    return PlainProgram(rank_class.name, list(_nodes(rank_class, origins, issue)))


def _nodes(rank_class: RankClass, origins: _Origins, issue: _Issue) -> Iterator[Node]:
    """The nodes in their final order: a bucket stands right after what completes it. Reductions
    that several buckets stand for are complete with the last of these."""
    buckets, sent = issue.buckets(), Counter[object]()
    final: list[Run | Bucket] = [b for b in buckets if b.ready is None]
    final += issue.runs
    for bucket in buckets:
        ready = _completing(bucket, buckets)
        if ready is not None:
            i = final.index(ready) + 1
            while _stands_behind(final[i], ready, buckets):
                i += 1
            final.insert(i, bucket)
    made = [_node(rank_class, origins, thing, sent) for thing in final]
    by_run = {t.call if isinstance(t, Bucket) else t: n for t, n in zip(final, made, strict=True)}
    blocked: Node | None = None
    streams: dict[object, Node] = {}
    for number, (thing, node) in enumerate(zip(final, made, strict=True), 1):
        node.id = number
        if isinstance(thing, Bucket):
            actual = [g.run for g in thing.inside]
        else:
            actual = [origins.run(v, thing.at) for v in thing.op.operands]
        call = thing.call if isinstance(thing, Bucket) else thing
        node.after = [by_run[r] for r in issue.behind.get(call, ())]
        node.deps = list(dict.fromkeys(by_run[r] for r in actual if r))
        if node.blocking:
            node.after += filter(None, [streams.get("et.comp")])
            blocked = node
        elif node.is_computation and blocked:
            node.after.append(blocked)
            blocked = None
        op = thing.call.op if isinstance(thing, Bucket) else thing.op
        stream = op.name, node.to, node.over, node.by
        if stream in streams:
            node.after.append(streams[stream])
        streams[stream] = node
        node.after = [a for a in dict.fromkeys(node.after) if a not in node.deps]
    yield from made


def _completing(bucket: Bucket, buckets: Sequence[Bucket]) -> Run | Bucket | None:
    """What a bucket stands behind; of a reduction in buckets it is the last one."""
    return next((b for b in reversed(buckets) if b.call == bucket.ready), bucket.ready)


def _stands_behind(thing: Run | Bucket, ready: Run | Bucket, buckets: Sequence[Bucket]) -> bool:
    """Whether it is a bucket behind what is ready, or behind such a bucket."""
    if not isinstance(thing, Bucket):
        return False
    before = _completing(thing, buckets)
    return before is not None and (before == ready or _stands_behind(before, ready, buckets))


def _node(
    rank_class: RankClass, origins: _Origins, thing: Run | Bucket, sent: Counter[object]
) -> Node:
    """The node of a run, without its edges."""
    op, at = thing.call if isinstance(thing, Bucket) else thing
    numbers, scope = list(at), f"{op.phase}/"
    for around in _around(op):
        if _counts(around):
            number = place_of(around, numbers.pop(0))
            scope += f"{'L' if around.name == 'et.repeat' else 'mb'}{number}/"
        elif around.integer("chunk"):
            scope += f"c{around.integer('chunk')}/"
    if isinstance(thing, Bucket):
        first, last = thing.inside[0], thing.inside[-1]
        layers = "..".join(dict.fromkeys(g.layer for g in (first, last) if g.layer))
        names = first.name if len(thing.inside) == 1 else f"{first.name}..{last.name}"
        name = f"{scope}{layers}{'/' if layers else ''}{names}.reduce"
        size = sum(g.size for g in thing.inside)
        return Node(op.text("kind"), name, op.phase, size, group=group_axes(op))
    name, size = scope + op.result.name, origins.size(op, "bytes")
    if op.name == "et.comp":
        flops, matmul, out = (origins.size(op, n) for n in ("flops", "matmul", "out"))
        return Node(op.text("kind"), name, op.phase, size, flops, matmul, out)
    if op.name == "et.coll":
        group, blocking = group_axes(op), op.flag("blocking")
        return Node(op.text("kind"), name, op.phase, size, group=group, blocking=blocking)
    if op.name == "et.copy":
        kind = "store" if op.text("to") == "host" else "load"
        return Node(kind, f"{name}.{kind}", op.phase, size, to=op.text("to"))
    channel, kind = channel_of(op), op.name.removeprefix("et.")
    tag = sent[kind, channel] * len(rank_class.channels) + rank_class.channels[channel]
    sent[kind, channel] += 1
    name += ".send" if kind == "send" else ""
    by = evaluate(channel[1], rank_class.env) % rank_class.env[channel[0]]
    return Node(kind, name, op.phase, size, over=channel[0], by=by, tag=tag)


def plain_trace(
    program: PlainProgram,
    mesh: Mapping[str, int],
    groups: Groups,
    rank: int,
    durations: Durations | None = None,
) -> bytes:
    """The file of a rank."""
    width = len(varint(groups.ranks - 1))
    parts = [encode_metadata(SCHEMA_VERSION)]
    for node in program.nodes:
        group = str(groups.of_rank(node.group, rank)) if node.group else ""
        actual = TraceWriter(mesh, groups.ranks, durations).trace_node(node, group, node)
        record = encode_node(actual)
        if node.over:
            towards = node.by if node.kind == "send" else -node.by
            peer = int(neighbours(mesh, node.over, towards, np.array([rank]))[0])
            digits = [peer >> (7 * i) & 0x7F for i in range(width)]
            record = record[:-width] + bytes([*(d | 0x80 for d in digits[:-1]), digits[-1]])
        parts.append(record)
    return b"".join(parts)
