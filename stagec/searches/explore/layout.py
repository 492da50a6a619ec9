"""The layout of a step by the schedule of its pipeline: the layers that each rank runs, and those
whose activations it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from stagec.schedule.action import Placement, round_robin
from stagec.schedule.base import Schedule
from stagec.schedule.registry import SCHEDULES
from stagec.sharding.stages import evenly
from stagec.support.diagnostics import DiagnosticError

#: Microbatches for each stage whose actions are counted: with more, no more are in flight.
_WARM = 4


class StepLayout(NamedTuple):
    """A step: the repeated `layers` of the model, stages, chunks of a rank, microbatches. Each
    field is a number, or an array of them.

    Work is in layers of one microbatch, forward and backward: `work` is the most that a rank runs,
    `busy` the most including what others run before its first and after its last layer, `last` the
    same for the rank with the head. Where `busy` and `last` leave out other ranks, `lead` and
    `last_lead` are the layers whose forward others run before these two ranks begin. `most_layers`
    are the layers of the rank that keeps most activations, `stashes` those whose activations it
    keeps at once, counted for each microbatch. `most` are the layers of the rank that has most.
    `whole` is 1 if one stage runs the whole model.
    """

    layers: Any
    stages: Any
    chunks: Any
    microbatches: Any
    work: Any = 0
    busy: Any = 0
    last: Any = 0
    lead: Any = 0
    last_lead: Any = 0
    most_layers: Any = 0
    stashes: Any = 0
    most: Any = 0
    whole: Any = 0


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model: the number before the repeated layers, of these (`many`), and after
    them. Of `mixed` layers the order is not known."""

    before: int
    many: int
    after: int = 0
    mixed: bool = False

    @property
    def total(self) -> int:
        """The number of all layers."""
        return self.before + self.many + self.after

    def of_parts(self, parts: Sequence[int]) -> list[int]:
        """A lower bound of the repeated layers in each stage, given the layers of each."""
        counts: list[int] = []
        start = 0
        for size in parts:
            first, last = max(start, self.before), min(start + size, self.before + self.many)
            least = size - (self.total - self.many) if self.mixed else last - first
            counts.append(max(0, least))
            start += size
        return counts


@dataclass(frozen=True, slots=True)
class RankLayers:
    """The repeated layers of a rank: `own` is their number, `kept` the most whose activations it
    keeps at once, counted for each microbatch. `first` and `last` say whether it runs all layers
    before, or after, the repeated ones. At the peak of activations a backward of `begins` layers
    begins."""

    own: int
    kept: int
    first: bool
    last: bool
    begins: int


def rank_layers(
    layers: Layers, name: str, stages: int, count: int, given: int, cut: tuple[int, ...]
) -> tuple[RankLayers, ...]:
    """The layers of each rank of a pipeline; empty if its schedule is not known, or there are too
    few layers. Arguments are those of `layer_layout`."""
    return _rank_layers(layers, name, stages, min(count, _WARM * stages), given, cut)


@lru_cache(1024)
def _rank_layers(
    layers: Layers, name: str, stages: int, count: int, given: int, cut: tuple[int, ...]
) -> tuple[RankLayers, ...]:
    schedule = SCHEDULES.get(name)
    if schedule is None:
        return ()
    chunks = given or schedule.default_chunks
    placement = schedule.placement(stages, chunks)
    depth = placement.depth
    try:
        shares = cut or evenly(layers.total, depth)
    except DiagnosticError:
        return ()
    parts = layers.of_parts(shares)
    own, ends = [0] * stages, set[tuple[int, int]]()
    for number, home in enumerate(placement.homes):
        own[home.rank] += parts[number % depth]
        ends.add((home.rank, number % depth))
    kept = _kept(schedule, placement, stages, count, chunks, parts)
    whole = shares[0] >= layers.before, shares[-1] >= layers.after
    in_order = count > 1 and is_in_order(schedule, stages, chunks)
    ranks: list[RankLayers] = []
    for rank in range(stages):
        first, last = (whole[i] and (rank, part) in ends for i, part in ((0, 0), (1, depth - 1)))
        most, begins = kept[rank]
        ranks.append(RankLayers(own[rank], most, first, last, begins if in_order else 0))
    return tuple(ranks)


def is_in_order(schedule: Schedule, stages: int, chunks: int) -> bool:
    """Whether chunks are placed round robin, and a backward is one action."""
    placed = schedule.placement(stages, chunks) == round_robin(stages, chunks)
    return placed and not schedule.splits_weight_gradient


def layer_layout(
    layers: Layers, name: str, stages: int, count: int, given: int, cut: tuple[int, ...]
) -> StepLayout:
    """The layout of the schedule `name` with `stages` stages, `count` microbatches and `given`
    chunks (0: its own number); `cut` has the layers of each stage, if they are given. For the
    schedule of a plug-in only means are known."""
    many = layers.many
    schedule: Schedule | None = SCHEDULES.get(name)
    if stages == 1:
        return StepLayout(many, 1, 1, count, many * count, 0, 0, 0, 0, many, many, many, 1)
    chunks = given or (schedule.default_chunks if schedule else 1)
    plain = StepLayout(many, stages, chunks, count)
    ranks = rank_layers(layers, name, stages, count, given, cut)
    if schedule is None or not ranks:
        return plain
    most = max(ranks, key=lambda r: (r.kept, r.own))
    own = [r.own for r in ranks]
    holds = plain._replace(most_layers=most.own, stashes=most.kept, most=max(own))
    placement = schedule.placement(stages, chunks)
    if placement.copies > 1:  # each copy runs some of the microbatches
        return holds
    parts = layers.of_parts(cut or evenly(layers.total, placement.depth))
    homes = [home.rank for home in placement.homes]
    before = [sum(parts[: homes.index(rank)]) for rank in range(stages)]
    if is_in_order(schedule, stages, chunks):  # backward runs through the same layers afterwards
        busy = [(count * mine + fill, 0) for mine, fill in zip(own, before, strict=True)]
    else:
        busy = [(count * mine, fill) for mine, fill in zip(own, before, strict=True)]
    (most_busy, lead), (last, last_lead) = max(busy), busy[homes[-1]]
    return holds._replace(
        work=count * max(own), busy=most_busy, last=last, lead=lead, last_lead=last_lead
    )


def _kept(
    schedule: Schedule,
    placement: Placement,
    stages: int,
    count: int,
    chunks: int,
    parts: Sequence[int],
) -> list[tuple[int, int]]:
    """For each rank, the most layers whose activations it keeps at once, counted for each
    microbatch, and the layers of the largest backward that begins then."""
    peaks: list[tuple[int, int]] = []
    for rank in range(stages):
        now = most = begins = 0
        homes = ((chunk, placement.stage(rank, chunk)) for chunk in placement.chunks(rank))
        sizes = {chunk: parts[stage % placement.depth] for chunk, stage in homes}
        for action in schedule.rank_actions(rank, stages, count, chunks):
            size = sizes[action.chunk]
            if action.kind == "F":
                now += size
                most, begins = (now, 0) if now > most else (most, begins)
            elif action.kind == "B":
                begins = max(begins, size) if now == most else begins
                now -= size
        peaks.append((most, begins))
    return peaks
