"""Which values some values have a part in, through repeats and accumulations.

Of

    %y = stg.repeat[count = L] (%h = %x, %w = %W) { ... stg.yield(%r) }
    %z = stg.add(%y, %u)

`%W` reaches `%w`, what the layers compute with it, `%y`, `%z`; and `%h` from the second iteration
on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stagec.ir.core import Operation, Region, Value
from stagec.ir.rewrite import carried


def reached(
    body: Region, values: Iterable[Value], stops: Callable[[Operation], bool] | None = None
) -> set[Value]:
    """The values of a function that these ones have a part in, with themselves. What an operation
    computes that `stops` is not reached through it."""
    found = _Reached(set(values), stops or (lambda _: False))
    found.ops(body.ops)
    return found.values


class _Reached:
    def __init__(self, values: set[Value], stops: Callable[[Operation], bool]) -> None:
        self.values, self._stops = values, stops

    def ops(self, ops: Iterable[Operation]) -> None:
        """Add the results of these operations."""
        for op in ops:
            if op.region is not None:
                self._region(op)
            elif any(v in self.values for v in op.operands) and not self._stops(op):
                self.values.update(op.results)

    def _region(self, op: Operation) -> None:
        """Add what a region binds and yields; what it carries may be reached from the second
        iteration on."""
        body, count = op.body, carried(op)
        self._pass(op.operands, body.args)
        while True:
            self.ops(body.ops)
            before = len(self.values)
            self._pass(body.terminator.operands[:count], body.args)
            if len(self.values) == before:
                break
        self._pass(body.terminator.operands, op.results)

    def _pass(self, given: Iterable[Value], taken: Iterable[Value]) -> None:
        self.values.update(t for g, t in zip(given, taken, strict=False) if g in self.values)
