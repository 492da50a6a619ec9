"""FSDP: what is kept between forward and backward, and how early gathers are issued.

Closed forms of Llama 3 8B with few layers: one gather per block and one of the root unit in
forward; in backward one per block that was not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagec.analysis.footprint import timelines
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.program.classes import rank_classes
from stagec.program.nodes import Node, Program
from tests.support import (
    LLAMA,
    PLACE,
    STEP,
    analyse,
    crossed,
    each_value,
    inputs_of,
    only_program,
    pairwise,
    run_numeric,
    stagec,
    tiny_module,
)

L, B = 5, 8
D, H, G, K, F, V = 4096, 32, 8, 128, 14336, 128256
BLOCK = 2 * (D * K * (2 * H + 2 * G) + 3 * D * F + 2 * D)
ROOT = 2 * (2 * V * D + D)
FACTORS = {
    "reshard_after_forward": ("always", "never", "last"),
    "axes": ({"dp": 2}, {"dp": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}),
    "sp": (False, True),
    "recompute": ("none", "full", "full-replay"),
    "microbatches": (1, 2),
    "tp_inputs": ("regather", "save-gathered"),
}


@cache
def plain() -> tuple[dict[str, Array], list[Array]]:
    """Inputs and results of the step on one device."""
    module = tiny_module(LLAMA, STEP)
    inputs = inputs_of(module, 2)
    return inputs, run_numeric(module, inputs)


@pytest.mark.parametrize("row", each_value(pairwise(FACTORS), str))
def test_a_step_equals_that_on_one_device(row: dict[str, Any]) -> None:
    options = dict(row)
    axes: Mapping[str, int] = options.pop("axes")
    inputs, expected = plain()
    module = tiny_module(LLAMA, f"{STEP},{PLACE}", zero=3, **axes, **options)
    names = [v.name for v in module.main.body.terminator.operands]
    for name, x, y in zip(names, expected, run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    "axes", [{"dp": 4}, {"dp": 4, "tp": 2}, {"dp_replicate": 2, "dp_shard": 4}, {"dp": 2, "cp": 2}]
)
@pytest.mark.parametrize("outer", ["root", "ends"])
def test_a_step_that_keeps_parts_equals_that_on_one_device(
    axes: Mapping[str, int], outer: str
) -> None:
    """Two of four ranks keep what forward has gathered, and backward gathers over these."""
    inputs, expected = plain()
    options = {"zero": 3, "reshard_ranks": 2, "shard_units": outer, "recompute": "full"}
    module = tiny_module(LLAMA, f"{STEP},{PLACE}", **axes, **options)
    names = [v.name for v in module.main.body.terminator.operands]
    for name, x, y in zip(names, expected, run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_backward_gathers_parts_among_few_ranks(recompute: str) -> None:
    """Blocks: over two ranks, half of each of which a rank keeps from forward."""
    entry = analysed(recompute=recompute, reshard_ranks=2)
    calls = [r for r in entry["collectives"] if r["op"] == "all_gather"]
    assert {(r["phase"], r["group_size"]): (r["count"], r["bytes"]) for r in calls} == {
        ("forward", 8): (L + 1, L * BLOCK + ROOT),
        ("backward", 2): (L, L * BLOCK),
    }


@crossed(axes=FACTORS["axes"], microbatches=(1, 2))
def test_a_step_that_gathers_first_equals_that_on_one_device(
    axes: Mapping[str, int], microbatches: int
) -> None:
    """ZeRO-1 with parameters that are gathered when the step begins."""
    inputs, expected = plain()
    options = {"zero": 1, "overlap_param_gather": True, "microbatches": microbatches}
    module = tiny_module(LLAMA, f"{STEP},{PLACE}", **axes, **options)
    names = [v.name for v in module.main.body.terminator.operands]
    for name, x, y in zip(names, expected, run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_parameters_are_gathered_once_first_or_last(microbatches: int) -> None:
    """As many bytes before forward as behind updates, whatever the number of microbatches, and as
    many reduced; and no call is behind the updates."""
    options = {"dp": 8, "zero": 1, "microbatches": microbatches, "sizes": {"L": L, "B": 2 * B}}
    (last,), (first,) = (
        analyse(LLAMA, **options, overlap_param_gather=how)["classes"] for how in (False, True)
    )
    assert gathers(last) == {"optimizer": (gathers(last)["optimizer"][0], L * BLOCK + ROOT)}
    assert gathers(first) == {"forward": (L + 1, L * BLOCK + ROOT)}
    (one,), (other,) = (
        [r["bytes"] for r in each["collectives"] if r["op"] == "reduce_scatter"]
        for each in (last, first)
    )
    assert one == other


def analysed(**options: Any) -> dict[str, Any]:
    result = analyse(LLAMA, dp=8, zero=3, sizes={"L": L, "B": B}, **options)
    return dict(result["classes"][0])


def planned(**options: Any) -> Module:
    sizes = {"L": L, "B": B * 2}
    options = {"dp": 8, "zero": 3, "sizes": sizes, **options}
    return JobBuilder(JobOptions(LLAMA, **options)).lower("plan-memory")


def gathers(entry: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Count and bytes of the gathers by phase."""
    return {
        r["phase"]: (r["count"], r["bytes"])
        for r in entry["collectives"]
        if r["op"] == "all_gather"
    }


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("reshard", "again"), [("always", L), ("last", L - 1), ("never", 0)])
def test_gathers(reshard: str, again: int, recompute: str, microbatches: int) -> None:
    options = {"B": B * microbatches}
    result = analyse(
        LLAMA,
        dp=8,
        zero=3,
        reshard_after_forward=reshard,
        recompute=recompute,
        microbatches=microbatches,
        sizes={"L": L, **options},
    )
    (entry,) = result["classes"]
    m = microbatches
    expected = {
        "forward": (m * (L + 1), m * (L * BLOCK + ROOT)),
        "backward": (m * again, m * again * BLOCK),
    }
    assert gathers(entry) == {k: v for k, v in expected.items() if v[0]}


