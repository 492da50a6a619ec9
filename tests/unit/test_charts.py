"""Charts and pages are legible: contrast, room for texts, marks inside, and what a browser does
with them."""

from __future__ import annotations

import json
import re
import subprocess
from html import unescape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stagec.output.bars import Bar, Bars
from stagec.output.chart import COLORS, NARROW, WIDE, Chart, style
from stagec.output.heat import Heat, HeatCell
from stagec.output.notebook import NotebookText
from stagec.output.page import TableRow, figures, page, table
from stagec.output.plot import Plot, PlotAxis, PlotPoint, round_step
from stagec.output.tables import console
from stagec.output.tables import table as printed_table
from stagec.output.threads import Thread, Threads
from tests.unit.test_memory_page import BROWSER, BROWSER_FLAGS, ERRORS

_PAIR = re.compile(r"--(\w+): light-dark\((#\w+), (#\w+)\);")
_NUMBER = PlotAxis("a number", lambda v: f"{v:,g}")
_POINTS = [
    PlotPoint(x, y, f"series {n}", f"at {x} of {n}", fits=n != 1, key=f"row{n}")
    for n in range(3)
    for x, y in ((1, 10), (2, 20 * n + 5), (4, 30))
]
_CELLS = {
    ("1", "a"): HeatCell(1.0, "1 s", "the least"),
    ("2", "a"): HeatCell(2.0, "2 s", "too much memory", fits=False),
    ("1", "b"): HeatCell(None, "–", "does not divide"),
}
CHARTS: dict[str, Chart] = {
    "plot": Plot(
        title="A plot", points=_POINTS, x=_NUMBER, y=_NUMBER, front=[(1, 10), (2, 5)],
        bounds=[(3, 3)], bounds_about="bounds", limit=(40, "a limit"),
    ),
    "lines": Plot(title="Lines", points=_POINTS, x=_NUMBER, y=_NUMBER, joined=True, dots=False),
    "bars": Bars(
        title="Bars",
        bars=[Bar("one", {"a": 1.0, "b": 2.0}, key="row0"), Bar("two", {"b": 1.0}, fits=False)],
        axis=_NUMBER,
        limit=(3.5, "a limit"),
    ),
    "heat": Heat(
        title="Heat", across=("x", ["1", "2"]), up=("y", ["a", "b"]), cells=_CELLS, value="time"
    ),
    "threads": Threads(
        title="Threads",
        axes=["flag", "time"],
        threads=[Thread({"flag": n % 2, "time": n}, f"thread {n}", f"row{n}") for n in range(4)],
        scales={"time": "{:g} s".format},
    ),
}  # fmt: skip


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_texts_have_the_contrast_of_wcag(theme: int) -> None:
    """4.5 for texts, those in bars too (success criterion 1.4.3)."""
    text = files("stagec.output").joinpath("colors.css").read_text("utf-8")
    colors = {name: pair[theme] for name, *pair in _PAIR.findall(text)}
    for back in ("back", "card"):
        for ink in ("text", "quiet", "alarm", "link"):
            assert _contrast(colors[ink], colors[back]) >= 4.5, (ink, back)
    for n in range(COLORS):
        assert _contrast(colors[f"i{n}"], colors[f"c{n}"]) >= 4.5, n


def test_a_picture_alone_has_its_colors() -> None:
    """No variables, which programs that draw SVG for papers do not know; those of a page has."""
    assert "var(" not in style(alone=True)
    assert "prefers-color-scheme: dark" in style(alone=True)
    assert "var(--c0)" in style(alone=False)


@pytest.mark.parametrize("name", CHARTS)
@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_all_is_inside(name: str, width: int) -> None:
    parts, height = CHARTS[name].draw(width)
    root = ElementTree.fromstring(f"<svg>{''.join(parts)}</svg>")
    for node in root:
        for x, y in (("x", "y"), ("cx", "cy")):
            if x in node.attrib:
                assert -1 <= float(node.attrib[x]) <= width, ElementTree.tostring(node)
                assert -1 <= float(node.attrib[y]) <= height, ElementTree.tostring(node)
    assert root.findall(".//title")


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_marks_of_an_axis_do_not_overlap(width: int) -> None:
    """Of a hundred texts across those are written that have room."""
    points = [PlotPoint(f"value {n:03}", 1.0, "", "") for n in range(100)]
    chart = Plot(title="", points=points, x=PlotAxis("x", str), y=_NUMBER, joined=True)
    root = ElementTree.fromstring(f"<svg>{''.join(chart.draw(width)[0])}</svg>")
    places = [float(t.attrib["x"]) for t in root.iter("text") if (t.text or "").startswith("value")]
    assert len(places) > 2
    assert all(b - a > 6 * len("value 000") for a, b in pairwise(places))


