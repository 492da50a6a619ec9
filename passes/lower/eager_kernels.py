"""Marks of computations for which PyTorch has kernels of its own (`stg.kernels[elementwise =
torch]`). `stagec/time/costs/eager.py` defines the cost of each mark."""

from collections.abc import Callable, Mapping

from stagec.api import OpDef, Operation, is_parameter
from stagec.ir.types import DTYPE_BYTES
from stagec.ir_spec.ops.activation import ActivationGrad, Silu
from stagec.ir_spec.ops.contraction import Add, Cast, Einsum, Mul, Sum
from stagec.ir_spec.ops.loss_forms import LogSoftmax, LogSoftmaxGrad
from stagec.ir_spec.ops.moe import Combine, CombineWeightsGrad, Dispatch
from stagec.ir_spec.ops.norm import LayerNorm, LayerNormGrad, RmsNorm, RmsNormGrad
from stagec.ir_spec.ops.optimizer import AdamW, SquaredNorm
from stagec.ir_spec.ops.ring import MergeAttention
from stagec.ir_spec.ops.rope import RotaryEmbedding
from stagec.ir_spec.ops.softmax import Softmax, SoftmaxGrad
from stagec.sharding.work import is_computation, viewed, work_of


def eager_mark(op: Operation) -> str:
    """The mark of an op that is not a matrix product. It is empty if one kernel of PyTorch touches
    the bytes of the op at the bandwidth of the memory."""
    definition = op.definition
    kind = ActivationGrad if isinstance(definition, ActivationGrad) else type(definition)
    rule = _MARKS.get(kind, "")
    what = rule if isinstance(rule, str) else rule(op)
    return f"eager_{what}_{op.operands[0].tensor.dtype}" if what else ""


def _cast(op: Operation) -> str:
    widens = DTYPE_BYTES[op.result.tensor.dtype] > DTYPE_BYTES[op.operands[0].tensor.dtype]
    return "cast" if widens else ""


def _einsum(op: Operation) -> str:
    """The mark of an einsum that is not a matrix product: with a vector, or its gradient."""
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


def _where_routed(mark: str) -> Callable[[Operation], str]:
    """A function that gives this mark to ops on routed rows, which are parts of packed products."""

    def rule(op: Operation) -> str:
        return mark if any(d.routed or d.load for d in op.operands[0].tensor.dims) else ""

    return rule


def _activation_grad(op: Operation) -> str:
    of = op.definition.of if isinstance(op.definition, ActivationGrad) else None
    return _where_routed("routed_silu_grad")(op) if isinstance(of, Silu) else ""


def _in_steps(mark: str) -> Callable[[Operation], str]:
    return lambda op: mark if op.flag("steps") else ""


def _rope(op: Operation) -> str:
    return "complex_rope" if op.flag("complex") else _either("rope", "rope_grad")(op)


def _either(forward: str, backward: str) -> Callable[[Operation], str]:
    return lambda op: forward if op.phase in ("forward", "recompute") else backward


#: By the class of an op: its mark, or a function from the op to its mark.
_MARKS: Mapping[type[OpDef], str | Callable[[Operation], str]] = {
    Cast: _cast,
    Einsum: _einsum,
    Add: _add,
    Mul: _where_routed("strided"),
    Silu: _where_routed("routed_silu"),
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
