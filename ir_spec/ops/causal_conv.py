"""Depth-wise causal convolution along the sequence, and its gradient.

Over a split sequence, each rank needs the last K-1 inputs of the previous rank, a *halo*; in
backward, it needs the first K-1 gradients of the next rank. Both are one message to a neighbour.

Beside it, the token shift of RWKV: each token receives the value of the previous one; the gradient
is the reverse shift.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, Expr, const, product
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes, Splits
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir.serving_step import ServingStep
from stagec.ir.types import Dim, TensorType
from stagec.ir_spec.ops.base import STATE, gradients, no_gradient, stated
from stagec.ir_spec.ops.curves import sigmoid
from stagec.ir_spec.ops.sequence_parts import from_parts, to_parts

_SILU = Param("silu", "flag", "apply SiLU to the result, in the same kernel")


class _Conv(OpDef):
    """Base class of the convolution and its gradient. `w` has the channels and then the K taps;
    parts of a split sequence have another dimension, and halos."""

    params: ClassVar[tuple[Param, ...]] = (_SILU,)

    def letters(self, op: Operation, x: int) -> tuple[str, str]:
        """The letters of batch and channels; `x` is the operand that is convolved."""
        channels = "cdefg"[: op.operands[x + 1].tensor.rank - 1]
        parts = op.operands[x].tensor.rank > len(channels) + 2
        return ("bz" if parts else "b"), channels

    def made(self, op: Operation, x: int, before: str, results: str, halos: int) -> Rule:
        b, c = self.letters(op, x)
        halos = halos if b == "bz" else 0
        biased = len(op.operands) - x - 2 - halos
        texts = [t.format(b=b, c=c) for t in before.split(",") if t]
        texts += [f"{b}s{c}", f"{c}k", *[c] * biased, *[f"{b}h{c}"] * halos]
        text = f"{','.join(texts)}->{results.format(b=b, c=c)}"
        if halos:
            return make_rule(text, whole="ksh")
        return make_rule(text, whole="k", special="s", summed="s")

    def bias(self, op: Operation, x: int, halos: int) -> Value | None:
        """The operand with one number per channel, or None."""
        b, _ = self.letters(op, x)
        rest = op.operands[x + 2 : len(op.operands) - (halos if b == "bz" else 0)]
        return rest[0] if rest else None

    def padded(self, op: Operation, n: Sizes) -> Expr:
        """FLOPs: 2 K C (S + K - 1); from a state 2 K C S."""
        rows = n["s"] if op.flag("state") else n["s"] + n["k"] - 1
        return product(v for f, v in n.items() if f not in "sh") * rows * 2


class CausalConv(_Conv):
    """Depth-wise causal convolution: `y_t = sum over i of w[K-1-i] x_(t-i)`, for each channel, plus
    a bias if there is one.

    `x` is [B, S, channels...], `w` [channels..., K]. FLOPs are 2 K C (S + K - 1) for C channels, as
    PyTorch counts a padded convolution; no matrix products. Its inputs are stashed. Over a split
    sequence, each rank sends its last K-1 inputs to the next one (over several axes, all ranks
    gather them); a part must have at least this many tokens.

    With `state`, the last operand has the K previous inputs ([B, K, channels...], as in
    transformers); the second result has the last K of these and of `x`, in the same buffer. Then
    there is no padding: FLOPs are 2 K C S, and a part of a split sequence must have at least K
    tokens.
    """

    name = "stg.causal_conv"
    operands = ("x", "w", "bias*")
    results = ("result", "last?")
    params = (_SILU, STATE)
    example = "%y = stg.causal_conv[silu](%x, %w, %b) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        if not op.flag("state"):
            return self.made(op, 0, "", "{b}s{c}", 1)
        b, c = self.letters(op, 0)
        bias = f"{c}," * (len(op.operands) - 3)
        text = f"{b}s{c},{c}k,{bias}{b}k{c}->{b}s{c},{b}k{c}"
        return make_rule(text, whole="ks" if b == "bz" else "k", special="s" if b == "b" else "")

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.operands[0].tensor.dtype, op.operands[-1].tensor.dtype]

    def verify(self, op: Operation) -> Iterator[str]:
        b, c = self.letters(op, 0)
        if len(op.operands) > 3 + (b == "bz" or op.flag("state")):
            yield f"expects x, w and a bias, found {len(op.operands)} operands"
        elif op.operands[0].tensor.rank < len(c) + 2:
            yield f"expects x as [batch, sequence, channels of w], found {op.operands[0].type}"

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Keep the last K inputs as state, in the element type of the inputs."""
        x = op.operands[0].tensor
        if not step.is_tokens(x.shape[1]):
            return None
        return step.carry(op, TensorType(x.dtype, (x.dims[0], Dim(self.taps(op)), *x.dims[2:])))

    def reuses(self, op: Operation, result: int) -> int | None:
        return len(op.operands) - 1 if result == 1 else None

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return self.padded(op, n)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        no_gradient(op)
        return gradients(b, op, [grads[0], *op.operands])

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        over, (_, c) = special["s"], self.letters(op, 0)
        if op.flag("state"):
            x, before, kept = parts_from_state(b, op, self.taps(op), over)
            operands = [x, *op.operands[1:-1], before]
            names = [f"{r.name}_parts" for r in op.results]
            result = b.op(op.name, operands, stated(op, self.params), names=names).results[0]
            return [from_parts(b, result, f"bs{c}", op.results[0].name), kept]
        (x, *rest), y = op.operands, op.results[0].name
        parts = to_parts(b, x, f"bs{c}", over)
        before = halo(b, parts, self.taps(op), over, 1)
        result = b.value(op.name, [parts, *rest, before], stated(op, [_SILU]), hint=f"{y}_parts")
        return [from_parts(b, result, f"bs{c}", y)]

    def taps(self, op: Operation) -> Expr:
        """The number of taps, K."""
        return factor_sizes(op, self.rule(op))["k"]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        b, c = self.letters(op, 0)
        x, w, *rest = args
        before, last = None, list[Array]()
        if op.flag("state"):
            kept, place = rest.pop(), len(b)
            rows = np.concatenate([kept, x], place)
            before = rows[(slice(None),) * place + (slice(1, w.shape[-1]),)]
            last = [rows[(slice(None),) * place + (slice(-w.shape[-1], None),)]]
        elif b == "bz":
            before = inner_halo(op, ctx, 0, rest.pop(), first=True)
        y = _convolved(x, w, before, len(c)) + (rest[0] if rest else 0)
        return [y * sigmoid(y) if op.flag("silu") else y, *last]


