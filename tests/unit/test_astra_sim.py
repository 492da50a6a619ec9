"""Folders for ASTRA-sim: the machine as its network, the script, `stagec simulate`, and tensors.

A stand-in reads what the simulator reads (tests/astra_stub.py). With ASTRA_SIM=BINARY in the
environment the real one is tried too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.formats.astra_sim.log import breakdown, rank_ends, spans_of
from stagec.formats.astra_sim.topology import GIB, dimensions, pod_dimensions
from stagec.formats.chakra.nodes import NodeKind, TraceNode
from stagec.formats.chakra.record_files import read_trace
from stagec.formats.chakra.tensors import tensors_of
from stagec.machines import Machine, load_machine
from stagec.machines.placement import crossed
from stagec.program.nodes import Events, Node, Program
from stagec.support.diagnostics import DiagnosticError
from stagec.time.costs.network import level_between_pods
from tests.exported import WRITTEN, Tried
from tests.exported import tiny as words_of
from tests.support import assert_schema, examples, stagec

ROOT = Path(__file__).parents[2]
COPIES = (NodeKind.MEM_STORE, NodeKind.MEM_LOAD)
MACHINE = ("--machine", "h100-sxm")
SERVED = "L=2,D=64,H=8,G=8,K=8,F=64,V=64"
PODS = (
    *("compile", "llama3-8b", "--set", SERVED),
    *("--serve", "disaggregated", "--prompt", "64", "--batch", "8"),
)
FORMAT = ("--format", "astra-sim", *MACHINE, "--quiet")


def tiny(model: str, *words: str, **more: int) -> tuple[str, ...]:
    """The words that compile a tiny job."""
    return "compile", *words_of(model, *words, **more)


def stub(tmp_path: Path) -> Path:
    """The stand-in as a program."""
    path = tmp_path / "astra"
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m tests.astra_stub "$@"\n'
    )
    path.chmod(0o755)
    return path


def written(tmp_path: Path, *words: str, name: str = "job") -> Path:
    """A job for ASTRA-sim."""
    done = stagec(*words, *FORMAT, "-o", tmp_path / name)
    assert done.code == 0, done.err
    return tmp_path / name


# -- the machine -----------------------------------------------------------------------------------


@examples(60)
@given(mesh=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_every_axis_of_two_ranks_or_more_is_a_dimension(mesh: list[int]) -> None:
    axes = {f"a{i}": n for i, n in enumerate(mesh)}
    machine = load_machine("h100-sxm")
    if prod(mesh) == 1:
        return
    dims = dimensions(axes, machine)
    assert [(d.axis, d.ranks) for d in dims] == [(a, n) for a, n in [*axes.items()][::-1] if n > 1]
    inside = 1
    for dim in dims:
        inside *= dim.ranks
        within = prod(mesh) <= 8 or 8 % inside == 0  # no group is in two nodes
        assert dim.level == ("nvlink" if within else "infiniband")
    assert inside == prod(mesh)


#: Meshes of two pods, from the outside in.
MESHES = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3)


#: Ranks of the dimensions of a network, innermost first, each with the level that it is.
Grid = Sequence[tuple[int, str]]


def level_of(grid: Grid, one: int, other: int) -> str:
    """The level that ASTRA-sim takes between two ranks: of the innermost dimension along which
    they differ."""
    for ranks, level in grid:
        if one % ranks != other % ranks:
            return level
        one, other = one // ranks, other // ranks
    raise AssertionError("a rank sends itself")


def expresses(grid: Grid, pods: Mapping[str, Mapping[str, int]], machine: Machine) -> bool:
    """Whether any two ranks of a group take the level that the pod takes by itself, and
    ranks in the same place of two pods the level between pods."""
    start = 0
    for mesh in pods.values():
        ranks = start + np.arange(prod(mesh.values())).reshape([*mesh.values()])
        for axis, level in crossed(machine, mesh).items():
            groups = np.moveaxis(ranks, [*mesh].index(axis), -1).reshape(-1, mesh[axis])
            steps = [pair for group in groups.tolist() for pair in combinations(group, 2)]
            if level is None or any(level_of(grid, *step) != level.name for step in steps):
                return False
        between = level_between_pods(machine, pods.values()).name
        if start and level_of(grid, 0, start) != between:
            return False
        start += prod(mesh.values())
    return start == prod(ranks for ranks, _ in grid)


@examples(100)
@given(meshes=st.lists(MESHES, min_size=2, max_size=3))
def test_pods_take_the_levels_that_each_takes_alone(meshes: list[list[int]]) -> None:
    """And no grid of nodes of any size does where pods are refused."""
    machine = load_machine("h100-sxm")
    pods = {f"p{i}": {f"a{j}": n for j, n in enumerate(m)} for i, m in enumerate(meshes)}
    total = sum(map(prod, meshes))
    try:
        grid = [(d.ranks, d.level) for d in pod_dimensions(pods, machine)]
    except DiagnosticError:
        nodes = [n for n in range(1, total) if total % n == 0]
        others = [[(n, "nvlink"), (total // n, "infiniband")] for n in nodes]
        assert not any(expresses(each, pods, machine) for each in others)
        return
    assert expresses(grid, pods, machine)


def test_pods_are_one_dimension_of_a_machine_of_one_level() -> None:
    machine = load_machine(str(ROOT / "docs" / "examples" / "astra-sim.toml"))
    (dim,) = pod_dimensions({"main": {"dp": 2, "tp": 4}, "encoder": {"dp": 3}}, machine)
    assert dim.ranks == 11


def test_pods_that_are_no_grid_are_refused(tmp_path: Path) -> None:
    words = (*PODS, "--prefill", "tp=2", "--decode", "tp=4")
    done = stagec(*words, *FORMAT, "-o", tmp_path / "job")
    assert done.code == 1
    assert "pods of 2 and 4 ranks do not form a grid" in done.err
    assert "'decode/tp' has 4 ranks over nvlink, in blocks of 2" in done.err
    assert not (tmp_path / "job").exists()


def test_figures_are_of_a_link(tmp_path: Path) -> None:
    """All of a switch's bandwidth, half of a ring's, a part of a mesh's; two hops by a switch."""
    text = (ROOT / "docs" / "examples" / "astra-sim.toml").read_text()
    for kind, ranks, links, hops, name in (
        ("switch", 4, 1, 2, "Switch"),
        ("fat-tree", 4, 1, 2, "Switch"),
        ("ring", 4, 2, 1, "Ring"),
        ("ring", 2, 1, 2, "Switch"),
        ("mesh", 5, 4, 1, "FullyConnected"),
    ):
        path = tmp_path / "machine.toml"
        path.write_text(text.replace('kind = "switch"', f'kind = "{kind}"'))
        (dim,) = dimensions({"dp": ranks}, load_machine(str(path)))
        assert (dim.kind, dim.bandwidth, dim.latency) == (name, 50 / links, 1000 / hops)
    assert GIB == 1 << 30


