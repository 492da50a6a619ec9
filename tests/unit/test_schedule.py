"""Schedules on the clock: bubble and stashes equal the published closed forms with difference 0.

The formulas stand here a second time, written from the papers, in times of a rank's share of the
model; the schedules' own are compared as well. p ranks, m microbatches, v chunks per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.schedule.base import Schedule
from stagec.schedule.costs import UNIT, Costs
from stagec.schedule.registry import SCHEDULES
from stagec.schedule.simulate import ScheduleEvents, replay
from stagec.schedule.validate import check_schedule
from stagec.support.diagnostics import DiagnosticError
from tests.support import EXHAUSTIVE, examples

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Theory:
    """A row of the table: which sizes, idle time, stashes of a rank in microbatches."""

    sizes: Callable[[int, int, int], bool]
    bubble: Callable[[int, int, int, Costs], Fraction | int]
    flight: Callable[[int, int, int, int], Fraction | int]


def one_chunk(_p: int, _m: int, v: int) -> bool:
    return v == 1


def full_1f1b(p: int, _m: int, _v: int, c: Costs) -> Fraction | int:
    return (p - 1) * (c.forward + c.backward)


TABLE = {
    "gpipe": Theory(one_chunk, full_1f1b, lambda p, m, v, r: m),
    "1f1b": Theory(one_chunk, full_1f1b, lambda p, m, v, r: min(m, p - r)),
    "interleaved": Theory(
        lambda p, m, v: v > 1 and m % p == 0,
        lambda p, m, v, c: Fraction((p - 1) * (c.forward + c.backward)) / v,
        lambda p, m, v, r: Fraction(min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1), v),
    ),
    # the bubble of the paper for m >= p, counted in chunks; with fewer each of v loops waits p - m
    "looped-bfs": Theory(
        lambda p, m, v: v > 1,
        lambda p, m, v, c: Fraction(p - 1 + (v - 1) * max(0, p - m)) * (c.forward + c.backward) / v,
        lambda p, m, v, r: m,
    ),
    "interleaved-zb": Theory(
        lambda p, m, v: v > 1 and m % p == 0,
        lambda p, m, v, c: Fraction((p - 1) * (c.forward + c.input_gradient - c.weight)) / v,
        lambda p, m, v, r: p,
    ),
    "zb-h1": Theory(
        lambda p, m, v: v == 1 and m >= p,
        lambda p, m, v, c: (p - 1) * (c.forward + c.input_gradient - c.weight),
        lambda p, m, v, r: p,
    ),
    "zbv": Theory(
        lambda p, m, v: v == 2 and m >= 2 * p - 1, lambda p, m, v, c: 0, lambda p, m, v, r: p
    ),
    "dualpipe": Theory(
        lambda p, m, v: v == 2 and p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
        lambda p, m, v, c: (p // 2 - 1) * (c.pair + c.backward - 3 * c.weight),
        lambda p, m, v, r: p + 1,
    ),
    # published for PP = 2p stages on p ranks, in times and stashes of a stage: half of a rank's
    "dualpipev": Theory(
        lambda p, m, v: v == 2 and m >= 2 * p,
        lambda p, m, v, c: Fraction((2 * p // 2 - 1) * (c.pair + c.backward - 3 * c.weight)) / 2,
        lambda p, m, v, r: Fraction(2 * p + 1, 2),
    ),
}
#: Up to five stages there are all that a schedule does at its ends; more are more of the same.
STAGES = [pytest.param(p, marks=() if p < 6 else EXHAUSTIVE) for p in range(1, 17)]


def microbatches(stages: int) -> list[int]:
    """Multiples of the stages up to 64, and sizes around where schedules change."""
    near = {1, 2, 3, stages - 1, stages + 1, 2 * stages - 2, 2 * stages - 1, 2 * stages + 1}
    multiples = {stages * k for k in (1, 2, 3, 4, 64 // stages)}
    return sorted(m for m in near | multiples if 1 <= m <= 64)


def grid(name: str, stages: int) -> Iterator[Sizes]:
    """All sizes that the table speaks of."""
    for m in microbatches(stages):
        for v in range(1, 5):
            if TABLE[name].sizes(stages, m, v):
                yield stages, m, v


def run(name: str, sizes: Sizes, costs: Costs = UNIT) -> ScheduleEvents:
    p, m, v = sizes
    schedule = SCHEDULES[name]
    return replay(schedule.actions(p, m, v), schedule.placement(p, v), costs)


def in_flight(timeline: ScheduleEvents) -> tuple[Fraction, ...]:
    return tuple(timeline.in_flight(rank) for rank in range(timeline.ranks))


# -- the table ---------------------------------------------------------------------------------


def test_every_schedule_has_a_row() -> None:
    assert TABLE.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("costs", [Costs(2, 5, 2), Costs(3, 4, 1, 6)], ids=str)
def test_what_a_schedule_says_of_itself_holds(name: str, costs: Costs) -> None:
    """At all small sizes that it accepts, those that the table is silent on too."""
    schedule = SCHEDULES[name]
    sizes = [s for s in product(range(1, 5), range(1, 10), range(1, 4)) if allowed(schedule, s)]
    assert sizes
    for each in sizes:
        timeline, own = run(name, each, costs), schedule.closed_form(*each, costs)
        assert own.bubble in (None, schedule.bubble(timeline)), each
        assert own.in_flight in (None, in_flight(timeline)), each


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", TABLE)
def test_replay_equals_the_closed_forms(name: str, stages: int) -> None:
    theory, schedule = TABLE[name], SCHEDULES[name]
    for sizes in grid(name, stages):
        timeline = run(name, sizes)
        assert schedule.bubble(timeline) - theory.bubble(*sizes, UNIT) == 0, sizes
        flights = tuple(Fraction(theory.flight(*sizes, rank)) for rank in range(stages))
        assert in_flight(timeline) == flights, sizes
        own = schedule.closed_form(*sizes)
        assert (own.bubble, own.in_flight) == (schedule.bubble(timeline), flights), sizes


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", TABLE)
def test_lists_are_complete_and_cannot_deadlock(name: str, stages: int) -> None:
    schedule = SCHEDULES[name]
    for m in (m for m in microbatches(stages) if m <= max(16, 2 * stages + 1)):
        for v in range(1, 5):
            if allowed(schedule, (stages, m, v)):
                actions = schedule.actions(stages, m, v)
                check_schedule(actions, schedule.placement(stages, v), m)
                assert schedule.splits_weight_gradient == any(
                    action.kind == "W" for row in actions for action in row
                )


def allowed(schedule: Schedule, sizes: Sizes) -> bool:
    try:
        schedule.check(*sizes)
    except DiagnosticError:
        return False
    return True


@pytest.mark.long
def test_the_printed_row_of_16_stages_and_64_microbatches() -> None:
    def bubble(name: str, v: int = 1) -> Fraction:
        return SCHEDULES[name].bubble(run(name, (16, 64, v)))

    assert bubble("gpipe") == bubble("1f1b") == 45
    assert bubble("interleaved", 2) == Fraction("22.5")
    assert bubble("interleaved", 4) == Fraction("11.25")
    assert bubble("looped-bfs", 4) == Fraction("11.25")
    assert bubble("zb-h1") == 15
    assert bubble("interleaved-zb", 4) == Fraction("3.75")
    assert bubble("zbv", 2) == 0
    assert bubble("dualpipe", 2) == 7 * (3 + 2 - 3)


def test_stashes_on_rank_0_as_printed() -> None:
    p, m = 16, 64
    first = {
        name: in_flight(run(name, (p, m, SCHEDULES[name].default_chunks)))[0] for name in TABLE
    }
    v = SCHEDULES["interleaved"].default_chunks
    assert first == {
        "gpipe": m,
        "1f1b": p,
        "interleaved": p * (1 + Fraction(p - 1, p * v)),
        "looped-bfs": m,
        "zb-h1": p,
        "interleaved-zb": p,
        "zbv": p,
        "dualpipe": p + 1,
        "dualpipev": p + Fraction(1, 2),
    }


def test_published_examples() -> None:
    """Figures of the papers: ZB-H1 with 4 stages and 8 microbatches, DualPipe with 8 and 20."""
    assert run("zb-h1", (4, 8, 1)).makespan == 8 * 3 + 3
    timeline = run("dualpipe", (8, 20, 2))
    assert in_flight(timeline) == (Fraction(9),) * 8
    assert timeline.makespan == 20 * 3 + 3 * (3 + 2 - 3)


# -- where the closed forms hold, and where not ----------------------------------------------------

ALLOWED = {
    name: [sizes for sizes in product(range(1, 10), range(1, 31), range(1, 5)) if allowed(s, sizes)]
    for name, s in SCHEDULES.items()
}
TIMES = st.fractions(min_value=Fraction(1, 8), max_value=8, max_denominator=8)


@given(st.data())
@examples(60)
def test_closed_forms_hold_for_random_sizes_and_costs(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(TABLE)))
    sizes = data.draw(st.sampled_from(ALLOWED[name]))
    forward, gradient, weight = data.draw(st.tuples(TIMES, TIMES, TIMES))
    if name not in ("gpipe", "1f1b", "interleaved", "looped-bfs"):
        gradient = data.draw(st.sampled_from((forward, gradient)))
        weight = data.draw(st.sampled_from((forward, weight)))
    pair = data.draw(st.one_of(st.none(), TIMES))
    costs = Costs(forward, gradient + weight, weight, pair)
    timeline = run(name, sizes, costs)
    theory = SCHEDULES[name].closed_form(*sizes, costs)
    assert theory.in_flight == in_flight(timeline)
    if theory.bubble is not None:
        assert theory.bubble == SCHEDULES[name].bubble(timeline)
        if TABLE[name].sizes(*sizes):
            assert theory.bubble == TABLE[name].bubble(*sizes, costs)
    assert timeline.makespan >= max(timeline.busy(rank) for rank in range(timeline.ranks))


#: Up to two there is each order of the three, strict and not, that a condition may ask for.
INTEGER_COSTS = [
    pytest.param(*times, marks=() if max(times) < 3 else EXHAUSTIVE)
    for times in product(range(1, 5), repeat=3)
]


def agrees(name: str, costs: Costs, cases: list[Sizes]) -> bool:
    """Whether replay equals the published formula at all of these sizes."""
    return all(
        SCHEDULES[name].bubble(run(name, sizes, costs)) == TABLE[name].bubble(*sizes, costs)
        for sizes in cases
    )


@pytest.mark.parametrize(("forward", "gradient", "weight"), INTEGER_COSTS)
def test_zb_h1_needs_a_cheap_weight_gradient_and_zbv_equal_times(
    forward: int, gradient: int, weight: int
) -> None:
    """The conditions are exact: outside of them the formula fails."""
    costs = Costs(forward, gradient + weight, weight)
    cheap = weight <= forward and weight <= gradient
    assert agrees("zb-h1", costs, [(2, 4, 1), (3, 5, 1), (5, 9, 1)]) == cheap
    assert (SCHEDULES["zb-h1"].closed_form(3, 5, 1, costs).bubble is not None) == cheap
    assert agrees("interleaved-zb", costs, [(2, 4, 2), (3, 6, 2), (4, 8, 3)]) == cheap
    assert (SCHEDULES["interleaved-zb"].closed_form(3, 6, 2, costs).bubble is not None) == cheap
    same = forward == gradient == weight
    assert agrees("zbv", costs, [(2, 4, 2), (3, 6, 2), (4, 9, 2)]) == same
    assert (SCHEDULES["zbv"].closed_form(3, 6, 2, costs).bubble is not None) == same


@pytest.mark.parametrize(
    ("forward", "gradient", "weight"), [p for p in INTEGER_COSTS if 4 not in p.values]
)
def test_dualpipe_needs_equal_times_and_a_pair_between_its_parts(
    forward: int, gradient: int, weight: int
) -> None:
    backward = gradient + weight
    for pair in range(1, forward + backward + 3):
        costs = Costs(forward, backward, weight, pair)
        even = weight <= forward == gradient and backward <= pair <= forward + backward
        for name, cases in (
            ("dualpipe", [(4, 8, 2), (8, 20, 2), (12, 24, 2)]),
            ("dualpipev", [(2, 5, 2), (4, 9, 2), (6, 12, 2)]),
        ):
            assert agrees(name, costs, cases) == even, (name, costs)
            known = SCHEDULES[name].closed_form(*cases[0], costs).bubble is not None
            assert known == even


def test_groups_that_are_no_multiple_of_the_ranks() -> None:
    """PyTorch's rule: as many groups as p goes into m; the last of v chunks holds p of a group."""
    schedule = SCHEDULES["interleaved-zb"]
    for p, m, v in product(range(1, 7), range(1, 20), (2, 3, 4)):
        groups = max(1, m // p)
        assert allowed(schedule, (p, m, v)) == (m % groups == 0)
        if m % groups == 0:
            timeline, group = run("interleaved-zb", (p, m, v)), m // groups
            stashes = min(m * v, (v - 1) * group + p)
            assert in_flight(timeline) == (Fraction(stashes, v),) * p
            assert schedule.closed_form(p, m, v).in_flight == in_flight(timeline)
            if m >= p:
                assert schedule.bubble(timeline) == Fraction(p - 1, v)


def test_lists_of_the_chunked_schedules() -> None:
    """Two ranks, two microbatches, two chunks, written down by hand from the papers' rules."""

    def shown(name: str) -> list[str]:
        rows = SCHEDULES[name].actions(2, 2, 2)
        return [" ".join(f"{a.kind}{a.chunk}.{a.microbatch}" for a in row) for row in rows]

    assert shown("looped-bfs") == ["F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1"] * 2
    assert shown("interleaved-zb") == [
        "F0.0 F0.1 F1.0 F1.1 B1.0 W1.0 B1.1 W1.1 B0.0 W0.0 B0.1 W0.1",
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 W1.0 B0.0 W1.1 B0.1 W0.0 W0.1",
    ]


def test_few_microbatches() -> None:
    """ZB-H1 with m < p fills m-1 gaps; ZBV loses F for each microbatch below 2p-1."""
    for p in range(1, 9):
        for m in range(1, 2 * p):
            h1 = run("zb-h1", (p, m, 1))
            assert SCHEDULES["zb-h1"].bubble(h1) == (p - 1) * 2 - (min(m, p) - 1)
            assert in_flight(h1) == (min(m, p),) * p
            v = run("zbv", (p, m, 2))
            assert SCHEDULES["zbv"].bubble(v) == 2 * p - 1 - m
            assert in_flight(v) == tuple(
                min(Fraction(p), Fraction(m), Fraction(m + 1 + r, 2)) for r in range(p)
            )


def test_zbv_is_idle_at_the_ends_of_a_step_that_ranks_begin_and_end_together() -> None:
    for p in range(1, 9):
        timeline = run("zbv", (p, 3 * p, 2))
        assert max(timeline.idle(rank) for rank in range(p)) == Fraction(p - 1, 2)
        assert all(timeline.idle_in_span(rank) == 0 for rank in range(p))


def test_all_ranks_idle_alike_where_all_have_the_same_work() -> None:
    for name in set(TABLE) - {"zbv"}:
        v = SCHEDULES[name].default_chunks
        timeline = run(name, (4, 8, v))
        assert len({timeline.idle(rank) for rank in range(4)}) == 1, name
