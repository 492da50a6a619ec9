"""Index rules: their text, and what follows from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.rule import RuleSyntaxError, letters, make_rule, parse_rule, shape_text
from stagec.support.diagnostics import DiagnosticError
from tests.support import compiled, operations

GROUPS = st.permutations(list("abcdefgh")).flatmap(
    lambda order: st.lists(st.integers(1, 3), max_size=4).map(lambda sizes: cut(order, sizes))
)


def cut(order: list[str], sizes: list[int]) -> tuple[tuple[str, ...], ...]:
    """Consecutive groups of letters, as far as there are letters."""
    groups: list[tuple[str, ...]] = []
    for size in sizes:
        if len(order) >= size:
            groups.append(tuple(order[:size]))
            order = order[size:]
    return tuple(groups)


@given(st.lists(GROUPS, min_size=1, max_size=3), st.lists(GROUPS, min_size=1, max_size=2))
def test_text_and_shapes_are_inverse(
    operands: list[tuple[tuple[str, ...], ...]], results: list[tuple[tuple[str, ...], ...]]
) -> None:
    text = ",".join(map(shape_text, operands)) + "->" + ",".join(map(shape_text, results))
    assert parse_rule(text) == (tuple(operands), tuple(results))


def test_a_rule_knows_its_factors() -> None:
    rule = make_rule("bs(gr)k,bztgk->bs(gr)k", whole="zk", special="t", linear=[0])
    assert rule.factors == tuple("bsgrkzt")
    assert rule.contracted(0) == frozenset("zt")
    assert list(rule.occurrences("g")) == [(0, 2), (1, 3)]
    assert list(rule.occurrences("r")) == [(0, 2)]
    assert list(rule.occurrences("x")) == []
    assert rule.whole == frozenset("zk")
    assert rule.linear == frozenset({0})


def test_a_rule_with_two_results_contracts_differently() -> None:
    rule = make_rule("bsd,bsd,d->bsd,d")
    assert rule.contracted(0) == frozenset()
    assert rule.contracted(1) == frozenset("bs")


def test_a_scalar_has_no_factors() -> None:
    assert parse_rule("->") == (((),), ((),))
    assert parse_rule("ab,->ab") == (((("a",), ("b",)), ()), ((("a",), ("b",)),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ab", "no '->'"),
        ("a1->a", "expected a letter, found '1'"),
        ("a(b->a", "after '('"),
        ("a()->a", "after '('"),
        ("aa->a", "twice"),
        ("a(ba)->a", "twice"),
        ("é->a", "expected a letter"),
    ],
)
def test_wrong_text(text: str, message: str) -> None:
    with pytest.raises(RuleSyntaxError, match=r".") as caught:
        parse_rule(text)
    assert message in str(caught.value)


def test_letters() -> None:
    assert letters(0) == ""
    assert letters(3) == "abc"


SIZES = """stg.module @m {
  stg.symbols[B, S, H, G, K, D]
  stg.assume[H % G == 0, G % tp == 0, H % tp == 0, B % dp == 0]
  stg.mesh @p[dp, tp]
  stg.func @f(%q: bf16[B@dp, S, H@tp, K], %k: bf16[B@dp, S, G@tp, K], %v: bf16[B@dp, S, G@tp, K]) {
    %y = stg.attention(%q, %k, %v) : bf16[B@dp, S, H@tp, K]
    stg.return(%y)
  }
}
"""


def test_factor_sizes_are_solved_from_products() -> None:
    """A dimension (gr) of size H with g of size G leaves r of size H/G, globally and per rank."""
    (op,) = operations(compiled(SIZES, "infer-shapes"), "stg.attention")
    rule = op.definition.rule(op)
    assert rule is not None
    whole = {f: str(s) for f, s in factor_sizes(op, rule).items()}
    sizes = {"b": "B", "s": "S", "t": "S", "k": "K", "v": "K", "g": "G", "r": "H/G"}
    assert whole == sizes
    local = {f: str(s) for f, s in factor_sizes(op, rule, local=True).items()}
    assert local["b"] == "B/dp"
    assert local["g"] == "G/tp"
    assert local["r"] == "H/G"


def test_sizes_that_disagree_are_reported_with_both_places() -> None:
    text = SIZES.replace("%k: bf16[B@dp, S, G@tp, K]", "%k: bf16[B@dp, S, G@tp, D]")
    with pytest.raises(DiagnosticError) as caught:
        compiled(text, "infer-shapes")
    diagnostic = caught.value.diagnostics[0]
    assert "the same size for factor 'k'" in diagnostic.message
    assert len(diagnostic.notes) >= 2
