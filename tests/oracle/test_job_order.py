"""The order of a job's nodes: free of deadlock, buckets while backward goes on, and the parameters
of a layer gathered one layer early.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stagec.driver.job import JobBuilder
from stagec.trace.check import check_directory
from stagec.trace.emit import Job, make_job, write_job
from stagec.trace.nodes import Node, Program
from tests.support import GPT, LLAMA, MIXTRAL, pairwise, tiny_options


def job(model: str = LLAMA, **options: Any) -> Job:
    """The job of a tiny model."""
    return make_job(JobBuilder(tiny_options(model, **options)).lower(), "tiny")


def ancestors(program: Program) -> dict[Node, set[Node]]:
    """Everything that must be done before a node may start."""
    found: dict[Node, set[Node]] = {}
    for node in program.nodes:
        before = [*node.deps, *node.after]
        found[node] = set(before).union(*(found[b] for b in before))
    return found


def by_name(program: Program) -> dict[str, Node]:
    names = {n.name: n for n in program.nodes}
    assert len(names) == len(program.nodes), "names are not unique"
    return names


GRID: Mapping[str, list[Any]] = {
    "model": [LLAMA, GPT, MIXTRAL],
    "mesh": [(1, 1), (1, 2), (4, 1), (2, 2), (2, 4)],
    "sp": [False, True],
    "zero": [0, 1, 2, 3],
    "microbatches": [1, 2],
    "no_vocab_parallel": [False, True],
    "tp_inputs": ["regather", "save-gathered"],
    "ddp_bucket": [0, 256],
}


@pytest.mark.parametrize("row", list(pairwise(GRID)), ids=str)
def test_a_job_is_well_formed_and_free_of_deadlock(row: dict[str, Any], tmp_path: Path) -> None:
    options = dict(row)
    dp, tp = options.pop("mesh")
    made = job(options.pop("model"), dp=dp, tp=tp, **options)
    write_job(made, tmp_path / "out", {})
    report = check_directory(tmp_path / "out")
    assert report.errors == []
    assert report.warnings == []
    assert report.ranks == dp * tp
    assert report.nodes == dp * tp * len(made.classes[0].program().nodes)
    program = made.classes[0].program()
    ids = [n.id for n in program.nodes]
    assert ids == list(range(1, len(ids) + 1))
    for node in program.nodes:
        assert all(b.id < node.id for b in (*node.deps, *node.after)), node.name


def test_each_rank_has_one_order_of_computations_and_one_of_collectives() -> None:
    """Of two nodes of a stream one is always an ancestor of the other."""
    program = job(dp=2, tp=2, sp=True, zero=3, microbatches=2).classes[0].program()
    before = ancestors(program)
    for kind in (True, False):
        stream = [n for n in program.nodes if n.is_collective is kind]
        assert len(stream) > 20
        for earlier, later in itertools.pairwise(stream):
            assert earlier in before[later]


def test_buckets_are_issued_while_backward_goes_on() -> None:
    """A bucket stands between backward nodes, right after what completes it, and waits for it."""
    program = job(dp=2, ddp_bucket=600, sizes={"L": 4}).classes[0].program()
    nodes = program.nodes
    buckets = [n for n in nodes if n.phase == "gradient" and n.is_collective]
    sizes = [n.size for n in buckets]
    assert len(buckets) > 5
    assert set(sizes[:-1]) == {600}
    total = sum(sizes)
    last_backward = max(n.id for n in nodes if n.phase == "backward")
    first_backward = min(n.id for n in nodes if n.phase == "backward")
    overlapped = [n for n in buckets if first_backward < n.id < last_backward]
    assert len(overlapped) > len(buckets) // 2
    before = ancestors(program)
    gradients = [
        n for n in nodes if n.name.startswith(("backward/", "gradient/")) and not n.is_collective
    ]
    for bucket in buckets:
        assert any(d in gradients for d in bucket.deps)
        assert all(d.id < bucket.id for d in bucket.deps)
    updates = [n for n in nodes if n.kind == "adamw"]
    assert updates
    for update in updates:
        assert set(buckets) <= before[update]
    assert total == sum(n.size for n in buckets)


def test_a_bucket_waits_for_the_gradients_that_it_holds() -> None:
    """The nodes that the buckets wait for become ready one after the other, layer by layer."""
    made = job(dp=2, ddp_bucket=600, sizes={"L": 4})
    buckets = [
        n for n in made.classes[0].program().nodes if n.phase == "gradient" and n.is_collective
    ]
    ready = [max(d.id for d in b.deps) for b in buckets]
    assert ready == sorted(ready)
    layers = [d.name for b in buckets for d in b.deps if "/L" in d.name]
    order = list(dict.fromkeys(name.split("/")[1] for name in layers))
    assert order == ["L3", "L2", "L1", "L0"]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_gather_starts_one_layer_early_and_no_earlier(microbatches: int) -> None:
    """FSDP prefetch: the parameters of layer i + 1 are gathered while layer i computes, not before
    layer i - 1 is done, in forward and (mirrored) in backward.
    """
    layers = 5
    made = job(dp=2, zero=3, microbatches=microbatches, sizes={"L": layers})
    program = made.classes[0].program()
    before, nodes = ancestors(program), program.nodes
    for prefix in ("",) if microbatches == 1 else ("mb0/", "mb1/"):
        for phase, order in (
            ("forward", list(range(layers))),
            ("backward", list(reversed(range(layers)))),
        ):
            gathers: dict[int, Node] = {}
            work: dict[int, list[Node]] = {}
            for i in order:
                inside = [n for n in nodes if n.name.startswith(f"{phase}/{prefix}L{i}/")]
                (gathers[i],) = (n for n in inside if n.kind == "all_gather")
                work[i] = [n for n in inside if not n.is_collective]
            for at, layer in enumerate(order):
                if at >= 1:
                    assert not set(work[order[at - 1]]) & before[gathers[layer]], "not overlapped"
                if at >= 2:
                    assert set(work[order[at - 2]]) <= before[gathers[layer]], "too early"
                users = [n for n in work[layer] if gathers[layer] in n.deps]
                assert users
