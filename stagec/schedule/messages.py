"""The sends and receives that a schedule implies, in one order for each ordered pair of ranks.

Libraries match the messages from one rank to another in the order in which both ends issue them,
whatever they carry. Sends leave in the order in which a rank's actions make what they carry;
receives are issued in that order, so one whose message is sent before that of an earlier action
stands with the latter. Two ranks in a V: rank 0 sends the activation of microbatch 2 and then the
gradient of microbatch 0; rank 1 needs the gradient first, and issues both receives before it.

A receive is posted as soon as the one before it from the same rank is done, so each rank is always
ready for the next message of every other. A send that waits for its receive then waits for earlier
messages to the same rank only: a replay that ends means that messages cannot deadlock, with sends
that do not wait (eager) as well as with sends that do (rendezvous).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Literal, TypeAlias

from stagec.schedule.action import Action, Actions, Kind, Placement, RankActions, steps
from stagec.support.diagnostics import error

Direction: TypeAlias = Literal["send", "recv"]
Payload: TypeAlias = Literal["activation", "gradient"]
#: The first fields of a message.
_End: TypeAlias = tuple[Direction, Payload, int, int, int]
#: sender, receiver
Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a transfer of a microbatch between neighbouring virtual stages.

    A receive stands before the action at `position` in the rank's list, a send right after it.
    `source` and `target` are virtual stages. Around an overlapped pair all receives come before its
    F and all sends after its B.
    """

    direction: Direction
    payload: Payload
    peer: int
    source: int
    target: int
    microbatch: int
    position: int

    @property
    def content(self) -> tuple[int, int, int]:
        """What both ends of a transfer agree on."""
        return self.source, self.target, self.microbatch


RankMessages: TypeAlias = tuple[Message, ...]


def ordered_messages(actions: Actions, placement: Placement) -> tuple[RankMessages, ...]:
    """The messages of every rank as it issues them. Raises `DiagnosticError` for a message that one
    end only has."""
    rows = dict(enumerate(actions))
    return tuple(_rank_messages(rank, rows, placement) for rank in rows)


def _rank_messages(
    rank: int, rows: Mapping[int, RankActions], placement: Placement
) -> RankMessages:
    sent = _sends(rank, rows[rank], placement)
    got = (message for message, _ in posted(rank, rows, placement))
    return tuple(sorted((*got, *sent), key=lambda m: (m.position, m.direction == "send")))


def receives_before(
    rank: int, rows: Mapping[int, RankActions], placement: Placement
) -> dict[int, list[Action]]:
    """By the place of the first action of a step: the actions whose receives stand before it, in
    order. `rows` are the lists of the rank and of its `senders`."""
    found: dict[int, list[Action]] = {}
    for message, action in posted(rank, rows, placement):
        found.setdefault(message.position, []).append(action)
    return found


def senders(rank: int, placement: Placement) -> tuple[int, ...]:
    """The ranks that send to a rank."""
    near_ranks = (
        near
        for stage, home in enumerate(placement.homes)
        if home.rank == rank
        for near in (placement.previous(stage), placement.following(stage))
    )
    ranks = {placement[near].rank for near in near_ranks if near is not None}
    return tuple(sorted(ranks - {rank}))


def posted(
    rank: int, rows: Mapping[int, RankActions], placement: Placement
) -> list[tuple[Message, Action]]:
    """The receives of a rank in the order in which it posts them, and the action of each. Raises
    `DiagnosticError` where a message is sent and not received, or received and not sent."""
    wanted = {m.content: (m, place) for m, place in _receives(rank, rows[rank], placement)}
    starts = [start for start, step in _steps(rows[rank]) for _ in step]
    found: list[tuple[int, Message, Action]] = []
    for peer in senders(rank, placement):
        sent = [m for m in _sends(peer, rows[peer], placement) if m.peer == rank]
        for message in sent:
            if message.content not in wanted:
                raise _unmatched(message, peer, rank, "is sent and not received")
        got = [wanted.pop(message.content) for message in sent]
        # of each message, the first action that needs it or a later one
        first = [*accumulate((place for _, place in reversed(got)), min)][::-1]
        for (receive, place), at in zip(got, first, strict=True):
            message = replace(receive, position=starts[at])
            found.append((at, message, rows[rank][place]))
    for receive, _ in wanted.values():
        raise _unmatched(receive, receive.peer, rank, "is received and not sent")
    return [(message, action) for _, message, action in sorted(found, key=itemgetter(0))]


def _unmatched(message: Message, sender: int, receiver: int, what: str) -> Exception:
    return error(
        f"the {message.payload} of microbatch {message.microbatch} from stage {message.source} on "
        f"rank {sender} to stage {message.target} on rank {receiver} {what}",
        remedy="give both ranks the actions of this microbatch",
    )


def _steps(row: RankActions) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """The steps of a row with the position of the first action of each."""
    position = 0
    for step in steps(row):
        yield position, step
        position += len(step)


def _sends(rank: int, row: RankActions, placement: Placement) -> list[Message]:
    ends = cache(partial(_end, "send", rank, placement))
    return [
        Message(*end, action.microbatch, start + len(step) - 1)
        for start, step in _steps(row)
        for action in step
        if (end := ends(action.kind, action.chunk)) is not None
    ]


def _receives(rank: int, row: RankActions, placement: Placement) -> Iterator[tuple[Message, int]]:
    """The receives of a rank as its actions need them, each with the place of its action."""
    ends = cache(partial(_end, "recv", rank, placement))
    for place, action in enumerate(row):
        if (end := ends(action.kind, action.chunk)) is not None:
            yield Message(*end, action.microbatch, place), place


def _end(direction: Direction, rank: int, at: Placement, kind: Kind, chunk: int) -> _End | None:
    """The message that actions of a kind send or receive, if they do."""
    if kind == "W":
        return None
    stage, forward = at.stage(rank, chunk), kind == "F"
    other = at.following(stage) if forward == (direction == "send") else at.previous(stage)
    if other is None or at[other].rank == rank:
        return None
    payload: Payload = "activation" if forward else "gradient"
    ends = (stage, other) if direction == "send" else (other, stage)
    return direction, payload, at[other].rank, *ends


def pairs(messages: tuple[RankMessages, ...]) -> dict[Pair, tuple[RankMessages, RankMessages]]:
    """The sends and the receives of each ordered pair of ranks, each in the order of its rank."""
    ends: defaultdict[Pair, tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for rank, row in enumerate(messages):
        for message in row:
            if message.direction == "send":
                ends[rank, message.peer][0].append(message)
            else:
                ends[message.peer, rank][1].append(message)
    return {pair: (tuple(sent), tuple(got)) for pair, (sent, got) in ends.items()}
