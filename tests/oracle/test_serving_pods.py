"""A pod that decodes with the caches that another pod has sent gives the logits of the whole
forward."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from stagec.jobs.request.options import JobOptions
from tests.configurations import sizes_of, small
from tests.oracle.test_serving_states import ENCODERS, HEARD
from tests.pods import assert_hands_over
from tests.support import DEEPSEEK, EXHAUSTIVE, LLAMA, LONG, MIXTRAL, tiny_options


def first(*cases: tuple[Any, ...]) -> list[Any]:
    """The first of some cases by itself; the others are for `make test-all`."""
    return [pytest.param(*c, marks=[EXHAUSTIVE] if i else []) for i, c in enumerate(cases)]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    first(
        ("tp=2,pp=2,microbatches=4", "dp=2,tp=2,microbatches=2"),
        ("tp=2,dp=2", "tp=4"),
        ("", ""),
        ("dp=4", "tp=4,pp=2,microbatches=2"),
        ("pp=2", "pp=4,microbatches=4"),
        ("pp=4,microbatches=4", "pp=2,microbatches=2,dp=2"),
        ("microbatches=2", "microbatches=4"),
        ("dp=2,microbatches=4", "microbatches=2"),
        ("dp=2", "dp=4,microbatches=2"),
        ("pp=2,microbatches=2,schedule=interleaved,chunks=2", "pp=2,microbatches=2,tp=2"),
        ("pp=2,microbatches=4", "pp=2,microbatches=2,schedule=interleaved,chunks=2"),
        ("cp=2,tp=2", "tp=4"),
        ("cp=4", "dp=2"),
        ("cp=2,cp-mode=all-gather,pp=2", "tp=2,pp=2"),
        ("tp=2", "tp=2,dp=2,dp-attention"),
        ("tp=2", "tp=8,dcp=2"),
    ),
)
def test_pods_serve(prefill: str, decode: str) -> None:
    job = tiny_options(LLAMA, sizes={"B": 8, "L": 4})
    assert_hands_over(job, prefill, decode, prompt=8, new=2)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    first(
        ("dp=2,ep=2,tp=2,pp=2,microbatches=2", "dp=2,ep=4,tp=2,etp=1,dp-attention"),
        ("dp=2,ep=4,tp=2,etp=1,dp-attention", "dp=4,ep=4,pp=2,microbatches=2"),
        ("tp=2,ep=2,etp=1,dp-attention,pp=2,microbatches=2", "dp=4,ep=2"),
    ),
)
@pytest.mark.parametrize("model", first((MIXTRAL,), (DEEPSEEK,)))
def test_pods_with_experts_serve(model: str, prefill: str, decode: str) -> None:
    sizes = {"B": 8, **({"E": 4} if model == DEEPSEEK else {})}
    job = tiny_options(model, sizes=sizes, capacity_factor=Fraction(4))
    assert_hands_over(job, prefill, decode, prompt=6, new=2)


#: Windows, layers of several kinds, states of scans, latents.
FAMILIES = "gemma3_text qwen3_next mamba2 rwkv7 deepseek_v3 deepseek_v32 gpt_oss"


@LONG
@pytest.mark.parametrize(
    ("prefill", "decode"),
    first(
        ("pp=2,microbatches=2", "dp=2,pp=2,microbatches=4"),
        ("dp=2", "pp=2,microbatches=2"),
        ("tp=2", ""),
    ),
)
@pytest.mark.parametrize("model_type", first(*((f,) for f in FAMILIES.split())))
def test_families_cross(model_type: str, prefill: str, decode: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(model_type)))
    job = JobOptions(str(path), sizes=sizes_of(model_type, 8, 8))
    routed = any("experts" in key for key in small(model_type))
    job = job.changed(capacity_factor=Fraction(16)) if routed else job
    assert_hands_over(job, prefill, decode, prompt=7, new=1)


@LONG
@pytest.mark.parametrize("model", list(ENCODERS))
def test_keys_of_an_encoder_cross(model: str) -> None:
    job = JobOptions(model, sizes={**HEARD, **ENCODERS[model]})
    assert_hands_over(job, "tp=2", "dp=2,tp=2", prompt=4, new=1)
