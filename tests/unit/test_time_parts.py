"""The time of a step of several parts: the replay of all pods together against the clock node by
node, and what it says of waiting for each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from graphlib import CycleError
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.ir.expr import evaluate
from stagec.jobs.builder import JobBuilder
from stagec.jobs.pods import Pods
from stagec.jobs.request.options import JobOptions
from stagec.machines import load_machine
from stagec.program.groups import Groups, crosses_pods, neighbours
from stagec.program.nodes import Ints, Program
from stagec.support.diagnostics import DiagnosticError
from stagec.time.clock.definition import RankWork, clock
from stagec.time.clock.times import ClockedStep
from stagec.time.path import critical_path
from stagec.time.pods_step import IssuedPods
from stagec.time.step import Issued, step_time
from tests.drafts import step_of
from tests.oracle.test_parts import ENDS, path
from tests.parts import part_text
from tests.support import EXHAUSTIVE, LLAMA, LONG, stagec, tiny_options
from tests.unit.test_step_time import costs_of, heard

#: What ASTRA-sim assumes: one stream for all collectives and sends.
ASTRA_SIM = Path(__file__).parents[2] / "docs" / "examples" / "astra-sim.toml"
Times = dict[tuple[int, int], tuple[int, int]]
#: Strategies of the parts and of main: what meets one rank, and what meets several.
CASES = (
    ("whisper", "dp=4", {"dp": 2, "tp": 2, "microbatches": 2}),
    ("t5", "dp=2,zero=3", {"dp": 2, "tp": 2, "microbatches": 2}),
    ("clip", "dp=2", {"dp": 4}),
    ("whisper", "tp=4,sp", {"dp": 4, "zero": 3, "microbatches": 2}),
    ("qwen2_5_vl", "", {"tp": 2, "sp": True, "microbatches": 4}),
    ("whisper", "dp=2", {"tp": 4, "serve": "prefill", "prompt": 8, "microbatches": 2}),
    ("whisper", "dp=2", {"pp": 2, "tp": 2, "microbatches": 4}),
    ("whisper", "pp=2,schedule=gpipe", {"pp": 2, "microbatches": 4, "schedule": "zb-h1"}),
    ("qwen2_5_vl", "dp=2", {"pp": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2}),
    (LLAMA, "tp=2", {"dp": 2, "tp": 2, "microbatches": 2}),
    (LLAMA, "dp=2", {"pp": 2, "microbatches": 2}),
)


def issued_pods(name: str, part: str, options: Mapping[str, Any]) -> IssuedPods:
    """What the pods of a job issue: of a model with parts, or that verifies what a draft model
    makes."""
    if name not in ENDS:
        pods = Pods.of(
            step_of(tiny_options(name, **options), tiny_options(name), part, 3, 5)
        ).lower()
        return IssuedPods(
            {p: Issued.of(m) for p, m in pods.modules.items()}, pods.peers_in_other_pod
        )
    parts = tuple(part_text(f"{end}: {part}") for end in ENDS[name])
    sizes = {"batch": 8} if "serve" in options else {"sizes": {"B": 8}}
    pods = Pods.of(JobOptions(path(name), part=parts, **sizes, **options)).lower()
    return IssuedPods({p: Issued.of(m) for p, m in pods.modules.items()}, pods.peers_in_other_pod)


def replayed(
    issued: IssuedPods, slowdown: int, *, overlap: bool, one_stream: bool, eager: int | None = None
) -> tuple[int, ClockedStep]:
    graph = issued.graph(overlap=overlap, one_stream=one_stream, eager=eager)
    costs = costs_of(graph, dict.fromkeys(range(len(graph.classes)), partial(heard, _least(eager))))
    actual = ClockedStep(graph, costs, slowdown)
    return actual.end, actual


def _least(eager: int | None) -> float:
    return inf if eager is None else eager


def clocked(
    issued: IssuedPods, slowdown: int, *, overlap: bool, one_stream: bool, eager: int | None = None
) -> Times:
    """The same node by node, of all ranks of all pods."""
    counts = [sum(map(len, each.members)) for each in issued.jobs]
    starts = dict(zip(issued.pods, np.cumsum([0, *counts[:-1]]).tolist(), strict=True))
    works: list[RankWork] = []
    peers: dict[tuple[int, str, int], int] = {}
    groups: dict[str, Groups] = {}
    first = number = 0
    for (pod, each), count in zip(issued.pods.items(), counts, strict=True):
        start = starts[pod]
        groups[pod] = each.groups.moved(start, first, sum(counts))
        first += len(each.groups.ids)
        programs = [c.program() for c in each.classes]
        of = {int(r): i for i, ranks in enumerate(each.members) for r in ranks}
        for rank in range(count):
            program = programs[of[rank]]
            costs = [heard(_least(eager), node) for node in program.nodes]
            works.append(RankWork(program, costs, number + of[rank], pod))
            peers |= _met(issued, pod, starts, rank, program)
        everyone: Ints = np.arange(count, dtype=np.int64)
        for over, by in {(c[0], evaluate(c[1], k.env)) for k in each.classes for c in k.channels}:
            for rank, peer in enumerate(neighbours(each.mesh, over, by, everyone).tolist()):
                peers[start + rank, over, by % each.mesh[over]] = start + peer
        number += len(programs)
    return clock(works, groups, peers, slowdown, overlap=overlap, one_stream=one_stream)


def _met(
    issued: IssuedPods, pod: str, starts: Mapping[str, int], rank: int, program: Program
) -> dict[tuple[int, str, int], int]:
    """The ranks of other pods that a rank meets."""
    far = issued.peers[pod]
    return {
        (starts[pod] + rank, n.over, n.by): starts[n.over] + int(far[n.over][n.by][rank])
        for n in program.nodes
        if crosses_pods(n.op)
    }


@pytest.mark.parametrize(
    ("slowdown", "overlap", "one_stream", "eager"),
    [
        (0, True, False, None),
        (0, True, False, 0),
        pytest.param(300, True, False, None, marks=EXHAUSTIVE),
        pytest.param(0, False, True, None, marks=EXHAUSTIVE),
        pytest.param(0, True, True, 0, marks=EXHAUSTIVE),
    ],
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=EXHAUSTIVE if i not in (0, 1, 2, 6, 9) else [])
        for i, c in enumerate(CASES)
    ],
)
def test_the_replay_of_pods_is_the_clock(
    case: tuple[str, str, Mapping[str, Any]],
    slowdown: int,
    *,
    overlap: bool,
    one_stream: bool,
    eager: int | None,
) -> None:
    """Every node of a rank of each class ends at the same picosecond, and what each class spends
    adds up to the step. With messages that wait for receivers both may stand still."""
    issued = issued_pods(*case)
    how: dict[str, Any] = {"overlap": overlap, "one_stream": one_stream, "eager": eager}
    try:
        step, classes = replayed(issued, slowdown, **how)
    except DiagnosticError:
        with pytest.raises(CycleError):
            clocked(issued, slowdown, **how)
        assert eager is not None
        return
    times = clocked(issued, slowdown, **how)
    assert step == max(end for _, end in times.values())
    start = number = 0
    for each in issued.jobs:
        for ranks in each.members:
            mine = classes[number]
            ends = mine.ends.tolist()
            for rank in (start + int(ranks[0]), start + int(ranks[-1])):
                assert ends == [times[rank, i][1] for i in range(len(ends))]
            assert sum(mine.parts(step).values()) == step
            number += 1
        start += sum(map(len, each.members))


def test_a_step_is_no_shorter_than_its_parts() -> None:
    """Nor longer than one behind the other; a pod waits for the rest, and the path leads through
    both."""
    machine = load_machine("h100-sxm")
    issued = issued_pods("whisper", "dp=4", {"dp": 2, "tp": 2, "microbatches": 2})
    step = step_time(issued, machine)
    alone = [step_time(each, machine).picoseconds for each in issued.jobs]
    assert max(alone) < step.picoseconds < sum(alone)
    path_ = list(critical_path(step.classes))
    assert sum(link.time for link in path_) == step.picoseconds
    assert {link.owner.name.partition("/")[0] for link in path_} == {"main", "encoder"}


def test_a_slow_network_between_pods_is_waited_for() -> None:
    machine = load_machine("h100-sxm")
    slow = machine.changed({"network.infiniband.bandwidth": 1e3})
    issued = issued_pods("whisper", "", {"microbatches": 2})
    usual, waits = step_time(issued, machine), step_time(issued, slow)
    size = 8 * 8 * 16 * 2  # %e, and its gradient, each in two microbatches
    assert waits.seconds - usual.seconds > 3 * size / 2 / 1e3, "two messages cross on the way"
    assert waits.parts(waits.classes[0])["exposed encoder message"] > 10**12 * size / 1e3 / 2


def test_one_stream_has_one_collective_or_send_at_a_time() -> None:
    """A rank that talks to one group and another pod takes longer if both share a stream, as in
    ASTRA-sim, than with a stream for each."""
    one = load_machine(str(ASTRA_SIM)).changed({"network.switch.bandwidth": 1e3})
    efficiency = one.efficiency.model_copy(update={"streams": "each"})
    each = one.model_copy(update={"efficiency": efficiency})
    issued = issued_pods("whisper", "dp=2,zero=3", {"dp": 2, "zero": 3, "microbatches": 2})
    steps = [step_time(issued, m, pods=issued.between(m)).seconds for m in (one, each)]
    assert steps[0] > steps[1] + 1


def test_one_stream_has_copies_too() -> None:
    """As in ASTRA-sim: no copy beside a collective."""
    machine = load_machine(str(ASTRA_SIM))
    machine = machine.changed({"network.switch.bandwidth": 1e3, "host.bandwidth": 1e3})
    options = tiny_options(LLAMA, dp=2, zero=3, offload="optimizer", memory_nodes=True)
    issued = Issued.of(JobBuilder(options).lower())
    (only,) = issued.classes
    nodes = only.program().nodes
    copies = sum(n.size for n in nodes if n.is_copy)
    halves = sum(n.size for n in nodes if n.is_collective) / 2  # a ring of two sends a half
    assert copies > halves > 0
    assert step_time(issued, machine).seconds >= (copies + halves) / 1e3


@LONG
def test_times_of_parts_are_reported(tmp_path: Path) -> None:
    words = (path("whisper"), "--set", "B=8", "--microbatches", "2", "--part", "encoder=e: dp=2")
    ran = stagec("time", *words, "--machine", "h100-sxm", "--json")
    assert ran.code == 0, ran.err
    actual = json.loads(ran.out)
    assert set(actual["alone_seconds"]) == {"main", "encoder"}
    assert [c["name"] for c in actual["classes"]] == ["main/stage0", "encoder/stage0"]
    for each in actual["classes"]:
        assert sum(each["breakdown"].values()) == pytest.approx(actual["step_seconds"])
    assert actual["ranks"] == 3
    assert actual["step_seconds"] > max(actual["alone_seconds"].values())
    whole = stagec("time", *words[:-2], "--machine", "h100-sxm", "--json")
    assert json.loads(whole.out)["model_flops"] == actual["model_flops"]
    assert {lever["name"] for lever in actual["levers"]} >= {"2 x infiniband", "2 x nvlink"}


@LONG
def test_a_timeline_shows_all_parts_at_once(tmp_path: Path) -> None:
    """It ends when the step does, and what comes is there when it has been sent."""
    words = [path("whisper"), "--set", "B=8", "--microbatches", "4", "--pp", "2"]
    words += ["--part", "encoder=e: dp=2", "--machine", "h100-sxm"]
    ran = stagec("compile", *words, "--format", "chrome", "-o", tmp_path / "job")
    assert ran.code == 0, ran.err
    text = (tmp_path / "job" / "whisper.trace.json").read_text()
    events = json.loads(text)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len({e["pid"] for e in spans}) == 4
    ran = stagec("time", *words, "--json", "--no-levers")
    step = json.loads(ran.out)["step_seconds"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(step * 1e6)
    begins = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    assert begins
    assert begins.keys() == ends.keys()
    assert all(ends[i] >= begins[i] for i in begins)
