"""The memory of a rank class over a step, in bytes: by category at every turn, by buffer at the
peak.

All sizes need values. An action is analyzed once for each state of its microbatch, not once for
each turn.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import Env, Expr, evaluate, total
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir.traits import Recasts, Terminates
from stagec.ir.types import CACHED, WEIGHTS
from stagec.ir_spec.ops.comm import CopyIn
from stagec.memory.buffers import CATEGORIES, GRADIENTS, STASH, Buffer, Lifetimes, RunOp
from stagec.memory.lifetimes import lifetimes
from stagec.memory.liveness import classify
from stagec.memory.step import (
    ActionInState,
    Doing,
    MemoryRun,
    MicrobatchState,
    Moment,
    Planner,
    highest,
    turns,
)
from stagec.models import LIBRARY
from stagec.schedule.action import RankActions
from stagec.schedule.attached import actions_of
from stagec.support.diagnostics import error
from stagec.support.source import file_loc

STATIC = ("parameters", GRADIENTS, "optimizer")
#: Caches of sequences in steps of serving, which exist from start to end.
CACHES = "caches"
#: Persistent buffers of collectives and messages, under the name that plans use.
BUCKETS = "buckets"
ALL = (*STATIC, CACHES, *CATEGORIES)
DEVICE, HOST = "device", "host"
#: The highest moment of a work, and the bytes beyond those before it: by category, and in total.
_Rise: TypeAlias = tuple[Moment, Counter[str], int]


@dataclass(frozen=True, slots=True)
class LiveBuffers:
    """The live buffers of one value at a moment: their number, and their total bytes."""

    name: str
    type: str
    category: str
    count: int
    bytes: int
    line: str


@dataclass(frozen=True, slots=True)
class Point:
    """A moment of the step: the actions that run ("" outside of a schedule), the operation, and the
    bytes of each category."""

    title: str
    step: RunOp
    bytes: Mapping[str, int]
    moments: tuple[Moment, ...] = ()
    states: Mapping[MicrobatchState, int] | None = None  # of microbatches, while a schedule runs

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.bytes.values())


@dataclass(frozen=True, slots=True)
class BufferEvent:
    """The start or the end of a buffer; `number` distinguishes the buffers of one value."""

    starts: bool
    number: int
    buffer: Buffer
    step: RunOp


def _copies_of(op: Operation) -> Operation | None:
    """The `copy_in` whose gradients are reduced in one call, for an op that casts or names a result
    of that call; None for other ops."""
    reduced = op.operands[0].producer if op.operands and op.phase == "gradient" else None
    while reduced is not None and not isinstance(reduced.definition, CopyIn):
        reduced = reduced.operands[0].producer if reduced.operands else None
    return reduced


def line_of(value: Value) -> str:
    """The source line of a value, such as `model.stg:12`; for the library, a path relative to
    it."""
    place = file_loc(value.loc)
    return f"{place.file.removeprefix(LIBRARY)}:{place.line}" if place is not None else ""


class Sized(Planner):
    """A planner with sizes in bytes, which all stages that run a function share. `fixed` are the
    values whose buffers exist from start to end, with their categories."""

    def __init__(self, lifetimes: Lifetimes, env: Env, body: Region) -> None:
        super().__init__(lifetimes)
        self.env = env
        self.size = cache(self._size)
        self.kept_bytes = cache(self._kept_bytes)
        self.kept_total = cache(self._kept_total)
        self.worst_rise = cache(self._worst_rise)
        self.static = cache(self._static)
        gradients = sorted(classify(body).gradients, key=lambda v: v.name)
        roles = dict.fromkeys(WEIGHTS, "parameters") | dict.fromkeys(CACHED, CACHES)
        roles |= {"state": "optimizer", "bucket": "communication"}
        self.fixed = [(a, roles[a.tensor.role]) for a in body.args if a.tensor.role in roles]
        self.fixed += [(g, "gradients") for g in gradients]

    def _static(self, space: str) -> Mapping[str, int]:
        """Bytes of one memory that exist from start to end, by category."""
        sizes: dict[str, int] = dict.fromkeys(STATIC, 0)
        for value, category in self.fixed:
            if space in value.tensor.memories:
                size = evaluate(value.tensor.bytes_in(space), self.env)
                sizes[category] = sizes.get(category, 0) + size
        return sizes

    def _size(self, buffer: Buffer) -> int:
        return evaluate(buffer.size, self.env)

    def count(self, counts: Counter[str], buffers: Iterable[Buffer], sign: int) -> None:
        """Add `sign` times the bytes of buffers on the device to `counts`, by category."""
        for buffer in buffers:
            if buffer.space == DEVICE:
                counts[buffer.category] += sign * self.size(buffer)

    def _kept_bytes(self, state: MicrobatchState) -> Counter[str]:
        """Bytes on the device that a microbatch in this state keeps, by category."""
        sizes: Counter[str] = Counter()
        self.count(sizes, self.kept(state), 1)
        return sizes

    def _kept_total(self, state: MicrobatchState) -> int:
        return self.kept_bytes(state).total()

    def _worst_rise(self, work: ActionInState) -> _Rise | None:
        """The moment of a work with the most bytes beyond those before it, and these bytes by
        category and in total; None if nothing runs."""
        best = highest([self.run(work)], self._device_size)
        if best is None:
            return None
        rise: Counter[str] = Counter()
        self.count(rise, best.made, 1)
        self.count(rise, best.gone, -1)
        return best, rise, rise.total()

    def _device_size(self, buffer: Buffer) -> int:
        return self.size(buffer) if buffer.space == DEVICE else 0

    def along(
        self, run: MemoryRun, base: Mapping[str, int]
    ) -> Iterator[tuple[Moment, Counter[str]]]:
        """Each moment of a run with the bytes of each category, where `base` are those before
        it."""
        live = Counter(base)
        for place, (step, ends) in enumerate(run):
            self.count(live, step.made, 1)
            if step.counts:
                yield Moment(run, place), Counter(live)
            self.count(live, ends, -1)


class MemoryTimeline:
    """The memory of the ranks of one stage (0 without a pipeline) over a step."""

    def __init__(self, module: Module, func: Operation, stage: int, planner: Sized) -> None:
        self._env, self._planner, self._loc = planned_env(module), planner, func.loc
        self.order: RankActions = actions_of(module, func, stage)
        self._fixed, self.size = planner.fixed, planner.size
        self._consumed = func.flag("consumed")

    @staticmethod
    def planner(module: Module, func: Operation, *, whole: bool = False) -> Sized:
        """The planner that all stages that run a function share; with `whole` every iteration runs
        by itself."""
        env = planned_env(module)
        return Sized(lifetimes(func.body, env, whole=whole), env, func.body)

    def static(self, space: str = DEVICE) -> Mapping[str, int]:
        """Bytes that are there from start to end, by category."""
        return self._planner.static(space)

    def fixed(self, space: str = DEVICE) -> Iterator[tuple[Value, str, int]]:
        """Values whose buffers exist from start to end, with their categories and bytes."""
        for value, category in self._fixed:
            size = evaluate(value.tensor.bytes_in(space), self._env)
            if size:
                yield value, category, size

    # -- over the step -----------------------------------------------------------------------------

    def points(self, *, distinct: bool = False) -> Iterator[Point]:
        """The highest moment of every turn of the schedule, and every moment outside of it, in
        execution order. With `distinct`, a turn that keeps and runs the same as an earlier one is
        left out."""
        for _, point in self._points(distinct=distinct):
            yield point()

    def _points(self, *, distinct: bool) -> Iterator[tuple[int, Callable[[], Point]]]:
        """The bytes of each point, and a function that makes it."""
        static = Counter(self.static())
        for moment, live in self._planner.along(self._planner.run(None), static):
            yield live.total(), partial(Point, "", moment.step, dict(live), (moment,))
            if self._planner.is_scheduled(moment.step):
                yield from self._turns(static, distinct=distinct)

    def _turns(
        self, static: Counter[str], *, distinct: bool
    ) -> Iterator[tuple[int, Callable[[], Point]]]:
        around = Counter(static)
        self._planner.count(around, self._planner.around(), 1)
        holds, always = self._holds if distinct else None, around.total()
        for doing in self.turns(holds):
            rises = [r for w in doing.works if (r := self._planner.worst_rise(w)) is not None]
            if rises:
                live = sum(n * self._planner.kept_total(s) for s, n in doing.states.items())
                more = sum(size for *_, size in rises)
                yield always + live + more, partial(self._turn_point, around, doing, rises)

    def _turn_point(self, around: Counter[str], doing: Doing, rises: Sequence[_Rise]) -> Point:
        base = Counter(around)
        for state, number in doing.states.items():
            for category, size in self._planner.kept_bytes(state).items():
                base[category] += number * size
        for _, bytes_, _ in rises:
            base.update(bytes_)
        title, moments = " with ".join(map(str, doing.actions)), tuple(r[0] for r in rises)
        return Point(title, moments[-1].step, dict(base), moments, doing.states)

    def turns(self, holds: Callable[[MicrobatchState], bool] | None = None) -> Iterator[Doing]:
        """The turns of the schedule; with `holds` only distinct ones (see `step.turns`)."""
        return turns(self.order, self._planner.regions, self._planner.summed, holds=holds)

    def _holds(self, state: MicrobatchState) -> bool:
        """Whether a microbatch in this state keeps any buffer."""
        return bool(self._planner.kept(state))

    def moments(self) -> Mapping[str, Mapping[str, int]]:
        """The bytes of each category in a training step `after_forward` (in a pipeline after the
        last forward of the schedule) and `after_update`; empty for other steps. Gradients that
        forward has made are then the stash, as for PyTorch, until backward adds them up."""
        run = self._planner.run(None)
        if all(step.op.phase != "optimizer" for step, _ in run if step.counts):
            return {}
        live = last = Counter(self.static())
        before: Counter[str] | None = None
        updated = False
        for step, ends in run:
            if step.counts and step.op.phase != "forward" and before is None:
                before, whole = Counter(live), self.static().get(GRADIENTS, 0)
                before[STASH] += before[GRADIENTS] - whole
                before[GRADIENTS] = whole
            self._planner.count(live, step.made, 1)
            if self._planner.is_scheduled(step):
                before = self._behind_forward(live)
            self._planner.count(live, ends, -1)
            update = step.counts and step.op.phase == "optimizer"
            updated |= update
            beside = updated and self._consumed and not step.op.has(Terminates)
            if update or beside:  # backward goes on behind updates beside it
                last = Counter(live)
        return {"after_forward": before or last, "after_update": last}

    def _behind_forward(self, around: Counter[str]) -> Counter[str] | None:
        """The bytes of each category after the last forward of the schedule, where `around` are
        those outside of it; None if the schedule has no forward."""
        states: Mapping[MicrobatchState, int] | None = None
        for each in self.turns():
            for action, after in zip(each.actions, each.after(), strict=True):
                states = after if action.kind == "F" else states
        if states is None:
            return None
        behind = Counter(around)
        for state, number in states.items():
            for category, size in self._planner.kept_bytes(state).items():
                behind[category] += number * size
        return behind

    def made(self, point: Point) -> Mapping[str, int]:
        """The bytes of each category that the operation at a point allocates. The casts of
        gradients that one call reduces count as one operation (`foreach_reduce` of FSDP2)."""
        moment, call = point.moments[-1], _copies_of(point.step.op)
        made: Counter[str] = Counter()
        self._planner.count(made, point.step.made, 1)
        for step, _ in reversed(moment.run[: moment.place]) if call is not None else ():
            if _copies_of(step.op) is not call:
                break
            if step.op.has(Recasts):
                self._planner.count(made, step.made, 1)
        return made

    def reductions(self, point: Point) -> int:
        """The bytes of collectives of gradients that are live at a point and were made before
        it."""
        total = 0
        for buffer, number in self._counts(point).items():
            op = buffer.value.producer
            before = buffer.space == DEVICE and buffer not in point.step.made
            if before and buffer.category == "communication" and op and op.phase == "gradient":
                total += number * self._planner.size(buffer)
        return total

    def peak(self) -> Point:
        """The point with the most bytes. Raises `DiagnosticError` if nothing runs."""
        highest = max(self._points(distinct=True), key=lambda p: p[0], default=None)
        if highest is None:
            raise error(
                "the function has no operation, so it has no peak",
                self._loc,
                remedy="add an operation to the function",
            )
        return highest[1]()

    def expression(self, point: Point) -> Expr:
        """The bytes at a point as an expression; the number of microbatches in flight is
        concrete."""
        fixed = (v.tensor.bytes_in(DEVICE) for v, _ in self._fixed)
        counts = self._counts(point).items()
        return total([*fixed, *(b.size * n for b, n in counts if n and b.space == DEVICE)])

    def uses(self, space: str) -> bool:
        """Whether any value is in a memory, `DEVICE` or `HOST`."""
        values = [*(v for v, _ in self._fixed), *(b.value for b in self._planner.buffers)]
        return any(v.tensor.memory == space for v in values)

    # -- buffers -----------------------------------------------------------------------------------

    def live(self, point: Point) -> list[LiveBuffers]:
        """The live buffers at a point by value, largest first."""
        merged: dict[tuple[Value, str], tuple[int, int]] = {}
        for buffer, number in self._counts(point).items():
            if number and buffer.space == DEVICE:
                key = buffer.value, buffer.category
                count, size = merged.get(key, (0, 0))
                copies = number * evaluate(buffer.copies, self._env)
                merged[key] = count + copies, size + number * self.size(buffer)
        for value, category in self._fixed:
            size = evaluate(value.tensor.bytes_in(DEVICE), self._env)
            if size:
                merged[value, category] = 1, size
        live = [
            LiveBuffers(v.name, str(v.type), category, count, size, line_of(v))
            for (v, category), (count, size) in merged.items()
        ]
        return sorted(live, key=lambda h: (-h.bytes, h.name, h.line, h.type, h.category))

    def _counts(self, point: Point) -> Counter[Buffer]:
        """The number of live copies of each buffer that is not static."""
        states = point.states
        counts: Counter[Buffer] = Counter(self._planner.around() if states is not None else ())
        for state, number in (states or {}).items():
            for buffer in self._planner.kept(state):
                counts[buffer] += number
        for moment in point.moments:
            counts.update(moment.made)
            counts.subtract(moment.gone)
        return counts

    def events(self, space: str = DEVICE) -> Iterator[BufferEvent]:
        """Starts and ends of all buffers that are not static, in execution order."""
        numbers: dict[tuple[int, Buffer], int] = {}
        for step, ends in self._planner.run(None):
            yield from self._starts(step, -1, numbers, space)
            if self._planner.is_scheduled(step):
                for doing in self.turns():
                    yield from self._turn(doing, numbers, space)
            yield from self._ends(step, ends, -1, numbers, space)

    def _turn(
        self, doing: Doing, numbers: dict[tuple[int, Buffer], int], space: str
    ) -> Iterator[BufferEvent]:
        for action, work in zip(doing.actions, doing.works, strict=True):
            if not work[0]:
                continue
            for step, ends in self._planner.run(work):
                yield from self._starts(step, action.microbatch, numbers, space)
                yield from self._ends(step, ends, action.microbatch, numbers, space)

    def _starts(
        self, step: RunOp, microbatch: int, numbers: dict[tuple[int, Buffer], int], space: str
    ) -> Iterator[BufferEvent]:
        for buffer in step.made:
            key = (-1 if buffer.part is None else microbatch), buffer
            if buffer.space == space and self.size(buffer) and key not in numbers:  # once
                numbers[key] = number = len(numbers)
                yield BufferEvent(True, number, buffer, step)

    def _ends(
        self,
        step: RunOp,
        ends: Sequence[Buffer],
        microbatch: int,
        numbers: dict[tuple[int, Buffer], int],
        space: str,
    ) -> Iterator[BufferEvent]:
        for buffer in ends:
            number = numbers.get((microbatch, buffer))
            if number is not None and buffer.space == space:
                yield BufferEvent(False, number, buffer, step)
