"""Offsets of the buffers of a step: placement requests in the order of the step, and the places at
which an allocator model puts them."""

from collections.abc import Iterator

from stagec.memory.placement import MODELS, Arena, PlacementRequest, place
from stagec.memory.timeline import DEVICE, MemoryTimeline


def requests(timeline: MemoryTimeline, space: str = DEVICE) -> Iterator[PlacementRequest]:
    """The requests of all buffers of a step in execution order. Static buffers come first; their
    numbers are negative."""
    for number, (_, _, size) in enumerate(timeline.fixed(space), 1):
        yield PlacementRequest(-number, size)
    for event in timeline.events(space):
        yield PlacementRequest(event.number, timeline.size(event.buffer) if event.starts else 0)


def placed(timeline: MemoryTimeline, fit: str, space: str = DEVICE) -> Arena:
    """The offset in bytes of each buffer in a memory, by the allocator model `fit` (a key of
    `MODELS`)."""
    return place(requests(timeline, space), MODELS[fit]())
