"""Divisibility: what `Facts` says holds for all values that satisfy the relations; and it finds
what the compiler needs.
"""

from __future__ import annotations

from itertools import product as combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.ir.expr import Expr, const, evaluate, is_integral, product, product_is_integral, symbol
from stagec.ir.facts import Facts, Relation, divisible
from stagec.support.diagnostics import NotAnIntegerError
from tests.support import examples, parse, parse_expr

NAMES = ("a", "b", "c", "d")
VALUES = range(1, 7)


def monomials(most: int) -> st.SearchStrategy[Expr]:
    """Products of a few symbols and a small number."""
    names = st.lists(st.sampled_from(NAMES), max_size=most).map(
        lambda actual: product(symbol(n) for n in actual)
    )
    return st.tuples(st.integers(1, 4), names).map(lambda p: const(p[0]) * p[1])


SIZES = st.one_of(
    monomials(3),
    st.tuples(monomials(2), monomials(2)).map(lambda p: p[0] + p[1]),
    st.tuples(monomials(3), monomials(1)).map(lambda p: p[0] / p[1]),
)
RELATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(NAMES).map(symbol), monomials(2)),
        st.tuples(monomials(2), monomials(1)),
    ).map(lambda p: divisible(*p)),
    max_size=3,
)


def holds_everywhere(divisor: Expr, size: Expr, relations: list[Relation]) -> bool:
    """Whether `size / divisor` is an integer wherever the relations hold and `size` is one."""
    for values in combinations(VALUES, repeat=len(NAMES)):
        env: dict[str, int] = dict(zip(NAMES, values, strict=True))
        if not all(r.holds(env) for r in relations):
            continue
        try:
            number = evaluate(size, env)
        except NotAnIntegerError:
            continue
        if number % evaluate(divisor, env):
            return False
    return True


@examples(120)
@given(monomials(2), SIZES, RELATIONS)
def test_what_is_said_to_divide_divides(
    divisor: Expr, size: Expr, relations: list[Relation]
) -> None:
    if Facts(relations).divides(divisor, size):
        assert holds_everywhere(divisor, size, relations)


@examples(60)
@given(monomials(1), monomials(1), RELATIONS)
def test_decisions_do_not_depend_on_the_order_of_questions(
    divisor: Expr, size: Expr, relations: list[Relation]
) -> None:
    asked = Facts(relations)
    asked.divides(size, divisor)
    first = asked.divides(divisor, size)
    assert first == Facts(relations).divides(divisor, size)
    grown = Facts()
    grown.divides(divisor, size)
    for relation in relations:
        grown.add(relation)
    assert grown.divides(divisor, size) == first


@pytest.mark.parametrize(
    ("relations", "divisor", "size", "expected"),
    [
        ([], "1", "S", True),
        ([], "S", "S", True),
        ([], "tp", "S", False),
        ([], "2", "4*S", True),
        ([], "2", "3*S", False),
        (["S % tp"], "tp", "S", True),
        (["S % tp"], "tp", "B*S", True),
        (["S % tp"], "dp", "S", False),
        (["S % tp"], "2*tp", "2*S", True),
        (["S % tp", "B % dp"], "dp*tp", "B*S", True),
        (["S % (dp*tp)"], "tp", "S", True),
        (["S % (2*tp)"], "tp", "S/2", True),
        (["H % tp", "G % tp"], "tp", "H/G", False),
        (["S % tp"], "tp", "S + B", False),
        (["S % tp", "B % tp"], "tp", "S + B", True),
        (["S % tp"], "S", "tp", False),
        (["S*T % E*tp"], "tp", "S*T/E", True),
        (["S*T % E*tp"], "tp", "B*S*T/E", True),
        (["S*T % E"], "tp", "S*T/E", False),
        (["S*T % E", "S % tp"], "tp", "S*T/E", False),
    ],
)
def test_table(relations: list[str], divisor: str, size: str, expected: bool) -> None:
    known = [
        divisible(*map(parse_expr, r.replace("(", "").replace(")", "").split(" % ")))
        for r in relations
    ]
    assert Facts(known).divides(parse_expr(divisor), parse_expr(size)) is expected


def test_relations_read_from_text() -> None:
    module = parse(
        "stg.module @m {\n  stg.symbols[S, B]\n  stg.mesh @p[tp, dp]\n"
        "  stg.assume[S % (tp*dp) == 0, B >= 2, S <= 64]\n}"
    )
    texts = [str(r) for r, _ in module.relations]
    assert texts == ["S % (dp*tp) == 0", "B >= 2", "S <= 64"]
    first, second, third = (r for r, _ in module.relations)
    env = {"S": 8, "B": 2, "tp": 2, "dp": 2}
    assert first.holds(env)
    assert not first.holds({**env, "S": 6})
    assert second.holds(env)
    assert not second.holds({**env, "B": 1})
    assert not third.holds({**env, "S": 65})
    assert module.facts.divides(parse_expr("tp"), parse_expr("S"))
    assert first.symbols == {"S", "tp", "dp"}
    assert str(first.substitute({"dp": const(4)})) == "S % (4*tp) == 0"


@pytest.mark.parametrize("left", ["a", "a/b", "a - b"])
def test_what_is_assumed_to_be_zero_tells_nothing(left: str) -> None:
    """It never is, and must not be divided by."""
    facts = Facts([Relation(parse_expr(left), "==", const(0))])
    assert not facts.divides(symbol("b"), symbol("a"))
    assert facts.divides(symbol("b"), symbol("a") * symbol("b"))


@pytest.mark.parametrize(
    ("size", "integral"),
    [
        ("2*S", True),
        ("S*(S + B)/S", True),
        ("ceildiv(S, 2)", True),
        ("max(B, S)/B", False),
        ("S/2", False),
        ("max(S/2, B)", False),
        ("(S + B)/2", False),
    ],
)
def test_a_size_is_an_integer_by_its_form(size: str, integral: bool) -> None:
    assert is_integral(parse_expr(size)) is integral


@pytest.mark.parametrize("left", ["S", "S/2", "2*S/tp + B", "S/tp + S^2/tp", "S/3 - B/2", "B/tp"])
@pytest.mark.parametrize("right", ["1", "2", "tp", "tp/S", "6*tp", "1/S + 1/B", "max(S, 2)/S"])
def test_products_are_integral_as_those_that_are_made(left: str, right: str) -> None:
    one, other = parse_expr(left), parse_expr(right)
    assert product_is_integral(one, other) is is_integral(one * other)


def test_a_symbol_that_looks_like_a_quotient_proves_nothing() -> None:
    """`S % tp == 0` introduces an integer S/tp: a symbol of the text is never taken for it."""
    facts = Facts([divisible(symbol("S"), symbol("tp"))])
    assert facts.divides(symbol("tp"), symbol("S"))
    assert not facts.divides(symbol("S_over_0"), symbol("S"))
