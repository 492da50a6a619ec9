"""What is no schedule is refused, by name and with a way out: sizes, lists, messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import pytest

from stagec.schedule.action import (
    Action,
    Actions,
    Placement,
    RankActions,
    StageChunk,
    round_robin,
    steps,
)
from stagec.schedule.base import Schedule
from stagec.schedule.messages import check_messages, contents_sent, receives_before, senders
from stagec.schedule.registry import SCHEDULES, find_schedule, known_schedules
from stagec.schedule.simulate import replay
from stagec.schedule.validate import check_complete, check_schedule, prove
from stagec.support.diagnostics import Diagnostic, DiagnosticError
from tests.support import LONG, stagec

NAMES = list(SCHEDULES)


def refused(run: Callable[..., object], *args: object) -> Diagnostic:
    """The one diagnostic of something that must fail; it says what to do."""
    with pytest.raises(DiagnosticError) as raised:
        run(*args)
    (diagnostic,) = raised.value.diagnostics
    assert diagnostic.remedy
    return diagnostic


# -- messages --------------------------------------------------------------------------------------

Direction = Literal["send", "recv"]


@dataclass(frozen=True)
class Message:
    """One end of a transfer of a microbatch between neighbouring virtual stages. A receive is
    before the action at `position` in the list of the rank, a send directly after it."""

    direction: Direction
    payload: str
    peer: int
    source: int
    target: int
    microbatch: int
    position: int

    @property
    def content(self) -> tuple[int, int, int]:
        return self.source, self.target, self.microbatch


def message_of(
    direction: Direction, rank: int, action: Action, position: int, at: Placement
) -> Message | None:
    """The end of the transfer of an action; None if it has none."""
    stage, sends = at.stage(rank, action.chunk), direction == "send"
    other = at.following(stage) if (action.kind == "F") == sends else at.previous(stage)
    if action.kind == "W" or other is None or at[other].rank == rank:
        return None
    source, target = (stage, other) if sends else (other, stage)
    payload = "activation" if source < target else "gradient"
    return Message(direction, payload, at[other].rank, source, target, action.microbatch, position)


def posted(rank: int, rows: Actions, at: Placement) -> Iterator[tuple[Message, Action]]:
    """The receives of a rank in the order in which it posts them, each with its action."""
    sent = {p: contents_sent(p, rows[p], at).get(rank, []) for p in senders(rank, at)}
    for position, actions in receives_before(rank, rows[rank], sent, at).items():
        for action in actions:
            message = message_of("recv", rank, action, position, at)
            assert message is not None
            yield message, action


def sends(rank: int, row: RankActions, at: Placement) -> Iterator[Message]:
    """The sends that a rank issues, in order, after its actions."""
    end = 0
    for step in steps(row):
        end += len(step)
        each = (message_of("send", rank, action, end - 1, at) for action in step)
        yield from filter(None, each)


def ordered_messages(rows: Actions, at: Placement) -> list[list[Message]]:
    """The messages of every rank in the order of issue."""
    every = (
        [*(m for m, _ in posted(rank, rows, at)), *sends(rank, row, at)]
        for rank, row in enumerate(rows)
    )
    return [sorted(each, key=lambda m: (m.position, m.direction == "send")) for each in every]


def pairs(rows: list[list[Message]]) -> Iterator[tuple[int, int, list[Message], list[Message]]]:
    """Each ordered pair of ranks, with its sends and receives in the order of each."""
    ends: dict[tuple[int, int], tuple[list[Message], list[Message]]] = {}
    for rank, row in enumerate(rows):
        for m in row:
            pair = (rank, m.peer) if m.direction == "send" else (m.peer, rank)
            ends.setdefault(pair, ([], []))[m.direction == "recv"].append(m)
    return ((*pair, *both) for pair, both in ends.items())


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes", "message", "remedy"),
    [
        ("gpipe", (0, 1, 1), "gpipe with 0 stages", "at least 1"),
        ("1f1b", (4, 0, 1), "1f1b with 0 microbatches", "at least 1"),
        ("1f1b", (4, 8, 2), "1 chunk per rank, found 2", "give 1"),
        ("zb-h1", (4, 8, 2), "1 chunk per rank, found 2", "give 1"),
        ("zbv", (4, 8, 1), "2 chunks per rank, found 1", "give 2"),
        ("interleaved", (4, 8, 0), "interleaved with 0 chunks", "at least 1"),
        ("interleaved", (4, 8, 1), "at least 2 chunks per rank: 1 given", "'1f1b'"),
        ("interleaved", (4, 10, 2), "a multiple of 4 microbatches", "give 8 or 12 microbatches"),
        ("interleaved", (4, 3, 2), "a multiple of 4 microbatches", "give 4 microbatches"),
        ("1f1b", (1000, 100_000, 1), "has 200,000,000 actions", "at most 500 microbatches"),
        ("zbv", (10**7, 1, 2), "has 60,000,000 actions", "give fewer stages"),
        ("looped-bfs", (4, 8, 1), "at least 2 chunks per rank: 1 given", "'gpipe'"),
        ("interleaved-zb", (4, 8, 1), "at least 2 chunks per rank: 1 given", "'zb-h1'"),
        ("interleaved-zb", (4, 9, 2), "microbatches in 2 equal groups for 4", "give 8 microb"),
        ("dualpipe", (1, 8, 2), "an even number of stages: 1 given", "give 2 stages"),
        ("dualpipe", (5, 20, 2), "an even number of stages: 5 given", "give 4 or 6 stages"),
        ("dualpipe", (4, 6, 2), "at least 8 microbatches for 4 stages", "give 8 microbatches"),
        ("dualpipe", (4, 11, 2), "an even number", "give 12 microbatches"),
        ("dualpipev", (4, 7, 2), "at least 8 microbatches", "8 microbatches, or at most 3 stages"),
        ("dualpipev", (1, 1, 2), "at least 2 microbatches for 1 stage", "give 2 microbatches"),
    ],
)
def test_sizes_that_do_not_go(
    name: str, sizes: tuple[int, int, int], message: str, remedy: str
) -> None:
    diagnostic = refused(lambda: SCHEDULES[name].actions(*sizes))
    assert message in diagnostic.message
    assert remedy in (diagnostic.remedy or "")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("interleaved", (4, 8, 2)),
        ("interleaved", (4, 12, 2)),
        ("interleaved", (4, 4, 2)),
        ("dualpipe", (2, 8, 2)),
        ("dualpipe", (4, 8, 2)),
        ("dualpipe", (4, 12, 2)),
        ("dualpipev", (3, 7, 2)),
        ("dualpipev", (1, 2, 2)),
    ],
)
def test_what_a_remedy_names_is_valid(name: str, sizes: tuple[int, int, int]) -> None:
    assert SCHEDULES[name].actions(*sizes)


# -- names -----------------------------------------------------------------------------------------


class Hurried(Schedule):
    """A user's own: a forward and its backward, one microbatch at a time."""

    name = "hurried"
    summary = "one microbatch at a time"

    def rank_actions(
        self, rank: int, stages: int, microbatches: int, chunks: int
    ) -> Iterable[Action]:
        for k in range(microbatches):
            yield Action("F", 0, k)
            yield Action("B", 0, k)


