"""The time of a step: the loop over a graph against the clock node by node, closed forms, and what
its breakdown and its critical path add up to."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from graphlib import CycleError
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest

from stagec.ir.expr import evaluate
from stagec.ir_spec.strategy.hosts import HostsRule
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.machines import Machine, load_machine
from stagec.program.groups import crosses_pods, neighbours
from stagec.program.nodes import Node
from stagec.schedule.registry import SCHEDULES
from stagec.schedule.simulate import replay as replay_actions
from stagec.support.diagnostics import DiagnosticError
from stagec.time.clock.definition import RankWork, clock
from stagec.time.clock.graph import StepGraph, step_graph
from stagec.time.clock.hosts import HostTimes
from stagec.time.clock.times import ClockedStep, NodeCosts
from stagec.time.costs.nodes import CostTable
from stagec.time.costs.replay_options import ReplayOptions
from stagec.time.path import critical_path
from stagec.time.step import Issued, StepTime, step_time
from stagec.time.streams import BUBBLE, LAUNCH, Cost, merged, stretched
from tests.support import (
    DEEPSEEK,
    EXHAUSTIVE,
    GPT,
    LLAMA,
    LONG,
    MIXTRAL,
    each_value,
    tiny_options,
    tries,
)

Costs = Callable[[Node], Cost]

#: Strategies and schedules of every kind: what has streams of its own, or joins classes.
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": (LLAMA, {}),
    "ddp": (LLAMA, {"dp": 4}),
    "ddp in small buckets": (LLAMA, {"dp": 2, "ddp_bucket": 4096}),
    "fsdp": (LLAMA, {"dp": 4, "zero": 3, "fsdp_prefetch": 2}),
    "fsdp and tp": (LLAMA, {"dp": 2, "tp": 2, "sp": True, "zero": 3}),
    "tp": (GPT, {"tp": 4}),
    "microbatches": (LLAMA, {"dp": 2, "microbatches": 4}),
    "ring": (LLAMA, {"cp": 4}),
    "ring in plain order": (LLAMA, {"cp": 4, "cp_order": "plain"}),
    "experts": (MIXTRAL, {"dp": 4, "ep": 4}),
    "offload": (GPT, {"dp": 2, "offload": "activations,optimizer"}),
    "recompute": (LLAMA, {"dp": 2, "zero": 3, "recompute": "full"}),
    "tied embeddings": (GPT, {"pp": 2, "dp": 2, "microbatches": 4}),
    "dualpipe in small buckets": (
        LLAMA,
        {"pp": 4, "dp": 2, "microbatches": 8, "schedule": "dualpipe", "ddp_bucket": 256},
    ),
    "1f1b": (LLAMA, {"pp": 4, "microbatches": 8}),
    "gpipe": (LLAMA, {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "gpipe"}),
    "interleaved": (
        LLAMA,
        {"pp": 2, "dp": 2, "tp": 2, "microbatches": 8, "schedule": "interleaved", "chunks": 2},
    ),
    "zb-h1": (LLAMA, {"pp": 4, "microbatches": 8, "schedule": "zb-h1"}),
    "zbv": (LLAMA, {"pp": 2, "microbatches": 8, "schedule": "zbv"}),
    "dualpipe": (LLAMA, {"pp": 4, "dp": 2, "microbatches": 8, "schedule": "dualpipe"}),
    "dualpipe with experts": (
        DEEPSEEK,
        {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "schedule": "dualpipev"},
    ),
    "fsdp in stages": (LLAMA, {"pp": 2, "dp": 2, "zero": 3, "microbatches": 4}),
}
MACHINES = ("h100-sxm", "a100-80g", "gb200-nvl72", "mi300x")
SLOWDOWNS = (0, 300)


def options_of(model: str, options: Mapping[str, Any]) -> JobOptions:
    """A job of a size that all strategies here divide."""
    return tiny_options(model, **{"sizes": {"L": 8, "B": 16, "S": 64}, **options})


def issued_of(options: JobOptions) -> Issued:
    """What the ranks of a job issue."""
    return Issued.of(JobBuilder(options).lower(verify=False))


def arbitrary(node: Node) -> Cost:
    """A cost that tells nodes apart, with no sense."""
    code = zlib.crc32(f"{node.kind} {node.size}".encode())
    return Cost(1 + code % 97, 3) if node.is_computation else Cost(code % 211)


def heard(eager: float, node: Node) -> Cost:
    """An arbitrary cost; of a message of more than `eager` bytes with one for its handshake."""
    cost = arbitrary(node)
    if not node.is_message or node.size <= eager:
        return cost
    return replace(cost, handshake=7 + node.size % 83)


def replayed(
    issued: Issued,
    costs: Mapping[int, Costs],
    slowdown: int = 0,
    *,
    overlap: bool = True,
    one_stream: bool = False,
    eager: float = inf,
) -> tuple[int, ClockedStep]:
    """The times of a job with the costs of each class; messages of more than `eager` bytes wait
    for their receivers."""

    def waits(node: Node) -> bool:
        return node.size > eager

    graph = step_graph(issued.issues(), overlap=overlap, one_stream=one_stream, waits=waits)
    actual = ClockedStep(graph, costs_of(graph, costs), slowdown)
    return actual.end, actual


def costs_of(graph: StepGraph, costs: Mapping[int, Costs]) -> NodeCosts:
    """The costs of a graph by functions of its classes."""
    return NodeCosts.of([costs[c.number](p.node) for c in graph.classes for p in c.prototypes])


def clocked(
    issued: Issued,
    costs: Mapping[int, Costs],
    slowdown: int,
    *,
    overlap: bool,
    one_stream: bool = False,
) -> dict[tuple[int, int], tuple[int, int]]:
    """The same node by node, of all ranks."""
    programs = [each.program() for each in issued.classes]
    of = {int(r): i for i, ranks in enumerate(issued.members) for r in ranks}
    works = [
        RankWork(programs[of[r]], [costs[of[r]](n) for n in programs[of[r]].nodes], of[r])
        for r in range(len(of))
    ]
    peers = {
        (r, over, by % issued.mesh[over]): int(
            neighbours(issued.mesh, over, by, np.array([r], dtype=np.int64))[0]
        )
        for each in issued.classes
        for over, by in ((c[0], evaluate(c[1], each.env)) for c in each.channels)
        for r in range(len(of))
    }
    for r in range(len(of)):  # of other pods: nobody waits for what goes there
        crossing = (n for n in programs[of[r]].nodes if crosses_pods(n.op))
        peers.update({(r, n.over, n.by): -1 - r for n in crossing})
    return clock(
        works, {"": issued.groups}, peers, slowdown, overlap=overlap, one_stream=one_stream
    )


def compare(
    issued: Issued,
    costs: Mapping[int, Costs],
    slowdown: int,
    *,
    overlap: bool,
    one_stream: bool = False,
    eager: float = inf,
) -> tuple[int, ClockedStep]:
    """Replay a job, and compare when each node of each class ends."""
    how: dict[str, Any] = {"overlap": overlap, "one_stream": one_stream}
    step, classes = replayed(issued, costs, slowdown, **how, eager=eager)
    times = clocked(issued, costs, slowdown, **how)
    assert step == max(end for _, end in times.values())
    for each, ranks in zip(classes, issued.members, strict=True):
        mine = each.ends.tolist()
        rank = int(ranks[-1])
        assert mine == [times[rank, i][1] for i in range(len(mine))]
        assert (rank, len(mine)) not in times
    return step, classes


def machine_costs(issued: Issued, machine: Machine) -> dict[int, Costs]:
    """What nodes cost on a machine."""
    table = CostTable(machine, issued.mesh)
    table.prepare(issued.samples)
    classes = zip(issued.classes, issued.members, strict=True)
    return {
        i: partial(
            table.cost, distances=table.distances(ranks, issued.groups, each.groups, each.ways)
        )
        for i, (each, ranks) in enumerate(classes)
    }


GRID = each_value(
    [
        {"job": job, "machine": machine, "slowdown": slowdown, "overlap": overlap}
        for job in JOBS
        for machine in ("", *MACHINES)
        for slowdown in SLOWDOWNS
        for overlap in (True, False)
        if machine in ("", "h100-sxm") or (overlap and not slowdown)
    ]
    + [
        {"job": job, "machine": "", "slowdown": slowdown, "overlap": overlap, "one_stream": True}
        for job in JOBS
        for slowdown, overlap in ((0, True), (300, True), (0, False))
    ],
    lambda row: "-".join(map(str, row.values())),
)


@pytest.mark.parametrize("row", GRID)
def test_the_replay_is_the_clock(row: Mapping[str, Any]) -> None:
    """Every node of a rank of each class ends at the same picosecond."""
    issued = issued_of(options_of(*_job(row["job"])))
    numbers = range(len(issued.classes))
    costs: Mapping[int, Costs] = dict.fromkeys(numbers, arbitrary)
    if row["machine"]:
        costs = machine_costs(issued, load_machine(row["machine"]))
    step, classes = compare(
        issued,
        costs,
        row["slowdown"],
        overlap=row["overlap"],
        one_stream=row.get("one_stream", False),
    )
    for each in classes:
        assert sum(each.parts(step).values()) == step
        assert min(each.parts(step).values()) > 0


@LONG
@pytest.mark.parametrize("name", ["fsdp and tp", "1f1b", "dualpipe in small buckets"])
def test_on_one_stream_calls_of_a_rank_follow_each_other(name: str) -> None:
    """No two collectives and sends of a rank run at once; with a stream each, some do."""
    issued = issued_of(options_of(*_job(name)))
    costs: Mapping[int, Costs] = dict.fromkeys(range(len(issued.classes)), _slow)
    compare(issued, costs, 0, overlap=True, one_stream=True)
    together = {
        one_stream: _at_once(issued, clocked(issued, costs, 0, overlap=True, one_stream=one_stream))
        for one_stream in (True, False)
    }
    assert not together[True]
    assert together[False]


def test_on_one_stream_a_sum_before_the_last_send_stops_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the last stage summed its embedding's gradient with the first before it had sent all that
    the first waits for, both ways would tell that the step never ends."""
    monkeypatch.setattr("stagec.program.classes.joined_axis", _no_axis)
    issued = issued_of(options_of(*_job("tied embeddings")))
    costs: Mapping[int, Costs] = dict.fromkeys(range(len(issued.classes)), arbitrary)
    with pytest.raises(DiagnosticError, match="deadlock"):
        replayed(issued, costs, one_stream=True)
    with pytest.raises(CycleError):
        clocked(issued, costs, 0, overlap=True, one_stream=True)


