"""The clock: exact times, stashes and costs of replayed lists, against definitions written anew."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.schedule.action import Action, Placement, StageChunk, steps
from stagec.schedule.costs import Costs
from stagec.schedule.registry import SCHEDULES
from stagec.schedule.simulate import ActionKey, Event, replay
from stagec.support.diagnostics import DiagnosticError
from tests.support import examples

Sizes = tuple[int, int, int]
TIMES = st.fractions(min_value=Fraction(1, 8), max_value=8, max_denominator=8)


def allowed(name: str, sizes: Sizes) -> bool:
    try:
        SCHEDULES[name].check(*sizes)
    except DiagnosticError:
        return False
    return True


ALLOWED = {
    name: [
        sizes for sizes in product(range(1, 5), range(1, 9), range(1, 4)) if allowed(name, sizes)
    ]
    for name in SCHEDULES
}


def slow_ends(
    name: str, sizes: Sizes, costs: Costs, transfer: Fraction
) -> dict[ActionKey, Fraction]:
    """The end of every action as its longest chain of causes, from the definition."""
    p, _, v = sizes
    at = SCHEDULES[name].placement(p, v)
    rows = [list(steps(row)) for row in SCHEDULES[name].actions(*sizes)]
    home: dict[ActionKey, tuple[int, int]] = {
        (a.kind, at.stage(rank, a.chunk), a.microbatch): (rank, i)
        for rank, row in enumerate(rows)
        for i, step in enumerate(row)
        for a in step
    }
    chunk = costs.scaled(at.share)

    def causes(rank: int, action: Action) -> Iterator[ActionKey]:
        stage, depth = at.stage(rank, action.chunk), at.depth
        if action.kind == "F" and stage % depth > 0:
            yield "F", stage - 1, action.microbatch
        if action.kind == "B" and stage % depth < depth - 1:
            yield "B", stage + 1, action.microbatch
        if action.kind != "F":
            yield "F" if action.kind == "B" else "B", stage, action.microbatch

    @cache
    def end(rank: int, index: int) -> Fraction:
        step = rows[rank][index]
        actual = [Fraction(0)] if index == 0 else [end(rank, index - 1)]
        for work in (w for action in step for w in causes(rank, action)):
            other = home[work]
            actual.append(end(*other) + (transfer if other[0] != rank else 0))
        return max(actual) + length(step, chunk)

    return {work: end(*place) for work, place in home.items()}


def length(step: tuple[Action, ...], chunk: Costs) -> Fraction:
    if len(step) == 2:
        return Fraction(chunk.pair)
    if step[0].kind == "B":
        return Fraction(chunk.input_gradient if step[0].split else chunk.backward)
    return Fraction(chunk.forward if step[0].kind == "F" else chunk.weight)


@given(st.data())
@examples(40)
def test_the_clock_gives_longest_paths(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(SCHEDULES)))
    sizes = data.draw(st.sampled_from(ALLOWED[name]))
    forward, gradient, weight = data.draw(st.tuples(TIMES, TIMES, TIMES))
    pair = data.draw(st.one_of(st.none(), TIMES))
    costs = Costs(forward, gradient + weight, weight, pair)
    transfer = data.draw(st.fractions(0, 2, max_denominator=4))
    p, m, v = sizes
    at = SCHEDULES[name].placement(p, v)
    timeline = replay(SCHEDULES[name].actions(p, m, v), at, costs, transfer)
    ends = slow_ends(name, sizes, costs, transfer)
    for rank, row in enumerate(timeline.rows):
        for action, _, end in row:
            work = action.kind, at.stage(rank, action.chunk), action.microbatch
            assert end * timeline.tick == ends[work]
    assert timeline.makespan == max(ends.values())


def test_stashes_by_time() -> None:
    """Stashes counted from the clock: held from the start of F to the end of B, or of W."""
    for name, schedule in SCHEDULES.items():
        v = schedule.default_chunks
        timeline = replay(schedule.actions(4, 8, v), schedule.placement(4, v))
        for rank, row in enumerate(timeline.rows):
            for chunk in (None, *timeline.placement.chunks(rank)):
                mine = [e for e in row if chunk in (None, e.action.chunk)]
                assert timeline.stashes(rank, chunk) == most_held(mine), (name, rank, chunk)


def most_held(row: list[Event]) -> int:
    begins = {(a.chunk, a.microbatch): start for a, start, _ in row if a.kind == "F"}
    ends = {(a.chunk, a.microbatch): end for a, _, end in row if not a.split and a.kind != "F"}
    return max(sum(begins[key] <= time < ends[key] for key in begins) for time in begins.values())


def test_costs_per_virtual_stage() -> None:
    """A slow last stage sets the pace; equal costs per stage are the same as one for all."""
    schedule = SCHEDULES["1f1b"]
    actions, at = schedule.actions(3, 6, 1), schedule.placement(3, 1)
    slow = replay(actions, at, [Costs(), Costs(), Costs(2, 4, 1)])
    assert slow.makespan == 2 + 6 * 6 + 4
    assert slow.idle_in_span(2) == 0
    same = replay(actions, at, [Costs()] * 3)
    assert same.rows == replay(actions, at).rows
    with pytest.raises(DiagnosticError, match="2 costs for 3 virtual stages"):
        replay(actions, at, [Costs()] * 2)


def test_pairs_of_unequal_stages_save_half_of_what_each_saves() -> None:
    pair = (Action("F", 0, 1, pair=0), Action("B", 1, 0, pair=0))
    row = (Action("F", 0, 0), Action("F", 1, 0), *pair, Action("F", 1, 1), *last_two())
    at = Placement((StageChunk(0, 0), StageChunk(0, 1)))
    timeline = replay((row,), at, [Costs(2, 4, 1, 5), Costs(3, 6, 1, 6)])
    start, end = timeline.rows[0][2][1:]
    assert (end - start) * timeline.tick == 2 + 6 - Fraction(1, 2) - Fraction(3, 2)
    assert timeline.busy(0) == timeline.makespan


def last_two() -> tuple[Action, ...]:
    return Action("B", 0, 0), Action("B", 1, 1), Action("B", 0, 1)


def test_lists_grow_with_actions_only() -> None:
    """The lists of 64 stages and 512 microbatches, and their replay: one event per action."""
    actions = SCHEDULES["1f1b"].actions(64, 512, 1)
    timeline = replay(actions, SCHEDULES["1f1b"].placement(64, 1))
    assert sum(map(len, timeline.rows)) == 64 * 512 * 2
    assert timeline.idle(0) == 63 * 3


def test_costs_that_cannot_be() -> None:
    for wrong, message in (
        ({"forward": 0}, "the cost F is 0"),
        ({"overlapped": -1}, "the cost FB is -1"),
        ({"weight": 2}, "no less than the whole backward"),
    ):
        with pytest.raises(DiagnosticError, match=message) as raised:
            Costs(**wrong)
        assert raised.value.diagnostics[0].remedy
    with pytest.raises(DiagnosticError, match="transfer time is -1"):
        replay(SCHEDULES["gpipe"].actions(1, 1, 1), SCHEDULES["gpipe"].placement(1, 1), transfer=-1)
