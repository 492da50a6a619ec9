"""What a rank holds while its step goes on: the memory events of its nodes, at the times at which
they run.

Memory is taken and given back in the order of issue, as allocators do it, whatever streams run it:
each computation counts with the nodes that were issued since the computation before. So the most
that is held is what `Events.peak` says, on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagec.program.nodes import Events, Ints
from stagec.time.clock.intervals import NodeTimes


class ResidentBytes(NamedTuple):
    """From `time[i]` picoseconds on, up to the next, a rank holds `bytes[i]`."""

    time: Ints
    bytes: Ints


def residency(events: Events, times: NodeTimes) -> ResidentBytes:
    """The bytes that a rank holds, where they change. `events` and `times` are of the same
    nodes."""
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
