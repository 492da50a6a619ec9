"""The trace checker: deadlocks are found, only those, and at a cost that ranks do not multiply."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from stagec.check.agreement import CheckedJob
from stagec.check.deadlock import check_deadlock
from stagec.check.program import TraceProgram, analyse
from stagec.check.ranks import RankReader
from stagec.check.table import RankTable
from stagec.check.trace_files import read_groups
from stagec.check.traces import CheckReport, check_directory
from stagec.formats.chakra.nodes import NodeKind, TraceNode
from tests.small_traces import Groups, Ranks, check, codes, coll, comp, only, recv, send, write
from tests.support import LONG

# ---------------------------------------------------------------- deadlock


def test_deadlock_of_collectives(tmp_path: Path) -> None:
    ranks = {0: [coll(1, "1"), coll(2, "2", 1)], 1: [coll(1, "2"), coll(2, "1", 1)]}
    finding = only(check(tmp_path, ranks, {"1": [0, 1], "2": [0, 1]}).errors, "deadlock")
    assert "rank 0 node 1 'coll1' before rank 0 node 2 'coll2'" in finding.message
    assert "rank 1 node 1 'coll1' before rank 1 node 2 'coll2'" in finding.message
    assert "one collective with" in finding.message


def test_deadlock_of_messages(tmp_path: Path) -> None:
    ranks = {0: [recv(1, 1), send(2, 1, 1)], 1: [recv(1, 0), send(2, 0, 1)]}
    finding = only(check(tmp_path, ranks, None).errors, "deadlock")
    assert "rank 0 node 2 'send2' before rank 1 node 1 'recv1'" in finding.message


def test_deadlock_of_a_message_and_a_collective(tmp_path: Path) -> None:
    ranks = {0: [coll(1, "1"), send(2, 1, 1)], 1: [recv(1, 0), coll(2, "1", 1)]}
    only(check(tmp_path, ranks, {"1": [0, 1]}).errors, "deadlock")


def test_deadlock_around_a_square_of_groups(tmp_path: Path) -> None:
    """No two groups share more than one rank, and still all four ranks wait in a circle."""
    groups = {"1": [0, 1], "2": [1, 2], "3": [2, 3], "4": [3, 0]}
    order = {0: ("4", "1"), 1: ("1", "2"), 2: ("2", "3"), 3: ("3", "4")}
    ranks = {rank: [coll(1, a), coll(2, b, 1)] for rank, (a, b) in order.items()}
    only(check(tmp_path, ranks, groups).errors, "deadlock")


def test_crossed_messages_are_fine_when_sent_first(tmp_path: Path) -> None:
    ranks = {0: [send(1, 1), recv(2, 1, 1)], 1: [send(1, 0), recv(2, 0, 1)]}
    report = check(tmp_path, ranks, None)
    assert (report.errors, report.warnings) == ([], [])


def test_cycle_of_classes_need_not_be_one_of_ranks(tmp_path: Path) -> None:
    """A chain of ranks with one program: each receives from the last and sends to the next."""
    ranks: Ranks = {0: [send(2, 1)], 5: [recv(1, 4)]}
    for rank in range(1, 5):
        ranks[rank] = [recv(1, rank - 1), send(2, rank + 1, 1)]
    report = check(tmp_path, dict(sorted(ranks.items())), None)
    assert (report.errors, report.warnings) == ([], [])


def test_ring_of_one_class_that_deadlocks(tmp_path: Path) -> None:
    ranks = {r: [recv(1, (r - 1) % 20), send(2, (r + 1) % 20, 1)] for r in range(20)}
    finding = only(check(tmp_path, ranks, None).errors, "deadlock")
    assert "more)" in finding.message


def test_proof_that_is_too_large_is_given_up(tmp_path: Path) -> None:
    ranks = {r: [recv(1, (r - 1) % 4), send(2, (r + 1) % 4, 1)] for r in range(4)}
    write(tmp_path, ranks, None)
    reader = RankReader()
    traces = {rank: reader.read(tmp_path / f"job.{rank}.et", rank) for rank in ranks}
    report = CheckReport()
    job = CheckedJob(
        tmp_path,
        RankTable.of(traces.values()),
        frozenset(ranks),
        read_groups(tmp_path, "job", report),
    )
    check_deadlock(job, report, expanded_nodes=7)
    only(report.errors, "unproven")
    check_deadlock(job, report, expanded_nodes=8)
    assert codes(report.errors) == {"unproven", "deadlock"}


@pytest.mark.parametrize("pipelines", [1, 50])
def test_stages_with_one_program_are_distinguished(tmp_path: Path, pipelines: int) -> None:
    """As where there are fewer microbatches than stages: the proof is about stages, not ranks."""
    stages, last = 8, 7
    ranks: Ranks = {}
    for first in range(0, stages * pipelines, stages):
        ranks[first] = [send(1, first + 1)]
        for rank in range(first + 1, first + last):
            ranks[rank] = [recv(1, rank - 1), send(2, rank + 1, 1)]
        ranks[first + last] = [recv(1, first + last - 1)]
    write(tmp_path, ranks, None)
    reader = RankReader()
    traces = {rank: reader.read(tmp_path / f"job.{rank}.et", rank) for rank in ranks}
    assert len({trace.class_id for trace in traces.values()}) == 3
    report = CheckReport()
    job = CheckedJob(
        tmp_path,
        RankTable.of(traces.values()),
        frozenset(ranks),
        read_groups(tmp_path, "job", report),
    )
    nodes_of_a_pipeline = 2 * (stages - 2) + 2
    check_deadlock(job, report, expanded_nodes=nodes_of_a_pipeline)
    assert report.ok()


def test_messages_match_first_in_first_out(tmp_path: Path) -> None:
    ranks = {
        0: [send(1, 1), recv(2, 1, 1, tag=5), send(3, 1, 2)],
        1: [recv(1, 0), send(2, 0, 1, tag=5), recv(3, 0, 1)],
    }
    assert check(tmp_path, ranks, None).ok()


def random_job(seed: int) -> tuple[Ranks, Groups]:
    """Chains of a few collectives and messages on each of four ranks, in orders made up."""
    draw = random.Random(seed)
    groups: Groups = {"1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3], "5": [0, 1, 2, 3]}
    steps: dict[int, list[Callable[[int], TraceNode]]] = {rank: [] for rank in range(4)}
    for _ in range(draw.randint(2, 5)):
        if draw.random() < 0.5:
            group = draw.choice([*groups])
            for rank in groups[group]:
                steps[rank].append(partial(coll, group=group))
        else:
            src, dst = draw.sample(range(4), 2)
            steps[src].append(partial(send, peer=dst))
            steps[dst].append(partial(recv, peer=src))
    ranks: Ranks = {}
    for rank, made in steps.items():
        for _ in range(draw.randint(0, 1)):
            draw.shuffle(made)
        nodes = [comp(0), *(step(number) for number, step in enumerate(made, start=1))]
        ranks[rank] = [replace(n, ctrl_deps=(n.id - 1,)) if n.id else n for n in nodes]
    return ranks, groups


def runs_to_the_end(ranks: Ranks, groups: Groups) -> bool:
    """Play the chains: an independent, naive answer to whether they deadlock."""
    left = {rank: [*nodes] for rank, nodes in ranks.items()}
    sent: Counter[tuple[int, int]] = Counter()

    def group_ready(name: str) -> bool:
        heads = [left[rank][0] if left[rank] else comp(0) for rank in groups[name]]
        return all(head.attrs.get("pg_name") == name for head in heads)

    def step(rank: int) -> bool:
        node = left[rank][0]
        movers = [rank]
        if node.kind == NodeKind.COLL:
            name = str(node.attrs["pg_name"])
            if not group_ready(name):
                return False
            movers = groups[name]
        elif node.kind == NodeKind.SEND:
            sent[rank, int(str(node.attrs["comm_dst"]))] += 1
        elif node.kind == NodeKind.RECV:
            channel = int(str(node.attrs["comm_src"])), rank
            if not sent[channel]:
                return False
            sent[channel] -= 1
        for mover in movers:
            left[mover].pop(0)
        return True

    while any(left[rank] and step(rank) for rank in left):
        pass
    return not any(left.values())


@pytest.mark.parametrize("seed", range(150))
def test_verdict_equals_that_of_playing_the_job(tmp_path: Path, seed: int) -> None:
    ranks, groups = random_job(seed)
    report = check(tmp_path, ranks, groups)
    assert codes(report.errors) == (set() if runs_to_the_end(ranks, groups) else {"deadlock"})


def test_random_jobs_are_of_both_sorts() -> None:
    sound_ones = sum(runs_to_the_end(*random_job(seed)) for seed in range(150))
    assert 40 < sound_ones < 110


# ---------------------------------------------------------------- cost


def random_program(seed: int) -> TraceProgram:
    draw = random.Random(seed)
    nodes = [
        coll(i, "1", *sorted(draw.sample(range(i), draw.randint(0, min(i, 2)))), size=1)
        if draw.random() < 0.5
        else comp(i, *sorted(draw.sample(range(i), draw.randint(0, min(i, 2)))))
        for i in range(10)
    ]
    slots = {i: 0 for i, node in enumerate(nodes) if node.kind == NodeKind.COLL}
    return TraceProgram(tuple(nodes), slots, {})


@pytest.mark.parametrize("seed", range(100))
def test_total_order_against_reachability(seed: int) -> None:
    program = random_program(seed)
    reach: dict[int, set[int]] = defaultdict(set)
    for node in program.nodes:
        for dep in (*node.data_deps, *node.ctrl_deps):
            reach[node.id] |= {dep} | reach[dep]
    chosen = sorted(program.group_slots)
    total = all(a in reach[b] for a in chosen for b in chosen if a < b)
    warned = "unordered-in-group" in {problem.code for problem in analyse(program).problems}
    assert warned == (not total)


@LONG
def test_cost_of_a_class_does_not_grow_with_its_ranks(tmp_path: Path) -> None:
    layers, ranks = 400, 64
    for rank in range(ranks):
        group = str(1 + rank // 2)
        nodes = [comp(0)]
        for layer in range(layers):
            last = 5 * layer
            nodes += [comp(last + k, last + k - 1) for k in range(1, 5)]
            nodes.append(coll(last + 5, group, last + 4))
        write(tmp_path, {rank: nodes}, None)
    groups = {str(1 + i): [2 * i, 2 * i + 1] for i in range(ranks // 2)}
    (tmp_path / "job.json").write_text(json.dumps(groups))
    start = time.process_time()
    report = check_directory(tmp_path)
    assert time.process_time() - start < 48  # one by one takes far longer
    assert (report.ok(), report.nodes) == (True, ranks * (5 * layers + 1))
