"""Hosts: what they cost nodes, and whether they can ever be late.

The times of a replay are the least ones that keep all orders, so longer costs make nothing earlier.
Where each stretch of computations, from one that may wait for something else to one that something
else may wait for, takes the device no less than its host issues it in, hosts are never behind, and
need no replay.

    waits for an input                            a send waits for it
    norm 10 us    product 300 us   product 300 us         610 us of the device
    issue 100     issue 100        issue 100              300 us of the host: not late
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from stagec.program.groups import GroupAxes
from stagec.time.clock.join import Joined
from stagec.time.clock.pieces import Piece
from stagec.time.clock.shapes import Shape, ShapeNode
from stagec.time.streams import Cost, Stream


class HostTimes(NamedTuple):
    """Picoseconds that a host spends on a computation, and on a collective of a group."""

    issue: int
    checks: tuple[tuple[GroupAxes, int], ...] = ()


class _Mark(NamedTuple):
    """Before how many computations of a piece, of which so many are `issued`, one may wait for
    something else; or, if it `ends`, after how many something else may wait for the last one."""

    done: int
    issued: int
    ends: bool


class _Marks(NamedTuple):
    places: Sequence[int]
    marks: Sequence[_Mark]


class Hosts:
    """The hosts of classes with these plans, whatever nodes cost."""

    def __init__(self, plans: Sequence[Joined]) -> None:
        self._marks = _marks(plans)

    def never_late(self, pieces: Iterable[Piece], issue: int) -> bool:
        """Whether hosts that take so many picoseconds for a computation are never behind devices
        that run these pieces; if not, they may be."""
        return all(_keeps_ahead(self._marks[p.shape], p.spans, issue) for p in pieces)


def host_costs(spent: HostTimes, shape: Shape) -> list[Cost]:
    """What nodes cost their host."""
    some, none = Cost(0, spent.issue), Cost(0)
    calls = {axes: Cost(time) for axes, time in spent.checks}
    return [some if _is_issued(step) else calls.get(step.node.group, none) for step in shape.steps]


def _is_issued(step: ShapeNode) -> bool:
    """Whether a node counts. Optimizers launch few kernels, each for many parameters."""
    return step.node.is_computation and step.node.phase != "optimizer"


def _keeps_ahead(known: _Marks, spans: Sequence[int], issue: int) -> bool:
    """Whether no stretch of a piece is shorter than its issue: sums from the start of the piece,
    less what is issued, are at each end no less than at all starts before."""
    sums = [*accumulate([spans[place] for place in known.places], initial=0)]
    most = 0
    for done, issued, ends in known.marks:
        ahead = sums[done] - issue * issued
        if not ends:
            most = max(most, ahead)
        elif ahead < most:
            return False
    return True


def _marks(plans: Sequence[Joined]) -> Mapping[Shape, _Marks]:
    awaited: dict[Shape, set[int]] = {}
    for joined in plans:
        for planned in joined.plan:
            awaited.setdefault(planned.shape, set())
            for piece, place in planned.inputs:
                awaited[joined.plan[piece].shape].add(place)
    beside = {
        stream
        for shape in awaited
        for step in shape.steps
        if not step.computes
        for stream in step.streams
    }
    return {shape: _marks_of(shape, places, beside) for shape, places in awaited.items()}


def _marks_of(shape: Shape, awaited: set[int], beside: set[Stream]) -> _Marks:
    """The marks of a shape of which other pieces wait for some places, where nodes that do not
    compute are on some streams."""
    steps = shape.steps
    computing = [place for place, step in enumerate(steps) if step.computes]
    awaited = awaited | {i for step in steps if not step.computes for i in step.inner}
    found: list[_Mark] = []
    issued = 0
    for count, place in enumerate(computing):
        step = steps[place]
        shares = not beside.isdisjoint(step.streams)
        if shares or step.inputs or any(not steps[i].computes for i in step.inner):
            found.append(_Mark(count, issued, ends=False))
        issued += _is_issued(step)
        if shares or place in awaited or place == computing[-1]:
            found.append(_Mark(count + 1, issued, ends=True))
    return _Marks(computing, found)
