"""`--sweep`: each row is what the command says of that configuration alone."""

from __future__ import annotations

import csv
import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stagec.answers.sweep import rows as sweep_rows
from stagec.answers.sweep import run as sweep
from stagec.answers.sweep.rows import Case
from stagec.driver.cli import main
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.memory.buffers import CATEGORIES
from stagec.memory.timeline import STATIC
from stagec.support.diagnostics import error
from tests.support import LLAMA, LONG, MIXTRAL, stagec

ROOT = Path(__file__).resolve().parents[2]
SCHEMA: dict[str, Any] = json.loads((ROOT / "stagec/answers/sweep.schema.json").read_text())
VALIDATOR: Any = jsonschema.Draft202012Validator(SCHEMA)
BASE = ["analyze", LLAMA, "--set", "L=4,B=32", "--pp", "2", "--sp"]
SWEPT = ["--sweep", "tp=1,2,3", "--sweep", "S=1024,2048"]
FLAGS = [
    (["--tp", tp, "--set", f"S={s}"], {"tp": int(tp), "S": s}) for tp in "123" for s in (1024, 2048)
]


def rows(*arguments: str | Path, code: int = 0) -> list[dict[str, Any]]:
    ran = stagec(*arguments, "--json")
    assert ran.code == code, ran.err
    assert not ran.err, "what is reported of a configuration is in its row"
    actual: list[dict[str, Any]] = json.loads(ran.out)
    VALIDATOR.validate(actual)
    return actual


@cache
def swept() -> list[dict[str, Any]]:
    return rows(*BASE, *SWEPT)


@pytest.mark.long
def test_rows_are_what_is_said_of_each_configuration_alone() -> None:
    actual = swept()
    assert [row["configuration"] for row in actual] == [chosen for _, chosen in FLAGS]
    for row, (flags, _) in zip(actual, FLAGS, strict=True):
        alone = stagec(*BASE, *flags, "--json")
        if alone.code:
            assert alone.err.splitlines()[0].endswith(f"error: {row['error']}")
            assert f"\n  help: {row['remedy']}\n" in alone.err
            continue
        whole = json.loads(alone.out)
        assert {n: row[n] for n in ("model", "ranks", "mesh", "parameters")} == {
            n: whole[n] for n in ("model", "ranks", "mesh", "parameters")
        }
        assert row["flops"] == max(sum(c["flops"].values()) for c in whole["classes"])
        assert row["peak_bytes"] == max(c["memory"]["peak"] for c in whole["classes"])
        worst = max((c["memory"] for c in whole["classes"]), key=lambda m: m["peak"])
        assert sum(row["memory"].values()) == row["peak_bytes"]
        for name in ("parameters", "gradients", "optimizer"):
            assert row["memory"][name] == worst[name]
        assert row["sent_bytes"] == max(
            sum(r["wire_bytes"] for r in c["collectives"])
            + sum(r["bytes"] for r in c["p2p"] if r["dir"] == "send")
            for c in whole["classes"]
        )
        assert len(row["warnings"]) == alone.err.count("warning: ") + alone.err.count("remark: ")
        assert all(text in alone.err for text in row["warnings"])
    assert {"error" in row for row in actual} == {True, False}
    assert any(row.get("warnings") for row in actual)


@LONG
def test_the_number_of_processes_changes_nothing() -> None:
    assert rows(*BASE, *SWEPT, "--jobs", "1") == swept()


def test_memory_has_the_same_rows() -> None:
    actual = rows("memory", *BASE[1:], "--sweep", "tp=1,2", "--set", "S=1024")
    assert actual == [
        {**row, "configuration": {"tp": row["configuration"]["tp"]}} for row in swept()[:4:2]
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("swept", "expected"),
    [
        ("sp=on,off", [True, False]),
        ("capacity-factor=1,5/4", ["1", "5/4"]),
        ("recompute=none,full", ["none", "full"]),
        ("stage-layers=2*2", ["2*2"]),
    ],
)
def test_any_flag_can_be_swept(swept: str, expected: list[object]) -> None:
    actual = rows("analyze", MIXTRAL, "--set", "L=4", "--tp", "2", "--pp", "2", "--sweep", swept)
    assert [v for row in actual for v in row["configuration"].values()] == expected
    assert not any("error" in row for row in actual)


