"""Steps of accumulations and schedules: each is unrolled once as a template, and instantiated for
every microbatch.

A template is identified by the regions of the step, by the shapes of their inputs, and by the
computations right before it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice

from stagec.ir.alike import captured
from stagec.ir.core import Operation, Region, Value
from stagec.ir.types import NODE
from stagec.program.buckets import Bucketed
from stagec.program.groups import Channel, crosses_pods
from stagec.program.nodes import MICROBATCH, OUTSIDE, Node, Program, Ref
from stagec.program.sizes import Layered
from stagec.program.stamp import (
    INSIDE,
    NO_FRONT,
    Frontier,
    Inputs,
    PartValues,
    Placeholders,
    RegionUse,
    Shape,
    Stamped,
    StepInstance,
    Template,
    TemplatePart,
    build,
    flat,
    front_of,
    leaves,
    make_template,
)
from stagec.program.unroller import Unroller, handle_of
from stagec.schedule.action import Action, Kind, RankActions, steps
from stagec.schedule.attached import regions_of

#: Templates by key; classes with the same sizes share them.
Templates = dict[Hashable, Template]


#: An action without its microbatch (kind, chunk, split), and the index of its microbatch in the
#: step.
_Kind = tuple[Kind, int, bool, int]
_NOTHING: Mapping[RegionUse, Stamped] = {}
_OUTSIDE = None, None
#: Where a value comes from: None if from outside of the accumulation, INSIDE if from the step
#: itself, else the part of the template of an earlier step.
_Source = PartValues | str | None


@dataclass(frozen=True)
class Order:
    """The work of a pipeline stage. `actions` are its actions; `receives` has, under the index of
    the first action of a step, the actions whose receives are posted before the step. `joined` is
    the axis of the stages if sums over them wait for the last action. `slot` is the index of the
    stage among those that run the graph."""

    actions: RankActions = ()
    receives: Mapping[int, Sequence[Action]] = field(default_factory=dict[int, Sequence[Action]])
    joined: str = ""
    slot: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The parts of a step. `makers` are the regions that make what these capture: each with the
    slot of its microbatch, and with the slots in which earlier parts of the step run it.
    `looks_back` says whether a part may depend on earlier computations."""

    parts: tuple[TemplatePart, ...]
    makers: Sequence[tuple[int, RegionUse, Sequence[int]]]
    looks_back: bool


