"""The frequencies of rotary positions, and how they are stretched for long contexts."""

from collections.abc import Iterator

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, const, fraction
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array
from stagec.ir.param import Param
from stagec.ir_spec.ops.cache_rows import past_of
from stagec.ir_spec.ops.structure import ratio

KINDS = ("linear", "llama3", "yarn", "longrope", "proportional")
SCALING = (
    Param("scaling", "name", "how frequencies are stretched for long contexts", choices=KINDS),
    Param("factor", "ratio", "the factor by which frequencies are divided (default 1)"),
    Param("original", "size", "the context length before stretching, in tokens (default 8192)"),
    Param("low", "ratio", "pairs with fewer turns over `original` are stretched fully (default 1)"),
    Param("high", "ratio", "pairs with more turns are not stretched (default: llama3 4, yarn 32)"),
    Param("smooth", "flag", "of yarn: the limits are not rounded to whole pairs"),
    Param("share", "ratio", "of proportional: the share of pairs that rotate (default 1)"),
    Param("short", "ratios", "of longrope: the divisor of the frequency of each pair"),
    Param("long", "ratios", "the same for sequences of more than `original` tokens"),
    Param("mscale", "ratio", "of yarn, longrope: elements times 1 + mscale/10 log(factor)"),
)


def frequencies(op: Operation, ctx: NumericContext, half: int, base: int) -> Array:
    """Radians per position of each pair: base^(-i/half), stretched as `scaling` says.

    `linear`: arXiv 2306.15595. `proportional`: the same, but only `share` of the pairs rotate, as
    in Gemma 4 (modeling_rope_utils.py of transformers). `yarn`: arXiv 2309.00071, section 3.2, with
    limits rounded to pairs as in its code. `llama3`: the code of Llama 3.1
    (meta-llama/llama-models, models/llama3). `longrope`: arXiv 2402.13753, section 3.3, as in
    Phi-3: each pair has its own divisor, from one of two lists that the length of the sequence
    selects.
    """
    plain = float(base) ** (-np.arange(half) / max(half, 1))
    kind = op.text("scaling")
    factor = ratio(op, "factor", 1)
    if not kind:
        return plain
    if kind == "linear":
        return plain / factor
    if kind == "proportional":
        turning: Array = np.arange(half) < np.floor(ratio(op, "share", 1) * half)
        return plain / factor * turning
    original = _original(op, ctx)
    if kind == "longrope":
        tokens = ctx.size(op.operands[0].tensor.shape[1]) + ctx.size(past_of(op))
        by = op.exprs("long" if tokens > original else "short")
        return plain / np.array([float(fraction(e)) for e in by])
    low, high = ratio(op, "low", 1), ratio(op, "high", 4 if kind == "llama3" else 32)
    if kind == "llama3":
        turns = original * plain / (2 * np.pi)
        kept = np.clip((turns - low) / max(high - low, 1e-9), 0, 1)
    else:
        ends = [half * np.log(original / (2 * np.pi * t)) / np.log(base) for t in (high, low)]
        if not op.flag("smooth"):
            ends = [np.floor(ends[0]), np.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], 2 * half - 1)
        kept = 1 - np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0, 1)
    mixed: Array = plain * kept + plain / factor * (1 - kept)
    return mixed


def magnitude(op: Operation, ctx: NumericContext) -> float:
    """The factor of rotated elements: 1 except for yarn (arXiv 2309.00071, section 3.4) and
    longrope (arXiv 2402.13753, section 3.3), which without `mscale` has a formula of its own."""
    kind, factor = op.text("scaling"), ratio(op, "factor", 1)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if kind == "longrope" and "mscale" not in op.attrs:
        return float(np.sqrt(1 + np.log(max(factor, 1)) / np.log(_original(op, ctx))))
    return 1 + ratio(op, "mscale", 1) / 10 * float(np.log(factor))


def is_magnified(op: Operation) -> bool:
    """Whether `magnitude` may differ from 1."""
    kind = op.text("scaling")
    if kind == "longrope" and "mscale" not in op.attrs:
        return True
    return (
        kind in ("yarn", "longrope") and ratio(op, "mscale", 1) != 0 and ratio(op, "factor", 1) != 1
    )


def wrong_lists(op: Operation) -> Iterator[str]:
    """The faults of the lists `short` and `long` of longrope, which need a number for each pair."""
    given_factors = [name for name in ("short", "long") if name in op.attrs]
    if op.text("scaling") != "longrope":
        if given_factors:
            yield f"expects 'scaling = longrope' with {' and '.join(given_factors)}"
        return
    if len(given_factors) < 2:
        yield "expects 'short' and 'long', each with a number for each pair"
        return
    rotated = op.attrs.get("first", op.attrs.get("last", op.operands[0].tensor.shape[-1]))
    pairs = (rotated / const(2)).value if isinstance(rotated, Expr) else None
    for name in given_factors:
        numbers = op.exprs(name)
        if pairs is not None and len(numbers) != pairs:
            yield f"expects {pairs} numbers in '{name}', found {len(numbers)}"
        if not all(fraction(e) > 0 for e in numbers):
            yield f"expects numbers above 0 in '{name}'"


def _original(op: Operation, ctx: NumericContext) -> int:
    return ctx.size(op.expr("original")) if "original" in op.attrs else 8192
