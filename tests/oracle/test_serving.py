"""A step of serving gives the logits of the whole forward: prefill, then decode, token by token."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from stagec.jobs.request.options import JobOptions
from tests.configurations import sizes_of, small
from tests.served import assert_serves
from tests.support import DEEPSEEK, EXHAUSTIVE, GPT, LLAMA, MIXTRAL, PALM, QWEN, tiny_options

Steps = tuple[tuple[str, int], ...]
ONE_BY_ONE: Steps = (("prefill", 4), ("decode", 1), ("decode", 1), ("decode", 2))
CHUNKED: Steps = (("prefill", 2), ("prefill", 4), ("decode", 1), ("decode", 1))
#: A prompt that ranks of a ring share, and tokens that are not as many as ranks.
LONG: Steps = (("prefill", 8), ("decode", 1), ("decode", 2), ("decode", 1))
#: Families whose layers keep keys and values, and nothing else.
ATTENDED = """
    llama mistral mixtral qwen2 qwen3 qwen3_moe gemma gemma2 gemma3_text gpt_oss llama4_text
    gpt2 gpt_bigcode gpt_neo gpt_neox gptj codegen bloom mpt opt falcon baichuan phi phi3 stablelm
    olmo olmo2 cohere cohere2 starcoder2 chatglm persimmon glm glm4_moe dbrx
