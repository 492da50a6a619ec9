"""Schedules that fill bubbles with gradients of weights: ZB-H1, its interleaved form, and ZBV."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import TypeAlias

from stagec.schedule.action import KINDS, Action, Kind, Placement, RankOrder, v_shape
from stagec.schedule.base import ClosedForm, Formulas, Schedule
from stagec.schedule.classic import Looped, Nth, chunk_0, in_groups, one_f_one_b
from stagec.schedule.costs import UNIT, Costs
from stagec.support.words import counted


class ZBH1(Schedule):
    """1F1B with W late: zero-bubble schedule H1 (arXiv 2401.10241, section 2.1.1).

    Rank r runs the W of a microbatch r microbatches after its B. This keeps p stashes on every
    rank, as many as 1F1B has on the first; B reaches the earlier ranks sooner, and the remaining W
    fill the gaps between the last Bs.
    """

    name = "zb-h1"
    summary = "1F1B whose weight gradients come late"
    source = "arXiv 2401.10241"
    formulas = Formulas("(p-1)(F+B-W) - (min(m,p)-1)W", "min(m, p)", "W <= F, W <= B-W")
    splits_weight_gradient = True

    def rank_actions(self, rank: int, stages: int, microbatches: int, chunks: int) -> RankOrder:
        return late_weights(rank, stages - 1 - rank, microbatches, chunk_0, chunk_0)

    def closed_form(
        self, stages: int, microbatches: int, chunks: int, costs: Costs = UNIT
    ) -> ClosedForm:
        """With b = B - W the gradient of the input: (p-1)(F + b - W) if W <= F and W <= b.

        That is for m >= p; with fewer microbatches only m-1 gaps can be filled.
        """
        filled = min(microbatches, stages) - 1
        bubble = (stages - 1) * (costs.forward + costs.input_gradient) - filled * costs.weight
        holds = costs.weight <= min(costs.forward, costs.input_gradient) or stages == 1
        flight = (Fraction(min(microbatches, stages)),) * stages
        return ClosedForm(Fraction(bubble) if holds else None, flight)


class InterleavedZeroBubble(Looped):
    """ZB-H1 over v chunks per rank, like ScheduleInterleavedZeroBubble of PyTorch (arXiv
    2401.10241).

    Microbatches form floor(m/p) groups (at least one), which pass chunk 0, then chunk 1, and so on;
    backward takes the chunks in reverse. With groups of g, rank r runs (v-1)g + p-1-r chunk
    forwards before it starts to alternate, and each W r backwards after its B.
    """

    name = "interleaved-zb"
    summary = "1F1B over several chunks per rank whose weight gradients come late"
    source = "arXiv 2401.10241, PyTorch"
    formulas = Formulas(
        "(p-1)(F+B-2W)/v",
        "min(m, g + (p-g)/v)",
        "v >= 2, g = m/max(1, floor(m/p)); m >= p, W <= F, W <= B-W",
    )
    of_one_chunk = "zb-h1"
    splits_weight_gradient = True

    def check(self, stages: int, microbatches: int, chunks: int) -> None:
        """Raise `DiagnosticError` unless groups have equal size."""
        self.check_sizes(stages, microbatches, chunks)
        groups = max(1, microbatches // stages)
        if microbatches % groups:
            below = microbatches - microbatches % groups
            raise self.refuse(
                f"microbatches in {groups} equal groups for {counted(stages, 'stage')}",
                f"{microbatches} given",
                f"give {below} microbatches",
            )

    def rank_actions(self, rank: int, stages: int, microbatches: int, chunks: int) -> RankOrder:
        group = microbatches // max(1, microbatches // stages)
        warmup, count = (chunks - 1) * group + stages - 1 - rank, microbatches * chunks
        return late_weights(rank, warmup, count, *in_groups(group, chunks))

    def closed_form(
        self, stages: int, microbatches: int, chunks: int, costs: Costs = UNIT
    ) -> ClosedForm:
        """The form of ZB-H1 divided by v, if m >= p, W <= F and W <= b: (p-1)(F+b-W)/v."""
        idle = (stages - 1) * (costs.forward + costs.input_gradient - costs.weight)
        cheap = costs.weight <= min(costs.forward, costs.input_gradient)
        holds = (cheap and microbatches >= stages) or stages == 1
        group = microbatches // max(1, microbatches // stages)
        flight = min(Fraction(microbatches), group + Fraction(stages - group, chunks))
        return ClosedForm(Fraction(idle) / chunks if holds else None, (flight,) * stages)


def late_weights(late: int, warmup: int, count: int, forward: Nth, backward: Nth) -> RankOrder:
    """1F1B with split backwards; the W of each comes `late` backwards after it.

    `forward` and `backward` give the chunk and the microbatch of the k-th of `count` actions.
    """
    done = 0
    for action in one_f_one_b(warmup, count, forward, backward):
        if action.kind == "F":
            yield action
            continue
        yield replace(action, split=True)
        if done >= late:
            yield Action("W", *backward(done - late))
        done += 1
    for k in range(max(0, count - late), count):
        yield Action("W", *backward(k))


class ZBV(Schedule):
    """Two chunks per rank in a V, without a bubble where F = B = W (arXiv 2401.10241, 2405.15362).

    Rank r starts with 2(p-r)-1 forwards down, then r times a forward up and one down, then p-r
    times F, B and W up, after which both chunks run F, B, W in turn. At the end come r pairs of B,
    p-r times B and W down, and the remaining W. With fewer than 2p-1 microbatches, the lists are
    the same without the missing microbatches.
    """

    name = "zbv"
    summary = "two chunks in a V, weight gradients fill every gap"
    source = "arXiv 2405.15362, 2401.10241"
    formulas = Formulas("max(0, 2p-1-m)F", "min(p, m, (m+1+r)/2)", "F = B-W = W")
    default_chunks = 2
    splits_weight_gradient = True
    scope = "span"

    def placement(self, stages: int, chunks: int) -> Placement:
        """Down with chunk 0, up with chunk 1."""
        return v_shape(stages)

    def rank_actions(self, rank: int, stages: int, microbatches: int, chunks: int) -> RankOrder:
        script = _v_script(rank, stages, max(microbatches, 2 * stages - 1))
        count: Counter[tuple[Kind, int]] = Counter()
        for kind, chunk in script:
            microbatch = count[kind, chunk]
            count[kind, chunk] += 1
            if microbatch < microbatches:
                yield Action(kind, chunk, microbatch, split=kind == "B")

    def closed_form(
        self, stages: int, microbatches: int, chunks: int, costs: Costs = UNIT
    ) -> ClosedForm:
        """No bubble if F, B and W cost the same and m >= 2p-1; each missing microbatch costs F.

        The bubble is that within the span of a rank. If ranks wait for each other at the end of the
        step, they are idle for (p-1)F/2 with m >= 2p-1.
        """
        same = costs.forward == costs.input_gradient == costs.weight
        bubble = Fraction(max(0, 2 * stages - 1 - microbatches) * costs.forward)
        flight = (
            Fraction(min(2 * stages, 2 * microbatches, microbatches + 1 + rank), 2)
            for rank in range(stages)
        )
        return ClosedForm(bubble if same or stages == 1 else None, tuple(flight))


_DOWN, _UP = 0, 1
Script: TypeAlias = list[tuple[Kind, int]]


def _v_script(rank: int, stages: int, microbatches: int) -> Iterator[tuple[Kind, int]]:
    """Kinds and chunks in order, for at least 2p-1 microbatches."""
    ahead, rest = 2 * (stages - rank) - 1, stages - rank
    yield from _run("F", _DOWN) * ahead
    yield from (_run("F", _UP) + _run("F", _DOWN)) * rank
    yield from _run("FBW", _UP) * rest
    new = microbatches - ahead - rank
    yield from (_run("FBW", _DOWN) + _run("FBW", _UP)) * new
    yield from (_run("BW", _DOWN) + _run("FBW", _UP)) * (microbatches - stages - new)
    yield from (_run("B", _DOWN) + _run("B", _UP)) * rank
    yield from _run("BW", _DOWN) * rest
    yield from _run("W", _UP) * rank
    yield from _run("W", _DOWN) * rank


def _run(kinds: str, chunk: int) -> Script:
    return [(kind, chunk) for kind in KINDS if kind in kinds]
