"""`--format`: one answer in each form, and plots as PDF."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import stagec

JOB = ("memory", "llama3-8b", "--set", "L=1", "--limit", "h100")


def test_each_form_has_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = {f: stagec(*JOB, "--format", f).out for f in ("plain", "rich", "json", "csv", "markdown")}
    assert out["plain"] == stagec(*JOB).out
    assert "\x1b[1m" in out["rich"]
    assert "\x1b" not in out["plain"]
    peak = json.loads(out["json"])["classes"][0]["peak"]
    assert out["json"] == stagec(*JOB, "--json").out
    assert out["csv"] == stagec(*JOB, "--csv").out
    (row,) = csv.DictReader(io.StringIO(out["csv"]))
    assert int(row["peak"]) == peak
    assert "| --- | ---: | ---: |\n" in out["markdown"]
    assert f"| {peak:,} |\n" in out["markdown"]


def test_lists_in_rows_are_json() -> None:
    (row,) = csv.DictReader(io.StringIO(stagec("doctor", "--format", "csv").out))
    assert "click" in [package["name"] for package in json.loads(row["required"])]


def test_an_answer_without_rows_has_the_names_of_columns(tmp_path: Path) -> None:
    stagec("compile", *JOB[1:4], "--dp", "2", "-o", tmp_path)
    assert stagec("check", tmp_path, "--format", "csv").out == (
        "kind,file,node,code,message,remedy\n"
    )


@pytest.mark.parametrize("command", ["models", "presets", "stacks"])
def test_a_list_has_each_form(command: str) -> None:
    out = {f: stagec(command, "--format", f).out for f in ("plain", "json", "csv", "markdown")}
    assert out["plain"] == stagec(command).out
    assert out["json"] == stagec(command, "--json").out
    names = [each["name"] for each in json.loads(out["json"])]
    assert [row["name"] for row in csv.DictReader(io.StringIO(out["csv"]))] == names
    assert f"\n| {names[0]} | " in out["markdown"]


def test_a_narrow_terminal_gets_a_narrow_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "45")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    table = re.sub(r"\x1b\[\d*m", "", stagec(*JOB, "--format", "rich").out).splitlines()[1:12]
    assert max(map(len, table)) <= 45


def test_two_forms_are_an_error() -> None:
    assert stagec(*JOB, "--json", "--format", "json").code == 0
    ran = stagec(*JOB, "--json", "--format", "csv")
    assert ran.code == 1
    assert "error: --json and --format csv cannot be used together" in ran.err


def test_lines_stay_lines_in_markdown() -> None:
    out = stagec("doctor", "--format", "markdown")
    assert "  \npython " in out.out


SWEEP = ("time", "llama3-8b", "--set", "L=1", "--sweep", "tp=1,2", "--machine", "h100-sxm")


def test_a_plot_is_a_pdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bytes] = []

    def svg2pdf(*, bytestring: bytes) -> bytes:
        drawn.append(bytestring)
        return b"%PDF"

    monkeypatch.setitem(sys.modules, "cairosvg", SimpleNamespace(svg2pdf=svg2pdf))
    assert stagec(*SWEEP, "--html", tmp_path / "plot.pdf").code == 0
    assert (tmp_path / "plot.pdf").read_bytes() == b"%PDF"
    assert drawn[0].startswith(b"<svg")


def test_a_pdf_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    ran = stagec(*SWEEP, "--html", tmp_path / "plot.pdf")
    assert ran.code == 1
    assert "error: a PDF needs the package CairoSVG" in ran.err
    assert "help: install them: pip install 'stagec[pdf]', or write FILE.svg" in ran.err
    assert not (tmp_path / "plot.pdf").exists()
