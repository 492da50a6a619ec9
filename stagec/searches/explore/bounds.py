"""Lower bounds of the time and of the memory of a step, for arrays of degrees at once.

What a microbatch takes and holds is known from *probes*: jobs of few layers on as few ranks as its
work needs, which the compiler lowers and the clock replays like any other. A point of a space is
such a probe in many stages and microbatches, so it takes at least

    1F1B       m (u + head) + (p - 1) u       u: a stage's layers, p stages, m microbatches
    ZB-H1      m (u + head) + (p - 1) f       f: their forward
    one stage  m * turn                       turn: from one microbatch to the next
    any        m * whole / p                  whole: the model's layers and head

Nothing about ops, machines or placements is said here a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagec.searches.explore.layout import StepLayout

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """What a microbatch takes, in seconds: `layer`, a further layer forward and backward; `rest`,
    all that is outside of the layers that are many, of which `head` runs on the last stage. `cut`
    and `back` are the longest waits between two computations of forward and of backward, which may
    hide where a stage ends. `link` is what a further layer takes on the stream of communication
    that it uses most. `pace` and `turn` are what the next microbatch comes later at least where a
    rank runs the whole model, for a further layer and the rest. `forward` is the part of forward of
    `layer`. These are 0 where they are not known. `again` is no less than what a layer computes
    again, which a rank may do before its input is there."""

    layer: Floats
    rest: Floats
    head: Floats
    cut: Floats
    back: Floats
    link: Floats
    pace: Floats | float = 0.0
    turn: Floats | float = 0.0
    forward: Floats | float = 0.0
    again: Floats | float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on a rank: `static` for each layer, of parameters, gradients and optimizer; `stash`,
    what a layer keeps of a microbatch; `rest`, what is there beside both where one stage runs
    the whole model. `state` are parameters, gradients and optimizer of all stages together, where
    they are not known for each layer."""

    static: Floats
    stash: Floats
    rest: Floats
    state: Floats | float = 0.0


#: What sums of floats may be off by, and what replays of few layers say of many.
SLACK = 1 - 1e-4


def columns(layouts: Sequence[StepLayout]) -> Floats:
    """A row for each field of a layout."""
    rows: Floats = np.array(layouts, dtype=np.float64).reshape(-1, len(StepLayout._fields)).T
    return rows


def time_bound(work: Work, shape: StepLayout) -> Floats:
    """Seconds that a step takes at least.

    On one rank: its work, and the chunks that others run before its first and after its last. Of
    split backwards it is not known which part is the gradient of inputs, for which others wait, so
    of others only forward counts: however backward is split, a rank runs all of it, and its first
    chunk takes what all chunks before it have made. On all ranks: the mean of the work. A wait at
    the end of a stage may hide; each action of a pipeline has one. Communication of one stream
    follows each other, so a microbatch that ends with a reduction over data-parallel ranks delays
    the first gather of the next.
    """
    m: Floats = shape.microbatches
    p: Floats = shape.stages
    v: Floats = shape.chunks
    turns = (v * m + p) * (work.cut + work.back)
    cuts: Floats = np.where(p == 1, m * np.maximum(work.cut, work.back), turns)
    mean: Floats = m * shape.layers / p
    ends = cuts + p * work.again
    lower: list[Floats] = [
        mean * work.layer + m * work.rest / p - cuts,
        shape.busy * work.layer + shape.lead * work.forward - ends,
        shape.last * work.layer + shape.last_lead * work.forward + m * work.head - ends,
        np.maximum(mean, shape.work) * work.link,
        shape.whole * m * (shape.layers * work.pace + work.turn),
        0 * m,
    ]
    least: Floats = SLACK * np.max(lower, axis=0)
    return least


def memory_bound(sizes: MemoryParts, shape: StepLayout) -> Floats:
    """Bytes that a rank holds at least: the one that keeps most of its microbatches, or the one
    that has most layers; of a state that is that of all stages, the mean."""
    mean = sizes.state / shape.stages
    kept = (
        shape.most_layers * sizes.static
        + shape.stashes * sizes.stash
        + shape.whole * sizes.rest
        + mean
    )
    least: Floats = SLACK * np.maximum(kept, shape.most * sizes.static)
    return least
