"""Memory events in traces: replayed from the files, node by node in the order of identifiers, they
come to the planner's peak on every rank, and to nothing at the end.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.analysis.memory_events import EventPlans
from stagec.formats.chakra.nodes import TraceNode, encode_node
from stagec.formats.chakra.record_files import read_trace
from stagec.program.classes import rank_classes
from stagec.program.nodes import Events
from stagec.support.diagnostics import DiagnosticError
from tests.layer_kinds import SIZES as KINDS_SIZES
from tests.layer_kinds import kinds_text
from tests.oracle.test_memory_replay import PLANNED
from tests.support import EXHAUSTIVE, LLAMA, LONG, crossed, run_passes, stagec, tiny_module

SIZES = "L=12,B=16,S=8,D=8,H=4,G=4,K=2,F=8,V=16"
EVENTS = ("alloc_bytes", "free_bytes")
JOBS = {
    "one": "",
    "microbatches": "--microbatches 4 --dp 2",
    "buckets": "--dp 2 --zero 1 --ddp-bucket 300 --microbatches 2",
    "fsdp": "--dp 2 --zero 3 --fsdp-prefetch 2",
    "kept": "--dp 2 --zero 3 --reshard-after-forward last",
    "recompute": "--tp 2 --sp --recompute full --recompute-every 3",
    "plain ring": "--cp 2 --cp-order plain --tp 2",
    "offload": "--offload activations,optimizer",
    "copies": "--offload activations,optimizer --memory-nodes",
    "gpipe": "--pp 2 --schedule gpipe --microbatches 4",
    "1f1b": "--pp 2 --microbatches 8 --tp 2 --sp --recompute selective",
    "interleaved": "--pp 2 --schedule interleaved --chunks 2 --microbatches 4 --dp 2 --zero 2",
    "looped-bfs": "--pp 2 --schedule looped-bfs --microbatches 4",
    "interleaved-zb": "--pp 2 --schedule interleaved-zb --microbatches 4",
    "zb-h1": "--pp 2 --schedule zb-h1 --microbatches 4",
    "sp zb-h1": "--pp 2 --schedule zb-h1 --microbatches 4 --tp 2 --sp --dp 2 --zero 3 --fp8 e4m3",
    "zbv": "--pp 2 --schedule zbv --microbatches 8",
    "copied units": "--dp 2 --zero 3 --shard-copies --shard-units ends --microbatches 2",
    "beside the loss": "--dp 2 --zero 3 --shard-loss inside",
    "copied in stages": "--pp 2 --microbatches 4 --dp 2 --zero 3 --shard-copies",
    "receives ahead": "--pp 2 --schedule zbv --microbatches 4 --stage-receives ahead",
}
OVERLAPPED = {
    "dualpipe": "--pp 2 --schedule dualpipe --microbatches 8",
    "dualpipev": "--pp 2 --schedule dualpipev --microbatches 8 --tp 2",
}


def job(what: str) -> list[str]:
    """The arguments of a job, of Llama if no file is named first."""
    model, sizes = LLAMA, SIZES
    if what.startswith("/"):
        model, _, what = what.partition(" ")
        sizes = ",".join(f"{n}={v}" for n, v in (KINDS_SIZES | {"B": 16}).items())
    return [model, "--set", sizes, *what.split()]


def written(directory: Path, what: str, *more: str) -> list[list[TraceNode]]:
    ran = stagec("compile", *job(what), "--quiet", "-o", directory, *more)
    assert ran.code == 0, ran.err
    files = sorted(directory.glob("*.et"), key=lambda p: int(p.suffixes[-2][1:]))
    return [list(read_trace(path)) for path in files]


def replayed(nodes: list[TraceNode]) -> tuple[int, int]:
    """The most bytes that are held, and what is left."""
    kept = most = 0
    for node in nodes:
        alloc, free = (int(str(node.attrs.get(name, 0))) for name in EVENTS)
        kept += alloc
        most = max(most, kept)
        kept -= free
    return most, kept


@cache
def peaks(what: str) -> dict[str, tuple[int, int]]:
    """The planner's peak of each class, and what is there all the time."""
    actual = json.loads(stagec("memory", *job(what), "--json").out)
    static = ["parameters", "gradients", "optimizer"]
    static += ["communication"] * ("--stage-receives ahead" in what)  # buffers across steps
    return {
        c["name"]: (c["peak"], sum(c["categories"][s] for s in static)) for c in actual["classes"]
    }


def checked(directory: Path, what: str, *more: str) -> list[tuple[int, int]]:
    """Found and planned peak of every rank, without what is there all the time."""
    ranks = written(directory, what, "--memory-events", *more)
    assert stagec("check", directory).code == 0
    manifest = json.loads((directory / "manifest.json").read_text())
    planned = peaks(what)
    actual: list[tuple[int, int]] = []
    for entry in manifest["classes"]:
        peak, static = planned[entry["name"].partition("-")[0]]
        most, left = replayed(ranks[int(entry["example_rank"])])
        assert left == 0
        assert entry["memory"] == {"static_bytes": static, "peak_bytes": static + most}
        actual.append((most, peak - static))
    assert {replayed(nodes)[0] for nodes in ranks} == {most for most, _ in actual}
    return actual


