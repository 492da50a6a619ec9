"""The schedules of the functions, or of the lowered graphs, of pipeline stages."""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

from stagec.ir.core import Operation
from stagec.ir.module import Module
from stagec.ir.opdef import Registry
from stagec.schedule.action import Action, Placement, RankActions
from stagec.schedule.base import Schedule
from stagec.schedule.costs import UNIT
from stagec.schedule.messages import contents_sent, receives_before, senders
from stagec.schedule.registry import find_schedule
from stagec.schedule.simulate import replay


def schedule_of(registry: Registry, name: str) -> Schedule:
    """The schedule of a name, built in or of a plug-in. Raises `DiagnosticError` if there is
    none."""
    return find_schedule(name, schedules_of(registry))


def schedules_of(registry: Registry) -> list[Schedule]:
    """The schedules of plug-ins."""
    return [s for s in registry.extras if isinstance(s, Schedule)]


def stages_of(op: Operation) -> tuple[int, ...]:
    """The pipeline stages that run a function or graph; empty if every rank does."""
    return op.integers("stages")


def accumulation_of(op: Operation) -> Operation | None:
    """The operation in a function or graph whose actions are scheduled, or None."""
    return next((inner for inner in op.body.ops if "schedule" in inner.attrs), None)


def actions_of(module: Module, op: Operation, stage: int) -> RankActions:
    """The actions of a stage in order; () if its function or graph is not scheduled."""
    loop = accumulation_of(op)
    if loop is None:
        return ()
    name, *sizes = _sizes(module, op, loop)
    return _rank_actions(schedule_of(module.registry, name), stage, *sizes)


def receives_of(module: Module, op: Operation, stage: int) -> Mapping[int, Sequence[Action]]:
    """Maps the position of the first action of a step to the actions whose receives are posted
    before it, in the order in which their messages are sent."""
    loop = accumulation_of(op)
    if loop is None:
        return {}
    name, *sizes = _sizes(module, op, loop)
    return _receives(schedule_of(module.registry, name), stage, *sizes)


def _sizes(module: Module, op: Operation, loop: Operation) -> tuple[str, int, int, int]:
    """The name of the schedule, and its numbers of stages, microbatches and chunks."""
    stages = module.env[op.text("over")]
    return loop.text("schedule"), stages, loop.integer("count"), loop.integer("chunks", 1)


@lru_cache(64)
def _rank_actions(
    schedule: Schedule, stage: int, stages: int, microbatches: int, chunks: int
) -> RankActions:
    """The actions of a stage, cached because compiles and similar jobs need them repeatedly."""
    schedule.check(stages, microbatches, chunks)
    return tuple(schedule.rank_actions(stage, stages, microbatches, chunks))


@lru_cache(16)
def _receives(
    schedule: Schedule, stage: int, stages: int, microbatches: int, chunks: int
) -> Mapping[int, Sequence[Action]]:
    """The receives of a stage, cached like its actions."""
    placement, sizes = schedule.placement(stages, chunks), (stages, microbatches, chunks)
    rows = {peer: _rank_actions(schedule, peer, *sizes) for peer in senders(stage, placement)}
    sent = {p: contents_sent(p, row, placement).get(stage, ()) for p, row in rows.items()}
    return receives_before(stage, _rank_actions(schedule, stage, *sizes), sent, placement)


def placement_of(module: Module, op: Operation) -> Placement | None:
    """The placement of virtual stages; None if a function or graph is not scheduled."""
    loop = accumulation_of(op)
    if loop is None:
        return None
    name, stages, _, chunks = _sizes(module, op, loop)
    return schedule_of(module.registry, name).placement(stages, chunks)


def joined_axis(module: Module, op: Operation) -> str:
    """The axis of the stages if reductions over them, such as that of the gradient of a tied
    embedding, have to wait for the last action; else ''.

    The last stage has its part of such a gradient before its last send, and the first stage has its
    own only after that has arrived. If collectives and sends are in one queue, a reduction that
    starts at once delays the send for which its other member waits. So it is issued after the
    schedule, as in Megatron-LM (`_allreduce_embedding_grads` in
    core/distributed/finalize_model_grads.py). If each stage has two copies of the model, the two
    members of a reduction run the same actions at the same time and reach it together.
    """
    placement = placement_of(module, op)
    return op.text("over") if placement is not None and placement.copies == 1 else ""


def idle_share(module: Module, op: Operation) -> Fraction:
    """The bubble of the schedule at unit costs as a share of the step, by its closed form or else
    by a replay; 0 if a function or graph is not scheduled."""
    loop = accumulation_of(op)
    if loop is None:
        return Fraction(0)
    name, stages, count, chunks = _sizes(module, op, loop)
    schedule = schedule_of(module.registry, name)
    bubble = schedule.closed_form(stages, count, chunks).bubble
    if bubble is None:
        actions = schedule.actions(stages, count, chunks)
        bubble = schedule.bubble(replay(actions, schedule.placement(stages, chunks)))
    return bubble / (bubble + count * (UNIT.forward + UNIT.backward))


def regions_of(action: Action) -> Iterator[tuple[str, int]]:
    """The regions that an action runs, as kind and chunk. A backward that is not split also runs
    that of the weights, if there is one."""
    kind = {"F": "forward", "B": "backward", "W": "weights"}[action.kind]
    yield kind, action.chunk
    if action.kind == "B" and not action.split:
        yield "weights", action.chunk