@pytest.mark.parametrize(
    ("swept", "expected"),
    [
        ("tp=1..5", [1, 2, 4]),
        ("tp=4,1..4", [4, 1, 2]),
        ("L=2..8", [2, 4, 8]),
        ("machine.memory.bandwidth=x0.5..x2", ["x0.5", "x1", "x2"]),
        ("machine.memory.bandwidth=0.5TB/s..2 TB/s", ["0.5TB/s", "1TB/s", "2TB/s"]),
        ("machine.network.infiniband.bandwidth=200Gb/s..400Gb/s", ["200Gb/s", "400Gb/s"]),
    ],
)
def test_a_range_doubles(swept: str, expected: list[object]) -> None:
    actual = rows("time", LLAMA, "--set", "L=2", "--machine", "h100-sxm", "--sweep", swept)
    assert [v for row in actual for v in row["configuration"].values()] == expected
    assert not any("error" in row for row in actual)


@pytest.mark.parametrize("asked", [("--sort", "-low"), ("--pareto", "time,high")])
def test_a_column_without_values_is_a_warning(asked: tuple[str, str]) -> None:
    """Without a stack there are no intervals to sort by."""
    job = ("time", LLAMA, "--set", "L=2", "--machine", "h100-sxm", "--sweep", "tp=1,2", *asked)
    name = asked[1].rpartition(",")[2].removeprefix("-")
    ran = stagec(*job)
    assert (ran.code, f"{asked[0]} {name} has no effect" in ran.err) == (0, True)
    assert "has no effect" not in stagec(*job, "--stack", "torchtitan").err


def test_stacks_are_swept() -> None:
    """Each row is the job of that stack; an unknown one fails alone."""
    job = ("memory", LLAMA, "--set", "L=2")
    stacks = ["torchtitan", "ideal"]
    actual = rows(*job, "--stack", "nemo", "--sweep", f"stack={','.join(stacks)},torchtitn")
    for stack, row in zip(stacks, actual, strict=False):
        (alone,) = rows(*job, "--stack", stack, "--sweep", "tp=1")
        assert row["peak_bytes"] == alone["peak_bytes"], stack
    assert "no stack 'torchtitn'" in actual[-1]["error"]


@pytest.mark.parametrize("value", ["tp=0..4", "tp=8..4", "S=1..x4", "S=1GB..4GB"])
def test_what_is_no_range(value: str) -> None:
    ran = stagec(*BASE, "--sweep", value)
    assert (ran.code, ran.out) == (2, "")
    assert "Error: Invalid value for" in ran.err


_JOBS = (
    (),
    ("--zero", "3", "--dp", "2", "--tp", "2"),
    ("--pp", "2", "--microbatches", "4", "--zero", "1", "--dp", "2"),
    ("--pp", "2", "--microbatches", "4", "--schedule", "interleaved", "--chunks", "2"),
    ("--pp", "2", "--microbatches", "4", "--schedule", "zb-h1", "--recompute", "full"),
    ("--pp", "2", "--microbatches", "4", "--schedule", "dualpipev"),
    ("--offload", "activations", "--recompute", "selective"),
    ("--lora", "wq,wv", "--dp", "2"),
    ("--serve", "prefill", "--prompt", "512", "--tp", "2"),
    ("--serve", "decode", "--context", "512"),
)


@pytest.mark.parametrize("flags", _JOBS, ids=" ".join)
def test_memory_has_the_categories_of_the_fullest_rank(flags: tuple[str, ...]) -> None:
    job = LLAMA, "--set", "L=8", *flags
    for row in rows("analyze", *job, "--sweep", "V=32000,256000"):
        sizes = "--set", f"V={row['configuration']['V']}"
        classes = json.loads(stagec("memory", *job, *sizes, "--json").out)["classes"]
        fullest = max(classes, key=lambda each: each["peak"])
        assert row["memory"] == fullest["categories"]
        assert list(row["memory"]) == list(fullest["categories"])
        assert sum(row["memory"].values()) == row["peak_bytes"] == fullest["peak"]


