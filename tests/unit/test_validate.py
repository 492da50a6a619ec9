"""`stagec validate`: every published figure is there, computed by compiling, and a figure that is
off fails.
"""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest

from stagec.models import library
from stagec.validation import figures, sources
from stagec.validation.figures import PublishedRow, published_rows
from tests.checked_sources import ROOT, only
from tests.support import LONG, assert_schema, stagec
from tests.unit import test_docs
from tests.unit.test_docs import VALIDATES, blocks, check_commands, name_of

#: Size in billions as published (arXiv 2104.04473), and global batch.
TABLE = {
    "1.7": 512,
    "3.6": 512,
    "7.5": 512,
    "18.4": 1024,
    "39.1": 1536,
    "76.1": 1792,
    "145.6": 2304,
    "310.1": 2160,
    "529.6": 2520,
    "1008.0": 3072,
}


#: Pages that show the command.
SESSIONS = [
    page
    for page in test_docs.SESSIONS
    if any(VALIDATES in block.text for block in blocks(page, "console"))
]


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs share what they compile."""
    monkeypatch.setattr(figures, "LibraryCounts", _compiled)


@cache
def _compiled() -> figures.LibraryCounts:
    return _CLASS()


_CLASS = figures.LibraryCounts


@cache
def rows() -> list[dict[str, object]]:
    ran = stagec("validate", "--json")
    assert ran.code == 0, ran.out
    actual: list[dict[str, object]] = json.loads(ran.out)
    assert_schema("validate", actual)
    return actual


@LONG
def test_every_row_is_right() -> None:
    actual = rows()
    assert all(set(r) == {"source", "row", "published", "ours", "ok"} for r in actual)
    assert all(r["ok"] is True for r in actual)
    names = [str(r["row"]) for r in actual]
    assert len(set(names)) == len(names)
    by_name = {str(r["row"]): r for r in actual}
    for size in TABLE:
        row = by_name[f"gpt-{size.removesuffix('.0')}b parameters (billions)"]
        assert row["published"] == row["ours"] == size
        assert f"gpt-{size.removesuffix('.0')}b FLOPs per iteration" in by_name
    for name, count in (
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama2-7b", 6_738_415_616),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
    ):
        assert by_name[f"{name} parameters"]["ours"] == f"{count:,}"
    assert by_name["gpt3-175b parameters (billions)"]["ours"] == "174.6"
    assert by_name["deepseek-v3 parameters and router biases"]["ours"] == "671,026,419,200"
    assert by_name["deepseek-v2 parameters (billions)"]["ours"] == "235.7"
    kept = [r["published"] for r in actual if r["source"] == "arXiv 2205.05198, figure 1"]
    assert kept == [
        "45.5625",
        "59.25",
        "9.5625",
        "45.5625",
        "66.84375",
        "12.3515625",
        "31.640625",
        "114.0234375",
        "23.076171875",
        "32.958984",
        "131.25",
        "26.5625",
    ]
    per_token = {n: r for n, r in by_name.items() if "GFLOP per token" in n}
    assert len(per_token) >= 3


#: MB as they come out, in the order of the rows.
COUNTERS = (
    *("19730.0", "105230.7", "1073.7", "29393.7", "77309.4", "14495.5", "309237.6", "104153.0"),
    *("279172.9", "1073.7", "558345.7", "139586.4", "2147.5"),
)


def test_counters_are_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each row has our bytes, to a tenth of an MB, and how far off they are."""
    actual = counter_rows(monkeypatch, tmp_path)
    assert [row.ours.split()[0] for row in actual] == [*COUNTERS]
    for row in actual:
        ours, off = row.ours.split()
        measured = float(row.published.split()[0])
        assert off == f"({round(100 * (float(ours) / measured - 1), 2) + 0.0:+.2f}%)"


@pytest.mark.parametrize(
    ("measured", "ok"),
    [("19900.0", True), ("19930.0", False), ("19540.0", True), ("19500.0", False)],
)
def test_counters_that_are_off_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: str, ok: bool
) -> None:
    first = counter_rows(monkeypatch, tmp_path, ("19730.0", measured))[0]
    assert first.ok == ok


def test_bytes_that_are_off_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row with a balance is wrong where that is not 0, whatever the figure."""
    only(monkeypatch, tmp_path, "layer-traffic", ("2 * 4 * B * S * D", "3 * B * S * D"))
    (first, *_) = published_rows()
    assert not first.ok
    assert first.published == "4"
    assert first.ours.startswith("4, with more(bytes(all_reduce, tp)")


def counter_rows(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *changes: tuple[str, str]
) -> list[PublishedRow]:
    only(monkeypatch, folder, "stage-counters", *changes)
    return published_rows()


@LONG
@pytest.mark.parametrize("page", SESSIONS, ids=name_of)
def test_pages_show_what_is_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_commands(page, tmp_path, monkeypatch, lambda command: command.startswith(VALIDATES))


@LONG
def test_flops_of_an_iteration_equal_the_closed_form() -> None:
    """96 B s L h² (1 + s/6h + V/16Lh), from the sizes of the library."""
    by_name = {str(r["row"]): r for r in rows()}
    for size, batch in TABLE.items():
        name = f"gpt-{size.removesuffix('.0')}b"
        n = library()[name].values
        s, h, layers, v = n["S"], n["D"], n["L"], n["V"]
        factor = 1 + Fraction(s, 6 * h) + Fraction(v, 16 * layers * h)
        closed = 96 * batch * s * layers * h * h * factor
        assert closed.denominator == 1
        ours = str(by_name[f"{name} FLOPs per iteration"]["ours"]).replace(",", "")
        assert int(ours) == closed


@LONG
def test_a_figure_that_is_off_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The table shows every row, and says which one is off."""
    expected = rows()
    copied = tmp_path / "validation"
    shutil.copytree(ROOT / "validation", copied)
    wrong = copied / "gpt-parameters" / "rows.csv"
    wrong.write_text(wrong.read_text().replace("gpt-1.7b,1.7", "gpt-1.7b,1.8"))
    monkeypatch.setattr(sources, "_folders", lambda: [copied])
    ran = stagec("validate")
    assert ran.code == 1
    assert all(str(row["ours"]) in ran.out for row in expected)
    off = [line.split() for line in ran.out.splitlines() if "OFF" in line]
    assert len(off) == 1
    assert "gpt-1.7b" in off[0]
