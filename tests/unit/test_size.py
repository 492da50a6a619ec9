"""The budget of lines of each room."""

from __future__ import annotations

from pathlib import Path

from tools.size import ROOT, files, over_budget, read_budgets, size_of

TEXT = '''"""What it is for.

At length."""

X = """a string
of two lines"""  # a comment


def f(x):
    "A docstring."
    # another comment

    return (x,
            "text")
'''


def test_lines_with_tokens_count_and_docstrings_do_not() -> None:
    lines, tokens = size_of(TEXT)
    assert lines == 5  # two of X, def, two of return
    assert tokens == len(["X", "=", "..."]) + len(["def", "f", "(", "x", ")", ":"]) + 6


def test_a_room_above_its_budget_or_without_one_is_said() -> None:
    sizes = {"big": (12, 100), "new": (1, 2), "small": (5, 9)}
    actual = list(over_budget(sizes, {"big": 10, "small": 5, "gone": 3}))
    assert [text.split()[0] for text in actual] == ["big", "new", "[tool.stagec.size]"]
    assert "2 above its budget" in actual[0]


def test_the_table_has_every_room() -> None:
    assert read_budgets(ROOT / "pyproject.toml").keys() == {room for room, _ in files()}
    assert Path(ROOT, "stagec").is_dir()
