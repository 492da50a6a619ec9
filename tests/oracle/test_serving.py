"""A step of serving gives the logits of the whole forward: prefill, then decode, token by token."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from stagec.driver.options import JobOptions
from tests.configurations import sizes_of, small
from tests.served import assert_serves
from tests.support import GPT, LLAMA, MIXTRAL, PALM, QWEN, tiny_options

Steps = tuple[tuple[str, int], ...]
ONE_BY_ONE: Steps = (("prefill", 4), ("decode", 1), ("decode", 1), ("decode", 2))
CHUNKED: Steps = (("prefill", 2), ("prefill", 4), ("decode", 1), ("decode", 1))
STEPS = pytest.mark.parametrize("steps", [ONE_BY_ONE, CHUNKED], ids=["whole", "chunked"])
#: Families whose layers keep keys and values, and nothing else.
ATTENDED = """
    llama mistral mixtral qwen2 qwen3 qwen3_moe gemma gemma2 gemma3_text gpt_oss llama4_text
    gpt2 gpt_bigcode gpt_neo gpt_neox gptj codegen bloom mpt opt falcon baichuan phi phi3 stablelm
    olmo olmo2 cohere cohere2 starcoder2 chatglm persimmon glm glm4_moe dbrx
""".split()
ROUTED = "mixtral qwen3_moe gpt_oss llama4_text glm4_moe dbrx".split()


def named(options: Any) -> str:
    return "-".join(f"{n}{v}" for n, v in options.items()) or "alone"


@STEPS
@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 8}], ids=named)
def test_llama_serves(steps: Steps, options: dict[str, Any]) -> None:
    assert_serves(tiny_options(LLAMA, **options), steps)


@STEPS
@pytest.mark.parametrize("model", [GPT, PALM, MIXTRAL, QWEN])
def test_models_serve(steps: Steps, model: str) -> None:
    experts = {"capacity_factor": Fraction(2)} if model in (MIXTRAL, QWEN) else {}
    assert_serves(tiny_options(model, **experts), steps)


@pytest.mark.parametrize("model_type", ATTENDED)
def test_families_serve(model_type: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(model_type)))
    job = JobOptions(str(path), sizes=sizes_of(model_type, 4, 8))
    assert_serves(
        job.changed(capacity_factor=Fraction(4)) if model_type in ROUTED else job, CHUNKED
    )


@pytest.mark.parametrize(
    "options",
    [
        {"dp": 2, "ep": 2},
        {"dp": 4, "ep": 2, "tp": 2},
        {"dp": 2, "ep": 4, "tp": 2, "etp": 1, "dp_attention": True},
        {"tp": 4, "ep": 4, "etp": 1, "dp_attention": True},
    ],
    ids=named,
)
@STEPS
@pytest.mark.parametrize("model", [MIXTRAL, QWEN])
def test_experts_serve(model: str, steps: Steps, options: dict[str, Any]) -> None:
    assert_serves(tiny_options(model, capacity_factor=Fraction(2), **options), steps)


@pytest.mark.parametrize(
    "options",
    [{"pp": 2}, {"pp": 2, "microbatches": 4}, {"pp": 2, "tp": 2, "dp": 2}, {"microbatches": 2}],
    ids=named,
)
@STEPS
def test_stages_serve(steps: Steps, options: dict[str, Any]) -> None:
    assert_serves(tiny_options(LLAMA, **options), steps)


@pytest.mark.parametrize("mode", ["ring", "all-gather", "ulysses"])
@pytest.mark.parametrize("options", [{"cp": 2}, {"cp": 2, "tp": 2, "dp": 2}, {"cp": 4}], ids=named)
@pytest.mark.parametrize("model", [LLAMA, MIXTRAL])
def test_contexts_serve(model: str, options: dict[str, Any], mode: str) -> None:
    steps = (("prefill", 8), ("decode", 1), ("decode", 2), ("decode", 1))
    experts = {"capacity_factor": Fraction(2)} if model == MIXTRAL else {}
    assert_serves(tiny_options(model, cp_mode=mode, **experts, **options), steps)


@pytest.mark.parametrize("options", [{"cp": 2}, {"cp": 2, "tp": 2}], ids=named)
def test_chunks_with_contexts_serve(options: dict[str, Any]) -> None:
    steps = (("prefill", 4), ("prefill", 8), ("decode", 1))
    assert_serves(tiny_options(LLAMA, cp_mode="all-gather", **options), steps)


@pytest.mark.parametrize(
    "options", [{"page": 3}, {"kv_dtype": "fp8"}, {"page": 2, "cp": 2}], ids=named
)
@pytest.mark.parametrize("model", [LLAMA, GPT])
def test_pages_and_types_serve(model: str, options: dict[str, Any]) -> None:
    steps = (("prefill", 4), ("decode", 1), ("decode", 2), ("decode", 1))
    assert_serves(tiny_options(model, cp_mode="all-gather", **options), steps)