def test_files_fit_each_other(tmp_path: Path) -> None:
    folder = written(tmp_path, *tiny("llama3-8b", "--tp", "2", "--pp", "2", "--dp", "2"))
    assert (folder / "network.yml").read_text().splitlines()[1] == "npus_count: [ 2, 2, 2 ]"
    system = json.loads((folder / "system.json").read_text())
    lists = [value for key, value in system.items() if key.endswith("-implementation")]
    assert len(lists) == 4
    assert all(len(value) == 3 for value in lists)
    assert system["preferred-dataset-splits"] == system["active-chunks-per-dimension"] == 1
    logical = json.loads((folder / "logical_topology.json").read_text())
    assert logical == {"logical-dims": ["2", "2", "2"]}
    assert stagec("check", folder).code == 0


@pytest.mark.parametrize(
    ("words", "problem"), [((), "the job has one rank, but ASTRA-sim's network needs two or more")]
)
def test_what_stops_astra_sim_is_refused(
    words: Sequence[str], problem: str, tmp_path: Path
) -> None:
    done = stagec(*tiny("llama3-8b", *words), *FORMAT, "-o", tmp_path / "job")
    assert done.code == 1
    assert problem in done.err
    assert not (tmp_path / "job").exists()


def test_copies_go_over_the_host_link(tmp_path: Path) -> None:
    """Nanoseconds and bytes a nanosecond, both whole, for each rank by itself; without copies there
    is no such memory."""
    words = tiny("llama3-8b", "--dp", "2", "--offload", "activations")
    folder = written(tmp_path, *words, "--memory-nodes")
    host = load_machine("h100-sxm").host
    assert json.loads((folder / "memory.json").read_text()) == {
        "memory-type": "PER_NPU_MEMORY_EXPANSION",
        "remote-mem-latency": host.latency.value * 1e9,
        "remote-mem-bw": host.bandwidth.value / 1e9,
    }
    done = stagec("simulate", folder, "--astra-sim", stub(tmp_path))
    assert done.code == 0, done.err
    copied = [
        n.attrs["tensor_size"] for n in read_trace(folder / "llama3-8b.0.et") if n.kind in COPIES
    ]
    (row,) = (line.split() for line in done.out.splitlines() if "mem_store" in line)
    assert int(row[1]) == len(copied) / 2
    assert row[2] != "0"
    plain = written(tmp_path, *words, name="plain")
    assert json.loads((plain / "memory.json").read_text()) == {"memory-type": "NO_MEMORY_EXPANSION"}


