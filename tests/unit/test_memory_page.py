"""The page of `stagec memory --html`: it shows what was planned, loads nothing, and works in a
browser, if there is one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from stagec.analysis.picture import MOST_OPERATIONS
from stagec.answers.memory.memory_page import ALL_COLUMNS, FEWEST, MOST, columns_for
from tests.support import LLAMA, LONG, stagec

SIZES = "L=2,D=64,F=64,V=64,H=4,G=4,K=16,S=64,B=8,theta=100"
JOB = (LLAMA, "--set", SIZES, "--pp", "2")


def drawn(page: Path) -> dict[str, Any]:
    """What the page draws."""
    match = re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert match is not None
    actual: dict[str, Any] = json.loads(match[1])
    return actual


def sums_of(entry: dict[str, Any]) -> list[int]:
    """All bytes of each column, as the page has them."""
    actual = [0] * len(entry["starts"])
    for band in entry["bands"]:
        moves, counts = band["changes"][::2], band["changes"][1::2]
        places = [*accumulate(moves), len(actual)]
        for (place, end), count in zip(pairwise(places), counts, strict=True):
            for i in range(place, end):
                actual[i] += count * band["each"]
    return actual


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job and another one below it, with a limit; beside it the figures as JSON."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    more = ("--json", "-o", file.with_suffix(".json"), "--compare", "--zero 3 --dp 2 --set F=128")
    ran = stagec("memory", *JOB, "--limit", "1GiB", "--html", file, *more)
    assert ran.code == 0, ran.err
    return file


def test_each_job_and_pod_has_its_own_limit(tmp_path: Path) -> None:
    """A device has a communicator for each axis of a mesh, so a job on another mesh has more."""
    file = tmp_path / "page.html"
    whisper = ("whisper-large-v3", "--set", "B=8,L=2,L_dec=2", "--tp", "2", "--dp", "2")
    more = ("--part", "encoder=e: dp=2", "--limit", "h100", "--html", file, "--json")
    ran = stagec("memory", *whisper, *more, "--compare", "--tp 1 --dp 4")
    rooms = [each["fit"]["room"] for each in json.loads(ran.out)["pods"].values()]
    assert rooms[0] < rooms[1]
    limits = [job["limit"] for job in drawn(file)["jobs"]]
    assert limits == [*rooms, rooms[1], rooms[1]]


@LONG
def test_the_page_has_what_was_planned(page: Path) -> None:
    """Of each job; the command line in the page gives the same figures."""
    data = drawn(page)
    assert [job["limit"] for job in data["jobs"]] == [2**30] * 2
    first, second = data["jobs"]
    assert first["title"] == "llama3-8b"
    assert second["title"] == "llama3-8b with --zero 3 --dp 2 --set F=128"
    same_figures(first, json.loads(page.with_suffix(".json").read_text("utf-8")))
    ran = stagec(*second["command"].split()[1:], "--json")
    assert "--zero 3" in second["command"]
    assert "L=2,D=64,F=128" in second["command"]
    assert second["command"].endswith(" --limit 1GiB")
    same_figures(second, json.loads(ran.out))


def same_figures(job: dict[str, Any], result: dict[str, Any]) -> None:
    classes = result["classes"]
    peaks = [entry["peak"] for entry in classes]
    assert [max(sums_of(entry)) for entry in job["classes"]] == peaks
    assert [entry["peak"] for entry in job["classes"]] == peaks
    assert [entry["ranks"] for entry in job["classes"]] == [entry["ranks"] for entry in classes]
    assert peaks[job["shown"]] == max(peaks)
    largest = classes[0]["largest"][0]
    band = next(b for b in job["classes"][0]["bands"] if b["name"] == largest["name"])
    assert (band["type"], band["line"]) == (largest["type"], largest["line"])


def test_the_page_loads_nothing(page: Path) -> None:
    text = page.read_text("utf-8")
    assert not re.search(r"https?:|//[a-z]+\.|src=|href=|@import|url\(", text)
    assert "default-src 'none'" in text
    assert len(text) < 200_000


@LONG
def test_rates_change_times_only(page: Path, tmp_path: Path) -> None:
    """A quarter of the rates of an H100: the same picture in four times the time."""
    file = tmp_path / "page.html"
    rates = ("--peak-tflops", "247.25", "--memory-gbps", "837.5")
    assert stagec("memory", *JOB, "--html", file, *rates).code == 0
    fast, slow = (drawn(f)["jobs"][0]["classes"][1] for f in (page, file))
    assert slow["time"] == pytest.approx(4 * fast["time"], rel=1e-3)
    assert [b["changes"] for b in slow["bands"]] == [b["changes"] for b in fast["bands"]]
    assert "247.25 TFLOP/s and 837.5 GB/s" in file.read_text("utf-8")
    command = drawn(file)["jobs"][0]["command"]
    assert command.endswith(" --peak-tflops 247.25 --memory-gbps 837.5")
    assert drawn(file)["jobs"][0]["time"] == ""
    assert drawn(page)["jobs"][0]["time"].endswith(" --machine h100-sxm --html time.html")


def test_names_of_files_are_text(tmp_path: Path) -> None:
    """A model's file may be called anything."""
    model = tmp_path / "<img onerror=alert(1)>&'\"$title.stg"
    model.write_text(stagec("models", LLAMA).out, "utf-8")
    file = tmp_path / "page.html"
    ran = stagec("memory", model, "--set", SIZES, "--html", file)
    assert ran.code == 0, ran.err
    text = file.read_text("utf-8")
    assert "<img" not in text
    assert "<title>Memory of &lt;img onerror=alert(1)&gt;&amp;" in text
    assert drawn(file)["jobs"][0]["title"] == model.stem


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--compare", "--tp 2"], "--compare needs --html"),
        (["--html", "p.html", "--compare", "--tp x"], "'--tp x': Invalid value for '--tp'"),
        (["--html", "p.html", "--compare", "--limit 3"], "No such option"),
        (["--html", "p.html", "--compare", "'"], "No closing quotation"),
        (["--html", "p.html", "--stage", "2"], "choose 0 to 1"),
    ],
)
def test_wrong_usage(flags: list[str], message: str) -> None:
    ran = stagec("memory", *JOB, *flags)
    assert ran.code == 1
    assert message in ran.err


