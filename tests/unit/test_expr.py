"""Symbolic sizes: the text of an expression states that expression, and every way to put numbers in
gives the same number.

Expressions are drawn as trees; what they mean is computed from the tree with fractions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import assume, example, given, reject
from hypothesis import strategies as st

from stagec.ir.expr import (
    Expr,
    UnboundError,
    call,
    const,
    evaluate,
    expand,
    fraction,
    maximum,
    numerator_and_denominator,
    product,
    same,
    substitute,
    symbol,
    terms,
    total,
)
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError
from tests.support import examples, parse_expr

NAMES = ("a", "b", "c")
Env = Mapping[str, int]


@dataclass(frozen=True)
class Tree:
    """An operator with operands; a leaf has a name or a number."""

    op: str
    args: tuple[Tree, ...] = ()
    leaf: str | int = 0

    def __str__(self) -> str:
        if not self.args:
            return str(self.leaf)
        if self.op in FUNCTIONS:
            return f"{self.op}({', '.join(map(str, self.args))})"
        if self.op == "^":
            return f"({self.args[0]})^{self.leaf}"
        return f"({self.args[0]} {self.op} {self.args[1]})"


FUNCTIONS: Mapping[str, Callable[[list[Fraction]], Fraction]] = {
    "max": max,
    "min": min,
    "ceildiv": lambda v: Fraction(-(-v[0] // v[1])),
}
BINARY: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "%": lambda x, y: x % y,
}


def meaning(tree: Tree, env: Env) -> Fraction:
    """The value of a tree."""
    if not tree.args:
        return Fraction(env[tree.leaf] if isinstance(tree.leaf, str) else tree.leaf)
    values = [meaning(a, env) for a in tree.args]
    if tree.op == "^":
        return values[0] ** int(tree.leaf)
    if tree.op in FUNCTIONS:
        return FUNCTIONS[tree.op](values)
    return BINARY[tree.op](values[0], values[1])


def built(tree: Tree) -> Expr:
    """The expression of a tree, operator by operator as the parser does."""
    if not tree.args:
        return symbol(tree.leaf) if isinstance(tree.leaf, str) else const(tree.leaf)
    args = [built(a) for a in tree.args]
    if tree.op == "^":
        return args[0] ** int(tree.leaf)
    if tree.op in FUNCTIONS:
        return call(tree.op, args)
    operators: Mapping[str, Callable[[Expr, Expr], Expr]] = {
        "+": Expr.__add__,
        "-": Expr.__sub__,
        "*": Expr.__mul__,
        "/": Expr.__truediv__,
        "%": Expr.__mod__,
    }
    return operators[tree.op](args[0], args[1])


LEAVES = st.one_of(
    st.sampled_from(NAMES).map(lambda n: Tree("", leaf=n)),
    st.integers(1, 12).map(lambda n: Tree("", leaf=n)),
)


def nodes(children: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    """Operators over smaller trees; divisors are symbols, numbers or products of them."""
    pair = st.tuples(children, children)
    divisors = st.one_of(LEAVES, st.tuples(LEAVES, LEAVES).map(lambda p: Tree("*", p)))
    return st.one_of(
        st.tuples(st.sampled_from("+-*"), pair).map(lambda t: Tree(t[0], t[1])),
        st.tuples(st.sampled_from("/%"), children, divisors).map(
            lambda t: Tree(t[0], (t[1], t[2]))
        ),
        st.tuples(st.sampled_from(["max", "min"]), pair).map(lambda t: Tree(t[0], t[1])),
        st.tuples(children, divisors).map(lambda p: Tree("ceildiv", p)),
        st.tuples(children, st.integers(2, 3)).map(lambda t: Tree("^", (t[0],), t[1])),
    )


TREES = st.recursive(LEAVES, nodes, max_leaves=8)
#: Without rounding: sums and products of fractions.
RATIONAL = st.recursive(
    LEAVES,
    lambda c: st.one_of(
        st.tuples(st.sampled_from("+-*"), st.tuples(c, c)).map(lambda t: Tree(t[0], t[1])),
        st.tuples(c, LEAVES).map(lambda p: Tree("/", p)),
        st.tuples(c, st.integers(2, 3)).map(lambda t: Tree("^", (t[0],), t[1])),
    ),
    max_leaves=8,
)
ENVS = st.fixed_dictionaries({n: st.integers(1, 9) for n in NAMES})


def number(value: Expr, env: Env) -> Fraction | None:
    """The value of an expression, None if it is no integer."""
    try:
        return Fraction(evaluate(value, env))
    except NotAnIntegerError as e:
        return e.value


def read(text: str) -> Expr:
    """The expression of a text; a draw beyond the limits on text is thrown away."""
    try:
        return parse_expr(text)
    except DiagnosticError as e:
        if "too large" in str(e):
            reject()
        raise


@examples(150)
@given(TREES, ENVS)
def test_an_expression_has_the_value_of_its_tree(tree: Tree, env: Env) -> None:
    assert number(built(tree), env) == meaning(tree, env)


SUM = Tree("+", (Tree("", leaf="a"), Tree("", leaf="b")))
TWO_PER_A = Tree("/", (Tree("", leaf=2), Tree("", leaf="a")))


@examples(150)
@example(Tree("*", (SUM, TWO_PER_A)))
@given(TREES)
def test_text_parses_back_to_the_same_expression(tree: Tree) -> None:
    expr = built(tree)
    again = read(str(expr))
    assert again == expr
    assert str(again) == str(expr)


@examples(100)
@example(Tree("*", (Tree("", leaf="a"), SUM)), Tree("", leaf="a"))
@given(TREES, RATIONAL)
def test_what_passes_compute_parses_back_too(tree: Tree, other: Tree) -> None:
    """Signs, shares and substitutions put numbers before sums, into which the parser takes them."""
    a, value = symbol("a"), built(tree)
    total_of_products = value * built(SUM) + built(other)
    for expr in (-value, -total_of_products / a, substitute(value, {"a": built(SUM)})):
        assert read(str(expr)) == expr


@examples(80)
@given(TREES, ENVS)
def test_the_text_of_a_tree_means_the_tree(tree: Tree, env: Env) -> None:
    assert number(read(str(tree)), env) == meaning(tree, env)


@examples(100)
@given(TREES, ENVS)
def test_numbers_may_be_put_in_one_after_the_other(tree: Tree, env: Env) -> None:
    """Substituting numbers for some symbols and evaluating with the others changes nothing."""
    expr = built(tree)
    try:
        partly = substitute(expr, {"a": const(env["a"]), "c": const(env["c"])})
    except ZeroDivisionError:
        return
    assert partly.symbols <= {"b"}
    assert number(partly, {"b": env["b"]}) == meaning(tree, env)
    assert number(substitute(partly, {"b": const(env["b"])}), {}) == meaning(tree, env)


@examples(100)
@given(TREES, RATIONAL, ENVS)
def test_substitution_is_composition(tree: Tree, inner: Tree, env: Env) -> None:
    value = meaning(inner, env)
    assume(value.denominator == 1 and value > 0)
    try:
        replaced = substitute(built(tree), {"a": built(inner)})
    except ZeroDivisionError:
        return
    assert number(replaced, env) == meaning(tree, {**env, "a": int(value)})


@examples(80)
@given(RATIONAL, RATIONAL, ENVS)
def test_same_is_sound(left: Tree, right: Tree, env: Env) -> None:
    """What is said to be the same has the same value; a polynomial is the same multiplied out."""
    x, y = built(left), built(right)
    if same(x, y):
        assert meaning(left, env) == meaning(right, env)
    assert same(x, expand(x))
    assert same((x + y) * (x - y), x * x - y * y)


@examples(80)
@given(RATIONAL, ENVS)
def test_terms_and_fractions_add_up(tree: Tree, env: Env) -> None:
    expr = built(tree)
    expected = meaning(tree, env)
    actual = sum((c * (number(read(m), env) or 0) for m, c in terms(expr).items()), Fraction(0))
    assert actual == expected
    above, below = numerator_and_denominator(expr)
    assert (number(above, env) or Fraction(0)) / (number(below, env) or Fraction(1)) == expected


def test_sums_products_and_maxima_of_nothing() -> None:
    assert total([]) == 0
    assert product([]) == 1
    assert maximum([]) == 0
    assert maximum([const(3), const(7), const(5)]) == 7
    assert str(maximum([symbol("a"), symbol("b"), symbol("a")])) == "max(a, b)"


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("S/tp", "S/tp"),
        ("2*S/(tp*dp)", "2*S/(dp*tp)"),
        ("B*S*2", "2*B*S"),
        ("(B + 1)*S", "S*(B + 1)"),
        ("S - 1", "S - 1"),
        ("1 - S", "1 - S"),
        ("S*S*S", "S^3"),
        ("S % tp", "(S % tp)"),
        ("max(S, 4)*2", "2*max(S, 4)"),
        ("ceildiv(7, 2)", "4"),
        ("7 % 4", "3"),
        ("max(2, 3, 5)", "5"),
    ],
)
def test_printing(text: str, printed: str) -> None:
    assert str(parse_expr(text)) == printed


@pytest.mark.parametrize(
    "text", ["((x^8)^8)^8", "x^64*x^64", "(x + 1)^8*(x + 1)^8", "1/(x^8)^8/x^8", "(2^8)^7"]
)
def test_what_is_accepted_prints_as_what_is_accepted(text: str) -> None:
    """Limits on what is read hold for what is printed as well."""
    try:
        expr = parse_expr(text)
    except DiagnosticError:
        return  # a limit
    assert parse_expr(str(expr)) == expr


def test_evaluation_says_what_is_missing() -> None:
    with pytest.raises(UnboundError) as missing:
        evaluate(symbol("a") * symbol("b"), {"b": 2})
    assert missing.value.names == ("a",)
    with pytest.raises(NotAnIntegerError) as broken:
        evaluate(symbol("a") / symbol("b"), {"a": 3, "b": 2})
    assert broken.value.value == Fraction(3, 2)
    assert "'a/b' is 3/2" in str(broken.value)
    with pytest.raises(UnboundError):
        fraction(symbol("a"))


def test_names_that_sympy_knows_are_plain_symbols() -> None:
    for name in ("S", "N", "E", "I", "O", "Q", "pi", "oo", "zoo", "gamma"):
        expr = parse_expr(f"{name}*2")
        assert expr.symbols == {name}
        assert evaluate(expr, {name: 3}) == 6
        assert expr == symbol(name) * 2


def test_a_minus_binds_looser_than_a_power() -> None:
    a = symbol("a")
    assert parse_expr("B - a^2") == symbol("B") - a**2
    assert parse_expr("-a^2 + B") == symbol("B") - a**2
    assert parse_expr(str(-(a**2))) == -(a**2)