@pytest.mark.parametrize(
    ("values", "marks"),
    [((512, 16384), ["512", "16384"]), ((9.33254, 62.2569), ["20", "40", "60"])],
)
def test_given_values_are_marked_and_computed_ones_are_not(
    values: tuple[float, ...], marks: list[str]
) -> None:
    points = [PlotPoint(value, 1.0, "", "") for value in values]
    across = PlotAxis("x", "{:g}".format)
    chart = Plot(title="", points=points, x=across, y=_NUMBER, joined=True)
    root = ElementTree.fromstring(f"<svg>{''.join(chart.draw(WIDE)[0])}</svg>")
    middle = [t.text for t in root.iter("text") if t.attrib.get("text-anchor") == "middle"]
    assert middle == [*marks, "x"]


@pytest.mark.parametrize(
    ("about", "units", "step"),
    [(694 * 2**20, 1024, 2**30), (1010 * 2**20, 1024, 2**30), (700e6, 1000, 1e9), (3.0, 1000, 5.0)],
)
def test_marks_are_round_in_their_unit(about: float, units: int, step: float) -> None:
    """Not every 1,000 MiB, which are 0.98 GiB."""
    assert round_step(about, units) == step


def test_bars_are_as_long_as_their_parts() -> None:
    parts, _ = CHARTS["bars"].draw(WIDE)
    root = ElementTree.fromstring(f"<svg>{''.join(parts)}</svg>")
    one_a, one_b, two_b = (float(r.attrib["width"]) + 0.6 for r in root.findall("rect"))
    assert one_b == pytest.approx(2 * one_a, abs=0.2)
    assert two_b == pytest.approx(one_a, abs=0.2)


_PROBE = """<script>
const seen = { problems };
const column = (i) => all("tbody tr:not([hidden])").map((row) => row.cells[i].textContent);
const heads = all("th button");
seen.sorted = column(1);
heads[1].click();
seen.down = column(1);
const [input] = all("input[type=search]");
input.value = "name 5";
input.dispatchEvent(new Event("input"));
seen.searched = column(0);
const [mark] = all("svg.wide [data-key=row2]");
mark.dispatchEvent(new MouseEvent("click", { bubbles: true }));
seen.chosen = all("tr.chosen").map((row) => row.cells[0].textContent);
seen.command = document.querySelector("#opens code").textContent;
seen.link = document.querySelector("#opens a").getAttribute("href");
seen.state = state.toString();
const svg = all("svg.wide")[0];
svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
seen.tip = tip.textContent;
const saved = new XMLSerializer().serializeToString(standalone(svg));
const named = signed(standalone(svg), ["a model", "run it"]);
seen.named = all("text", named).slice(-2).map((text) => text.textContent);
seen.saved = [saved.includes("var("), saved.includes('fill="rgb(0, 114, 178)"')];
document.body.replaceChildren(JSON.stringify(seen));
</script></body>"""


_NOTEBOOK_PROBE = """<script>
const head = document.querySelectorAll("th button")[1], seen = { problems };
const rows = () => [...document.querySelectorAll("tbody tr")];
const column = () => rows().map((row) => row.cells[1].textContent);
head.click();
seen.up = column();
head.click();
seen.down = column();
document.body.replaceChildren(JSON.stringify(seen));
</script></body>"""


