"""Values that cross from one pod of a job to another: the op that sends and the op that receives.

A pod is a module with its own mesh and strategy. The pass `hand-over` creates these ops, for caches
and for values that cross between parts of a model (`stg.depart` and `stg.arrive`). Each op also
states what it needs to know of the other end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stagec.ir.core import Operation
from stagec.ir.expr import Expr
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule
from stagec.ir.traits import InPlace, Stays
from stagec.ir.types import TensorType, Type
from stagec.ir_spec.ops.base import pointwise

#: Parameters of values that are stacked over layers, in pods with pipeline stages or microbatches.
BY_LAYER = (
    Param("layers", "ints", "the first layer of each stage of this pod (default 0)"),
    Param("shares", "ints", "the first layer of each chunk of the other pod (default 0)"),
    Param("turns", "int", "microbatches of the other pod in one of this pod (default 1)"),
    Param("splits", "int", "of caches, microbatches of this pod in one of the other pod"),
    Param("last", "flag", "sent after the caches of its microbatch"),
)
_MESSAGES = (
    Param("first", "int", "the index of its first message among those of all values"),
    Param("ways", "int", "messages of each rank", required=True),
    Param("pieces", "int", "the pieces into which each rank cuts its part", required=True),
    Param("stream", "int", "the index of its first layer among those that cross", required=True),
    Param("streams", "int", "the number of layers that cross, of all values", required=True),
    *BY_LAYER,
    Param("rows", "size", "how many elements of dimension `dim` cross (default: all)"),
    Param("dim", "int", "the dimension that `rows` is about"),
)


class PodOp(OpDef):
    """Base of the op that sends and the op that receives."""

    def verify(self, op: Operation) -> Iterator[str]:
        for name in ("ways", "pieces", "streams", "turns", "splits"):
            if op.integer(name, 1) < 1:
                yield f"'{name}' expects a positive integer, found {op.integer(name)}"
        if op.integer("ways") % max(1, op.integer("turns", 1)):
            yield f"expects 'ways' to be a multiple of 'turns', found {op.integer('ways')}"
        type_, dim = end_type(op), op.integer("dim", 0)
        if ("rows" in op.attrs) != ("dim" in op.attrs) or not 0 <= dim < max(1, type_.rank):
            yield f"expects 'rows' and 'dim' together, and 'dim' to be a dimension of {type_}"


def message_bytes(op: Operation) -> Expr:
    """The bytes of one message of a rank: one of `pieces` of its part of the rows that cross."""
    return crossing(op).local_bytes / op.integer("pieces")


def end_type(op: Operation) -> TensorType:
    """The type of the value at this end: of the operand, or of the result without an operand."""
    return (op.operands or op.results)[0].tensor


def crossing(op: Operation) -> TensorType:
    """The type of what crosses: that of the value, with `rows` elements in dimension `dim`."""
    type_ = end_type(op)
    if "rows" not in op.attrs:
        return type_
    dim = op.integer("dim")
    return type_.with_dim(dim, replace(type_.dims[dim], size=op.expr("rows")))


class HandOverOp(PodOp):
    """Sends a value to the ranks of another pod, which hold it in their own placement.

    Each rank cuts its part, or the last `rows` of it, into `pieces` and sends `ways` messages of
    one piece each. It does not wait for them. Layers of different chunks of the other pod
    (`shares`) go to different ranks.
    """

    name = "stg.hand_over"
    operands = ("x",)
    results = ()
    params = (Param("to", "name", "the pod", required=True), *_MESSAGES)
    traits = (Stays(),)
    example = "stg.hand_over[to = decode, ways = 2, pieces = 2, stream = 0, streams = 2](%k)"


class TakeOver(PodOp):
    """Receives what another pod hands over, in `ways` messages, into the buffer of the operand.
    Without an operand it allocates a buffer, whose type the text states."""

    name = "stg.take_over"
    operands = ("x*",)
    params = (Param("source", "name", "the pod", required=True), *_MESSAGES)
    traits = (Stays(), InPlace(operands=(0,)))
    example = (
        "%keys = stg.take_over[source = prefill, ways = 2, pieces = 2, stream = 0, streams = 2](%k)"
        " : bf16[B, S, G, K]"
    )

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if len(op.operands) > 1:
            yield f"expects one buffer, or none, found {len(op.operands)}"

    def rule(self, op: Operation) -> Rule | None:
        return pointwise(op) if op.operands else None

    def infer(self, op: Operation) -> list[Type]:
        if op.operands:
            return super().infer(op)
        return [r.type for r in op.results if r.type is not None]

    def reuses(self, op: Operation, result: int) -> int | None:
        return 0 if op.operands else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        """The operand, which stands for the value from the other pod: the interpreter runs one."""
        return [args[0]]
