"""Parameters and FLOPs of adapters: rank * (in + out) for each matrix, twice that a token.

The published figures are those of PEFT for Llama 3.1, targets q and v, or all linear layers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import analyse

QV, ALL = "wq,wv", "wq,wk,wv,wo,w_gate_up,w_down"


@pytest.mark.parametrize(
    ("model", "targets", "rank", "trained"),
    [
        ("llama3-8b", QV, 8, 3_407_872),
        ("llama3-8b", QV, 16, 6_815_744),
        ("llama3-8b", ALL, 64, 167_772_160),
        ("llama3-70b", QV, 64, 131_072_000),
        ("llama3-70b", ALL, 16, 207_093_760),
        ("llama2-7b", ALL, 8, 19_988_480),
    ],
)
def test_adapters_of_llama(model: str, targets: str, rank: int, trained: int) -> None:
    sizes = {"B": 1, "S": 4096}
    whole = analyse(model, sizes=sizes)
    actual = analyse(model, sizes=sizes, lora=targets, lora_rank=rank)
    assert actual["trainable_parameters"] == trained
    assert actual["parameters"] == whole["parameters"] + trained
    assert whole["trainable_parameters"] == whole["parameters"]
    (mine,), (theirs,) = actual["classes"], whole["classes"]
    tokens = sizes["B"] * sizes["S"]
    more = mine["matmul_flops"]["forward"] - theirs["matmul_flops"]["forward"]
    assert more == 2 * trained * tokens
    assert mine["memory"]["gradients"] == 4 * trained
    assert mine["memory"]["optimizer"] == 12 * trained
    assert mine["memory"]["parameters"] == 2 * actual["parameters"]


def test_backward_leaves_out_the_gradients_of_frozen_matrices() -> None:
    """Backward of a product with a frozen matrix is one product, not two; the adapter has both."""
    sizes = {"B": 1, "S": 4096}
    whole = analyse("llama3-8b", sizes=sizes)["classes"][0]["matmul_flops"]
    actual = analyse("llama3-8b", sizes=sizes, lora=ALL, lora_rank=16)
    mine = actual["classes"][0]["matmul_flops"]
    tokens = sizes["B"] * sizes["S"]
    embedding = 128_256 * 4096
    matrices = actual["parameters"] - actual["trainable_parameters"] - embedding - 65 * 4096
    adapters = 2 * 2 * actual["trainable_parameters"] * tokens
    assert whole["backward"] - (mine["backward"] - adapters) == 2 * matrices * tokens


@pytest.mark.parametrize(("batch", "slots"), [(1, 1), (2, 8), (64, 8)])
def test_a_server_reads_the_adapters_that_its_sequences_use(batch: int, slots: int) -> None:
    """Ranks hold all adapters; of n sequences a step reads N (1 - (1 - 1/N)^n) of N on average,
    and multiplies each token by one."""
    step = {"serve": "decode", "batch": batch, "context": 1000}
    rank, wide, out, layers = 16, 4096, 4096, 32  # of wq, the width and all heads
    plain = analyse("llama3-8b", **step)["classes"][0]
    served = analyse("llama3-8b", **step, lora="wq", max_loras=slots, lora_rank=rank)["classes"][0]
    one = layers * rank * (wide + out)
    held = served["memory"]["parameters"] - plain["memory"]["parameters"]
    assert held == 2 * slots * one
    more = served["matmul_flops"]["forward"] - plain["matmul_flops"]["forward"]
    assert more == 2 * batch * one
    used = slots * (1 - (1 - 1 / slots) ** batch)
    moved = layers * batch * (2 * wide + 2 * 4 * rank + 2 * 2 * out + 2 * 4)
    touched = sum(served["bytes_touched"].values()) - sum(plain["bytes_touched"].values())
    assert touched - moved == pytest.approx(2 * used * one, abs=layers)


def test_vllm_has_slots_of_all_linear_modules() -> None:
    """`LoRAModelManager` wraps all modules before it knows an adapter (lora/model_manager.py)."""
    step: dict[str, Any] = {"serve": "decode", "batch": 2, "context": 1000, "max_loras": 8}
    held = {
        (stack, names): analyse("llama3-8b", **step, stack=stack, lora=names)["classes"][0]
        for stack in ("vllm", "sglang")
        for names in ("wq", "all_linear")
    }
    of = {key: each["memory"]["parameters"] for key, each in held.items()}
    assert of["vllm", "wq"] == of["vllm", "all_linear"] == of["sglang", "all_linear"]
    assert of["sglang", "wq"] < of["vllm", "wq"]
    assert held["vllm", "wq"]["matmul_flops"] == held["vllm", "all_linear"]["matmul_flops"]


@pytest.mark.parametrize(
    ("stack", "rank", "filled"), [("vllm", 12, 16), ("vllm", 65, 128), ("sglang", 12, 12)]
)
def test_vllm_fills_adapters_up_to_one_of_its_ranks(stack: str, rank: int, filled: int) -> None:
    """config/lora.py: `MaxLoRARanks`."""
    step: dict[str, Any] = {"serve": "decode", "batch": 8, "context": 100, "stack": stack}
    given, same = (
        analyse("llama3-8b", **step, lora="wq", lora_rank=each)["parameters"]
        for each in (rank, filled)
    )
    assert given == same
    if stack == "sglang":
        assert given < analyse("llama3-8b", **step, lora="wq", lora_rank=16)["parameters"]