def test_names() -> None:
    assert find_schedule("1f1b") is SCHEDULES["1f1b"]
    assert refused(find_schedule, "zb-h2").remedy == "did you mean 'zb-h1'?"
    assert "dualpipev" in (refused(find_schedule, "x").remedy or "")


def test_a_schedule_of_ones_own() -> None:
    own = Hurried()
    assert find_schedule("hurried", [own]) is own
    assert refused(known_schedules, [own, Hurried()]).message.endswith("'hurried'")
    actions, at = own.actions(3, 4, 1), own.placement(3, 1)
    check_schedule(actions, at, 4)
    timeline = replay(actions, at)
    assert own.bubble(timeline) == 4 * 9 - 4 * 3
    assert timeline.in_flight(0) == 1
    assert own.closed_form(3, 4, 1).bubble is None


# -- lists -----------------------------------------------------------------------------------------

STAGES, MICROBATCHES = 3, 4


def lists(name: str) -> tuple[Actions, Placement]:
    schedule = SCHEDULES[name]
    stages, m = (2, 4) if name == "dualpipe" else (STAGES, 6)
    v = schedule.default_chunks
    return schedule.actions(stages, m, v), schedule.placement(stages, v)


def with_row(actions: Actions, rank: int, row: Iterable[Action]) -> Actions:
    return (*actions[:rank], tuple(row), *actions[rank + 1 :])


