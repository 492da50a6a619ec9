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
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Literal, TypeAlias

from stagec.schedule.action import Action, Actions, Kind, Placement, RankActions, steps
from stagec.support.diagnostics import error

Direction: TypeAlias = Literal["send", "recv"]
Payload: TypeAlias = Literal["activation", "gradient"]
#: The identity of a transfer: its source and target virtual stages, and the microbatch.
Content: TypeAlias = tuple[int, int, int]
#: The peer rank, and the source and target virtual stages of a transfer.
_End: TypeAlias = tuple[int, int, int]
#: Sender and receiver.
Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a transfer of a microbatch between neighbouring virtual stages.

    A receive is before the action at `position` in the list of the rank, a send directly after it.
    `source` and `target` are virtual stages. All receives of an overlapped pair come before its F
    and all sends after its B.
    """

    direction: Direction
    payload: Payload
    peer: int
    source: int
    target: int
    microbatch: int
    position: int

    @property
    def content(self) -> Content:
        """The identity of the transfer."""
        return self.source, self.target, self.microbatch


RankMessages: TypeAlias = tuple[Message, ...]


def ordered_messages(actions: Actions, placement: Placement) -> tuple[RankMessages, ...]:
    """The messages of every rank in the order of issue. Raises `DiagnosticError` for a message with
    only one end."""
    rows = dict(enumerate(actions))
    return tuple(_rank_messages(rank, rows, placement) for rank in rows)


def _rank_messages(
    rank: int, rows: Mapping[int, RankActions], placement: Placement
) -> RankMessages:
    sent = _sends(rank, rows[rank], placement)
    got = (message for message, _ in posted(rank, rows, placement))
    return tuple(sorted((*got, *sent), key=lambda m: (m.position, m.direction == "send")))


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
    receives: dict[int, list[Action]] = {}
    for position, _, action in _posted(rank, row, sent, placement):
        receives.setdefault(position, []).append(action)
    return receives


def senders(rank: int, placement: Placement) -> tuple[int, ...]:
    """The ranks that send to a rank."""
    own = [stage for stage, home in enumerate(placement.homes) if home.rank == rank]
    beside = {*map(placement.previous, own), *map(placement.following, own)}
    return tuple(sorted({placement[stage].rank for stage in beside if stage is not None} - {rank}))


def posted(
    rank: int, rows: Mapping[int, RankActions], placement: Placement
) -> list[tuple[Message, Action]]:
    """The receives of a rank in the order in which it posts them, each with its action. Raises
    `DiagnosticError` like `receives_before`."""
    peers = senders(rank, placement)
    sent = {p: contents_sent(p, rows[p], placement).get(rank, []) for p in peers}
    messages: list[tuple[Message, Action]] = []
    for position, (source, target, microbatch), action in _posted(
        rank, rows[rank], sent, placement
    ):
        peer, payload = placement[source].rank, _payload(source, target)
        message = Message("recv", payload, peer, source, target, microbatch, position)
        messages.append((message, action))
    return messages


def _posted(
    rank: int, row: RankActions, sent: Mapping[int, Sequence[Content]], placement: Placement
) -> list[tuple[int, Content, Action]]:
    """The receives of a rank: the position of the first action of the step before which each is
    posted, the transfer, and the action that needs it."""
    wanted = {content: place for _, content, place in _contents("recv", rank, row, placement)}
    starts = [start for start, step in _steps(row) for _ in step]
    messages: list[tuple[int, Content, int]] = []
    for peer, contents in sent.items():
        for content in contents:
            if content not in wanted:
                raise _unmatched(content, peer, rank, "is sent and not received")
        got = [wanted.pop(content) for content in contents]
        # for each message, the first action that needs it or a later one
        first = [*accumulate(reversed(got), min)][::-1]
        messages += zip(first, contents, got, strict=True)
    for content in wanted:
        peer = placement[content[0]].rank
        raise _unmatched(content, peer, rank, "is received and not sent")
    messages.sort(key=itemgetter(0))
    return [(starts[at], content, row[place]) for at, content, place in messages]


def _unmatched(content: Content, sender: int, receiver: int, what: str) -> Exception:
    source, target, microbatch = content
    return error(
        f"the {_payload(source, target)} of microbatch {microbatch} from stage {source} on "
        f"rank {sender} to stage {target} on rank {receiver} {what}",
        remedy="add the actions of this microbatch to both ranks",
    )


def _payload(source: int, target: int) -> Payload:
    return "activation" if source < target else "gradient"


def _steps(row: RankActions) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """The steps of a row with the position of the first action of each."""
    position = 0
    for step in steps(row):
        yield position, step
        position += len(step)


def _sends(rank: int, row: RankActions, placement: Placement) -> list[Message]:
    leaves = [start + len(step) - 1 for start, step in _steps(row) for _ in step]
    return [
        Message("send", _payload(source, target), peer, source, target, number, leaves[place])
        for peer, (source, target, number), place in _contents("send", rank, row, placement)
    ]


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
