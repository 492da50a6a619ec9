"""`stagec scale`: what it writes is what `stagec compile` writes for the larger job, byte for byte,
and what is not so is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stagec.formats.chakra.nodes import TraceNode, encode_metadata, encode_node
from stagec.formats.chakra.record_files import read_trace
from tests.support import EXHAUSTIVE, LONG, TINY, stagec

QUICK = ("llama3-8b",)
#: Strategies but for the degree that grows, the axis, and the mesh but for its size.
GROWS = (
    (("--tp", "2"), "dp", "dp={},tp=2"),
    (("--tp", "2", "--sp", "--memory-events"), "dp", "dp={},tp=2"),
    (("--tp", "2", "--machine", "h100-sxm"), "dp", "dp={},tp=2"),
    (("--pp", "2", "--microbatches", "4"), "dp", "pp=2,dp={}"),
    (("--pp", "2", "--microbatches", "4", "--tp", "2"), "dp", "pp=2,dp={},tp=2"),
    (("--pp", "2", "--microbatches", "4", "--schedule", "zb-h1"), "dp", "pp=2,dp={}"),
    (("--pp", "2", "--microbatches", "4", "--schedule", "dualpipe"), "dp", "pp=2,dp={}"),
    (("--recompute", "full", "--ddp-bucket", "64"), "dp", "dp={}"),
    (("--microbatches", "2", "--granularity", "block"), "dp", "dp={}"),
)


def sizes(model: str, **more: int) -> str:
    return ",".join(f"{k}={v}" for k, v in {**TINY[model], **more}.items())


def compiled(to: Path, model: str, words: Sequence[str], **more: int) -> Path:
    done = stagec("compile", model, "--set", sizes(model, **more), *words, "-o", to, "--quiet")
    assert done.code == 0, done.err
    return to


def traces(folder: Path) -> Mapping[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"}


@pytest.mark.parametrize(
    ("model", "words", "axis", "mesh"),
    [
        pytest.param(m, *row, marks=[] if m in QUICK else [EXHAUSTIVE])
        for m in ("llama3-8b", "gpt3-175b", "palm-540b", "mixtral-8x7b")
        for row in GROWS
    ],
)
def test_more_replicas_are_what_compile_writes(
    model: str, words: Sequence[str], axis: str, mesh: str, tmp_path: Path
) -> None:
    small = compiled(tmp_path / "small", model, [*words, f"--{axis}", "2"], B=16)
    large = compiled(tmp_path / "large", model, [*words, f"--{axis}", "6"], B=48)
    done = stagec("scale", small, "--to", mesh.format(6), "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert traces(tmp_path / "out") == traces(large)
    assert stagec("check", tmp_path / "out").code == 0
    manifests = [json.loads((f / "manifest.json").read_text()) for f in (tmp_path / "out", large)]
    assert manifests[0]["files"] == manifests[1]["files"]
    assert manifests[0]["ranks"] == manifests[1]["ranks"]
    assert (
        manifests[0]["scaled_from"]["mesh"]
        == json.loads((small / "manifest.json").read_text())["mesh"]
    )


def test_replicas_of_shards_grow(tmp_path: Path) -> None:
    """HSDP: parameters are sharded along one axis, and replicated along the other."""
    words = ("--zero", "3", "--dp-shard", "2", "--dp-replicate")
    small = compiled(tmp_path / "small", "llama3-8b", [*words, "2"], B=16)
    large = compiled(tmp_path / "large", "llama3-8b", [*words, "4"], B=32)
    mesh = json.loads((large / "manifest.json").read_text())["mesh"]
    text = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    done = stagec("scale", small, "--to", text, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert traces(tmp_path / "out") == traces(large)


FORWARD = """stg.module @forward {{
  stg.symbols[B = {batch}, S = 4, D = 8, F = 16]
  stg.mesh @pod[{mesh}]
  stg.strategy @split[mesh = @pod] {{
    stg.split[F, over = tp]
    {split}
  }}
  stg.func @step(%x: bf16[B, S, D], %w: bf16[D, F], %v: bf16[F, D]) -> bf16[B, S, D] {{
    %g = stg.einsum["bsd,df->bsf"](%x, %w)
    %n = stg.gelu(%g)
    %r = stg.einsum["bsf,fd->bsd"](%n, %v)
    %y = stg.gelu(%r)
    stg.return(%y)
  }}
}}
"""


def test_a_forward_pass_grows_from_one_rank(tmp_path: Path) -> None:
    """Replicas of it tell each other nothing."""
    small = FORWARD.format(batch=2, mesh="tp = 2", split="")
    large = FORWARD.format(batch=8, mesh="dp = 4, tp = 2", split="stg.split[B, over = dp]")
    for name, text in (("small", small), ("large", large)):
        (tmp_path / f"{name}.stg").write_text(text)
        words = ("-o", tmp_path / name, "--name", "forward", "--quiet")
        done = stagec("compile", tmp_path / f"{name}.stg", *words)
        assert done.code == 0, done.err
    out = tmp_path / "out"
    done = stagec("scale", tmp_path / "small", "--from", "tp=2", "--to", "dp=4,tp=2", "-o", out)
    assert done.code == 0, done.err
    assert traces(out) == traces(tmp_path / "large")
    assert any(node.attrs.get("pg_name") for node in read_trace(out / "forward.7.et"))


@LONG
def test_traces_without_a_manifest(tmp_path: Path) -> None:
    """In JSON, as other tools have them; some ranks, in another format."""
    small = compiled(tmp_path / "small", "llama3-8b", ["--dp", "2", "--tp", "2"], B=8)
    large = compiled(tmp_path / "large", "llama3-8b", ["--dp", "4", "--tp", "2"], B=16)
    assert stagec("convert", small, "--to", "json", "-o", tmp_path / "text").code == 0
    asked = ("scale", tmp_path / "text", "--to", "dp=4,tp=2", "-o", tmp_path / "out")
    done = stagec(*asked)
    assert (done.code, "has no manifest with the mesh" in done.err) == (1, True)
    done = stagec(*asked, "--from", "dp=2,tp=2", "--only-ranks", "3,5")
    assert done.code == 0, done.err
    for rank in (3, 5):
        name = f"llama3-8b.{rank}.et"
        assert (tmp_path / "out" / name).read_bytes() == (large / name).read_bytes()
    done = stagec(*asked, "--from", "dp=2,tp=2", "--format", "pytorch-et", "--force")
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "rank-7.json").exists()


@pytest.mark.parametrize(
    ("words", "to", "expected"),
    [
        (("--dp", "2", "--zero", "1"), "dp=4", "it exchanges shards, whose sizes"),
        (("--dp", "2", "--zero", "3"), "dp=4", "it exchanges shards, whose sizes"),
        (("--dp", "2", "--names", "none"), "dp=4", "is not named as a reduction of"),
        (("--tp", "2"), "tp=4", "it exchanges shards, whose sizes"),
        (("--tp", "2"), "dp=4,tp=2", "the traces have one rank along dp"),
        (("--pp", "2", "--microbatches", "2"), "pp=4", "run different programs"),
        (("--dp", "2", "--tp", "2"), "tp=2,dp=4", "lacks axes of dp=2,tp=2, or has them in"),
        (("--dp", "2", "--tp", "2"), "dp=4", "lacks axes of dp=2,tp=2, or has them in"),
        (("--dp", "2"), "dp=4194305", "has 4,194,305 ranks, expected at most 4,194,304"),
        (("--dp", "4"), "dp=2", "--to dp=2 is less than the 4 ranks of the traces"),
        (("--dp", "2", "--tensor-names"), "dp=4", "the attribute 'inputs' cannot be scaled"),
    ],
)
def test_what_is_not_exact_is_refused(
    words: Sequence[str], to: str, expected: str, tmp_path: Path
) -> None:
    small = compiled(tmp_path / "small", "llama3-8b", words, B=8)
    done = stagec("scale", small, "--to", to, "-o", tmp_path / "out")
    assert (done.code, expected in done.err) == (1, True), done.err
    assert not (tmp_path / "out").exists()


def changed(folder: Path, rank: int, change: Callable[[TraceNode], TraceNode]) -> None:
    path = folder / f"llama3-8b.{rank}.et"
    nodes = [change(node) for node in read_trace(path)]
    path.write_bytes(encode_metadata("0.0.4") + b"".join(map(encode_node, nodes)))


def with_attr(name: str, value: bool | str) -> Callable[[TraceNode], TraceNode]:
    def change(node: TraceNode) -> TraceNode:
        return replace(node, attrs={**node.attrs, name: value})

    return change


def other_id(node: TraceNode) -> TraceNode:
    return replace(node, id=node.id + 1)


def other_name(node: TraceNode) -> TraceNode:
    return replace(node, name=f"{node.name}!")


def slower(node: TraceNode) -> TraceNode:
    return replace(node, duration_micros=7)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (with_attr("involved_dim", True), "cannot be scaled"),
        (with_attr("is_cpu_op", True), "runs on a host"),
        (other_id, "expected node 1"),
        (other_name, "run different programs"),
        (slower, "run different programs"),
        (with_attr("pg_name", "77"), "no groups file lists the ranks of"),
    ],
)
def test_traces_that_do_not_fit(
    change: Callable[[TraceNode], TraceNode], expected: str, tmp_path: Path
) -> None:
    small = compiled(tmp_path / "small", "llama3-8b", ["--dp", "2", "--tp", "2"], B=8)
    changed(small, 2, change)
    done = stagec("scale", small, "--to", "dp=4,tp=2", "-o", tmp_path / "out")
    assert (done.code, expected in done.err) == (1, True), done.err


def test_groups_that_are_of_no_mesh(tmp_path: Path) -> None:
    small = compiled(tmp_path / "small", "llama3-8b", ["--dp", "2", "--tp", "2"], B=8)
    asked = ("scale", small, "-o", tmp_path / "out", "--from")
    done = stagec(*asked, "dp=4", "--to", "dp=8")
    assert (done.code, "do not lie along axes of dp=4 at rank 0" in done.err) == (1, True)
    done = stagec(*asked, "dp=2,tp=3", "--to", "dp=4,tp=3")
    assert (done.code, "has 6 ranks, but there are 4 traces" in done.err) == (1, True)
    shutil.rmtree(small)
    done = stagec(*asked, "dp=2", "--to", "dp=8")
    assert (done.code, "expected a directory of traces" in done.err) == (1, True)
    assert done.err.count("error: ") == 1
    assert "No such file or directory\n  help: " in done.err
