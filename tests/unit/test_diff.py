"""`stagec diff`: every change of a job is found and named, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest

from stagec.formats.chakra.nodes import NodeKind, TraceNode, encode_metadata, encode_node
from stagec.formats.chakra.record_files import read_trace
from tests.support import LONG, stagec

WORDS = ("llama3-8b", "--tp", "2", "--pp", "2", "--dp", "2", "--set", "L=2", "--microbatches", "2")
NAME = "llama3-8b"
Nodes = list[TraceNode]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    assert stagec("compile", *WORDS, "-o", folder / "job", "--quiet").code == 0
    assert stagec("compile", *WORDS, "--archive", folder / "job.stagec", "--quiet").code == 0
    return folder / "job"


def rewritten(job: Path, to: Path, rank: int, change: Callable[[Nodes], Nodes]) -> Path:
    """The job with the nodes of one rank changed."""
    shutil.copytree(job, to)
    path = to / f"{NAME}.{rank}.et"
    nodes = change(list(read_trace(path)))
    path.write_bytes(encode_metadata("0.0.4") + b"".join(map(encode_node, nodes)))
    return to


def differences(a: Path, b: Path) -> list[dict[str, Any]]:
    ran = stagec("diff", a, b, "--json")
    actual = json.loads(ran.out)
    assert actual["same"] == (ran.code == 0)
    rows: list[dict[str, Any]] = actual["differences"]
    return rows


def test_a_job_is_what_it_is(job: Path, tmp_path: Path) -> None:
    """As folder, as archive, and with groups that are numbered otherwise."""
    assert stagec("diff", job, job).code == 0
    assert stagec("diff", job, job.with_suffix(".stagec")).code == 0
    table = json.loads((job / f"{NAME}.json").read_text())
    other = {str(1000 - int(n)): ranks for n, ranks in table.items()}

    def renumbered(nodes: Nodes) -> Nodes:
        return [
            replace(n, attrs={**n.attrs, "pg_name": str(1000 - int(str(n.attrs["pg_name"])))})
            if "pg_name" in n.attrs
            else n
            for n in nodes
        ]

    moved = tmp_path / "moved"
    shutil.copytree(job, moved)
    for rank in range(8):
        shutil.rmtree(tmp_path / "one", ignore_errors=True)
        changed = rewritten(job, tmp_path / "one", rank, renumbered)
        shutil.copy(changed / f"{NAME}.{rank}.et", moved)
    (moved / f"{NAME}.json").write_text(json.dumps(other))
    ran = stagec("diff", job, moved)
    assert ran.code == 0, ran.out


def first(nodes: Nodes, kind: NodeKind) -> int:
    return next(i for i, n in enumerate(nodes) if n.kind == kind)


def with_attr(kind: NodeKind, name: str, by: int) -> Callable[[Nodes], Nodes]:
    def change(nodes: Nodes) -> Nodes:
        at = first(nodes, kind)
        node = nodes[at]
        changed = replace(node, attrs={**node.attrs, name: int(str(node.attrs[name])) + by})
        return [*nodes[:at], changed, *nodes[at + 1 :]]

    return change


def dropped(nodes: Nodes) -> Nodes:
    return nodes[:-1]


def swapped(nodes: Nodes) -> Nodes:
    return [*nodes[:-2], nodes[-1], nodes[-2]]


def unlinked(nodes: Nodes) -> Nodes:
    at = next(i for i, n in enumerate(nodes) if n.data_deps)
    return [*nodes[:at], replace(nodes[at], data_deps=()), *nodes[at + 1 :]]


def slower(nodes: Nodes) -> Nodes:
    return [replace(nodes[0], duration_micros=9), *nodes[1:]]


def other_group(nodes: Nodes) -> Nodes:
    at = first(nodes, NodeKind.COLL)
    groups = sorted({str(n.attrs["pg_name"]) for n in nodes if "pg_name" in n.attrs})
    other = next(g for g in groups if g != nodes[at].attrs["pg_name"])
    changed = replace(nodes[at], attrs={**nodes[at].attrs, "pg_name": other})
    return [*nodes[:at], changed, *nodes[at + 1 :]]


@pytest.mark.parametrize(
    ("change", "kinds", "expected"),
    [
        (with_attr(NodeKind.COMP, "num_ops", 5), ["different"], "num_ops"),
        (with_attr(NodeKind.COLL, "comm_size", 64), ["different"], "comm_size"),
        (with_attr(NodeKind.SEND, "comm_tag", 1), ["different"], "comm_tag"),
        (with_attr(NodeKind.SEND, "comm_dst", 1), ["other ranks"], "with rank"),
        (other_group, ["other ranks"], "with ranks"),
        (slower, ["different"], "duration_micros 0 -> 9"),
        (dropped, ["only in A"], "comp"),
        (swapped, ["moved"], "after"),
        (unlinked, ["other dependencies"], "in A only (data)"),
    ],
)
def test_each_change_is_reported_as_what_it_is(
    change: Callable[[Nodes], Nodes], kinds: Sequence[str], expected: str, job: Path, tmp_path: Path
) -> None:
    changed = rewritten(job, tmp_path / "b", 3, change)
    actual = differences(job, changed)
    assert [(row["kind"], row["ranks"], row["count"]) for row in actual] == [
        (kind, [3], 1) for kind in kinds
    ]
    assert expected in actual[0]["examples"][0]
    back = {"only in A": "only in B", "only in B": "only in A"}
    assert [row["kind"] for row in differences(changed, job)] == [back.get(k, k) for k in kinds]


def test_sums_are_those_of_analyze(job: Path) -> None:
    """FLOPs of all ranks, and bytes by kind of collective."""
    report = json.loads(stagec("analyze", *WORDS, "--json").out)
    actual = json.loads(stagec("diff", job, job, "--json").out)
    flops = sum(
        each["count"] * part
        for each in report["classes"]
        for part in each["flops"].values()
        if isinstance(part, int)
    )
    comp = [row for row in actual["sums"] if row["kind"] == "comp"]
    # a node without FLOPs is written with one: consumers stall on none
    assert flops <= sum(row["a"]["flops"] for row in comp) <= flops + actual["nodes"][0]


def test_another_strategy_is_reported_by_sums(job: Path, tmp_path: Path) -> None:
    assert stagec("compile", *WORDS, "--sp", "-o", tmp_path / "sp", "--quiet").code == 0
    ran = stagec("diff", job, tmp_path / "sp")
    assert ran.code == 1
    assert "forward    reduce_scatter   2 ranks, step 1" in ran.out
    assert "nodes only in A: forward/layers/gqa/o_r x" in ran.out
    assert "rank 0 (likewise 3 more)" in ran.out


def test_two_traces_alone(job: Path) -> None:
    """Ranks of one class differ in their groups only."""
    ran = stagec("diff", job / f"{NAME}.0.et", job / f"{NAME}.1.et", "--json")
    assert {row["kind"] for row in json.loads(ran.out)["differences"]} == {"other ranks"}


@LONG
def test_ten_thousand_nodes_are_reported_in_a_page(tmp_path: Path) -> None:
    def written(name: str, nodes: Nodes) -> Path:
        path = tmp_path / name
        path.write_bytes(encode_metadata("") + b"".join(map(encode_node, nodes)))
        return path

    attrs = {"is_cpu_op": False, "num_ops": 7, "tensor_size": 3}
    nodes = [
        TraceNode(
            i + 1, f"forward/mb{i // 100}/L{i % 10}/op{i % 100}", 4, (i,) if i else (), (), attrs
        )
        for i in range(10_000)
    ]
    a = written("a", nodes)
    b = written("b", [replace(n, attrs={**attrs, "num_ops": 8}) for n in nodes[:5_000:-1]])
    ran = stagec("diff", a, b)
    assert ran.code == 1
    assert len(ran.out.splitlines()) < 40
    assert "5,001 nodes only in A" in ran.out
    assert "4,998 nodes in another order" in ran.out


@pytest.mark.parametrize("content", [b"", b"{", b"\x1f\x8b", b"stagec archive\n\0", b"abc"])
def test_what_is_no_trace(content: bytes, job: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.et"
    path.write_bytes(content)
    ran = stagec("diff", path, job)
    assert (ran.code, "error: " in ran.err, ran.out) == (1, True, ""), ran.err
    ran = stagec("diff", tmp_path / "none", job)
    assert (ran.code, "no file or folder '" in ran.err) == (1, True)
    ran = stagec("diff", job, tmp_path)
    assert ran.code == 1


def test_a_page_has_the_nodes_and_the_sums_that_differ(job: Path, tmp_path: Path) -> None:
    page, other = tmp_path / "diff.html", rewritten(job, tmp_path / "one", 3, lambda n: n[:-1])
    ran = stagec("diff", job, other, "--html", str(page))
    text = page.read_text("utf-8")
    (actual,) = differences(job, other)
    assert ran.code == 1
    assert f"<code>stagec diff {job} {other}</code>" in text
    assert f"<td>{actual['kind']}</td>" in text
    assert all(escape(example) in text for example in actual["examples"])
    assert text.count('data-name="sums"') == 1