def _no_axis(*_: object) -> str:
    return ""


def _slow(node: Node) -> Cost:
    """Costs of nodes where communication takes long."""
    cost = arbitrary(node)
    return cost if node.is_computation else Cost(50 * cost.time)


def _at_once(issued: Issued, times: Mapping[tuple[int, int], tuple[int, int]]) -> int:
    """How often a collective or a send of a rank starts before the one before it ends."""
    of = {int(r): i for i, ranks in enumerate(issued.members) for r in ranks}
    nodes = [each.program().nodes for each in issued.classes]
    count = 0
    last: dict[int, int] = {}
    for (rank, i), (start, end) in sorted(times.items()):
        node = nodes[of[rank]][i]
        if node.is_collective or node.kind == "send":
            begun = end - _slow(node).time if node.is_collective else start
            count += begun < last.get(rank, 0)
            last[rank] = end
    return count


def _job(name: str) -> tuple[str, dict[str, Any]]:
    return JOBS[name]


def test_the_grid_is_a_grid() -> None:
    assert len(GRID) >= 100


# -- closed forms ----------------------------------------------------------------------------------


def unit(node: Node) -> Cost:
    """One for attention and its gradient, and one for one gradient of weights; nothing else."""
    name = node.name.rpartition("/")[2]
    weights = node.phase == "backward" and name == "d_wo_i" and node.kind == "einsum"
    return Cost(int(node.kind in ("attention", "attention_grad") or weights))


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8)])
def test_a_step_of_units_is_that_of_the_schedule(name: str, stages: int, microbatches: int) -> None:
    """Forward 1, backward 2, of which the gradients of weights 1; communication takes no time."""
    schedule = SCHEDULES[name]
    chunks = max(schedule.default_chunks, 2 if name in ("interleaved", "looped-bfs") else 1)
    placement = schedule.placement(stages, chunks)
    options = {"schedule": name, "pp": stages, "microbatches": microbatches, "chunks": chunks}
    if chunks == schedule.default_chunks:
        del options["chunks"]
    issued = issued_of(
        tiny_options(LLAMA, **options, sizes={"L": placement.depth, "B": microbatches, "S": 64})
    )
    step, classes = replayed(issued, dict.fromkeys(range(len(issued.classes)), unit))
    sizes = stages, microbatches, chunks
    timeline = replay_actions(schedule.actions(*sizes), placement)
    # the unit of the schedule is a rank's share of the model, of `depth / ranks` layers
    assert step == timeline.makespan / placement.share
    bubble = schedule.closed_form(*sizes).bubble
    if bubble is not None and schedule.scope == "step":
        idle = max(each.parts(step).get(BUBBLE, 0) for each in classes)
        assert Fraction(idle) == bubble / placement.share


