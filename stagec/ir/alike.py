"""Regions that are equal except for names and for the values that they capture."""

from collections.abc import Hashable

from stagec.ir.core import Operation, Region, Value
from stagec.ir.types import whole

#: The number of a fused kernel in its function; numbers may differ, the grouping may not.
_NUMBERED = "fused"


def captured(body: Region, skip: frozenset[Operation] = frozenset()) -> tuple[Value, ...]:
    """The values that a region uses and its operations do not make, in order of use: values from
    outside, its arguments, and results of the operations in `skip`."""
    inside: set[Value] = set()
    used: dict[Value, None] = {}
    for op in body.walk():
        if op in skip:
            continue
        used.update(dict.fromkeys(op.operands))
        inside.update(op.results)
        if op.region is not None:
            inside.update(op.region.args)
    return tuple(v for v in used if v not in inside)


def counterparts(one: Region, other: Region) -> dict[Value, Value] | None:
    """Maps the values of one region, including captured ones, to those of an equal region; None if
    the regions are not equal."""
    comparison = _Comparison()
    return comparison.values if comparison.are_alike(one, other) else None


class _Comparison:
    """Compares two regions in parallel, up to the first difference."""

    def __init__(self) -> None:
        self.values: dict[Value, Value] = {}
        self._others: set[Value] = set()
        self._kernels: dict[Hashable, Hashable] = {}

    def are_alike(self, one: Region, other: Region) -> bool:
        """Whether the regions are equal, given the pairs of values so far."""
        return (
            len(one.ops) == len(other.ops)
            and len(one.args) == len(other.args)
            and all(map(self._defined, one.args, other.args))
            and all(map(self._same, one.ops, other.ops))
        )

    def _same(self, one: Operation, other: Operation) -> bool:
        if one.definition is not other.definition or one.symbol != other.symbol:
            return False
        if len(one.operands) != len(other.operands) or len(one.results) != len(other.results):
            return False
        if one.attrs != other.attrs and not self._numbered_alike(one, other):
            return False
        if not all(map(self._used, one.operands, other.operands)):
            return False
        if one.region is None or other.region is None:
            inside = one.region is other.region
        else:
            inside = self.are_alike(one.region, other.region)
        return inside and all(map(self._defined, one.results, other.results))

    def _numbered_alike(self, one: Operation, other: Operation) -> bool:
        """Whether attributes differ only in the number of the kernel, consistently."""
        mine, theirs = one.attrs.get(_NUMBERED), other.attrs.get(_NUMBERED)
        if mine is None or theirs is None or self._kernels.setdefault(mine, theirs) != theirs:
            return False
        return {**one.attrs, _NUMBERED: theirs} == other.attrs

    def _defined(self, one: Value, other: Value) -> bool:
        self._pair(one, other)
        return one.type is other.type

    def _used(self, one: Value, other: Value) -> bool:
        if one in self.values:
            return self.values[one] is other
        if other in self._others:
            return False
        self._pair(one, other)
        return _made_by(one) is _made_by(other) and whole(one.type) is whole(other.type)

    def _pair(self, one: Value, other: Value) -> None:
        self.values[one] = other
        self._others.add(other)


def _made_by(value: Value) -> object:
    return None if value.producer is None else value.producer.definition
