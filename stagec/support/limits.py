"""How much is taken: bounds that keep hostile input from costing more than a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from stagec.support.diagnostics import error
from stagec.support.source import UNKNOWN, Loc

T = TypeVar("T")

#: Longest text, in bytes; dumps of the largest models are an order below.
MAX_BYTES = 1 << 20
#: The longest configuration of a model, which may list each module of a quantized one.
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
#: Most steps of a memory plan: operations as often as they run, and buffers as often as they are
#: used. Published models have thousands; all layers of a model of a thousand layers, 300,000.
MAX_PLAN_STEPS = 2_000_000
#: Most results of an operation that a number asks for.
MAX_RESULTS = 10_000
#: Most ranks of a mesh: more are a mistake, no cluster has them.
MAX_RANKS = 1 << 22
#: Most iterations of the repeats of a program, and carried values.
MAX_ITERATIONS = 20_000_000
#: Most layers of a stack that has layers of several kinds.
MAX_LAYERS = 16_384
#: Most actions of a pipeline schedule, over all ranks. The largest published jobs have 100,000.
MAX_ACTIONS = 1_000_000


class Budget:
    """Work that may be done, counted and not timed: an input ends the same way on every machine."""

    def __init__(self, most: int, what: str, remedy: str) -> None:
        self._most, self._left, self._what, self._remedy = most, most, what, remedy

    def spend(self, amount: int = 1, loc: Loc = UNKNOWN) -> None:
        """Do a part of the work. Raises `DiagnosticError` when there is too much of it."""
        self._left -= amount
        if self._left < 0:
            message = f"{self._what} takes more than {self._most:,} steps"
            raise error(message, loc, remedy=self._remedy)

    def counted(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each of them a step."""
        for item in items:
            self.spend()
            yield item
