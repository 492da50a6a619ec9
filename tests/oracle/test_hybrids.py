"""State-space models, linear attention and hybrids, imported at small sizes: the sharded step
computes what one device computes, for every kind of parallelism."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from stagec.driver.job import JobBuilder
from stagec.driver.options import JobOptions
from stagec.interp.pipeline import run_named
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from tests.support import PLACE, STEP, each_value, inputs_of, pairwise, run_numeric, run_passes

_BASE = {"hidden_size": 16, "vocab_size": 16, "num_hidden_layers": 4}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 16}
_EXPERTS = {"num_experts_per_tok": 2}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 2,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 4,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "mamba": {**_BASE, "state_size": 2, "conv_kernel": 3, "time_step_rank": 2},
    "falcon_mamba": {**_BASE, "state_size": 2, "conv_kernel": 3, "time_step_rank": 2},
    "mamba2": {
        **_BASE,
        "num_heads": 4,
        "head_dim": 8,
        "n_groups": 4,
        "state_size": 2,
        "conv_kernel": 3,
        "chunk_size": 4,
    },
    "jamba": {
        **_BASE,
        **_HEADS,
        **_EXPERTS,
        "num_experts": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 2,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 2,
    },
    "bamba": {**_BASE, **_HEADS, **_MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_BASE,
        **_HEADS,
        **_MAMBA2,
        **_EXPERTS,
        "num_local_experts": 4,
        "shared_intermediate_size": 8,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.5,
    },
    "nemotron_h": {
        **_BASE,
        **_HEADS,
        "head_dim": 4,
        "hybrid_override_pattern": "M-M*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 4,
        "ssm_state_size": 2,
        "conv_kernel": 3,
        "chunk_size": 4,
    },
    "falcon_h1": {
        **_BASE,
        **_HEADS,
        **_MAMBA2,
        "mamba_d_ssm": 32,
        "key_multiplier": 0.5,
        "ssm_multipliers": [1, 0.5, 1, 0.25, 1],
    },
    "zamba2": {
        **_BASE,
        **_HEADS,
        "num_hidden_layers": 6,
        "num_mem_blocks": 2,
        "adapter_rank": 2,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
        "hybrid_layer_ids": [1, 3, 5],
        "n_mamba_heads": 4,
        "mamba_headdim": 8,
        "mamba_d_state": 2,
        "mamba_d_conv": 3,
        "chunk_size": 4,
    },
    "qwen3_next": {
        **_BASE,
        **_HEADS,
        **_EXPERTS,
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 2,
        "linear_conv_kernel_dim": 3,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
    "minimax_m1": {
        **_BASE,
        **_HEADS,
        **_EXPERTS,
        "num_local_experts": 4,
        "attn_type_list": [0, 0, 1, 0],
        "layernorm_linear_attention_alpha": 1.5,
    },
    "rwkv7": {
        **_BASE,
        "num_hidden_layers": 5,
        "head_dim": 4,
        "intermediate_size": 16,
        "decay_low_rank_dim": 2,
        "a_low_rank_dim": 2,
        "v_low_rank_dim": 2,
        "gate_low_rank_dim": 2,
    },
}
RINGS = {"mamba", "falcon_mamba", "mamba2", "rwkv7"}  # without attention no order is to be chosen
FACTORS: Mapping[str, Sequence[Any]] = {
    "axes": (
        {"tp": 2},
        {"cp": 2},
        {"dp": 2, "cp": 2},
        {"cp": 2, "tp": 2},
        {"cp": 4},
        {"dp": 2, "tp": 2},
        {"dp": 4},
    ),
    "cp_mode": ("ring", "ulysses"),
    "sp": (False, True),
    "zero": (0, 1, 3),
    "recompute": ("none", "selective", "full"),
    "microbatches": (1, 2),
}
SIZES = {"B": 8, "S": 16}


@cache
def _file(family: str) -> str:
    path = Path(mkdtemp(prefix="stagec-")) / "config.json"
    path.write_text(json.dumps({"model_type": family, **CONFIGS[family]}))
    return str(path)


def module_of(family: str, pipeline: str, **options: Any) -> Module:
    job = JobOptions(_file(family), sizes=SIZES, **options)
    return run_passes(JobBuilder(job).module, pipeline)


@cache
def alone(family: str) -> tuple[dict[str, Array], Mapping[str, Array]]:
    """Inputs and results of the step on one device."""
    module = module_of(family, f"inline,{STEP}")
    inputs = inputs_of(module, 2)
    names = [v.name for v in module.main.body.terminator.operands]
    return inputs, dict(zip(names, run_numeric(module, inputs), strict=True))


def rows() -> list[Any]:
    """Eight strategies for every family, of those that hold every pair of values."""
    drawn = list(pairwise(FACTORS))
    found = [
        {"family": family, **drawn[(8 * number + i) % len(drawn)]}
        for number, family in enumerate(CONFIGS)
        for i in range(8)
    ]
    return each_value(found, lambda r: "-".join(map(str, r.values())).replace(" ", ""))


@pytest.mark.parametrize("row", rows())
def test_a_hybrid_equals_one_device(row: dict[str, Any]) -> None:
    """Loss, updated parameters and optimizer state, which hold every gradient."""
    options = {k: v for k, v in row.items() if k not in ("axes", "family", "cp_mode")}
    if "cp" in row["axes"]:
        options["cp_mode"] = row["cp_mode"]
        if row["cp_mode"] == "ring" and row["family"] not in RINGS:
            options["cp_order"] = "plain"
    options["sp"] = row["sp"] and "tp" in row["axes"]
    options["zero"] = row["zero"] if "dp" in row["axes"] else 0
    module = module_of(row["family"], f"inline,{STEP},{PLACE}", **row["axes"], **options)
    inputs, expected = alone(row["family"])
    found = run_numeric(module, inputs)
    for (name, x), y in zip(expected.items(), found, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-8, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    "family",
    [
        f if f in ("nemotron_h", "rwkv7") else pytest.param(f, marks=pytest.mark.exhaustive)
        for f in CONFIGS
    ],
)
def test_a_pipeline_of_a_hybrid_equals_one_device(family: str) -> None:
    order = {} if family in RINGS else {"cp_order": "plain"}
    whole = module_of(family, f"inline,{STEP}")
    inputs = inputs_of(whole, 2)
    expected = run_named(whole, whole.env, inputs)
    passes = f"inline,{STEP},partition,stages,units"
    module = module_of(family, passes, pp=2, cp=2, microbatches=2, **order)
    found = run_named(module, module.env, inputs)
    assert len(found) == len(expected)
    (_, loss), *rest = found.items()
    np.testing.assert_allclose(loss, next(iter(expected.values())), rtol=1e-9)
    for name, x in rest:
        theirs = expected[name.removesuffix("_g")]
        np.testing.assert_allclose(x, theirs, rtol=1e-8, atol=1e-9, err_msg=name)
