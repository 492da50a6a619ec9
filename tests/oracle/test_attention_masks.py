"""Attention with masks, sinks and biases: split over heads or over the sequence, in every way that
it claims, a step computes what one device computes, and its FLOPs are those of the pairs seen.
"""

from __future__ import annotations

import numpy as np
import pytest

from stagec.analysis.report import analysis
from tests.support import PLACE, compiled, crossed, inputs_of, operations, run_numeric

#: One layer; `ids` choose the keys that each query sees.
TEXT = """stg.module @masked {{
  stg.symbols[B = 2, S = 24, T = 8, D = 8, H = 4, G = 4, K = 2, N = 3]
  {mesh}
  stg.func @f(%x: f32[B, S, D], %wq: f32[D, H, K | param], %wk: f32[D, G, K | param],
              %wv: f32[D, G, K | param]{args}) {{
    %q = stg.einsum["bsd,dhk->bshk"](%x, %wq)
    %k = stg.einsum["bsd,dhk->bshk"](%x, %wk)
    %v = stg.einsum["bsd,dhk->bshk"](%x, %wv)
    %a = stg.attention{brackets}(%q, %k, %v{more})
    %sq = stg.mul(%a, %a)
    %loss = stg.sum["bshk->"](%sq)
    stg.return(%loss)
  }}
}}
"""
SHARDED = """stg.mesh @pod[{mesh}]
  stg.strategy @s[mesh = @pod] {{
    {split}
    stg.optimizer[none]
  }}"""
STRATEGIES = {
    "heads": ("tp = 4", "stg.split[(H, G), over = tp]"),
    "zigzag": ("cp = 4", "stg.split[S, over = cp]\n    stg.ring[S, order = zigzag]"),
    "plain": ("cp = 4", "stg.split[S, over = cp]\n    stg.ring[S, order = plain]"),
    "plain-2": (
        "cp = 2, tp = 2",
        "stg.split[S, over = cp]\n    stg.split[(H, G), over = tp]\n    stg.ring[S, order = plain]",
    ),
    "gather": ("cp = 4", "stg.split[S, over = cp]\n    stg.gather[S]"),
    "exchange": ("cp = 4", "stg.split[S, over = cp]\n    stg.exchange[S, into = (H, G)]"),
}
VARIANTS = {
    "causal": "causal",
    "window-1": "causal, window = 1",
    "window-5": "causal, window = 5",
    "window-8": "causal, window = 8",
    "window-20": "causal, window = 20",
    "window-30": "causal, window = 30",
    "both-sides": "window = 5",
    "chunk-3": "causal, chunk = 3",
    "chunk-12": "causal, chunk = 12",
    "chunk-all": "causal, chunk = 24",
    "blocks": "chunk = 12",
    "prefix": "causal, prefix = 7",
    "alibi": "causal, alibi, softcap = 3/2, rsqrt = 1",
    "sinks": "causal, window = 8, sinks",
    "bias": "bias",
    "bias-sinks": "causal, sinks, bias, window = 4",
    "selected": "causal, selected",
    "documents": "causal, documents = (5, S - 5 - G, G)",
    "documents-both": "documents = (7, 1, 10, S - 18)",
}
ARGUMENTS = {"sinks": "f32[H | param]", "bias": "f32[H, S, S | param]", "keys": "i32[B, S, N]"}
#: What a ring does not take.
WHOLE = ("bias", "bias-sinks", "selected", "documents", "documents-both")
#: The document of each token.
DOCUMENTS = {"documents": [0] * 5 + [1] * 15 + [2] * 4}
DOCUMENTS["documents-both"] = [0] * 7 + [1] + [2] * 10 + [3] * 6
GRADIENTS = "infer-shapes,apply-strategy,differentiate,eliminate-dead-code"


def text(brackets: str, strategy: str) -> str:
    words = brackets.split(", ")
    more: list[str] = [name for name in ("sinks", "bias") if name in words]
    more += ["keys"] if "selected" in words else []
    mesh = ""
    if strategy:
        axes, split = STRATEGIES[strategy]
        mesh = SHARDED.format(mesh=axes, split=split)
    operands = "".join(f", %{name}" for name in more)
    args = "".join(f", %{name}: {ARGUMENTS[name]}" for name in more)
    return TEXT.format(mesh=mesh, brackets=f"[{brackets}]", more=operands, args=args)


