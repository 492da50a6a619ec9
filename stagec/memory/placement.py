"""Placement: an offset in an arena for every buffer, in the order in which a step makes them.

There are two models. `best-fit` is one arena: a buffer is placed in the smallest gap that is large
enough, else at the end. `caching` is PyTorch's allocator (c10/cuda/CUDACachingAllocator.cpp): sizes
are rounded to 512 bytes. Buffers of up to 1 MiB are in segments of 2 MiB, larger ones in segments
of 20 MiB, and from 10 MiB on each has a segment of its size, rounded to 2 MiB. The smallest free
block that is large enough is split, and free neighbours are joined again.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

BLOCK = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT = 10 << 20
ROUND = 2 << 20


def rounded(size: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of a buffer: its offset from the start of the arena and its size, in bytes."""

    offset: int
    size: int


class Allocator(Protocol):
    """Allocates and frees memory; `reserved` are the bytes requested from the device."""

    reserved: int

    def take(self, size: int) -> Placed:
        """Allocate a place of at least `size` bytes."""
        ...

    def give(self, place: Placed) -> None:
        """Free a place."""
        ...


class _Gaps:
    """Free memory between places: gaps by size, and neighbours to join."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def find(self, size: int) -> tuple[int, int] | None:
        """Size and start of the smallest gap of at least this size; of several the one at the
        lowest offset."""
        at = bisect_left(self._by_size, (size, 0))
        return self._by_size[at] if at < len(self._by_size) else None

    def remove(self, size: int, start: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._starts[start], self._ends[start + size]

    def add(self, start: int, size: int, low: int, high: int) -> tuple[int, int]:
        """Add a gap and join it with its neighbours between two offsets. Returns start and size of
        the joined gap."""
        if start > low and start in self._ends:
            before = self._ends[start]
            self.remove(start - before, before)
            start, size = before, size + start - before
        if start + size < high and start + size in self._starts:
            behind = self._starts[start + size]
            self.remove(behind, start + size)
            size += behind
        insort(self._by_size, (size, start))
        self._starts[start], self._ends[start + size] = size, start
        return start, size


class BestFit:
    """One arena that grows at its end; places are aligned to 512 bytes."""

    def __init__(self) -> None:
        self.reserved = self._end = 0
        self._gaps = _Gaps()

    def take(self, size: int) -> Placed:
        """Use the smallest gap that is large enough, else the end of the arena."""
        size = rounded(size, BLOCK)
        gap = self._gaps.find(size)
        if gap is None:
            place = Placed(self._end, size)
            self._end += size
            self.reserved = max(self.reserved, self._end)
            return place
        room, start = gap
        self._gaps.remove(room, start)
        if room > size:
            self._gaps.add(start + size, room - size, start + size, self._end)
        return Placed(start, size)

    def give(self, place: Placed) -> None:
        """Free a place; at the end of the arena this makes the arena shorter."""
        start, size = self._gaps.add(place.offset, place.size, 0, self._end)
        if start + size == self._end:
            self._gaps.remove(size, start)
            self._end = start


@dataclass(slots=True)
class _Pool:
    segment_of: dict[int, tuple[int, int]] = field(default_factory=dict[int, "tuple[int, int]"])
    gaps: _Gaps = field(default_factory=_Gaps)


class Caching:
    """PyTorch's caching allocator: segments stay reserved until the end."""

    def __init__(self) -> None:
        self.reserved = 0
        self._pools = (_Pool(), _Pool())

    def take(self, size: int) -> Placed:
        """Use the smallest free block of the pool that is large enough, else a block of a new
        segment."""
        size = rounded(size, BLOCK)
        small = size <= SMALL
        pool = self._pools[small]
        gap = pool.gaps.find(size)
        if gap is None:
            room, start = self._segment(size), self.reserved
            self.reserved += room
            borders = start, start + room
        else:
            room, start = gap
            pool.gaps.remove(room, start)
            borders = pool.segment_of.pop(start)
        rest = room - size
        if rest >= BLOCK if small else rest > SMALL:
            pool.segment_of[start + size] = borders
            pool.gaps.add(start + size, rest, start + size, borders[1])
            room = size
        pool.segment_of[start] = borders
        return Placed(start, room)

    @staticmethod
    def _segment(size: int) -> int:
        if size <= SMALL:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < OWN_SEGMENT else rounded(size, ROUND)

    def give(self, place: Placed) -> None:
        """Free a block and join it with free blocks beside it in its segment."""
        pool = next(p for p in self._pools if place.offset in p.segment_of)
        borders = pool.segment_of.pop(place.offset)
        start, _ = pool.gaps.add(place.offset, place.size, *borders)
        pool.segment_of[start] = borders


MODELS: Mapping[str, type[BestFit | Caching]] = {"best-fit": BestFit, "caching": Caching}


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The start of a buffer of `size` bytes, or the end of one (size 0), by its number."""

    number: int
    size: int


@dataclass(slots=True)
class Arena:
    """The places of all buffers by number. All sizes are in bytes: `allocated` is the most that was
    in use at once with rounding, `bound` the most that was requested at once (no arena can be
    smaller), and `reserved` the total of the allocator."""

    places: dict[int, Placed] = field(default_factory=dict[int, Placed])
    allocated: int = 0
    reserved: int = 0
    bound: int = 0


def place(requests: Iterable[PlacementRequest], allocator: Allocator) -> Arena:
    """Place buffers in the order of the requests."""
    arena = Arena()
    for _ in placing(requests, allocator, arena):
        pass
    return arena


def placing(
    requests: Iterable[PlacementRequest], allocator: Allocator, arena: Arena
) -> Iterator[tuple[PlacementRequest, Placed]]:
    """Place buffers request by request and yield each place; updates `arena`."""
    live: dict[int, tuple[int, Placed]] = {}
    given = asked = 0
    for request in requests:
        if request.size:
            spot = allocator.take(request.size)
            live[request.number] = request.size, spot
            arena.places[request.number] = spot
            given, asked = given + spot.size, asked + request.size
            arena.allocated, arena.bound = max(arena.allocated, given), max(arena.bound, asked)
        else:
            size, spot = live.pop(request.number)
            allocator.give(spot)
            given, asked = given - spot.size, asked - size
        yield request, spot
    arena.reserved = allocator.reserved
