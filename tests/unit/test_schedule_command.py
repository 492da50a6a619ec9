"""`stagec schedule`: the picture, the figures, the SVG and the JSON."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from stagec.output import tables
from stagec.schedule.costs import Costs
from stagec.schedule.draw import cells, columns_for
from stagec.schedule.registry import SCHEDULES
from stagec.schedule.report import run_schedule
from stagec.schedule.svg import timeline_svg
from tests.support import stagec

SIZES = "--stages", "4", "--microbatches", "8"
SVG = "{http://www.w3.org/2000/svg}"


def as_json(*argv: str) -> Any:
    ran = stagec("schedule", *argv, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


# -- text ------------------------------------------------------------------------------------------


def test_1f1b_is_drawn() -> None:
    ran = stagec("schedule", "1f1b", "--stages", "2", "--microbatches", "3")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        "1f1b: 2 stages, 3 microbatches\n"
        "rank 0 F0= F1= ........B0===== F2= B1===== ....B2=====\n"
        "rank 1 ....F0= B0===== F1= B1===== F2= B2===== ........\n"
        "makespan: 12\n"
        "bubble: 3, 25.0% of the step; closed form (p-1)(F+B) = 3\n"
        "in flight, in microbatches: 2 1; closed form min(m, p-r)\n"
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4, 12])
def test_pictures_fit_and_agree_with_the_closed_forms(name: str, stages: int) -> None:
    ran = stagec("schedule", name, "--stages", str(stages), "--microbatches", "48")
    assert ran.code == 0, ran.err
    rows = [line for line in ran.out.splitlines() if line.startswith("rank")]
    assert len(rows) == stages
    assert max(map(len, rows)) <= 120
    assert "closed form" in ran.out
    assert " only if " not in ran.out


def test_narrow_pictures_cover_the_whole_step() -> None:
    timeline = run_schedule(SCHEDULES["interleaved"], 4, 16, 3).timeline
    for width in (20, 57, 80, 200, 1000):
        columns = columns_for(timeline, width)
        assert columns <= width
        for rank in range(4):
            assert sum(len(c.text) for c in cells(timeline, rank, columns)) == columns


def test_wide_cells_name_their_chunk_and_pairs_both_actions() -> None:
    ran = stagec("schedule", "dualpipe", *SIZES)
    assert "F3&B5====== " in ran.out
    assert "B6.1=== " in ran.out


def test_colours_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminal(stream: Any, width: int = 120) -> Console:
        return Console(file=stream, force_terminal=True, color_system="truecolor", width=80)

    monkeypatch.setattr(tables, "console", terminal)
    out = stagec("schedule", "1f1b", *SIZES).out
    assert "\x1b[30;48;2;156;194;245mF0" in out
    assert "=" not in out.split("makespan")[0]


def test_costs_and_transfers() -> None:
    ran = stagec("schedule", "zb-h1", *SIZES, "--costs", "W=2,B=3,F=1")
    assert "only if W <= F, W <= B-W" in ran.out
    ran = stagec("schedule", "1f1b", *SIZES, "--transfer", "1/2")
    assert "only if transfers take no time" in ran.out
    ran = stagec(
        "schedule", "dualpipe", "--stages", "8", "--microbatches", "20", "--costs", "FB=2.5"
    )
    assert "closed form (p/2-1)(F&B+B-3W) = 9/2" in ran.out


def test_the_list_names_every_schedule_and_its_closed_form() -> None:
    ran = stagec("schedule")
    assert ran.code == 0
    for name, schedule in SCHEDULES.items():
        assert name in ran.out
        assert schedule.formulas.in_flight in ran.out
    listed = as_json()
    assert [row["name"] for row in listed] == list(SCHEDULES)
    assert all(row["bubble"] and row["source"] for row in listed)


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("zb-h2", *SIZES), 1, "did you mean 'zb-h1'?"),
        (("1f1b",), 2, "--stages and --microbatches are required"),
        (("1f1b", "--stages", "4"), 2, "--stages and --microbatches are required"),
        (("1f1b", "--stages", "0", "--microbatches", "1"), 2, "--stages"),
        (("1f1b", *SIZES, "--chunks", "2"), 1, "1 chunk per rank, found 2"),
        (("1f1b", *SIZES, "--costs", "F"), 2, "'F' is not F, B, W or FB with a time"),
        (("1f1b", *SIZES, "--costs", "F=1,F=2"), 2, "F is given twice"),
        (("1f1b", *SIZES, "--costs", "F=-1"), 2, "'F=-1' is not F, B, W or FB"),
        (("1f1b", *SIZES, "--costs", "F=1e9"), 2, "'F=1e9' is not F, B, W or FB"),
        (("1f1b", *SIZES, "--costs", "F=0"), 1, "the cost F is 0"),
        (("1f1b", *SIZES, "--costs", "B=1"), 1, "B includes W"),
        (("1f1b", *SIZES, "--transfer", "x"), 2, "'x' is not a time"),
        (("1f1b", "--stages", "9999", "--microbatches", "9999"), 1, "at most 1,000,000"),
    ],
)
def test_errors_say_what_to_do(argv: tuple[str, ...], code: int, message: str) -> None:
    ran = stagec("schedule", *argv)
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err


# -- SVG and JSON ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_svg_is_xml_with_a_cell_for_every_action(name: str, tmp_path: Path) -> None:
    ran = stagec("schedule", name, *SIZES, "--svg", tmp_path / "s.svg")
    assert ran.code == 0
    root = ElementTree.parse(tmp_path / "s.svg").getroot()
    assert root.tag == f"{SVG}svg"
    title, facts = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert facts is not None
    assert (title.text or "").startswith(f"{name}: 4 stages, 8 microbatches")
    assert "bubble" in (facts.text or "")
    width = float(root.attrib["width"])
    actual = root.findall(f"{SVG}g")
    assert len(actual) == sum(map(len, as_json(name, *SIZES)["ranks"]))
    for cell in actual:
        rect, words = cell.find(f"{SVG}rect"), cell.find(f"{SVG}title")
        assert rect is not None
        assert words is not None
        assert 0 <= float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
        assert "microbatch" in (words.text or "")
    text = (tmp_path / "s.svg").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == 1  # the name space: nothing is loaded


def test_the_svg_alone_on_stdout() -> None:
    ran = stagec("schedule", "gpipe", *SIZES, "--svg", "-")
    assert ElementTree.fromstring(ran.out).tag == f"{SVG}svg"


@pytest.mark.long
def test_the_svg_escapes_names_and_stays_bounded() -> None:
    timeline = run_schedule(SCHEDULES["1f1b"], 2, 4).timeline
    text = timeline_svg(timeline, 'a<b>&"\x00\x1b', ["<script>"])
    assert ElementTree.fromstring(text).findtext(f"{SVG}title") == 'a<b>&"  '
    assert "<script>" not in text
    long = timeline_svg(run_schedule(SCHEDULES["1f1b"], 2, 4000).timeline, "long")
    assert float(ElementTree.fromstring(long).attrib["width"]) < 8200
    fine = Costs(Fraction(1, 10**9 - 1), Fraction(2), Fraction(1))
    tiny = timeline_svg(run_schedule(SCHEDULES["1f1b"], 2, 2, None, fine).timeline, "tiny")
    assert 600 < float(ElementTree.fromstring(tiny).attrib["width"]) < 8200


def test_json_is_exact() -> None:
    actual = as_json("interleaved", *SIZES)
    assert (actual["schedule"], actual["stages"], actual["chunks"]) == ("interleaved", 4, 2)
    assert actual["costs"] == {"F": 1, "B": 2, "W": 1, "FB": 3}
    assert actual["makespan"] == "57/2"
    assert actual["bubble"] == actual["bubble_closed_form"] == "9/2"
    assert actual["in_flight"] == actual["in_flight_closed_form"] == ["11/2", "9/2", "7/2", "5/2"]
    assert actual["ranks"][0][1] == {
        "kind": "F",
        "chunk": 0,
        "microbatch": 1,
        "start": "1/2",
        "end": 1,
        "overlapped": False,
    }
    ends = [Fraction(event["end"]) for row in actual["ranks"] for event in row]
    assert max(ends) == Fraction(actual["makespan"])
