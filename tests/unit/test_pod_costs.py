"""What a job of several pods costs: sweeps, advice and stages say what each job says of itself."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import stagec as library
from stagec.output.tables import bytes_text
from stagec.searches.advice import suggestions
from tests.support import LONG, assert_schema, stagec

SIZES = "L=2,D=64,F=128,V=256,H=4,G=2,K=16"
DRAFT = (
    *("llama3-8b", "--set", SIZES, "--serve", "decode", "--batch", "8", "--context", "64"),
    *("--speculative", "3", "--draft", f"llama3-8b[{SIZES}]: tp=1"),
)
APART = (
    *("llama3-8b", "--set", SIZES, "--serve", "disaggregated", "--batch", "8", "--prompt", "64"),
    *("--prefill", "dp=2", "--decode", "tp=2"),
)
PARTS = (
    *("whisper-large-v3", "--set", "L=2,L_dec=2,B=16", "--part", "encoder=e: dp=2"),
    *("--tp", "2"),
)
MACHINE = ("--machine", "h100-sxm")


def expected(*words: str | Path) -> Any:
    ran = stagec(*words, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


@pytest.mark.parametrize("job", [DRAFT, APART], ids=["draft", "disaggregated"])
def test_a_row_is_the_memory_of_the_job(job: tuple[str, ...]) -> None:
    """Ranks of all pods, the peak of the fullest rank, and what each pod has."""
    (row,) = expected("memory", *job, "--sweep", "tp=2")
    actual = expected("memory", *job, "--tp", "2")["pods"]
    classes = [c for plan in actual.values() for c in plan["classes"]]
    assert row["ranks"] == sum(c["ranks"] for c in classes)
    fullest = max(classes, key=lambda c: c["peak"])
    assert row["peak_bytes"] == fullest["peak"]
    assert row["memory"] == fullest["categories"]
    assert row["pods"] == {
        pod: {"mesh": plan["mesh"], "peak_bytes": max(c["peak"] for c in plan["classes"])}
        for pod, plan in actual.items()
    }
    counts = expected("analyze", *job, "--tp", "2")["pods"]
    assert row["flops"] == max(
        sum(c["flops"].values()) for pod in counts.values() for c in pod["classes"]
    )
    models = [pod["parameters"] for name, pod in counts.items() if name != "decode"]
    assert row["parameters"] == sum(models)


def test_every_pod_of_a_row_must_fit() -> None:
    peaks = [
        p["peak_bytes"] for p in expected("memory", *DRAFT, "--sweep", "tp=1")[0]["pods"].values()
    ]
    for limit, fits in ((max(peaks), True), (max(peaks) - 1, False)):
        ran = stagec("memory", *DRAFT, "--sweep", "tp=1", "--limit", str(limit), "--json")
        (row,) = json.loads(ran.out)
        assert row["fits"] is fits


@LONG
def test_the_time_of_a_row_is_that_of_the_step() -> None:
    """That of all pods that wait for each other."""
    over = ("--sweep", "tp=1,2", *MACHINE)
    rows = expected("time", *DRAFT, *over)
    for tp, row in zip((1, 2), rows, strict=True):
        alone = expected("time", *DRAFT, "--tp", str(tp), *MACHINE, "--no-levers")
        assert row["time"]["step_seconds"] == alone["step_seconds"]
        assert row["mesh"] == alone["mesh"]
        assert row["fit"] == alone["fit"]
    job = library.job(
        "llama3-8b",
        sizes={name: int(n) for name, _, n in (each.partition("=") for each in SIZES.split(","))},
        serve="decode",
        batch=8,
        context=64,
        speculative=3,
        draft=DRAFT[-1],
    )
    assert (
        json.loads(json.dumps(job.sweep({"tp": [1, 2]}, machine="h100-sxm", jobs=1).rows())) == rows
    )


@LONG
def test_pods_that_prefill_and_decode_have_a_row_for_each_step(tmp_path: Path) -> None:
    """That of the pod by itself; what cannot be has one row."""
    asked = ("time", *APART, "--sweep", "microbatches=1,3", *MACHINE, "--jobs", "1")
    page = tmp_path / "page.html"
    rows = json.loads(stagec(*asked, "--json", "--html", page).out)
    assert_schema("sweep", rows)
    chosen = [tuple(row["configuration"].values()) for row in rows]
    assert chosen == [(1, "prefill"), (1, "decode"), (3, "")]
    alone = expected("time", *APART, *MACHINE, "--no-levers")["pods"]
    for row in rows[:2]:
        step = alone[row["configuration"]["pod"]]
        assert row["time"]["step_seconds"] == step["step_seconds"]
        assert (row["mesh"], row["fit"]) == (step["mesh"], step["fit"])
    assert "error" in rows[2]
    assert "1 of 2 configurations failed" in stagec(*asked).out
    assert page.read_text().count("--html step-") == 2
    best = json.loads(stagec(*asked, "--pareto", "time", "--json").out)
    assert [row["configuration"]["pod"] for row in best] == ["prefill", "decode"]


@pytest.mark.long
def test_what_would_make_pods_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that it prints works when pasted, and holds what it says."""
    monkeypatch.setattr(suggestions, "BUDGET", 6)
    ran = stagec("memory", *PARTS, "--limit", "2GiB", "--advise")
    assert ran.code == 1
    assert "main: most of it is stash" in ran.err
    table = re.findall(r"^  \[\d\]   (.*?)  +([0-9.]+ [MG]iB)  ", ran.err, re.M)
    commands = re.findall(r"^\[\d\] stagec (.*)$", ran.err, re.M)
    assert len(table) == len(commands) > 1
    for (_, peak), command in list(zip(table, commands, strict=True))[:2]:
        pods = expected(*shlex.split(command))["pods"].values()
        assert bytes_text(max(c["peak"] for p in pods for c in p["classes"])) == peak
        assert all(p["fit"]["fits"] for p in pods)


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ("x/0", "choose prefill/0, decode/0"),
        ("decode/1", "--stage decode/1: the job has no such stage"),
        ("decode/", "is not a valid integer"),
    ],
)
def test_stages_that_pods_do_not_have(stage: str, says: str) -> None:
    ran = stagec("memory", *APART, "--stage", stage)
    assert ran.code in (1, 2)
    assert says in ran.err


def test_a_snapshot_is_of_the_stage_of_a_pod(tmp_path: Path) -> None:
    """Another pod has other bytes; without a name it is the pod that holds most."""
    sizes: dict[str, bytes] = {}
    for stage in ("prefill/0", "decode/0", "0"):
        file = tmp_path / "snapshot.pickle"
        assert stagec("memory", *APART, "--snapshot", file, "--stage", stage).code == 0
        sizes[stage] = file.read_bytes()
    assert sizes["prefill/0"] != sizes["decode/0"]
    assert sizes["0"] == sizes["prefill/0"]
