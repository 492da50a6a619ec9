"""`stagec scale --microbatches`: what it writes is what `stagec compile` writes for more
microbatches, byte for byte, and what is not so is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagec.formats.chakra.nodes import NodeKind, TraceNode, encode_metadata, encode_node
from stagec.formats.chakra.record_files import read_trace
from stagec.schedule.registry import SCHEDULES
from tests.support import EXHAUSTIVE, LONG, TINY, stagec

#: Recorded and wanted microbatches.
COUNTS = ((2, 5), (3, 8), (4, 8), (8, 12))
#: Strategies without a pipeline.
PLAIN = (
    ("--dp", "2"),
    ("--tp", "2", "--sp"),
    ("--dp", "2", "--zero", "1", "--ddp-bucket", "1"),
    ("--dp", "2", "--zero", "3"),
    ("--dp", "2", "--recompute", "full", "--memory-events"),
    ("--cp", "2"),
)
#: What a pipeline is combined with.
PIPELINED = (
    (),
    ("--tp", "2", "--sp"),
    ("--dp", "2", "--zero", "3"),
    ("--dp", "2", "--zero", "1", "--memory-events"),
    ("--granularity", "layer", "--machine", "h100-sxm"),
    ("--tp", "2", "--scatter-gather"),
)
QUICK = {
    ("llama3-8b", ("--dp", "2", "--zero", "1", "--ddp-bucket", "1"), 3),
    ("llama3-8b", ("--pp", "2", "--schedule", "1f1b", "--tp", "2", "--sp"), 3),
    ("llama3-8b", ("--pp", "2", "--schedule", "dualpipe"), 8),
    ("llama3-8b", ("--pp", "2", "--schedule", "zb-h1", *PIPELINED[3]), 4),
}
STRATEGIES = (
    *PLAIN,
    *(("--pp", "2", "--schedule", name, *more) for name in SCHEDULES for more in PIPELINED),
)
JOBS = [
    *(("llama3-8b", words, *counts) for words in STRATEGIES for counts in COUNTS),
    *(
        ("gpt3-175b", ("--pp", "2", "--schedule", n), *counts)
        for n in SCHEDULES
        for counts in COUNTS
    ),
    *(
        ("mixtral-8x7b", ("--dp", "2", "--ep", "2", *w), *c)
        for w in ((), ("--pp", "2"))
        for c in COUNTS
    ),
]
#: Why few recorded microbatches may not be enough.
FEW = (
    "with more microbatches, actions follow each other that never do so in the traces",
    "the traces have no microbatch between the first and the last, whose memory is needed",
    "too few microbatches to see which computations wait for a collective",
)


def compiled(to: Path, model: str, words: Sequence[str], count: int, **more: int) -> bool:
    """Whether the schedule takes so many microbatches."""
    sizes = ",".join(f"{k}={v}" for k, v in {**TINY[model], "L": 4, "B": 8 * count, **more}.items())
    asked = ("compile", model, "--set", sizes, *words, "--microbatches", str(count))
    done = stagec(*asked, "-o", to, "--quiet")
    assert done.code == 0 or " needs " in done.err, done.err
    return done.code == 0


def files(folder: Path) -> Mapping[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"}


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize(
    ("model", "words", "few", "many"),
    [
        pytest.param(*job, marks=[] if (job[0], tuple(job[1]), job[2]) in QUICK else [EXHAUSTIVE])
        for job in JOBS
    ],
)
def test_more_microbatches_are_what_compile_writes(
    model: str, words: Sequence[str], few: int, many: int, tmp_path: Path
) -> None:
    small, large, out = (tmp_path / name for name in ("small", "large", "out"))
    if not compiled(small, model, words, few) or not compiled(large, model, words, many):
        assert (model, tuple(words), few) not in QUICK
        return
    done = stagec("scale", small, "--microbatches", str(many), "-o", out)
    if few < 8 and done.code:  # 8 say all that there is to two stages
        assert any(text in done.err for text in FEW), done.err
        assert "record " in done.err
        assert (model, tuple(words), few) not in QUICK
        return
    assert done.code == 0, done.err
    assert files(out) == files(large)
    assert manifest(out)["classes"] == manifest(large)["classes"]


@LONG
def test_replicas_and_microbatches_at_once(tmp_path: Path) -> None:
    words = ("--pp", "2", "--tp", "2")
    assert compiled(tmp_path / "small", "llama3-8b", (*words, "--dp", "2"), 4)
    assert compiled(tmp_path / "large", "llama3-8b", (*words, "--dp", "4"), 6, B=8 * 12)
    asked = ("--to", "pp=2,dp=4,tp=2", "--microbatches", "6", "-o", tmp_path / "out")
    done = stagec("scale", tmp_path / "small", *asked)
    assert done.code == 0, done.err
    assert files(tmp_path / "out") == files(tmp_path / "large")
    assert stagec("check", tmp_path / "out").code == 0


def test_stages_that_are_alike_with_few_microbatches(tmp_path: Path) -> None:
    """The middle ones of four stages run two microbatches alike, and eight not."""
    words = ("--pp", "4", "--dp", "2")
    assert compiled(tmp_path / "small", "llama3-8b", words, 2)
    assert compiled(tmp_path / "large", "llama3-8b", words, 8)
    done = stagec("scale", tmp_path / "small", "--microbatches", "8", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert files(tmp_path / "out") == files(tmp_path / "large")


@LONG
def test_traces_without_a_manifest_need_their_schedule(tmp_path: Path) -> None:
    small, text, out = (tmp_path / name for name in ("small", "text", "out"))
    assert compiled(small, "llama3-8b", ("--pp", "2", "--schedule", "gpipe"), 3)
    assert compiled(tmp_path / "large", "llama3-8b", ("--pp", "2", "--schedule", "gpipe"), 5)
    assert stagec("convert", small, "--to", "json", "-o", text).code == 0
    asked = ("scale", text, "--from", "pp=2", "--microbatches", "5", "-o", out)
    done = stagec(*asked, "--schedule", "gpipe")
    assert done.code == 0, done.err
    assert files(out) == files(tmp_path / "large")
    for words, reported in (
        ((), "is not the action that the schedule has at this place"),
        (("--schedule", "1f1b"), "is not the action"),
        (("--schedule", "nope"), "no schedule 'nope'"),
    ):
        done = stagec(*asked, *words, "--force")
        assert (done.code, reported in done.err) == (1, True), done.err


def renamed(node: TraceNode) -> TraceNode:
    return replace(node, name=node.name.replace("/mb", "/m"))


def slower(node: TraceNode) -> TraceNode:
    """The first node of the second microbatch takes longer."""
    return replace(node, duration_micros=9) if node.name == "forward/mb1/x" else node


def waits_more(node: TraceNode) -> TraceNode:
    other = node.name == "forward/mb2/L1/layers/n1"
    return replace(node, data_deps=(*node.data_deps, 1)) if other else node


def other_tag(node: TraceNode) -> TraceNode:
    other = node.kind == NodeKind.SEND and node.attrs["comm_tag"]
    return replace(node, attrs={**node.attrs, "comm_tag": 90}) if other else node


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (renamed, "no node name has a microbatch"),
        (slower, "microbatches differ: 'forward/mb0/x' and"),
        (waits_more, "has other dependencies, or another tag"),
        (other_tag, "do not count up on each stream"),
    ],
)
def test_what_is_not_exact_is_refused(
    change: Callable[[TraceNode], TraceNode], reported: str, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    assert compiled(small, "llama3-8b", ("--pp", "2"), 3)
    for rank in range(2):
        path = small / f"llama3-8b.{rank}.et"
        nodes = map(change, list(read_trace(path)))
        path.write_bytes(encode_metadata("0.0.4") + b"".join(map(encode_node, nodes)))
    done = stagec("scale", small, "--microbatches", "6", "-o", tmp_path / "out")
    assert (done.code, reported in done.err) == (1, True), done.err
    assert not (tmp_path / "out").exists()


def test_what_is_asked_makes_sense(tmp_path: Path) -> None:
    small = tmp_path / "small"
    assert compiled(small, "llama3-8b", ("--pp", "2"), 3)
    for words, reported in (
        ((), "neither --to nor --microbatches is given, so nothing would be scaled"),
        (("--microbatches", "2"), "--microbatches 2 is less than the 3 of the traces"),
        (("--to", "pp=2", "--schedule", "1f1b"), "--schedule needs --microbatches"),
        (("--microbatches", "6", "--schedule", "dualpipe"), "dualpipe"),
    ):
        done = stagec("scale", small, *words, "-o", tmp_path / "out")
        assert (done.code, reported in done.err) == (1, True), done.err
        assert "help: " in done.err