def test_an_error_of_a_compared_job_says_of_which(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ran = stagec("memory", *JOB, "--html", page, "--compare", "--tp 3")
    assert ran.code == 1
    assert "the next message comes from the job of --compare '--tp 3'" in ran.err
    assert not page.exists()


def test_the_page_is_written_though_nobody_reads_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("stagec.driver.shell.show.write_output", closed)
    page = tmp_path / "page.html"
    assert stagec("memory", *JOB, "--json", "--html", page).code == 141
    assert drawn(page)["jobs"]


def test_one_rate_alone(tmp_path: Path) -> None:
    ran = stagec("memory", *JOB, "--html", tmp_path / "page.html", "--peak-tflops", "1")
    assert ran.code == 1
    assert "need each other" in ran.err


def test_a_page_of_many_classes_has_fewer_columns_of_each() -> None:
    assert [columns_for(n) for n in (1, 8, 64, 1000)] == [MOST, MOST, 375, FEWEST]
    assert 64 * columns_for(64) <= ALL_COLUMNS


def test_far_too_many_layers_are_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ran = stagec("memory", LLAMA, "--set", "L=100000", "--html", page)
    assert ran.code == 1
    assert re.search(rf"would have [0-9,]+ operations, more than {MOST_OPERATIONS:,}", ran.err)
    assert "more pipeline stages" in ran.err
    assert not page.exists()


# -- in a browser ----------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,900",
)
ERRORS = """<script>
const problems = [];
addEventListener("error", (event) => problems.push(event.message));
addEventListener("securitypolicyviolation", (event) => problems.push(event.violatedDirective));
for (const kind of ["error", "warn"]) console[kind] = (...words) => problems.push(words.join(" "));
</script></head>"""
#: Points at the first chart from the bottom up, above its peak; switches; tells what is seen.
_PROBE = """<script>
const seen = { tips: [], problems };
const texts = (what) => all(what).map((node) => node.textContent);
const pick = (node, value) => { node.value = value; node.dispatchEvent(new Event("change")); };
const chart = all("svg.chart")[0], box = chart.getBoundingClientRect();
const x = box.left + Number(chart.querySelector(".peak").getAttribute("cx"));
for (let y = box.bottom; y > box.top; y -= 3) {
  chart.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y }));
  seen.tips.push(document.getElementById("tip").innerText);
}
seen.hit = chart.querySelector(".hit, .cursor") !== null;
seen.peaks = texts(".peak-text");
seen.limits = texts(".limit-text");
seen.labels = texts(".chart text.quiet");
seen.table = texts("tbody td:first-child");
const categories = () => all("path[data-category]").map((node) => node.dataset.category);
seen.before = categories();
all("#controls input[data-category=optimizer]")[0].click();
seen.after = categories();
pick(all("#widths")[0], "column");
seen.columns = texts(".chart text.quiet");
pick(all("#jobs select")[0], "all");
seen.charts = all("svg.chart").length;
document.body.replaceChildren(JSON.stringify(seen));
</script></body>"""