class CausalConvGrad(_Conv):
    """Gradient of `stg.causal_conv`: twice its FLOPs, for inputs and for taps; three times with
    `silu`, whose operand is recomputed."""

    name = "stg.causal_conv_grad"
    operands = ("dy", "x", "w", "bias*")
    results = ("dx", "dw", "dbias?")
    element_types = ("x", "w", "bias")
    example = (
        "%dx, %dw, %db = stg.causal_conv_grad[silu](%dy, %x, %w, %b) : "
        "(bf16[B, S, D], bf16[D, K], bf16[D])"
    )

    def rule(self, op: Operation) -> Rule:
        results = "{b}s{c},{c}k" + (",{c}" if self.bias(op, 1, 2) is not None else "")
        return self.made(op, 1, "{b}s{c}", results, 2)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return self.padded(op, n) * (3 if op.flag("silu") else 2)

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        over, (_, c) = special["s"], self.letters(op, 1)
        taps = factor_sizes(op, self.rule(op))["k"]
        dy, x = (to_parts(b, v, f"bs{c}", over) for v in op.operands[:2])
        rest = op.operands[2:]
        before = halo(b, x, taps, over, 1)
        if op.flag("silu"):
            name = f"{op.results[0].name}_pre"
            inner = b.value("stg.causal_conv", [x, *rest, before], hint=name)
            dy = b.value("stg.silu_grad", [dy, inner], hint=f"d_{name}")
        after = halo(b, dy, taps, over, -1)
        names = [r.name if i else f"{r.name}_parts" for i, r in enumerate(op.results)]
        dx, *others = b.op(op.name, [dy, x, *rest, before, after], names=names).results
        return [from_parts(b, dx, f"bs{c}", op.results[0].name), *others]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        b, c = self.letters(op, 1)
        dy, x, w = args[:3]
        bias = args[3] if self.bias(op, 1, 2) is not None else 0
        before = after = None
        if b == "bz":
            before = inner_halo(op, ctx, 1, args[-2], first=True)
            after = inner_halo(op, ctx, 1, args[-1], first=False)
        if op.flag("silu"):
            y = _convolved(x, w, before, len(c)) + bias
            s = sigmoid(y)
            dy = dy * s * (1 + y * (1 - s))
        taps, s = w.shape[-1], x.shape[-1 - len(c)]
        ends = _rows(dy, taps - 1, len(c)) if after is None else after
        behind = np.concatenate([dy, ends], axis=-1 - len(c))
        dx = sum(w[..., taps - 1 - i] * _cut(behind, i, s, len(c)) for i in range(taps))
        padded = _padded(x, taps, before, len(c))
        lead = tuple(range(dy.ndim - len(c)))
        dw = [(dy * _cut(padded, i, s, len(c))).sum(lead) for i in range(taps)]
        return [dx, np.stack(dw, -1), dy.sum(lead)][: len(self.rule(op).results)]