class Stepper(Unroller):
    """Unrolls a graph into the program of a rank, with the actions of its stage."""

    def __init__(
        self,
        env: Mapping[str, int],
        order: Order,
        channels: Mapping[Channel, int],
        loads: Layered | None,
        templates: Templates,
    ) -> None:
        super().__init__(env, channels, loads, order.joined, order.slot)
        self._steps, self._templates = order, templates
        self.returned: list[Ref] = []
        #: The instance that contains the frontier; None if it is in several.
        self._newest: StepInstance | None = None

    def take(self, value: Value, name: str, shape: Shape) -> list[str]:
        """Add placeholders for a value of this shape that comes from an earlier step. Returns their
        names."""
        names: list[str] = []
        self._refs[value] = build(shape, self._outside(name, names))
        return names

    def leave(self, name: str, ref: Ref) -> list[str]:
        """Add placeholders for a value that a later step takes. Returns their names."""
        names: list[str] = []
        for made, node in zip(leaves(ref), self._outside(name, names), strict=False):
            node.deps = (*node.deps, made)
        return names

    def _outside(self, name: str, names: list[str]) -> Iterator[Node]:
        for i in itertools.count():
            names.append(f"{name}/{i}")
            node = Node(OUTSIDE, names[-1], "", 0)
            self._issue(node)
            yield node

    def finish(self, name: str) -> Program:
        """All nodes in their final order, with identifiers and control dependencies."""
        return self._columns.program(name, self._order, self._bucketed)

    def accumulate(self, op: Operation, region: Region) -> list[Ref]:
        """Run each microbatch, or the actions of a schedule, as instances of templates."""
        if self._in_template:  # a template consists of nodes, not of instances
            return super().accumulate(op, region)
        inputs = [self._ref(v) for v in op.operands]
        self._refs.update(zip(region.args, inputs, strict=True))
        if "schedule" in op.attrs:
            made = self._scheduled(region)
        else:
            ends = region.terminator.operands
            seen = RegionUse(region, ends, ends, captured(region))
            made = _Stamps([seen])
            part = TemplatePart(seen, f"{self._prefix}mb{MICROBATCH[0]}/", 0, 0)
            step = made.step([part])
            for i in range(self._count(op, "count")):
                self._step(step, (i,), made)
        # sums are complete with the last microbatch
        for seen, stamp in made.latest.items():
            self._refs.update(zip(seen.results, stamp.values(), strict=True))
        return [self._ref(v) for v in region.terminator.operands]

    # -- actions of a pipeline schedule ------------------------------------------------------------

    def _scheduled(self, region: Region) -> _Stamps:
        """Run the actions in the order of the schedule. Later actions of the same microbatch use
        the values of an action; a value that the region yields is complete after the last action
        that adds to it."""
        actions: dict[tuple[str, int], RegionUse] = {}
        receives: dict[tuple[str, int], RegionUse] = {}
        inside_of = cache(captured)
        for op in region.ops[:-1]:
            which, got = (op.text("kind"), op.integer("chunk")), receives_in(op.body)
            received = [o.result for o in op.body.ops if o in got]
            arrived = {value: Value(value.name, NODE, op, -1) for value in received}
            outside = {**dict(zip(op.body.args, op.operands, strict=True)), **arrived}
            ends = op.body.terminator.operands
            inside = inside_of(op.body, got)
            actions[which] = RegionUse(op.body, op.results, ends, inside, got, outside)
            others = frozenset(op.body.ops) - got
            inside = inside_of(op.body, others)
            receives[which] = RegionUse(op.body, [*arrived.values()], received, inside, others)
        made = _Stamps([*actions.values(), *receives.values()])

        @cache
        def parts(*kinds: _Kind) -> _Step:
            return made.step(self._parts(actions, kinds))

        @cache
        def posted(kind: _Kind) -> Sequence[_Step]:
            return [made.step([part]) for part in self._parts(receives, [kind])]

        place = 0
        for step in steps(self._steps.actions):
            for action in self._steps.receives.get(place, ()):
                for receive in posted(_kind(action, 0)):
                    self._step(receive, (action.microbatch,), made)
            place += len(step)
            numbers = [*dict.fromkeys([action.microbatch for action in step])]
            mine = parts(*[_kind(action, numbers.index(action.microbatch)) for action in step])
            if mine.parts:
                self._step(mine, numbers, made)
        return made

    def _parts(
        self, regions: Mapping[tuple[str, int], RegionUse], kinds: Sequence[_Kind]
    ) -> list[TemplatePart]:
        """The regions that a step of these actions executes."""
        parts: list[TemplatePart] = []
        for which, (kind, chunk, split, slot) in enumerate(kinds):
            runs = regions_of(Action(kind, chunk, 0, split=split))
            for seen in filter(None, map(regions.get, runs)):
                first = seen.body.owner.integer("chunk")  # the first that has this region
                scope = f"c{first}/" if first else ""
                prefix = f"{self._prefix}mb{MICROBATCH[slot]}/{scope}"
                parts.append(TemplatePart(seen, prefix, slot, which))
        return parts

    def _step(self, step: _Step, microbatches: Sequence[int], made: _Stamps) -> None:
        """Execute the regions of one step: add an instance of its template, which is made on first
        use."""
        instances, origins = made.sources(step, microbatches)
        last, front = (self._newest, NO_FRONT) if step.looks_back else (None, NO_FRONT)
        if last is not None:
            key: Hashable = step, origins, last.inputs.template
        else:
            front = self._front() if step.looks_back else NO_FRONT
            key = step, origins, front
        instances.append(last)
        inputs = made.known.get(key)
        if inputs is None:
            if last is not None and last.template.front is not None:
                front = last.template.front
            inputs = made.known[key] = self._inputs(step.parts, origins, last, front, made)
        made.put(step.parts, microbatches, self._stamp(inputs, instances, microbatches))

    def _issue(self, node: Node) -> None:
        if not self._in_template:
            self._newest = None
        super()._issue(node)

    def _inputs(
        self,
        parts: Sequence[TemplatePart],
        sources: Sequence[_Source],
        last: StepInstance | None,
        front: Frontier,
        made: _Stamps,
    ) -> Inputs:
        """The template of a step and the origins of its inputs: `sources`, and after them the
        instance `last` with the frontier."""
        shapes: list[Shape] = []
        origins: list[tuple[int | None, int]] = []
        first = 0
        for part in parts:
            makers = made.makers(part.seen)
            for value in part.seen.captured:
                which = makers.index(made.owner[value]) + first if value in made.owner else None
                source = None if which is None else sources[which]
                if source == INSIDE:
                    shapes.append(INSIDE)
                    continue
                if isinstance(source, PartValues):
                    shape, places = source.values[made.owner[value].places[value]]
                else:
                    which = None
                    shape, places = flat(self._refs.get(value))
                shapes.append(shape)
                origins += [(which, place) for place in places]
            first += len(makers)
        origins += [(None if last is None else first, place) for place in front.places]
        key = (*(part.key for part in parts), *shapes, front.products)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = self._unrolled(parts, shapes, front.products)
        return Inputs(template, origins)

    def _front(self) -> Frontier:
        """The frontier before a step, as handles."""
        nodes, _ = front_of((handle_of(t, i), product) for t, i, product in self._computations())
        return Frontier.of(nodes)

    def _unrolled(
        self, parts: Sequence[TemplatePart], shapes: Sequence[Shape], fronts: Sequence[bool]
    ) -> Template:
        """Unroll a step with placeholders for its inputs."""
        kept = self._refs, self._order, self._bucketed, self._sent, self._prefix
        source = Placeholders()
        refs = [None if s == INSIDE else build(s, source) for s in shapes]
        front = [replace(next(source), matmul=int(product)) for product in fronts]
        self._in_template = True
        self._refs, self._order, self._bucketed, self._sent = {}, [*front], [], Counter()
        pieces: list[list[Node]] = []
        received: list[Node] = []
        made: list[Sequence[Ref]] = []
        start, given, last = len(front), iter(zip(shapes, refs, strict=True)), -1
        by_slot: dict[int, dict[Value, Ref]] = {}
        for part in parts:
            mine = by_slot.setdefault(part.slot, {})
            self._refs.update(mine)
            taken = zip(part.seen.captured, part.seen.inside, strict=True)
            for (value, inside), (shape, ref) in zip(
                taken, islice(given, len(part.seen.captured)), strict=True
            ):
                self._refs[inside] = self._refs.get(value) if shape == INSIDE else ref
                if inside.producer in part.seen.skip and isinstance(ref, Node):
                    received.append(ref)
            if part.action != last:
                pieces.append([])
                last = part.action
                del self._order[start:]
            before = len(self._order)
            self._prefix = part.prefix
            self.region(part.seen.body, part.seen.skip)
            ends = [self._ref(value) for value in part.seen.yielded]
            values = dict(zip(part.seen.results, ends, strict=True))
            self._refs.update(values)
            mine.update(values)
            made.append(ends)
            pieces[-1] += [n for n in self._order[before:] if isinstance(n, Node)]
        cut = [b for b in self._bucketed if isinstance(b, Bucketed)]
        ordered = _interleaved(pieces, {part.seen.body for part in parts})
        if len(pieces) > 1:
            _tie(ordered, received)
        sent, channels = dict(self._sent), len(self._channels)
        template = make_template(ordered, cut, made, len(source.given), sent, channels)
        self._refs, self._order, self._bucketed, self._sent, self._prefix = kept
        self._in_template = False
        return template

    def _stamp(
        self, inputs: Inputs, sources: Sequence[StepInstance | None], microbatches: Sequence[int]
    ) -> StepInstance:
        """Add an instance of a template, and count its messages."""
        template, sent = inputs.template, self._sent
        before = [sent[stream] for stream in template.sent]
        for stream, count in template.sent.items():
            sent[stream] += count
        instance = self._columns.add_instance(inputs, sources, microbatches, before)
        self._order.append(instance)
        if template.front is not None:
            self._newest = instance
        elif template.computations:
            self._newest = None
        if template.buckets:
            self._bucketed.append(instance)
        return instance