"""
ROUTED = "mixtral qwen3_moe gpt_oss llama4_text glm4_moe dbrx"


#: What every family is split by.
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"dp": 2, "tp": 4, "kv_dtype": "fp8"},
    {"pp": 2, "microbatches": 4},
    {"pp": 2, "tp": 2, "schedule": "gpipe"},
    {"cp": 2, "cp_mode": "all-gather"},
    {"cp": 2, "tp": 2, "cp_mode": "ring", "page": 2},
    {"tp": 2, "dp": 2, "dp_attention": True},
)


def named(options: Any) -> str:
    return "-".join(f"{n}{v}" for n, v in options.items()) or "alone"


def first(*cases: Any) -> list[Any]:
    """The first of some cases by itself; the others are for `make test-all`."""
    return [c if i == 0 else pytest.param(c, marks=EXHAUSTIVE) for i, c in enumerate(cases)]


def job_of(model: str, **options: Any) -> JobOptions:
    """A tiny job; buffers of experts have room for one token."""
    routed = {"capacity_factor": Fraction(2)} if model in (MIXTRAL, QWEN) else {}
    return tiny_options(model, **routed, **options)


@pytest.mark.parametrize("steps", [ONE_BY_ONE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("model", first(LLAMA, GPT, PALM, MIXTRAL, QWEN))
def test_models_serve(steps: Steps, model: str) -> None:
    assert_serves(job_of(model), steps)


@pytest.mark.parametrize(
    "options",
    first(
        {"dp": 2, "tp": 2},
        {"tp": 8},
        {"pp": 2},
        {"pp": 2, "microbatches": 4},
        {"pp": 2, "tp": 2, "dp": 2},
        {"microbatches": 2},
        {"tp": 2, "dp_attention": True},
    ),
    ids=named,
)
@pytest.mark.parametrize("steps", first(ONE_BY_ONE, CHUNKED), ids=["whole", "chunked"])
def test_splits_serve(steps: Steps, options: dict[str, Any]) -> None:
    assert_serves(job_of(LLAMA, **options), steps)


def test_stages_serve() -> None:
    assert_serves(job_of(LLAMA, pp=2, microbatches=4), CHUNKED)


@pytest.mark.parametrize("options", first({}, {"tp": 2}, {"dp": 2, "ep": 2, "tp": 2}), ids=named)
@pytest.mark.parametrize("model", first(MIXTRAL, LLAMA, GPT, DEEPSEEK))
def test_attention_and_feed_forward_apart_serve(model: str, options: dict[str, Any]) -> None:
    """Half layers on two stages, and what they hand on to and fro."""
    given = {n: v for n, v in options.items() if n != "ep" or model in (MIXTRAL, DEEPSEEK)}
    given |= {"capacity_factor": Fraction(4)} if model == DEEPSEEK else {}
    assert_serves(job_of(model, pp=2, microbatches=2, afd=True, **given), ONE_BY_ONE)


@pytest.mark.parametrize(
    "options",
    first(
        {"dp": 2, "ep": 4, "tp": 2, "etp": 1, "dp_attention": True},
        {"dp": 2, "ep": 2},
        {"dp": 4, "ep": 2, "tp": 2},
        {"tp": 4, "ep": 4, "etp": 1, "dp_attention": True},
    ),
    ids=named,
)
@pytest.mark.parametrize("model", first(MIXTRAL, QWEN))
def test_experts_serve(model: str, options: dict[str, Any]) -> None:
    assert_serves(job_of(model, **options), ONE_BY_ONE)


@pytest.mark.parametrize(
    "options",
    first(
        {"tp": 4, "ep": 4},
        {"dp": 2, "ep": 2, "moe_dispatch": "gather"},
        {"dp": 2, "ep": 4, "tp": 2, "moe_dispatch": "gather"},
        {"dp": 2, "ep": 2, "tp": 2, "moe_dispatch": "gather"},
        {"dp": 2, "ep": 2, "tp": 2, "etp": 1},
    ),
    ids=named,
)
@pytest.mark.parametrize("model", first(MIXTRAL, QWEN))
def test_ranks_of_experts_have_all_tokens(model: str, options: dict[str, Any]) -> None:
    assert_serves(job_of(model, **options), ONE_BY_ONE)


@pytest.mark.parametrize(
    "options",
    first(
        {"tp": 2},
        {"dp": 2, "ep": 2, "tp": 2},
        {"tp": 4},
        {"tp": 2, "etp": 1},
        {"cp": 2, "tp": 2, "cp_mode": "all-gather"},
    ),
    ids=named,
)
@pytest.mark.parametrize("model", first(MIXTRAL, QWEN, DEEPSEEK))
def test_experts_prefill_split_sequences(model: str, options: dict[str, Any]) -> None:
    """Experts have rows left over; ranks fill rows by their own tokens."""
    job = tiny_options(model, sp=True, capacity_factor=Fraction(2), **options)
    assert_serves(job, (("prefill", 8),))


@pytest.mark.parametrize(
    "pods",
    first(
        ({"tp": 2, "cp": 2}, {"dp": 2, "tp": 4}),
        ({"tp": 4}, {"cp": 2, "page": 2}),
        ({"pp": 2, "tp": 2}, {"tp": 8}),
        ({"dp": 8}, {"tp": 2, "dp": 2, "dp_attention": True}),
    ),
    ids=lambda pods: "to".join(map(named, pods)),
)
@pytest.mark.parametrize("model", first(LLAMA, MIXTRAL))
def test_pods_serve(model: str, pods: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """What one strategy has prefilled another one decodes."""
    prefill, decode = (job_of(model, **options) for options in pods)
    assert_serves(prefill, LONG, decode)


@pytest.mark.parametrize("mode", first("ring", "all-gather", "ulysses"))
@pytest.mark.parametrize(
    "options", first({"cp": 2, "tp": 2, "dp": 2}, {"cp": 2}, {"cp": 4}), ids=named
)
@pytest.mark.parametrize("model", first(LLAMA, MIXTRAL))
def test_contexts_serve(model: str, options: dict[str, Any], mode: str) -> None:
    assert_serves(job_of(model, cp_mode=mode, **options), LONG)


@pytest.mark.parametrize(
    "case",
    first(
        (DEEPSEEK, {"tp": 4, "dcp": 2, "page": 2}),
        (LLAMA, {"tp": 8, "dcp": 2}),
        (DEEPSEEK, {"tp": 4, "dcp": 4, "dp": 2}),
        (LLAMA, {"tp": 8, "dcp": 2, "pp": 2}),
    ),
    ids=str,
)
def test_ranks_of_tp_split_contexts(case: tuple[str, dict[str, Any]]) -> None:
    """Ranks with the same keys have parts of the cached tokens while they decode."""
    model, options = case
    wide = {"capacity_factor": Fraction(16)} if model == DEEPSEEK else {}
    assert_serves(tiny_options(model, **wide, **options), LONG)


@pytest.mark.parametrize("options", first({"cp": 2, "tp": 2}, {"cp": 2}), ids=named)
def test_chunks_of_contexts_serve(options: dict[str, Any]) -> None:
    steps = (("prefill", 4), ("prefill", 8), ("decode", 1))
    assert_serves(job_of(LLAMA, cp_mode="all-gather", **options), steps)


@pytest.mark.parametrize(
    "options", first({"page": 2, "cp": 2}, {"page": 3}, {"kv_dtype": "fp8"}), ids=named
)
@pytest.mark.parametrize("model", first(LLAMA, GPT))
def test_pages_and_types_serve(model: str, options: dict[str, Any]) -> None:
    assert_serves(job_of(model, cp_mode="all-gather", **options), LONG)


@pytest.mark.parametrize("model_type", first(*ATTENDED.split()))
def test_families_serve(model_type: str, tmp_path: Path) -> None:
    assert_serves(family(model_type, tmp_path), CHUNKED)


@pytest.mark.parametrize("options", first(*STRATEGIES), ids=named)
@pytest.mark.parametrize("model_type", first(*ATTENDED.split()))
def test_split_families_serve(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert_serves(family(model_type, tmp_path).changed(**options), LONG)


def family(model_type: str, folder: Path) -> JobOptions:
    """A small job of a family; its window is shorter than the sequence."""
    path = folder / "config.json"
    path.write_text(json.dumps(small(model_type)))
    job = JobOptions(str(path), sizes=sizes_of(model_type, 8, 8))
    return job.changed(capacity_factor=Fraction(4)) if model_type in ROUTED.split() else job