class ConvHalo(OpDef):
    """The last `rows` tokens of each part of a sequence, or with `first` the first ones, which a
    convolution on the neighbouring part needs."""

    name = "stg.conv_halo"
    operands = ("x",)
    params = (
        Param("rows", "size", "how many tokens", required=True),
        Param("first", "flag", "the first ones"),
    )
    index = IndexRule("bzs...->bzh...", whole="sh", sizes={"h": "rows"})
    example = "%t = stg.conv_halo[rows = 3](%x) : bf16[B, 4, 3, D]"

    def bytes_touched(self, op: Operation) -> Expr:
        return op.result.tensor.local_bytes * 2

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        rows = ctx.size(op.expr("rows"))
        return [args[0][:, :, :rows] if op.flag("first") else args[0][:, :, -rows:]]


class RollParts(OpDef):
    """Rotates the parts of a sequence by `by` places: each receives the values of an earlier
    part."""

    name = "stg.roll_parts"
    operands = ("x",)
    params = (Param("by", "int", "places (default 1)"),)
    index = IndexRule("bzh...->bzh...", whole="zh")
    example = "%t = stg.roll_parts(%x) : bf16[B, 4, 3, D]"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.roll(args[0], op.integer("by", 1), axis=1)]


def halo(b: Builder, x: Value, taps: Expr, over: Sequence[str], by: int) -> Value:
    """The tokens that each part needs from the one before it (`by` = 1) or after it (-1)."""
    rows: dict[str, RawAttr] = {"rows": taps - 1}
    if by < 0:
        rows["first"] = True
    own = b.value("stg.conv_halo", [x], rows, hint=f"{x.name}_edge")
    move: dict[str, RawAttr] = {"by": by} if by < 0 else {}
    if len(over) == 1:
        ring: dict[str, RawAttr] = {"over": tuple(over), **move}
        return b.value("stg.collective_permute", [own], ring, hint=f"{x.name}_halo")
    along: dict[str, RawAttr] = {"dim": 1, "over": tuple(over)}
    every = b.value("stg.all_gather", [own], along, hint=f"{x.name}_edges")
    moved = b.value("stg.roll_parts", [every], move, hint=f"{x.name}_rolled")
    return b.value("stg.all_slice", [moved], along, hint=f"{x.name}_halo")


def parts_from_state(
    b: Builder, op: Operation, rows: Expr, over: Sequence[str]
) -> tuple[Value, Value, Value]:
    """For an op with a state of `rows` tokens: the parts of operand 0, the state before each part,
    which is the last tokens of the previous part, and the state after the last part."""
    x, state, end = op.operands[0], op.operands[-1], op.results[1].name
    c = "cdefg"[: x.tensor.rank - 2]
    parts = to_parts(b, x, f"bs{c}", over)
    edge = b.value("stg.conv_halo", [parts], {"rows": rows}, hint=f"{x.name}_edge")
    along: dict[str, RawAttr] = {"dim": 1, "over": tuple(over)}
    edges = b.value("stg.all_gather", [edge], along, hint=f"{x.name}_edges")
    one: dict[str, RawAttr] = {"factors": ("z",), "sizes": (ONE,)}
    spec: dict[str, RawAttr] = {"spec": f"b(zk){c}->bzk{c}"}
    first = b.value("stg.reshape", [state], {**spec, **one}, hint=f"{state.name}_first")
    names = [f"{x.name}_before", f"{end}_last"]
    before, last = b.op("stg.shift", [edges, first], {"state": True}, names=names).results
    mine = b.value("stg.all_slice", [before], along, hint=f"{x.name}_start")
    spec = {"spec": f"bzk{c}->b(zk){c}"}
    return parts, mine, b.value("stg.reshape", [last], spec, hint=end)


def inner_halo(op: Operation, ctx: NumericContext, x: int, halo: Array, *, first: bool) -> Array:
    """A halo, with zeros before the first part and after the last one."""
    parts = op.operands[x].tensor.dims[1]
    last = ctx.size(parts.size) - 1
    outer = [p == (0 if first else last) for p in ctx.positions(parts)]
    return np.where(np.reshape(outer, (1, -1, *[1] * (halo.ndim - 2))), 0, halo)


