"""Gated activations (arXiv 2002.05202): a function of one half of the operand times the other half.

Dimension 1, of size 2, contains gate and up. Only these are stashed; backward recomputes the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, product
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, EagerForm, Grads, IsOneOnRank, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters
from stagec.ir.traits import Fusible, Trait
from stagec.ir_spec.ops.activation import gelu_steps
from stagec.ir_spec.ops.base import derive, gradients
from stagec.ir_spec.ops.contraction import Add, cast_to
from stagec.ir_spec.ops.curves import FORM, GELU, STEPWISE, PointFunction, soft_silu, swish
from stagec.ir_spec.ops.structure import ratio

_CLAMPED = (
    Param("slope", "ratio", "the gate is times sigmoid(slope * gate) (default 1)"),
    Param("limit", "ratio", "gate is at most this, up is within +- this (default: no limit)"),
    Param("shift", "ratio", "is added to up (default 0)"),
)
_SOFT = (
    Param(
        "soft", "ratio", "gate is soft * tanh(gate / soft), times its sigmoid (default: no bound)"
    ),
    Param("soft_up", "ratio", "up is soft_up * tanh(up / soft_up) (default: no bound)"),
)
#: The name in `stg.kernels` of gradients that overwrite the buffers of gate and up.
IN_PLACE = "gate_in_place"
_IN_PLACE = Param("in_place", "flag", "the gradients of gate and up take their buffer")
#: The same for a kernel that overwrites both.
BOTH_IN_PLACE = "gate_up_in_place"
_BOTH = Param("both", "flag", "with in_place: of gate and of up, so that there is no scratch")
JOINED = Param("joined", "flag", "model code computes gate and up by one product")
_WITH_SCRATCH = IndexRule("a...,az...->az...,a...", whole="z")
#: With a weight for each row of experts: of the op, and of its gradient.
_WEIGHTED = IndexRule("azbcm,abc->abcm", whole="z")
_WEIGHTED_GRAD = IndexRule("abcm,azbcm,abc->azbcm,abc", whole="z")


class Gated(OpDef):
    """Base class of gated activations, from which their gradients are derived. With weights, each
    row of experts is also times its own: one more FLOP, 3 in backward."""

    operands = ("gate_up", "weights?")
    index = IndexRule("az...->a...", whole="z")
    traits: ClassVar[tuple[Trait, ...]] = (Fusible(),)
    gradient: ClassVar[str]  # what the documentation of the gradient adds

    def curve(self, op: Operation) -> PointFunction:
        """The function of the gate."""
        raise NotImplementedError

    def more(self, op: Operation) -> int:
        """FLOPs per element of the result in addition to those of the curve and of the product."""
        return 0

    def derived(self) -> Sequence[OpDef]:
        doc = f"Gradient of `{self.name}`{self.gradient}."
        example = f"%dgu = {self.name}_grad(%dm, %gu) : bf16[B, 2, S, F]"
        params = tuple(p for p in self.params if p not in (STEPWISE, JOINED))
        return [derive(GatedGrad, self, "grad", doc, example, of=self, params=params)]

    def verify(self, op: Operation) -> Iterator[str]:
        shape = op.operands[0].tensor.shape
        if len(shape) < 2 or shape[1] != 2:
            yield f"dimension 1 holds gate and up, expected a size of 2: {op.operands[0].type}"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        cost = self.curve(op).cost + len(op.operands) + self.more(op)
        return product(n.values()) / n["z"] * cost

    def rule(self, op: Operation) -> Rule | None:
        return _WEIGHTED.of(op) if len(op.operands) > 1 else super().rule(op)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [*grads, *op.operands])[: len(op.operands)]

    def activation(self, op: Operation) -> tuple[str, Mapping[str, RawAttr]] | None:
        """The op that is applied to the gate, with its attributes; None if there is no such op."""
        raise NotImplementedError

    def eager_forms(self) -> Mapping[str, EagerForm]:
        own = {IN_PLACE: self._in_place, BOTH_IN_PLACE: self._both_in_place}
        return {self.name.partition(".")[2]: self._unfused, **own}

    def _in_place(self, b: Builder, op: Operation, is_one: IsOneOnRank) -> Sequence[Value] | None:
        """torch/_inductor/codegen/common.py, `KernelArgs.make_inplace`: the kernel of the gradients
        is the last reader of gate and up; it overwrites one of them, and the other is freed after
        it."""
        op.attrs["in_place"] = True
        return None

    def _both_in_place(
        self, b: Builder, op: Operation, is_one: IsOneOnRank
    ) -> Sequence[Value] | None:
        """liger_kernel/ops/swiglu.py and geglu.py: `_swiglu_backward_kernel` stores the gradients
        where gate and up were, also if these are those of a checkpoint."""
        op.attrs |= {"in_place": True, "both": True}
        return None

    def _unfused(self, b: Builder, op: Operation, is_one: IsOneOnRank) -> Sequence[Value] | None:
        """`act_fn(gate) * up`, as `LlamaMLP` of transformers and torchtitan's `FeedForward`."""
        if self.activation(op) is None:
            return None
        (x,) = op.operands
        names = [f"{x.name}_gate", f"{x.name}_up"]
        attrs: dict[str, RawAttr] = {"dim": 1, "count": 2}
        attrs |= {"joined": True} if op.flag("joined") else {}
        gate, up = b.op("stg.unbind", [x], attrs, names=names).results
        act = self.activated(b, op, gate, f"{x.name}_act")
        return [b.value("stg.mul", [act, up], hint=op.result.name)]

    def activated(self, b: Builder, op: Operation, gate: Value, hint: str) -> Value:
        """The activated gate in software that runs operation by operation."""
        name, attrs = self.activation(op) or ("", {})
        return b.value(name, [gate], attrs, hint=hint)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        gate, up = _clamped(op, args[0])
        made = self.curve(op).value(gate) * up
        return [made * args[1][..., None] if len(args) > 1 else made]


