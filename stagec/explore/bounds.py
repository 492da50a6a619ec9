"""Lower bounds of the time and of the memory of a step, for arrays of degrees at once.

What a microbatch takes and holds is known from *probes*: jobs of few layers on as few ranks as its
work needs, which the compiler lowers and the clock replays like any other. A point of a space is
such a probe in many stages and microbatches, so it takes at least

    1F1B       m (u + head) + (p - 1) u       u: a stage's layers, p stages, m microbatches
    any        m * whole / p                  whole: the model's layers and head

Nothing about ops, machines or placements is said here a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """What a microbatch takes, in seconds: `layer`, a further layer forward and backward; `rest`,
    all that is outside of the layers that are many, of which `head` runs on the last stage. `cut`
    is the longest wait between two computations, which may hide where a stage ends."""

    layer: Floats
    rest: Floats
    head: Floats
    cut: Floats


@dataclass(frozen=True, slots=True)
class Shape:
    """How a step is laid out: `layers` of the model, `stages`, `chunks` of a rank, `microbatches`.

    In layers of one microbatch, forward and backward: `busy` is what a rank runs, and what others
    run before its first and after its last, of the rank that has most of both; `last` the same of
    the rank with the head. `held` are the layers of the first rank, and `stashes` how many of them
    it keeps at once, one for each microbatch.
    """

    layers: Floats
    stages: Floats
    chunks: Floats
    microbatches: Floats
    busy: Floats
    last: Floats
    held: Floats
    stashes: Floats


#: What sums of floats may be off by, and what replays of few layers say of many.
_SLACK = 1 - 1e-4


def time_bound(work: Work, shape: Shape) -> Floats:
    """Seconds that a step takes at least.

    On one rank: its work, and the chunks that others run before its first and after its last. On
    all ranks: the mean of the work. A wait at the end of a stage may hide; each action of a
    pipeline has one.
    """
    m, p, v = shape.microbatches, shape.stages, shape.chunks
    cuts = np.where(p == 1, m, 2 * (v * m + p)) * work.cut
    whole = m * (shape.layers * work.layer + work.rest) / p - cuts
    busy = shape.busy * work.layer - cuts
    last = shape.last * work.layer + m * work.head - cuts
    least: Floats = _SLACK * np.max([whole, busy, last, 0 * m], axis=0)
    return least


def memory_bound(static: Floats, stash: Floats, shape: Shape) -> Floats:
    """Bytes that a rank holds at least. `static` are those of parameters, gradients and optimizer
    for each layer, `stash` those that a layer keeps of a microbatch."""
    least: Floats = _SLACK * (shape.held * static + shape.stashes * stash)
    return least
