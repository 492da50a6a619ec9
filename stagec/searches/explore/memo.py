"""Memoizes functions of many named values by the values that they read.

    rule(tp, sp, zero ...)     reads tp = 1: nothing else matters
                               reads tp = 2, then sp = False: another answer

A point of a space differs from the one before it in few values, so most answers are known.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class NotedValues:
    """Values by name, as attributes and as items; records those that are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self.read = values, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        self.read[name] = value
        return value


class Reads(Generic[T]):
    """A node of the tree of reads: the name that is read next, and the node for each of its values;
    or the answer."""

    __slots__ = ("answer", "branches", "name")

    def __init__(self) -> None:
        self.name = ""
        self.branches: dict[Any, Reads[T]] = {}
        self.answer: list[T] = []


class MemoByReads(Generic[T]):
    """A memoized function whose next read depends only on the values that it has read. Values are
    hashable."""

    def __init__(self, function: Callable[[NotedValues], T]) -> None:
        self._function, self.first = function, Reads[T]()

    def reads_of(self, values: Mapping[str, Any], start: Reads[T] | None = None) -> Reads[T]:
        """The node that these values, common to many calls, lead to from `start`."""
        node = start or self.first
        while node.name in values and (branch := node.branches.get(values[node.name])) is not None:
            node = branch
        return node

    def __call__(self, values: Mapping[str, Any], start: Reads[T] | None = None) -> T:
        """The answer for these values, of which some lead to `start`."""
        node = start or self.first
        while node.name:
            branch = node.branches.get(values[node.name])
            if branch is None:
                return self._ask(values)
            node = branch
        return node.answer[0] if node.answer else self._ask(values)

    def _ask(self, values: Mapping[str, Any]) -> T:
        reading = NotedValues(values)
        answer = self._function(reading)
        node = self.first
        for name, value in reading.read.items():
            node.name = name
            node = node.branches.setdefault(value, Reads())
        node.answer = [answer]
        return answer
