"""What a compile decides by the values of symbols: questions about values, and their answers.

Sizes are symbols through the whole compile, but what a pass makes may depend on values: whether a
dimension divides, which of two moves is cheaper, how many stages there are. A watched module notes
each such question with its answer. What was compiled for some values is then what would be compiled
for all others that give the same answers:

    facts.divides(tp, H)        noted: Divides(tp, H) -> True         holds for tp = 2, 4, 8
    module.env["pp"]            noted: ValueOf(pp) -> 4               holds for pp = 4 alone

Who reads a value without a question of its own notes the value itself, so nothing goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from stagec.ir.expr import Env, Expr, UnboundError, evaluate
from stagec.support.diagnostics import NotAnIntegerError

T_co = TypeVar("T_co", covariant=True)
Value = TypeVar("Value")


class Decision(Protocol[T_co]):
    """A hashable question about values; calling it gives the answer."""

    def __call__(self, values: Mapping[str, int], /) -> T_co:
        """The answer for these values."""
        ...


@dataclass(frozen=True, slots=True)
class ValueOf:
    """What is the value of a symbol?"""

    name: str

    def __call__(self, values: Mapping[str, int]) -> int | None:
        return values.get(self.name)


@dataclass(frozen=True, slots=True)
class Divides:
    """Does a divisor divide a size? None divides the rows of experts where these are an average
    that is no whole number."""

    divisor: Expr
    size: Expr

    def __call__(self, values: Env) -> bool:
        try:
            return evaluate(self.size, values) % evaluate(self.divisor, values) == 0
        except NotAnIntegerError:
            return False


@dataclass(frozen=True, slots=True)
class NumberOf:
    """What is the number of an expression?"""

    expr: Expr

    def __call__(self, values: Env) -> int:
        return evaluate(self.expr, values)


@dataclass(frozen=True, slots=True)
class IsPositive:
    """Is an expression more than zero?"""

    expr: Expr

    def __call__(self, values: Env) -> bool:
        return evaluate(self.expr, values) > 0


@dataclass(frozen=True, slots=True)
class UnitAxes:
    """Which of these axes have one rank?"""

    axes: tuple[str, ...]

    def __call__(self, values: Mapping[str, Any]) -> frozenset[str]:
        return frozenset(a for a in self.axes if values.get(a) == 1)


Answers = dict[Decision[object], object]


@dataclass
class Queries:
    """The questions that a compile asked, and what was answered. Where a pass gives symbols other
    values, the answers of before are about the old ones, those behind about the new ones."""

    answers: Answers = field(default_factory=Answers)
    _changes: list[tuple[Answers, Mapping[str, int]]] = field(
        default_factory=list[tuple[Answers, Mapping[str, int]]]
    )
    #: What was found for values, with the number of answers then: a job is asked for again and
    #: again, by its step, its figures and the jobs that are like it.
    _same: dict[tuple[tuple[str, int], ...], tuple[int, bool]] = field(
        default_factory=dict[tuple[tuple[str, int], ...], tuple[int, bool]]
    )

    def change(self, values: Mapping[str, int]) -> None:
        """From here on symbols have these values; they follow from what was asked before."""
        self._changes.append((self.answers, values))
        self.answers = {}

    def settled(self, values: Mapping[str, int]) -> Mapping[str, int]:
        """Values of all symbols behind the passes, of those with which all answers are the same."""
        return {**values, **{n: v for _, changed in self._changes for n, v in changed.items()}}

    def same(self, values: Mapping[str, int]) -> bool:
        """Whether all answers are the same for these values."""
        key, count = tuple(values.items()), len(self.answers)
        if key not in self._same or self._same[key][0] != count:
            self._same[key] = count, self._is_same(values)
        return self._same[key][1]

    def _is_same(self, values: Mapping[str, int]) -> bool:
        now = dict(values)
        try:
            for answers, changed in (*self._changes, (self.answers, dict[str, int]())):
                if any(question(now) != a for question, a in answers.items()):
                    return False
                now |= changed
        except (UnboundError, ArithmeticError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class Where:
    """A question for some coordinates, which are no values of the job."""

    question: Decision[object]
    coordinates: tuple[tuple[str, int], ...]

    def __call__(self, values: Mapping[str, int]) -> object:
        return self.question({**values, **dict(self.coordinates)})


class TrackedValues(Mapping[str, Value]):
    """Values of symbols that note their readers; among them may be `coordinates`."""

    def __init__(
        self,
        values: Mapping[str, Value],
        decisions: Queries,
        coordinates: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.values_, self.decisions = values, decisions
        self._coordinates = tuple(coordinates.items())

    def note(self, question: Decision[object], answer: object) -> None:
        """Keep the answer to a question."""
        at = self._coordinates
        self.decisions.answers[Where(question, at) if at else question] = answer

    def __getitem__(self, name: str) -> Value:
        value = self.values_[name]
        self.note(ValueOf(name), value)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.values_  # which values are known is the same for all

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def ask(question: Callable[[Mapping[str, Any]], T_co], values: Mapping[str, Any]) -> T_co:
    """The answer to a question, noted if the values are watched."""
    if not isinstance(values, TrackedValues):
        return question(values)
    answer = question(plain(values))
    values.note(question, answer)
    return answer


def note(question: Decision[object], answer: object, values: Mapping[str, Any]) -> None:
    """Keep the answer to a question, if the values are watched."""
    if isinstance(values, TrackedValues):
        values.note(question, answer)


def plain(values: Mapping[str, Value]) -> Mapping[str, Value]:
    """The values, for who asks the questions itself."""
    return values.values_ if isinstance(values, TrackedValues) else values
