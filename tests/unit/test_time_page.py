"""The page of `stagec time --html`: it holds when every node runs, loads nothing, and works in a
browser, if there is one."""

from __future__ import annotations

import json
import re
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.analysis import time_picture as pictures
from stagec.analysis.time_picture import time_picture
from stagec.answers.time.timed import Timed, time_job
from stagec.jobs.session import Session
from stagec.machines import load_machine
from stagec.program.nodes import MICROBATCH, marker_of
from stagec.time.clock.intervals import NONE, node_times, title_of
from stagec.time.clock.residency import ResidentBytes
from tests.support import LLAMA, stagec, tiny_options
from tests.unit.test_memory_page import BROWSER, drawn, seen_in_browser

JOB: dict[str, Any] = {
    "pp": 2,
    "dp": 2,
    "tp": 2,
    "zero": 1,
    "microbatches": 4,
    "schedule": "zb-h1",
    "sizes": {"B": 16},
}
#: Tiny sizes are bound by hosts: what devices do is to be seen.
MACHINE = 'base = "h100-sxm"\n[efficiency.host]\nissue = "0 us"\n'
SIZES = "B=16,S=4,L=2,D=8,H=8,G=4,K=2,F=16,V=16,theta=100"
COMMAND = (
    *("time", LLAMA, "--set", SIZES, "--pp", "2", "--dp", "2", "--tp", "2", "--zero", "1"),
    *("--microbatches", "4", "--schedule", "zb-h1"),
)


