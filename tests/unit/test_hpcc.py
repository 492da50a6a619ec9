"""HPCC's flow lists: read by the rules of its reader, and summed up."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from stagec.formats.hpcc import HpccFormat, flows_of
from stagec.formats.messages import ALGORITHMS, KINDS
from tests.exported import JOBS, Tried, made, tried, written
from tests.support import LLAMA, MIXTRAL, crossed, stagec


class Flow(NamedTuple):
    """A line of the list."""

    source: int
    destination: int
    priority: int
    port: int
    size: int
    start: float


def read(path: Path) -> list[Flow]:
    """The flows, of which the first line has the number."""
    first, *lines = path.read_text().splitlines()
    rows = [line.split() for line in lines]
    whole = [[int(word) for word in row[:5]] for row in rows]
    actual = [
        Flow(w[0], w[1], w[2], w[3], w[4], float(r[5])) for w, r in zip(whole, rows, strict=True)
    ]
    assert int(first) == len(actual)
    assert [f.start for f in actual] == sorted(f.start for f in actual)
    return actual


@tried(Tried(LLAMA, "tp-sp-dp"), Tried(MIXTRAL, "ep-pp"))
def test_sums_are_those_of_analyze(tried_job: Tried, tmp_path: Path) -> None:
    """Bytes of one collective in all of its groups; and of all of a rank, over each axis."""
    job, about = made(tried_job)
    program = job.program(0)
    nodes = [n for n in program.nodes if n.is_collective]
    algorithm = ALGORITHMS[JOBS.index(tried_job) % len(ALGORITHMS)]
    if not nodes:
        return
    largest = max(nodes, key=lambda n: n.size)
    flows = read(written(replace(job, format=HpccFormat()), tmp_path / "job") / "job.flow.txt")
    n = largest.group.size(job.mesh)
    rounds = 2 if largest.kind == "all_reduce" else 1
    groups = {tuple(row) for row in job.groups.members[largest.group].tolist()}
    used = {g for g in groups if {f.source for f in flows} & {*g}}
    assert sum(f.size for f in flows) == len(used) * rounds * (n - 1) * max(largest.size, n)
    assert all(any({f.source, f.destination} <= {*g} for g in used) for f in flows)
    assert {f.source for f in flows} >= {*job.members[0].tolist()}
    actual: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        sent = flows_of(node.kind, node.size, node.group.size(job.mesh), algorithm).total()
        actual[node.kind, "+".join(node.group.words)] += sent
    expected: Counter[tuple[str, str]] = Counter()
    for row in about["classes"][0]["collectives"]:
        rounds = 2 if row["op"] == "all_reduce" else 1
        group = rounds * (row["group_size"] - 1) * row["bytes"]
        expected[row["op"], "+".join(row["over"])] += group
    assert actual == expected


@crossed(kind=KINDS, algorithm=ALGORITHMS)
def test_flows_of_four_members(kind: str, algorithm: str) -> None:
    """A ring to the next one, a binary tree both ways, or all pairs."""
    actual = flows_of(kind, 400, 4, algorithm)
    rounds = 2 if kind == "all_reduce" else 1
    ring = {(i, (i + 1) % 4): 300 * rounds for i in range(4)}
    pairs = {(i, j): 100 * rounds for i in range(4) for j in range(4) if i != j}
    tree = {(i, j): 400 for a, b in ((0, 1), (0, 2), (1, 3)) for i, j in ((a, b), (b, a))}
    if kind == "all_to_all" or algorithm == "pairwise":
        assert actual == pairs
    else:
        assert actual == (tree if algorithm == "tree" and kind == "all_reduce" else ring)


def test_a_collective_is_chosen_by_name(tmp_path: Path) -> None:
    """In a pipeline it is in the stages that have one of that name; all groups of these start."""
    words = ("compile", LLAMA, "--tp", "2", "--pp", "2", "--microbatches", "2", "--set", "L=2")
    for name, ranks in (
        ("forward/mb1/L0/layers/gqa/o_r", {0, 1, 2, 3}),
        ("forward/mb1/x_r", {0, 1}),
    ):
        folder = tmp_path / name.replace("/", "_")
        chosen = f"hpcc{{node={name},start=2.5}}"
        done = stagec(*words, "--format", chosen, "-o", folder)
        assert done.code == 0, done.err
        assert f"remark: hpcc: all but one collective ({name})" in done.err
        flows = read(folder / "llama3-8b.flow.txt")
        assert {f.source for f in flows} == ranks
        assert {f.start for f in flows} == {2.5}


PODS = (
    "--serve",
    "disaggregated",
    "--prompt",
    "64",
    "--batch",
    "4",
    "--prefill",
    "tp=2",
    "--decode",
    "tp=4,dp=2",
)


@pytest.mark.parametrize(
    ("option", "pod", "ranks", "each"),
    [("", "prefill", [0, 2], 2), ("{pod=decode}", "decode", [2, 10], 4)],
)
def test_a_collective_of_a_pod(
    option: str, pod: str, ranks: list[int], each: int, tmp_path: Path
) -> None:
    """Ranks of pods follow each other; in all groups of the pod go the bytes that its counts say,
    and an archive has the same list."""
    words = LLAMA, *PODS, "--set", "L=2"
    done = stagec("compile", *words, "--format", f"hpcc{option}", "-o", tmp_path / "job")
    assert done.code == 0, done.err
    flows = read(tmp_path / "job" / "llama3-8b.flow.txt")
    assert {f.source for f in flows} == {f.destination for f in flows} == {*range(*ranks)}
    assert all((f.source - ranks[0]) // each == (f.destination - ranks[0]) // each for f in flows)
    actual = json.loads(stagec("analyze", *words, "--json").out)["pods"][pod]["classes"]
    (one,) = actual
    rows = [r for r in one["collectives"] if r["group_size"] == each]
    largest = max(rows, key=lambda r: r["bytes"] / r["count"])
    rounds = 2 if largest["op"] == "all_reduce" else 1
    size = largest["bytes"] // largest["count"]
    groups = (ranks[1] - ranks[0]) // each
    assert sum(f.size for f in flows) == groups * rounds * (each - 1) * size
    assert stagec("compile", *words, "--archive", tmp_path / "file", "--quiet").code == 0
    again = "materialize", tmp_path / "file", "--format", f"hpcc{option}", "-o", tmp_path / "again"
    assert stagec(*again).code == 0
    name = "llama3-8b.flow.txt"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "job" / name).read_bytes()


@pytest.mark.parametrize(
    ("words", "format_", "problem"),
    [
        (("--tp", "2"), "hpcc{node=x}", "no collective 'x' in the job"),
        (("--tp", "2"), "hpcc{node=forward/x}", "did you mean 'forward/x_r'?"),
        (("--tp", "2"), "hpcc{collectives=star}", "expects ring, tree, pairwise, found 'star'"),
        (("--tp", "2"), "hpcc{start=-1}", "expects 0 or more seconds, found -1"),
        (("--tp", "2"), "hpcc{start=nan}", "expects 0 or more seconds, found nan"),
        (("--tp", "2", "--names", "none"), "hpcc", "the nodes of this job have no names"),
        (PODS, "hpcc{pod=decoder}", "no pod 'decoder' in the job"),
        (PODS, "hpcc{pod=decoder}", "did you mean 'decode'?"),
        (("--tp", "2"), "hpcc{pod=main}", "drop pod=NAME, which is for jobs of several pods"),
        (("--pp", "1"), "hpcc", "has no collectives, and the format 'hpcc' writes one"),
    ],
)
def test_what_is_not_there_is_refused(
    words: tuple[str, ...], format_: str, problem: str, tmp_path: Path
) -> None:
    done = stagec(
        "compile", LLAMA, *words, "--set", "L=1", "--format", format_, "-o", tmp_path / "j"
    )
    assert done.code == 1
    assert problem in done.err
    assert not (tmp_path / "j").exists()
