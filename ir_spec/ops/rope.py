"""Positions inside attention: rotary embedding, temperature, and biases that depend on distance.

It begins with the frequencies of rotary positions, and how they are stretched for long contexts.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, ZERO, Expr, const, fraction, product
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, EagerForm, Grads, IsOneOnRank, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import TurnsRows, Wide
from stagec.ir_spec.ops.base import Elementwise, gradients
from stagec.ir_spec.ops.cache_rows import PAST, past_of
from stagec.ir_spec.ops.masks import whole_rows
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


COMPLEX = Param("complex", "flag", "one product of complex numbers in fp32 rotates the pairs")


class RotaryEmbedding(OpDef):
    """Rotary position embedding (arXiv 2104.09864) of [B, S, heads, K] along dimension 1; 3 FLOPs
    per rotated element.

    With `first` or `last`, only that many elements at the start or end of each head are rotated.
    Code without a fused kernel then concatenates them with the others head by head, or `by_token`.
    Element i forms a pair with element i + K/2, or with its neighbour if `interleaved`. `scaling`
    stretches the frequencies for long contexts, which changes constants only. `inverse` rotates
    back, which is the gradient.

    With an operand [B, axes, S] positions are data, and `sections` gives the number of pairs that
    each axis rotates, as in M-RoPE (arXiv 2409.12191) and for images. If `restart`, the frequencies
    start anew in each section. `term` is one of the two products whose sum is the rotation, in code
    without a fused kernel: the elements times the cosines or the sines of their angles, 1 FLOP
    each.
    """

    name = "stg.rope"
    traits = (TurnsRows(), Wide())
    operands = ("x", "positions*")
    params = (
        Param("base", "size", "the base of the frequencies (default 10000)"),
        Param("first", "size", "how many elements at the start are rotated (default all)"),
        Param("last", "size", "how many elements at the end are rotated (default all)"),
        Param("by_token", "flag", "rotated elements are concatenated with the others by token"),
        Param("interleaved", "flag", "pairs are neighbours instead of elements of two halves"),
        *SCALING,
        Param("sections", "sizes", "the number of pairs that each axis of the positions rotates"),
        Param("restart", "flag", "the frequencies start anew in each section"),
        Param("inverse", "flag", "rotate by the negative angle"),
        Param("every", "size", "row i is at position i times this (default 1)", least=1),
        Param("term", "name", "only one product of the rotation", choices=("cosine", "sine")),
        COMPLEX,
        PAST,
    )
    example = "%q2 = stg.rope[base = 500000](%q) : bf16[B, S, H, K]"

    def rule(self, op: Operation) -> Rule:
        every = letters(op.operands[0].tensor.rank + 1)
        text, axis = every[:-1], every[-1]
        row, whole = text, text[-1]
        if len(op.operands) == 1:
            return make_rule(f"{text}->{text}", whole=whole, each=[0])
        return make_rule(f"{text},{row[0]}{axis}{row[1]}->{text}", whole=whole + axis)

    def verify(self, op: Operation) -> Iterator[str]:
        if op.operands[0].tensor.rank < 3:
            yield f"expects [batch, position, ..., pairs], found {op.operands[0].type}"
        if "first" in op.attrs and "last" in op.attrs:
            yield "expects 'first' or 'last', found both"
        if len(op.operands) > 2:
            yield f"expects x, or x and positions, found {len(op.operands)} operands"
        elif len(op.operands) == 2:
            axes = op.operands[1].tensor.shape[1].value
            if axes != len(op.exprs("sections")):
                yield f"expects 'sections' for {axes} axes, as many as the positions have"
        if "term" in op.attrs and (
            others := {"first", "last", "interleaved", "inverse", "sections"} & op.attrs.keys()
        ):
            yield f"expects 'term' of whole heads in halves, found {', '.join(sorted(others))}"
        scaled = [p.name for p in SCALING[1:] if p.name in op.attrs]
        if scaled and "scaling" not in op.attrs:
            yield f"expects 'scaling' with {', '.join(scaled)}"
        else:
            yield from wrong_lists(op)

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[0].tensor.shape[1] if operand == 1 else None

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        if "every" in op.attrs and step.past != ZERO:
            op.attrs["past"] = whole_rows(step.past, op.expr("every"))
        elif len(op.operands) == 1 and step.is_tokens(op.operands[0].tensor.shape[1]):
            op.attrs |= step.past_attr()
        return op.results

    def flops(self, op: Operation, n: Sizes) -> Expr:
        row = letters(op.operands[0].tensor.rank)
        cost = 1 if "term" in op.attrs else 3
        return product(n[f] for f in row[:-1]) * self.rotated(op, n[row[-1]]) * cost

    def rotated(self, op: Operation, whole: Expr) -> Expr:
        """The number of elements of each head that are rotated, of `whole`."""
        part = op.attrs.get("first", op.attrs.get("last"))
        return part if isinstance(part, Expr) else whole

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        attrs = {} if "term" in op.attrs else {"inverse": not op.flag("inverse")}
        return gradients(b, op, [*grads, *op.operands[1:]], attrs, by=op.name)

    def eager_forms(self) -> Mapping[str, EagerForm]:
        return {"scaled_rope": self._in_steps, "complex_rope": self._complex}

    def _complex(self, b: Builder, op: Operation, is_one: IsOneOnRank) -> None:
        """Make it one product of complex numbers between two casts: pytorch/torchtitan,
        models/llama3/model/model.py, `apply_rotary_emb`."""
        if "term" not in op.attrs:
            op.attrs[COMPLEX.name] = True

    def _in_steps(self, b: Builder, op: Operation, is_one: IsOneOnRank) -> Sequence[Value] | None:
        """Build the product with the cosines, that of the exchanged halves with the sines, and
        their sum, as `apply_rotary_pos_emb` in NVIDIA/Megatron-LM,
        megatron/core/models/common/embeddings/rope_utils.py, does because the kernel of Transformer
        Engine has no factor (`mscale`). Its last concatenation is left out."""
        others = {"first", "last", "interleaved", "sections"} & op.attrs.keys()
        x, *positions = op.operands
        if positions or others or not is_magnified(op):
            return None
        every, dim = letters(x.tensor.rank + 1), x.tensor.rank - 1
        joined, name = f"{every[:dim]}({every[dim:]})", x.name
        split: dict[str, RawAttr] = {
            "spec": f"{joined}->{every}",
            "factors": (every[dim],),
            "sizes": (const(2),),
        }
        halves = b.value("stg.reshape", [x], split, hint=f"{name}_halves")
        parts = {"dim": dim, "count": 2}
        left, right = b.op("stg.unbind", [halves], parts, names=[f"{name}_a", f"{name}_b"]).results
        right = b.value("stg.scale", [right], {"by": const(-1)}, hint=f"{name}_less")
        turned = b.value("stg.pack", [right, left], {"dim": dim}, hint=f"{name}_turned")
        again = {"spec": f"{every}->{joined}"}
        turned = b.value("stg.reshape", [turned], again, hint=turned.name)
        terms = [
            b.value(self.name, [v], {**op.attrs, "term": term}, hint=f"{name}_{term}")
            for v, term in ((x, "cosine"), (turned, "sine"))
        ]
        return [b.value("stg.add", terms, hint=op.result.name)]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        size = args[0].shape[-1]
        count = ctx.size(op.expr("first")) if "first" in op.attrs else size
        start = size - ctx.size(op.expr("last")) if "last" in op.attrs else 0
        before, x, after = np.split(args[0], [start, count], axis=-1)
        half = x.shape[-1] // 2
        angles = self.angles(op, ctx, half, args[1:])
        angles = angles.reshape(*angles.shape[:2], *([1] * (x.ndim - 3)), half)
        cos, sin = (f(angles) * magnitude(op, ctx) for f in (np.cos, np.sin))
        if term := op.text("term", ""):
            return [args[0] * np.concatenate([cos if term == "cosine" else sin] * 2, axis=-1)]
        sin = -sin if op.flag("inverse") else sin
        if op.flag("interleaved"):
            a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
            turned = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
            turned = turned.reshape(*x.shape[:-1], 2 * half)
        else:
            a, b = x[..., :half], x[..., half : 2 * half]
            turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return [np.concatenate([before, turned, x[..., 2 * half :], after], axis=-1)]

    def angles(
        self, op: Operation, ctx: NumericContext, half: int, given: Sequence[Array]
    ) -> Array:
        """The angle of each pair in radians, [1 or b, s, half]; `given` has the positions, if they
        are data."""
        base = ctx.size(op.expr("base")) if "base" in op.attrs else 10000
        if not given:
            at = np.asarray(ctx.positions(op.operands[0].tensor.dims[1])) + ctx.size(past_of(op))
            at = at * ctx.size(op.expr("every", ONE))
            return at[None, :, None] * frequencies(op, ctx, half, base)
        pairs = [ctx.size(e) for e in op.exprs("sections")]
        axis = np.repeat(np.arange(len(pairs)), pairs)[:half]
        each = frequencies(op, ctx, half, base)
        if op.flag("restart"):
            each = np.concatenate([frequencies(op, ctx, n, base) for n in pairs])[:half]
        return np.moveaxis(given[0][:, axis], 1, 2) * each


class Temperature(Elementwise):
    """Queries times 1 + scale log(1 + floor((position + start) / floor)), for positions along
    dimension 1: the temperature of layers without rotary positions in Llama 4; 1 FLOP per
    element."""

    name = "stg.temperature"
    params = (
        Param("floor", "size", "the number of positions that share a temperature", required=True),
        Param("scale", "ratio", "the factor of the logarithm (default 1/10)"),
        Param("start", "int", "the number of the first position (default 1)"),
        PAST,
    )
    example = "%q2 = stg.temperature[floor = 8192](%q) : bf16[B, S, H, K]"

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        if step.is_tokens(op.operands[0].tensor.shape[1]):
            op.attrs |= step.past_attr()
        return op.results

    def verify(self, op: Operation) -> Iterator[str]:
        if op.operands[0].tensor.rank < 2:
            yield f"expects [batch, position, ...], found {op.operands[0].type}"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, grads, by=self.name)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        (x,) = args
        at = np.asarray(ctx.positions(op.operands[0].tensor.dims[1])) + ctx.size(past_of(op))
        scale = float(fraction(op.expr("scale"))) if "scale" in op.attrs else 0.1
        start = op.integer("start", 1)
        factor = 1 + scale * np.log1p((at + start) // ctx.size(op.expr("floor")))
        return [x * factor.reshape(1, -1, *([1] * (x.ndim - 2)))]


class RelativeBias(OpDef):
    """A bias [H, S, T] of scores by the distance between key and query, from a table [buckets, H]
    (T5, arXiv 1910.10683, section 2.1); a gather, no FLOPs.

    If `causal`, half of the buckets stand for one distance each; the others grow logarithmically up
    to the distance `most`, and all longer distances share the last bucket. Otherwise each direction
    has half of the buckets, divided in the same way.
    """

    name = "stg.relative_bias"
    operands = ("table",)
    params = (
        Param("sizes", "sizes", "queries and keys", required=True),
        Param("most", "size", "the distance of the last bucket (default 128)"),
        Param("causal", "flag", "keys come before queries; without it each direction has half"),
        PAST,
    )
    example = "%b = stg.relative_bias[sizes = (S, S)](%table) : bf16[H, S, S]"

    def rule(self, op: Operation) -> Rule:
        s, t = op.exprs("sizes")
        return make_rule("nh->hst", whole="n", sizes={"s": s, "t": t})

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """The bias between the new tokens and the rows of all tokens seen so far."""
        if op.flag("causal") and all(map(step.is_tokens, op.exprs("sizes"))):
            op.attrs |= {"sizes": (step.new, step.rows), **step.past_attr()}
        return op.results

    def verify(self, op: Operation) -> Iterator[str]:
        if len(op.exprs("sizes")) != 2:
            yield "expects 'sizes' of queries and keys"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, grads, {"buckets": op.operands[0].tensor.shape[0]})

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        (table,) = args
        rows, columns = (np.asarray(ctx.positions(d)) for d in op.result.tensor.dims[1:])
        buckets = _buckets(op, ctx, len(table), [rows + ctx.size(past_of(op)), columns])
        return [np.moveaxis(table[buckets], -1, 0)]


class RelativeBiasGrad(OpDef):
    """Gradient of `stg.relative_bias`: for each bucket the sum over its pairs, 1 FLOP per element
    of dy."""

    name = "stg.relative_bias_grad"
    operands = ("dbias",)
    params = (
        Param("buckets", "size", "the rows of the table", required=True),
        *(p for p in RelativeBias.params if p.name != "sizes"),
    )
    index = IndexRule("hst->nh", whole="n", linear=(0,), sizes={"n": "buckets"})
    example = "%dt = stg.relative_bias_grad[buckets = 32](%db) : bf16[32, H]"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(n[f] for f in "hst")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        (dy,) = args
        count = ctx.size(op.expr("buckets"))
        dims = op.operands[0].tensor.dims[1:]
        buckets = _buckets(op, ctx, count, [np.asarray(ctx.positions(d)) for d in dims])
        return [np.stack([dy[:, buckets == i].sum(-1) for i in range(count)])]


def _buckets(op: Operation, ctx: NumericContext, count: int, at: Sequence[Array]) -> Array:
    """The bucket of each pair of a query and a key, [s, t]; `at` has the positions of both."""
    most = ctx.size(op.expr("most")) if "most" in op.attrs else 128
    back = np.asarray(at[0])[:, None] - np.asarray(at[1])[None, :]
    start: Array = 0
    if op.flag("causal"):
        distance = np.maximum(back, 0)
    else:
        count //= 2
        start, distance = np.where(back < 0, count, 0), np.abs(back)
    single = count // 2
    grown = np.log(np.maximum(distance, 1) / single) / np.log(most / single) * (count - single)
    shared = np.minimum(single + grown.astype(int), count - 1)
    return start + np.where(distance < single, distance, shared)
