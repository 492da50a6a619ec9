"""Weights of few bits: what the blocks share lies beside them, and numbers and bytes are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stagec.ir.expr import evaluate
from stagec.ir.types import WEIGHTS
from stagec.ir_spec.ops.quantized import FORMATS
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from tests.support import (
    DEEPSEEK,
    LLAMA,
    MIXTRAL,
    crossed,
    inputs_of,
    operations,
    run_numeric,
    run_one_device,
    run_passes,
    tiny_module,
)

PLAIN = "inline,infer-shapes,apply-strategy"
#: Parameters that no product in a block multiplies with, or whose product chooses.
KEPT = ("embed", "head", "norm", "router", "bias")


def prepared(format: str, block: int = 0) -> str:
    """Up to the strategy, with weights in a format."""
    quantized = f"quantize-weights{{format={format},block={block}}}"
    return PLAIN.replace("apply-strategy", f"{quantized},apply-strategy")


@crossed(
    model=[LLAMA, MIXTRAL, DEEPSEEK],
    format=sorted(FORMATS),
    options=[{"tp": 2}, {"dp": 2, "tp": 2, "sp": True}, {"dp": 2, "pp": 2, "microbatches": 2}],
)
def test_all_ranks_compute_what_one_does(model: str, format: str, options: dict[str, Any]) -> None:
    one = tiny_module(model, prepared(format, 2), **options)
    inputs = inputs_of(one)
    expected = run_one_device(one, inputs)[0]
    placed = tiny_module(model, f"{prepared(format, 2)},partition", **options)
    assert operations(placed, "stg.scaled_einsum")
    np.testing.assert_allclose(run_numeric(placed, inputs)[0], expected, rtol=1e-9)


@pytest.mark.parametrize("format", sorted(n for n, f in FORMATS.items() if not f.table))
def test_a_product_multiplies_by_what_the_blocks_stand_for(format: str) -> None:
    """Scales of one and zero points of zero leave the step as it was; a scale of two of all weights
    is a step with doubled weights."""
    module = tiny_module(LLAMA, prepared(format, 2))
    plain = tiny_module(LLAMA, PLAIN)
    inputs = inputs_of(module)
    for factor in (1.0, 2.0):
        weights = dict(inputs)
        for name, value in inputs.items():
            if name.endswith("_scales"):
                inputs[name] = np.full_like(value, factor)
                of = name.removesuffix("_scales")
                weights[of] = factor * inputs[of]
            elif name.endswith("_zeros"):
                inputs[name] = np.zeros_like(value)
        known = {a.name: weights[a.name] for a in plain.main.body.args}
        expected = run_one_device(plain, known)[0]
        np.testing.assert_allclose(run_one_device(module, inputs)[0], expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("format", "of_n", "of_columns"),
    [
        ("fp8", 1 + 4 / 16384, 0),
        ("int8", 1, 2),
        ("int4", 0.5 + 2 / 128 + 0.5 / 128, 0),
        ("mxfp4", 0.5 + 1 / 32, 0),
        ("nvfp4", 0.5 + 1 / 16, 0),
    ],
)
def test_bytes_of_the_weights(format: str, of_n: float, of_columns: int) -> None:
    """Llama-3 8B: seven matrices in each of 32 layers, rows by columns; bytes for each element, and
    for each column."""
    layers, d, f, kv = 32, 4096, 14336, 1024
    matrices = [(d, d), (d, kv), (d, kv), (d, d), (d, 2 * f), (f, d)]
    expected = layers * sum(of_n * r * c + of_columns * c for r, c in matrices)
    module = run_passes(JobBuilder(JobOptions(LLAMA)).module, prepared(format))
    params = [a for a in module.main.body.args if a.tensor.role in WEIGHTS]
    stored = [p for p in params if not any(p.name.endswith(k) for k in KEPT)]
    assert sum(evaluate(p.tensor.local_bytes, module.env) for p in stored) == expected
    assert {p.tensor.dtype for p in params if p not in stored} == {"bf16"}
    assert evaluate(module.parameter_counts()["parameters"], module.env) == 8_030_261_248
