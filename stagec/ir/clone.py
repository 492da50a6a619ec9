"""Copies of operations: with other operands, sizes and names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stagec.ir.core import Attr, Operation, Value, substitute_attr
from stagec.ir.expr import Expr
from stagec.ir.types import TensorType, Type
from stagec.support.source import Loc


@dataclass(frozen=True, slots=True)
class Copier:
    """Copies operations. `values` maps values to their copies, including results of copied
    operations; other values are used unchanged. `sizes` replace symbols; `named` and `placed` map
    names and locations."""

    values: dict[Value, Value]
    sizes: Mapping[str, Expr]
    named: Callable[[str], str]
    placed: Callable[[Loc], Loc]

    def copy(self, op: Operation) -> Operation:
        """A copy of an operation, in no region yet."""
        attrs: dict[str, Attr] = {k: substitute_attr(v, self.sizes) for k, v in op.attrs.items()}
        operands = [self.values.get(v, v) for v in op.operands]
        new = Operation(op.definition, operands, attrs, symbol=op.symbol, loc=self.placed(op.loc))
        if op.region is not None:
            inner = new.make_region()
            for arg in op.region.args:
                type_ = sized(arg.type, self.sizes)
                self.values[arg] = inner.add_arg(self.named(arg.name), type_, arg.loc)
            for child in op.region.ops:
                for each in self.copies(child):
                    inner.append(each)
        for result in op.results:
            type_ = sized(result.type, self.sizes)
            self.values[result] = new.add_result(self.named(result.name), type_, result.loc)
        return new

    def copies(self, op: Operation) -> list[Operation]:
        """The copies of an operation in a copied region."""
        return [self.copy(op)]


def sized(type_: Type | None, sizes: Mapping[str, Expr]) -> Type | None:
    """A type with replaced symbols."""
    return type_.substitute(sizes) if isinstance(type_, TensorType) else type_
