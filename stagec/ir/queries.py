"""Decisions of a compile that depend on the values of symbols: queries and their answers.

Sizes stay symbolic through the whole compile, but the result of a pass may depend on values:
whether a dimension divides, which of two moves is cheaper, the number of stages. A module with
`decisions` notes each such query with its answer. The compiled program is then valid for all values
with the same answers:

    facts.divides(tp, H)        noted: Divides(tp, H) -> True         holds for tp = 2, 4, 8
    module.env["pp"]            noted: ValueOf(pp) -> 4               holds for pp = 4 alone

Reading a value directly notes the value itself, so every dependency is noted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from stagec.ir.expr import Env, Expr, UnboundError, evaluate
from stagec.support.diagnostics import NotAnIntegerError

T_co = TypeVar("T_co", covariant=True)
Value = TypeVar("Value")


class Decision(Protocol[T_co]):
    """A hashable query about values; calling it gives the answer."""

    def __call__(self, values: Mapping[str, int], /) -> T_co:
        """The answer for these values."""
        ...


@dataclass(frozen=True, slots=True)
class ValueOf:
    """Query: the value of a symbol, or None."""

    name: str

    def __call__(self, values: Mapping[str, int]) -> int | None:
        return values.get(self.name)


@dataclass(frozen=True, slots=True)
class Divides:
    """Query: whether a divisor divides a size. False if the size is not an integer, such as an
    average number of rows of experts."""

    divisor: Expr
    size: Expr

    def __call__(self, values: Env) -> bool:
        try:
            return evaluate(self.size, values) % evaluate(self.divisor, values) == 0
        except NotAnIntegerError:
            return False


@dataclass(frozen=True, slots=True)
class IsWhole:
    """Query: whether an expression is a whole number."""

    expr: Expr

    def __call__(self, values: Env) -> bool:
        try:
            evaluate(self.expr, values)
        except NotAnIntegerError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class NumberOf:
    """Query: the number of an expression."""

    expr: Expr

    def __call__(self, values: Env) -> int:
        return evaluate(self.expr, values)


@dataclass(frozen=True, slots=True)
class IsPositive:
    """Query: whether an expression is greater than zero."""

    expr: Expr

    def __call__(self, values: Env) -> bool:
        return evaluate(self.expr, values) > 0


@dataclass(frozen=True, slots=True)
class UnitAxes:
    """Query: which of these axes have one rank."""

    axes: tuple[str, ...]

    def __call__(self, values: Mapping[str, Any]) -> frozenset[str]:
        return frozenset(a for a in self.axes if values.get(a) == 1)


Answers = dict[Decision[object], object]


class _Noting(Mapping[str, int]):
    """Values that note the names that are read."""

    def __init__(self, values: Mapping[str, int]) -> None:
        self._values, self.read = values, set[str]()

    def __getitem__(self, name: str) -> int:
        self.read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Match(NamedTuple):
    """The values of a match: the number of answers, and each query with its answer, the
    values that passes had set, and the names of the initial values that it read."""

    answered: int
    values: Mapping[str, int]
    queries: Sequence[tuple[Decision[object], object, Mapping[str, int], Set[str]]]


@dataclass
class Queries:
    """The queries of a compile with their answers. When a pass changes values of symbols, earlier
    answers refer to the old values and later ones to the new values."""

    answers: Answers = field(default_factory=Answers)
    _changes: list[tuple[Answers, Mapping[str, int]]] = field(
        default_factory=list[tuple[Answers, Mapping[str, int]]]
    )
    #: The first match. Queries that read only values that are equal in it are not asked again.
    _first: _Match | None = None
    #: The values of the last two matches, each with the number of answers: callers ask again.
    _matched: list[tuple[int, Mapping[str, int]]] = field(
        default_factory=list[tuple[int, Mapping[str, int]]]
    )

    def change(self, values: Mapping[str, int]) -> None:
        """Set new values of symbols for later queries; they must follow from the answers so far."""
        self._changes.append((self.answers, values))
        self.answers = {}

    def settled(self, values: Mapping[str, int]) -> Mapping[str, int]:
        """The values of all symbols after the passes, for initial values with the same answers."""
        return {**values, **{n: v for _, changed in self._changes for n, v in changed.items()}}

    def same(self, values: Mapping[str, int]) -> bool:
        """Whether all answers are equal for these initial values."""
        asked = (len(self.answers), values)
        if asked in self._matched:
            return True
        try:
            if not self._as_noted(values):
                return False
        except (UnboundError, ArithmeticError, NotAnIntegerError):
            return False
        self._matched = [asked, *self._matched[:1]]
        return True

    def _as_noted(self, values: Mapping[str, int]) -> bool:
        """Whether all queries have the answers that are noted."""
        first = self._first
        if first is None or first.answered != len(self.answers):
            return self._note_reads(values)
        equal = {name for name, value in values.items() if first.values.get(name) == value}
        return all(
            read <= equal or query({**values, **fixed} if fixed else values) == answer
            for query, answer, fixed, read in first.queries
        )

    def _note_reads(self, values: Mapping[str, int]) -> bool:
        """The same, for all queries. If they have, this is the first match."""
        queries: list[tuple[Decision[object], object, Mapping[str, int], Set[str]]] = []
        fixed: Mapping[str, int] = {}
        for answers, changed in (*self._changes, (self.answers, dict[str, int]())):
            now = {**values, **fixed}
            for query, answer in answers.items():
                noting = _Noting(now)
                if query(noting) != answer:
                    return False
                queries.append((query, answer, fixed, noting.read - fixed.keys()))
            fixed = {**fixed, **changed}
        self._first = _Match(len(self.answers), values, queries)
        return True


@dataclass(frozen=True, slots=True)
class Where:
    """A query at coordinates of ranks, which are not values of the job."""

    question: Decision[object]
    coordinates: tuple[tuple[str, int], ...]

    def __call__(self, values: Mapping[str, int]) -> object:
        return self.question({**values, **dict(self.coordinates)})


class TrackedValues(Mapping[str, Value]):
    """Values of symbols that note reads and queries in `decisions`, with the `coordinates` among
    them."""

    def __init__(
        self,
        values: Mapping[str, Value],
        decisions: Queries,
        coordinates: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.values_, self.decisions = values, decisions
        self._coordinates = tuple(coordinates.items())

    def note(self, question: Decision[object], answer: object) -> None:
        """Note a query with its answer."""
        at = self._coordinates
        self.decisions.answers[Where(question, at) if at else question] = answer

    def __getitem__(self, name: str) -> Value:
        value = self.values_[name]
        self.note(ValueOf(name), value)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.values_  # the set of known symbols is fixed

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def ask(question: Callable[[Mapping[str, Any]], T_co], values: Mapping[str, Any]) -> T_co:
    """The answer to a query, noted if the values are tracked."""
    if not isinstance(values, TrackedValues):
        return question(values)
    answer = question(plain(values))
    values.note(question, answer)
    return answer


def note(question: Decision[object], answer: object, values: Mapping[str, Any]) -> None:
    """Note a query with its answer, if the values are tracked."""
    if isinstance(values, TrackedValues):
        values.note(question, answer)


def plain(values: Mapping[str, Value]) -> Mapping[str, Value]:
    """The values without tracking, for callers that note their own queries."""
    return values.values_ if isinstance(values, TrackedValues) else values