class GatedGrad(OpDef):
    """Base class of gradients of gated activations. With `in_place`, the result overwrites the
    buffer of gate and up, and `scratch` is the half of it that the kernel cannot overwrite. If gate
    and up were recomputed, the kernel also recomputes their product: `scratch` is this product, and
    nothing is overwritten. With `both` all is overwritten, and there is no scratch. With weights of
    rows, the last result is their gradient."""

    operands = ("dy", "gate_up", "weights?")
    results = ("result", "scratch?")
    index = IndexRule("a...,az...->az...", whole="z")
    traits: ClassVar[tuple[Trait, ...]] = (Fusible(),)
    of: ClassVar[Gated]

    def dtypes(self, op: Operation) -> Sequence[str]:
        own, weights = op.operands[0].tensor.dtype, op.operands[2:]
        return [own, *(v.tensor.dtype for v in weights)] if weights else super().dtypes(op)

    def rule(self, op: Operation) -> Rule | None:
        if len(op.operands) > 2:
            return _WEIGHTED_GRAD.of(op)
        scratch = op.flag("in_place") and not op.flag("both")
        return _WITH_SCRATCH.of(op) if scratch else super().rule(op)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        """FLOPs of the gradients of gate and up, and of comparisons with a limit."""
        cost = self.of.curve(op).gradient_cost + 3 + self.of.more(op)
        cost += 2 * ("limit" in op.attrs) + 3 * ("soft_up" in op.attrs) + 3 * (len(op.operands) - 2)
        return product(n.values()) / n["z"] * cost

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, packed = args[:2]
        (gate, up), curve = _clamped(op, packed), self.of.curve(op)
        of_weights = [(dy * curve.value(gate) * up).sum(-1) for _ in args[2:]]
        dy = dy * args[2][..., None] if len(args) > 2 else dy
        dgate, dup = dy * up * curve.derivative(gate), dy * curve.value(gate)
        if "soft_up" in op.attrs:
            dup = dup * (1 - (up / ratio(op, "soft_up", 1)) ** 2)
        if "limit" in op.attrs:
            limit = ratio(op, "limit", 0)
            dgate = dgate * (packed[:, 0] <= limit)
            dup = dup * (np.abs(packed[:, 1]) <= limit)
        made = np.stack([dgate, dup], axis=1)
        return [made, *of_weights, np.zeros_like(dgate)][: len(op.results)]

    def reuses(self, op: Operation, result: int) -> int | None:
        made = op.operands[1].producer
        again = made is not None and made.phase == "recompute" and not op.flag("both")
        return 1 if op.flag("in_place") and not (result or again) else None


def is_joined(product: Operation) -> bool:
    """Whether model code computes gate and up by this product, so that it is no product each."""
    users = [user for user, _ in product.result.uses]
    users += [user for op in users if isinstance(op.definition, Add) for user, _ in op.result.uses]
    return any(user.flag("joined") for user in users)


def _clamped(op: Operation, packed: Array) -> tuple[Array, Array]:
    """The gate and its factor, within their limits."""
    gate, up = packed[:, 0], packed[:, 1]
    if "limit" in op.attrs:
        limit = ratio(op, "limit", 0)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if "soft_up" in op.attrs:
        bound = ratio(op, "soft_up", 1)
        up = bound * np.tanh(up / bound)
    return gate, up + ratio(op, "shift", 0)


