"""What is suggested for unknown words: near ones, and nothing where none is near."""

from __future__ import annotations

import pytest

from stagec.models import library
from stagec.support.suggest import did_you_mean
from tests.support import registry, stagec

WORDS = ("tp", "pp", "sequence-parallel", "infer-shapes", "insert-collectives", "zb-h1", "zbv")
OPS = [op.name for op in registry()]

CASES: list[tuple[str, list[str], str | None]] = [
    ("stg.mean", OPS, None),  # not stg.send, stg.neg
    ("stg.gleu", OPS, "stg.gelu"),
    ("stg.sofmax", OPS, "stg.softmax"),
    ("std.gelu", OPS, "stg.gelu"),
    ("gelu", OPS, "stg.gelu"),
    ("my.silly", OPS, None),  # not stg.silu
    ("infer-shape", list(WORDS), "infer-shapes"),
    ("inser-colectives", list(WORDS), "insert-collectives"),
    ("zb-h2", list(WORDS), "zb-h1"),
    ("seq", list(WORDS), "sequence-parallel"),
    ("x", list(WORDS), None),
    ("qwen3-235b", list(library()), "qwen3-235b-a22b"),
    ("llama-70b", list(library()), "llama3-70b"),
    ("a" * 10_000, list(WORDS), None),
]


@pytest.mark.parametrize(("word", "known", "wanted"), CASES, ids=lambda v: str(v)[:20])
def test_the_nearest_word_or_none(word: str, known: list[str], wanted: str | None) -> None:
    assert did_you_mean(word, known) == (wanted and f"did you mean '{wanted}'?")


def test_words_that_are_equally_near_are_all_reported() -> None:
    assert did_you_mean("ab", ["abc", "abd", "xyz"]) == "did you mean 'abc' or 'abd'?"
    assert did_you_mean("ab", ["abc", "abd", "abe", "abf"]) is None
    assert did_you_mean("xy", ["xyz"], "%") == "did you mean '%xyz'?"


LONG = [n for n in OPS if len(last := n.partition(".")[2]) >= 4 and last[1] != last[2]]


@pytest.mark.parametrize("name", LONG)
def test_an_op_with_two_letters_swapped_is_found_again(name: str) -> None:
    """Whatever is suggested, the op itself is among it."""
    scope, _, last = name.partition(".")
    wrong = f"{scope}.{last[0]}{last[2]}{last[1]}{last[3:]}"
    assert f"'{name}'" in (did_you_mean(wrong, OPS) or "")


def test_on_the_command_line() -> None:
    assert "'stg.mean'" not in stagec("ops", "stg.mean").err.partition("help:")[2]
    assert "did you mean 'qwen3-235b-a22b'?" in stagec("analyze", "qwen3-235b").err
