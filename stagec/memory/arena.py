"""Offsets of a step's buffers: requests in the order of the step, and the plan as operations."""

from __future__ import annotations

from collections.abc import Iterator

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Quoted, Value
from stagec.ir.expr import UnboundError
from stagec.ir.module import Module
from stagec.memory.placement import MODELS, Placement, Request, place
from stagec.memory.timeline import DEVICE, HOST, Timeline
from stagec.schedule.attached import stages_of
from stagec.support.diagnostics import error
from stagec.support.source import made_by
from stagec.support.suggest import did_you_mean


def requests(timeline: Timeline, space: str = DEVICE) -> Iterator[Request]:
    """All buffers of a step in their order: static ones first, with numbers below 0."""
    for number, (_, _, size) in enumerate(timeline.fixed(space), 1):
        yield Request(-number, size)
    for event in timeline.events(space):
        yield Request(event.number, timeline.size(event.buffer) if event.starts else 0)


def placed(timeline: Timeline, fit: str, space: str = DEVICE) -> Placement:
    """Offsets of all buffers by a model of an allocator."""
    return place(requests(timeline, space), MODELS[fit]())


def state_arenas(module: Module, func: Operation, prefetch: int, fit: str) -> None:
    """Add an `stg.arena` for each memory that a function uses, of the first stage that runs it.

    Raises `DiagnosticError` for a model that there is not, and for open sizes.
    """
    if fit not in MODELS:
        raise error(
            f"there is no allocator '{fit}'",
            remedy=did_you_mean(fit, MODELS) or f"choose one of {', '.join(MODELS)}",
        )
    stage = next(iter(stages_of(func)), 0)
    timeline = Timeline(module, func, stage, Timeline.planner(module, func, prefetch))
    try:
        for space in (DEVICE, HOST):
            _arena(module, func, timeline, fit, space)
    except UnboundError as e:
        raise error(
            f"no value for {', '.join(e.names)}, but offsets need all sizes",
            func.loc,
            remedy=module.how_to_set(e.names),
        ) from None


def _arena(module: Module, func: Operation, timeline: Timeline, fit: str, space: str) -> None:
    found = placed(timeline, fit, space)
    if not found.places:
        return
    times, values = _lifetimes(timeline, space)
    b = Builder(module.registry, module.root.body, loc=made_by("plan-memory", func.loc))
    attrs: dict[str, RawAttr] = {"space": space, "model": Quoted(fit), "bound": found.bound}
    arena = b.op(
        "stg.arena",
        (),
        attrs | {"allocated": found.allocated, "reserved": found.reserved},
        types=(),
        symbol=f"{func.symbol}_{space}",
    )
    inner = Builder(module.registry, arena.make_region(), loc=arena.loc)
    for number, spot in found.places.items():
        first, last = times[number]
        sizes = {"first": first, "last": last, "offset": spot.offset, "bytes": spot.size}
        made = inner.op("stg.buffer", (), {"of": Quoted(values[number].name), **sizes}, types=())
        made.loc = made_by("plan-memory", values[number].loc)


def _lifetimes(
    timeline: Timeline, space: str
) -> tuple[dict[int, tuple[int, int]], dict[int, Value]]:
    """When each buffer starts and ends, counted in starts and ends; and whose it is."""
    times: dict[int, tuple[int, int]] = {}
    values: dict[int, Value] = {}
    events = list(timeline.events(space))
    for number, (value, *_) in enumerate(timeline.fixed(space), 1):
        times[-number], values[-number] = (0, len(events)), value
    for time, event in enumerate(events, 1):
        first = time if event.starts else times[event.number][0]
        times[event.number] = first, len(events) if event.starts else time
        values[event.number] = event.buffer.value
    return times, values
