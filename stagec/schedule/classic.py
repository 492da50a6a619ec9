"""Schedules that never split the backward: GPipe and 1F1B, of one chunk per rank and of several."""

from collections.abc import Callable
from fractions import Fraction
from typing import ClassVar, TypeAlias

from stagec.schedule.action import Action, RankOrder
from stagec.schedule.base import ClosedForm, Formulas, Schedule
from stagec.schedule.costs import UNIT, Costs

#: Maps the number of an action of a rank to its chunk and its microbatch.
Nth: TypeAlias = Callable[[int], tuple[int, int]]


class GPipe(Schedule):
    """All forwards, then all backwards (arXiv 1811.06965)."""

    name = "gpipe"
    summary = "all forwards, then all backwards"
    source = "arXiv 1811.06965"
    formulas = Formulas("(p-1)(F+B)", "m")

    def rank_actions(self, rank: int, stages: int, microbatches: int, chunks: int) -> RankOrder:
        return one_f_one_b(microbatches, microbatches, chunk_0, chunk_0)

    def closed_form(
        self, stages: int, microbatches: int, chunks: int, costs: Costs = UNIT
    ) -> ClosedForm:
        """Holds for all sizes and costs."""
        bubble = Fraction((stages - 1) * (costs.forward + costs.backward))
        return ClosedForm(bubble, (Fraction(microbatches),) * stages)


class OneFOneB(Schedule):
    """p-1-r forwards, then a forward and a backward in turn (PipeDream-Flush, arXiv 2006.09503)."""

    name = "1f1b"
    summary = "a forward and a backward in turn"
    source = "arXiv 2006.09503, 2104.04473"
    formulas = Formulas("(p-1)(F+B)", "min(m, p-r)")
    keeps_sent_gradients = True  # bwd_sends in torch/distributed/pipelining/schedules.py

    def rank_actions(self, rank: int, stages: int, microbatches: int, chunks: int) -> RankOrder:
        return one_f_one_b(stages - 1 - rank, microbatches, chunk_0, chunk_0)

    def closed_form(
        self, stages: int, microbatches: int, chunks: int, costs: Costs = UNIT
    ) -> ClosedForm:
        """Holds for all sizes and costs."""
        bubble = Fraction((stages - 1) * (costs.forward + costs.backward))
        flight = tuple(Fraction(min(microbatches, stages - rank)) for rank in range(stages))
        return ClosedForm(bubble, flight)


class Looped(Schedule):
    """Base of schedules of several chunks per rank: a microbatch passes all ranks once per
    chunk."""

    #: The name of the corresponding schedule of one chunk per rank.
    of_one_chunk: ClassVar[str]
    default_chunks = 2

    def check_chunks(self, chunks: int) -> None:
        """Raise `DiagnosticError` for fewer than 2 chunks."""
        if chunks < 2:
            remedy = f"give 2, or choose the schedule '{self.of_one_chunk}'"
            raise self.refuse("at least 2 chunks per rank", f"{chunks} given", remedy)


class Interleaved(Looped):
    """1F1B over v chunks per rank, in groups of p microbatches (arXiv 2104.04473, section 2.2).

    A group passes chunk 0, then chunk 1, and so on; backward takes the chunks in reverse. Rank r
    runs 2(p-1-r) + (v-1)p chunk forwards before it starts to alternate, as in Megatron-LM. As
    there, m has to be a multiple of p. (The later option of Megatron-LM, groups of other sizes
    whose remainder is at least p, is not supported.) With m = p, Megatron-LM runs all forwards
    first; here the rule above holds for all m, which costs no time and keeps fewer stashes on the
    later ranks.
    """

    name = "interleaved"
    summary = "1F1B over several chunks per rank"
    source = "arXiv 2104.04473"
    formulas = Formulas("(p-1)(F+B)/v", "min(m, p + (p-1-2r)/v)", "p divides m, v >= 2")
    of_one_chunk = "1f1b"

    def check(self, stages: int, microbatches: int, chunks: int) -> None:
        """Raise `DiagnosticError` unless p divides m."""
        self.check_sizes(stages, microbatches, chunks)
        if microbatches % stages:
            below = microbatches - microbatches % stages
            valid = f"{below} or {below + stages}" if below else str(stages)
            raise self.refuse(
                f"a multiple of {stages} microbatches for {stages} stages",
                f"{microbatches} given",
                f"give {valid} microbatches",
            )

    def rank_actions(self, rank: int, stages: int, microbatches: int, chunks: int) -> RankOrder:
        warmup = 2 * (stages - 1 - rank) + (chunks - 1) * stages
        return one_f_one_b(warmup, microbatches * chunks, *in_groups(stages, chunks))

    def closed_form(
        self, stages: int, microbatches: int, chunks: int, costs: Costs = UNIT
    ) -> ClosedForm:
        """Holds for all valid sizes and all costs."""
        bubble = Fraction((stages - 1) * (costs.forward + costs.backward)) / chunks
        flight = (
            min(Fraction(microbatches), stages + Fraction(stages - 1 - 2 * rank, chunks))
            for rank in range(stages)
        )
        return ClosedForm(bubble, tuple(flight))


class LoopedBreadthFirst(Looped):
    """GPipe over v chunks per rank: all microbatches through a chunk before the next one.

    Breadth-first pipeline parallelism (arXiv 2211.05953). Backward takes the chunks in reverse.
    With m < p each pass over the ranks waits for its first microbatch.
    """

    name = "looped-bfs"
    summary = "all microbatches through a chunk before the next chunk"
    source = "arXiv 2211.05953"
    formulas = Formulas("(p-1 + (v-1)max(0, p-m))(F+B)/v", "m", "v >= 2")
    of_one_chunk = "gpipe"

    def rank_actions(self, rank: int, stages: int, microbatches: int, chunks: int) -> RankOrder:
        count = microbatches * chunks
        return one_f_one_b(count, count, *in_groups(microbatches, chunks))

    def closed_form(
        self, stages: int, microbatches: int, chunks: int, costs: Costs = UNIT
    ) -> ClosedForm:
        """Holds for all valid sizes and all costs."""
        idle = stages - 1 + (chunks - 1) * max(0, stages - microbatches)
        bubble = Fraction(idle * (costs.forward + costs.backward)) / chunks
        return ClosedForm(bubble, (Fraction(microbatches),) * stages)


def in_groups(size: int, chunks: int) -> tuple[Nth, Nth]:
    """Functions for the k-th forward and the k-th backward of a rank: a group of `size`
    microbatches runs through chunk 0, then through chunk 1, and so on; backward takes the chunks in
    reverse."""

    def forward(k: int) -> tuple[int, int]:
        before, k = divmod(k, size * chunks)
        return k // size, before * size + k % size

    def backward(k: int) -> tuple[int, int]:
        chunk, microbatch = forward(k)
        return chunks - 1 - chunk, microbatch

    return forward, backward


def chunk_0(k: int) -> tuple[int, int]:
    """The chunk (0) and the microbatch of the k-th action of a rank with one chunk."""
    return 0, k


def one_f_one_b(warmup: int, count: int, forward: Nth, backward: Nth) -> RankOrder:
    """`warmup` forwards, then a forward and a backward in turn, then the remaining backwards.

    `forward` and `backward` give the chunk and the microbatch of the k-th of `count` actions.
    """
    for k in range(min(warmup, count)):
        yield Action("F", *forward(k))
    for k in range(count):
        if k + warmup < count:
            yield Action("F", *forward(k + warmup))
        yield Action("B", *backward(k))
