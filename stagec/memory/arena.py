"""Offsets of a step's buffers: requests in the order of the step, and where an allocator puts
them."""

from __future__ import annotations

from collections.abc import Iterator

from stagec.memory.placement import MODELS, Arena, PlacementRequest, place
from stagec.memory.timeline import DEVICE, MemoryTimeline


def requests(timeline: MemoryTimeline, space: str = DEVICE) -> Iterator[PlacementRequest]:
    """All buffers of a step in their order: static ones first, with numbers below 0."""
    for number, (_, _, size) in enumerate(timeline.fixed(space), 1):
        yield PlacementRequest(-number, size)
    for event in timeline.events(space):
        yield PlacementRequest(event.number, timeline.size(event.buffer) if event.starts else 0)


def placed(timeline: MemoryTimeline, fit: str, space: str = DEVICE) -> Arena:
    """Offsets of all buffers by a model of an allocator."""
    return place(requests(timeline, space), MODELS[fit]())