def test_too_many_groups_are_refused(tmp_path: Path) -> None:
    words = tiny("llama3-8b", "--tp", "2", "--dp", "2200", B=2200)
    done = stagec(*words, *FORMAT, "--only-ranks", "0", "-o", tmp_path / "job")
    assert done.code == 1
    assert "2202 communicator groups, and ASTRA-sim's 32-bit message tags hold 2147" in done.err


def test_a_machine_is_needed(tmp_path: Path) -> None:
    words = tiny("llama3-8b", "--dp", "2")
    done = stagec(*words, "--format", "astra-sim", "-o", tmp_path / "job")
    assert "error: the format 'astra-sim' needs a machine" in done.err


def test_an_archive_becomes_the_same_folder(tmp_path: Path) -> None:
    words = tiny("llama3-8b", "--tp", "2", "--pp", "2", "--microbatches", "2")
    folder = written(tmp_path, *words)
    assert stagec(*words, "--archive", tmp_path / "file", "--quiet").code == 0
    made = stagec("materialize", tmp_path / "file", *FORMAT, "-o", tmp_path / "again")
    assert made.code == 0, made.err
    names = sorted(p.name for p in folder.iterdir())
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == names
    for name in {*names} - {"manifest.json", "stagec.json"}:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


# -- running it ------------------------------------------------------------------------------------


def simulated(folder: Path, binary: Path, *more: str) -> dict[str, Any]:
    """What `stagec simulate --json` prints."""
    done = stagec("simulate", folder, "--astra-sim", binary, "--json", *more)
    assert done.code == 0, done.err
    actual: dict[str, Any] = json.loads(done.out)
    assert_schema("simulate", actual)
    return actual


def assert_as_analyzed(tmp_path: Path, words: Sequence[str]) -> None:
    """Calls and bytes of each collective and axis are those of `stagec analyze`, and the parts of
    the step add up."""
    folder = written(tmp_path, *words)
    actual = simulated(folder, stub(tmp_path))
    message = stagec("analyze", *words[1:], "--json")
    about = json.loads(message.out)
    rank = actual["slowest_rank"]
    each = next(c for c in about["classes"] if c["example_rank"] == rank)
    expected: dict[tuple[str, str], Counter[str]] = {}
    for row in each["collectives"]:
        row_bytes = row["bytes"]
        if row["op"] == "all_gather":
            row_bytes //= row["group_size"]
        key = row["op"], "+".join(row["over"])
        expected.setdefault(key, Counter()).update(calls=row["count"], bytes=row_bytes)
    for row in each["p2p"]:
        expected.setdefault((row["dir"], ""), Counter()).update(
            calls=row["count"], bytes=row["bytes"]
        )
    rows = actual["communication"]
    ours = {(r["collective"], r["over"]): (r["calls"], r["bytes"]) for r in rows}
    assert ours == {key: (v["calls"], v["bytes"]) for key, v in expected.items()}
    nanoseconds = sum(round(1e9 * r["exposed_seconds"]) for r in rows)
    parts = round(1e9 * actual["computation_seconds"]) + round(1e9 * actual["idle_seconds"])
    assert nanoseconds + parts == round(1e9 * actual["step_seconds"])
    assert round(1e9 * actual["exposed_seconds"]) == round(1e9 * actual["step_seconds"]) - round(
        1e9 * actual["computation_seconds"]
    )
    rate = actual["step_seconds"] * actual["ranks"] * 989e12
    assert actual["mfu"] == pytest.approx(about["model_flops"] / rate)