class Swiglu(Gated):
    """silu(gate) * up. 4 FLOPs per result.

    With `slope`, `limit` or `shift` it is gate * sigmoid(slope * gate) * (up + shift) of clamped
    gate and up, as in gpt-oss: one more FLOP for the slope, one for the shift, 3 for the limit.
    With `soft` it is soft * tanh(gate / soft) * sigmoid(gate) * up, and `soft_up` bounds up in the
    same way, as in Kimi K3: 3 more FLOPs for each.
    """

    name = "stg.swiglu"
    params = (*_CLAMPED, *_SOFT, _IN_PLACE, _BOTH, JOINED)
    gradient = (
        ", 10 FLOPs per element of dy; as many more as forward has for slope and shift, and 5 for "
        "the limit; 5 for `soft`, 6 for `soft_up`"
    )
    example = "%m = stg.swiglu(%gu) : bf16[B, S, F]"

    def eager_forms(self) -> Mapping[str, EagerForm]:
        return {**super().eager_forms(), "clamp": self._clamped_before}

    def _unfused(self, b: Builder, op: Operation, is_one: IsOneOnRank) -> Sequence[Value] | None:
        """The activation of gpt-oss, as in `GptOssExperts._apply_gate` of transformers."""
        if not {"slope", "limit", "shift"} & op.attrs.keys() or "soft" in op.attrs:
            return super()._unfused(b, op, is_one)
        (x,) = op.operands
        gate, up = self._halves(b, op, x)
        scaled = gate
        if "slope" in op.attrs:
            scaled = b.value("stg.scale", [gate], {"by": op.expr("slope")}, hint=f"{x.name}_scaled")
        share = b.value("stg.sigmoid", [scaled], hint=f"{x.name}_share")
        act = b.value("stg.mul", [gate, share], hint=f"{x.name}_act")
        if "shift" in op.attrs:
            row = letters(up.tensor.rank)
            one = b.value("stg.constant", attrs={"value": op.expr("shift")}, hint=f"{x.name}_shift")
            spec = {"spec": f"{row},->{row}"}
            up = b.value("stg.add", [up, cast_to(b, one, up.tensor.dtype)], spec, hint=up.name)
        return [b.value("stg.mul", [up, act], hint=op.result.name)]

    def _halves(self, b: Builder, op: Operation, x: Value) -> tuple[Value, Value]:
        """Gate and up, within their limit."""
        names = [f"{x.name}_gate", f"{x.name}_up"]
        gate, up = b.op("stg.unbind", [x], {"dim": 1, "count": 2}, names=names).results
        if "limit" not in op.attrs:
            return gate, up
        limit = op.expr("limit")
        within: dict[str, RawAttr] = {"most": limit}
        return (
            b.value("stg.clamp", [gate], within, hint=f"{gate.name}_clamped"),
            b.value("stg.clamp", [up], {"least": -limit, **within}, hint=f"{up.name}_clamped"),
        )

    def _clamped_before(
        self, b: Builder, op: Operation, is_one: IsOneOnRank
    ) -> Sequence[Value] | None:
        """Gate and up are clamped and concatenated before the kernel that activates them:
        NVIDIA/Megatron-LM, megatron/core/fusions/fused_bias_geglu.py,
        `weighted_bias_quick_geglu_impl`."""
        if "limit" not in op.attrs:
            return None
        (x,) = op.operands
        parts = self._halves(b, op, x)
        packed = b.value("stg.pack", parts, {"dim": 1}, hint=f"{x.name}_clamped")
        given = {n: v for n, v in op.attrs.items() if n in ("slope", "shift")}
        return [b.value(self.name, [packed], given, hint=op.result.name)]

    def curve(self, op: Operation) -> PointFunction:
        if "soft" in op.attrs:
            return soft_silu(ratio(op, "soft", 1))
        return swish(ratio(op, "slope", 1), 3, 7)

    def activation(self, op: Operation) -> tuple[str, Mapping[str, RawAttr]] | None:
        changed = {"slope", "limit", "shift", "soft", "soft_up"}
        return None if changed & op.attrs.keys() else ("stg.silu", {})

    def more(self, op: Operation) -> int:
        costs = (("slope", 1), ("limit", 3), ("shift", 1), ("soft_up", 3))
        return sum(cost for name, cost in costs if name in op.attrs)


class Geglu(Gated):
    """gelu(gate) * up. FLOPs per result: one more than those of that form of `stg.gelu`."""

    name = "stg.geglu"
    params = (FORM, STEPWISE, _IN_PLACE, _BOTH)
    gradient = ". FLOPs per element of dy: 3 more than those of `stg.gelu_grad`"
    example = "%m = stg.geglu(%gu) : bf16[B, S, F]"

    def curve(self, op: Operation) -> PointFunction:
        return GELU[op.text("form", FORM.default)]

    def activation(self, op: Operation) -> tuple[str, Mapping[str, RawAttr]] | None:
        return "stg.gelu", {n: v for n, v in op.attrs.items() if n == FORM.name}

    def activated(self, b: Builder, op: Operation, gate: Value, hint: str) -> Value:
        if op.flag("stepwise"):
            return gelu_steps(b, gate, op.text("form", FORM.default), hint)
        return super().activated(b, op, gate, hint)
