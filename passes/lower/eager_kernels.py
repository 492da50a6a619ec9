"""Marks of computations that PyTorch runs by kernels of its own (`stg.kernels[elementwise =
torch]`); `stagec/time/costs/eager.py` has what each mark stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stagec.api import Operation, is_parameter
from stagec.ir.types import DTYPE_BYTES
from stagec.ir_spec.ops.activation import Silu
from stagec.ir_spec.ops.contraction import Add, Cast, Einsum, Mul, Sum
from stagec.ir_spec.ops.loss_forms import LogSoftmax, LogSoftmaxGrad
from stagec.ir_spec.ops.moe import Combine, CombineWeightsGrad, Dispatch
from stagec.ir_spec.ops.norm import LayerNorm, LayerNormGrad, RmsNorm, RmsNormGrad
from stagec.ir_spec.ops.optimizer import AdamW, SquaredNorm
from stagec.ir_spec.ops.rope import RotaryEmbedding
from stagec.ir_spec.ops.softmax import Softmax, SoftmaxGrad
from stagec.sharding.work import is_computation, viewed, work_of


def eager_mark(op: Operation) -> str:
    """The mark of an op that is no product of matrices, empty if one kernel of PyTorch touches what
    the op touches at the speed of the memory."""
    rule = MARKS.get(op.name)
    what = "" if rule is None else rule(op)
    return f"eager_{what}_{op.operands[0].tensor.dtype}" if what else ""


def _cast(op: Operation) -> str:
    widens = DTYPE_BYTES[op.result.tensor.dtype] > DTYPE_BYTES[op.operands[0].tensor.dtype]
    return "cast" if widens else ""


def _einsum(op: Operation) -> str:
    """A product that is no matrix product: with a vector, or the gradient of one."""
    ranks = [v.tensor.rank for v in op.operands]
    if len(ranks) != 2:
        return ""
    if op.result.tensor.rank < max(ranks):
        return "rows"
    return "broadcast" if min(ranks) < max(ranks) else ""


def _add(op: Operation) -> str:
    ranks = [v.tensor.rank for v in op.operands]
    if not 0 < min(ranks) < max(ranks):
        return ""
    made = viewed(op.operands[0]).producer
    follows = made is not None and is_computation(made) and work_of(made).kernel is not None
    return "bias" if follows and is_parameter(op.operands[1]) else "broadcast"


def _in_backward(op: Operation) -> bool:
    return op.phase not in ("forward", "recompute")


def _silu(op: Operation) -> str:
    return "routed_silu" if _is_routed(op) else ""


def _mul(op: Operation) -> str:
    return "strided_pair" if _is_routed(op) else ""


def _is_routed(op: Operation) -> bool:
    return any(d.routed or d.load for d in op.operands[0].tensor.dims)


def _either(forward: str, backward: str) -> Callable[[Operation], str]:
    return lambda op: backward if _in_backward(op) else forward


MARKS: Mapping[str, Callable[[Operation], str]] = {
    Cast.name: _cast,
    Einsum.name: _einsum,
    Add.name: _add,
    Mul.name: _mul,
    Silu.name: _silu,
    f"{Silu.name}_grad": lambda op: "routed_silu_grad" if _is_routed(op) else "",
    RmsNorm.name: lambda op: "rmsnorm" if op.flag("steps") else "",
    RmsNormGrad.name: lambda op: "rmsnorm_grad" if op.flag("steps") else "",
    RotaryEmbedding.name: _either("rope", "rope_grad"),
    LogSoftmax.name: lambda op: "log_softmax",
    LogSoftmaxGrad.name: lambda op: "log_softmax_grad",
    LayerNorm.name: lambda op: "layernorm",
    LayerNormGrad.name: lambda op: "layernorm_grad",
    Sum.name: lambda op: "sum",
    Softmax.name: lambda op: "softmax",
    SoftmaxGrad.name: lambda op: "softmax_grad",
    AdamW.name: lambda op: "adamw",
    SquaredNorm.name: lambda op: "squared_norm",
    Dispatch.name: _either("dispatch", "dispatch_grad"),
    Combine.name: _either("combine", "combine_grad"),
    CombineWeightsGrad.name: lambda op: "combine_weights_grad",
}
