"""Figures of batches of rollouts that follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from operator import mul
from typing import TYPE_CHECKING, Any

from stagec.answers.time.table import seconds_text
from stagec.serving.simulate import Simulation
from stagec.serving.step_times import SECOND

if TYPE_CHECKING:
    from stagec.answers.requests.run import Pool


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """A batch of rollouts: when it `begins`, for how many `seconds` it runs, and how many pass from
    its end until the next one begins (None after the last one); when it is `trained`. Replicas had
    steps for a share `busy` of its time. The batch before left `carried` requests. Its answers have
    so many `tokens`, of weights that are `stale` by so many updates on average and `oldest` at
    most."""

    begins: float
    seconds: float
    waits: float | None
    trained: float
    busy: float
    carried: int
    tokens: int
    stale: float
    oldest: int


@dataclass(frozen=True, slots=True)
class RolloutsFigures:
    """Batches of rollouts that follow each other: `count` requests are at the server at the begin
    of each, of which `quota` are trained, in `train` seconds; servers get weights in `update`
    seconds."""

    count: int
    quota: int
    ahead: int
    train: float
    update: float
    batches: Sequence[RolloutFigures]

    @property
    def seconds(self) -> float:
        """The mean time of an iteration, from the end of a training to the next one's."""
        first, last = self.batches[0], self.batches[-1]
        return (last.trained - first.trained) / (len(self.batches) - 1)

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "batches"}
        each = [asdict(batch) for batch in self.batches]
        return {**named, "seconds_per_iteration": self.seconds, "batches": each}

    def line(self) -> str:
        """How long an iteration takes, and what it spends on training."""
        return (
            f"An iteration takes {seconds_text(self.seconds)} on average, of which training is "
            f"{self.train / self.seconds:.1%}; servers get weights in {seconds_text(self.update)}"
        )

    def cells(self) -> Iterator[tuple[str, ...]]:
        """A row for each batch, under `ROLLOUT_HEADS`."""
        for number, b in enumerate(self.batches):
            waits = "" if b.waits is None else seconds_text(b.waits)
            times = seconds_text(b.begins), seconds_text(b.seconds), f"{b.busy:.1%}", waits
            counts = f"{b.carried:,}", f"{b.tokens:,}", f"{b.stale:.2f}", f"{b.oldest:,}"
            yield str(number), *times, seconds_text(b.trained), *counts


#: Heads of `RolloutsFigures.cells`.
ROLLOUT_HEADS = (
    *("batch", "begins", "runs", "busy", "then waits", "trained at", "carried over"),
    *("tokens", "stale", "oldest"),
)


def rollouts_figures(run: Simulation, pools: Sequence[Pool]) -> RolloutsFigures | None:
    """The batches of rollouts that ran."""
    rollouts = run.rollouts
    if rollouts is None:
        return None
    batches, each = rollouts.batches, list[RolloutFigures]()
    ranks = [pool.ranks for pool in pools]
    for number, b in enumerate(batches):
        following = batches[number + 1].begin if number + 1 < len(batches) else None
        busy, held = (sum(map(mul, ranks, of)) for of in (b.busy, b.held))
        each.append(
            RolloutFigures(
                b.begin / SECOND,
                (b.end - b.begin) / SECOND,
                None if following is None else (following - b.end) / SECOND,
                b.trained / SECOND,
                busy / max(1, held),
                b.carried,
                b.tokens,
                b.stale,
                b.oldest,
            )
        )
    times = rollouts.train / SECOND, rollouts.update / SECOND
    return RolloutsFigures(rollouts.count, rollouts.quota, rollouts.ahead, *times, each)
