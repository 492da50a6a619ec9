"""Runs every test below tests/lit as one pytest case; see stagec/testing for the how.

Run one by hand: `.venv/bin/stagec test tests/lit/parser/x.stg`, or, with the stock runner,
`.venv/bin/lit -v tests/lit/parser/x.stg`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stagec.testing.runner import LitTest, describe_failure
from stagec.testing.syntax import find_tests, read_test, run_lines
from tests.support import DISTINCT

pytestmark = DISTINCT

LIT_ROOT = Path(__file__).resolve().parent / "lit"


def has_run_line(path: Path) -> bool:
    return bool(run_lines(read_test(path)))


def cases() -> list[str]:
    """The tests, named by their path below tests/lit."""
    return [
        path.relative_to(LIT_ROOT).as_posix() for path in find_tests(LIT_ROOT) if has_run_line(path)
    ]


@pytest.fixture(autouse=True)
def verified_once() -> None:
    """Each pass is verified, also in a quick run."""


@pytest.mark.parametrize("name", cases())
def test_lit(name: str, tmp_path: Path) -> None:
    test = LitTest(LIT_ROOT / name, tmp_path)
    outcomes = test.run()
    if any(outcome.failed for outcome in outcomes):
        again = f".venv/bin/stagec test tests/lit/{name}"
        pytest.fail(f"{name}\n{describe_failure(test, outcomes)}  or: {again}\n", pytrace=False)
