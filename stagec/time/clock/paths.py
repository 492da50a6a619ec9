"""The times of a step as longest paths: what the pieces of all classes wait for, with the costs of
nodes left open. They are found once for a structure; a replay for other costs adds and compares
numbers.

A moment is the later one of two ends before it. What happens in a piece from a moment on is a
weight: the longest sum of costs from what it is given to an end (`segments`).

    stage0   forward, send        sent at m1 + forward + send
    stage1   receive, forward     m2 = the later one of that and of what was received before

This says when messages are sent, when collectives start and when classes end. With these times a
class is replayed alone, node by node (`replay.replay_alone`). Collectives that take speed from
computations are no sums, and are not for this.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stagec.time.clock.weights import NumberedCosts, PathWeights

#: An end: the number of a moment, and that of the weight after it.
End = tuple[int, int]


class CallTimes(NamedTuple):
    """A collective that joins classes: when each of them is `ready`, in the order in which they
    come, when it starts, and how long it takes."""

    ready: Sequence[tuple[int, int]]
    start: int
    time: int


class Joining(NamedTuple):
    """The same in moments and weights."""

    ready: Sequence[tuple[int, End]]
    start: int
    weight: int


class PathTimes:
    """When a step with some costs is where classes meet: picoseconds."""

    def __init__(self, paths: StepPaths, moments: Sequence[int], weights: Sequence[int]) -> None:
        self._paths, self._moments, self._weights = paths, moments, weights
        self.ends = [self._at(end) for end in paths.ends]

    def sent(self, owner: int) -> Iterator[int]:
        """When the messages that a class receives were sent, of each receive by source."""
        flat = iter(self._paths.sent[owner])
        return (self._at(end) for end in zip(flat, flat, strict=True))

    def calls(self, owner: int) -> Iterator[CallTimes]:
        """The collectives that join a class with others."""
        for number in self._paths.called[owner]:
            ready, start, weight = self._paths.calls[number]
            each = [(other, self._at(end)) for other, end in ready]
            yield CallTimes(each, self._moments[start], self._weights[weight])

    def _at(self, end: End) -> int:
        return self._moments[end[0]] + self._weights[end[1]]


class StepPaths(NamedTuple):
    """The paths of a structure. `ends` are those of the classes, `sent` and `called` what each
    class receives and joins, in its order: pairs of numbers, and numbers of `calls`. Of each moment
    but the start `edges` has the two ends of which it is the later one."""

    ends: Sequence[End]
    sent: Sequence[array[int]]
    called: Sequence[array[int]]
    calls: Sequence[Joining]
    edges: tuple[array[int], array[int], array[int], array[int]]
    weights: PathWeights

    def times(self, costs: Sequence[NumberedCosts]) -> PathTimes:
        """The times for these costs of the classes."""
        weights = self.weights.at(costs)
        one, after_one, other, after_other = self.edges
        moments = [0]
        later = moments.append
        firsts = weights[np.asarray(after_one)].tolist()
        seconds = weights[np.asarray(after_other)].tolist()
        for a, first, b, second in zip(one, firsts, other, seconds, strict=True):
            end, end2 = moments[a] + first, moments[b] + second
            later(end if end > end2 else end2)
        return PathTimes(self, moments, weights.tolist())
