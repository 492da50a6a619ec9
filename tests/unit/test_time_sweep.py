"""`stagec time --sweep`: machines and their figures beside flags, fronts and plots."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.answers.sweep.order import unbeaten
from stagec.answers.sweep.rows import time_row
from stagec.api import time_step
from stagec.machines import load_machine
from stagec.time.measured.kernel_tables import read_measured
from stagec.time.measured.tables import Table
from tests.support import LLAMA, examples, stagec

ROOT = Path(__file__).resolve().parents[2]
SCHEMA: dict[str, Any] = json.loads((ROOT / "stagec/answers/sweep.schema.json").read_text())
VALIDATOR: Any = jsonschema.Draft202012Validator(SCHEMA)
SIZES = {"L": 2, "B": 8}
JOB = ("time", LLAMA, "--set", "L=2,B=8", "--ranks", "8", "--jobs", "1")
BANDWIDTH = "machine.memory.bandwidth"


@cache
def swept(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
    ran = stagec(*JOB, *arguments, "--json")
    assert ran.code == code, ran.err
    actual: list[dict[str, Any]] = json.loads(ran.out)
    VALIDATOR.validate(actual)
    return actual


def strategies() -> list[dict[str, Any]]:
    return swept("--machine", "h100-sxm", "--sweep", "tp=1,2,3,4", "--sweep", "zero=0,3")


def test_rows_are_the_times_of_each_alone() -> None:
    actual = swept("--sweep", "tp=2,4", "--sweep", "machine=h100,b200", "--sweep", "overlap=on,off")
    assert len(actual) == 8
    for row in actual:
        tp, machine, overlap = row["configuration"].values()
        alone = time_step(LLAMA, machine, overlap=overlap, tp=tp, ranks=8, sizes=SIZES)
        assert row["time"] == time_row(alone)


def test_measured_files_are_read_once_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def spy(path: Path) -> list[Table]:
        read.append(path)
        return read_measured(path)

    monkeypatch.setattr("stagec.time.measured.kernel_tables.read_measured", spy)
    table = tmp_path / "table.csv"

    def steps(microseconds: int) -> list[float]:
        row = f"all_gather,2x{2 * 8192 * 4096 * 2},{microseconds}"
        table.write_text(f"kind,extents,microseconds\n{row}\n")
        job = (*JOB, "--tp", "2", "--sp", "--machine", "h100-sxm", "--measured", str(table))
        ran = stagec(*job, "--sweep", "overlap=on,off", "--json")
        return [row["time"]["step_seconds"] for row in json.loads(ran.out)]

    fast = steps(10)
    assert len(fast) == 2
    assert read == [table]
    assert all(after > before for before, after in zip(fast, steps(10_000), strict=True))
    assert read == [table] * 2


@pytest.mark.parametrize(("text", "value"), [("2TB/s", "2 TB/s"), ("x2", 2), ("x0.5", 0.5)])
def test_a_figure_is_swept_as_the_machine_is_changed(text: str, value: str | float) -> None:
    (row,) = swept("--machine", "h100-sxm", "--tp", "2", "--sweep", f"{BANDWIDTH}={text}")
    machine, path = load_machine("h100-sxm"), "memory.bandwidth"
    if isinstance(value, str):
        machine = machine.changed({path: value})
    else:
        machine = machine.scaled(path, value)
    alone = time_step(LLAMA, machine, tp=2, ranks=8, sizes=SIZES)
    assert row["time"] == time_row(alone)
    assert row["configuration"] == {BANDWIDTH: text}


def test_a_figure_goes_by_the_machine_that_is_chosen() -> None:
    """In whatever order the two are swept."""
    axes = ["--sweep", f"{BANDWIDTH}=x2"], ["--sweep", "machine=h100,b200"]
    one, other = swept(*axes[0], *axes[1]), swept(*axes[1], *axes[0])
    assert [r["time"] for r in one] == [r["time"] for r in other]
    assert one[0]["time"]["step_seconds"] != one[1]["time"]["step_seconds"]


def test_a_figure_that_one_machine_lacks_is_a_row() -> None:
    figure = "machine.network.nvlink.bandwidth=x2"
    actual = swept("--sweep", "machine=h100,tpu-v5p", "--sweep", figure)
    assert "time" in actual[0]
    assert "has no figure 'network.nvlink.bandwidth'" in actual[1]["error"]


def test_a_file_names_figures_too(tmp_path: Path) -> None:
    text = f'[slow]\n"{BANDWIDTH}" = "x0.5"\ntp = 2\n[fast]\n"{BANDWIDTH}" = "x2"\ntp = 2\n'
    (tmp_path / "two.toml").write_text(text)
    slow, fast = swept("--machine", "h100-sxm", "--sweep", str(tmp_path / "two.toml"))
    assert slow["time"]["step_seconds"] > fast["time"]["step_seconds"]


def test_a_row_without_a_job_has_the_reason() -> None:
    actual = strategies()
    assert [("error" in row) for row in actual] == [False] * 4 + [True] * 2 + [False] * 2


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=12))
@examples(60)
def test_the_front_is_what_no_other_beats(points: list[tuple[int, int, int]]) -> None:
    def beats(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    assert unbeaten(points) == {p for p in points if not any(beats(q, p) for q in points)}


def test_pareto_keeps_the_front() -> None:
    arguments = "--machine", "h100-sxm", "--sweep", "tp=1,2,3,4", "--sweep", "zero=0,3"
    jobs = [row for row in strategies() if "error" not in row]

    def best(*values: Any) -> list[dict[str, Any]]:
        points = [tuple(value(row) for value in values) for row in jobs]
        kept = unbeaten(points)
        return [row for point, row in zip(points, jobs, strict=True) if point in kept]

    def step(row: dict[str, Any]) -> Any:
        return row["time"]["step_seconds"]

    def waste(row: dict[str, Any]) -> Any:
        return -row["time"]["mfu"]

    def memory(row: dict[str, Any]) -> Any:
        return row["peak_bytes"]

    assert swept(*arguments, "--pareto", "time,memory") == best(step, memory)
    assert swept(*arguments, "--pareto", "time") == best(step)
    assert swept(*arguments, "--pareto", "mfu") == best(waste)
    limit = str(sorted(map(memory, jobs))[1])
    fitting = swept(*arguments, "--pareto", "time", "--limit", limit)
    assert [memory(row) <= int(limit) for row in fitting] == [True]


def test_a_front_of_nothing_says_why() -> None:
    """No configuration is a job, or none holds as little as the limit."""
    words = *JOB, "--machine", "h100-sxm", "--pareto", "time", "--sweep"
    none = stagec(*words, "tp=3,5")
    assert (none.code, none.err) == (1, "")
    assert none.out.startswith("2 of 2 configurations failed: ")
    large = stagec(*words, "tp=1,2", "--limit", "1KiB")
    assert (large.code, large.err) == (1, "")
    assert large.out.count(" no") == 2


def test_the_order_goes_up_or_down() -> None:
    arguments = "--machine", "h100-sxm", "--sweep", "tp=1,2,3,4", "--sweep", "zero=0,3"
    up = [row.get("time") for row in swept(*arguments, "--sort", "mfu")]
    down = [row.get("time") for row in swept(*arguments, "--sort=-mfu")]
    assert up[-2:] == down[-2:] == [None, None]
    assert [t and t["mfu"] for t in down[:-2]] == sorted((t["mfu"] for t in up if t), reverse=True)


def test_the_machine_itself_may_be_the_limit() -> None:
    peak = min(row["peak_bytes"] for row in strategies() if "error" not in row)
    actual = swept(
        *("--machine", "tpu-v5p", "--sweep", f"machine.memory.capacity={peak + 1}B,{peak * 99}B"),
        *("--sweep", "tp=1,2,4", "--sweep", "zero=0,3", "--limit", "machine"),
    )
    left = load_machine("tpu-v5p")
    for row in actual:
        size = row["configuration"]["machine.memory.capacity"]
        machine = left.changed({"memory.capacity": size})
        axes = sum(n > 1 for n in row["mesh"].values())
        assert row["fits"] == (row["peak_bytes"] <= machine.left(axes))
    assert {row["fits"] for row in actual} == {True, False}


# -- plots -----------------------------------------------------------------------------------------


def drawn(tmp_path: Path, name: str, *arguments: str) -> str:
    file = tmp_path / name
    wanted = "--machine", "h100-sxm", "--sweep", "tp=1,2,3,4", "--sweep", "zero=0,3"
    assert stagec(*JOB, *wanted, *arguments, "--html", file).code == 0
    return file.read_text()


@pytest.mark.parametrize("columns", [(), ("--plot", "tp,time"), ("--plot", "zero,mfu")])
def test_a_plot_has_a_point_for_every_job(tmp_path: Path, columns: tuple[str, ...]) -> None:
    root = ElementTree.fromstring(drawn(tmp_path, "plot.svg", *columns))
    space = "{http://www.w3.org/2000/svg}"
    expected = [t.text or "" for t in root.iter(f"{space}title")]
    assert len(expected) == len([row for row in strategies() if "error" not in row])
    assert all(t.startswith(("tp 1", "tp 2", "tp 4")) for t in expected)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for circle in root.findall(f"{space}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= width
        assert 0 <= float(circle.attrib["cy"]) <= height


def test_a_page_loads_nothing_and_has_all_rows(tmp_path: Path) -> None:
    text = drawn(tmp_path, "page.html", "--pareto", "time")
    assert not any(word in text for word in ("http:", "https:", "src=", "@import"))
    assert text.count("<tr") == 1 + len(strategies())
    assert "is not a multiple of" in text
    assert "–: failed" in text


@pytest.mark.parametrize("command", ["analyze", "memory"])
def test_the_other_commands_draw_too(tmp_path: Path, command: str) -> None:
    wanted = command, LLAMA, "--set", "L=2", "--sweep", "tp=1,2", "--html", tmp_path / "a.svg"
    assert stagec(*wanted, "--plot", "tp,memory").code == 0
    assert (tmp_path / "a.svg").read_text().count("<title>") == 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--sweep", "tp=1"], "no machine is given"),
        (["--sweep", "tp=1", "--machine", "h100", "--pareto", "tome"], "did you mean 'time'"),
        (["--sweep", "tp=1", "--machine", "h100", "--plot", "time", "--html", "x"], "two columns"),
        (["--sweep", "tp=1", "--machine", "h100", "--plot", "time,tp", "--html", "x"], "is swept"),
        (["--machine", "h100", "--pareto", "time"], "add --sweep"),
        (["--machine", "h100", "--limit", "80GiB"], "add --sweep"),
        (["--sweep", "machine.memory.bandwith=x2", "--machine", "h100"], "memory.bandwidth"),
        (["--sweep", "machine.memory.bandwidth=fast", "--machine", "h100"], "with its unit"),
        (["--sweep", "machine.memory.bandwidth=x0", "--machine", "h100"], "more than zero"),
    ],
)
def test_mistakes_are_reported(more: list[str], expected: str) -> None:
    ran = stagec("time", LLAMA, "--set", "L=2", *more)
    assert (ran.code, expected in ran.err, "\n  help: " in ran.err) == (1, True, True), ran.err


def test_steps_of_serving_are_swept_by_what_they_have() -> None:
    """Each row is the step of its own command."""
    step = ("time", LLAMA, "--set", "L=2", "--serve", "decode", "--machine", "h100", "--json")
    ran = stagec(*step, "--sweep", "batch=2..4", "--sweep", "context=8,64")
    rows = [(r["configuration"], r["time"]["step_seconds"]) for r in json.loads(ran.out)]
    assert len(rows) == 4
    for chosen, seconds in rows:
        own = ("--batch", f"{chosen['batch']}", "--context", f"{chosen['context']}", "--no-levers")
        assert json.loads(stagec(*step, *own).out)["step_seconds"] == seconds


def test_only_times_have_a_machine_to_sweep() -> None:
    ran = stagec("analyze", LLAMA, "--sweep", "machine=h100")
    assert (ran.code, "'machine' is neither a flag nor a symbol" in ran.err) == (2, True)


@pytest.mark.long
def test_levers_and_sweeps_change_what_was_measured_as_models_say(tmp_path: Path) -> None:
    """Of a slow all_gather; a level that nothing crosses helps nobody."""
    table = tmp_path / "table.csv"
    table.write_text(f"kind,extents,microseconds\nall_gather,2x{2 * 8192 * 4096 * 2},50000\n")
    words = ("--set", "L=2,B=2", "--tp", "2", "--sp", "--ranks", "2", "--machine", "h100-sxm")
    job = ("time", LLAMA, *words, "--measured", str(table), "--json")
    actual = json.loads(stagec(*job).out)
    assert actual["found"]["matched"]
    step = {each["name"]: each["step_seconds"] for each in actual["levers"]}
    assert step["2 x infiniband"] == actual["step_seconds"]
    assert actual["step_seconds"] - 0.002 < step["no launch gaps"] < actual["step_seconds"]
    assert step["2 x nvlink"] < 0.8 * actual["step_seconds"]
    figures = {"2 x nvlink": "network.nvlink.bandwidth", "2 x memory bandwidth": "memory.bandwidth"}
    for lever, figure in figures.items():
        ran = stagec(*job, "--sweep", f"machine.{figure}=x1,x2")
        rows = [row["time"]["step_seconds"] for row in json.loads(ran.out)]
        assert rows == [actual["step_seconds"], step[lever]]


def test_ends_of_a_range_in_unlike_units_are_refused() -> None:
    swept = "machine.network.infiniband.bandwidth=25GB/s..400Gb/s"
    done = stagec("time", "llama3-8b", "--machine", "h100-sxm", "--sweep", swept)
    assert (done.code, "both ends of a range the same one" in done.err) == (1, True)