def test_with_computations_only_a_step_is_flops_over_rate() -> None:
    machine = load_machine("h100-sxm").changed(
        {"compute.launch": 0.0, "memory.bandwidth": inf, "network.bandwidth": inf}
    )
    machine = machine.model_copy(
        update={"efficiency": machine.efficiency.model_copy(update={"kernels": "roofline"})}
    )
    issued = issued_of(options_of(LLAMA, {}))
    step = step_time(issued, machine)
    (program,) = [each.program() for each in issued.classes]
    table = CostTable(machine, {})
    table.prepare(program.nodes)
    (costs,) = machine_costs(issued, machine).values()
    assert step.picoseconds == sum(costs(node).time for node in program.nodes)
    products = [n for n in program.nodes if n.kernel is not None and n.kernel.kind == "matmul"]
    rate = machine.compute.matrix["bf16"].value
    for node in products:
        if node.kernel is not None and node.kernel.dtype == "bf16":
            assert costs(node).time == round(node.flops / rate * 1e12)


# -- where the time goes ---------------------------------------------------------------------------


def random_job(seed: int) -> JobOptions:
    """A job of a random strategy that is one."""
    random = Random(seed)
    model, options = JOBS[random.choice([*JOBS])]
    sizes = {"L": 8, "B": 16 * random.choice((1, 2)), "S": random.choice((64, 128))}
    return options_of(model, {**options, "sizes": sizes})


