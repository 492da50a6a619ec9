"""Limits that make hostile input end with an error message instead of excessive work."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from stagec.support.diagnostics import error
from stagec.support.source import UNKNOWN, Loc

T = TypeVar("T")

#: Longest text, in bytes; dumps of the largest models are an order of magnitude smaller.
MAX_BYTES = 1 << 20
#: Longest model configuration, in bytes; that of a quantized model may list each module.
MAX_CONFIGURATION = 1 << 24
#: Deepest nesting of brackets.
MAX_DEPTH = 128
#: Most operations in a text.
MAX_OPERATIONS = 20_000
#: Most terms of an expression when multiplied out.
MAX_TERMS = 1000
#: Most operators in one parameter or size.
MAX_OPERATORS = 20_000
#: Largest coefficient in an expression.
MAX_COEFFICIENT = 1 << 64
#: Most steps of a memory plan: executions of operations plus uses of buffers. Published models have
#: thousands; a model of a thousand layers that all run by themselves has 300,000.
MAX_PLAN_STEPS = 2_000_000
#: Most results of an operation whose number is a parameter.
MAX_RESULTS = 10_000
#: Most ranks of a mesh; no cluster has more.
MAX_RANKS = 1 << 22
#: Most iterations of the repeats of a program, and carried values.
MAX_ITERATIONS = 20_000_000
#: Most layers of a stack with several kinds of layers.
MAX_LAYERS = 16_384
#: Most actions of a pipeline schedule, over all ranks. The largest published jobs have 100,000.
MAX_ACTIONS = 1_000_000


class Budget:
    """A limit of work, which is counted, not timed, so that it is equal on all machines."""

    def __init__(self, most: int, what: str, remedy: str) -> None:
        self._most, self._left, self._what, self._remedy = most, most, what, remedy

    def spend(self, amount: int = 1, loc: Loc = UNKNOWN) -> None:
        """Count work. Raises `DiagnosticError` if the limit is exceeded."""
        self._left -= amount
        if self._left < 0:
            message = f"{self._what} takes more than {self._most:,} steps"
            raise error(message, loc, remedy=self._remedy)

    def counted(self, items: Iterable[T]) -> Iterator[T]:
        """The items; each counts as one step."""
        for item in items:
            self.spend()
            yield item