@pytest.mark.parametrize(
    ("prefill", "decode", "count"), [("tp=4", "dp=2,tp=2", "4, 2"), ("tp=8", "tp=8,dp=2", "8, 3")]
)
def test_pods_are_one_job(prefill: str, decode: str, count: str, tmp_path: Path) -> None:
    """Every rank ends, and calls and bytes of a rank are those of its pod."""
    words = (*PODS, "--prefill", prefill, "--decode", decode)
    folder = written(tmp_path, *words)
    assert stagec("check", folder).code == 0
    network = (folder / "network.yml").read_text().splitlines()
    assert network[1] == f"npus_count: [ {count} ]"
    assert "over nvlink, " in network[0]
    assert network[0].endswith(f"pods {count[-1]} over infiniband")
    actual = simulated(folder, stub(tmp_path))
    assert actual["ranks"] == prod(int(n) for n in count.split(", "))
    about = json.loads(stagec("analyze", *words[1:], "--json").out)
    first = about["pods"]["prefill"]["ranks"]
    pod = "prefill" if actual["slowest_rank"] < first else "decode"
    (each,) = about["pods"][pod]["classes"]
    expected = {
        (row["op"], f"{pod}/{'+'.join(row['over'])}"): [row["count"], row["bytes"]]
        for row in each["collectives"]
        if row["op"] == "all_reduce"
    }
    ours = {
        (row["collective"], row["over"]): [row["calls"], row["bytes"]]
        for row in actual["communication"]
        if row["collective"] == "all_reduce"
    }
    assert ours == expected
    assert {r["collective"] for r in actual["communication"]} & {"send", "recv"}
    assert stagec(*words, "--archive", tmp_path / "file", "--quiet").code == 0
    made = stagec("materialize", tmp_path / "file", *FORMAT, "-o", tmp_path / "again")
    assert made.code == 0, made.err
    for name in ("network.yml", "llama3-8b.0.et", "stagec.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


@WRITTEN
def test_calls_and_bytes_are_those_of_analyze(tried_job: Tried, tmp_path: Path) -> None:
    assert_as_analyzed(tmp_path, ("compile", *tried_job.words))


def test_ranks_that_do_not_end_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, binary = written(tmp_path, *tiny("llama3-8b", "--dp", "2")), stub(tmp_path)
    monkeypatch.setenv("STUB", "stuck")
    done = stagec("simulate", folder, "--astra-sim", binary)
    assert done.code == 1
    assert "error: ASTRA-sim exits with 0 before 1 of 2 ranks end" in done.err
    monkeypatch.setenv("STUB", "bad")
    done = stagec("simulate", folder, "--astra-sim", binary)
    assert "ranks end: [critical] For rank 0 ET node 3" in done.err


def test_what_is_no_job_is_refused(tmp_path: Path) -> None:
    folder, binary = written(tmp_path, *tiny("llama3-8b", "--dp", "2")), stub(tmp_path)
    empty = stagec("simulate", tmp_path, "--astra-sim", binary)
    assert "has no readable 'stagec.json'" in empty.err
    no = stagec("simulate", folder, "--astra-sim", tmp_path / "none")
    assert "is not an executable program" in no.err
    other = stagec("simulate", folder, "--astra-sim", "/bin/true")
    assert (other.code, "is not ASTRA-sim: it prints nothing and exits with 0" in other.err) == (
        1,
        True,
    )
    (folder / "llama3-8b.1.et").unlink()
    gone = stagec("simulate", folder, "--astra-sim", binary)
    assert "ASTRA-sim needs the traces of all 2 ranks" in gone.err
    assert {empty.code, no.code, gone.code} == {1}


def test_totals_need_no_log_of_nodes(tmp_path: Path) -> None:
    folder, binary = written(tmp_path, *tiny("llama3-8b", "--dp", "2")), stub(tmp_path)
    every, totals = simulated(folder, binary), simulated(folder, binary, "--totals")
    assert totals == {key: every[key] for key in totals}
    assert "communication" not in totals


def test_totals_ask_for_no_lines_of_nodes(tmp_path: Path) -> None:
    """ASTRA-sim logs every node unless it is configured otherwise."""
    folder, binary = written(tmp_path, *tiny("llama3-8b", "--dp", "2")), stub(tmp_path)
    seen, asks = tmp_path / "seen.toml", tmp_path / "asks"
    asks.write_text(
        f'#!/bin/sh\nfor w; do case "$w" in --logging-configuration=*) cp "${{w#*=}}" "{seen}";; '
        f'esac; done\nexec "{binary}" "$@"\n'
    )
    asks.chmod(0o755)
    levels: list[str] = []
    for more in ((), ("--totals",)):
        simulated(folder, asks, *more)
        logger = tomllib.loads(seen.read_text())["logger"]
        levels += [each["level"] for each in logger if each["name"] == "workload"]
    assert levels == ["debug", "info"]


def test_the_script_counts_the_ranks_that_end(tmp_path: Path) -> None:
    folder, binary = written(tmp_path, *tiny("llama3-8b", "--dp", "2")), stub(tmp_path)

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(folder / "run.sh"), str(binary)],
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **more},
        )

    fine, stuck = run(), run(STUB="stuck")
    assert fine.returncode == 0, fine.stderr
    assert fine.stdout.startswith("2 of 2 ranks ended, the last after ")
    assert stuck.returncode == 1
    assert "error: 1 ranks did not end; ASTRA-sim's exit code was 0" in stuck.stderr


