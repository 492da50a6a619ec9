"""Coarser traces: fewer nodes with the same FLOPs, bytes, collectives and messages, whose order is
kept.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stagec.formats.chakra.nodes import NodeKind, TraceNode
from stagec.formats.chakra.record_files import read_trace
from tests.support import LLAMA, crossed, stagec

SIZES = "L=4,B=16,S=8,D=8,H=4,G=4,K=2,F=8,V=16"
JOB = ["compile", LLAMA, "--set", SIZES, "--quiet"]


def traces(directory: Path, *more: str) -> list[list[TraceNode]]:
    ran = stagec(*JOB, *more, "-o", directory)
    assert ran.code == 0, ran.err
    checked = stagec("check", directory)
    assert checked.code == 0, checked.err
    files = sorted(directory.glob("*.et"), key=lambda p: int(p.suffixes[-2][1:]))
    return [list(read_trace(path)) for path in files]


def facts(node: TraceNode) -> Any:
    return node.name, node.kind, tuple(node.attrs.items())


def before(nodes: list[TraceNode]) -> dict[str, frozenset[str]]:
    """For each communication, those that it waits for, directly or not."""
    waits: dict[int, frozenset[str]] = {}
    actual: dict[str, frozenset[str]] = {}
    names = {n.id: n.name for n in nodes if n.kind != NodeKind.COMP}
    for node in nodes:
        parts = (*node.data_deps, *node.ctrl_deps)
        direct = frozenset(names[p] for p in parts if p in names)
        waits[node.id] = direct.union(*(waits[p] for p in parts))
        if node.id in names:
            actual[node.name] = waits[node.id]
    return actual


@crossed(
    granularity=["block", "layer"],
    strategy=[
        "--dp 2 --zero 3 --microbatches 2",
        "--tp 2 --sp --pp 2 --microbatches 4 --offload activations --memory-nodes",
        "--pp 2 --microbatches 8 --schedule dualpipe",
        "--dp 2 --zero 1 --recompute full --ddp-bucket 300",
        "--cp 2 --cp-mode ring --tp 2 --async-tp --sp",
    ],
)
def test_totals_and_communication_are_kept(granularity: str, strategy: str, tmp_path: Path) -> None:
    fine = traces(tmp_path / "op", *strategy.split())
    coarse = traces(tmp_path / "out", *strategy.split(), "--granularity", granularity)
    for ours, theirs in zip(coarse, fine, strict=True):
        for attribute in ("num_ops", "tensor_size"):
            totals = [
                sum(int(str(n.attrs[attribute])) for n in nodes if n.kind == NodeKind.COMP)
                for nodes in (ours, theirs)
            ]
            assert totals[0] == totals[1], attribute
        kept = [[facts(n) for n in nodes if n.kind != NodeKind.COMP] for nodes in (ours, theirs)]
        assert kept[0] == kept[1]
        waits, waited = before(ours), before(theirs)
        assert all(waited[name] <= waits[name] for name in waited)
        kinds = [Counter(n.kind for n in nodes)[NodeKind.COMP] for nodes in (ours, theirs)]
        assert kinds[0] < kinds[1]


def test_a_merged_node_takes_as_long_as_its_parts(tmp_path: Path) -> None:
    """Each part by its own roofline, and the sum rounded once; over sums it would be less."""
    flops, bandwidth = 3e6, 3e6
    rates = ["--peak-tflops", str(flops / 1e12), "--memory-gbps", str(bandwidth / 1e9)]

    def computations(name: str) -> list[TraceNode]:
        nodes = traces(tmp_path / name, "--dp", "2", *rates, "--granularity", name)[0]
        return [n for n in nodes if n.kind == NodeKind.COMP]

    def roofline(nodes: list[TraceNode]) -> float:
        message = [[int(str(n.attrs[a])) for a in ("num_ops", "tensor_size")] for n in nodes]
        return sum(1e6 * max(ops / flops, size / bandwidth) for ops, size in message)

    actual = {granularity: computations(granularity) for granularity in ("op", "block", "layer")}
    expected = roofline(actual["op"])
    for nodes in actual.values():
        assert sum(n.duration_micros for n in nodes) == pytest.approx(expected, abs=len(nodes) / 2)
    assert roofline(actual["layer"]) < 0.95 * expected


def test_a_layer_is_coarser_than_a_block(tmp_path: Path) -> None:
    counts = {
        g: sum(map(len, traces(tmp_path / g, "--dp", "2", "--granularity", g)))
        for g in ("op", "block", "layer")
    }
    assert counts["op"] > counts["block"] > counts["layer"]
