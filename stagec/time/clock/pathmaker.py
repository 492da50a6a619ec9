"""Finding the longest paths of a structure (`paths`), piece by piece in the order of a replay.

What is known of the order of ends keeps paths few. Computations of a class follow each other: an
end that comes after the computations of a piece is no earlier than one that they waited for.

    forward 0, forward 1, backward 0     what backward 0 takes from forward 0 was there before the
                                         computations of forward 1, which backward 0 follows
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagec.time.clock.order import ON_COMPUTE, Call, Proceed, Receive, ReplayOrder, RunPiece, Send
from stagec.time.clock.paths import End, Joining, StepPaths
from stagec.time.clock.plan import PlannedPiece
from stagec.time.clock.segments import PieceWaits, Segment, template_of
from stagec.time.clock.shapes import Shape
from stagec.time.clock.weights import NodeNumbers, WeightMaker

#: The start of the step, and the number of a piece that never comes.
_START: End = (0, 0)
_NEVER = 1 << 62


@dataclass(slots=True)
class _Known:
    """An end, and what is known of it: the last piece of the class whose computations it surely
    comes after, and the first one whose computations surely come after it. It is an end already, or
    that of a node of a piece, which is one when it is asked for."""

    end: End | _Within
    after: int = -1
    by: int = _NEVER


class _Class:
    """A class and how far it is."""

    def __init__(self, plan: Sequence[PlannedPiece], streams: int) -> None:
        self.plan = plan
        self.compute = _Known(_START, -1, -1)
        self.free = [_Known(_START, -1, -1) for _ in range(streams)]
        self.ran: dict[int, _Ran | _Known] = {}
        self.sent, self.called = array("i"), array("i")
        self.waiting: dict[int, tuple[int, _Known]] = {}


@dataclass(slots=True)
class _Ran:
    """A piece of a class that ran: what it was given, and its ends that were asked for."""

    owner: int
    template: PieceWaits
    given: Sequence[_Known]
    ends: dict[int, _Known]


class _Within(NamedTuple):
    """The end of a segment of a piece."""

    ran: _Ran
    segment: Segment


def paths_of(
    plans: Sequence[Sequence[PlannedPiece]], order: ReplayOrder, numbers: NodeNumbers
) -> StepPaths:
    """The paths of classes with these plans, whose pieces are replayed in this order."""
    return _Making(plans, order, WeightMaker(len(plans), numbers)).made()


class _Making:
    def __init__(
        self, plans: Sequence[Sequence[PlannedPiece]], order: ReplayOrder, weights: WeightMaker
    ) -> None:
        each = zip(plans, order.streams, strict=True)
        self._classes = [_Class(plan, len(streams)) for plan, streams in each]
        self._order, self._weights = order, weights
        self._templates: dict[Shape, PieceWaits] = {}
        self._edges = array("i"), array("i"), array("i"), array("i")
        self._calls: list[Joining] = []

    def made(self) -> StepPaths:
        for step in self._order.steps:
            mine = self._classes[step.owner]
            match step:
                case RunPiece():
                    self._run(mine, step)
                case Receive():
                    self._receive(mine, step)
                case Send():
                    raise ValueError("a structure with sends that wait has no paths")
                case Call():
                    self._call(mine, step)
                case Proceed():
                    end = self._end(self._known(mine, (step.piece, 0)))
                    mine.compute = _Known(end, step.piece, step.piece)
        ends = [self._latest(map(self._end, (c.compute, *c.free))) for c in self._classes]
        return StepPaths(
            ends,
            [each.sent for each in self._classes],
            [each.called for each in self._classes],
            self._calls,
            self._edges,
            self._weights.made(),
        )

    # -- pieces ------------------------------------------------------------------------------------

    def _run(self, mine: _Class, step: RunPiece) -> None:
        shape, streams = mine.plan[step.piece].shape, [number for number, _ in step.met.streams]
        template = self._templates.get(shape)
        if template is None:
            template = self._templates[shape] = template_of(shape)
        inputs = [self._known(mine, at) for at in step.inputs]
        given = [mine.compute, *(mine.free[s] for s in streams), *inputs]
        template = template.knowing(_earlier(given))
        mine.ran[step.piece] = _Ran(step.owner, template, given, {})
        compute, *last = template.last
        for stream, place in zip(streams, last, strict=True):
            mine.free[stream] = known = self._known(mine, (step.piece, place))
            if known.by == _NEVER:  # of what is later than computations there are long chains
                self._end(known)
        if shape.computes:
            end = self._end(self._known(mine, (step.piece, compute)))
            mine.compute = _Known(end, step.piece, step.piece)
            reached = template.reached[template.ends[compute].moment]
            for number, known in enumerate(given):
                if reached >> number & 1:
                    known.by = min(known.by, step.piece)

    def _known(self, mine: _Class, at: tuple[int, int]) -> _Known:
        """What is known of the end of a node: of a piece, and a place in it."""
        piece, place = at
        ran = mine.ran[piece]
        if isinstance(ran, _Known):
            return ran
        found = ran.ends.get(place)
        if found is None:
            template = ran.template
            segment, by = template.ends[place], _NEVER
            if template.covered[place] and template.shape.computes:
                by = piece
            reached = template.reached[segment.moment]
            after = max(g.after for i, g in enumerate(ran.given) if reached >> i & 1)
            found = ran.ends[place] = _Known(_Within(ran, segment), after, by)
        return found

    def _end(self, known: _Known) -> End:
        """The end that is known: the latest of those that lead to it."""
        if not isinstance(known.end, _Within):
            return known.end
        ran, segment = known.end
        ends: list[End] = []
        reached = ran.template.reached[segment.moment]
        for number, given in enumerate(ran.given):
            if reached >> number & 1:
                begun = self._end(given)
                if begun[1]:
                    given.end = begun = self._edge(begun, begun), 0
                weight = self._weights.piece(ran.owner, ran.template, number, segment)
                ends.append((begun[0], weight))
        known.end = found = self._latest(ends)
        return found

    # -- what joins classes ------------------------------------------------------------------------

    def _receive(self, mine: _Class, step: Receive) -> None:
        sent = [self._end(self._known(self._classes[o], (p, at))) for o, p, at in step.sources]
        for end in sent:
            mine.sent.extend(end)
        waits = [*(self._known(mine, at) for at in step.inputs), mine.free[step.stream]]
        end = self._latest([*sent, *map(self._end, waits)])
        found = _Known(end, max(known.after for known in waits))
        mine.ran[step.piece] = mine.free[step.stream] = found

    def _call(self, mine: _Class, step: Call) -> None:
        waits = [self._known(mine, at) for at in step.inputs]
        waits += [mine.compute if s == ON_COMPUTE else mine.free[s] for s in step.after]
        end = self._latest([_START, *map(self._end, waits)])
        ready = _Known(end, max((known.after for known in waits), default=-1))
        mine.waiting[step.piece] = len(mine.called), ready
        mine.called.append(-1)
        if step.last:
            self._start(step.last)

    def _start(self, there: Sequence[tuple[int, int, int]]) -> None:
        """Start a call of all that came to it: owner, piece and stream of each."""
        waits: list[End] = []
        ready: list[tuple[int, End]] = []
        shapes: list[tuple[int, Shape]] = []
        for owner, piece, stream in there:
            each = self._classes[owner]
            ready.append((owner, self._end(each.waiting[piece][1])))
            waits += [ready[-1][1], self._end(each.free[stream])]
            shapes.append((owner, each.plan[piece].shape))
        start = self._latest(waits)
        moment = self._edge(start, start) if start[1] else start[0]
        end = moment, self._weights.call(shapes)
        for owner, piece, stream in there:
            each = self._classes[owner]
            place, known = each.waiting.pop(piece)
            each.called[place] = len(self._calls)
            each.ran[piece] = each.free[stream] = _Known(end, known.after)
        self._calls.append(Joining(ready, *end))

    # -- moments -----------------------------------------------------------------------------------

    def _latest(self, ends: Iterable[End]) -> End:
        """The latest of some ends."""
        unique = dict.fromkeys(ends)
        if len(unique) > 1:
            unique.pop(_START, None)
        found, *others = unique
        for other in others:
            found = self._edge(found, other), 0
        return found

    def _edge(self, one: End, other: End) -> int:
        """The later one of two ends."""
        for column, number in zip(self._edges, (*one, *other), strict=True):
            column.append(number)
        return len(self._edges[0])


def _earlier(given: Sequence[_Known]) -> tuple[int, ...]:
    """Of each end which ones are surely no earlier, as bits; it itself is."""
    return tuple(
        sum(1 << i for i, other in enumerate(given) if other is known or other.after >= known.by)
        for known in given
    )
