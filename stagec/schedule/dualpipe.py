"""Bidirectional schedules with overlapped pairs: DualPipe and its V-shaped half, DualPipeV.

Both follow DualPipe of DeepSeek (arXiv 2412.19437, section 3.2.1, and
github.com/deepseek-ai/DualPipe): microbatches enter at both ends, and in the middle of the step
each rank overlaps the forward of one chunk with the backward of the other.
"""

from collections import Counter, deque
from fractions import Fraction

from stagec.schedule.action import Action, Kind, Placement, RankOrder, two_copies, v_shape
from stagec.schedule.base import ClosedForm, Formulas, Schedule
from stagec.schedule.costs import UNIT, Costs
from stagec.support.words import counted


class DualPipe(Schedule):
    """Two copies of the model, one down the ranks and one up; each takes half of the microbatches.

    Rank r has stage r of copy 0 (chunk 0) and stage p-1-r of copy 1 (chunk 1). Microbatches 0 ...
    m/2-1 go down, the others up. Needs an even p, an even m and m >= 2p, as published.
    """

    name = "dualpipe"
    summary = "two copies, both directions, forward overlapped with backward"
    source = "arXiv 2412.19437"
    formulas = Formulas(
        "(p/2-1)(F&B+B-3W)", "p+1", "p even, m even, m >= 2p; F = B-W >= W, B <= F&B <= F+B"
    )
    default_chunks = 2
    splits_weight_gradient = True

    def placement(self, stages: int, chunks: int) -> Placement:
        """A copy in each direction."""
        return two_copies(stages)

    def check(self, stages: int, microbatches: int, chunks: int) -> None:
        """Raise `DiagnosticError` unless p and m are even and m >= 2p."""
        self.check_sizes(stages, microbatches, chunks)
        if stages % 2:
            valid = f"{stages - 1} or {stages + 1}" if stages > 1 else "2"
            raise self.refuse("an even number of stages", f"{stages} given", f"give {valid} stages")
        least = max(2 * stages, microbatches + microbatches % 2)
        if microbatches != least:
            raise self.refuse(
                f"an even number of at least {2 * stages} microbatches for {stages} stages",
                f"{microbatches} given",
                f"give {least} microbatches",
            )

    def rank_actions(self, rank: int, stages: int, microbatches: int, chunks: int) -> RankOrder:
        half = microbatches // 2
        first, upper = (0, half), (half, 0)
        if rank < stages // 2:
            return _Rank(stages // 2, rank, half, (0, 1), first).actions()
        return _Rank(stages // 2, stages - 1 - rank, half, (1, 0), upper).actions()

    def closed_form(
        self, stages: int, microbatches: int, chunks: int, costs: Costs = UNIT
    ) -> ClosedForm:
        """(p/2-1)(F&B + B - 3W), B the whole backward, under the condition of the formulas.

        This is the idle time of the middle ranks, which have the fewest pairs. Other ranks idle
        less by the amount that overlap saves them less.
        """
        return _closed_form(stages // 2, stages, costs, Fraction(1))


class DualPipeV(Schedule):
    """One copy in a V: the upper half of the ranks of DualPipe folded onto the lower.

    p ranks have the 2p stages of one model as chunks 0 (down) and 1 (up), as in ZBV, and all m
    microbatches enter at rank 0. Needs m >= 2p, as published. Published figures count PP = 2p
    stages: (PP/2-1)(F&B+B-3W) in times of a stage, which is half of the share of a rank, and PP+1.
    """

    name = "dualpipev"
    summary = "DualPipe folded into a V: one copy"
    source = "github.com/deepseek-ai/DualPipe"
    formulas = Formulas("(p-1)(F&B+B-3W)/2", "p+1/2", "m >= 2p; F = B-W >= W, B <= F&B <= F+B")
    default_chunks = 2
    splits_weight_gradient = True

    def placement(self, stages: int, chunks: int) -> Placement:
        """Down with chunk 0, up with chunk 1."""
        return v_shape(stages)

    def check(self, stages: int, microbatches: int, chunks: int) -> None:
        """Raise `DiagnosticError` unless m >= 2p."""
        self.check_sizes(stages, microbatches, chunks)
        if microbatches < 2 * stages:
            raise self.refuse(
                f"at least {2 * stages} microbatches for {counted(stages, 'stage')}",
                f"{microbatches} given",
                f"give {2 * stages} microbatches, or at most {microbatches // 2} stages"
                if microbatches > 1
                else f"give {2 * stages} microbatches",
            )

    def rank_actions(self, rank: int, stages: int, microbatches: int, chunks: int) -> RankOrder:
        return _Rank(stages, rank, microbatches, (0, 1), (0, 0)).actions()

    def closed_form(
        self, stages: int, microbatches: int, chunks: int, costs: Costs = UNIT
    ) -> ClosedForm:
        """(p-1)(F&B + B - 3W)/2 under the condition of the formulas."""
        return _closed_form(stages, stages, costs, Fraction(1, 2))


def _closed_form(half: int, stages: int, costs: Costs, share: Fraction) -> ClosedForm:
    """The closed forms with `half` ranks from an end to the middle; one chunk is `share` of the
    work of a rank."""
    bubble = (half - 1) * (costs.pair + costs.backward - 3 * costs.weight) * share
    even = costs.forward == costs.input_gradient and costs.weight <= costs.forward
    paired = costs.backward <= costs.pair <= costs.forward + costs.backward
    holds = (even and paired) or half == 1
    flight = (2 * half + 1) * share
    return ClosedForm(Fraction(bubble) if holds else None, (flight,) * stages)


class _Rank:
    """Builds the list of actions of one rank, which is `depth` ranks away from the nearer end.

    There are `half` ranks between an end and the middle. `chunks` are the chunks whose microbatches
    enter at the near and at the far end, `first` their first microbatches; `count` microbatches
    pass each chunk.
    """

    def __init__(
        self, half: int, depth: int, count: int, chunks: tuple[int, int], first: tuple[int, int]
    ) -> None:
        self.half, self.depth, self.count = half, depth, count
        self.chunks, self.first = chunks, first
        self.done: Counter[tuple[Kind, int]] = Counter()
        self.late: deque[tuple[int, int]] = deque()
        self.pairs = 0

    def actions(self) -> RankOrder:
        yield from self._fill()
        yield from self._overlap()
        yield from self._drain()

    def _fill(self) -> RankOrder:
        """Forwards of the near chunk, of both, and of the far one with its first backwards."""
        inner = self.half - self.depth - 1
        for _ in range(2 * inner):
            yield self._next("F", 0)
        for _ in range(self.depth + 1):
            yield self._next("F", 0)
            yield self._next("F", 1)
        for _ in range(inner):
            yield self._next("B", 1, split=True)
            yield self._weight()
            yield self._next("F", 1)

    def _overlap(self) -> RankOrder:
        """Pairs of a forward of one chunk and a backward of the other.

        The first two of the middle ranks stay apart, as published: the forward can then be sent
        before the backward begins, which shortens the bubble.
        """
        inner = self.half - self.depth - 1
        for k in range(self.count - 2 * self.half + self.depth + 1):
            yield from self._both(0, 1, overlapped=inner > 0 or k > 0)
            yield from self._both(1, 0)
        for _ in range(inner):
            yield self._next("B", 1)
            yield from self._both(1, 0)

    def _drain(self) -> RankOrder:
        """The last backwards of both chunks; the weight gradients of the later half come late."""
        turns = self.depth + 1
        for k in range(2 * turns):
            yield self._next("B", 1 - k % 2, split=k >= turns)
        for _ in range(self.half - self.depth - 1):
            yield self._weight()
            yield self._next("B", 0, split=True)
        for _ in range(turns):
            yield self._weight()

    def _both(self, forward: int, backward: int, overlapped: bool = True) -> RankOrder:
        pair = self.pairs if overlapped else None
        self.pairs += overlapped
        yield self._next("F", forward, pair=pair)
        yield self._next("B", backward, pair=pair)

    def _next(
        self, kind: Kind, side: int, *, pair: int | None = None, split: bool = False
    ) -> Action:
        chunk, microbatch = self.chunks[side], self.first[side] + self.done[kind, side]
        self.done[kind, side] += 1
        if split:
            self.late.append((chunk, microbatch))
        return Action(kind, chunk, microbatch, pair, split)

    def _weight(self) -> Action:
        return Action("W", *self.late.popleft())
