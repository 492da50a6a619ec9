"""The sends and receives that a schedule implies, and the proof that both ends order them alike.

A channel is a pair of ranks, a direction, and what is sent: activations and gradients travel apart.
Messages of a channel carry no number of their own, so both ends must list them in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TypeAlias

from stagec.schedule.action import Action, Actions, Placement, RankActions, steps
from stagec.support.diagnostics import error

Payload: TypeAlias = Literal["activation", "gradient"]
#: sender, receiver, payload
Channel: TypeAlias = tuple[int, int, Payload]


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a transfer of a microbatch between neighbouring virtual stages.

    A receive comes right before the action at `position` in the rank's list, a send right after
    it. `source` and `target` are virtual stages. Around an overlapped pair all receives come before
    its F and all sends after its B.
    """

    direction: Literal["send", "recv"]
    payload: Payload
    peer: int
    source: int
    target: int
    microbatch: int
    position: int


RankMessages: TypeAlias = tuple[Message, ...]


def in_order_messages(actions: Actions, placement: Placement) -> tuple[RankMessages, ...]:
    """The messages of every rank in the order of its actions, proved to match.

    With sends that do not block, matching channels and a replay without deadlock mean that the
    messages cannot deadlock either. Raises `DiagnosticError` where the ends of a channel disagree.
    """
    messages = tuple(
        tuple(_rank_messages(rank, row, placement)) for rank, row in enumerate(actions)
    )
    check_in_order(messages)
    return messages


def _rank_messages(rank: int, row: RankActions, placement: Placement) -> Iterator[Message]:
    position = 0
    for step in steps(row):
        last = position + len(step) - 1
        for action in step:
            yield from _receive(rank, action, placement, position)
        for action in step:
            yield from _send(rank, action, placement, last)
        position = last + 1


def _receive(rank: int, action: Action, at: Placement, position: int) -> Iterator[Message]:
    if action.kind == "W":
        return
    stage = at.stage(rank, action.chunk)
    forward = action.kind == "F"
    source = at.previous(stage) if forward else at.following(stage)
    if source is not None and at[source].rank != rank:
        payload: Payload = "activation" if forward else "gradient"
        peer = at[source].rank
        yield Message("recv", payload, peer, source, stage, action.microbatch, position)


def _send(rank: int, action: Action, at: Placement, position: int) -> Iterator[Message]:
    if action.kind == "W":
        return
    stage = at.stage(rank, action.chunk)
    forward = action.kind == "F"
    target = at.following(stage) if forward else at.previous(stage)
    if target is not None and at[target].rank != rank:
        payload: Payload = "activation" if forward else "gradient"
        peer = at[target].rank
        yield Message("send", payload, peer, stage, target, action.microbatch, position)


def channels(
    messages: tuple[RankMessages, ...],
) -> dict[Channel, tuple[RankMessages, RankMessages]]:
    """The sends and the receives of each channel, each in the order of its rank."""
    ends: dict[Channel, tuple[list[Message], list[Message]]] = {}
    for rank, row in enumerate(messages):
        for message in row:
            sends = message.direction == "send"
            ranks = (rank, message.peer) if sends else (message.peer, rank)
            end = ends.setdefault((*ranks, message.payload), ([], []))
            end[0 if sends else 1].append(message)
    return {channel: (tuple(sent), tuple(got)) for channel, (sent, got) in ends.items()}


def check_in_order(messages: tuple[RankMessages, ...]) -> None:
    """Raise `DiagnosticError` unless each channel's sends and receives come in the same order."""
    for (sender, receiver, payload), (sent, received) in channels(messages).items():
        for number, (send, recv) in enumerate(zip_longest(sent, received)):
            if _content(send) != _content(recv):
                raise error(
                    f"message {number} of the {payload}s from rank {sender} to rank {receiver}: "
                    f"{_text(send)} is sent, {_text(recv)} is received",
                    remedy="order the actions of both ranks alike",
                )


def _content(message: Message | None) -> tuple[int, int, int] | None:
    return (message.source, message.target, message.microbatch) if message else None


def _text(message: Message | None) -> str:
    if message is None:
        return "nothing"
    return f"microbatch {message.microbatch} of stage {message.source}"
