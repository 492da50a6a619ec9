"""Values that cross from one pod of a job to another: both ends, and what each says of the other.

A pod is a module of its own, with its mesh and its strategy; the pass `hand-over` makes these ops,
of caches or of what crosses between parts of a model (`stg.cross`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stagec.ir.core import Operation
from stagec.ir.expr import Expr
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.traits import InPlace, Stays
from stagec.ir.types import TensorType, Type

#: Of values that are stacked over layers, in pods with pipeline stages or microbatches.
BY_LAYER = (
    Param("layers", "ints", "the number of the first layer here, by stage (default 0)"),
    Param("shares", "ints", "the first layers that each chunk of the other pod has (default 0)"),
    Param("turns", "int", "microbatches of the other pod in one of here (default 1)"),
    Param("splits", "int", "of caches, microbatches of here in one of the other pod"),
    Param("last", "flag", "sent behind the caches of its microbatch"),
)
_MESSAGES = (
    Param("first", "int", "the number of the first message among those of all values"),
    Param("ways", "int", "messages of each rank", required=True),
    Param("pieces", "int", "parts into which what a rank holds is cut", required=True),
    Param("stream", "int", "the number of its first layer among those that cross", required=True),
    Param("streams", "int", "the layers of all values that cross", required=True),
    *BY_LAYER,
    Param("rows", "size", "of dimension `dim`, the rows that cross (default: all)"),
    Param("dim", "int", "the dimension of which some rows cross"),
)


class PodOp(OpDef):
    """Base of both ends."""

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
    """The bytes of each message of a rank: a piece of the rows that cross of what it holds."""
    return crossing(op).local_bytes / op.integer("pieces")


def end_type(op: Operation) -> TensorType:
    """What is handed over from, or taken over to."""
    return (op.operands or op.results)[0].tensor


def crossing(op: Operation) -> TensorType:
    """What crosses of it."""
    type_ = end_type(op)
    if "rows" not in op.attrs:
        return type_
    dims = list(type_.dims)
    dim = op.integer("dim")
    dims[dim] = replace(dims[dim], size=op.expr("rows"))
    return replace(type_, dims=tuple(dims))


class HandOverOp(PodOp):
    """Sends a value to the ranks of another pod, which hold it in their own placement.

    Each rank cuts what it holds, or the last `rows` of it, into `pieces` and sends `ways` messages,
    of one piece each. It goes on at once. Layers that `shares` distinguish go to other ranks.
    """

    name = "stg.hand_over"
    operands = ("x",)
    results = ()
    params = (Param("to", "name", "the pod", required=True), *_MESSAGES)
    traits = (Stays(),)
    example = "stg.hand_over[to = decode, ways = 2, pieces = 2, stream = 0, streams = 2](%k)"


class TakeOver(PodOp):
    """Receives what another pod hands over, in `ways` messages: into the buffer of the operand, or
    without one into a buffer of the type that it says."""

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
        if not op.operands:
            return None
        text = letters(op.operands[0].tensor.rank)
        return make_rule(f"{text}->{text}")

    def infer(self, op: Operation) -> list[Type]:
        if op.operands:
            return super().infer(op)
        return [r.type for r in op.results if r.type is not None]

    def reuses(self, op: Operation, result: int) -> int | None:
        return 0 if op.operands else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        """The interpreter runs one pod, whose operand has what the other one would send."""
        return [args[0]]