def test_a_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.stg").write_text((ROOT / "docs/examples/layer.stg").read_text())
    monkeypatch.chdir(tmp_path)
    assert [row["model"] for row in rows("analyze", "mine.stg", "--sweep", "tp=2")] == ["mine"]


def test_what_is_no_job_anywhere_fails() -> None:
    assert [r["error"] for r in rows("analyze", LLAMA, "--sweep", "tp=3", code=1)]


# -- how rows are shown: of jobs that cost nothing to compile --------------------------------------


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on tp ranks holds 64 GiB in tp parts; three ranks are none."""

    def summaries(case: Case, session: Session) -> dict[str, Any]:
        options = case.options
        if options.tp % 3 == 0:
            raise error(f"H = 8 does not divide over tp = {options.tp}", remedy="choose --tp")
        kept = dict.fromkeys((*STATIC, *CATEGORIES), 0) | {"parameters": 2**36 // options.tp}
        row = {
            "model": "m",
            "ranks": options.tp,
            "mesh": {"tp": options.tp} if options.tp > 1 else {},
            "parameters": 8,
            "flops": 1000,
            "sent_bytes": 10 * options.tp,
            "peak_bytes": kept["parameters"],
            "host_bytes": 0,
            "memory": kept,
        }
        return {"": row}

    monkeypatch.setattr(sweep_rows, "_summaries", summaries)


CHEAP = ("analyze", LLAMA, "--jobs", "1")
on_cheap_jobs = pytest.mark.usefixtures("cheap")


@on_cheap_jobs
def test_the_result_goes_to_a_file(tmp_path: Path) -> None:
    wanted = *CHEAP, "--sweep", "tp=1,2"
    assert stagec(*wanted, "--json", "-o", tmp_path / "rows.json").out == ""
    assert json.loads((tmp_path / "rows.json").read_text()) == rows(*wanted)


@on_cheap_jobs
def test_the_table_has_jobs_and_one_line_for_all_that_do_not_divide() -> None:
    out = stagec(*CHEAP, "--sweep", "tp=1,3,2,6", "--sweep", "sp=on,off").out
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert [line[:2] for line in lines[3:7]] == [
        ["1", "on"],
        ["1", "off"],
        ["2", "on"],
        ["2", "off"],
    ]
    (message,) = (line for line in out.splitlines() if "divide" in line)
    assert message == (
        "4 of 8 configurations failed: H = 8 does not divide over tp = 3 (2); "
        "H = 8 does not divide over tp = 6 (2)"
    )


@on_cheap_jobs
def test_many_reasons_are_counted() -> None:
    out = stagec(*CHEAP, "--sweep", "tp=3,6,9,12,15").out
    assert out.startswith("5 of 5 configurations failed: ")
    assert out.endswith("; and for other reasons, which --json has (2)\n")


@on_cheap_jobs
@pytest.mark.parametrize(
    ("limit", "fits"), [("64GiB", [True, True]), ("32G", [False, True]), ("h100", [True, True])]
)
def test_a_limit_says_what_fits(limit: str, fits: list[bool]) -> None:
    wanted = *CHEAP, "--sweep", "tp=1,3,2", "--limit", limit
    actual = json.loads(stagec(*wanted, "--json").out)
    VALIDATOR.validate(actual)
    assert [row.get("fits") for row in actual] == [fits[0], None, fits[1]]
    table = stagec(*wanted).out
    words = {True: "yes", False: "no"}
    assert [line.split()[-1] for line in table.splitlines()[4:6]] == [words[f] for f in fits]


@on_cheap_jobs
def test_where_nothing_fits() -> None:
    assert stagec(*CHEAP, "--sweep", "tp=1,2", "--limit", "1GiB").code == 1


@on_cheap_jobs
@pytest.mark.parametrize(
    ("key", "expected"),
    [("tp", [1, 2, 4, 3]), ("peak", [4, 2, 1, 3]), ("sent", [1, 2, 4, 3]), ("fits", [2, 4, 1, 3])],
)
def test_rows_are_sorted(key: str, expected: list[int]) -> None:
    limit = () if key == "tp" else ("--limit", "32GiB")
    wanted = *CHEAP, "--sweep", "tp=3,1,2,4", *limit, "--sort", key
    actual = json.loads(stagec(*wanted, "--json").out)
    assert [row["configuration"]["tp"] for row in actual] == expected


@on_cheap_jobs
@pytest.mark.parametrize("key", ["peek", "fits"])
def test_what_rows_cannot_be_sorted_by(key: str) -> None:
    ran = stagec(*CHEAP, "--sweep", "tp=1,2", "--sort", key)
    assert (ran.code, ran.out) == (1, "")
    assert f"--sort: the table has no column '{key}'" in ran.err


@on_cheap_jobs
def test_values_separated_by_commas() -> None:
    """Every number of every row, as a reader of CSV sees it."""
    wanted = *CHEAP, "--sweep", "tp=3,1,2", "--sweep", "sp=on", "--limit", "32GiB"
    actual = json.loads(stagec(*wanted, "--json").out)
    lines = list(csv.DictReader(io.StringIO(stagec(*wanted, "--csv").out)))
    assert [(line["tp"], line["sp"]) for line in lines] == [("3", "on"), ("1", "on"), ("2", "on")]
    for line, row in zip(lines, actual, strict=True):
        if "error" in row:
            assert (line["error"], line["peak_bytes"]) == (row["error"], "")
            continue
        for name in ("ranks", "parameters", "flops", "sent_bytes", "peak_bytes", "host_bytes"):
            assert line[name] == str(row[name])
        assert {n: int(line[f"{n.replace(' ', '_')}_bytes"]) for n in row["memory"]} == row[
            "memory"
        ]
        assert line["fits"] == ("yes" if row["fits"] else "no")


# -- named configurations --------------------------------------------------------------------------

CONFIGURATIONS = """
# two ways to split it
[whole]
tp = 1
sp = false

