"""A cache of functions of operations, shared by equal operations."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from stagec.ir.core import Operation
from stagec.ir.types import whole

Answer = TypeVar("Answer")


class MemoByType(Generic[Answer]):
    """Caches a function of operations without a region, and of further arguments. The function may
    read only definition, attributes and types, like the costs of `OpDef`, and what these state that
    they read (`OpDef.costs_read`). It is called once for operations of one module in which all of
    this is equal, apart from the chunks of operands."""

    def __init__(self, of: Callable[..., Answer]) -> None:
        self._of = of
        self._known: dict[Hashable, Answer] = {}

    def __call__(self, op: Operation, *given: Hashable) -> Answer:
        """The result of the function for an operation and further arguments."""
        operands = tuple([whole(v.type) for v in op.operands])
        results = tuple([v.type for v in op.results])
        read = op.definition.costs_read(op)
        key = op.definition, operands, results, tuple(op.attrs.items()), read, given
        if key not in self._known:
            self._known[key] = self._of(op, *given)
        return self._known[key]
