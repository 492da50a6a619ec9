"""Asynchronous tensor parallelism is a matter of control order: the same nodes, other control
dependencies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.program.nodes import Node
from tests.support import LLAMA, analyse, only_program, stagec

SIZES = {"L": 2, "B": 2}
STRATEGIES: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "sp": True, "recompute": "full"},
    {"tp": 2, "dp": 2, "zero": 3},
    {"tp": 16, "sp": True},
    {"tp": 2, "dp": 2, "ddp_bucket": 1 << 26},
]


def nodes(*, async_tp: bool, **options: Any) -> list[Node]:
    job = JobOptions(LLAMA, sizes=SIZES, async_tp=async_tp, **options)
    return only_program(JobBuilder(job).lower()).nodes


def over_tp(node: Node) -> bool:
    """Whether it moves activations between ranks of tensor parallelism."""
    return set(node.group.axes) in ({"tp"}, {"tp", "tpr"}) and node.phase in (
        "forward",
        "backward",
        "recompute",
    )


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_only_control_dependencies_differ(options: dict[str, Any]) -> None:
    free, blocking = nodes(async_tp=True, **options), nodes(async_tp=False, **options)
    for a, b in zip(free, blocking, strict=True):
        assert (a.id, a.name, a.kind, a.phase, a.group) == (b.id, b.name, b.kind, b.phase, b.group)
        assert (a.size, a.flops, a.matmul, a.out) == (b.size, b.flops, b.matmul, b.out)
        assert [d.id for d in a.deps] == [d.id for d in b.deps]
        assert {c.id for c in a.after} <= {c.id for c in b.after}


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_what_blocking_adds(options: dict[str, Any]) -> None:
    """By hand from the order of issue: a collective over tp waits for the computation before it,
    the next computation for the last of the collectives between, unless data says so already."""
    free, blocking = nodes(async_tp=True, **options), nodes(async_tp=False, **options)
    computation: Node | None = None
    collective: Node | None = None
    for a, b in zip(free, blocking, strict=True):
        expected = {c.id for c in a.after}
        if over_tp(a):
            expected |= {computation.id} if computation else set()
            collective = a
        elif not a.is_collective:
            expected |= {collective.id} if collective else set()
            computation, collective = a, None
        assert {c.id for c in b.after} == expected - {d.id for d in a.deps}, a.name


def test_a_weight_gradient_overlaps_the_sum_of_input_gradients_unless_it_blocks() -> None:
    """The reduction of d_n2 is issued after the gradient of gate and up, which it does not use."""
    for async_tp in (True, False):
        actual = nodes(async_tp=async_tp, tp=2)
        reduce = next(n for n in actual if n.name == "backward/L0/layers/d_n2_r")
        weights = next(n for n in actual if n.name == "backward/L0/layers/swiglu/d_w_gate_up_i")
        assert weights.id < reduce.id
        before = {d.name for d in after_of(reduce)}
        assert (weights.name in before) is not async_tp
        assert [d.name for d in reduce.deps] == ["backward/L0/layers/d_n2"]


def after_of(node: Node) -> list[Node]:
    """What a node is issued after, and what that uses."""
    return [d for a in node.after for d in (a, *a.deps)]


def test_counts_are_the_same() -> None:
    left, right = (analyse(LLAMA, tp=2, sp=True, sizes=SIZES, async_tp=a) for a in (True, False))
    assert left == right


def test_blocking_traces_are_free_of_deadlock(tmp_path: Path) -> None:
    arguments = ["--dp", "2", "--tp", "2", "--sp", "--zero", "3", "--no-async-tp"]
    out = tmp_path / "t"
    assert stagec("compile", LLAMA, *arguments, "--set", "L=2", "-o", out).code == 0
    checked = stagec("check", out)
    assert (checked.code, "0 errors" in checked.out) == (0, True)


def test_a_statement_names_axes_of_the_mesh(tmp_path: Path) -> None:
    path = tmp_path / "s.stg"
    path.write_text(
        "stg.module @m {\n  stg.mesh @pod[tp = 2]\n  stg.strategy @s[mesh = @pod] {\n"
        "    stg.split[F, over = tp]\n    stg.blocking[over = tq]\n  }\n}\n"
    )
    ran = stagec("analyze", LLAMA, path)
    assert ran.code == 1
    assert "the mesh has no axis 'tq'" in ran.err