["split over tp"]
tp = 2
S = 1024
stage-layers = [2, 2]
"""


@on_cheap_jobs
def test_points_of_named_configurations_are_one_line(tmp_path: Path) -> None:
    """Over the ranks; where two have as many each is a series of its name."""
    (tmp_path / "two.toml").write_text(CONFIGURATIONS)
    for more, named in ((), False), (("--sweep", "dp=1,2"), True):
        plot = ("--sweep", tmp_path / "two.toml", *more, "--plot", "ranks,peak")
        assert stagec(*CHEAP, *plot, "--html", tmp_path / "plot.svg").code == 0
        drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
        legend = re.findall(r"<text[^>]*>([^<]*split over tp[^<]*)<", drawn)
        assert legend == (["split over tp dp 1", "split over tp dp 2"] if named else [])


@on_cheap_jobs
def test_configurations_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sets what its flags would set, beside products."""
    seen: list[JobOptions] = []
    summary = sweep_rows._summaries  # pyright: ignore[reportPrivateUsage]

    def spy(case: Case, session: Session) -> Any:
        seen.append(case.options)
        return summary(case, session)

    monkeypatch.setattr(sweep_rows, "_summaries", spy)
    (tmp_path / "two.toml").write_text(CONFIGURATIONS)
    actual = rows(*CHEAP, "--sweep", tmp_path / "two.toml", "--sweep", "zero=1,2")
    assert [tuple(row["configuration"].values()) for row in actual] == [
        ("whole", 1),
        ("whole", 2),
        ("split over tp", 1),
        ("split over tp", 2),
    ]
    assert [(o.tp, o.sp, o.zero, o.sizes, o.stage_layers) for o in seen[1:3]] == [
        (1, False, 2, {}, ()),
        (2, False, 1, {"S": 1024}, (2, 2)),
    ]
    assert stagec(*CHEAP, "--sweep", tmp_path / "two.toml", "--sort", "name").code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\ntpp = 1", ":2:1: error: 'tpp' is neither a flag nor a symbol; did you mean 'tp'?"),
        ("[b]\ntp = 1\n[a]\n  tp = 'x'", ":4:3: error: 'x' is not a valid integer"),
        ("[a]\nS = 0", ":2:1: error: S expects a positive integer"),
        ("[a]\nsp = 1.5", ":2:1: error: '1.5' is not a valid boolean"),
        ("tp = 1", ":1:1: error: expected a table of flags, found 1"),
        ("", " has no configurations"),
        ("[a", ":1:3: error: not TOML: "),
        ("[a]\nx = " + "[" * 3000, ":1:1: error: not TOML: nested too deep"),
        (".".join("a" * 5000) + " = 1", ":1:1: error: not TOML: nested too deep"),
    ],
)
def test_what_is_no_configuration(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    ran = stagec("analyze", LLAMA, "--sweep", path)
    assert (ran.code, ran.out) == (1, "")
    assert f"{path}{message}" in ran.err
    assert "\n  help: " in ran.err


def test_a_flag_is_set_once(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[a]\nstage-layers = [4]")
    ran = stagec("analyze", LLAMA, "--sweep", path, "--sweep", "stage_layers=4")
    assert (ran.code, "--sweep stage-layers is given twice" in ran.err) == (1, True)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("tp=", "'tp=' lacks a value after '=' or ',', expected tp=VALUE,..."),
        ("tp=1,,2", "'tp=1,,2' lacks a value"),
        ("tp", "'tp' is neither NAME=VALUE,... nor a .toml file"),
    ],
)
def test_a_sweep_without_values_is_a_mistake_in_the_command(sweep: str, message: str) -> None:
    ran = stagec("analyze", LLAMA, "--sweep", sweep)
    assert (ran.code, message in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sweep", "tp=1", "--sweep", "tp=2"], "--sweep tp is given twice"),
        (["--sweep", "tp=1", "--symbolic"], "leave out --symbolic"),
        (["--sweep", "tp=1", "--print-after", "all"], "leave out --print-after"),
        (["--sweep", "tp=1", "--json", "--csv"], "choose one of them"),
        (["--jobs", "2"], "add --sweep"),
        (["--sort", "peak"], "add --sweep"),
        (
            ["--limit", "80GiB"],
            "--limit for one job without --serve is an option of 'stagec memory'",
        ),
        (["--scheduler", "tcp://127.0.0.1:1"], "add --sweep"),
        (["--sweep", "tp=1", "--scheduler", "nonsense"], "cannot reach a Dask"),
    ],
)
def test_what_does_not_go_together(more: list[str], message: str) -> None:
    ran = stagec(*BASE, *more)
    assert (ran.code, message in ran.err, "\n  help: " in ran.err) == (1, True, True), ran.err