def node(number: int, kind: NodeKind, **attrs: int | str) -> TraceNode:
    """A node of a trace."""
    return TraceNode(number, "n", kind, attrs=attrs)


def test_each_moment_belongs_to_one_thing() -> None:
    """The example of the module: twelve nanoseconds."""
    nodes = [
        node(1, NodeKind.COMP),
        node(2, NodeKind.COLL, comm_type=0, comm_size=8, pg_name="3"),
        node(3, NodeKind.RECV, comm_size=4),
        node(4, NodeKind.RECV, comm_size=4),
        node(5, NodeKind.COMP),
    ]
    spans = {1: (0, 4), 2: (2, 6), 3: (0, 5), 4: (6, 7), 5: (8, 12)}
    actual = breakdown(nodes, spans, {3: "tp"}, 12)
    assert actual.computation == 8
    assert [(r.kind, r.over, r.calls, r.busy, r.exposed) for r in actual.exposed] == [
        ("all_reduce", "tp", 1, 4, 2),
        ("recv", "", 2, 6, 1),
    ]
    assert actual.idle == 1


def test_lines_of_other_ranks_are_left_out() -> None:
    lines = [
        "x issue,sys->id=1, tick=5, node->id=2, node->name=a,sys->id=12, node->type=4",
        "x issue,sys->id=12, tick=7, node->id=2, node->name=b, node->type=4",
        "x callback,sys->id=1, tick=9, node->id=2, node->name=a, node->type=4",
    ]
    assert spans_of(lines, 1) == {2: (5, 9)}
    with pytest.raises(ValueError, match="ends before it starts"):
        spans_of(lines[2:], 1)
    assert rank_ends("sys[3] finished, 7 cycles, exposed communication 2 cycles.")[3].end == 7


# -- names and tensors -----------------------------------------------------------------------------


def test_names_say_the_type_of_the_record(tmp_path: Path) -> None:
    words = tiny("llama3-8b", "--tp", "2", "--pp", "2", "--names", "chakra")
    folder = written(tmp_path, *words)
    kinds = {NodeKind.COMP: "COMP", NodeKind.COLL: "COMM_COLL"}
    for each in read_trace(folder / "llama3-8b.0.et"):
        kind = NodeKind(each.kind)
        assert each.name.startswith(f"{kinds.get(kind, f'COMM_{kind.name}')}_NODE_")
    names = {n.name for n in read_trace(folder / "llama3-8b.0.et")}
    assert "COMP_NODE_forward/mb0/x" in names


def tensors(each: TraceNode, name: str) -> list[tuple[str, int]]:
    """The tensors of a node: names and bytes in turn."""
    texts = each.attrs[name]
    assert isinstance(texts, tuple)
    words = [str(text) for text in texts]
    return [(words[i], int(words[i + 1])) for i in range(0, len(words), 2)]


