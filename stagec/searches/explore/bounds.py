"""Lower bounds of the time and of the memory of a step, for many jobs at once, as arrays.

The time and memory of a microbatch come from *probes*: jobs with few layers, on the ranks that a
microbatch needs, which the compiler lowers and the clock replays like any other job. A point of a
space is such a probe in more stages and microbatches, so it takes at least

    1F1B       m (u + head) + (p - 1) u       u: a stage's layers, p stages, m microbatches
    ZB-H1      m (u + head) + (p - 1) f       f: their forward
    one stage  m * turn                       turn: from one microbatch to the next
    any        m * whole / p                  whole: the model's layers and head

No model of ops, machines or placements is repeated here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagec.searches.explore.layout import StepLayout

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a microbatch, in seconds; 0 where a figure is not known.

    `layer`: forward and backward of a further repeated layer; `forward`: its forward alone. `rest`:
    all outside of the repeated layers, of which `head` runs on the last stage. `cut` and `back`:
    the longest waits between two computations of forward and of backward, which may be hidden at
    the end of a stage. `link`: a further layer on the stream of communication that it uses most.
    `pace` and `turn`: the least time from one microbatch to the next where a rank runs the whole
    model, for each further layer and for the rest. `again`: an upper bound of what a layer
    recomputes, which a rank may do before its input has arrived.
    """

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
    """Bytes on a rank: `static`, parameters, gradients and optimizer state of a layer; `stash`, the
    activations of a layer for a microbatch; `rest`, all else where one stage runs the whole model.
    `state` is the static memory of all stages together, where that of a layer is not known."""

    static: Floats
    stash: Floats
    rest: Floats
    state: Floats | float = 0.0


#: Tolerance for rounding, and for the extrapolation from few layers to many.
SLACK = 1 - 1e-4


def columns(layouts: Sequence[StepLayout]) -> Floats:
    """Layouts as an array with a row for each field."""
    rows: Floats = np.array(layouts, dtype=np.float64).reshape(-1, len(StepLayout._fields)).T
    return rows


def time_bound(work: Work, shape: StepLayout) -> Floats:
    """A lower bound of the seconds of a step: the largest of several.

    The work of a rank, and the chunks that others run before its first and after its last. Where
    backward is split, it is not known which part of it is the gradient of inputs, for which other
    ranks wait; of other ranks only forward counts then. The mean work of all ranks. Each action of
    a pipeline may hide a wait at its end, which is subtracted. The communication of one stream,
    which runs one after the other. The turns of microbatches: one that ends with a reduction over
    data-parallel ranks delays the first gather of the next.
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
    """A lower bound of the peak in bytes: that of the rank with most activations, or of the rank
    with most layers. A state of all stages together counts with its mean."""
    mean = sizes.state / shape.stages
    kept = (
        shape.most_layers * sizes.static
        + shape.stashes * sizes.stash
        + shape.whole * sizes.rest
        + mean
    )
    least: Floats = SLACK * np.maximum(kept, shape.most * sizes.static)
    return least