def _rows(x: Array, count: int, channels: int) -> Array:
    """`count` rows of zeros, for the other dimensions of x."""
    place = x.ndim - channels - 1
    return np.zeros((*x.shape[:place], count, *x.shape[place + 1 :]))


def _cut(x: Array, start: int, count: int, channels: int) -> Array:
    return np.take(x, range(start, start + count), axis=x.ndim - channels - 1)


def _padded(x: Array, taps: int, before: Array | None, channels: int) -> Array:
    ahead = _rows(x, taps - 1, channels) if before is None else before
    return np.concatenate([ahead, x], axis=x.ndim - channels - 1)


def _convolved(x: Array, w: Array, before: Array | None, channels: int) -> Array:
    taps, rows = w.shape[-1], x.shape[x.ndim - channels - 1]
    padded = _padded(x, taps, before, channels)
    return sum(w[..., i] * _cut(padded, i, rows, channels) for i in range(taps))


class Shift(OpDef):
    """The value of the previous token, 0 for the first one; with `reverse`, of the next token.

    A copy, no FLOPs. Over a split sequence, each rank sends its last token to the next one; the
    second operand is then that token for each part. With `state`, it is the token before the first
    one ([B, 1, channels...]), and the last token is a result in the same buffer.
    """

    name = "stg.shift"
    operands = ("x", "edge*")
    results = ("result", "last?")
    element_types = ("x", "edge")
    params = (
        Param("reverse", "flag", "the token behind"),
        STATE,
        Param("parts", "flag", "with 'state': tokens stand behind the parts of a sequence"),
    )
    example = "%p = stg.shift(%x) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        if op.flag("state") or len(op.operands) == 1:
            c = "cdefg"[: op.operands[0].tensor.rank - 2]
            if op.flag("parts"):
                return make_rule(f"bzs{c[1:]},bzo{c[1:]}->bzs{c[1:]},bzo{c[1:]}", whole="so")
            if op.flag("state"):
                return make_rule(f"bs{c},bo{c}->bs{c},bo{c}", special="s", whole="o")
            return make_rule(f"bs{c}->bs{c}", special="s", linear=[0])
        c = "cdefg"[: op.operands[0].tensor.rank - 3]
        return make_rule(f"bzs{c},bzh{c}->bzs{c}", whole="sh")

    def verify(self, op: Operation) -> Iterator[str]:
        if op.flag("state") and op.flag("reverse"):
            yield "expects 'state' or 'reverse', found both"

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Keep the last token as state, in fp32."""
        x = op.operands[0].tensor
        if op.flag("reverse") or not step.is_tokens(x.shape[1]):
            return super().serve(step, op)
        return step.carry(op, TensorType("f32", (x.dims[0], Dim(ONE), *x.dims[2:])))

    def reuses(self, op: Operation, result: int) -> int | None:
        return 1 if result == 1 else None

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        no_gradient(op)
        return gradients(b, op, [grads[0]], {"reverse": not op.flag("reverse")}, by=op.name)

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        text = "bs" + "cdefg"[: op.operands[0].tensor.rank - 2]
        if op.flag("state"):
            x, before, kept = parts_from_state(b, op, ONE, special["s"])
            names, how = [f"{r.name}_parts" for r in op.results], {"state": True, "parts": True}
            shifted = b.op(op.name, [x, before], how, names=names).results[0]
            return [from_parts(b, shifted, text, op.results[0].name), kept]
        x = to_parts(b, op.operands[0], text, special["s"])
        edge = halo(b, x, const(2), special["s"], -1 if op.flag("reverse") else 1)
        attrs: dict[str, RawAttr] = {"reverse": True} if op.flag("reverse") else {}
        y = b.value(op.name, [x, edge], attrs, hint=f"{op.result.name}_parts")
        return [from_parts(b, y, text, op.result.name)]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, back = args[0], op.flag("reverse")
        if op.flag("state"):
            place = 2 if op.flag("parts") else 1
            rows = np.concatenate([args[1], x], place)
            return np.split(rows, [x.shape[place]], place)
        axis = len(args)  # parts stand before the sequence
        edge = np.zeros_like(np.take(x, [0], axis))
        if len(args) == 2:
            edge = inner_halo(op, ctx, 0, args[1], first=not back)
        kept = np.take(x, range(1, x.shape[axis]) if back else range(x.shape[axis] - 1), axis)
        return [np.concatenate([kept, edge] if back else [edge, kept], axis)]
