"""When nodes run, as the replay of classes says, against the clock of all ranks; and the waits of
the compute stream, against the breakdown."""

from __future__ import annotations

from collections import Counter
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from stagec.driver.job import JobBuilder
from stagec.program.classes import rank_classes
from stagec.program.groups import neighbours, number_groups
from stagec.program.nodes import Node
from stagec.time.clock import RankWork, clock
from stagec.time.intervals import NONE, node_times, occurrences, stream_name, title_of, waits
from stagec.time.join import joined
from stagec.time.pieces import Piece, Shape
from stagec.time.replay import ClassReplay, replay
from stagec.time.streams import INTERFERENCE, LAUNCH, Cost
from tests.support import EXHAUSTIVE, GPT, LLAMA, MIXTRAL, tiny_options

JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": (LLAMA, {"dp": 4, "zero": 3, "fsdp_prefetch": 1}),
    "tensor": (LLAMA, {"dp": 2, "tp": 2, "sp": True}),
    "pipeline": (LLAMA, {"pp": 2, "dp": 2, "microbatches": 4}),
    "zero-bubble": (LLAMA, {"pp": 4, "microbatches": 8, "schedule": "zb-h1", "sizes": {"L": 4}}),
    "dualpipe": (
        LLAMA,
        {"pp": 4, "microbatches": 8, "schedule": "dualpipe", "sizes": {"L": 8, "B": 16}},
    ),
    "ring": (LLAMA, {"cp": 4, "sizes": {"S": 8}}),
    "experts": (MIXTRAL, {"dp": 4, "ep": 4}),
    "offload": (GPT, {"dp": 2, "offload": "activations,optimizer"}),
}


def cost(node: Node) -> Cost:
    """Some cost, the same for the same node."""
    some = crc32(f"{node.kind}{node.size}".encode())
    return Cost(1 + some % 97, 3) if node.is_computation else Cost(some % 211)


class Replayed:
    """A job, replayed with these costs."""

    def __init__(self, name: str, slowdown: int, *, overlap: bool) -> None:
        model, options = JOBS[name]
        module = JobBuilder(tiny_options(model, **options)).lower(verify=False)
        self.classes = rank_classes(module)
        self.mesh = {a: n or 1 for a, n in module.mesh.sizes.items()} if module.mesh else {}
        self.slowdown, self.overlap = slowdown, overlap
        self.runs = [each.issued() for each in self.classes]
        self.members = [each.members(self.mesh) for each in self.classes]
        known: dict[Shape, Piece] = {}

        def piece(shape: Shape) -> Piece:
            return known.setdefault(shape, Piece(shape, cost))

        plans = joined(self.classes, self.runs, self.mesh, overlap=overlap)
        self.replays = [ClassReplay(i, plan, piece) for i, plan in enumerate(plans)]
        self.end = replay(self.replays, slowdown)

    def clock(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The times of all nodes by the definition."""
        used = zip((c.groups for c in self.classes), self.members, strict=True)
        groups = number_groups(self.mesh, used)
        programs = [each.program() for each in self.classes]
        of = {int(r): i for i, ranks in enumerate(self.members) for r in ranks}
        works = [
            RankWork(programs[of[r]], [cost(n) for n in programs[of[r]].nodes], of[r])
            for r in range(len(of))
        ]
        ways = {(over, by) for each in self.classes for over, by, _ in each.channels}
        peers = {
            (rank, over, by % self.mesh[over]): int(
                neighbours(self.mesh, over, by, np.array([rank]))[0]
            )
            for over, by in ways
            for rank in range(len(of))
        }
        return clock(works, groups, peers, self.slowdown, overlap=self.overlap)


CASES = [
    pytest.param(name, slowdown, overlap, marks=() if name in kept else EXHAUSTIVE)
    for slowdown, overlap, kept in (
        (0, True, ("fsdp", "dualpipe")),
        (300, True, ("pipeline", "offload")),
        (300, False, ("ring",)),
    )
    for name in JOBS
]


@pytest.mark.parametrize(("name", "slowdown", "overlap"), CASES)
def test_nodes_run_when_the_clock_says(name: str, slowdown: int, overlap: bool) -> None:
    """Computations, copies and sends start and end then; of a collective and of a receive the clock
    says the end only."""
    job = Replayed(name, slowdown, overlap=overlap)
    times = job.clock()
    for each, runs, ranks, cls in zip(
        job.replays, job.runs, job.members, job.classes, strict=True
    ):
        found, nodes = node_times(runs, each), cls.program().nodes
        assert len(found.start) == len(nodes)
        for i, node in enumerate(nodes):
            start, end = times[int(ranks[0]), i]
            step = found.steps[found.step[i]]
            assert found.end[i] == end
            if not (node.is_collective or node.kind == "recv"):
                assert found.start[i] == start
            elif node.is_collective:
                assert found.start[i] == end - cost(node).time
            mark = f"mb{found.microbatch[i]}/" if found.microbatch[i] != NONE else ""
            assert title_of(step.node.name) == node.name.replace(mark, "", 1)
            assert found.tag[i] == node.tag


@pytest.mark.parametrize(("name", "slowdown", "overlap"), CASES)
def test_nodes_and_waits_fill_the_compute_stream(name: str, slowdown: int, overlap: bool) -> None:
    """They do not overlap, leave no time, and add up to the breakdown part by part."""
    job = Replayed(name, slowdown, overlap=overlap)
    for each, runs in zip(job.replays, job.runs, strict=True):
        found, idle = node_times(runs, each), waits(each, job.end)
        parts: Counter[str] = Counter()
        times = [(wait.start, wait.end) for wait in idle]
        for wait in idle:
            parts[wait.part] += wait.end - wait.start
        for i, number in enumerate(found.step.tolist()):
            step = found.steps[number]
            if not step.computes:
                continue
            start, end = int(found.start[i]), int(found.end[i])
            given = cost(step.node)
            times.append((start, end))
            parts[LAUNCH] += given.launch
            parts[step.part] += given.time
            parts[INTERFERENCE] += end - start - given.launch - given.time
        assert {p: t for p, t in parts.items() if t} == each.parts(job.end)
        now = 0
        for start, end in sorted(times):
            assert start == now
            now = end
        assert now == job.end


def test_pieces_belong_to_runs() -> None:
    job = Replayed("pipeline", 0, overlap=True)
    for each, runs in zip(job.replays, job.runs, strict=True):
        pairs = list(occurrences(runs, each))
        assert [number for number, _ in pairs] == list(range(len(each.plan)))
        for number, run in pairs:
            nodes = set(map(id, run.kind.nodes))
            assert {id(s.node) for s in each.plan[number].shape.steps} <= nodes


def test_streams_have_names() -> None:
    job = Replayed("zero-bubble", 0, overlap=True)
    names = {
        stream_name(stream)
        for each in job.replays
        for planned in each.plan
        for step in planned.shape.steps
        for stream in step.streams
    }
    assert {"compute", "sends over pp +1", "receives over pp +1"} <= names
