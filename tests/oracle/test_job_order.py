"""The order of a job's nodes: free of deadlock, buckets while backward goes on, and the parameters
of a layer gathered one layer early.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stagec.check.traces import check_directory
from stagec.jobs.builder import JobBuilder
from stagec.program.nodes import Node, Program
from stagec.traces.emit import EmittedJob, make_job
from stagec.traces.writer import write_source
from tests.support import GPT, LLAMA, MIXTRAL, each_value, pairwise, tiny_options


def job(model: str = LLAMA, **options: Any) -> EmittedJob:
    """The job of a tiny model."""
    return make_job(JobBuilder(tiny_options(model, **options)).lower(), "tiny")


def ancestors(program: Program) -> dict[Node, set[Node]]:
    """Everything that must be done before a node may start."""
    actual: dict[Node, set[Node]] = {}
    for node in program.nodes:
        before = [*node.deps, *node.after]
        actual[node] = set(before).union(*(actual[b] for b in before))
    return actual


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


@pytest.mark.parametrize("row", each_value(pairwise(GRID), str))
def test_a_job_is_well_formed_and_free_of_deadlock(row: dict[str, Any], tmp_path: Path) -> None:
    options = dict(row)
    dp, tp = options.pop("mesh")
    made = job(options.pop("model"), dp=dp, tp=tp, **options)
    write_source(made, tmp_path / "out", {})
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


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"zero": 1}], ids=str)
def test_gradients_leave_as_soon_as_they_are_made(options: dict[str, Any]) -> None:
    """A cast, or the addition to the sum of microbatches, follows the product that makes the
    gradient, and a bucket the gradient that fills it: none waits for other gradients of its
    layer."""
    made = job(dp=2, ddp_bucket=600, sizes={"L": 4}, **options)
    nodes = made.classes[0].program().nodes
    computed = [n for n in nodes if n.is_computation]
    place = {n: i for i, n in enumerate(computed)}
    microbatches = options.get("microbatches", 1)
    last = "_sum" if microbatches > 1 else "_f32"
    casts = [n for n in computed if n.name.endswith(last) and n.phase == "backward"]
    assert len(casts) == microbatches * (8 * 4 + 3)
    assert all(computed[place[cast] - 1] is cast.deps[0] for cast in casts)
    buckets = [n for n in nodes if n.phase == "gradient" and n.is_collective]
    assert len(buckets) > 8
    assert all(n.size >= 600 for n in buckets[:-1])
    kept = [d for b in buckets for d in b.deps]
    assert kept == casts[-len(casts) // microbatches :], "each of the last microbatch, in order"
    for bucket in buckets:
        assert nodes[bucket.id - 2] is bucket.deps[-1], "issued with the gradient that fills it"


def test_updates_wait_for_all_buckets() -> None:
    program = job(dp=2, ddp_bucket=600, sizes={"L": 4}).classes[0].program()
    before = ancestors(program)
    buckets = {n for n in program.nodes if n.phase == "gradient" and n.is_collective}
    updates = [n for n in program.nodes if n.kind == "adamw"]
    assert updates
    assert all(buckets <= before[update] for update in updates)


def test_reductions_are_named_after_what_they_reduce() -> None:
    """Of a layer's gradients, of two layers', and of what is in none."""
    sizes = {"L": 2, "D": 8, "F": 8, "H": 4, "G": 4, "K": 2, "V": 16}
    program = job(dp=2, ddp_bucket=600, sizes=sizes).classes[0].program()
    names = [n.name for n in program.nodes if n.phase == "gradient" and n.is_collective]
    assert names == [
        "gradient/L1/d_head_f32..layers/swiglu/g_w_down.reduce",  # 512 + 32 + 256 bytes
        "gradient/L1/layers/swiglu/g_w_gate_up..layers/gqa/g_wo.reduce",  # 512 + 32 + 256
        "gradient/L1/layers/gqa/g_wv..layers/gqa/g_wq.reduce",  # 256 + 256 + 256
        "gradient/L1..L0/layers/g_attn_norm..layers/swiglu/g_w_gate_up.reduce",  # 32 + 256 + 512
        "gradient/L0/layers/g_ffn_norm..layers/gqa/g_wk.reduce",  # 32 + 256 + 256 + 256
        "gradient/L0/layers/gqa/g_wq..d_embed_f32.reduce",  # 256 + 32 + 512
    ]


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
