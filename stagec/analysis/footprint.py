"""The memory of every rank class as plain data: the object of `stagec memory --json`."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from stagec.ir.core import Operation
from stagec.ir.expr import UnboundError, evaluate
from stagec.ir.module import Module
from stagec.ir.types import axis_size
from stagec.ir_spec.strategy.part import MAIN
from stagec.memory.arena import placed
from stagec.memory.buffers import GRADIENTS
from stagec.memory.timeline import ALL, CACHES, HOST, MemoryTimeline, Point, line_of
from stagec.schedule.attached import stages_of
from stagec.support.diagnostics import DiagnosticError

LARGEST = 10


def timelines(module: Module) -> Iterator[tuple[int, Operation, MemoryTimeline]]:
    """The timeline of each rank class of a planned module, by stage. Raises `DiagnosticError` if a
    size is open."""
    by_stage: dict[int, tuple[Operation, MemoryTimeline]] = {}
    for func in module.functions:
        check_sizes(module, func)
        planner = MemoryTimeline.planner(module, func)
        for stage in stages_of(func) or (0,):
            by_stage[stage] = func, MemoryTimeline(module, func, stage, planner)
    for stage in sorted(by_stage):
        yield (stage, *by_stage[stage])


def check_sizes(module: Module, func: Operation) -> None:
    """Raise `DiagnosticError` if the size of an argument is open."""
    used = {s for a in func.body.args for s in a.tensor.local_bytes.symbols}
    missing = sorted(used - module.env.keys())
    if missing:
        raise module.no_value(missing, module.root.loc)


def footprint(module: Module, model: str, fit: str | None = None) -> dict[str, Any]:
    """The bytes per rank of each class at its peak, and its largest buffers at it.

    With `fit`, a model of an allocator, the buffers of the step are placed too.
    """
    classes = [_class(module, *timeline, fit) for timeline in timelines(module)]
    mesh: Mapping[str, Any] = module.mesh.sizes if module.mesh else {}
    return {"schema": 1, "model": model, "mesh": dict(mesh), "classes": classes}


def _class(
    module: Module, stage: int, func: Operation, timeline: MemoryTimeline, fit: str | None
) -> dict[str, Any]:
    return {
        "name": f"stage{stage}",
        "stage": stage,
        "ranks": ranks_of(module, func),
        **_worst(timeline, peak := timeline.peak()),
        **_moments(timeline, peak),
        **_of_models(timeline, func.text("guest")),
        "host": sum(timeline.static(HOST).values()) + _most(timeline),
        "placement": _placed(timeline, fit) if fit else None,
    }


def ranks_of(module: Module, func: Operation) -> int:
    """The number of ranks of each stage that runs a function."""
    axes = module.mesh.axes if module.mesh else ()
    return evaluate(axis_size(a for a in axes if a != func.text("over")), module.env)


def worst_moments(module: Module) -> Mapping[int, dict[str, Any]]:
    """For each stage of a planned module: its peak, the place of that, its categories and
    expression, and the largest buffers. Empty if a size is open."""
    try:
        stages = {stage: timeline for stage, _, timeline in timelines(module)}
        return {stage: _worst(timeline, timeline.peak()) for stage, timeline in stages.items()}
    except (DiagnosticError, UnboundError):
        return {}


def peak_bytes(module: Module) -> int | None:
    """The peak of the fullest rank of a planned module; None if a size is open."""
    try:
        return max(timeline.peak().total for _, _, timeline in timelines(module))
    except (DiagnosticError, UnboundError):
        return None


def _worst(timeline: MemoryTimeline, peak: Point) -> dict[str, Any]:
    return {
        "peak": peak.total,
        "at": described(peak),
        "expression": str(timeline.expression(peak)),
        "categories": {c: peak.bytes.get(c, 0) for c in ALL if c != CACHES or c in peak.bytes},
        "largest": [asdict(h) for h in timeline.live(peak)[:LARGEST]],
    }


#: Category of a plan -> the kind of memory in reports of frameworks.
_KINDS = {
    **dict.fromkeys(("gradients", "unreduced gradients"), "gradients"),
    "optimizer": "optimizer",
    **dict.fromkeys(("gathered weights", CACHES), "buffers"),
    "parameters": "parameters",
}


def _moments(timeline: MemoryTimeline, peak: Point) -> dict[str, Any]:
    """The bytes after forward, at the peak and after the update, in total and by kind. A gradient
    that the operation at the peak computes counts as an activation, as do results of collectives on
    activations; buckets, buffers for messages and results of collectives on gradients are
    `buffers`. `moments` and `memory` are two names of one object."""
    at = timeline.moments()
    if not at:
        return {}
    usage, results = Counter(peak.bytes), timeline.made(peak)
    for category in (name for name in results if _KINDS.get(name) == GRADIENTS):
        usage[category] -= results[category]
        usage["activations"] += results[category]
    each = {"after_forward": at["after_forward"], "peak": usage, "after_update": at["after_update"]}
    fixed = timeline.static().get("communication", 0)
    buffers = {"peak": fixed + timeline.reductions(peak)}
    by_kind = ((name, _by_kind(usage, buffers.get(name, fixed))) for name, usage in each.items())
    moments = dict(by_kind)
    return {"moments": moments, "memory": moments}


def _by_kind(usage: Mapping[str, int], buffers: int) -> dict[str, Any]:
    """The bytes by kind; `buffers` bytes of the activations are moved to that kind."""
    names = ("parameters", "gradients", "optimizer", "activations", "buffers")
    by: dict[str, int] = dict.fromkeys(names, 0)
    for category, size in usage.items():
        by[_KINDS.get(category, "activations")] += size
    by["activations"] -= buffers
    by["buffers"] += buffers
    return {"total": sum(by.values()), "by": by}


def _of_models(timeline: MemoryTimeline, guest: str) -> dict[str, Any]:
    """The bytes of each category at the peak by model, if another model, the `guest`, runs on the
    same ranks."""
    if not guest:
        return {}
    models: dict[str, Counter[str]] = {MAIN: Counter(), guest: Counter()}
    for usage in timeline.live(timeline.peak()):
        models[guest if usage.name.startswith(f"{guest}/") else MAIN][usage.category] += usage.bytes
    return {"models": {name: dict(footprint) for name, footprint in models.items()}}


def described(point: Point) -> str:
    """`B(chunk 0, microbatch 3): stg.einsum at llama.stg:30`, or the operation alone."""
    what = operation_text(point.step.op)
    return f"{point.title}: {what}" if point.title else what


def operation_text(op: Operation) -> str:
    """`stg.einsum at llama.stg:30`."""
    value = next(iter(op.results or op.operands), None)
    line = line_of(value) if value is not None else ""
    return op.name + (f" at {line}" if line else "")


def _most(timeline: MemoryTimeline) -> int:
    """The peak of host memory, without static bytes."""
    if not timeline.uses(HOST):
        return 0
    live: dict[int, int] = {}
    usage = most = 0
    for event in timeline.events(HOST):
        if event.starts:
            live[event.number] = timeline.size(event.buffer)
            usage += live[event.number]
        else:
            usage -= live.pop(event.number)
        most = max(most, usage)
    return most


def _placed(timeline: MemoryTimeline, fit: str) -> dict[str, Any]:
    placement = placed(timeline, fit)
    return {
        "model": fit,
        "bound": placement.bound,
        "allocated": placement.allocated,
        "reserved": placement.reserved,
    }
