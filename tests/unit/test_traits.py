"""Traits say what their tables say, of the ops as they are."""

from __future__ import annotations

import re
from inspect import getdoc
from itertools import pairwise
from typing import ClassVar

import pytest

from stagec.ir import traits
from stagec.ir.opdef import OpDef
from stagec.ir.param import Arity
from stagec.ir.traits import Declares, Free, InPlace, Repeats, Runs, Stays, Trait
from tests.support import registry

KINDS = [k for k in vars(traits).values() if isinstance(k, type) and issubclass(k, Trait)][1:]
ROW = re.compile(r"\| `([\w.]+)` *\| (yes|no)\b")


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_of_a_table_is_true(kind: type[Trait]) -> None:
    rows: list[tuple[str, str]] = ROW.findall(getdoc(kind) or "")
    assert {said for _, said in rows} == {"yes", "no"}
    for name, said in rows:
        assert registry()[name].has(kind) == (said == "yes"), name


def test_a_trait_brings_along_what_it_refines() -> None:
    class Loop(OpDef):
        traits: ClassVar[tuple[Trait, ...]] = (Repeats(),)

    class Plain(Loop):
        traits = ()

    assert Loop.kinds > {Repeats, Runs, Free, Stays}
    assert Loop().has(Free)
    assert not Loop().has(Declares)
    assert not Plain().has(Repeats)


def test_what_a_trait_says_can_be_read() -> None:
    (adamw, add) = registry()["stg.adamw"], registry()["stg.add"]
    assert adamw.trait(InPlace) == InPlace((0, 2, 3, 4))
    assert adamw.trait(Stays) == InPlace((0, 2, 3, 4))
    assert add.trait(InPlace) is None
    assert str(Declares("symbols")) == "Declares(symbols)"
    assert str(Repeats()) == "Repeats"


def test_views_take_a_buffer_and_updates_take_that_of_an_operand() -> None:
    """No op has two traits that say where its results lie."""
    for op in registry():
        assert len({InPlace, traits.View} & op.kinds) < 2, op.name


@pytest.mark.parametrize(
    ("names", "least", "most", "text"),
    [
        ((), 0, 0, "0 operands"),
        (("x",), 1, 1, "1 operand"),
        (("y", "stats?"), 1, 2, "1 to 2 operands"),
        (("q", "kv*"), 1, None, "at least 1 operand"),
    ],
)
def test_names_say_how_many(
    names: tuple[str, ...], least: int, most: int | None, text: str
) -> None:
    arity = Arity.of(names)
    assert arity.text("operand") == text
    assert [n for n in range(9) if arity.fits(n)] == list(
        range(least, 9 if most is None else most + 1)
    )


def test_what_may_be_left_out_comes_last() -> None:
    """The names of operands and results: first those that are always there."""
    for op in registry():
        for names in (op.operands, op.results):
            marks = [("?*".find(n[-1]) + 1) for n in names]
            assert all(a == 0 or (a == b == 1) for a, b in pairwise(marks)), op.name
