"""Computations in a trace: the attributes of their costs and kernels, and the computations that
form one kernel.

It begins with the marks of computations for which PyTorch has kernels of its own
(`stg.kernels[elementwise = torch]`). `stagec/time/costs/eager.py` defines the cost of each mark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.api import (
    Expr,
    OpDef,
    Operation,
    Region,
    Strategy,
    Value,
    call,
    const,
    is_parameter,
    total,
)
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ONE, ZERO
from stagec.ir.kernel import (
    ATTENDS,
    CASTS,
    CONTINUES,
    EXPANDS,
    EXPERTS,
    EXTENTS,
    MARLIN,
    ON_HOST,
    STAYS,
    TRITON,
    KernelShape,
)
from stagec.ir.module import uncast
from stagec.ir.traits import CopiesMemory, Free, Recasts
from stagec.ir.types import DTYPE_BYTES, EIGHT_BITS, FOUR_BITS
from stagec.ir_spec.ops.activation import ActivationGrad, Gelu, Silu
from stagec.ir_spec.ops.contraction import (
    ONE_SCALE,
    Add,
    Cast,
    Einsum,
    Mul,
    Scale,
    Sum,
    casts_twice,
)
from stagec.ir_spec.ops.layout import Unbind
from stagec.ir_spec.ops.loss_forms import LogSoftmax, LogSoftmaxGrad
from stagec.ir_spec.ops.moe import Combine, CombineWeightsGrad, Dispatch
from stagec.ir_spec.ops.norm import LayerNorm, LayerNormGrad, RmsNorm, RmsNormGrad
from stagec.ir_spec.ops.optimizer import AdamW, SquaredNorm
from stagec.ir_spec.ops.ring import MergeAttention
from stagec.ir_spec.ops.rope import RotaryEmbedding
from stagec.ir_spec.ops.softmax import Softmax, SoftmaxGrad
from stagec.ir_spec.strategy.autocast import AutocastRule
from stagec.ir_spec.strategy.fusion import FusionRule
from stagec.ir_spec.strategy.kernels import CUTLASS, DEVICE, SDPA, TORCH, KernelsRule
from stagec.ir_spec.strategy.optimizer import HOST
from stagec.ir_spec.strategy.sustained import SustainedRule
from stagec.sharding.work import ComputeWork, fused_work, is_computation, is_left, viewed, work_of

FORWARD = ("forward", "recompute")


def eager_mark(op: Operation) -> str:
    """The mark of an op that is not a matrix product. It is empty if one kernel of PyTorch touches
    the bytes of the op at the bandwidth of the memory. It depends on the ops around."""
    definition = op.definition
    kind = ActivationGrad if isinstance(definition, ActivationGrad) else type(definition)
    rule = _MARKS.get(kind, "")
    what = rule if isinstance(rule, str) else rule(op)
    return f"eager_{what}_{op.operands[0].tensor.dtype}" if what else ""


def _cast(op: Operation) -> str:
    if not _widens(op):
        return ""
    if op.flag("steps"):
        return "adapter_grad"
    return "promoted" if _is_promoted(op) else "cast"


def _widens(op: Operation | None) -> bool:
    """Whether an op is a cast to a wider type."""
    if op is None or not isinstance(op.definition, Cast):
        return False
    return DTYPE_BYTES[op.result.tensor.dtype] > DTYPE_BYTES[op.operands[0].tensor.dtype]


def _is_promoted(op: Operation) -> bool:
    """Whether a cast is part of the kernels that use its result: PyTorch's sums and products take
    operands of two types (ATen/native/TensorIterator.cpp, `compute_types`). Gradients are cast by
    kernels of their own."""
    if op.phase not in FORWARD:
        return False
    users = [user for user, _ in op.result.uses if not user.has(Free)]
    return bool(users) and all(_is_mixed(user) for user in users)


def _is_mixed(op: Operation) -> bool:
    """Whether an op is a sum or a product of two values, of which one is cast to the type of the
    other."""
    if not isinstance(op.definition, Add | Mul) or len(op.operands) != 2 or "spec" in op.attrs:
        return False
    return _widens(op.operands[0].producer) != _widens(op.operands[1].producer)


def _takes_promoted(op: Operation) -> bool:
    """Whether an op takes a cast that is part of its kernel."""
    makers = (v.producer for v in op.operands)
    return any(m is not None and _widens(m) and _is_promoted(m) for m in makers)


def _einsum(op: Operation) -> str:
    """The mark of an einsum that is not a matrix product: with a vector, or its gradient."""
    ranks = [v.tensor.rank for v in op.operands]
    if len(ranks) != 2:
        return ""
    if op.result.tensor.rank < max(ranks):
        return "rows"
    return "broadcast" if min(ranks) < max(ranks) else ""


def _add(op: Operation) -> str:
    if op.flag("steps"):
        return "adapter"
    if _takes_promoted(op):
        return "mixed"
    ranks = [v.tensor.rank for v in op.operands]
    if not 0 < min(ranks) < max(ranks):
        return ""
    made = viewed(op.operands[0]).producer
    follows = made is not None and is_computation(made) and work_of(made).kernel is not None
    return "bias" if follows and is_parameter(uncast(op.operands[1])) else "broadcast"


def _is_routed(op: Operation) -> bool:
    """Whether an op is on routed rows, which are parts of packed products."""
    return any(d.routed or d.load for d in op.operands[0].tensor.dims)


def _mul(op: Operation) -> str:
    if _takes_promoted(op):
        return "mixed"
    return "strided" if _is_routed(op) or any(map(_is_part, op.operands)) else ""


def _activation(op: Operation) -> str:
    if isinstance(op.definition, Silu) and _is_routed(op):
        return "routed_silu"
    return "part" if _is_part(op.operands[0]) else ""


def _activation_grad(op: Operation) -> str:
    of = op.definition.of if isinstance(op.definition, ActivationGrad) else None
    if isinstance(of, Silu) and _is_routed(op):
        return "routed_silu_grad"
    return "strided" if any(map(_is_part, op.operands)) else ""


def _is_part(value: Value) -> bool:
    """Whether a value is a view of a part of a product that model code computes as one, also where
    it is kept for backward: its rows have gaps."""
    maker = value.owner
    if isinstance(maker, Region):
        outer = maker.owner.operands
        return value.index < len(outer) and _is_part(outer[value.index])
    if maker.region is not None:
        return _is_part(maker.region.terminator.operands[value.index])
    return isinstance(maker.definition, Unbind) and maker.flag("joined")


def _in_steps(mark: str) -> Callable[[Operation], str]:
    return lambda op: mark if op.flag("steps") else ""


def _rope(op: Operation) -> str:
    return "complex_rope" if op.flag("complex") else _either("rope", "rope_grad")(op)


def _either(forward: str, backward: str) -> Callable[[Operation], str]:
    return lambda op: forward if op.phase in FORWARD else backward


#: By the class of an op: its mark, or a function from the op to its mark.
_MARKS: Mapping[type[OpDef], str | Callable[[Operation], str]] = {
    Cast: _cast,
    Einsum: _einsum,
    Add: _add,
    Mul: _mul,
    Scale: _in_steps("adapter_scale"),
    Silu: _activation,
    Gelu: _activation,
    ActivationGrad: _activation_grad,
    RmsNorm: _in_steps("rmsnorm"),
    RmsNormGrad: _in_steps("rmsnorm_grad"),
    RotaryEmbedding: _rope,
    MergeAttention: "merge",
    LogSoftmax: "log_softmax",
    LogSoftmaxGrad: "log_softmax_grad",
    LayerNorm: "layernorm",
    LayerNormGrad: "layernorm_grad",
    Sum: "sum",
    Softmax: "softmax",
    SoftmaxGrad: "softmax_grad",
    AdamW: "adamw",
    SquaredNorm: "squared_norm",
    Dispatch: _either("dispatch", "dispatch_grad"),
    Combine: _either("combine", "combine_grad"),
    CombineWeightsGrad: "combine_weights_grad",
}


def attributes(
    name: str, work: ComputeWork, left: Sequence[Value], form: str = ""
) -> dict[str, RawAttr]:
    """The attributes of an `et.comp` for an op of this name: the FLOPs and bytes of its work, the
    bytes of the values that it leaves (`left`), and the extents and the mark (`form`) of its
    kernel."""
    attrs: dict[str, RawAttr] = {"kind": name.partition(".")[2], "flops": work.flops}
    if work.matmul != 0:
        attrs["matmul"] = work.matmul
    attrs["bytes"] = work.bytes
    attrs["out"] = total(r.tensor.local_bytes for r in left)
    if form:
        attrs["form"] = form
    return attrs | kernel_attributes(work.kernel)


@dataclass(frozen=True)
class KernelForms:
    """The marks of kernels that a strategy asks for: the library of fused attention, products of
    experts, and products that expand 4-bit weights. Marlin expands integers (vLLM,
    `CompressedTensorsWNA16MarlinMoEMethod`; SGLang, `fused_marlin_moe`); mxfp4 of experts is
    expanded by Triton kernels unless the strategy asks for `marlin`.
    `expert_blocks` is the kernel of experts in 8 bits, or with `cutlass` in 4 bits, `blocks` that
    of other products in 8 bits.
    With `host`, updates of offloaded states are those of the host."""

    attention: str
    experts: bool
    fused: bool
    marlin: bool
    blocks: str
    expert_blocks: str
    torch: bool
    cast: str
    host: bool

    @classmethod
    def of(cls, strategy: Strategy) -> KernelForms:
        """The marks for which a strategy asks."""
        kernels = strategy.one(KernelsRule)
        experts = strategy.one(SustainedRule).experts is not None
        attention = "" if kernels.attention == DEVICE else kernels.attention
        fused = strategy.one(FusionRule).experts != "none"
        torch = kernels.elementwise == TORCH
        autocast = strategy.one(AutocastRule)
        cast = autocast.to if autocast.on else ""
        marlin, in_blocks = kernels.expands == MARLIN, (kernels.blocks, kernels.experts)
        host = strategy.optimizer.offloaded == HOST
        return cls(attention, experts, fused, marlin, *in_blocks, torch, cast, host)

    def work(self, op: Operation) -> ComputeWork:
        """The work of an op as its kernel does it. Attention whose operands autocast does not cast
        (`attention = given`) saves operands in 32 bits, but its kernel multiplies in the type of
        autocast: no fused kernel multiplies in 32 bits."""
        work = work_of(op)
        kernel = work.kernel
        if kernel is None or kernel.kind not in ATTENDS:
            return work
        if self.attention == SDPA and "window" in op.attrs:
            kernel = _with_mask(kernel, op.expr("window"))
        return work._replace(kernel=replace(kernel, dtype=self.cast or kernel.dtype))

    def eager(self, op: Operation) -> str:
        """The mark of what PyTorch launches for an op, if the strategy asks for it."""
        return eager_mark(op) if self.torch else ""

    def of_op(self, op: Operation, kernel: KernelShape | None, eager: str) -> str:
        """The mark of the kernel of an op, which is `eager` unless it has another one; empty if it
        has none."""
        if kernel is None:
            if self.host and _is_of_host(op):
                return ON_HOST
            if where := op.text("continues", ""):
                return f"{CONTINUES}_{where}"
            if {"once", "kept"} & op.attrs.keys():
                return STAYS
            if op.text("to", "") in ONE_SCALE and op.has(Recasts) and casts_twice(op):
                read = DTYPE_BYTES[op.operands[0].tensor.dtype] * (2 if op.flag("searched") else 1)
                return f"{CASTS}{read}"
            return eager
        if kernel.kind in ATTENDS:
            return kernel.mark or self.attention
        dtypes = [v.tensor.dtype for v in op.operands[:2]]
        dealt = any(d.routed or d.load for v in op.operands for d in v.tensor.dims)
        if len(op.results) == 1 and [DTYPE_BYTES[d] for d in dtypes] == [2, Fraction(1, 2)]:
            expands = TRITON if dealt and op.operands[-1].tensor.dtype == "u8" else EXPANDS
            return MARLIN if self.marlin or dtypes[1] == "i4" else expands
        blocks = self.expert_blocks if dealt else self.blocks
        multiplied = FOUR_BITS if blocks == CUTLASS else EIGHT_BITS
        if blocks != DEVICE and multiplied.issuperset(dtypes):
            return blocks
        marked = self.experts and (not self.fused or min(DTYPE_BYTES[d] for d in dtypes) == 1)
        return EXPERTS if marked and dealt else ""


def _is_of_host(op: Operation) -> bool:
    """Whether an op updates what the device has as a copy of values on the host."""
    makers = (v.producer for v in op.operands)
    return op.phase == "optimizer" and any(m is not None and m.has(CopiesMemory) for m in makers)


def _with_mask(kernel: KernelShape, window: Expr) -> KernelShape:
    """Attention over a window, as transformers calls `scaled_dot_product_attention`. Sequences at
    least as long as the window get a mask in memory (masking_utils.py, `_ignore_causal_mask_sdpa`),
    with which the kernel computes all pairs. This takes as long as 7/4 of the keys: with a causal
    mask in memory cuDNN takes 3.45 times as long as with its built-in causal mask (H200, PyTorch
    2.11)."""
    *before, queries, keys, qk, v = kernel.extents
    masked = call("min", [ONE, call("max", [ZERO, queries - window + ONE])])
    keys += masked * (call("ceildiv", [queries * 7, const(4)]) - keys)
    return replace(kernel, extents=(*before, queries, keys, qk, v), windowed=False)


def kernel_attributes(kernel: KernelShape | None) -> dict[str, RawAttr]:
    """The attributes that describe a kernel; empty for one without a shape, bound by memory."""
    if kernel is None:
        return {}
    extents = zip(EXTENTS[kernel.kind], kernel.extents, strict=True)
    names = ("causal", "windowed", "transposed")
    flags: dict[str, RawAttr] = {name: True for name in names if getattr(kernel, name)}
    return {"kernel": kernel.kind, **flags, "dtype": kernel.dtype, **dict(extents)}


def fused_attributes(ops: Sequence[Operation], form: str = "") -> dict[str, RawAttr]:
    """The attributes of an `et.comp` for several ops that run as one kernel of this form."""
    left = [r for op in ops for r in op.results if is_left(r, ops)]
    kinds = tuple(op.name.partition(".")[2] for op in ops)
    return {**attributes(ops[0].name, fused_work(ops), left, form), "fuses": kinds}


def fused_operations(region: Region) -> dict[Operation, list[Operation]]:
    """Maps each computation of a fused kernel to all computations of that kernel, in order.

    Raises `DiagnosticError` if another op runs between them, or makes an operand of a later one.
    """
    kernels: dict[int, list[Operation]] = {}
    last = 0
    for op in region.ops:
        number = op.integer("fused", 0)
        if number in kernels and number != last:
            raise _not_adjacent(op, kernels[number][0], "something else runs between them")
        if number:
            kernels.setdefault(number, []).append(op)
        last = last if op.has(Free) and op.region is None else number
    for kernel in kernels.values():
        _check_operands(region, kernel)
    return {op: kernel for kernel in kernels.values() for op in kernel}


def _check_operands(region: Region, kernel: Sequence[Operation]) -> None:
    """Check that all operands are made before the kernel or in it."""
    places = {op: i for i, op in enumerate(region.ops)}
    for op in kernel:
        for maker in (viewed(v).producer for v in op.operands):
            behind = maker is not None and places.get(maker, -1) > places[kernel[0]]
            if maker is not None and behind and maker not in kernel:
                raise _not_adjacent(op, kernel[0], f"takes what '{maker.name}' makes between them")


def _not_adjacent(op: Operation, first: Operation, but: str) -> Exception:
    return op.error(
        f"'{op.name}' is fused with '{first.name}' in one kernel, but {but}",
        remedy="leave out 'fused', or let 'fuse-kernels' choose the kernels",
    )