def tracked_peak(nodes: Sequence[TraceNode]) -> int:
    """ASTRA-sim's tracker of local memory, node after node: a tensor counts from the start of the
    node that writes it to the end of the last one that reads it; one that is read before it is
    written is there from the start."""
    writer: dict[str, int] = {}
    last: dict[str, int] = {}
    size: dict[str, int] = {}
    for each in nodes:
        for name, number in tensors(each, "inputs"):
            assert size.setdefault(name, number) == number
            last[name] = each.id
        for name, number in tensors(each, "outputs"):
            assert name not in size, "each name is written once, and not read before"
            size[name], writer[name] = number, each.id
    kept = sum(s for name, s in size.items() if name not in writer)
    most = kept
    for each in nodes:
        kept += sum(size[n] for n, _ in tensors(each, "outputs"))
        most = max(most, kept)
        kept -= sum(size[n] for n, _ in tensors(each, "inputs") if last[n] == each.id)
    return most


@WRITTEN
def test_the_peak_of_tensors_is_that_of_the_plan(tried_job: Tried, tmp_path: Path) -> None:
    folder = written(tmp_path, "compile", *tried_job.words, "--tensor-names")
    manifest = json.loads((folder / "manifest.json").read_text())
    for each in manifest["classes"]:
        nodes = [*read_trace(folder / f"{tried_job.model}.{each['example_rank']}.et")]
        assert tracked_peak(nodes) == each["memory"]["peak_bytes"]
        before: dict[int, set[int]] = {}
        writer = {n: e.id for e in nodes for n, _ in tensors(e, "outputs")}
        for one in nodes:
            direct = {*one.data_deps, *one.ctrl_deps}
            before[one.id] = direct.union(*(before[d] for d in direct))
            for name, _ in tensors(one, "inputs"):
                assert name not in writer or writer[name] in before[one.id]


def program(edges: Sequence[Sequence[int]], alloc: Sequence[int], free: Sequence[int]) -> Program:
    """A program of computations with these dependencies and memory events."""
    starts = np.cumsum([0, *map(len, edges)], dtype=np.int64)
    zeros = np.zeros(len(edges), dtype=np.int64)
    events = Events(10, np.array(alloc, dtype=np.int64), np.array(free, dtype=np.int64))
    flat = np.array([e for each in edges for e in each], dtype=np.int64)
    node = Node("comp", "x", "forward", 1)
    return Program("p", [node], zeros, zeros, zeros, starts, starts[1:], flat, events)


def test_a_tensor_is_read_by_nodes_that_depend_on_its_writer_last_written_first() -> None:
    """Node 3 gives 6 back: 2 of node 2, and 4 of node 1, of which 1 stays."""
    actual = tensors_of(program([[], [1], [2]], [5, 2, 0], [0, 0, 6]))
    assert actual.outputs[:2] == [[("x#1.0", 4), ("x#1.1", 1)], [("x#2.0", 2)]]
    assert actual.inputs == [[("static", 10)], [], [("x#2.0", 2), ("x#1.0", 4), ("static", 10)]]
    assert actual.peak == 17


def test_bytes_wait_for_a_node_that_depends_on_their_writer() -> None:
    """Node 2 gives back what node 1 has made, and does not depend on it; node 3 does."""
    actual = tensors_of(program([[], [], [1]], [4, 1, 0], [0, 4, 0]))
    assert actual.inputs[1:] == [[], [("x#1.0", 4), ("static", 10)]]
    assert actual.outputs == [[("x#1.0", 4)], [("x#2.0", 1)], []]


# -- the real one ----------------------------------------------------------------------------------


@pytest.mark.skipif("ASTRA_SIM" not in os.environ, reason="ASTRA_SIM=BINARY runs the simulator")
def test_the_simulator_agrees_with_stagec_time_and_with_the_plan(tmp_path: Path) -> None:
    machine = str(ROOT / "docs" / "examples" / "astra-sim.toml")
    job = "llama3-8b", "--set", "L=4,S=2048", "--dp", "2"
    words = "compile", *job, "--format", "astra-sim", "--machine", machine, "--tensor-names"
    assert stagec(*words, "-o", tmp_path / "job", "--quiet").code == 0
    actual = simulated(tmp_path / "job", Path(os.environ["ASTRA_SIM"]))
    message = json.loads(stagec("time", *job, "--machine", machine, "--json", "--no-levers").out)
    assert actual["step_seconds"] == pytest.approx(message["step_seconds"], rel=1e-4)
    manifest = json.loads((tmp_path / "job" / "manifest.json").read_text())
    assert actual["peak_bytes"] == manifest["classes"][0]["memory"]["peak_bytes"]
