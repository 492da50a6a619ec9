"""Values that depend on trained parameters."""

from collections.abc import Iterable, Sequence

from stagec.ir.core import Operation, Region, Value
from stagec.ir.layers import stack_of
from stagec.ir.rewrite import carried


def trained_values(body: Region, trained: Iterable[Value]) -> set[Value]:
    """The values of a body that depend on the values `trained`, including these."""
    result = _Trained({*trained})
    result.ops(body.ops)
    return result.values


class _Trained:
    """Collects the values that depend on trained parameters."""

    def __init__(self, values: set[Value]) -> None:
        self.values = values

    def ops(self, ops: Sequence[Operation]) -> None:
        """Add dependent results of these operations. Layers of a stack run interleaved, so values
        that one kind passes on may enter any other kind, even one earlier in the text."""
        again = True
        while again:
            before, again = len(self.values), False
            for op in ops:
                if op.region is not None:
                    again |= "order" in op.attrs
                    self._region(op)
                elif any(v in self.values for v in op.operands):
                    self.values.update(op.results)
            again &= len(self.values) > before

    def _region(self, op: Operation) -> None:
        """Add dependent values of a region, including carried values that depend on trained ones
        only from the second iteration on."""
        body, count = op.body, carried(op)
        self._pass(op.operands, body.args)
        while True:
            self.ops(body.ops)
            before = len(self.values)
            self._pass(body.terminator.operands[:count], body.args)
            if len(self.values) == before:
                break
        self._pass(body.terminator.operands, op.results)
        self._pass(op.results[:count], stack_of(op).members[0].body.args)

    def _pass(self, given: Iterable[Value], taken: Iterable[Value]) -> None:
        self.values.update(t for g, t in zip(given, taken, strict=False) if g in self.values)
