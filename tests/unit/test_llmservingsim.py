"""LLMServingSim's trace of a batch: read by the rules of its format, and summed up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import Outcome, stagec

STEP = (
    "llama3-8b",
    "--set",
    "L=4",
    "--serve",
    "decode",
    "--batch",
    "8",
    "--context",
    "100",
    "--sampling",
    "none",
)
H100 = ("--machine", "h100-sxm")


def compiled(folder: Path, *words: str) -> Outcome:
    return stagec("compile", *words, *H100, "--format", "llmservingsim", "-o", folder)


def trace(path: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The first line by its keys, and the rows by theirs."""
    about, count, head, *lines = path.read_text().splitlines()
    mode, *pairs = about.split("\t\t")
    names = head.split()
    rows = [dict(zip(names, line.split(), strict=True)) for line in lines]
    assert len(rows) == int(count)
    assert len(names) == 11
    return {"mode": mode, **dict(p.split(": ") for p in pairs)}, rows


def analysed(*words: str) -> list[dict[str, Any]]:
    return list(json.loads(stagec("analyze", *words, "--json").out)["classes"])


@pytest.mark.parametrize("flags", ["", "--tp 4", "--tp 2 --pp 2 --microbatches 1"])
def test_rows_are_the_computations_of_a_step(flags: str, tmp_path: Path) -> None:
    """As many as there are, stage by stage; bytes and collectives are those of `analyze`."""
    words = (*STEP, *flags.split())
    assert compiled(tmp_path / "t", *words).code == 0
    about, rows = trace(tmp_path / "t" / "llama3-8b.txt")
    classes = analysed(*words)
    counts = [c["nodes"]["comp"] for c in classes]
    starts = [sum(counts[:i]) for i in range(1, len(counts))]
    assert about["mode"] == "COLOCATED"
    assert about["model_parallel_NPU_group"] == str(len(classes))
    assert about.get("pp_stage_boundaries", "") == ",".join(map(str, starts))
    assert len(rows) == sum(counts)
    assert len({row["Layername"] for row in rows}) == len(rows)
    touched = sum(sum(c["bytes_touched"].values()) for c in classes)
    assert sum(int(r["input_size"]) + int(r["output_size"]) for r in rows) == touched
    sent = Counter[str]()
    for row in rows:
        sent[row["comm_type"]] += int(row["comm_size"])
    assert sent["ALLREDUCE"] == sum(e["bytes"] for c in classes for e in c["collectives"])
    assert (rows[0]["input_loc"], rows[-1]["output_loc"]) == ("REMOTE:0", "REMOTE:0")
    assert {row["input_loc"] for row in rows[1:]} == {"LOCAL"}


def test_rows_take_what_nodes_take(tmp_path: Path) -> None:
    """The times of a step on one rank, one after the other, are those of its kernels."""
    assert compiled(tmp_path / "t", *STEP).code == 0
    _, rows = trace(tmp_path / "t" / "llama3-8b.txt")
    timed = json.loads(stagec("time", *STEP, *H100, "--json").out)
    total = sum(int(row["comp_time"]) for row in rows) / 1e9
    assert total == pytest.approx(timed["step_seconds"], rel=0.02)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("llama3-8b", "--set", "L=2,B=1,S=128"), "this step trains"),
        ((*STEP, "--pp", "2", "--microbatches", "2"), "several microbatches"),
        ((*STEP, "--tp", "2", "--dp-attention"), "has no reduce_scatter in its rows"),
        (
            (
                *(
                    "qwen3-30b-a3b",
                    "--set",
                    "L=2",
                    "--serve",
                    "decode",
                    "--sampling",
                    "none",
                    "--batch",
                    "16",
                ),
                *("--context", "9", "--dp", "2", "--ep", "2", "--tp", "2"),
            ),
            "over several axes",
        ),
    ],
)
def test_what_has_no_rows_is_refused(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    ran = compiled(tmp_path / "t", *words)
    assert ran.code == 1
    assert says in ran.err
    assert "help: " in ran.err
