"""Runs every test below tests/lit as one pytest case; see tools/lit_runner.py for the how.

Run one by hand: `.venv/bin/pytest 'tests/test_lit.py::test_lit[parser/x.stg]'`, or, with the stock
runner, `.venv/bin/lit -v tests/lit/parser/x.stg`. `STAGEC_BLESS=1` accepts changed goldens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.lit_runner import LitTest, describe_failure
from tools.lit_syntax import find_tests, run_lines

LIT_ROOT = Path(__file__).resolve().parent / "lit"


def has_run_line(path: Path) -> bool:
    return bool(run_lines(path.read_text(encoding="utf-8")))


def cases() -> list[str]:
    """The tests, named by their path below tests/lit."""
    return [
        path.relative_to(LIT_ROOT).as_posix() for path in find_tests(LIT_ROOT) if has_run_line(path)
    ]


@pytest.mark.parametrize("name", cases())
def test_lit(name: str, tmp_path: Path) -> None:
    test = LitTest(LIT_ROOT / name, tmp_path)
    outcomes = test.run()
    if any(outcome.failed for outcome in outcomes):
        again = f".venv/bin/lit -v tests/lit/{name}"
        pytest.fail(f"{name}\n{describe_failure(test, outcomes)}  or: {again}\n", pytrace=False)
