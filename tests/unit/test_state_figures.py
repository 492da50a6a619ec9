"""Decode of published models with scans, convolutions, latents and indexers: FLOPs, caches and
states are the figures of `models.json`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from tests.support import operations, run_passes, stagec
from tests.unit.test_scan_figures import DATA, FIGURES, OPS, SCANS, executed

#: Latent sizes of a layer: heads, of queries and values in all, latent, rotated, layers.
LATENT = {
    "deepseek-v2-lite": (16, 128, 128, 512, 64, 27),
    "deepseek-v3": (128, 128, 128, 512, 64, 61),
    "kimi-k2": (64, 128, 128, 512, 64, 61),
    "deepseek-v3.2": (128, 128, 128, 512, 64, 61),
}
CONTEXT = 4096


def config(name: str) -> str:
    return str(DATA / "configs" / f"{name}.json")


def decoded(name: str, passes: str = "") -> Module:
    """A step of one token behind 4,096, of a single sequence."""
    module = JobBuilder(JobOptions(config(name), sizes={"B": 1, "S": 1})).module
    return run_passes(module, f"inline,infer-shapes,to-serving{{context={CONTEXT}}}{passes}")


def analysed(name: str) -> dict[str, Any]:
    words = ("--serve", "decode", "--batch", "1", "--context", str(CONTEXT), "--json")
    actual = stagec("analyze", config(name), *words)
    assert actual.code == 0, actual.err
    figures: dict[str, Any] = json.loads(actual.out)
    return figures


@pytest.mark.parametrize("name", SCANS)
def test_one_token_costs_what_is_published(name: str) -> None:
    """The recurrence of each scan, and each convolution once over its taps."""
    parts = FIGURES[name]["flops_decode"].get("breakdown")
    module = decoded(name)
    scans = executed(module, *(f"stg.{op}" for op in OPS))
    if parts is None:  # RWKV-7, whose figure has the products alone: 9 FLOPs of each element
        assert scans == 9 * 24 * 2048 * 64
        return
    assert scans == parts["scan"]
    assert executed(module, "stg.causal_conv") == parts.get("conv", 0)


@pytest.mark.parametrize("name", [*SCANS, *LATENT])
def test_products_and_caches_are_those_published(name: str) -> None:
    """Scans and convolutions are left out of the products, as in training. Latent attention is
    absorbed: neither the new token nor those before are expanded to keys and values."""
    published, actual = FIGURES[name], analysed(name)
    total, kept = published["flops_decode"]["total"], actual["serving"]
    if name in LATENT:
        heads, keys, values, rank, _, layers = LATENT[name]
        parts = published["flops_decode"]["breakdown"]
        expanded = 2 * rank * heads * (keys + values) * layers
        total += parts["mla_absorbed_alt"] - parts["attn"] - expanded
    assert actual["matmul_flops"]["forward"] == total
    cache = published["cache"]
    assert kept["cache_bytes_per_token"] == cache["kv_bytes_per_token"]
    assert kept["state_bytes"] == cache.get("state_bytes", 0)
    in_all = kept["cache_bytes"] + kept["state_bytes"]
    assert in_all == cache.get("bytes_at_S", cache.get("state_bytes"))


@pytest.mark.parametrize("name", LATENT)
def test_an_absorbed_kernel_reads_the_latent_once(name: str) -> None:
    """Of one sequence it reads a row of C + R for each token, queries of as many, and writes C for
    each head; both of its products go over the pairs that are seen."""
    heads, _, _, rank, rotated, layers = LATENT[name]
    module = decoded(name, ",absorb-latent")
    seen = 2048 if name == "deepseek-v3.2" else CONTEXT + 1
    assert executed(module, "stg.attention") == 2 * heads * (2 * rank + rotated) * seen * layers
    for op in operations(module, "stg.attention"):
        chosen = 4 * seen if op.flag("selected") else 0
        queries, result = heads * (rank + rotated), heads * rank
        moved = 2 * (queries + seen * (rank + rotated) + result) + chosen
        assert evaluate(op.definition.bytes_touched(op), module.env) == moved


@pytest.mark.parametrize(
    ("name", "heads", "whole"),
    [
        ("qwen3-next-80b-a3b", 77_856_768, 0),
        ("rwkv7-1.5b", 24 * 32 * 64 * 64 * 4, 24 * 2 * 2048 * 4),
        ("mamba2-2.7b", 64 * (80 * 64 * 128 * 4 + 5120 * 4 * 2), 64 * 2 * 128 * 4 * 2),
    ],
)
def test_states_are_split_as_heads_and_batch_are(name: str, heads: int, whole: int) -> None:
    """What has no heads is on every rank of tp: token shifts, and the convolutions of B and C."""
    assert heads + whole == FIGURES[name]["cache"]["state_bytes"]
    words = ("--serve", "decode", "--batch", "8", "--context", "16", "--tp", "4", "--dp", "2")
    actual = stagec("analyze", config(name), *words, "--json")
    assert json.loads(actual.out)["serving"]["state_bytes"] == 4 * (heads // 4 + whole)