@pytest.mark.parametrize("more", [["--fit", "caching"], ["--stage", "0"], ["--snapshot", "x"]])
def test_what_is_about_one_job(more: list[str]) -> None:
    ran = stagec("memory", *BASE[1:], "--sweep", "tp=1", *more)
    assert (ran.code, f"{more[0]} is an option of one job" in ran.err) == (1, True)


@pytest.mark.parametrize("value", ["tp", "tp=", "tp=1,,2", "=1", "tq=1", "tp=x", "S=0", "jobs=1"])
def test_what_cannot_be_swept(value: str) -> None:
    ran = stagec(*BASE, "--sweep", value)
    assert (ran.code, ran.out) == (2, "")
    assert "Error: Invalid value for" in ran.err


def test_a_model_is_not_read_many_times() -> None:
    assert "give a file" in stagec("analyze", "-", "--sweep", "tp=1").err


def test_too_much_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_MOST_ROWS", 3)
    assert (
        "4 configurations, expected at most 3"
        in stagec(*BASE, "--sweep", "tp=1,2", "--sweep", "dp=1,2").err
    )


def test_a_bug_is_reported_as_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken(_case: Case) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sweep_rows, "_summaries", broken)
    assert main([*BASE, "--sweep", "tp=1,2", "--jobs", "2"]) == 70
    assert "bug in stagec" in capsys.readouterr().err
