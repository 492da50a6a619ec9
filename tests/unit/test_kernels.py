"""Kernels of computations: their extents are those of the FLOPs that the computations have."""

from __future__ import annotations

from typing import Any

import pytest

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, product, same
from stagec.ir.kernel import EXTENTS
from stagec.jobs.builder import JobBuilder
from tests.support import GPT, TINY, crossed, operations, tiny_options

STRATEGIES: dict[str, dict[str, Any]] = {
    "one device": {},
    "tensor parallel": {"tp": 2, "dp": 2, "sp": True, "zero": 3},
    "asynchronous": {"tp": 2, "sp": True, "async_tp": True},
    "ring": {"cp": 2, "cp_mode": "ring", "recompute": "selective"},
    "gathered keys": {"cp": 2, "cp_mode": "all-gather"},
    "ulysses": {"cp": 2, "cp_mode": "ulysses"},
    "pipeline": {"pp": 2, "microbatches": 4, "schedule": "zb-h1", "fp8": "hybrid"},
}


def products(op: Operation) -> Expr:
    """FLOPs of a kernel by its extents, from what its kind means."""
    kind = op.text("kernel", "memory")
    n = {name: op.expr(name) for name in EXTENTS[kind]}
    if kind == "matmul":
        return product(n.values()) * 2
    pairs = product(n[f] for f in ("batch", "heads", "queries", "keys"))
    times = (3, 2) if kind == "attention_backward" else (1, 1)
    flops = pairs * (n["qk"] * times[0] + n["v"] * times[1]) * 2
    return flops * (n["keys"] + 1) / (n["keys"] * 2) if op.flag("causal") else flops


@crossed(model=TINY, strategy=STRATEGIES)
def test_extents_give_the_flops(model: str, strategy: str) -> None:
    """Symbolically, for every computation with matrix products; what is none has no extents."""
    if model == GPT and strategy in ("ring", "ulysses"):
        pytest.skip("attention of GPT is not fused")
    builder = JobBuilder(tiny_options(model, **STRATEGIES[strategy]), symbolic=True)
    kinds = set[str]()
    for op in operations(builder.lower(), "et.comp"):
        kind = op.text("kernel", "memory")
        kinds.add(kind)
        if kind != "memory":
            assert same(op.expr("flops"), products(op)), op
        else:
            assert "matmul" not in op.attrs, op
    assert {"matmul", "memory"} <= kinds