def check_step(step: StepTime) -> None:
    """Its parts and its path add up to it, and each node of the path follows the one before."""
    for each in step.classes:
        assert sum(step.parts(each).values()) == step.picoseconds
    links = list(critical_path(step.classes))
    assert sum(link.time for link in links) == step.picoseconds
    assert all(link.time >= 0 for link in links)


@pytest.mark.long
def test_parts_and_path_add_up_to_the_step() -> None:
    for seed in range(tries(18)):
        random = Random(seed)
        machine = load_machine(random.choice(MACHINES))
        figures = {"efficiency.interference.computations": random.choice((0.0, 0.2))}
        issued = issued_of(random_job(seed))
        replay = ReplayOptions(random.random() < 0.7)
        check_step(step_time(issued, machine.changed(figures), replay))


@EXHAUSTIVE
@pytest.mark.parametrize("block", range(7))
def test_parts_and_path_of_many_jobs(block: int) -> None:
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        machine = load_machine(Random(seed).choice(MACHINES))
        check_step(step_time(issued_of(random_job(seed)), machine))


def test_what_a_computation_waits_for_counts_however_far_back() -> None:
    """A gather of what a message brings: as long as the message is on its way, it is no gather."""
    issued = issued_of(options_of(LLAMA, {"pp": 2, "tp": 2, "sp": True, "microbatches": 4}))

    def cost(node: Node) -> Cost:
        if node.is_message:
            return Cost(1000)
        return Cost(10) if node.is_collective else unit(node)

    step, classes = replayed(issued, dict.fromkeys(range(len(issued.classes)), cost))
    parts = classes[-1].parts(step)
    gathers = sum(n.kind == "all_gather" for n in issued.classes[-1].program().nodes)
    assert parts["exposed tp all_gather"] <= 10 * gathers
    assert parts["exposed pp message"] >= 1000


def test_without_launch_gaps_there_are_none() -> None:
    issued = issued_of(options_of(LLAMA, {"dp": 2}))
    machine = load_machine("h100-sxm").changed({"efficiency.host.issue": 0.0})
    with_gaps = step_time(issued, machine)
    without = step_time(issued, machine.changed({"compute.launch": 0.0}))
    (each,), (other,) = with_gaps.classes, without.classes
    assert LAUNCH in with_gaps.parts(each)
    assert LAUNCH not in without.parts(other)


@pytest.mark.parametrize("name", ["fsdp and tp", "1f1b", "dualpipe in small buckets"])
@pytest.mark.parametrize("issue", [1, 60, 10**4])
def test_a_step_ends_when_devices_and_hosts_have(name: str, issue: int) -> None:
    """A clock of hosts that issue each computation in so many picoseconds is that of devices with
    other costs."""
    issued = issued_of(options_of(*JOBS[name]))
    machine = load_machine("h100-sxm").changed({"efficiency.host.issue": issue * 1e-8})
    hosts = dict.fromkeys(range(len(issued.classes)), HostTimes(issue * 10**4).cost)
    host, _ = compare(issued, hosts, 0, overlap=True)
    step = step_time(issued, machine)
    assert step.picoseconds == max(step.devices.end, host)
    assert (step.classes is step.devices) == (host <= step.devices.end)