def swapped(row: RankActions, i: int, j: int) -> RankActions:
    out = list(row)
    out[i], out[j] = out[j], out[i]
    return tuple(out)


def count(actions: Actions) -> int:
    return 1 + max(a.microbatch for row in actions for a in row)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_action_is_named(name: str) -> None:
    actions, at = lists(name)
    for rank, row in enumerate(actions):
        for i, action in enumerate(row):
            if action.kind == "W" or action.pair is not None:
                continue
            broken = with_row(actions, rank, row[:i] + row[i + 1 :])
            actual = refused(check_complete, broken, at, count(actions))
            assert f"rank {rank}" in actual.message
            assert f"microbatch {action.microbatch}" in actual.message


@pytest.mark.parametrize("name", NAMES)
def test_swaps_that_neighbours_notice(name: str) -> None:
    """Two forwards, or two backwards, of a chunk that sends them: a ring waits, or receives are
    posted in the new order of the sends."""
    actions, at = lists(name)
    waits = follows = 0
    for rank, row in enumerate(actions):
        for i, j in combinations(range(len(row)), 2):
            a, b = row[i], row[j]
            if (a.kind, a.chunk) == (b.kind, b.chunk) and talks(at, rank, a):
                moved = replace(a, microbatch=b.microbatch), replace(b, microbatch=a.microbatch)
                other = list(row)
                other[i], other[j] = moved
                swapped_lists = with_row(actions, rank, other)
                try:
                    check_schedule(swapped_lists, at, count(actions))
                except DiagnosticError:
                    waits += 1
                    continue
                follows += 1
                for *_, out, into in pairs(ordered_messages(swapped_lists, at)):
                    assert [x.content for x in out] == [x.content for x in into]
    assert waits + follows > 5
    assert follows


def talks(at: Placement, rank: int, action: Action) -> bool:
    stage = at.stage(rank, action.chunk)
    around = (at.previous(stage), at.following(stage))
    return action.kind in "FB" and any(s is not None and at[s].rank != rank for s in around)


def test_backward_before_forward_on_one_rank() -> None:
    actions, at = lists("gpipe")
    row = actions[2]
    broken = with_row(actions, 2, swapped(row, 0, 6))
    actual = refused(replay, broken, at)
    assert "deadlocks" in actual.message
    assert "2 -> 2" in actual.message
    assert "rank 2 is at B(chunk 0, microbatch 0) and waits for F(chunk 0, microbatch 0) later" in (
        actual.notes[0].message
    )


def test_a_ring_of_two_ranks_is_named() -> None:
    down = (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1))
    up = (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1))
    waits = (down[0], down[2], down[1], down[3])
    at = round_robin(2)
    replay((waits, up), at)
    late = (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0, 0))
    actual = refused(replay, (waits, late), at)
    assert "ranks wait for each other in a ring, 0 -> 1 -> 0" in actual.message
    assert [n.message for n in actual.notes] == [
        "rank 0 is at B(chunk 0, microbatch 0) and waits for B(chunk 0, microbatch 0) on rank 1",
        "rank 1 is at F(chunk 0, microbatch 1) and waits for F(chunk 0, microbatch 1) on rank 0",
    ]


