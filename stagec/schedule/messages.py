"""The sends and receives of a schedule, in one order for each ordered pair of ranks.

Libraries match the messages from one rank to another in the order in which both ends issue them,
whatever their content. Sends are issued in the order in which actions of a rank make their content,
and receives in the order of the sends. So a receive whose message is sent before that of an earlier
action is posted together with the latter. Two ranks in a V: rank 0 sends the activation of
microbatch 2 and then the gradient of microbatch 0; rank 1 needs the gradient first, and posts both
receives before it.

A receive is posted as soon as the previous one from the same rank is done, so each rank is always
ready for the next message of every other rank. A send that waits for its receive then only waits
for earlier messages to the same rank. So if a replay ends, messages cannot deadlock, neither with
sends that do not wait (eager) nor with sends that do (rendezvous).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Literal, TypeAlias

from stagec.schedule.action import Action, Actions, Kind, Placement, RankActions, steps
from stagec.support.diagnostics import error

Direction: TypeAlias = Literal["send", "recv"]
#: The identity of a transfer: its source and target virtual stages, and the microbatch.
Content: TypeAlias = tuple[int, int, int]
#: The peer rank, and the source and target virtual stages of a transfer.
_End: TypeAlias = tuple[int, int, int]


def check_messages(actions: Actions, placement: Placement) -> None:
    """Raise `DiagnosticError` for a message with only one end."""
    for rank, row in enumerate(actions):
        sends = {p: contents_sent(p, actions[p], placement) for p in senders(rank, placement)}
        receives_before(rank, row, {p: sent.get(rank, ()) for p, sent in sends.items()}, placement)


def contents_sent(rank: int, row: RankActions, placement: Placement) -> dict[int, list[Content]]:
    """The transfers from a rank to each other rank, in order."""
    contents: defaultdict[int, list[Content]] = defaultdict(list)
    for peer, content, _ in _contents("send", rank, row, placement):
        contents[peer].append(content)
    return contents


def receives_before(
    rank: int, row: RankActions, sent: Mapping[int, Sequence[Content]], placement: Placement
) -> dict[int, list[Action]]:
    """Maps the position of the first action of a step to the actions whose receives are posted
    before it, in order. `sent` are the transfers to the rank from each of its `senders`. Raises
    `DiagnosticError` for a message that is sent but not received, or received but not sent."""
    wanted = {content: place for _, content, place in _contents("recv", rank, row, placement)}
    starts: list[int] = []
    for step in steps(row):
        starts += [len(starts)] * len(step)
    needed: list[tuple[int, int]] = []  # the action by which each is posted, and its own
    for peer, contents in sent.items():
        for content in contents:
            if content not in wanted:
                raise _unmatched(content, peer, rank, "is sent and not received")
        got = [wanted.pop(content) for content in contents]
        # for each message, the first action that needs it or a later one
        first = [*accumulate(reversed(got), min)][::-1]
        needed += zip(first, got, strict=True)
    for content in wanted:
        peer = placement[content[0]].rank
        raise _unmatched(content, peer, rank, "is received and not sent")
    receives: dict[int, list[Action]] = {}
    for first_action, own in sorted(needed, key=itemgetter(0)):
        receives.setdefault(starts[first_action], []).append(row[own])
    return receives


def senders(rank: int, placement: Placement) -> tuple[int, ...]:
    """The ranks that send to a rank."""
    own = [stage for stage, home in enumerate(placement.homes) if home.rank == rank]
    beside = {*map(placement.previous, own), *map(placement.following, own)}
    return tuple(sorted({placement[stage].rank for stage in beside if stage is not None} - {rank}))


def _unmatched(content: Content, sender: int, receiver: int, what: str) -> Exception:
    source, target, microbatch = content
    payload = "activation" if source < target else "gradient"
    return error(
        f"the {payload} of microbatch {microbatch} from stage {source} on "
        f"rank {sender} to stage {target} on rank {receiver} {what}",
        remedy="add the actions of this microbatch to both ranks",
    )


def _contents(
    direction: Direction, rank: int, row: RankActions, placement: Placement
) -> Iterator[tuple[int, Content, int]]:
    """The transfers that the actions of a rank send or receive: the peer rank, the transfer, and
    the position of the action."""
    ends = cache(partial(_end, direction, rank, placement))
    for place, action in enumerate(row):
        if (end := ends(action.kind, action.chunk)) is not None:
            peer, source, target = end
            yield peer, (source, target, action.microbatch), place


def _end(direction: Direction, rank: int, at: Placement, kind: Kind, chunk: int) -> _End | None:
    """The end of the transfers of actions of a kind and chunk; None if they have none."""
    if kind == "W":
        return None
    stage, forward = at.stage(rank, chunk), kind == "F"
    other = at.following(stage) if forward == (direction == "send") else at.previous(stage)
    if other is None or at[other].rank == rank:
        return None
    return (at[other].rank, *((stage, other) if direction == "send" else (other, stage)))
