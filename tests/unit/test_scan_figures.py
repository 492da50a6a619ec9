"""FLOPs of convolutions and scans of published models: the figures of `models.json` that come on
top of the products, since PyTorch's counter does not see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagec.ir.core import Operation
from stagec.ir.expr import evaluate
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.module import Module
from stagec.ir.traits import Repeats
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from tests.support import run_passes

DATA = Path(__file__).parents[1] / "data"
FIGURES: dict[str, Any] = json.loads((DATA / "models.json").read_text())
#: The figures of a model that its scans add up to.
SCANS = {
    "mamba-2.8b": ("scan_recurrent",),
    "jamba-v0.1": ("scan_recurrent",),
    "mamba2-2.7b": ("scan_chunked_matmul",),
    "granite-4.0-h-tiny": ("scan_chunked_matmul",),
    "nemotron-h-56b": ("scan_chunked_matmul",),
    "falcon-h1-0.5b": ("scan_chunked_matmul",),
    "qwen3-next-80b-a3b": ("scan_chunked_matmul", "scan_extra"),
    "minimax-m1-80k": ("scan_chunked_matmul",),
    "rwkv7-1.5b": ("scan_recurrent",),
}
OPS = ("selective_scan", "ssd", "gated_delta_rule", "linear_attention", "wkv7")


def executed(module: Module, *names: str) -> int:
    """FLOPs of the ops of these names, in all layers."""
    return sum(
        evaluate(op.definition.flops(op, factor_sizes(op, rule)), module.env) * _times(op, module)
        for op in module.walk()
        if op.name in names and (rule := op.definition.rule(op)) is not None
    )


def _times(op: Operation, module: Module) -> int:
    owner = op.parent_op
    count = 1
    while owner is not None:
        if owner.has(Repeats):
            count *= evaluate(owner.expr("count"), module.env)
        owner = owner.parent_op
    return count


@pytest.mark.parametrize("name", SCANS)
def test_scans_and_convolutions_cost_what_is_published(name: str) -> None:
    expected = FIGURES[name]["flops_fwd"]["beyond_matmul"]
    job = JobOptions(str(DATA / "configs" / f"{name}.json"), sizes={"B": 1, "S": 4096})
    module = run_passes(JobBuilder(job).module, "inline,infer-shapes")
    scans = executed(module, *(f"stg.{op}" for op in OPS))
    assert scans == sum(expected[key] for key in SCANS[name])
    assert executed(module, "stg.causal_conv") == expected.get("conv", 0)