#: Draws the first chart at several widths; lists texts that end outside of it.
_NARROW = """<script>
const seen = { outside: [], problems };
for (let wide = 340; wide <= 1000; wide += 60) {
  document.documentElement.style.width = `${wide}px`;
  redraw();
  const chart = all("svg.chart")[0], box = chart.viewBox.baseVal;
  for (const text of chart.querySelectorAll("text")) {
    const { x, width } = text.getBBox();
    if (x < 0 || x + width > box.width) seen.outside.push(`${wide} px: ${text.textContent}`);
  }
}
document.documentElement.removeAttribute("style");
document.body.replaceChildren(JSON.stringify(seen));
</script></body>"""


def seen_in_browser(page: Path, probe: str, folder: Path, place: str = "") -> dict[str, Any]:
    """What a script at the end of the page leaves as its body; `place` is behind its address."""
    probed = folder / "probed.html"
    text = page.read_text("utf-8")
    probed.write_text(text.replace("</head>", ERRORS, 1).replace("</body>", probe, 1), "utf-8")
    flags = (*BROWSER_FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom")
    ran = subprocess.run(
        [str(BROWSER), *flags, f"{probed.as_uri()}#{place}"],
        capture_output=True,
        timeout=120,
        check=True,
    )
    match = re.search(r"<body>(.*)</body>", ran.stdout.decode(), re.DOTALL)
    assert match is not None
    seen: dict[str, Any] = json.loads(unescape(match[1]))
    assert seen["problems"] == []
    return seen


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_texts_end_inside_of_the_chart(page: Path, tmp_path: Path) -> None:
    """Also on a phone, where the operation at the peak has no room beside it."""
    assert seen_in_browser(page, _NARROW, tmp_path)["outside"] == []


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_the_page_in_a_browser(page: Path, tmp_path: Path) -> None:
    """It opens without a complaint; pointing at a buffer names it, with its size and line."""
    seen = seen_in_browser(page, _PROBE, tmp_path)
    first = drawn(page)["jobs"][0]
    entry = first["classes"][first["shown"]]
    bands = {f"%{b['name']}": b for b in entry["bands"]}
    named = {m[1]: tip for tip in seen["tips"] if (m := re.match(r" ?(%\w+) ", tip))}
    assert len(named) > 5
    for name, tip in named.items():
        assert f"made at {bands[name]['line']}" in tip
        assert re.search(r"[\d.]+ (B|KiB) \([\d,]+ bytes\)", tip)
        assert bands[name]["type"] in tip
    assert seen["hit"]
    assert seen["peaks"][0] == f"peak {entry['peak'] / 2**10:.2f} KiB"
    assert seen["limits"] == ["limit 1.00 GiB, above the axis"] * 2
    assert "memory per rank, KiB" in seen["labels"]
    assert any(label.startswith("time of the computations of a step, ") for label in seen["labels"])
    assert len(seen["table"]) == 24
    assert set(seen["before"]) - set(seen["after"]) == {"optimizer"}
    assert "columns in the order of the step" in seen["columns"]
    assert seen["charts"] == 3


_PLACE = """<script>
document.body.replaceChildren(JSON.stringify({ problems, here: placeHere(), ...more() }));
</script></body>"""
_PINNED = """<script>
const more = () => ({ pinned: charts.map((each) => each.pinned), links: all(".command a").length });
</script>"""
_WINDOW = """<script>
const span = (view.to - view.from) / picture.step;
const more = () => ({ shown: picture.classes[shown].name, span });
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_memory_and_time_open_at_the_place_of_the_other(tmp_path: Path) -> None:
    """A moment is a share of what computes, on both axes; a class has one name."""
    memory, time = tmp_path / "memory.html", tmp_path / "time.html"
    job = (*JOB, "--microbatches", "4")
    assert stagec("memory", *job, "--html", memory).code == 0
    ran = stagec("time", *job, "--machine", "h100-sxm", "--no-levers", "--html", time)
    assert ran.code == 0, ran.err
    nowhere = seen_in_browser(memory, _PINNED + _PLACE, tmp_path)
    assert nowhere["pinned"] == [None]
    assert nowhere["links"] == 1
    for place in ("backward:0.5000", "forward:0.2500"):
        address = f"class=stage1&at={place}"
        there = seen_in_browser(time, _WINDOW + _PLACE, tmp_path, address)
        assert there["shown"] == "stage1"
        assert there["span"] == pytest.approx(1 / 20)
        assert near(there["here"], place)
        back = seen_in_browser(memory, _PINNED + _PLACE, tmp_path, address)
        assert back["pinned"][0] is not None
        assert near(back["here"], place)
    whole = seen_in_browser(time, _WINDOW + _PLACE, tmp_path, "class=stage0")
    assert whole["here"] == {"class": "stage0"}


def near(here: dict[str, str], place: str) -> bool:
    """Whether a page is where another one was, up to the op that runs then."""
    phase, share = place.split(":")
    actual, at = here["at"].split(":")
    return here["class"] == "stage1" and actual == phase and abs(float(at) - float(share)) < 0.05
