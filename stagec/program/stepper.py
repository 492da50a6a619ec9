"""Steps of accumulations and schedules: each is unrolled once, and stamped for every microbatch.

A step is known by its regions, by the shapes of what they take from outside, and by what was
computed right before; what it was when it was first seen is its template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np

from stagec.ir.core import Operation, Region, Value
from stagec.program.buckets import Bucketed
from stagec.program.groups import Channel
from stagec.program.nodes import MICROBATCH, Ints, Node, Program, Ref
from stagec.program.stamp import (
    INSIDE,
    NO_NODES,
    Held,
    Made,
    Placeholders,
    Shape,
    Template,
    TemplatePart,
    build,
    captured,
    flat,
    make_template,
)
from stagec.program.unroller import Layered, Unroller, handle_of
from stagec.schedule.action import Action, RankActions, steps
from stagec.schedule.attached import regions_of


@dataclass(frozen=True)
class Order:
    """What a pipeline stage does: its actions, and by the place of the first action of a step those
    whose receives stand before it."""

    actions: RankActions = ()
    receives: Mapping[int, Sequence[Action]] = field(default_factory=dict[int, Sequence[Action]])


class Stepper(Unroller):
    """Makes the program of a rank from a graph and the actions of its stage."""

    def __init__(
        self,
        env: Mapping[str, int],
        order: Order,
        channels: Mapping[Channel, int],
        loads: Layered | None,
    ) -> None:
        super().__init__(env, channels, loads)
        self._steps = order
        self._templates: dict[Hashable, Template] = {}

    def finish(self, name: str) -> Program:
        """All nodes in their final order, with identifiers and control dependencies."""
        return self._columns.program(
            name, self._order, self._bucketed, self._templates.values(), self._channels
        )

    def accumulate(self, op: Operation, region: Region) -> list[Ref]:
        """Run the step of each microbatch, or the actions of a schedule, from templates."""
        if self._in_template:  # in a template there are nodes only
            return super().accumulate(op, region)
        inputs = [self._ref(v) for v in op.operands]
        self._refs.update(zip(region.args, inputs, strict=True))
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

    # -- actions of a pipeline schedule ------------------------------------------------------------

    def _scheduled(self, region: Region, latest: dict[Value, Held]) -> None:
        """Run the actions as ordered. What an action makes is there for later ones of its
        microbatch; what the region yields is complete with the last action that adds to it."""
        actions: dict[tuple[str, int], _Seen] = {}
        receives: dict[tuple[str, int], _Seen] = {}
        for op in region.ops[:-1]:
            which, got = (op.text("kind"), op.integer("chunk")), receives_in(op.body)
            actions[which] = _Seen(op.body, op.results, skip=got)
            receives[which] = _Seen.receives(op.body, got)
        held: dict[int, dict[Value, Held]] = {}
        place = 0
        for step in steps(self._steps.actions):
            for action in self._steps.receives.get(place, ()):
                for part in self._parts([action], receives):
                    self._step([part], held, latest)
            place += len(step)
            if parts := self._parts(step, actions):
                self._step(parts, held, latest)

    def _parts(
        self, step: Sequence[Action], regions: Mapping[tuple[str, int], _Seen]
    ) -> list[TemplatePart]:
        """The regions that a step runs."""
        numbers = list(dict.fromkeys(action.microbatch for action in step))
        parts: list[TemplatePart] = []
        for which, action in enumerate(step):
            slot = numbers.index(action.microbatch)
            chunk = f"c{action.chunk}/" if action.chunk else ""
            prefix = f"{self._prefix}mb{MICROBATCH[slot]}/{chunk}"
            for seen in filter(None, map(regions.get, regions_of(action))):
                parts.append(seen.part(prefix, slot, which, action.microbatch))
        return parts

    def _step(
        self,
        parts: Sequence[TemplatePart],
        held: dict[int, dict[Value, Held]],
        latest: dict[Value, Held],
    ) -> None:
        """Run the regions of one step: stamp what it was when it was first seen."""
        inputs = self._inputs(parts, held)
        shapes = [shape for shape, _ in inputs]
        handles = [h for _, h in inputs if len(h)]
        front = self._front()
        before = np.array([handle for handle, _ in front], dtype=np.int64)
        outside = np.concatenate([*handles, before])
        fronts = tuple(product for _, product in front)
        key = (
            *((p.body.owner, p.skip, p.prefix, p.slot, p.action) for p in parts),
            *shapes,
            fronts,
        )
        template = self._templates.get(key)
        if template is None:
            template = self._unrolled(parts, shapes, fronts)
            self._templates[key] = template
        for part, made in zip(parts, self._stamp(template, parts, outside), strict=True):
            self._refs.update(made)
            latest.update(made)
            held.setdefault(part.microbatch, {}).update(made)

    def _inputs(
        self, parts: Sequence[TemplatePart], held: dict[int, dict[Value, Held]]
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
                found.append((INSIDE, NO_NODES) if inside else flat(self._refs.get(value)))
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
                found.append((handle_of(thing, place), product))
            if after_product:
                break
        return found[::-1]

    def _unrolled(
        self,
        parts: Sequence[TemplatePart],
        shapes: Sequence[Shape],
        fronts: Sequence[bool],
    ) -> Template:
        """Unroll a step with placeholders for what comes from outside."""
        kept = self._refs, self._order, self._bucketed, self._sent, self._prefix
        source = Placeholders()
        refs = [None if s == INSIDE else build(s, source) for s in shapes]
        front = [replace(next(source), matmul=int(product)) for product in fronts]
        self._in_template = True
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
            self.region(part.body, part.skip)
            values = {v: self._ref(y) for v, y in zip(part.results, part.yielded, strict=False)}
            self._refs.update(values)
            mine.update(values)
            made.append(values)
            pieces[-1] += [n for n in self._order[before:] if isinstance(n, Node)]
        cut = [b for b in self._bucketed if isinstance(b, Bucketed)]
        ordered = _interleaved(pieces, {part.body for part in parts})
        template = make_template(ordered, cut, made, len(source.given), dict(self._sent))
        template.first_prototype = self._columns.add_prototypes(template.nodes)
        self._refs, self._order, self._bucketed, self._sent, self._prefix = kept
        self._in_template = False
        return template

    def _stamp(
        self, template: Template, parts: Sequence[TemplatePart], outside: Ints
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


@dataclass(frozen=True)
class _Seen:
    """A region, or a part of it, that is run again and again, and what there is to know of it."""

    body: Region
    results: Sequence[Value]
    skip: frozenset[Operation] = frozenset()
    own: Sequence[Value] | None = None

    @staticmethod
    def receives(body: Region, got: frozenset[Operation]) -> _Seen:
        """Only the receives of an action."""
        values = [op.result for op in body.ops if op in got]
        return _Seen(body, values, frozenset(body.ops) - got, values)

    def __bool__(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.results) or any(op not in self.skip for op in self.body.ops[:-1])

    @cached_property
    def captured(self) -> tuple[Value, ...]:
        return captured(self.body, self.skip)

    def part(self, prefix: str, slot: int, action: int, microbatch: int) -> TemplatePart:
        """One run of it."""
        yielded = self.body.terminator.operands if self.own is None else self.own
        return TemplatePart(
            self.body,
            self.skip,
            self.results,
            yielded,
            self.captured,
            prefix,
            slot,
            action,
            microbatch,
        )


def receives_in(body: Region) -> frozenset[Operation]:
    """The receives of an action, which are posted before it: those that wait for nothing in it."""
    return frozenset(op for op in body.ops if op.name == "et.recv" and not op.operands)


def _interleaved(parts: Sequence[list[Node]], bodies: Collection[Region]) -> list[Node]:
    """The nodes of a step. In an overlapped pair one action goes on where the other starts to
    communicate, and what both send to other stages leaves at the end, in the order of the pair."""
    if len(parts) < 2:
        return [n for part in parts for n in part]
    last = [n for p in parts for n in p if n.kind == "send" and n.op and n.op.parent in bodies]
    leaves = set(last)
    queues = [_between_collectives([n for n in part if n not in leaves]) for part in parts]
    longest = max(len(q) for q in queues)
    return [n for i in range(longest) for q in queues if i < len(q) for n in q[i]] + last


def _between_collectives(nodes: Sequence[Node]) -> list[list[Node]]:
    """Pieces that end in a collective each."""
    pieces: list[list[Node]] = [[]]
    for node in nodes:
        pieces[-1].append(node)
        if node.is_collective:
            pieces.append([])
    return pieces
