"""Checks of schedules: complete lists, complete pairs, no deadlock, and matched messages.

Tests check the built-in schedules; a schedule of a plug-in is checked when it is used.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from stagec.schedule.action import KINDS, Action, Actions, Placement, steps
from stagec.schedule.base import Schedule
from stagec.schedule.messages import check_messages
from stagec.schedule.simulate import replay
from stagec.support.diagnostics import DiagnosticError, error


def check_schedule(actions: Actions, placement: Placement, microbatches: int) -> None:
    """Raise `DiagnosticError`, naming rank and action, for invalid lists of actions.

    Takes linear time.
    """
    check_complete(actions, placement, microbatches)
    replay(actions, placement)
    check_messages(actions, placement)


def prove(schedule: Schedule, stages: int, microbatches: int, chunks: int) -> None:
    """Check that a schedule of a plug-in is complete and free of deadlock before it is used.

    Raises `DiagnosticError`, also for any exception of its code.
    """
    most = 4 * microbatches * max(1, chunks)
    try:
        schedule.check_actions(stages, microbatches, chunks)
        schedule.check(stages, microbatches, chunks)
        placement = _placement(schedule.placement(stages, chunks))
        actions = tuple(
            tuple(islice(schedule.rank_actions(r, stages, microbatches, chunks), most + 1))
            for r in range(stages)
        )
        wrong = next((a for row in actions for a in row if not _is_action(a)), None)
        if wrong is not None:
            raise TypeError(f"rank_actions gives {wrong!r}, expected an Action")
        if any(len(row) > most for row in actions):
            raise ValueError(f"rank_actions gives more than {most} actions for a rank")
        check_schedule(actions, placement, microbatches)
    except DiagnosticError:
        raise
    except (Exception, SystemExit) as e:
        raise error(
            f"the plug-in's schedule '{schedule.name}' fails: {type(e).__name__}: {e}",
            remedy="repair its placement, check or rank_actions",
        ) from None


def _placement(value: object) -> Placement:
    if not isinstance(value, Placement):
        raise TypeError(f"placement gives {value!r}, expected a Placement")
    return value


def _is_action(action: object) -> bool:
    if not isinstance(action, Action) or action.kind not in KINDS:
        return False
    return type(action.chunk) is type(action.microbatch) is int


def check_complete(actions: Actions, placement: Placement, microbatches: int) -> None:
    """Check that each microbatch passes all stages of one copy, with one F and B, and a W if B is
    split. Raises `DiagnosticError`."""
    if len(actions) != placement.ranks:
        raise error(
            f"{len(actions)} lists of actions for {placement.ranks} ranks, expected one per rank",
            remedy="give one list per rank",
        )
    copies: dict[int, int] = {}
    for rank, row in enumerate(actions):
        _check_kinds(rank, row)
        _check_pairs(rank, row)
        _check_once(rank, row)
        for action in row:
            copy = placement.stage(rank, action.chunk) // placement.depth
            if copies.setdefault(action.microbatch, copy) != copy:
                raise error(
                    f"rank {rank} runs {action} in copy {copy} of the model, other actions of this "
                    f"microbatch run in copy {copies[action.microbatch]}",
                    remedy="keep a microbatch in one copy",
                )
    _check_all(actions, placement, copies, microbatches)


def _check_kinds(rank: int, row: Iterable[Action]) -> None:
    for action in row:
        if action.kind not in KINDS or (action.split and action.kind != "B"):
            raise error(
                f"rank {rank} has an action {action!r}",
                remedy="kinds are F, B and W; only a B can be split",
            )


def _check_pairs(rank: int, row: tuple[Action, ...]) -> None:
    for step in steps(row):
        if step[0].pair is not None and [action.kind for action in step] != ["F", "B"]:
            raise error(
                f"rank {rank} has half of a pair: {step[0]}",
                remedy="a pair is an F and the B right after it, both with the same pair number",
            )


def _check_once(rank: int, row: tuple[Action, ...]) -> None:
    count = Counter((a.kind, a.chunk, a.microbatch) for a in row)
    split = {(a.chunk, a.microbatch): a.split for a in row if a.kind == "B"}
    for action in row:
        if count[action.kind, action.chunk, action.microbatch] > 1:
            raise error(f"rank {rank} performs {action} more than once", remedy="keep one of them")
        has_w = count["W", action.chunk, action.microbatch] == 1
        if action.kind in "BW" and split.get((action.chunk, action.microbatch), False) != has_w:
            raise error(
                f"rank {rank} runs {action}, expected a split B together with a W, or neither",
                remedy="mark B as split and add its W later on the rank, or neither",
            )


def _check_all(
    actions: Actions, placement: Placement, copies: dict[int, int], microbatches: int
) -> None:
    """Raise `DiagnosticError` for unknown microbatches, and for missing actions."""
    if strange := sorted(copies.keys() - set(range(microbatches))):
        raise error(
            f"the schedule has microbatch {strange[0]}, but only {microbatches} microbatches",
            remedy="number microbatches from 0",
        )
    present = [{(a.kind, a.chunk, a.microbatch) for a in row} for row in actions]
    for microbatch in range(microbatches):
        first = copies.get(microbatch, 0) * placement.depth
        for stage in range(first, first + placement.depth):
            rank, chunk = placement[stage]
            for kind in ("F", "B"):
                if (kind, chunk, microbatch) not in present[rank]:
                    raise error(
                        f"rank {rank} never performs {Action(kind, chunk, microbatch)}",
                        remedy=f"add it to the list of rank {rank}",
                    )
