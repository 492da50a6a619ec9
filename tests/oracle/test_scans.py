"""Scans and causal convolutions: all ranks together compute what one device computes, forward and
backward, however batch, heads and sequence are split; the references are the recurrences."""

from __future__ import annotations

import pytest

from tests.support import crossed
from tests.oracle.test_selection_ops import on_all_ranks

MODULE = """stg.module @m {{
  stg.symbols[B = 4, S = 8, H = 4, G = 2, K = 3, N = 2, F = 4]
  stg.mesh @pod[dp = 2, cp = {cp}, tp = 2]
  stg.assume[H % G == 0]
  stg.strategy @s[mesh = @pod] {{
    {splits}
    stg.optimizer[none]
  }}
  stg.func @f ({args}) {{
    {lines}
    %sq = stg.mul(%y, %y)
    %loss = stg.sum["{letters}->"](%sq)
    stg.return(%loss)
  }}
}}
"""
SSM = "%dt: f32[B, S, {h} | param], %A: f32[{a} | param], %sk: f32[{h} | param], %bias: f32[{h} | param]"
HEADS = SSM.format(h="H", a="H")
#: Arguments, the line that computes `%y`, and the letters of `%y`.
OPS = {
    "conv": (
        "%x: f32[B, S, F | param], %w: f32[F, 3 | param], %b: f32[F | param]",
        "%y = stg.causal_conv(%x, %w, %b)",
        "bsf",
    ),
    "conv-silu": (
        "%x: f32[B, S, H, K | param], %w: f32[H, K, 2 | param]",
        "%y = stg.causal_conv[silu](%x, %w)",
        "bshk",
    ),
    "conv-silu-bias": (
        "%x: f32[B, S, F | param], %w: f32[F, 2 | param], %b: f32[F | param]",
        "%y = stg.causal_conv[silu](%x, %w, %b)",
        "bsf",
    ),
    "selective_scan": (
        f"%x: f32[B, S, F | param], {SSM.format(h='F', a='F, N')}, "
        "%b: f32[B, S, N | param], %c: f32[B, S, N | param]",
        "%y = stg.selective_scan(%x, %dt, %A, %b, %c, %sk, %bias)",
        "bsf",
    ),
    "ssd": (
        f"%x: f32[B, S, H, K | param], {HEADS}, %b: f32[B, S, N | param], %c: f32[B, S, N | param]",
        "%y = stg.ssd[chunk = 2](%x, %dt, %A, %b, %c, %sk, %bias)",
        "bshk",
    ),
    "ssd-groups": (
        f"%x: f32[B, S, H, K | param], {HEADS}, "
        "%b: f32[B, S, G, N | param], %c: f32[B, S, G, N | param]",
        "%y = stg.ssd[chunk = 2](%x, %dt, %A, %b, %c, %sk, %bias)",
        "bshk",
    ),
    **{
        f"linear_attention-{d.count(',')}": (
            f"%q: f32[B, S, H, K | param], %k: f32[B, S, H, K | param], "
            f"%v: f32[B, S, H, N | param], %d: f32[{d} | param]",
            "%y = stg.linear_attention[chunk = 2](%q, %k, %v, %d)",
            "bshn",
        )
        for d in ("H", "B, S, H", "B, S, H, K")
    },
    "gated_delta_rule": (
        "%q: f32[B, S, G, K | param], %k: f32[B, S, G, K | param], %v: f32[B, S, H, N | param], "
        "%a: f32[B, S, H | param], %b: f32[B, S, H | param], %A: f32[H | param], "
        "%bias: f32[H | param]",
        "%y = stg.gated_delta_rule[chunk = 2](%q, %k, %v, %a, %b, %A, %bias)",
        "bshn",
    ),
    "wkv7": (
        ", ".join(f"%{n}: f32[B, S, H, K | param]" for n in ("r", "w", "k", "v", "kappa", "a")),
        "%y = stg.wkv7(%r, %w, %k, %v, %kappa, %a)",
        "bshk",
    ),
}
SPLITS = {
    "batch": "stg.split[B, over = dp]",
    "heads": "stg.split[(H, G, F), over = tp]",
    "sequence": "stg.split[S, over = cp]",
    "sequence-over-two": "stg.split[S, over = (dp, cp)]",
    "all": "stg.split[B, over = dp]\n    stg.split[(H, G, F), over = tp]\n    stg.split[S, over = cp]",
}
GRADIENTS = "infer-shapes,apply-strategy,differentiate,eliminate-dead-code"


@crossed(name=list(OPS), splits=list(SPLITS))
def test_sharded_equals_one_device(name: str, splits: str) -> None:
    args, lines, letters = OPS[name]
    cp = 2 if splits == "sequence-over-two" else 4
    text = MODULE.format(args=args, lines=lines, letters=letters, splits=SPLITS[splits], cp=cp)
    found = on_all_ranks(text, GRADIENTS)
    assert len(found) == 1 + args.count("param")
