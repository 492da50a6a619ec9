"""`stagec analyze --sweep`: each row is what the command says of that configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stagec.driver import sweep
from stagec.driver.cli import main
from stagec.driver.options import JobOptions
from tests.support import LLAMA, MIXTRAL, stagec

ROOT = Path(__file__).resolve().parents[2]
SCHEMA: dict[str, Any] = json.loads((ROOT / "stagec/driver/sweep.schema.json").read_text())
BASE = ["analyze", LLAMA, "--set", "L=4,B=32", "--pp", "2", "--sp"]
SWEPT = ["--sweep", "tp=1,2,3", "--sweep", "S=1024,2048"]
FLAGS = [
    (["--tp", tp, "--set", f"S={s}"], {"tp": int(tp), "S": s}) for tp in "123" for s in (1024, 2048)
]


def rows(*arguments: str | Path, code: int = 0) -> list[dict[str, Any]]:
    ran = stagec(*arguments, "--json")
    assert ran.code == code, ran.err
    assert not ran.err, "what is told of a configuration is in its row"
    found: list[dict[str, Any]] = json.loads(ran.out)
    validator: Any = jsonschema.Draft202012Validator(SCHEMA)
    validator.validate(found)
    return found


def test_rows_are_what_is_said_of_each_configuration_alone() -> None:
    found = rows(*BASE, *SWEPT)
    assert [row["configuration"] for row in found] == [chosen for _, chosen in FLAGS]
    for row, (flags, _) in zip(found, FLAGS, strict=True):
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
        assert row["sent_bytes"] == max(
            sum(r["wire_bytes"] for r in c["collectives"])
            + sum(r["bytes"] for r in c["p2p"] if r["dir"] == "send")
            for c in whole["classes"]
        )
        assert len(row["warnings"]) == alone.err.count("warning: ") + alone.err.count("remark: ")
        assert all(text in alone.err for text in row["warnings"])
    assert {"error" in row for row in found} == {True, False}
    assert any(row.get("warnings") for row in found)


def test_the_number_of_processes_changes_nothing() -> None:
    assert rows(*BASE, *SWEPT, "--jobs", "1") == rows(*BASE, *SWEPT, "--jobs", "3")


def test_the_table_says_the_same() -> None:
    lines = stagec(*BASE, *SWEPT).out.splitlines()
    found = [line.split() for line in lines if line.split()[:1] in (["1"], ["2"], ["3"])]
    assert [[int(n) for n in line[:2]] for line in found] == [[*c.values()] for _, c in FLAGS]
    assert [line[2] == "-" for line in found] == ["error" in row for row in rows(*BASE, *SWEPT)]
    assert sum(line.startswith("[1]") for line in lines) == 1, "what is told twice is shown once"


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
    found = rows("analyze", MIXTRAL, "--set", "L=4", "--tp", "2", "--pp", "2", "--sweep", swept)
    assert [v for row in found for v in row["configuration"].values()] == expected
    assert not any("error" in row for row in found)


def test_a_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.stg").write_text((ROOT / "docs/examples/layer.stg").read_text())
    monkeypatch.chdir(tmp_path)
    assert [row["model"] for row in rows("analyze", "mine.stg", "--sweep", "tp=2")] == ["mine"]


def test_what_is_no_job_anywhere_fails() -> None:
    assert [r["error"] for r in rows("analyze", LLAMA, "--sweep", "tp=3", code=1)]


def test_the_result_goes_to_a_file(tmp_path: Path) -> None:
    assert stagec(*BASE, *SWEPT, "--json", "-o", tmp_path / "rows.json").out == ""
    assert json.loads((tmp_path / "rows.json").read_text()) == rows(*BASE, *SWEPT)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--sweep", "tp=1", "--sweep", "tp=2"], "--sweep tp is given twice"),
        (["--sweep", "tp=1", "--symbolic"], "leave out --symbolic"),
        (["--sweep", "tp=1", "--print-after", "all"], "leave out --print-after"),
        (["--jobs", "2"], "add --sweep"),
        (["--scheduler", "tcp://127.0.0.1:1"], "add --sweep"),
        (["--sweep", "tp=1", "--scheduler", "nonsense"], "no Dask scheduler"),
    ],
)
def test_what_does_not_go_together(more: list[str], told: str) -> None:
    ran = stagec(*BASE, *more)
    assert (ran.code, told in ran.err, "\n  help: " in ran.err) == (1, True, True), ran.err


@pytest.mark.parametrize("value", ["tp", "tp=", "tp=1,,2", "=1", "tq=1", "tp=x", "S=0", "jobs=1"])
def test_what_cannot_be_swept(value: str) -> None:
    ran = stagec(*BASE, "--sweep", value)
    assert (ran.code, ran.out) == (2, "")
    assert "Error: Invalid value for" in ran.err


def test_a_model_is_not_read_many_times() -> None:
    assert "give a file" in stagec("analyze", "-", "--sweep", "tp=1").err


def test_too_much_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_MOST_ROWS", 3)
    assert "4 configurations, expected at most 3" in stagec(
        *BASE, "--sweep", "tp=1,2", "--sweep", "dp=1,2"
    ).err  # fmt: skip


def test_a_bug_is_told_as_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken(_options: JobOptions) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sweep, "_summary", broken)
    assert main([*BASE, "--sweep", "tp=1,2", "--jobs", "2"]) == 70
    assert "bug in stagec" in capsys.readouterr().err
