"""Feed-forward of all layers on ranks of its own: both pods compute what one device does."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stagec.interp.data import random_inputs
from stagec.interp.pipeline import run_named
from stagec.ir.core import Value
from stagec.ir.opdef import Array
from tests.parts import lowered_pods, part_text, run_pods
from tests.served import step_modules, tokens_of
from tests.support import DEEPSEEK, EXHAUSTIVE, LLAMA, MIXTRAL, QWEN, tiny_options

#: A model, the strategies of feed-forward and of the rest, and the parts of a batch.
ROWS: tuple[tuple[str, str, dict[str, Any], int], ...] = (
    (LLAMA, "tp=2", {"dp": 4}, 2),
    (MIXTRAL, "dp=4,ep=4", {"tp": 2}, 2),
    (DEEPSEEK, "dp=2,ep=2", {"dp": 4}, 1),
    (QWEN, "dp=2", {"dp": 2, "tp": 2}, 4),
)


@pytest.mark.parametrize("mode", ["decode", pytest.param("prefill", marks=EXHAUSTIVE)])
@pytest.mark.parametrize(("model", "apart", "options", "batches"), ROWS)
def test_two_pods_compute_the_step_of_one_device(
    model: str, apart: str, options: dict[str, Any], batches: int, mode: str
) -> None:
    routed = {} if model == LLAMA else {"capacity_factor": Fraction(4)}
    job = tiny_options(model, sizes={"B": 8}, **routed)
    new, past = (4, 0) if mode == "prefill" else (1, 3)
    stated, whole = step_modules(job, mode, new, past)
    inputs = random_inputs(stated.main.body.args, stated.env, 5)
    results = stated.main.body.terminator.operands
    computed = run_named(whole, whole.env, inputs)
    part = part_text(f"apart=feed-forward: {apart}")
    sizes = {n: v for n, v in job.sizes.items() if n not in (tokens_of(job), "B")}
    counts = {"prompt": new} if mode == "prefill" else {"context": past}
    step = job.changed(serve=mode, sizes=sizes, batch=8, sampling="none", **counts, **options)
    pods, far = lowered_pods(step.changed(part=(part,), part_batches=batches))
    for arg in stated.main.body.args:
        inputs |= parts_of(arg, inputs[arg.name], batches)
    actual = run_pods(pods, far, inputs)
    for value in results:
        for name, wanted in parts_of(value, computed[value.name], batches).items():
            np.testing.assert_allclose(actual[name], wanted, rtol=1e-9, atol=1e-9, err_msg=name)


def parts_of(value: Value, whole: Array, batches: int) -> dict[str, Array]:
    """The parts of a value that take turns, by name."""
    split = [d for d, dim in enumerate(value.tensor.dims) if "B" in dim.size.symbols]
    if batches == 1 or not split:
        return {value.name: whole}
    each = np.split(whole, batches, axis=split[0])
    return {f"{value.name}_{letter}": part for letter, part in zip("abcd", each, strict=False)}
