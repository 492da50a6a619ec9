"""The memory of a rank over time: the memory events of its nodes, at the times at which these run.

Memory is allocated and freed in the order of issue, as framework allocators do, whichever streams
the nodes run on: a computation takes effect together with the nodes issued since the computation
before it. The peak is therefore that of `Events.peak`, on every machine.
"""

from typing import NamedTuple

import numpy as np

from stagec.program.nodes import Events, Ints
from stagec.time.clock.intervals import NodeTimes


class ResidentBytes(NamedTuple):
    """A step function: a rank has `bytes[i]` allocated from `time[i]` picoseconds up to the next
    time."""

    time: Ints
    bytes: Ints


def residency(events: Events, times: NodeTimes) -> ResidentBytes:
    """The bytes that a rank has allocated, at each time at which they change. `events` and `times`
    are those of the same nodes."""
    computes = np.array([placed.computes for placed in times.kinds], dtype=bool)[times.kind]
    on = np.flatnonzero(computes)
    if not len(times.start):
        return ResidentBytes(np.zeros(1, dtype=np.int64), np.array([events.static], dtype=np.int64))
    if not len(on) or on[-1] != len(times.start) - 1:
        on = np.append(on, len(times.start) - 1)
    merged = events.merged(np.concatenate([[0], on[:-1] + 1]))
    after = events.static + np.cumsum(merged.alloc - merged.free)
    during = after + merged.free
    starts = np.maximum.accumulate(times.start[on])
    ends = np.maximum(starts, times.end[on])
    time = np.stack([starts, ends], axis=1).ravel()
    size = np.stack([during, after], axis=1).ravel()
    first = min(int(size[0]), events.static)
    changes = np.flatnonzero(np.diff(size, prepend=first - 1))
    return ResidentBytes(time[changes], size[changes])
