"""How many buckets sizes fill: against filling them one by one."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.ir.buckets import count_buckets
from stagec.ir.evaluation import BUCKETS
from stagec.ir.expr import const, evaluate, substitute
from stagec.support.diagnostics import DiagnosticError
from tests.support import parse_expr

Runs = list[tuple[int, list[int]]]


def one_by_one(full: int, runs: Runs) -> int:
    actual = kept = 0
    for times, sizes in runs:
        for size in sizes * times:
            kept += size
            if kept >= full:
                actual, kept = actual + 1, 0
    return actual + (kept > 0)


RUNS = st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 12), max_size=4)), max_size=3)


@given(st.integers(1, 60), RUNS)
def test_buckets_are_counted_as_if_filled_one_by_one(full: int, runs: Runs) -> None:
    exact = [(Fraction(times), [Fraction(s) for s in sizes]) for times, sizes in runs]
    assert count_buckets(Fraction(full), exact) == one_by_one(full, runs)


def test_the_number_of_turns_costs_nothing() -> None:
    turns = Fraction(2**62)
    assert count_buckets(Fraction(10), [(turns, [Fraction(1), Fraction(6)])]) == 2**61
    assert count_buckets(Fraction(2**60), [(turns, [Fraction(1)])]) == 4


def test_an_expression_counts_them() -> None:
    text = "buckets(25, (1, 4*D), (L, 8*D, 2*D))"
    value = parse_expr(text)
    assert str(value) == text
    runs: Runs = [(1, [12]), (9, [24, 6])]
    assert evaluate(value, {"D": 3, "L": 9}) == one_by_one(25, runs)
    folded = substitute(value, {"D": const(3), "L": const(9)})
    assert folded == one_by_one(25, runs)
    assert str(substitute(value, {"D": const(3)})) == "buckets(25, (1, 12), (L, 24, 6))"
    assert parse_expr("buckets(25, (2, 8, 20), (3, 1))") == 3


@pytest.mark.parametrize("text", ["buckets(D, L)", "buckets((1, D), (1, D))", "max((1, D), D)"])
def test_rows_stand_where_they_belong(text: str) -> None:
    with pytest.raises(DiagnosticError, match=r"rows|tuple"):
        parse_expr(text)


def test_what_makes_no_sense_still_has_a_value() -> None:
    """Hostile texts: nothing is full with nothing, and there is nothing below zero."""
    assert parse_expr(f"{BUCKETS}(0, (2, 1, 3))") == 4
    assert parse_expr(f"{BUCKETS}(5, (0 - 2, 7), (3/2, 0 - 9, 6))") == 1