def test_kept_parameters_are_in_the_plan() -> None:
    """`never` holds all gathered blocks at the worst moment, `last` one of them."""
    always, last, never = (
        analysed(reshard_after_forward=r)["memory"] for r in ("always", "last", "never")
    )
    assert never["stash"] == last["stash"] == always["stash"]  # of activations
    assert never["peak"] - always["peak"] == L * BLOCK
    assert last["peak"] - always["peak"] == BLOCK


@pytest.mark.parametrize(("reshard", "blocks"), [("always", 0), ("last", 1), ("never", L)])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_at_the_loss_the_root_is_there_and_what_is_kept(
    reshard: str, blocks: int, microbatches: int
) -> None:
    """Nothing of the root is dropped after forward: it is not gathered again."""
    module = planned(microbatches=microbatches, reshard_after_forward=reshard)
    loss = next(op for op in module.walk() if op.name == "stg.cross_entropy_grad")
    (_, _, timeline), *_ = timelines(module)
    (point,) = (p for p in timeline.points() if p.step.op is loss)
    assert point.bytes["gathered weights"] == ROOT + blocks * BLOCK


@pytest.mark.parametrize(("reshard", "most"), [("always", 2), ("never", L)])
def test_units_are_dropped_as_a_whole(reshard: str, most: int) -> None:
    """The root before its gradients are reduced; each block when it has run, or has run back. With
    `always` no more are there than are gathered ahead."""
    (_, _, timeline), *_ = timelines(planned(reshard_after_forward=reshard))
    points = list(timeline.points())
    ran = [p.step.op.name for p in points]
    last = ran.index("stg.embedding_grad") + 1
    assert ran[last] == "stg.reshard"
    kept = [p.bytes["gathered weights"] for p in points]
    assert kept[0] == kept[last] == ROOT
    assert not any(kept[last + 1 :])
    assert {h - ROOT for h in kept[: last + 1]} == {i * BLOCK for i in range(most + 1)}


@pytest.mark.long
@crossed(more=[{}, {"schedule": "interleaved", "chunks": 2}], microbatches=[2, 8])
def test_in_a_pipeline_all_is_gathered_once_and_held_once(
    more: dict[str, Any], microbatches: int
) -> None:
    """Whatever the number of microbatches: each block and the root in one call for each stage."""
    options: dict[str, Any] = {
        "pp": 2,
        "microbatches": microbatches,
        "sizes": {"L": 4, "B": 8 * 8},
        **more,
    }
    always, never = (
        analyse(LLAMA, dp=8, zero=3, reshard_after_forward=r, **options)["classes"]
        for r in ("always", "never")
    )
    first, last = (gathers(entry) for entry in never)
    embedding = ROOT // 2 - D  # the last stage has the norm as well
    assert first == {"forward": (2 + 1, 2 * BLOCK + embedding)}
    assert last == {"forward": (2 + 1, 2 * BLOCK + embedding + 2 * D)}
    for kept, dropped in zip(never, always, strict=True):
        more_held = kept["memory"]["peak"] - dropped["memory"]["peak"]
        assert 0 < more_held <= 2 * BLOCK + ROOT
    builder = JobBuilder(JobOptions(LLAMA, dp=8, zero=3, reshard_after_forward="never", **options))
    for each in rank_classes(builder.lower()):
        nodes = [n for n in each.program().nodes if n.kind == "all_gather"]
        assert len(nodes) == 3


