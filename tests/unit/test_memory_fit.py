"""Whether a job fits the machine, and what to know of it: the same in every output."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from stagec.api import time_step
from stagec.machines import Machine, machines
from tests.support import LONG, stagec

JOB = ("llama3-8b", "--set", "L=1,B=4", "--tp", "2", "--dp", "2")
#: A machine that nobody measured, with less memory than the job needs.
MACHINE = "tpu-v5p"


def asked(*words: str | Path) -> Any:
    ran = stagec(*words)
    assert ran.code in (0, 1), ran.err
    return json.loads(ran.out)


def peak(*job: str) -> int:
    return max(int(c["peak"]) for c in asked("memory", *job, "--json")["classes"])


def room(machine: Machine, communicators: int) -> int:
    reserve = machine.memory.reserve
    each = [reserve.driver, reserve.context, *[reserve.communicator] * communicators]
    taken = sum(int(part.value) for part in each if part is not None)
    return int(machine.memory.capacity.value) - taken


@pytest.mark.parametrize("capacity", ["80 GiB", "8 GiB"])
def test_the_verdict_is_that_of_the_plan(tmp_path: Path, capacity: str) -> None:
    """Of the command, of its sweep and of the call, against `stagec memory` and the text."""
    file = tmp_path / "mine.toml"
    figure = f'capacity = {{ value = "{capacity}", source = "a" }}'
    file.write_text(f'base = "h100-sxm"\n[memory]\n{figure}\n')
    ran = stagec("time", *JOB, "--machine", file, "--json", "--no-levers")
    actual, here = (
        json.loads(ran.out),
        machines()["h100-sxm"].changed({"memory.capacity": capacity}),
    )
    fit = {"peak": peak(*JOB), "room": room(here, 2)}
    fit |= {"fits": fit["peak"] <= fit["room"], "by": fit["room"] - fit["peak"]}
    assert fit["fits"] is (capacity == "80 GiB")
    assert actual["fit"] == fit
    report = time_step("llama3-8b", here, sizes={"L": 1, "B": 4}, tp=2, dp=2)
    assert report.fit is not None
    assert report.fit.as_json() == fit
    (row,) = asked("time", *JOB, "--machine", file, "--sweep", "dp=2", "--jobs", "1", "--json")
    assert row["fit"] == fit
    expected = stagec("time", *JOB, "--machine", file, "--no-levers").out
    assert ("fits, by" in expected, "does not fit, by" in expected) == (
        fit["fits"],
        not fit["fits"],
    )
    verdict = stagec("memory", *JOB, "--limit", str(fit["room"]))
    assert (verdict.code == 0) is fit["fits"]
    software, first = verdict.out.splitlines()[:2]
    assert ", stack ideal, " in software
    assert first.startswith("stage0: peak ")
    assert (": fits, by " in first) is fit["fits"]


def test_what_to_know_is_in_every_output(tmp_path: Path) -> None:
    """The same text, as data and to be read."""
    on = ("--machine", MACHINE)
    ran = stagec("time", *JOB, *on, "--no-levers", "--json", "--html", tmp_path / "time.html")
    (expected,) = json.loads(ran.out)["cautions"]
    assert expected.startswith(f"{MACHINE} has defaults for ")
    assert f"remark: {expected}" in ran.err
    page = expected.replace("'", "&#x27;")
    assert page in (tmp_path / "time.html").read_text("utf-8")
    report = time_step("llama3-8b", MACHINE, sizes={"L": 1, "B": 4}, tp=2, dp=2)
    assert report.cautions == (expected,)
    swept = ("time", *JOB, *on, "--sweep", "dp=1,2", "--jobs", "1")
    ran = stagec(*swept, "--csv", "--html", tmp_path / "sweep.html")
    assert all(expected in row["cautions"] for row in csv.DictReader(StringIO(ran.out)))
    assert page in (tmp_path / "sweep.html").read_text("utf-8")
    assert expected.split()[0] in stagec(*swept).out.partition("[1] ")[2]


def test_a_step_of_serving_on_a_machine() -> None:
    words = ("llama3-8b", "--serve", "decode", "--batch", "8", "--context", "1024", "--set", "L=1")
    on = ("--machine", MACHINE)
    actual = asked("analyze", *words, *on, "--json")
    assert actual["fit"]["peak"] == peak(*words)
    (expected,) = actual["cautions"]
    ran = stagec("compile", *words, *on, "--dry-run")
    assert "memory: peak " in ran.out
    assert expected in ran.err
    prompts = "llama3-8b", "--set", "L=1", "--prompt", "64", *on, "--batches", "1"
    served = asked("serve", *prompts, "--json")
    assert served["cautions"] == [expected]
    assert served["points"][0]["fit"]["fits"]


@LONG
def test_a_search_tells_what_to_know(tmp_path: Path) -> None:
    words = ("llama3-8b", "--set", "L=2", "--ranks", "2", "--batch", "2", "--machine", MACHINE)
    space = ("--tp", "2", "--zero", "0", "--recompute", "none", "--microbatch-size", "1")
    page = tmp_path / "search.html"
    job = ("search", *words, *space, "--pp", "1", "--jobs", "1", "--no-cache")
    ran = stagec(*job, "--json", "--html", page)
    assert ran.code == 0, ran.err
    actual = json.loads(ran.out)
    (expected,) = actual["cautions"]
    best = actual["best"][0]
    assert best["cautions"] == [expected]
    assert best["fit"]["by"] == best["head_room"]
    assert expected.replace("'", "&#x27;") in page.read_text("utf-8")
    assert expected in stagec(*job, "--csv").out
