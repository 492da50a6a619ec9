"""Resharding: the cheapest sequence of collectives from one placement to another.

`Resharding.plan` finds a shortest path over placements: the axes that split each dimension, and
those over which the value is partial. Each collective is an edge, whose length is first the bytes
that a rank sends on a ring, then one call. From `[M, N | sum(y)]` to `[M@x, N]`, with two ranks
along each axis:

    slice x @0        [M@x, N | sum(y)]    0 bytes
    all_reduce y      [M@x, N]             half of the tensor
    (all_reduce y, then slice x: the whole tensor)

Bytes are counted as shares of the tensor, so only sizes of axes matter, not those of dimensions; an
axis without a size counts as `OPEN_AXIS` ranks. Axes over which both ends are replicated are not
used: all their ranks do the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, permutations
from math import prod

from stagec.ir.facts import Facts
from stagec.ir.module import Module
from stagec.ir.queries import Divides, TrackedValues, ask, plain
from stagec.ir.types import Dim, TensorType, axis_size
from stagec.ir_spec.ops.comm import ring_rounds

Axes = tuple[str, ...]
OPEN_AXIS = 8


class NoPlanError(ValueError):
    """The target cannot be reached, because a complete value would have to become partial."""


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """One movement: an op and its parameters.

    An all_to_all that moves axes between different dimensions has a `dim` and `source` for each.
    """

    op: str
    over: Axes
    dim: int | tuple[int, ...] = 0
    source: int | tuple[int, ...] = 0
    kind: str = "sum"


#: A placement: the axes of each dimension, major first, and those of the partial sum.
_State = tuple[tuple[Axes, ...], Axes]
#: A set of axes, and whether it may split a dimension.
_Choice = tuple[frozenset[str], "bool | Divides"]
#: The sets of axes that may split each dimension.
_Allowed = tuple[frozenset[frozenset[str]], ...]


@dataclass(frozen=True)
class Resharding:
    """Plans for the values of one module, from the sizes of its axes and the splits that it
    allows."""

    sizes: Mapping[str, int]
    may_split: Callable[[Axes, Dim], bool | Divides]
    known: Mapping[str, int] | None = None  # values of symbols and axes; None: of axes only
    _known: dict[object, KnownWay] = field(default_factory=dict["object", "KnownWay"])

    @classmethod
    def of(cls, module: Module) -> Resharding:
        """The plans of a module. Intermediate placements have only splits that are known to divide;
        dimensions in zigzag order, or whose rows differ between ranks, get no new splits."""
        mesh, facts, order = module.mesh, module.facts, module.zigzag
        known = plain(mesh.sizes) if mesh else dict[str, int | None]()
        sizes = {a: n or OPEN_AXIS for a, n in known.items()}
        values: Mapping[str, int] = {**plain(module.env), **sizes}
        if module.decisions is not None:
            values = TrackedValues(values, module.decisions)
        return cls(sizes, lambda axes, d: _may_split(axes, d, facts, order), values)

    @property
    def values(self) -> Mapping[str, int]:
        """The values by which plans are compared."""
        return self.sizes if self.known is None else self.known

    def plan(
        self, have: TensorType, splits: Sequence[Axes], partial: Axes = ()
    ) -> list[CollectiveStep]:
        """The steps from `have` to a value split over `splits` and partial over `partial`. Raises
        `NoPlanError`."""
        return list(ask(self.find(have, splits, partial).way, self.values))

    def find(self, have: TensorType, splits: Sequence[Axes], partial: Axes = ()) -> KnownWay:
        """The query for a plan, with its cost. Raises `NoPlanError`."""
        key = (have.dims, have.partial, tuple(splits), partial)
        if key not in self._known:
            way = self._way(have, splits, partial)
            self._known[key] = KnownWay(way, way.cost(plain(self.values)))
        return self._known[key]

    def _way(self, have: TensorType, splits: Sequence[Axes], partial: Axes) -> Way:
        missing = [a for a in partial if a not in have.partial_axes]
        if missing:
            raise NoPlanError(f"cannot make {have} partial over {', '.join(missing)}")
        kept = [_common(d.axes, s) for d, s in zip(have.dims, splits, strict=True)]
        pending = tuple(a for a in have.partial_axes if a not in partial)
        start = (tuple(d.axes[k:] for d, k in zip(have.dims, kept, strict=True)), pending)
        end = (tuple(tuple(s[k:]) for s, k in zip(splits, kept, strict=True)), ())
        moved = {*_axes(start), *_axes(end)}
        axes = tuple(a for a in self.sizes if a in moved)
        choices = tuple(
            tuple(self._sets(d, d.axes[:k], axes, (have_moved, want_moved)))
            for d, k, have_moved, want_moved in zip(have.dims, kept, start[0], end[0], strict=True)
        )
        kind = have.partial.kind if have.partial else "sum"
        fixed = tuple(a for d, k in zip(have.dims, kept, strict=True) for a in d.axes[:k])
        return Way(start, end, axes, choices, kind, fixed)

    def _sets(self, d: Dim, prefix: Axes, axes: Axes, ends: tuple[Axes, Axes]) -> Iterator[_Choice]:
        """The sets of axes that may follow the prefix: those of both ends, and those that
        divide."""
        for count in range(len(axes) + 1):
            for some in combinations(axes, count):
                at_an_end = any(set(some) == set(moved[:count]) for moved in ends)
                may = at_an_end or self.may_split((*prefix, *some), d)
                if may is not False:
                    yield frozenset(some), may


@dataclass(frozen=True, eq=False)
class Way:
    """The query for a plan from one placement to another; its answer are the steps.

    The fields are the moved axes, the sets of axes that may split each dimension, and the fixed
    axes.
    """

    start: _State
    end: _State
    axes: Axes
    choices: tuple[tuple[_Choice, ...], ...]
    kind: str
    fixed: Axes
    _known: dict[object, tuple[tuple[CollectiveStep, ...], Fraction]] = field(
        default_factory=dict["object", "tuple[tuple[CollectiveStep, ...], Fraction]"]
    )

    def __call__(self, values: Mapping[str, int]) -> tuple[CollectiveStep, ...]:
        """The steps."""
        return self._solved(values)[0]

    def cost(self, values: Mapping[str, int]) -> Fraction:
        """The bytes that a rank sends, as a share of the whole tensor."""
        return self._solved(values)[1]

    def _solved(self, values: Mapping[str, int]) -> tuple[tuple[CollectiveStep, ...], Fraction]:
        ranks = tuple([values[a] for a in self.axes])
        fixed = prod([values[a] for a in self.fixed])
        may = tuple([m if isinstance(m, bool) else m(values) for c in self.choices for _, m in c])
        if (ranks, fixed, may) not in self._known:
            left = iter(may)
            allowed = tuple(frozenset(some for some, _ in c if next(left)) for c in self.choices)
            about = self.axes, ranks, allowed, self.kind
            steps, cost = _shortest(self.start, self.end, *about)
            self._known[ranks, fixed, may] = steps, cost / fixed
        return self._known[ranks, fixed, may]


@dataclass(frozen=True)
class KnownWay:
    """A query for a plan, and the bytes that a rank sends as a share of the whole tensor."""

    way: Way
    cost: Fraction


def _may_split(axes: Axes, d: Dim, facts: Facts, order: Mapping[str, Axes]) -> bool | Divides:
    if d.load is not None or (d.size.symbol_name or "") in order:
        return False
    return facts.question(axis_size(axes), d.size)


def _common(a: Axes, b: Axes) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def _axes(state: _State) -> Axes:
    return tuple(a for axes in state[0] for a in axes) + state[1]


# -- the shortest path -----------------------------------------------------------------------------

_Move = tuple[int, CollectiveStep, _State]  # bytes, the step, the new placement
#: The order of steps in paths with equal bytes and calls: reductions first, gathers last.
_ORDER = ("all_reduce", "reduce_scatter", "all_to_all", "all_slice", "all_gather")


@lru_cache(maxsize=1 << 14)
def _shortest(
    start: _State, end: _State, axes: Axes, sizes: tuple[int, ...], allowed: _Allowed, kind: str
) -> tuple[tuple[CollectiveStep, ...], Fraction]:
    """The steps and the cost of a shortest path, by A* with the bound of `_Moves.least`."""
    moves = _moves(axes, sizes, allowed, kind)
    queue: list[
        tuple[int, int, int, tuple[object, ...], _State, int, tuple[CollectiveStep, ...]]
    ] = []
    heapq.heappush(queue, (0, 0, 0, (), start, 0, ()))
    done: set[_State] = set()
    shortest: dict[_State, tuple[int, int, int]] = {}
    whole = moves.local(end)
    while queue:
        _, calls, _, keys, state, sent, path = heapq.heappop(queue)
        if state == end:
            return path, Fraction(sent, moves.total)
        if state in done:
            continue
        done.add(state)
        for more, step, to in moves.of(state):
            if to in done:
                continue
            now = sent + more
            least = now + moves.least(to, whole)
            length = least, calls + (step.op != "stg.all_slice"), len(path) + 1
            if length > shortest.setdefault(to, length):
                continue
            shortest[to] = length
            key = (*keys, moves.key(step))
            heapq.heappush(queue, (*length, key, to, now, (*path, step)))
    raise AssertionError(f"no way from {start} to {end}")  # gathers and slices always reach it


@lru_cache(maxsize=1 << 6)
def _moves(axes: Axes, sizes: tuple[int, ...], allowed: _Allowed, kind: str) -> _Moves:
    return _Moves(dict(zip(axes, sizes, strict=True)), allowed, kind)


class _Moves:
    """The collectives that can be applied to a placement.

    The size of the tensor counts as the square of the number of ranks, so that all shares are
    integers.
    """

    def __init__(self, sizes: Mapping[str, int], allowed: _Allowed, kind: str) -> None:
        self._sizes, self._axes, self._allowed, self._kind = sizes, tuple(sizes), allowed, kind
        self._solved: dict[_State, list[_Move]] = {}
        self._least: dict[tuple[_State, int], int] = {}
        self._smallest = prod(sizes.values())
        self.total = self._smallest**2

    def local(self, state: _State) -> int:
        """The share of one rank."""
        return self.total // self._count(a for s in state[0] for a in s)

    def least(self, state: _State, whole: int) -> int:
        """A lower bound of what a rank sends to reduce its partial sums and to have `whole` at the
        end.

        Let n ranks have partial sums of l elements each, and let k be the share of a rank if all
        axes split. Reductions that leave the value split send at least k(n-1) and leave l/n; the
        rest of `whole` is gathered. No step lowers this bound by more than it sends. A
        reduce_scatter over m ranks lowers the first part by k(n - n/m), which is no more than l(1 -
        1/m), and leaves the second one. An all_reduce lowers each part by no more than that, and
        sends twice as much. A gather lowers the second part by no more than what l grows by.
        """
        key = state, whole
        if key not in self._least:
            n = self._count(state[1])
            gathered = max(0, whole - self.local(state) // n)
            self._least[key] = self._smallest * (n - 1) + gathered
        return self._least[key]

    def key(self, step: CollectiveStep) -> tuple[object, ...]:
        """The order of steps of equal cost."""
        over = tuple(self._axes.index(a) for a in step.over)
        return _ORDER.index(step.op.removeprefix("stg.")), str(step.dim), str(step.source), over

    def of(self, state: _State) -> list[_Move]:
        """The steps from a placement, each with its bytes and the new placement."""
        if state not in self._solved:
            self._solved[state] = list(self._all(state))
        return self._solved[state]

    def _all(self, state: _State) -> Iterator[_Move]:
        splits, partial = state
        local = self.local(state)
        for over in _subsets(partial):
            rest = tuple(a for a in partial if a not in over)
            step = CollectiveStep("stg.all_reduce", over, kind=self._kind)
            yield ring_rounds("all_reduce") * self._ring(local, over), step, (splits, rest)
        if self._kind == "sum":
            for d, over, to in self._split_further(splits, partial):
                rest = tuple(a for a in partial if a not in over)
                step = CollectiveStep("stg.reduce_scatter", over, d)
                yield self._ring(local, over), step, (to, rest)
        used = {*partial, *(a for s in splits for a in s)}
        for d, over, to in self._split_further(splits, [a for a in self._axes if a not in used]):
            yield 0, CollectiveStep("stg.all_slice", over, d), (to, partial)
        for d, axes in enumerate(splits):
            for count in range(1, len(axes) + 1):
                over = axes[-count:]
                whole = local * self._count(over)
                to = _with(splits, d, axes[:-count])
                step = CollectiveStep("stg.all_gather", over, d)
                yield self._ring(whole, over), step, (to, partial)
        for step, to in self._exchanges(splits):
            yield self._ring(local, step.over), step, (to, partial)

    def _count(self, axes: Iterator[str] | Axes) -> int:
        return prod(self._sizes[a] for a in axes)

    def _ring(self, size: int, over: Axes) -> int:
        """The bytes that a rank sends on a ring: (n-1)/n of a buffer."""
        return size - size // self._count(over)

    def _split_further(
        self, splits: tuple[Axes, ...], axes: Sequence[str]
    ) -> Iterator[tuple[int, Axes, tuple[Axes, ...]]]:
        """A dimension, the axes that are appended to its split, and the new splits."""
        for over in _sequences(axes):
            for d, now in enumerate(splits):
                if frozenset((*now, *over)) in self._allowed[d]:
                    yield d, over, _with(splits, d, (*now, *over))

    def _exchanges(
        self, splits: tuple[Axes, ...]
    ) -> Iterator[tuple[CollectiveStep, tuple[Axes, ...]]]:
        """The placements that one all_to_all reaches: the last axes of dimensions become the last
        ones of others. No dimension both gives and takes axes, so each rank sends equal parts to
        all others."""
        seen: set[tuple[Axes, ...]] = {splits}
        waiting: list[tuple[tuple[Axes, ...], tuple[_Exchange, ...]]] = [(splits, ())]
        while waiting:
            now, moves = waiting.pop(0)
            for over, source, d in _further(now, moves):
                kept = now[source][: -len(over)]
                to = _with(_with(now, source, kept), d, (*now[d], *over))
                if to not in seen and frozenset(to[d]) in self._allowed[d]:
                    seen.add(to)
                    waiting.append((to, (*moves, (over, source, d))))
                    yield _exchange(waiting[-1][1]), to


_Exchange = tuple[Axes, int, int]  # axes, from which dimension, to which


def _further(splits: tuple[Axes, ...], moves: Sequence[_Exchange]) -> Iterator[_Exchange]:
    """Further exchanges in the same call: the last axes of a dimension that takes none move to one
    that gives none."""
    gave, took = ({move[i] for move in moves} for i in (1, 2))
    for source, axes in enumerate(splits):
        for d in range(len(splits)) if source not in took else ():
            if d != source and d not in gave and all(m[1:] != (source, d) for m in moves):
                yield from ((axes[-count:], source, d) for count in range(1, len(axes) + 1))


def _exchange(moves: Sequence[_Exchange]) -> CollectiveStep:
    """One call for these exchanges. Axes that leave the same dimension are ordered major first."""
    if len(moves) == 1:
        ((over, source, d),) = moves
        return CollectiveStep("stg.all_to_all", over, d, source)
    ordered = moves[::-1] if len({m[1] for m in moves}) == 1 else moves
    axes = [(axis, source, d) for over, source, d in ordered for axis in over]
    over, froms, tos = zip(*axes, strict=True)
    return CollectiveStep("stg.all_to_all", over, tos, froms)


def _with(splits: tuple[Axes, ...], d: int, axes: Axes) -> tuple[Axes, ...]:
    return (*splits[:d], axes, *splits[d + 1 :])


def _subsets(axes: Sequence[str]) -> Iterator[Axes]:
    for count in range(1, len(axes) + 1):
        yield from combinations(axes, count)


def _sequences(axes: Sequence[str]) -> Iterator[Axes]:
    for count in range(1, len(axes) + 1):
        yield from permutations(axes, count)