def test_replay_names_what_no_rank_performs() -> None:
    actual = refused(replay, ((Action("F", 0, 0),), (Action("F", 0, 1),)), round_robin(2))
    assert actual.message == (
        "the schedule is incomplete: rank 0 never performs F(chunk 0, microbatch 1)"
    )


F0, B0, W0 = Action("F", 0, 0), Action("B", 0, 0), Action("W", 0, 0)
SPLIT = replace(B0, split=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((F0, B0, B0), "performs B(chunk 0, microbatch 0) more than once"),
        ((F0, B0, W0), "expected a split B together with a W"),
        ((F0, SPLIT), "expected a split B together with a W"),
        ((F0,), "never performs B(chunk 0, microbatch 0)"),
        ((), "never performs F(chunk 0, microbatch 0)"),
        ((replace(F0, split=True), B0), "has an action Action(kind='F'"),
        ((replace(F0, pair=1), B0), "has half of a pair: F(chunk 0, microbatch 0)"),
        ((F0, replace(B0, pair=1)), "has half of a pair"),
        (
            (F0, B0, Action("F", 0, 1), Action("B", 0, 1)),
            "has microbatch 1, but only 1 microbatches",
        ),
        ((F0, B0, Action("F", 1, 0)), "rank 0 has no chunk 1"),
    ],
)
def test_lists_that_are_no_schedule(row: RankActions, message: str) -> None:
    assert message in refused(check_schedule, (row,), round_robin(1), 1).message


def test_a_list_for_each_rank_and_one_copy_for_each_microbatch() -> None:
    assert "1 lists of actions for 2 ranks, expected one per rank" in (
        refused(check_complete, ((F0, B0),), round_robin(2), 1).message
    )
    copies = Placement((StageChunk(0, 0), StageChunk(0, 1)), copies=2)
    row = F0, B0, Action("F", 1, 0), Action("B", 1, 0)
    assert "keep a microbatch in one copy" in (
        refused(check_complete, (row,), copies, 1).remedy or ""
    )


# -- messages --------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[str, int, int, int]]:
    for name, schedule in SCHEDULES.items():
        for stages in (1, 2, 3, 4, 8):
            for m in (1, 4, 6, 8, 16, 24):
                for v in (1, 2, 3, 4):
                    try:
                        schedule.check(stages, m, v)
                    except DiagnosticError:
                        continue
                    yield name, stages, m, v


@LONG
def test_both_ends_of_a_pair_have_one_order() -> None:
    for name, stages, m, v in cases():
        at = SCHEDULES[name].placement(stages, v)
        messages = ordered_messages(SCHEDULES[name].actions(stages, m, v), at)
        hops = sum(
            at[s].rank != at[s + 1].rank for s in range(len(at) - 1) if at.following(s) is not None
        )
        sent = [x for row in messages for x in row if x.direction == "send"]
        assert len(sent) * at.copies == 2 * hops * m, (name, stages, m, v)
        assert 2 * len(sent) == sum(map(len, messages))
        for sender, receiver, out, into in pairs(messages):
            assert [x.content for x in out] == [x.content for x in into], (name, stages, m, v)
            for send, recv in zip(out, into, strict=True):
                assert (send.peer, recv.peer) == (receiver, sender)
                step = 1 if send.payload == "activation" else -1
                assert send.target - send.source == recv.target - recv.source == step


@LONG
def test_receives_are_posted_when_needed_or_earlier() -> None:
    """No later than the action that needs one; earlier only before another that needs a message
    sent after it."""
    early: set[str] = set()
    for name, stages, m, v in cases():
        actions, at = SCHEDULES[name].actions(stages, m, v), SCHEDULES[name].placement(stages, v)
        for rank, row in enumerate(actions):
            starts = {a: row.index(step[0]) for step in steps(row) for a in step}
            needs = [
                (m.position, starts[action], m.peer) for m, action in posted(rank, actions, at)
            ]
            for i, (position, own, peer) in enumerate(needs):
                assert position == min(n for _, n, p in needs[i:] if p == peer)
                if position < own:
                    early.add(name)
    assert early == {"interleaved-zb", "zbv", "dualpipe", "dualpipev"}


