"""Operands that an op gathers itself: they are split over more axes than its computation.

An op with the rule `bsd,df->bsf` and `s` gathered takes [B, S@tp, D] and gives [B, S, F@tp]. It
computes on all of S, of which a rank has 1/tp: it gathers dimension 1 of operand 0 over tp.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stagec.ir.core import Operation
from stagec.ir.expr import Expr
from stagec.ir.rule import Rule
from stagec.ir.types import TensorType, axis_size


@dataclass(frozen=True, slots=True)
class OwnGather:
    """Operand number `operand` is gathered along dimension `dim` over the axes `over`."""

    operand: int
    dim: int
    over: tuple[str, ...]

    def whole(self, op: Operation) -> Expr:
        """The bytes of the gathered operand on one rank."""
        return op.operands[self.operand].tensor.local_bytes * axis_size(self.over)


def own_gathers(op: Operation, rule: Rule) -> list[OwnGather]:
    """The gathers that an op with placed operands and results does itself."""
    gathers: list[OwnGather] = []
    for factor in sorted(rule.gathered):
        works_on = split_in_results(op, rule, factor)
        for i, d in rule.occurrences(factor):
            own = op.operands[i].tensor.dims[d].axes
            if own[: len(works_on)] == works_on and len(own) > len(works_on):
                gathers.append(OwnGather(i, d, own[len(works_on) :]))
    return gathers


def names_of_nodes(op: Operation, gathers: Sequence[OwnGather]) -> list[str]:
    """The names of the nodes of such an op: its gathers, all steps but the last, and the last
    one."""
    name = op.results[0].name
    return [*(f"{op.operands[g.operand].name}_g" for g in gathers), f"{name}_first", name]


def split_in_results(op: Operation, rule: Rule, factor: str) -> tuple[str, ...]:
    """The axes that split a gathered factor in the first result that has it."""
    for value, shape in zip(op.results, rule.results, strict=False):
        if (factor,) in shape and isinstance(value.type, TensorType):
            return value.type.dims[shape.index((factor,))].axes
    return ()
