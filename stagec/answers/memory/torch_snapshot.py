"""A memory timeline as a snapshot for PyTorch's memory_viz."""

import pickle
from collections.abc import Iterator
from typing import Any

from stagec.ir.core import Value
from stagec.memory.arena import placed
from stagec.memory.timeline import MemoryTimeline
from stagec.support.diagnostics import error
from stagec.support.source import file_loc

#: The largest number of events that viewers can open.
MOST_EVENTS = 1_000_000


def snapshot(timeline: MemoryTimeline) -> bytes:
    """A pickle of plain dicts, as `torch.cuda.memory._dump_snapshot` writes it, for memory_viz.

    Addresses are those of the caching allocator's model. Raises `DiagnosticError` for a step with
    too many events for a viewer.
    """
    trace = list(_trace(timeline))
    snapshot: dict[str, Any] = {
        "segments": [],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }
    return pickle.dumps(snapshot, protocol=4)


def _trace(timeline: MemoryTimeline) -> Iterator[dict[str, Any]]:
    places = placed(timeline, "caching").places
    time = 0
    for number, (value, _, size) in enumerate(timeline.fixed(), 1):
        yield _entry("alloc", places[-number].offset, size, value, time)
    for event in timeline.events():
        time += 1
        if time > MOST_EVENTS:
            raise error(
                f"the step has more than {MOST_EVENTS:,} allocations and frees, the most that a "
                "snapshot holds",
                remedy="use fewer microbatches or layers",
            )
        size, address = timeline.size(event.buffer), places[event.number].offset
        if event.starts:
            yield _entry("alloc", address, size, event.buffer.value, time)
        else:
            for action in ("free_requested", "free_completed"):
                yield _entry(action, address, size, event.buffer.value, time)


def _entry(action: str, address: int, size: int, value: Value, time: int) -> dict[str, Any]:
    place = file_loc(value.loc)
    frame = {
        "filename": place.file if place is not None else "",
        "line": place.line if place is not None else 0,
        "name": value.name,
    }
    return {
        "action": action,
        "addr": address + (1 << 32),
        "size": size,
        "stream": 0,
        "time_us": time,
        "frames": [frame],
    }
