"""The memory of the ranks of a stage over the time of a step, in a bounded number of columns.

A stretch is a run of operations that is analyzed once, however often it runs: an action in one
state of its microbatch, a microbatch of an accumulation, or the operations before and after the
microbatches. Two microbatches on the first stage of a pipeline are

    before | F0 | F1 | waits | B0 | B1 | after

F0 and F1 are one stretch, B0 and B1 another one, on top of what the other microbatch holds. Within
a stretch every iteration runs by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

from stagec.ir.core import Operation, Value
from stagec.ir.expr import evaluate
from stagec.ir.traits import Accumulates
from stagec.memory.buffers import Buffer, RunOp
from stagec.memory.step import ActionInState, ActionRegion, MemoryRun, MicrobatchState
from stagec.memory.timeline import DEVICE, MemoryTimeline, Sized

#: Time of an operation on one rank, in picoseconds.
Duration: TypeAlias = Callable[[Operation], int]
#: Buffers that are reported as one: those of one value in one category.
BufferKind: TypeAlias = tuple[Value, str]
#: Start and end of a turn of a schedule, in picoseconds.
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CurveColumn:
    """A part of the step from `start`, in picoseconds, to the next column, at its moment of highest
    memory: the operation that runs (None if the rank waits), the bytes of all buffers, and the
    number of buffers of each kind."""

    start: int
    title: str
    step: RunOp | None
    total: int
    counts: Mapping[BufferKind, int]


class CurvePart:
    """A run of operations: the start of each in picoseconds, and the bytes in use at each beyond
    those in use before the run."""

    def __init__(self, run: MemoryRun, sized: Sized, duration: Duration) -> None:
        self.steps = [step for step, _ in run]
        self.starts, self.totals = [0], list[int]()
        self._changes: list[Counter[BufferKind]] = []
        live, before = 0, list[Buffer]()
        for step, ends in run:
            made = [b for b in step.made if b.space == DEVICE]
            live += sum(map(sized.size, made)) - sum(map(sized.size, before))
            change = Counter(map(kind, made))
            change.subtract(map(kind, before))
            self.totals.append(live)
            self._changes.append(change)
            self.starts.append(self.starts[-1] + (duration(step.op) if step.counts else 0))
            before = [b for b in ends if b.space == DEVICE]
        self.counts = cache(self._counts)
        self.highest = cache(self._highest)

    @property
    def time(self) -> int:
        """The duration of the run, in picoseconds."""
        return self.starts[-1]

    def _highest(self, first: int, end: int, width: int | None) -> Sequence[tuple[int, int]]:
        """Cut the steps from `first` to before `end` into parts of at least `width` picoseconds
        (with None into one part). Returns the start of each part and the step at which most bytes
        are in use."""
        highest: list[tuple[int, int]] = []
        origin, start, best = self.starts[first], 0, -1
        for i in range(first, end):
            if not self.steps[i].counts:
                continue
            now = self.starts[i] - origin
            if best >= 0 and width is not None and now - start >= width:
                highest.append((start, best))
                start, best = now, -1
            if best < 0 or self.totals[i] > self.totals[best]:
                best = i
        return [*highest, (start, best)] if best >= 0 else highest

    def _counts(self, index: int) -> Counter[BufferKind]:
        counts: Counter[BufferKind] = Counter()
        for change in self._changes[: index + 1]:
            counts.update(change)
        return counts


def kind(buffer: Buffer) -> BufferKind:
    """The kind under which a buffer is reported."""
    return buffer.value, buffer.category


class Stretches:
    """The analysis that all stages that run a function share; in `sized` every iteration runs by
    itself."""

    def __init__(self, sized: Sized, duration: Duration) -> None:
        self.sized, self._duration = sized, duration
        self.of = cache(self._of)
        self.sizes = {kind(b): sized.size(b) for b in sized.buffers}
        self.kept = cache(self._kept)
        self.outside: CurvePart = self.of(None)
        sums = [i for i, s in enumerate(self.outside.steps) if s.op.has(Accumulates)]
        #: The microbatches run between these two steps of the accumulation, if there is one.
        self.first, self.last = (sums[0], sums[-1]) if sums else (len(self.outside.steps),) * 2

    def _of(self, work: ActionInState | None) -> CurvePart:
        return CurvePart(self.sized.run(work), self.sized, self._duration)

    def times(self) -> Mapping[ActionRegion, int]:
        """The time of each action region, in picoseconds."""
        return {r: self.of(((r,), MicrobatchState())).time for r in self.sized.regions}

    @property
    def before(self) -> int:
        """The time before the microbatches, in picoseconds."""
        return self.outside.starts[min(self.first + 1, len(self.outside.steps))]

    @property
    def after(self) -> int:
        """The time after the microbatches, in picoseconds."""
        return self.outside.time - self.outside.starts[self.last]

    @property
    def each(self) -> int:
        """The time of one microbatch without a schedule, in picoseconds."""
        return self.outside.time - self.before - self.after

    @property
    def scheduled(self) -> bool:
        """Whether a schedule runs the microbatches."""
        return self.last > self.first and self.sized.is_scheduled(self.outside.steps[self.first])

    @property
    def count(self) -> int:
        """The number of microbatches that run one after the other without a schedule."""
        if self.last == self.first or self.scheduled:
            return 0
        return evaluate(self.outside.steps[self.first].op.expr("count"), self.sized.env)

    def _kept(self, state: MicrobatchState) -> Counter[BufferKind]:
        return Counter(kind(b) for b in self.sized.kept(state) if b.space == DEVICE)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One execution of a stretch, from step `first` to before `end`, while microbatches are in
    these states (None outside of a schedule). An overlapped pair has two stretches, both at their
    highest moment; without a stretch the rank waits."""

    start: int
    title: str
    states: Mapping[MicrobatchState, int] | None
    stretches: tuple[CurvePart, ...] = ()
    first: int = 0
    end: int = 0

    @property
    def outside(self) -> bool:
        """Whether the piece lies before or after all microbatches."""
        return self.states is None and not self.title

    def highest(self, width: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The start of each part in picoseconds, and the step of each stretch that represents
        it."""
        if len(self.stretches) == 1:
            for start, index in self.stretches[0].highest(self.first, self.end, width):
                yield self.start + start, (index,)
            return
        indices = (s.highest(0, len(s.steps), None) for s in self.stretches)
        yield self.start, tuple(index for parts in indices for _, index in parts)


@dataclass(frozen=True, slots=True)
class _Part:
    """A column before its buffers are counted: the piece and the steps of its highest moment."""

    start: int
    total: int
    piece: _Piece
    steps: tuple[int, ...]

    def is_separate(self, other: _Part) -> bool:
        """Whether only one of the two parts belongs to the microbatches."""
        return self.piece.outside != other.piece.outside


class Curve:
    """The memory of the ranks of one stage over a step.

    `spans` are the start and end of each turn of the schedule of these ranks; `over` is the time at
    which the schedules of all ranks have ended, in picoseconds.
    """

    def __init__(
        self,
        timeline: MemoryTimeline,
        shared: Stretches,
        spans: Sequence[Span] = (),
        over: int | None = None,
    ) -> None:
        self._turns_of, self._shared, self._spans = timeline.turns, shared, spans
        self._over = shared.before + shared.count * shared.each if over is None else over
        self._fixed = {(value, name): size for value, name, size in timeline.fixed()}
        #: Bytes of one buffer of each kind.
        self.sizes: Mapping[BufferKind, int] = {**shared.sizes, **self._fixed}

    @property
    def time(self) -> int:
        """The time of the step, in picoseconds."""
        return self._over + self._shared.after

    def columns(self, most: int) -> list[CurveColumn]:
        """At most `most` columns (at least 4). If the step has no more operations than that, each
        operation is a column."""
        pieces = list(self._pieces())
        operations = sum(max(1, p.end - p.first) for p in pieces)
        width = max(1, -(-self.time // (most - 3))) if operations > most else 0
        parts = self._parts(pieces, width)
        while width > 1 and len(parts) <= most // 2:  # long operations leave room for more
            finer = self._parts(pieces, width // 2)
            if len(finer) > most:
                break
            parts, width = finer, width // 2
        return [self._column(part) for part in parts]

    def _parts(self, pieces: Sequence[_Piece], width: int) -> list[_Part]:
        """Columns of at least this width in picoseconds, except the last one of the
        microbatches."""
        parts: list[_Part] = []
        for piece in pieces:
            base = self._bytes(piece)
            for start, at in piece.highest(width):
                rise = sum(s.totals[i] for s, i in zip(piece.stretches, at, strict=True))
                part = _Part(start, base + rise, piece, at)
                if not parts or start - parts[-1].start >= width or part.is_separate(parts[-1]):
                    parts.append(part)
                elif part.total > parts[-1].total:
                    parts[-1] = replace(part, start=parts[-1].start)
        return parts

    # -- what runs when ----------------------------------------------------------------------------

    def _pieces(self) -> Iterator[_Piece]:
        shared = self._shared
        outside = (shared.outside,)
        yield _Piece(0, "", None, outside, 0, min(shared.first + 1, len(shared.outside.steps)))
        if shared.scheduled:
            yield from self._turns()
        for number in range(shared.count):
            start = shared.before + number * shared.each
            title = f"microbatch {number}" if shared.count > 1 else ""
            yield _Piece(start, title, None, outside, shared.first + 1, shared.last)
        yield _Piece(self._over, "", None, outside, shared.last, len(shared.outside.steps))

    def _turns(self) -> Iterator[_Piece]:
        now, last = self._shared.before, None
        for doing, (start, end) in zip(self._turns_of(), self._spans, strict=True):
            if start > now:
                yield _Piece(now, "", doing.states)
            stretches = tuple(s for s in map(self._shared.of, doing.works) if s.steps)
            if stretches:
                title = " with ".join(map(str, doing.actions))
                yield _Piece(start, title, doing.states, stretches, 0, len(stretches[0].steps))
            now, last = end, doing
        if last is not None and self._over > now:
            *_, states = last.after()
            yield _Piece(now, "", states)

    # -- what is held ------------------------------------------------------------------------------

    def _bytes(self, piece: _Piece) -> int:
        """Bytes in use at the start of a piece."""
        shared, total = self._shared, sum(self._fixed.values())
        if piece.states is not None:
            total += shared.outside.totals[shared.first]
            for state, number in piece.states.items():
                total += number * sum(shared.sized.kept_bytes(state).values())
        return total

    def _column(self, part: _Part) -> CurveColumn:
        piece, shared = part.piece, self._shared
        counts: Counter[BufferKind] = Counter(dict.fromkeys(self._fixed, 1))
        if piece.states is not None:
            counts.update(shared.outside.counts(shared.first))
            for state, number in piece.states.items():
                counts.update({k: n * number for k, n in shared.kept(state).items()})
        for stretch, index in zip(piece.stretches, part.steps, strict=True):
            counts.update(stretch.counts(index))
        step = piece.stretches[-1].steps[part.steps[-1]] if part.steps else None
        return CurveColumn(
            part.start, piece.title, step, part.total, {k: n for k, n in counts.items() if n}
        )
