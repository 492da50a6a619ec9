"""Messages of an ordered pair of ranks have one order, under every schedule: a simulator that
matches them in order, and whose sends only complete when their receives are posted, ends.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import pytest

from stagec.check.traces import check_directory
from stagec.formats.chakra.nodes import NodeKind, TraceNode
from stagec.formats.chakra.record_files import read_trace
from stagec.jobs.builder import JobBuilder
from stagec.schedule.registry import SCHEDULES
from stagec.support.diagnostics import DiagnosticError
from stagec.traces.emit import make_job
from stagec.traces.writer import write_source
from tests.support import LLAMA, crossed, each_value, one_of_each_kind, tiny_options, tries


class Simulator:
    """Nodes are issued when they are ready, lowest identifier first. A rank runs one computation at
    a time, for a time that a seed gives, the same on all ranks of a pipeline stage.

    The k-th send from one rank to another meets the k-th receive there, whatever their tags, and
    ends with it. With `one_at_a_time` a send that waits for its receive, and a collective that
    waits for other members, also keep the rank's other sends and collectives from being issued, as
    ASTRA-sim does with the rendezvous protocol.
    """

    def __init__(
        self,
        ranks: Sequence[Iterable[TraceNode]],
        stages: int,
        *,
        one_at_a_time: bool = False,
        seed: int = 0,
    ) -> None:
        self.nodes = [{n.id: n for n in rank} for rank in ranks]
        self.users: list[dict[int, list[int]]] = [defaultdict(list) for _ in ranks]
        self.left = [dict[int, int]() for _ in ranks]
        self.ready: list[list[int]] = [[] for _ in ranks]
        self.done = [0 for _ in ranks]
        self.one_at_a_time, self.seed = one_at_a_time, seed
        self.stage = [rank * stages // len(ranks) for rank in range(len(ranks))]
        self.computing = [False for _ in ranks]
        self.talking = [False for _ in ranks]
        self.posted: dict[tuple[bool, int, int], deque[int]] = defaultdict(deque)
        self.meetings: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        self.met: Counter[tuple[str, int]] = Counter()
        self.members = Counter[str]()
        self.events: list[tuple[int, int, int]] = []
        for rank, actual in enumerate(self.nodes):
            self.members.update({str(n.attrs["pg_name"]) for n in actual.values() if is_call(n)})
            for node in actual.values():
                before = {*node.data_deps, *node.ctrl_deps}
                self.left[rank][node.id] = len(before)
                for source in before:
                    self.users[rank][source].append(node.id)
                if not before:
                    heappush(self.ready[rank], node.id)

    def finished(self) -> list[int]:
        """Run; the ranks that finish."""
        for rank in range(len(self.nodes)):
            self._issue(rank, 0)
        while self.events:
            now, rank, node = heappop(self.events)
            self._end(rank, node)
            self._issue(rank, now)
        return [r for r, nodes in enumerate(self.nodes) if self.done[r] == len(nodes)]

    def _end(self, rank: int, number: int) -> None:
        kind = self.nodes[rank][number].kind
        if kind == NodeKind.COMP:
            self.computing[rank] = False
        elif kind != NodeKind.RECV:
            self.talking[rank] = False
        self.done[rank] += 1
        for user in self.users[rank][number]:
            self.left[rank][user] -= 1
            if not self.left[rank][user]:
                heappush(self.ready[rank], user)

    def _issue(self, rank: int, now: int) -> None:
        waiting, self.ready[rank] = sorted(self.ready[rank]), []
        for number in waiting:
            node = self.nodes[rank][number]
            if node.kind == NodeKind.COMP:
                if self.computing[rank]:
                    heappush(self.ready[rank], number)
                    continue
                self.computing[rank] = True
                time = random.Random(f"{self.seed} {self.stage[rank]} {number}").randint(1, 100)
                heappush(self.events, (now + time, rank, number))
            elif node.kind == NodeKind.RECV:
                self._meet(int(str(node.attrs["comm_src"])), rank, number, False, now)
            elif self.one_at_a_time and self.talking[rank]:
                heappush(self.ready[rank], number)
            else:
                self.talking[rank] = True
                if node.kind == NodeKind.SEND:
                    self._meet(rank, int(str(node.attrs["comm_dst"])), number, True, now)
                else:
                    self._call(rank, node, now)

    def _call(self, rank: int, node: TraceNode, now: int) -> None:
        name = str(node.attrs["pg_name"])
        key = f"{name} {rank}", 0
        number = self.met[key]
        self.met[key] += 1
        meeting = self.meetings[name, number]
        meeting.append((rank, node.id))
        if len(meeting) == self.members[name]:
            for member, theirs in meeting:
                heappush(self.events, (now + 1, member, theirs))

    def _meet(self, source: int, target: int, number: int, sends: bool, now: int) -> None:
        self.posted[sends, source, target].append(number)
        sent, got = self.posted[True, source, target], self.posted[False, source, target]
        while sent and got:
            ends = (source, sent.popleft()), (target, got.popleft())
            facts = [self.nodes[r][i].attrs for r, i in ends]
            assert len({(f["comm_tag"], f["comm_size"]) for f in facts}) == 1, "others meet"
            for rank, node in ends:
                heappush(self.events, (now + 1, rank, node))


def is_call(node: TraceNode) -> bool:
    return node.kind == NodeKind.COLL


def written(directory: Path, **options: Any) -> int:
    """The ranks of a job in a folder, which is checked."""
    made = make_job(JobBuilder(tiny_options(LLAMA, **options)).lower(), "tiny")
    write_source(made, directory, {})
    report = check_directory(directory)
    assert (report.errors, report.warnings) == ([], [])
    assert report.eager_only is None, str(report.eager_only)
    return report.ranks


def pipelines() -> Iterable[dict[str, Any]]:
    """Sizes of every schedule: few and many microbatches, two ranks and more."""
    for name, schedule in SCHEDULES.items():
        for stages, microbatches in ((2, 1), (2, 4), (3, 6), (4, 8), (4, 12)):
            try:
                schedule.check(stages, microbatches, schedule.default_chunks)
            except DiagnosticError:
                continue
            yield {"schedule": name, "sizes": (stages, microbatches)}


def assert_ends(directory: Path, count: int, stages: int) -> None:
    ranks = [list(read_trace(directory / f"tiny.{rank}.et")) for rank in range(count)]
    for one_at_a_time in (False, True):
        for seed in range(tries(3)):
            simulator = Simulator(ranks, stages, one_at_a_time=one_at_a_time, seed=seed)
            assert simulator.finished() == list(range(count)), (one_at_a_time, seed)


@pytest.mark.parametrize("row", each_value(pipelines(), str))
def test_a_job_ends_with_sends_that_wait_for_their_receives(
    row: dict[str, Any], tmp_path: Path
) -> None:
    schedule, (pp, microbatches) = row["schedule"], row["sizes"]
    chunks = SCHEDULES[schedule].default_chunks
    layers = {"L": pp * chunks, "B": 2 * microbatches}
    options = {"pp": pp, "chunks": chunks, "microbatches": microbatches, "schedule": schedule}
    count = written(tmp_path / "out", sizes=layers, **options)
    assert count == pp
    assert_ends(tmp_path / "out", count, pp)


AXES: list[dict[str, Any]] = [{"dp": 2, "zero": 3, "tp": 2, "sp": True}, {"cp": 2, "tp": 2}]


@crossed(one_of_each_kind, schedule=SCHEDULES, options=AXES)
def test_other_axes_keep_the_order(schedule: str, options: dict[str, Any], tmp_path: Path) -> None:
    chunks = SCHEDULES[schedule].default_chunks
    sizes = {"L": 2 * chunks, "B": 8}
    more = {"pp": 2, "chunks": chunks, "microbatches": 4, "schedule": schedule}
    count = written(tmp_path / "out", sizes=sizes, **more, **options)
    assert_ends(tmp_path / "out", count, 2)