@pytest.fixture(scope="module")
def timed() -> Timed:
    machine = load_machine("h100-sxm").changed({"efficiency.host.issue": 0.0})
    return time_job(tiny_options(LLAMA, **JOB), machine, Session(), memory=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "page.html"
    machine = file.with_name("devices.toml")
    machine.write_text(MACHINE, "utf-8")
    ran = stagec(
        *COMMAND, "--machine", machine, "--html", file, "--json", "-o", file.with_suffix(".json")
    )
    assert ran.code == 0, ran.err
    return file


Shown = tuple[str, str, int, int, int, int]


def shown(picture: dict[str, Any], each: dict[str, Any]) -> list[tuple[Shown, str]]:
    """The nodes of a class as the page has them: name, op, bytes, FLOPs, start, end; and kind."""
    actual: list[tuple[Shown, str]] = []
    base = 0
    for more, number, numbers in np.reshape(each["pieces"], (-1, 3)).tolist():
        base += more
        at = base
        for node, later, time in np.reshape(picture["entries"][number], (-1, 3)).tolist():
            at += later
            title, op, kind, _, size, flops, _, slot, *_ = picture["nodes"][node]
            if slot >= 0:
                title += f" {picture['microbatches'][numbers][slot]}"
            actual.append(((title, op, size, flops, at, at + time), picture["kinds"][kind]))
    return actual


def test_the_page_has_every_node_of_every_class(timed: Timed, page: Path) -> None:
    picture = drawn(page)["picture"]
    for each, entry in zip(timed.step.classes, picture["classes"], strict=True):
        expected: list[Shown] = []
        for placed, microbatch, _, start, end, _ in node_times(
            timed.issued.programs[each.number], each
        ).rows():
            node = placed.node
            title = title_of(node.name)
            if marker_of(node.name):
                assert microbatch != NONE
                title += f" {microbatch}"
            expected.append((title, node.kind, node.size, node.flops, start, end))
        assert [n for n, kind in shown(picture, entry) if kind != "wait"] == expected
    prototypes = timed.step.classes[0].nodes.prototypes
    assert any(MICROBATCH[0] in placed.node.name for placed in prototypes)


def test_times_add_up_to_the_step(page: Path) -> None:
    """The parts of each class, the critical path, and what the compute stream does and waits for,
    of which nothing overlaps."""
    picture = drawn(page)["picture"]
    step = picture["step"]
    report = json.loads(page.with_suffix(".json").read_text("utf-8"))
    assert step == round(report["step_seconds"] * 10**12)
    assert sum(picture["path"][1::2]) == step
    for each in picture["classes"]:
        parts = {picture["parts"][p]: t for p, t in each["breakdown"]}
        assert sum(parts.values()) == step
        ends = [*accumulate(each["waits"][i] for i in range(len(each["waits"])) if i % 3 < 2)]
        times = list(zip(ends[::2], ends[1::2], strict=True))
        computes = {"forward", "backward", "weights", "recompute", "gradient", "optimizer", "wait"}
        times += [(n[4], n[5]) for n, kind in shown(picture, each) if kind in computes]
        blocking = [
            (n[4], n[5])
            for n, kind in shown(picture, each)
            if kind == "collective" and _on_compute(picture, n)
        ]
        busy = sorted([*times, *blocking])
        assert all(a[1] <= b[0] for a, b in pairwise(busy))
        assert step - sum(end - start for start, end in busy) == parts["bubble"]


def _on_compute(picture: dict[str, Any], node: Shown) -> bool:
    title = node[0].rsplit(" ", 1)[0]
    return any(row[0] in (title, node[0]) and 0 in row[8:] for row in picture["nodes"])


def test_weights_are_distinguished(page: Path) -> None:
    """Zero-bubble schedules have actions for the gradients of weights alone."""
    picture = drawn(page)["picture"]
    kinds = {kind for each in picture["classes"] for _, kind in shown(picture, each)}
    assert {"forward", "backward", "weights", "optimizer", "collective", "message"} <= kinds


def test_memory_has_the_planned_peak(timed: Timed, page: Path) -> None:
    classes = drawn(page)["picture"]["classes"]
    assert timed.plans is not None
    for each, entry in zip(timed.issued.classes, classes, strict=True):
        events = timed.plans.annotate(each, each.program()).events
        assert events is not None
        assert entry["memory"]["peak"] == events.peak
        steps: list[int] = entry["memory"]["bytes"]
        assert max(accumulate(steps)) == events.peak


def test_the_line_of_memory_is_that_of_the_verdict(page: Path) -> None:
    """A peak above what a job may use is above the line, although it is below the capacity."""
    report = json.loads(page.with_suffix(".json").read_text("utf-8"))
    (room,) = set(drawn(page)["rooms"])
    assert room == report["fit"]["room"] < load_machine("h100").memory.capacity.value


def test_a_thinned_curve_keeps_its_highest_moments() -> None:
    rng = np.random.default_rng(1)
    time = np.sort(rng.choice(10_000, 700, replace=False)).astype(np.int64)
    curve = ResidentBytes(time, rng.integers(1, 1000, 700))
    actual = pictures.thinned(curve, 10_000, 50)
    assert len(actual.time) <= 50
    assert actual.bytes.max() == curve.bytes.max()
    assert (np.diff(actual.time) > 0).all()
    for i, start in enumerate(actual.time.tolist()):
        end = actual.time[i + 1] if i + 1 < len(actual.time) else 10_000
        inside = curve.bytes[(curve.time >= start) & (curve.time < end)]
        assert inside.size == 0 or actual.bytes[i] >= inside.max()
    assert pictures.thinned(curve, 10_000, 700) is curve


def test_big_jobs_are_bounded(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then computations of classes that wait most are reported by kind, and their memory is left
    out."""
    monkeypatch.setattr(pictures, "MOST_NODES", 10)
    monkeypatch.setattr(pictures, "MOST_PLANNED", 10)
    full, picture = shown_times(timed), time_picture(timed.issued, timed.step, timed.plans)
    (coarse,) = picture["coarse"]
    assert [each["memory"] is None for each in picture["classes"]].count(True) == 1
    assert picture["classes"][coarse]["memory"] is None
    message = [(n, k) for n, k in shown(picture, picture["classes"][coarse]) if k != "wait"]
    assert {n[1] for n, _ in message} == {"several"}
    assert len(message) < full[coarse][0]
    assert sum(n[3] for n, _ in message) == full[coarse][1]


def shown_times(timed: Timed) -> list[tuple[int, int]]:
    """Of each class, how many nodes there are, and their FLOPs."""
    actual: list[tuple[int, int]] = []
    for each, program in zip(timed.step.classes, timed.issued.programs, strict=True):
        rows = list(node_times(program, each).rows())
        actual.append((len(rows), sum(row.placed.node.flops for row in rows)))
    return actual


def test_the_page_loads_nothing(page: Path) -> None:
    text = page.read_text("utf-8")
    assert not re.search(r"https?:|//[a-z]+\.|src=|href=|@import|url\(|\beval\b", text)
    assert "default-src 'none'" in text
    assert len(text) < 200_000


def test_the_command_names_a_machine_as_it_was_given(page: Path) -> None:
    machine = page.with_name("devices.toml")
    assert f"--machine {machine}</code>" in page.read_text("utf-8")


def test_names_are_text(tmp_path: Path) -> None:
    """A model's file may be called anything."""
    model = tmp_path / "<img onerror=alert(1)>&'\"$title.stg"
    model.write_text(stagec("models", LLAMA).out, "utf-8")
    file = tmp_path / "page.html"
    ran = stagec("time", model, "--set", SIZES, "--machine", "h100", "--no-levers", "--html", file)
    assert ran.code == 0, ran.err
    text = file.read_text("utf-8")
    assert "<img" not in text
    assert "<title>&lt;img onerror=alert(1)&gt;&amp;" in text
    assert "What would help was not timed" in text


# -- in a browser ----------------------------------------------------------------------------------

#: Points along the rows of the schedule, of the streams and of the memory; zooms; tells what is
#: seen.
_PROBE = """<script>
const seen = { schedule: [], streams: [], memory: [], problems };
const at = (canvas, x, y) => {
  const box = canvas.getBoundingClientRect();
  const where = { clientX: box.left + x, clientY: box.top + y };
  canvas.dispatchEvent(new PointerEvent("pointermove", where));
  return tip.hidden ? "" : tip.innerText;
};
const painted = (canvas) => {
  const pen = canvas.getContext("2d"), { width, height } = canvas;
  return new Set(new Uint32Array(pen.getImageData(0, 0, width, height).data.buffer)).size;
};
drawAll();
const canvases = [...document.querySelectorAll("canvas")];
seen.colors = canvases.map(painted);
for (let x = 150; x < 950; x += 2) {
  seen.schedule.push(at(canvases[0], x, 10), at(canvases[0], x, 40));
  for (let y = 10; y < canvases[1].clientHeight - 26; y += 24) {
    seen.streams.push(at(canvases[1], x, y));
  }
  seen.memory.push(at(canvases[2], x, 100));
}
seen.window = document.getElementById("window").textContent;
const paper = panels[0].drawn();
seen.saved = all("rect", paper).length;
seen.numbers = all("text", paper).map((text) => text.textContent);
search("einsum");
seen.found = document.getElementById("count").textContent;
goTo(1);
drawAll();
seen.went = document.getElementById("window").textContent;
search("");
look(0, picture.step);
drawAll();
document.getElementById("in").click();
drawAll();
seen.zoomed = document.getElementById("window").textContent;
seen.facts = [...document.querySelectorAll(".facts dd")].map((node) => node.textContent);
seen.before = document.querySelector("#parts th").textContent;
document.getElementById("class").value = "0";
document.getElementById("class").dispatchEvent(new Event("change"));
drawAll();
seen.after = document.querySelector("#parts th").textContent;
const bars = ([figure]) => all("svg.wide rect", figure);
seen.bars = {};
for (const bar of bars(all("figure:has(svg)"))) {
  const { key } = bar.dataset;
  seen.bars[key] = (seen.bars[key] || 0) + Number(bar.getAttribute("width"));
}
seen.levers = bars(all("figure:has(svg)").slice(1)).length;
seen.path = all("table[data-name=path] tr").length;
document.body.replaceChildren(JSON.stringify(seen));
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_the_page_in_a_browser(page: Path, tmp_path: Path) -> None:
    """It opens without a complaint; pointing at a node says what it is, where, when and of what
    size."""
    seen = seen_in_browser(page, _PROBE, tmp_path)
    assert all(count > 3 for count in seen["colors"])
    tips = [tip for tip in seen["schedule"] if "\ntakes " in tip]
    assert len(tips) > 100
    for tip in tips:
        assert re.search(r"stage[01]: rank [04] and 3 alike", tip)
        assert re.search(r"takes [\d.]+ (ps|ns|us|ms), from [\d.]+ (ps|ns|us|ms)", tip)
        assert re.search(r"[\d.]+ (B|KiB) \(", tip)
        assert re.search(r"counts as [a-z]", tip)
    assert any("einsum" in tip and "microbatch " in tip and "layer " in tip for tip in tips)
    assert any("matmul bf16" in tip for tip in tips)
    assert any("all_reduce" in tip for tip in seen["streams"])
    assert any("idle" in tip for tip in seen["schedule"])
    memory = [tip for tip in seen["memory"] if tip]
    assert len(memory) > 300
    assert all(re.search(r"[\d.]+ (B|KiB)\n[\d,]+ bytes", tip) for tip in memory)
    assert seen["window"].startswith("the whole step")
    assert seen["saved"] > 100
    assert {"stage0", "stage1", "time", "0", "3"} <= set(seen["numbers"])
    assert re.match(r"[\d,]+ in stage[01], [\d.]+ (ns|us|ms)", seen["found"])
    assert " to " in seen["went"]
    assert " to " in seen["zoomed"]
    report = json.loads(page.with_suffix(".json").read_text("utf-8"))
    assert f"{report['mfu']:.1%}" in seen["facts"]
    assert seen["before"] == report["slowest"]
    assert seen["after"] == "stage0"
    idle = [entry["breakdown"].get("bubble", 0.0) for entry in report["classes"]]
    busy = [report["step_seconds"] - time for time in idle]
    bars = list(seen["bars"].values())
    shares = [time / busy[0] for time in busy]
    assert [bar / bars[0] for bar in bars] == pytest.approx(shares, abs=0.02)
    assert seen["levers"] == 1 + len(report["levers"])
    assert seen["path"] > 3


def test_the_plot_of_a_step_is_the_bars_of_its_page(tmp_path: Path) -> None:
    plot, page = tmp_path / "step.svg", tmp_path / "step.html"
    job = ("time", "llama3-8b", "--set", "L=1", "--machine", "h100", "--no-levers", "--html")
    for file in (plot, page):
        assert stagec(*job, file).code == 0
    bars = re.findall(r"<title>(.*?)</title></rect>", plot.read_text("utf-8"), re.S)
    assert any("matrix products: " in bar for bar in bars)
    assert all(bar in page.read_text("utf-8") for bar in bars)