def test_one_layer_that_is_kept_leaves_no_gather() -> None:
    result = analyse(LLAMA, dp=8, zero=3, reshard_after_forward="last", sizes={"L": 1, "B": B})
    assert {r["phase"] for r in result["classes"][0]["collectives"] if r["count"]} >= {"forward"}
    rows = gathers(result["classes"][0])
    assert rows.get("backward", (0, 0)) == (0, 0)


# -- the trace -------------------------------------------------------------------------------------


def program(**options: Any) -> Program:
    """The nodes of a rank of two: no other collective than those of FSDP."""
    builder = JobBuilder(JobOptions(LLAMA, dp=2, zero=3, sizes={"L": L, "B": 2}, **options))
    return only_program(builder.lower())


def block_gathers(nodes: list[Node], phase: str) -> dict[int, Node]:
    """The gathers of blocks by layer."""
    return {
        int(n.name.split("/L")[1].split("/")[0]): n
        for n in nodes
        if n.kind == "all_gather" and n.name.startswith(phase) and "/L" in n.name
    }


@pytest.mark.parametrize("reshard", ["always", "last", "never"])
def test_nodes_are_as_many_as_counted(reshard: str) -> None:
    nodes = program(reshard_after_forward=reshard).nodes
    counted = gathers(analysed(reshard_after_forward=reshard))
    for phase in ("forward", "backward"):
        actual = [n for n in nodes if n.kind == "all_gather" and n.phase == phase]
        assert len(actual) == counted.get(phase, (0, 0))[0]


def test_the_last_block_is_found_where_forward_left_it() -> None:
    actual = block_gathers(program(reshard_after_forward="last").nodes, "backward")
    assert sorted(actual) == list(range(L - 1))


@crossed(phase=["forward", "backward"], ahead=[0, 1, 2, 3, 9])
def test_gathers_are_issued_so_many_blocks_ahead(phase: str, ahead: int) -> None:
    """The gather of the i-th block that runs waits for the end of block i - 1 - ahead."""
    nodes = program(fsdp_prefetch=ahead).nodes
    order = list(range(L)) if phase == "forward" else list(reversed(range(L)))
    actual = block_gathers(nodes, phase)
    assert sorted(actual) == sorted(order)
    for position, layer in enumerate(order):
        before = [*actual[layer].after, *actual[layer].deps]
        last = max((n for n in before if not n.is_collective), key=lambda n: n.id)
        inside = [n for n in nodes if f"/L{order[max(position - 1 - ahead, 0)]}/" in n.name]
        ran = [n for n in inside if not n.is_collective and n.name.startswith(phase)]
        if position - 1 - ahead >= 0:
            assert last.id in {n.id for n in nodes if f"/L{order[position - 1 - ahead]}/" in n.name}
            assert last.id >= max(n.id for n in ran)
        else:  # those of the first blocks are issued before any of them runs
            assert last.id < min(n.id for n in ran)


def test_prefetch_changes_no_counts() -> None:
    reference = analysed()
    for ahead in (0, 2):
        actual = analysed(fsdp_prefetch=ahead)
        assert actual["collectives"] == reference["collectives"]
        assert actual["flops"] == reference["flops"]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("stg.shard_params[over = dp, zero = 2, reshard = never]", "'reshard' has no effect"),
        ("stg.shard_params[over = dp, zero = 1, prefetch = 2]", "'prefetch' has no effect"),
        ("stg.shard_params[over = dp, zero = 3, reshard = first]", "always, never, last"),
    ],
)
def test_statements_without_sense_are_refused(
    statement: str, message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("s") / "s.stg"
    path.write_text(
        "stg.module @m {\n  stg.mesh @pod[dp = 2]\n"
        f"  stg.strategy @s[mesh = @pod] {{\n    {statement}\n  }}\n}}\n"
    )
    ran = stagec("analyze", LLAMA, path)
    assert ran.code == 1
    assert message in ran.err
