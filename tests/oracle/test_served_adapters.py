"""A server with adapters: each sequence gets what the model with its adapter added to the weights
would give, however ranks share the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stagec.interp.data import random_inputs
from stagec.interp.machine import run_module
from stagec.interp.pipeline import run_named
from stagec.ir.opdef import Array
from stagec.jobs.request.options import JobOptions
from tests.served import module_until, result_of
from tests.support import EXHAUSTIVE, GPT, LLAMA, MIXTRAL, tiny_options

SLOTS, RANK, BATCH, TOKENS = 3, 2, 8, 4
TARGETS = {LLAMA: "wq,wk,wo,w_gate_up,w_down", GPT: "wqkv,wo,w1,w2", MIXTRAL: "wv,wo"}
SPLITS: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"dp": 2, "tp": 2},
    {"pp": 2, "microbatches": 2},
    {"tp": 2, "dp_attention": True},
    {"cp": 2, "cp_mode": "all-gather"},
)


def step_of(model: str, **options: Any) -> JobOptions:
    job = tiny_options(model, **options)
    sizes = {name: size for name, size in job.sizes.items() if name not in ("B", "S")}
    return job.changed(serve="prefill", sizes=sizes, batch=BATCH, prompt=TOKENS, sampling="none")


def merged(inputs: dict[str, Array], number: int) -> dict[str, Array]:
    """The weights with the adapters of this number added, layer by layer."""
    made = dict(inputs)
    for name in (n.removesuffix("_lora_a") for n in inputs if n.endswith("_lora_a")):
        a, b = (inputs[f"{name}_lora_{side}"][:, number] for side in "ab")
        if a.ndim == 4 and b.ndim > 3:  # of each packed matrix
            low = np.einsum("ldzr,lrz...->ldz...", a, b)
        else:
            low = a.reshape(len(a), -1, RANK) @ b.reshape(len(b), RANK, -1)
        made[name] = inputs[name] + low.reshape(inputs[name].shape)
    return made


@pytest.mark.parametrize(
    "options", [SPLITS[0], *(pytest.param(s, marks=EXHAUSTIVE) for s in SPLITS[1:])]
)
@pytest.mark.parametrize("model", TARGETS)
def test_each_sequence_has_its_adapter(model: str, options: dict[str, Any]) -> None:
    adapted = {"lora": TARGETS[model], "lora_rank": RANK, "max_loras": SLOTS}
    job = step_of(model, **options, **adapted)
    stated, ready = (module_until(job, last) for last in ("serve-lora", "plan-memory"))
    inputs = random_inputs(stated.main.body.args, stated.env, 3)
    chosen = np.arange(BATCH) % SLOTS
    inputs["adapter"] = np.broadcast_to(chosen[:, None], (BATCH, TOKENS)).copy()
    made = run_named(ready, ready.env, inputs)
    actual = result_of(made, stated.main.body.terminator.operands[0])
    plain = module_until(step_of(model), "to-serving")
    names = [arg.name for arg in plain.main.body.args]
    for number in range(SLOTS):
        weights = merged(inputs, number)
        given = {name: weights[name] for name in names}
        expected, *_ = run_module(plain, plain.env, given)
        rows = chosen == number
        np.testing.assert_allclose(actual[rows], expected[rows], rtol=1e-9, atol=1e-9)
