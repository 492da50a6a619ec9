"""Values that cross between the parts of a model, each of which has a mesh and a strategy of its
own."""

from collections.abc import Mapping, Sequence

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ZERO, Expr
from stagec.ir.opdef import Grads, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters
from stagec.ir.traits import BeginsBackward, Stays
from stagec.ir.types import TensorType

_ENDS = (
    Param("value", "name", "its name, the same at both ends", required=True, positional=True),
    Param("source", "name", "the part that sends it", required=True),
    Param("to", "name", "the part that receives it", required=True),
    Param("trained", "flag", "it depends on a trained parameter: its gradient goes back"),
    Param("vocabulary", "size", "of tokens: the size of their vocabulary, equal at both ends"),
)


class Depart(OpDef):
    """Sends a value to another part of the model. If the value is `trained`, a backward pass starts
    here too, from the gradient that the other part returns."""

    name = "stg.depart"
    operands = ("x",)
    results = ()
    params = _ENDS
    traits = (Stays(), BeginsBackward())
    example = "stg.depart[e, source = encoder, to = main](%x)"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        if not op.flag("trained"):
            return [None]
        x = op.operands[0]
        return [arrive(b, x.tensor.inner, _back(op), x.prefixed("d_"))]


class Arrive(OpDef):
    """Receives a value from another part of the model. If the value is `trained`, its gradient goes
    back."""

    name = "stg.arrive"
    params = (
        *_ENDS,
        Param("sizes", "sizes", "its shape (default: a scalar)"),
        Param("dtype", "name", "its element type", required=True),
    )
    example = (
        "%e = stg.arrive[e, source = encoder, to = main, sizes = (B, S, D), dtype = bf16]"
        " : bf16[B, S, D]"
    )

    def rule(self, op: Operation) -> Rule:
        sizes = op.exprs("sizes")
        factors = letters(len(sizes))
        return Rule(
            (), (tuple((f,) for f in factors),), sizes=dict(zip(factors, sizes, strict=True))
        )

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.text("dtype")]

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        (dy,) = grads
        if dy is not None and op.flag("trained"):
            depart(b, dy, op.result.tensor.inner, _back(op))
        return []

    def bytes_touched(self, op: Operation) -> Expr:
        return ZERO


def depart(b: Builder, value: Value, type_: TensorType, attrs: Mapping[str, RawAttr]) -> None:
    """Build an `stg.depart` of a value, placed as `type_` if that type has a placement."""
    if type_.placed:
        value = b.value("stg.sharding_constraint", [value], type=type_, hint=value.name)
    b.op("stg.depart", [value], attrs, types=())


def arrive(b: Builder, type_: TensorType, attrs: Mapping[str, RawAttr], hint: str) -> Value:
    """Build an `stg.arrive` whose result has this type."""
    shape: dict[str, RawAttr] = {"dtype": type_.dtype}
    shape |= {"sizes": type_.shape} if type_.rank else {}
    return b.value("stg.arrive", (), {**attrs, **shape}, type=type_, hint=hint)


def _back(op: Operation) -> dict[str, RawAttr]:
    """The parameters of the op that carries the gradient: the two ends change places."""
    value = op.text("value")
    return {"value": f"d_{value}", "source": op.text("to"), "to": op.text("source")}
