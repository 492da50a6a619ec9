"""Tables on a terminal, and what lists of models say."""

from __future__ import annotations

import io
import re
from collections import Counter
from typing import Any

import pytest

from stagec.importers.library import model_layers
from stagec.models import library
from stagec.output.tables import console, table
from stagec.searches.table import print_answer


class Terminal(io.StringIO):
    """A stream that is a terminal of so many columns."""

    def isatty(self) -> bool:
        return True


def shown(columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    made = table("T", "class", "phase", "counts as", "nodes", "time", "of all", text_columns=3)
    made.add_row("stage0", "backward", "exposed reduce_scatter of tp", "36", "26.41 ms", "2.9%")
    made.add_row("others", "", "", "1,090", "76.20 ms", "8.5%")
    console(stream).print(made)
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in stream.getvalue().splitlines()]


def test_margins_go_before_words(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow, least = (shown(n, monkeypatch) for n in (90, 72, 60))
    row = ["stage0", "backward", "exposed reduce_scatter of tp", "36", "26.41 ms", "2.9%"]
    assert re.split(r" {2,}", wide[4].strip()) == row
    assert narrow[-2].split() == " ".join(row).split()  # nothing is folded
    assert max(map(len, narrow)) <= 72
    assert max(map(len, least)) <= 60
    assert least[-3].endswith("26.41 ms 2.9%")  # words are, numbers are not
    for lines in (narrow, least):  # nothing is cut off
        assert Counter(c for c in "".join(lines) if c.isalnum()) == Counter(
            c for c in "".join(wide) if c.isalnum()
        )


def test_a_row_is_a_sentence_where_its_numbers_have_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown(30, monkeypatch) == [
        "T",
        "class stage0, phase backward,",
        "  counts as exposed",
        "  reduce_scatter of tp, nodes",
        "  36, time 26.41 ms, of all",
        "  2.9%",
        "class others, nodes 1,090,",
        "  time 76.20 ms, of all 8.5%",
    ]


def test_files_have_no_blanks_at_the_ends_of_lines() -> None:
    out = io.StringIO()
    made = table("Sizes", "name", "bytes")
    made.add_row("a", "1")
    console(out).print(made)
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert "  a          1" in lines


def test_a_file_has_a_line_per_row_and_folds_no_name() -> None:
    name = "layers.self_attention.query_projection.weight"
    for words, lines in (6, 1), (20, 4):  # up to 160 columns a row is a line
        out = io.StringIO()
        prose = " ".join(["gathered"] * words)
        console(out).print(
            table("Buffers", "name", "made by", "bytes", rows=[[name, prose, "1"]], text_columns=2)
        )
        rows = out.getvalue().splitlines()[4:-1]
        assert len(rows) == lines
        assert name in rows[0]
        assert " ".join(row.replace(name, "").strip(" 1") for row in rows) == prose


def test_what_limits_a_strategy_is_below_a_narrow_table(monkeypatch: pytest.MonkeyPatch) -> None:
    best: dict[str, Any] = {
        **dict.fromkeys(("step_seconds", "mfu", "tokens_per_second_per_rank"), 0.5),
        **dict.fromkeys(("memory_peak", "head_room"), 5),
        "strategy": "--dp 8",
        "limits": "computation 98%",
        "reason": "the best",
        "command": "stagec compile m --dp 8 -o m-1",
    }
    answer: dict[str, Any] = {
        **dict.fromkeys(("points", "legal", "evaluated", "same", "left"), 1),
        "best": [best],
        "model": "m",
        "seconds": 1.0,
        "priced": False,
        "proven": True,
        "refused": {},
        "cut": {},
    }
    for columns, below in ((160, False), (80, True)):
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = Terminal()
        print_answer(answer, stream)
        assert ("[1] computation 98%; the best" in stream.getvalue()) == below
        assert "computation 98%" in stream.getvalue()


def test_layers_of_all_kinds_are_counted() -> None:
    """Local and global ones, of two towers, none; not those of a tower that the step leaves out."""
    wanted = {
        "llama3-8b": 32,
        "deepseek-v3": 61,
        "gemma-3-4b": 34,
        "gpt-oss-20b": 24,
        "jamba-v0.1": 32,
        "llama4-scout": 48,
        "whisper-large-v3": 64,
        "dlrm": 0,
    }
    assert {name: model_layers(library()[name]) for name in wanted} == wanted


def test_texts_are_printed_as_they_are() -> None:
    out = io.StringIO()
    made = console(out)
    made.print("layers [bold] of [1], :x:")
    made.print(table("a [title]", "name [red]", rows=[["stg.freeze[/all]"]]))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert {"layers [bold] of [1], :x:", "a [title]", "name [red]", "stg.freeze[/all]"} <= {*lines}
