"""When nodes run, as the replay of classes says, against the clock of all ranks; and the waits of
the compute stream, against the breakdown."""

from __future__ import annotations

from collections import Counter

import pytest

from stagec.program.nodes import Program
from stagec.time.clock.intervals import NONE, node_times, stream_name, title_of
from stagec.time.clock.times import ClassTimes
from stagec.time.step import Issued
from stagec.time.streams import BUBBLE, INTERFERENCE, LAUNCH
from tests.support import EXHAUSTIVE
from tests.unit.test_step_time import JOBS, arbitrary, clocked, issued_of, options_of, replayed


class Replayed:
    """A job of the grid, replayed with arbitrary costs."""

    def __init__(self, name: str, slowdown: int, *, overlap: bool) -> None:
        model, options = JOBS[name]
        self.issued: Issued = issued_of(options_of(model, options))
        self.costs = dict.fromkeys(range(len(self.issued.classes)), arbitrary)
        self.how = slowdown, overlap
        self.end, self.replays = replayed(self.issued, self.costs, slowdown, overlap=overlap)

    @property
    def times(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The times of all nodes of all ranks by the definition."""
        slowdown, overlap = self.how
        return clocked(self.issued, self.costs, slowdown, overlap=overlap)

    @property
    def classes(self) -> list[tuple[ClassTimes, Program]]:
        """The replays, with the program of each."""
        return list(zip(self.replays, self.issued.programs, strict=True))


CASES = [
    pytest.param(name, slowdown, overlap, marks=() if name in kept else EXHAUSTIVE)
    for slowdown, overlap, kept in (
        (0, True, ("fsdp", "dualpipe")),
        (300, True, ("1f1b", "offload")),
        (300, False, ("ring", "tied embeddings")),
    )
    for name in JOBS
]


@pytest.mark.parametrize(("name", "slowdown", "overlap"), CASES)
def test_nodes_run_when_the_clock_says(name: str, slowdown: int, overlap: bool) -> None:
    """Computations, copies and sends start and end then; of a collective and of a receive the clock
    says the end only."""
    job = Replayed(name, slowdown, overlap=overlap)
    times = job.times
    for number, (each, program) in enumerate(job.classes):
        rank = int(job.issued.members[number][0])
        actual, nodes = node_times(program, each), job.issued.classes[number].program().nodes
        for i, (row, node) in enumerate(zip(actual.rows(), nodes, strict=True)):
            start, end = times[rank, i]
            assert row.end == end
            if not (node.is_collective or node.kind == "recv"):
                assert row.start == start
            elif node.is_collective:
                assert row.start == end - arbitrary(node).time
            mark = f"mb{row.microbatch}/" if row.microbatch != NONE else ""
            assert title_of(row.placed.node.name) == node.name.replace(mark, "", 1)
            assert row.tag == node.tag


@pytest.mark.parametrize(("name", "slowdown", "overlap"), CASES)
def test_nodes_and_waits_fill_the_compute_stream(name: str, slowdown: int, overlap: bool) -> None:
    """They do not overlap, leave no time, and add up to the breakdown part by part."""
    job = Replayed(name, slowdown, overlap=overlap)
    for each, program in job.classes:
        actual, idle = node_times(program, each), each.waits
        parts: Counter[str] = Counter()
        times = [(wait.start, wait.end) for wait in idle]
        for wait in idle:
            parts[wait.part] += wait.end - wait.start
        times.append((each.end, job.end))
        parts[BUBBLE] += job.end - each.end
        for placed, _, _, start, end, _ in actual.rows():
            if not placed.computes:
                continue
            given = arbitrary(placed.node)
            times.append((start, end))
            parts[LAUNCH] += given.launch
            parts[placed.part] += given.time
            parts[INTERFERENCE] += end - start - given.launch - given.time
        assert {p: t for p, t in parts.items() if t} == each.parts(job.end)
        now = 0
        for start, end in sorted(times):
            assert start == now
            now = end
        assert now == job.end


def test_streams_have_names() -> None:
    job = Replayed("zb-h1", 0, overlap=True)
    names = {
        stream_name(stream, job.issued.mesh)
        for each in job.replays
        for placed in each.nodes.prototypes
        for stream in placed.streams
    }
    assert names == {
        "compute",
        *(f"{end} over pp {by}" for end in ("sends", "receives") for by in ("+1", "-1")),
        "collectives over pp",
    }