class _Stamps:
    """The values that the regions of an accumulation have produced so far, by microbatch and the
    latest of all.

    A step uses the value of its own microbatch, otherwise the latest. Steps of the same parts whose
    sources come from the same templates have equal inputs: these are cached in `known`.
    """

    def __init__(self, regions: Sequence[RegionUse]) -> None:
        self.latest: dict[RegionUse, Stamped] = {}
        self.known: dict[Hashable, Inputs] = {}
        self.owner = {value: seen for seen in regions for value in seen.results}
        self._of: dict[int, dict[RegionUse, Stamped]] = {}
        self._makers: dict[RegionUse, tuple[RegionUse, ...]] = {}

    def makers(self, seen: RegionUse) -> tuple[RegionUse, ...]:
        """The regions that produce the values that a region captures."""
        makers = self._makers.get(seen)
        if makers is None:
            owners = (self.owner[v] for v in seen.captured if v in self.owner)
            makers = self._makers[seen] = tuple(dict.fromkeys(owners))
        return makers

    def step(self, parts: Sequence[TemplatePart]) -> _Step:
        """A step of these parts."""
        makers = [
            (part.slot, maker, [p.slot for p in parts[:i] if p.seen is maker])
            for i, part in enumerate(parts)
            for maker in self.makers(part.seen)
        ]
        return _Step(tuple(parts), makers, any(part.seen.looks_back for part in parts))

    def sources(
        self, step: _Step, microbatches: Sequence[int]
    ) -> tuple[list[StepInstance | None], tuple[_Source, ...]]:
        """The instances that make what a step takes, one for each of its `makers`, and the parts of
        their templates."""
        instances: list[StepInstance | None] = []
        origins: list[_Source] = []
        for slot, maker, before in step.makers:
            mine = self._of.get(microbatches[slot], _NOTHING)
            if before and (slot in before or maker not in mine):
                source: Stamped | tuple[None, str | None] = None, INSIDE
            else:
                source = mine.get(maker) or self.latest.get(maker) or _OUTSIDE
            instances.append(source[0])
            origins.append(source[1])
        return instances, tuple(origins)

    def put(
        self, parts: Sequence[TemplatePart], microbatches: Sequence[int], instance: StepInstance
    ) -> None:
        """Record the values of the parts of a step."""
        for part, origin in zip(parts, instance.inputs.template.made, strict=True):
            number = microbatches[part.slot]
            mine = self._of.get(number)
            if mine is None:
                mine = self._of[number] = {}
            self.latest[part.seen] = mine[part.seen] = Stamped(instance, origin)