def test_hosts_launch_no_sums_of_gradients() -> None:
    """The engine of backward does that, without a call of a module."""
    issued = issued_of(options_of(LLAMA, {"microbatches": 2}))
    nodes = issued.classes[0].program().nodes
    costs = [(node, HostTimes(7).cost(node).launch) for node in nodes]
    assert {cost for node, cost in costs if node.kind == "accumulate_grad"} == {0}
    assert {cost for node, cost in costs if node.phase == "forward"} == {7}


def test_hosts_that_wait_for_devices_do_not_run_ahead() -> None:
    """Each forward and backward takes as long as the slower of host and device."""
    issued = issued_of(options_of(LLAMA, {"microbatches": 2}))
    machine = load_machine("h100-sxm").changed({"compute.launch": 0.0})

    def picoseconds(issue: str, backward: str = "", microbatch: str = "") -> int:
        hosts = HostsRule(issue, backward, "phases", microbatch)
        return step_time(issued.run_by(replace(issued.software, hosts=hosts)), machine).picoseconds

    devices = step_time(issued, machine, hosts=False)
    assert picoseconds("1 ns") == devices.picoseconds
    nodes = issued.classes[0].program().nodes
    counts = Counter(node.phase for node in nodes if HostTimes(1).cost(node).launch)
    late = counts["forward"] * 10**10 + counts["backward"] * 10**9
    rest = devices.parts(devices.slowest)["optimizer"]
    slow = picoseconds("10 ms", "1 ms")
    assert abs(slow - rest - late) < 10**6  # gaps are whole picoseconds
    behind = picoseconds("10 ms", "1 ms", "3 ms")
    assert behind == slow + 2 * 3 * 10**9


def test_hosts_that_wait_hold_up_the_slower_half() -> None:
    """Where only forward is late, backward keeps the time of the device."""
    issued = issued_of(options_of(LLAMA, {"microbatches": 2}))
    machine = load_machine("h100-sxm")
    ahead = HostsRule(issue="1 ms", issue_backward="1 ns")
    times: list[int] = []
    for rule in (ahead, replace(ahead, waits="phases")):
        step = step_time(issued.run_by(replace(issued.software, hosts=rule)), machine)
        times.append(step.picoseconds)
    devices = step_time(issued, machine, hosts=False).picoseconds
    assert times[0] < times[1] < times[0] + devices


def test_hosts_that_wait_for_each_kernel_add_all_that_they_spend() -> None:
    """Also where devices would take longer, which those that wait for phases hide."""
    issued = issued_of(options_of(LLAMA, {"microbatches": 2}))
    machine = load_machine("h100-sxm")
    devices = step_time(issued, machine, hosts=False).picoseconds
    nodes = issued.classes[0].program().nodes
    counts = Counter(node.phase for node in nodes if HostTimes(1).cost(node).launch)
    spent = counts["forward"] * 2000 + (sum(counts.values()) - counts["forward"]) * 1000
    expected = {"kernels": devices + spent, "phases": devices}
    for waits, seconds in expected.items():
        rule = HostsRule(issue="2 ns", issue_backward="1 ns", waits=waits)
        step = step_time(issued.run_by(replace(issued.software, hosts=rule)), machine)
        assert step.picoseconds == seconds


# -- interference ----------------------------------------------------------------------------------


def test_a_computation_is_stretched_while_a_collective_runs() -> None:
    assert stretched(0, 100, [], 512) == 100
    assert stretched(0, 100, [(0, 50)], 512) == 125  # 50 at half speed do 25
    assert stretched(0, 100, [(20, 1000)], 512) == 20 + 160
    assert stretched(0, 100, [(0, 10), (30, 40)], 512) == 110
    assert stretched(50, 100, [(0, 40)], 512) == 150
    assert stretched(0, 100, [(100, 200)], 512) == 100


def test_merged_intervals_are_apart() -> None:
    assert merged([(5, 9), (0, 3), (3, 4), (8, 12), (20, 20)]) == [(0, 4), (5, 12)]


def test_classes_are_distinguished_by_their_distances() -> None:
    """A stage at the end of a node sends further than one within."""
    issued = issued_of(
        options_of(LLAMA, {"pp": 4, "tp": 4, "microbatches": 4, "sizes": {"H": 8, "G": 4}})
    )
    costs = machine_costs(issued, load_machine("h100-sxm"))
    sends: dict[int, set[int]] = {}
    for i, each in enumerate(issued.classes):
        nodes = [n for n in each.program().nodes if n.kind == "send" and n.by == 1]
        sends[i] = {costs[i](n).time for n in nodes}
    inside, across = sends[0].pop(), sends[1].pop()
    assert across > inside
    assert sends[2].pop() == inside
