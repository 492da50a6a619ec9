"""Models with scans, convolutions, shifts, latents and indexers serve: prefill, then decode, give
the logits of the whole forward."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.support.diagnostics import DiagnosticError
from tests.configurations import SCANS, small
from tests.oracle.test_serving_mixed import SIXTEEN, assert_mixed_is_apart
from tests.served import assert_serves, step_modules
from tests.support import (
    DEEPSEEK,
    DEEPSEEK_V2,
    EXHAUSTIVE,
    clone,
    crossed,
    inputs_of,
    operations,
    run_numeric,
    run_passes,
    tiny_options,
)

#: Whole, then token by token; in chunks that lie across those of the scans, then with drafts.
STEPS = {
    "tokens": (("prefill", 3), ("decode", 1), ("decode", 1), ("decode", 1)),
    "chunks": (("prefill", 2), ("prefill", 3), ("decode", 2), ("decode", 1)),
}
COMPRESSED = "deepseek_v4"
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "longcat_flash")
#: One family of each kind of state.
MIXED = ("mamba2", "qwen3_next", "rwkv7", "deepseek_v3", "deepseek_v32")
SPARSE = ("deepseek_v32", "glm_moe_dsa")
STRATEGIES: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2},
    {"dp": 2},
    {"dp": 2, "tp": 2},
    {"tp": 4},
    {"dp": 4},
    {"dp": 4, "tp": 2},
    {"pp": 2},
    {"pp": 2, "microbatches": 2, "tp": 2},
    {"dp": 2, "microbatches": 2},
)
#: Sizes of a tiny encoder and decoder.
HEARD = {"B": 4, "S": 5, "T": 8, "D": 8, "H": 4, "K": 2, "F": 8, "V": 16}
#: Encoders and decoders, of another length each.
ENCODERS: Mapping[str, Mapping[str, int]] = {
    "t5-base": {"N": 4, "L_encoder": 2, "L_decoder": 2},
    "whisper-large-v3": {"L": 2, "L_dec": 2, "M": 4, "P": 16, "P_enc": 8},
}
#: One row for each expert and sequence, also of a single token.
EXPERTS = {"E": 2, "T": 2}


@cache
def path_of(family: str) -> str:
    path = Path(mkdtemp(prefix="stagec-")) / "config.json"
    path.write_text(json.dumps(small(family)))
    return str(path)


def sizes_of(family: str) -> dict[str, int]:
    config = small(family)
    sparse = any("experts" in key for key in config)
    every = EXPERTS | ({"T": 4} if "zero_expert_num" in config else {})
    return {"B": 4, **(every if sparse else {})}


@crossed(
    family=[*SCANS, *LATENT, COMPRESSED], steps=list(STEPS), strategy=list(range(len(STRATEGIES)))
)
def test_a_family_serves(family: str, steps: str, strategy: int) -> None:
    job = JobOptions(path_of(family), sizes=sizes_of(family), **STRATEGIES[strategy])
    assert_serves(job, STEPS[steps])


@pytest.mark.parametrize("model", [DEEPSEEK, DEEPSEEK_V2])
def test_deepseek_serves(model: str) -> None:
    assert_serves(tiny_options(model, sizes=EXPERTS), STEPS["tokens"])


@crossed(model=list(ENCODERS), strategy=list(range(len(STRATEGIES))))
def test_an_encoder_is_seen_from_its_cached_keys(model: str, strategy: int) -> None:
    """Prefill runs the encoder, decode has its keys and values alone: no tokens or sound of it."""
    sizes = {**HEARD, **ENCODERS[model]}
    assert_serves(JobOptions(model, sizes=sizes, **STRATEGIES[strategy]), STEPS["tokens"])
    module, _ = step_modules(JobOptions(model, sizes=sizes), "decode", 1, 3)
    assert {a.name for a in module.main.body.args if not a.tensor.role} == {"targets"}
    assert not [op for op in module.walk() if op.symbol == "encoder"]


@pytest.mark.parametrize("family", LATENT)
def test_absorbed_and_plain_attention_agree(family: str) -> None:
    """On the same random caches, of a step of three tokens."""
    job = JobOptions(path_of(family), sizes={**sizes_of(family), "S": 3})
    passes = "inline,infer-shapes,to-serving{context=5}"
    plain = run_passes(JobBuilder(job).module, passes)
    inputs = inputs_of(plain, 6)
    expected = run_numeric(plain, inputs)
    absorbed = run_passes(clone(plain), "absorb-latent")
    for a, b in zip(run_numeric(absorbed, inputs), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)
    assert all("values" in op.attrs for op in operations(absorbed, "stg.attention"))


def test_a_bias_by_distance_is_that_of_the_rows_of_a_rank() -> None:
    """Ranks with parts of nine cached tokens have rows for ten."""
    job = JobOptions(path_of("t5"), sizes=sizes_of("t5"), cp=2, cp_mode="all-gather")
    assert_serves(job, [("prefill", 8), ("decode", 1)])


def test_rows_of_several_tokens_are_not_cached_in_parts_of_a_sequence() -> None:
    job = JobOptions(path_of(COMPRESSED), sizes=sizes_of(COMPRESSED), cp=2, cp_mode="all-gather")
    with pytest.raises(DiagnosticError, match="are not cached in parts of a sequence"):
        assert_serves(job, [("prefill", 8)])


@crossed(
    family=[*SCANS, *LATENT],
    mode=("all-gather", "ring"),
    more=({}, {"tp": 2}),
    parts=((("prefill", 8),), (("prefill", 4), ("prefill", 8))),
)
def test_a_split_sequence_serves(
    family: str, mode: str, more: dict[str, int], parts: tuple[tuple[str, int], ...]
) -> None:
    """Prefill passes states from part to part, decode has parts of caches. No ring takes selected
    keys, or a chunk behind others."""
    options: dict[str, Any] = {"cp": 2, "cp_mode": "all-gather", **more}
    if mode == "ring" and family not in SPARSE and len(parts) == 1:
        options |= {"cp_mode": "ring", "cp_order": "plain"}
    job = JobOptions(path_of(family), sizes=sizes_of(family), **options)
    assert_serves(job, (*parts, ("decode", 1), ("decode", 1)))


@pytest.mark.parametrize(
    "family",
    [
        f if f in (*MIXED, COMPRESSED) else pytest.param(f, marks=EXHAUSTIVE)
        for f in (*SCANS, *LATENT, COMPRESSED)
    ],
)
def test_classes_of_a_step_have_states_of_their_own(family: str) -> None:
    """Latents are absorbed where a class decodes, not where it prefills."""
    sparse = "E" in sizes_of(family)
    wide = {"capacity_factor": Fraction(16)} if sparse else {}
    job = JobOptions(path_of(family), sizes={"B": 4}, **wide)
    assert_mixed_is_apart(job, SIXTEEN, 2)