@crossed(strategy=list(STRATEGIES), variant=list(VARIANTS))
def test_sharded_equals_one_device(strategy: str, variant: str) -> None:
    """The loss and all gradients."""
    if strategy in ("zigzag", "plain", "plain-2") and variant in WHOLE:
        pytest.skip("a ring takes neither a bias nor a selection, nor documents")
    brackets = VARIANTS[variant]
    one = compiled(text(brackets, ""), GRADIENTS)
    inputs = inputs_of(one, 4)
    module = compiled(text(brackets, strategy), f"{GRADIENTS},{PLACE}")
    expected = run_numeric(one, inputs)
    assert all(np.isfinite(x).all() for x in expected)
    for x, y in zip(expected, run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10)


def visible(variant: str) -> int:
    """Pairs of 24 queries and keys, one by one from what the brackets say."""
    of = DOCUMENTS.get(variant, [0] * 24)
    brackets = VARIANTS[variant].partition("documents")[0].rstrip(", ")
    words = dict([*w.split(" = "), ""][:2] for w in brackets.split(", "))
    window, chunk = int(words.get("window", 24)), int(words.get("chunk", 24))
    prefix = int(words.get("prefix", 0))
    count = 0
    for i in range(24):
        row = [
            j
            for j in range(24)
            if (j <= i or "causal" not in words or j < prefix)
            and abs(i - j) < window
            and i // chunk == j // chunk
            and of[i] == of[j]
        ]
        count += min(len(row), 3) if "selected" in words else len(row)
    return count


@pytest.mark.parametrize("window", [1, 2, 5, 6, 7, 8, 12, 13, 14, 19, 20, 24, 30])
@pytest.mark.parametrize("strategy", ["plain", "plain-2"])
def test_a_ring_sends_the_keys_that_a_window_reaches(strategy: str, window: int) -> None:
    """Of each rank W - 1 keys before its own, at most all others: keys and values forward and
    again backward, and their gradients in fp32 back home."""
    pipeline = "infer-shapes,apply-strategy,differentiate,partition,units,plan,lower-to-trace"
    module = compiled(text(f"causal, window = {window}", strategy), pipeline)
    actual = analysis(module, "m")["classes"]
    sent = [m for c in actual for m in c["p2p"] if m["dir"] == "send"]
    ranks, tp = (4, 1) if strategy == "plain" else (2, 2)
    rows, row = 24 // ranks, 2 * (4 // tp) * 2 * 4 * 2  # batch, heads, K, fp32, keys and values
    keys = min(window - 1, 24 - rows)
    by_phase = {
        p: sum(m["bytes"] for m in sent if m["phase"] == p) for p in ("forward", "backward")
    }
    home = -(-keys // rows) - 1  # blocks that have gone round, and one more message that ends it
    assert by_phase["forward"] == len(actual) * keys * row
    blocks = max(home, 0) * rows
    assert by_phase["backward"] == len(actual) * row * (2 * keys + (rows if blocks else 0))


@crossed(strategy=["", *STRATEGIES], variant=list(VARIANTS))
def test_flops_are_those_of_the_pairs_seen(strategy: str, variant: str) -> None:
    """All ranks together: 8 FLOPs for a head of 2 elements and a pair, that is 4 K."""
    if strategy in ("zigzag", "plain", "plain-2") and variant in WHOLE:
        pytest.skip("a ring takes neither a bias nor a selection, nor documents")
    brackets = VARIANTS[variant]
    pipeline = "infer-shapes,apply-strategy,partition,units,plan,lower-to-trace"
    module = compiled(text(brackets, strategy), pipeline)
    for op in operations(module, "et.comp"):
        if not op.text("kernel").startswith("attention"):
            op.attrs["flops"] = op.expr("flops") * 0
    classes = analysis(module, "m")["classes"]
    actual = sum(c["count"] * c["flops"]["forward"] for c in classes)
    pair = 4 * 2 * 2 * 4
    expected = pair * visible(variant)
    if strategy in ("", "heads", "exchange") or (
        strategy != "zigzag" and variant in ("causal", "chunk-12", "blocks")
    ):
        assert actual == expected
    else:  # means are rounded up, of each rank and step
        assert expected <= actual < expected + pair * 4 * 4
