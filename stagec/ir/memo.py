"""What is the same for all operations that are alike is found once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from stagec.ir.core import Operation
from stagec.ir.types import whole

Answer = TypeVar("Answer")


class MemoByType(Generic[Answer]):
    """A function of operations without a region that reads their definition, attributes and types
    and nothing else, as the costs of `OpDef` do, and what else it is given: called once for
    operations of one module that have the same, whatever chunks the operands are parts of."""

    def __init__(self, of: Callable[..., Answer]) -> None:
        self._of = of
        self._known: dict[Hashable, Answer] = {}

    def __call__(self, op: Operation, *given: Hashable) -> Answer:
        """What the function finds of an operation."""
        operands = tuple([whole(v.type) for v in op.operands])
        results = tuple([v.type for v in op.results])
        key = op.definition, operands, results, tuple(op.attrs.items()), given
        if key not in self._known:
            self._known[key] = self._of(op, *given)
        return self._known[key]
