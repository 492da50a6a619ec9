"""The turns of a pipeline stage, or of a rank without a pipeline: what it runs for which
microbatches, in order, as the program is unrolled from a schedule.

A turn is one action of the schedule, an overlapped pair of two, or a receive, which is posted
before an action. Without a schedule it is all of a microbatch.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from stagec.schedule.action import Action, RankActions, steps
from stagec.schedule.base import Schedule
from stagec.schedule.messages import contents_sent, receives_before, senders

#: Which nodes a turn has: whether they are posted receives, of forward (None: of any phase), and
#: the chunk.
Part = tuple[bool, bool | None, int]


@dataclass(frozen=True)
class Turn:
    """What runs at once: `kind` distinguishes it from other turns of a rank, `parts[i]` are the
    nodes that it has of `microbatches[i]`. In an overlapped pair nodes of two actions
    alternate."""

    kind: Hashable
    parts: tuple[tuple[Part, ...], ...]
    microbatches: tuple[int, ...]
    overlapped: bool = False


@dataclass(frozen=True)
class Pipelining:
    """How a job goes through its microbatches: the stages are along `axis`."""

    axis: str
    schedule: Schedule

    def turns(self, stage: int, stages: int, chunks: int, microbatches: int) -> list[Turn]:
        """The turns of a stage. Raises `DiagnosticError` for sizes that the schedule has not."""
        self.schedule.check(stages, microbatches, chunks)
        placement = self.schedule.placement(stages, chunks)

        def row(rank: int) -> RankActions:
            return tuple(self.schedule.rank_actions(rank, stages, microbatches, chunks))

        sent = {
            peer: contents_sent(peer, row(peer), placement).get(stage, ())
            for peer in senders(stage, placement)
        }
        mine = row(stage)
        return [*_turns(mine, receives_before(stage, mine, sent, placement))]


def _turns(row: Sequence[Action], receives: dict[int, list[Action]]) -> Iterator[Turn]:
    place = 0
    for step in steps(row):
        for action in receives.get(place, ()):
            part = True, action.kind == "F", action.chunk
            yield Turn(part, ((part,),), (action.microbatch,))
        place += len(step)
        numbers = tuple(dict.fromkeys(action.microbatch for action in step))
        kind = tuple((a.kind, a.split, a.chunk, numbers.index(a.microbatch)) for a in step)
        parts = tuple(
            tuple((False, a.kind == "F", a.chunk) for a in step if a.microbatch == number)
            for number in numbers
        )
        yield Turn(kind, parts, numbers, len(step) > 1)


def one_after_the_other(microbatches: int) -> list[Turn]:
    """The turns of a rank without a pipeline."""
    parts = (((False, None, 0),),)
    return [Turn("all", parts, (i,)) for i in range(microbatches)]
