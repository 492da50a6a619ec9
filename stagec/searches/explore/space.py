"""A space of strategies: a product of knobs. Its points are counted without listing them:

tp 1,2,4,8   zero 0,1,3   recompute none,full      4 * 3 * 2 = 24 points
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, TypeAlias

#: A value of each knob.
Point: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Space:
    """The values of each knob; the last knob varies fastest."""

    knobs: Mapping[str, tuple[Any, ...]]

    @property
    def count(self) -> int:
        """The number of points, legal or not."""
        return prod(len(values) for values in self.knobs.values())

    def part(self, names: frozenset[str]) -> Space:
        """The space of these knobs alone."""
        return Space({n: v for n, v in self.knobs.items() if n in names})

    def __iter__(self) -> Iterator[Point]:
        """All points, one after the other."""
        for values in product(*self.knobs.values()):
            yield dict(zip(self.knobs, values, strict=True))


def doubled(first: int, last: int) -> tuple[int, ...]:
    """The sizes `first`, 2 `first`, 4 `first`, ... up to `last`; (1,) if there are none."""
    sizes: list[int] = []
    while first <= last:
        sizes.append(first)
        first *= 2
    return tuple(sizes) or (1,)
