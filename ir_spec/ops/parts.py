"""Parts of a model with a mesh and a strategy of their own: the statement that names one, and what
crosses from one to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ZERO, Expr
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters
from stagec.ir.traits import Stays, View
from stagec.ir.types import Type
from stagec.ir_spec.ops.base import pointwise
from stagec.ir_spec.ops.statement import Flag, Record, Request, Statement, parameter

#: The part that has what no statement names.
MAIN = "main"


@dataclass(frozen=True)
class PartRule(Record):
    """A part of the model with a mesh and a strategy of its own: what a value is computed of."""

    name: str = parameter("name", "what the part is called", required=True, positional=True)
    of: tuple[str, ...] = parameter("values", "the value that the part computes", required=True)


class PartOp(Statement):
    """A part of the model is what a value is computed of. What no part has is the part `main`.

    A job has a pod for each part, with a mesh and a strategy of its own. In a module that is not
    cut, on one mesh, the statement changes nothing.
    """

    name, record, repeats = "stg.part", PartRule, True
    flags = (
        Flag(
            "part",
            "A part of the model with a mesh and a strategy of its own, by the value that it "
            "computes: 'encoder=e: tp=2,dp=2'. May be given several times.",
            "parts",
            (),
            metavar="NAME=VALUE:FLAGS",
        ),
    )
    training = "a step of serving has other pods: --serve disaggregated"
    example = "stg.part[encoder, of = e]"

    def from_flags(self, request: Request) -> Iterator[Mapping[str, Any]]:
        for part in request["part"]:
            yield {"name": part.name, "of": part.value}


_VALUE = Param("value", "values", "what it is called at both ends", required=True, positional=True)
_SOURCE = Param("source", "name", "the part that it comes from", required=True)
_TO = Param("to", "name", "the part that it goes to", required=True)


class Cross(OpDef):
    """A value goes from one part of the model to another; its gradient comes back.

    On one mesh it is the value itself. `cut-part` leaves each pod its end.
    """

    name = "stg.cross"
    operands = ("x",)
    params = (_VALUE, _SOURCE, _TO)
    traits = (View(),)
    example = "%y = stg.cross[e, source = encoder, to = main](%x) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        return pointwise(op, linear=True)

    def bytes_touched(self, op: Operation) -> Expr:
        return ZERO

    def grad(
        self, b: Builder, op: Operation, grads: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        (dy,) = grads
        if dy is None:
            return [None]
        (value,) = op.names("value")
        path, slash, last = value.rpartition("/")
        name = f"{path}{slash}d_{last}"
        back = {"value": name, "source": op.text("to"), "to": op.text("source")}
        return [b.value("stg.cross", [dy], back, hint=op.operands[0].prefixed("d_"))]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0]]


class Depart(OpDef):
    """A value leaves for another part: the end of a crossing in the pod that has it."""

    name = "stg.depart"
    operands = ("x",)
    results = ()
    params = (_VALUE, _SOURCE, _TO)
    traits = (Stays(),)
    example = "stg.depart[e, source = encoder, to = main](%x)"


class Arrive(OpDef):
    """A value comes from another part: the end of a crossing in the pod that gets it. The type
    says what it is."""

    name = "stg.arrive"
    params = (_VALUE, _SOURCE, _TO)
    example = "%e = stg.arrive[e, source = encoder, to = main] : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule | None:
        if not op.results or op.result.type is None:
            return None
        factors = letters(op.result.tensor.rank)
        sizes = dict(zip(factors, op.result.tensor.shape, strict=True))
        return Rule((), (tuple((f,) for f in factors),), sizes=sizes)

    def infer(self, op: Operation) -> list[Type]:
        return [r.type for r in op.results if r.type is not None]

    def bytes_touched(self, op: Operation) -> Expr:
        return ZERO


OPS = (PartOp(), Cross(), Depart(), Arrive())
