"""Published figures of serving: FLOPs of a decode step and bytes of caches of `models.json`, which
were counted in the reference implementations, and bytes per token of facts/serving.md, section 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagec.analysis.report import analysis
from stagec.answers.analyze import serving_figures
from stagec.jobs.builder import JobBuilder
from stagec.jobs.planned import Planned
from stagec.jobs.request.options import JobOptions

DATA = Path(__file__).parents[1] / "data"
FIGURES: dict[str, Any] = json.loads((DATA / "models.json").read_text())
#: Keys and values are all that these keep.
ATTENDED = """
    llama-3.1-8b llama-3.2-1b mistral-7b-v0.1 mixtral-8x7b qwen2.5-7b qwen3-8b qwen3-30b-a3b
    gpt-oss-20b gemma-2-9b gemma-3-4b-it phi-4 olmo-2-7b glm-4.5-air llama-4-scout
"""


def served(model: str, **options: Any) -> dict[str, Any]:
    """What `stagec analyze --serve --json` prints."""
    builder = JobBuilder(JobOptions(model, **options))
    kept = Planned(lambda m: serving_figures(m, builder, None))
    module = builder.lower(watching=[kept], verify=False)
    return analysis(module, model) | {"serving": kept.result}


def expected_flops(figures: Any) -> int:
    """The FLOPs of products: scans and convolutions are none."""
    decode = figures["flops_decode"]
    parts = decode.get("breakdown", {})
    return int(decode["total"] - sum(parts.get(n, 0) for n in ("scan", "conv", "hf_extra")))


@pytest.mark.parametrize("name", ATTENDED.split())
def test_a_decode_step_of_published_models(name: str) -> None:
    figures = FIGURES[name]
    context = figures["flops_decode"]["context"]
    path = str(DATA / "configs" / f"{name}.json")
    actual = served(path, serve="decode", batch=1, context=context)
    assert actual["matmul_flops"]["forward"] == expected_flops(figures)
    cache, ours = figures["cache"], actual["serving"]
    assert ours["cache_bytes_per_token"] == cache["kv_bytes_per_token"]
    assert ours["cache_bytes"] + ours["state_bytes"] == cache["bytes_at_S"]
    assert ours["state_bytes"] == cache["state_bytes"]


#: Bytes per token of a whole model: 2*L*G*K*b.
PER_TOKEN = {
    "llama3-8b": 131_072,
    "llama3-70b": 327_680,
    "llama3-405b": 516_096,
    "qwen3-235b-a22b": 192_512,
    "mixtral-8x7b": 131_072,
}


@pytest.mark.parametrize("model", PER_TOKEN)
def test_bytes_per_token(model: str) -> None:
    for mode, more in (("decode", {"context": 100}), ("prefill", {"prompt": 128})):
        actual = served(model, serve=mode, batch=4, **more)["serving"]
        assert actual["cache_bytes_per_token"] == PER_TOKEN[model]
        tokens = 100 if mode == "decode" else 128
        assert actual["cache_bytes"] == 4 * tokens * PER_TOKEN[model]


GRID = [
    ("llama3-8b", {"tp": 8}, 8, 1),
    ("llama3-8b", {"tp": 16}, 8, 1),
    ("llama3-8b", {"tp": 2, "dp": 4}, 2, 1),
    ("llama3-70b", {"pp": 4, "tp": 2}, 2, 4),
    ("qwen3-235b-a22b", {"tp": 4, "dp": 8, "ep": 8}, 4, 1),
    ("llama3-8b", {"cp": 4}, 4, 1),
]


@pytest.mark.parametrize("context", [4095, 1000])
@pytest.mark.parametrize("case", GRID, ids=str)
def test_caches_are_split(case: Any, context: int) -> None:
    """Heads over tp as far as there are any, layers over stages, sequences over dp, tokens over cp,
    each rank with whole rows."""
    model, axes, ways, stages = case
    actual = served(model, serve="decode", batch=16, context=context, **axes)
    ours, data = actual["serving"], axes.get("dp", 1)
    parts = axes.get("cp", 1)
    rows = -(-context // parts)
    assert ours["cache_bytes"] == PER_TOKEN[model] * rows * parts * 16 // (data * ways * stages)
    kept = actual["classes"][0]["memory"]["caches"]
    rows = -(-(context + 1) // parts)
    assert kept == PER_TOKEN[model] * rows * parts * 16 // (data * ways * stages)


def test_what_is_not_counted_of_eight_bits() -> None:
    """Scales of 4 bytes: DeepEP sends 128 tokens to 8 experts in 7,392 bytes each, 4 for a group of
    128 elements; FlashMLA caches 656 bytes a token and layer, 4 scales and 64 elements in bf16."""
    sizes = {"L": 1, "L_dense": 1}
    given: dict[str, Any] = {"serve": "decode", "batch": 128 * 8, "context": 64, "sizes": sizes}
    actual = served("deepseek-v3", dp=8, ep=8, fp8="e4m3", kv_dtype="fp8", **given)
    (sent,) = (
        row["bytes"]
        for row in actual["classes"][0]["collectives"]
        if row["op"] == "all_to_all" and row["dtype"] == "f8e4m3"
    )
    assert sent + 128 * 8 * 7168 // 128 * 4 == 128 * 8 * 7392
    assert actual["serving"]["cache_bytes_per_token"] + 2 * (4 * 4 + 64) == 2 * 656
