"""Scans and causal convolutions: all ranks together compute what one device computes, forward and
backward, however batch, heads and sequence are split; the references are the recurrences."""

from __future__ import annotations

from tests.oracle.test_selection_ops import on_all_ranks
from tests.support import crossed

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


def params(**types: str) -> str:
    """Arguments of these dimensions, all of them parameters."""
    return ", ".join(f"%{name}: f32[{dims} | param]" for name, dims in types.items())


def ssm(h: str, a: str, x: str, bc: str) -> str:
    return params(x=x, dt=f"B, S, {h}", A=a, b=bc, c=bc, sk=h, bias=h)


HEADS, GROUPS = "B, S, H, K", "B, S, G, K"
#: Arguments, the line that computes `%y`, and the letters of `%y`.
OPS = {
    "conv": (params(x="B, S, F", w="F, 3", b="F"), "%y = stg.causal_conv(%x, %w, %b)", "bsf"),
    "conv-silu": (params(x=HEADS, w="H, K, 2"), "%y = stg.causal_conv[silu](%x, %w)", "bshk"),
    "conv-silu-bias": (
        params(x="B, S, F", w="F, 2", b="F"),
        "%y = stg.causal_conv[silu](%x, %w, %b)",
        "bsf",
    ),
    "selective_scan": (
        ssm("F", "F, N", "B, S, F", "B, S, N"),
        "%y = stg.selective_scan(%x, %dt, %A, %b, %c, %sk, %bias)",
        "bsf",
    ),
    "ssd": (
        ssm("H", "H", HEADS, "B, S, N"),
        "%y = stg.ssd[chunk = 2](%x, %dt, %A, %b, %c, %sk, %bias)",
        "bshk",
    ),
    "ssd-groups": (
        ssm("H", "H", HEADS, "B, S, G, N"),
        "%y = stg.ssd[chunk = 2](%x, %dt, %A, %b, %c, %sk, %bias)",
        "bshk",
    ),
    **{
        f"linear_attention-{d.count(',')}": (
            params(q=HEADS, k=HEADS, v="B, S, H, N", d=d),
            "%y = stg.linear_attention[chunk = 2](%q, %k, %v, %d)",
            "bshn",
        )
        for d in ("H", "B, S, H", HEADS)
    },
    **{
        f"gated_delta_rule{'-keys' if k else ''}{'-double' if more else ''}": (
            params(q=GROUPS, k=GROUPS, v="B, S, H, N", a=f"B, S, H{k}", b="B, S, H", A="H")
            + ", "
            + params(bias=f"H{k}"),
            f"%y = stg.gated_delta_rule[chunk = 2{more}](%q, %k, %v, %a, %b, %A, %bias)",
            "bshn",
        )
        for k, more in (("", ""), (", K", ""), ("", ", double"))
    },
    "shift": (params(x="B, S, F"), "%y0 = stg.shift(%x)\n    %y = stg.mul(%x, %y0)", "bsf"),
    "shift-back": (
        params(x=HEADS),
        "%y0 = stg.shift[reverse](%x)\n    %y = stg.mul(%x, %y0)",
        "bshk",
    ),
    "wkv6": (
        params(**dict.fromkeys(("r", "w", "k", "v"), HEADS), now="H, K"),
        "%y = stg.wkv6(%r, %w, %k, %v, %now)",
        "bshk",
    ),
    "wkv6-constant": (
        params(r=HEADS, k=HEADS, v=HEADS, w="H, K", now="H, K"),
        "%y = stg.wkv6(%r, %w, %k, %v, %now)",
        "bshk",
    ),
    "rg_lru": (
        params(**dict.fromkeys("xri", HEADS), a="H, K"),
        "%y = stg.rg_lru(%x, %r, %i, %a)",
        "bshk",
    ),
    "wkv7": (
        params(**dict.fromkeys(("r", "w", "k", "v", "kappa", "a"), HEADS)),
        "%y = stg.wkv7(%r, %w, %k, %v, %kappa, %a)",
        "bshk",
    ),
}
SPLITS = {
    "batch": "stg.split[B, over = dp]",
    "heads": "stg.split[(H, G, F), over = tp]",
    "sequence": "stg.split[S, over = cp]",
    "sequence-over-two": "stg.split[S, over = (dp, cp)]",
    "all": (
        "stg.split[B, over = dp]\n    stg.split[(H, G, F), over = tp]\n    stg.split[S, over = cp]"
    ),
}
GRADIENTS = "infer-shapes,apply-strategy,differentiate,eliminate-dead-code"


@crossed(name=list(OPS), splits=list(SPLITS))
def test_sharded_equals_one_device(name: str, splits: str) -> None:
    args, lines, letters = OPS[name]
    cp = 2 if splits == "sequence-over-two" else 4
    text = MODULE.format(args=args, lines=lines, letters=letters, splits=SPLITS[splits], cp=cp)
    actual = on_all_ranks(text, GRADIENTS)
    assert len(actual) == 1 + args.count("param")