def seen_in_a_browser(folder: Path, text: str, address: str = "") -> Any:
    """What the probe of a page notes in a browser, with the errors of the page."""
    probed = folder / "page.html"
    probed.write_text(text.replace("</head>", ERRORS, 1), "utf-8")
    flags = (*BROWSER_FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom")
    command = [str(BROWSER), *flags, f"{probed.as_uri()}{address}"]
    ran = subprocess.run(command, capture_output=True, timeout=120, check=True)
    match = re.search(r"<body>(.*)</body>", ran.stdout.decode(), re.DOTALL)
    assert match is not None
    return json.loads(unescape(match[1]))


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_tables_of_a_notebook_sort_by_their_values(tmp_path: Path) -> None:
    text = NotebookText()
    rows = printed_table("Memory", "class", "peak")
    for size in ("1.50 GiB", "900.00 MiB", "2.00 KiB"):
        rows.add_row("stage", size)
    console(text).print(rows)
    page = f"<!doctype html><html><head></head><body>{text.html()}{_NOTEBOOK_PROBE}</html>"
    up = ["2.00 KiB", "900.00 MiB", "1.50 GiB"]
    assert seen_in_a_browser(tmp_path, page) == {"problems": [], "up": up, "down": up[::-1]}


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_page_in_a_browser(tmp_path: Path) -> None:
    """Its address has an order; heads sort, the search leaves rows, a mark chooses its row and
    shows the command, keys point, and what is saved has its colors."""
    rows = [
        TableRow([f"name {n}", (7 * n) % 10], (), f"row{n}", f"run --html s{n}.html")
        for n in range(10)
    ]
    body = [figures([CHARTS["plot"]]), table(["name", "value"], rows)]
    text = page("A page", body)
    seen = seen_in_a_browser(tmp_path, text.replace("</body>", _PROBE, 1), "#sort.rows=1")
    assert seen["problems"] == []
    assert seen["sorted"] == [str(n) for n in range(10)]
    assert seen["down"] == [str(n) for n in reversed(range(10))]
    assert seen["searched"] == ["name 5"]
    assert seen["chosen"] == ["name 2"]
    assert (seen["command"], seen["link"]) == ("run --html s2.html", "s2.html")
    assert seen["state"] == "sort.rows=1d&rows.rows=name+5&chosen=row2"
    assert seen["tip"].startswith("at 1 of 0")
    assert seen["saved"] == [False, True]
    assert seen["named"] == ["a model", "run it"]


def test_parts_without_a_color_of_their_own_are_one() -> None:
    parts = {f"part {n}": float(n + 1) for n in range(COLORS + 3)}
    text = Bars(title="Bars", bars=[Bar("one", parts)], axis=_NUMBER).svg()
    colors = re.findall(r'<rect class="(f\d+)"', text)
    assert len(colors) == len({*colors}) == COLORS
    assert f"others: {1 + 2 + 3 + 4}, " in text
    assert "part 3" not in text
    own = Bars(title="Bars", bars=[Bar("one", dict(list(parts.items())[3:]))], axis=_NUMBER)
    assert "others" not in own.svg()


def test_a_column_with_a_long_text_wraps_in_each_row() -> None:
    rows = [TableRow(["short", 1]), TableRow(["long " * 20, 2])]
    assert table(("text", "number"), rows).count('<td class="wide">') == len(rows)


def test_long_names_of_bars_and_commands_are_not_cut() -> None:
    names = [
        f"--pp {n} --ep 8 --schedule interleaved --chunks 8 --zero 2 --microbatches 4"
        for n in (1, 2)
    ]
    command = f"stagec search llama3-8b {names[0]} --machine h100-sxm --html search.html --ranks 64"
    bars = [Bar(name, {"a": 1.0}) for name in names]
    chart = Bars(title="Bars", bars=bars, axis=_NUMBER, command=command)
    for text in (chart.svg(), chart.figure()):
        assert "…" not in text
        assert command in " ".join(re.findall(r"<text[^>]*>([^<]*)<", text))
        assert text.count("--schedule interleaved") >= 2


def test_a_legend_of_a_heat_map_says_what_the_map_has() -> None:
    """The best of several rows, and jobs that do not fit, only where there are any."""
    cells = {name: cell for name, cell in _CELLS.items() if cell.fits and cell.value is not None}
    how: dict[str, Any] = {"title": "Heat", "across": ("x", ["1"]), "up": ("y", ["a"])}
    plain = Heat(**how, cells=cells, value="time").svg()
    several = Heat(**how, cells=cells, value="time", several=True).svg()
    unfit = Heat(**how, cells={**cells, ("1", "b"): _CELLS["2", "a"]}, value="time").svg()
    texts = ("smallest over the other axes", "does not fit")
    shown = [[text in chart for text in texts] for chart in (plain, several, unfit)]
    assert shown == [[False, False], [True, False], [False, True]]