def test_messages_stand_around_their_actions() -> None:
    """1F1B on two stages: rank 0 sends after F and receives before B."""
    schedule = SCHEDULES["1f1b"]
    first, last = ordered_messages(schedule.actions(2, 2, 1), schedule.placement(2, 1))
    assert [(x.direction, x.payload, x.microbatch, x.position) for x in first] == [
        ("send", "activation", 0, 0),
        ("send", "activation", 1, 1),
        ("recv", "gradient", 0, 2),
        ("recv", "gradient", 1, 3),
    ]
    assert [(x.direction, x.microbatch, x.position) for x in last] == [
        ("recv", 0, 0),
        ("send", 0, 1),
        ("recv", 1, 2),
        ("send", 1, 3),
    ]


def test_messages_of_a_pair_come_around_both() -> None:
    schedule = SCHEDULES["dualpipe"]
    actions = schedule.actions(4, 8, 2)
    for row, messages in zip(
        actions, ordered_messages(actions, schedule.placement(4, 2)), strict=True
    ):
        firsts = {i for i, a in enumerate(row) if a.pair is not None and a.kind == "F"}
        lasts = {i + 1 for i in firsts}
        assert firsts
        assert not any(x.position in lasts for x in messages if x.direction == "recv")
        assert not any(x.position in firsts for x in messages if x.direction == "send")


def test_a_v_turns_without_a_message_and_copies_do_not_talk() -> None:
    for name in ("zbv", "dualpipe", "dualpipev"):
        schedule = SCHEDULES[name]
        messages = ordered_messages(schedule.actions(4, 8, 2), schedule.placement(4, 2))
        assert not any({x.source, x.target} == {3, 4} for row in messages for x in row)


def test_receives_follow_the_order_of_the_sends() -> None:
    """Rank 1 needs microbatch 1 first: it posts the receive of microbatch 0, sent before, too."""
    schedule = SCHEDULES["gpipe"]
    actions, at = schedule.actions(2, 3, 1), schedule.placement(2, 1)
    other = with_row(actions, 1, swapped(actions[1], 0, 1))
    _, last = ordered_messages(other, at)
    got = [(x.microbatch, x.position) for x in last if x.direction == "recv"]
    assert got == [(0, 0), (1, 0), (2, 2)]


def test_a_message_with_one_end_is_reported() -> None:
    schedule = SCHEDULES["gpipe"]
    actions, at = schedule.actions(2, 3, 1), schedule.placement(2, 1)
    fewer = with_row(actions, 1, actions[1][1:])
    actual = refused(check_messages, fewer, at)
    assert actual.message == (
        "the activation of microbatch 0 from stage 0 on rank 0 to stage 1 on rank 1 is sent and "
        "not received"
    )
    silent = with_row(actions, 0, actions[0][1:])
    assert "is received and not sent" in refused(check_messages, silent, at).message


def test_a_job_of_too_many_actions_is_refused_before_any_work() -> None:
    """Of a schedule that is built in, and of one that would have to be proved."""

    class Endless(Hurried):
        name = "endless"

        def rank_actions(
            self, rank: int, stages: int, microbatches: int, chunks: int
        ) -> Iterable[Action]:
            raise AssertionError("asked for its actions")

    assert "has 2,000,000 actions" in refused(prove, Endless(), 1000, 1000, 1).message
    argv = ("--pp", "1000", "--set", "L=1000000", "--microbatches", "100000")
    ran = stagec("analyze", "llama3-8b", *argv)
    assert ran.code == 1
    assert "has 200,000,000 actions, expected at most 1,000,000" in ran.err
    assert "give at most 500 microbatches, or fewer stages" in ran.err
