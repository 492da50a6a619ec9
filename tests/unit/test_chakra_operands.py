"""Operands in Chakra traces (`chakra{io=yes}`): their bytes are those that the node moves, and
nothing else of the trace changes."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from stagec.formats.chakra.nodes import CollKind, NodeKind, NodeOperands, TraceNode, decode_node
from stagec.formats.chakra.record_files import read_records
from tests.support import stagec

_SIZES = ("--set", "L=2,D=64,H=4,G=2,K=16,F=128,V=256,S=32,B=8")
_BYTES = {"c10::BFloat16": 2, "float": 4, "int": 4, "bool": 1}


def nodes_of(folder: Path, *words: str) -> list[TraceNode]:
    made = stagec("compile", "llama3-8b", *_SIZES, *words, "-o", folder, "--quiet")
    assert made.code == 0, made.err
    path = folder / "llama3-8b.0.et"
    return [decode_node(path, at, record) for at, record in read_records(path)]


def bytes_of(side: NodeOperands | None) -> int:
    assert side is not None
    types = [t.removeprefix("Tensor(").removesuffix(")") for t in literal_eval(side.types)]
    shapes = literal_eval(side.shapes)
    return sum(prod(s) * _BYTES[t] for s, t in zip(shapes, types, strict=True))


@pytest.mark.parametrize(
    "words",
    [
        ("--tp", "2", "--dp", "2", "--sp", "--zero", "3"),
        ("--pp", "2", "--dp", "2", "--microbatches", "2", "--bucket", "4096"),
    ],
)
def test_operands_have_the_bytes_that_nodes_move(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Collectives and messages say their bytes; an addition reads its operands and writes its
    result. The trace is otherwise the one without."""
    plain = nodes_of(tmp_path / "plain", *words)
    seen: set[int | CollKind] = set()
    for node, without in zip(
        nodes_of(tmp_path / "io", *words, "--format", "chakra{io=yes}"), plain, strict=True
    ):
        given, made = node.inputs, node.outputs
        size = node.attrs.get("comm_size")
        if node.kind == NodeKind.COLL:
            assert bytes_of(given) == size, node
            seen.add(CollKind(int(str(node.attrs["comm_type"]))))
        elif node.kind in (NodeKind.SEND, NodeKind.RECV):
            assert bytes_of(given if node.kind == NodeKind.SEND else made) == size, node
            seen.add(node.kind)
        elif node.name.endswith("/r1"):
            assert bytes_of(given) + bytes_of(made) == node.attrs["tensor_size"], node
            seen.add(node.kind)
        attrs = {n: v for n, v in node.attrs.items() if n not in ("stream", "dtype")}
        types = {n: t for n, t in node.attr_types.items() if n in attrs}
        bare = replace(node, inputs=None, outputs=None, attrs=attrs, attr_types=types)
        assert bare == without
        assert (node.attrs["stream"] == 0) == (node.kind == NodeKind.COMP)
    wanted: set[int | CollKind] = {NodeKind.COMP, CollKind.ALL_REDUCE}
    wanted |= (
        {NodeKind.SEND, NodeKind.RECV}
        if "--pp" in words
        else {CollKind.ALL_GATHER, CollKind.REDUCE_SCATTER}
    )
    assert seen >= wanted


def test_a_kernel_of_several_ops_reads_and_leaves_what_is_outside(tmp_path: Path) -> None:
    """The sum that the norm takes is kept for later, what lies between them is not."""
    fused = nodes_of(tmp_path, "--fusion", "elementwise", "--format", "chakra{io=yes}")
    norm = next(n for n in fused if n.name == "forward/L0/layers/n2")
    assert norm.inputs is not None
    assert norm.outputs is not None
    assert literal_eval(norm.inputs.shapes) == [[8, 32, 64], [8, 32, 64], [64]]
    assert literal_eval(norm.outputs.shapes) == [[8, 32, 64], [8, 32, 64]]


def test_an_archive_has_no_operands(tmp_path: Path) -> None:
    archive = tmp_path / "job.stga"
    made = stagec("compile", "llama3-8b", *_SIZES, "--archive", archive, "--quiet")
    assert made.code == 0, made.err
    out = stagec("materialize", archive, "--format", "chakra{io}", "-o", tmp_path / "out")
    assert out.code == 1
    assert "archives and traces that were read contain no operands" in out.err