@pytest.mark.parametrize(
    "name",
    [
        "kept",
        "1f1b",
        *(pytest.param(n, marks=EXHAUSTIVE) for n in ("one", "recompute", "sp zb-h1")),
    ],
)
def test_layers_of_several_kinds(name: str, tmp_path: Path) -> None:
    """Their traces are well-formed, and hold what is planned."""
    model = tmp_path / "kinds.stg"
    model.write_text(kinds_text("mix, 2*attn, ffn, mix, attn, 2*ffn"))
    for actual, planned in checked(tmp_path / "out", f"{model} {JOBS[name]}"):
        assert actual == planned


#: Like others that stay in all runs, but for the order of actions, or with less at once.
MORE = ("gpipe", "looped-bfs", "interleaved-zb", "zb-h1", "offload", "kept", "plain ring")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=EXHAUSTIVE if n in MORE else ()) for n in JOBS]
)
def test_a_replay_comes_to_the_peak(name: str, tmp_path: Path) -> None:
    for actual, planned in checked(tmp_path / "out", JOBS[name]):
        assert actual == planned


@LONG
@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlapped_actions_are_within_the_bound(name: str, tmp_path: Path) -> None:
    """The planner has both at their worst moment at once; the trace says when they are."""
    for actual, planned in checked(tmp_path / "out", OVERLAPPED[name]):
        assert 0.9 * planned < actual <= planned


@crossed(name=["fsdp", "recompute", "1f1b", "zbv", "sp zb-h1"], granularity=["block", "layer"])
def test_coarser_nodes_hold_what_is_in_them(name: str, granularity: str, tmp_path: Path) -> None:
    for actual, planned in checked(tmp_path / "out", JOBS[name], "--granularity", granularity):
        assert actual == planned


@pytest.mark.parametrize("name", ["fsdp", "zbv"])
def test_nothing_else_changes(name: str, tmp_path: Path) -> None:
    """Without the events, each record has the bytes that it has without the option."""
    plain = written(tmp_path / "plain", JOBS[name])
    message = written(tmp_path / "told", JOBS[name], "--memory-events", "--jobs", "2")
    some: dict[str, Any] = {}
    for ours, theirs in zip(message, plain, strict=True):
        for node, other in zip(ours, theirs, strict=True):
            attrs = {n: v for n, v in node.attrs.items() if n not in EVENTS}
            assert encode_node(replace(node, attrs=attrs)) == encode_node(other)
            some |= node.attrs
    assert set(EVENTS) <= some.keys()


@LONG
def test_an_archive_holds_them(tmp_path: Path) -> None:
    out, file, again = tmp_path / "out", tmp_path / "job.stga", tmp_path / "again"
    written(out, JOBS["1f1b"], "--memory-events")
    ran = stagec("compile", *job(JOBS["1f1b"]), "--quiet", "--memory-events", "--archive", file)
    assert ran.code == 0, ran.err
    assert stagec("materialize", file, "-o", again, "--quiet").code == 0
    for path in out.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_without_a_plan() -> None:
    passes = (
        "inline,infer-shapes,apply-strategy,propagate-sharding,insert-collectives,lower-to-trace"
    )
    ran = stagec("compile", *job(""), "--memory-events", "--dry-run", "--pipeline", passes)
    assert ran.code == 1
    assert "--memory-events needs the pass 'plan-memory'" in ran.err


def test_a_trace_that_does_not_follow_the_plan() -> None:
    planned = tiny_module(LLAMA, PLANNED)
    lowered = tiny_module(LLAMA, f"{PLANNED},lower-to-trace", recompute="full")
    (each,) = rank_classes(lowered)
    with pytest.raises(DiagnosticError, match="does not follow the memory plan"):
        EventPlans(planned).annotate(each, each.program())


def test_names_of_values_do_not_matter() -> None:
    """A node is known by the operation that it comes from."""
    module = tiny_module(LLAMA, PLANNED, dp=2, zero=3)
    plans = EventPlans(module)
    (each,) = rank_classes(run_passes(module, "lower-to-trace"))
    expected = plans.annotate(each, each.program()).events
    for op in each.graph.body.walk():
        for result in op.results:
            result.name = "v"
    actual = plans.annotate(each, each.program()).events
    assert expected is not None
    assert actual is not None
    assert expected.peak == actual.peak > expected.static
    assert np.array_equal(expected.alloc, actual.alloc)
    assert np.array_equal(expected.free, actual.free)


@LONG
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1), st.data())
def test_runs_of_nodes_as_one(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    """Whatever is joined, the peak stays and nothing is lost."""
    alloc, free = np.array(pairs, dtype=np.int64).T
    events = Events(7, alloc, free)
    inner = data.draw(st.sets(st.integers(1, max(1, len(pairs) - 1))))
    starts = np.array([0, *sorted(inner - {len(pairs)})], dtype=np.int64)
    starts = starts[starts < len(pairs)]
    joined = events.merged(starts)
    assert joined.peak == events.peak
    assert (joined.alloc - joined.free).sum() == (alloc - free).sum()