def _kind(action: Action, slot: int) -> _Kind:
    return action.kind, action.chunk, action.split, slot


def receives_in(body: Region) -> frozenset[Operation]:
    """The receives of an action from other stages that are posted before it: those without
    operands."""
    receives = (op for op in body.ops if op.name == "et.recv" and not op.operands)
    return frozenset(op for op in receives if not crosses_pods(op))


def _interleaved(parts: Sequence[list[Node]], bodies: Collection[Region]) -> list[Node]:
    """The nodes of a step in the order of issue. In an overlapped pair, one action continues where
    the other starts to communicate; the sends of both to other stages come at the end, in the order
    of the pair."""
    if len(parts) < 2:
        return [n for part in parts for n in part]
    last = [n for p in parts for n in p if n.kind == "send" and n.op and n.op.parent in bodies]
    leaves = set(last)
    queues = [_between_collectives([n for n in part if n not in leaves]) for part in parts]
    longest = max(len(q) for q in queues)
    return [n for i in range(longest) for q in queues if i < len(q) for n in q[i]] + last


def _tie(pair: Sequence[Node], received: Sequence[Node]) -> None:
    """Add control edges to an overlapped pair: it starts when the inputs of both of its actions
    have arrived, and sends its results at its end, as DualPipe does
    (github.com/deepseek-ai/DualPipe, dualpipe/dualpipe.py, `_forward_backward_chunk`)."""
    computations = [n for n in pair if n.is_computation]
    if not computations:
        return
    first, last = computations[0], computations[-1]
    first.after = (*first.after, *(n for n in received if n not in first.deps))
    for node in reversed(pair):
        if node.kind != "send":
            break
        node.after = (*node.after, last) if last not in node.deps else node.after


def _between_collectives(nodes: Sequence[Node]) -> list[list[Node]]:
    """Split nodes after each collective."""
    pieces: list[list[Node]] = [[]]
    for node in nodes:
        pieces[-1].append(node)
        if node.is_collective:
            pieces.append([])
    return pieces
