"""Whether a job of flags may be, asked without compiling it: what searches propose, `compile`
takes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from stagec.driver.combine import check
from stagec.driver.experts import check_experts
from stagec.driver.job import mesh_axes
from stagec.driver.options import JobOptions, request
from stagec.ir_spec.ops.axes import DATA_AXES
from stagec.ir_spec.ops.statement import Request
from stagec.ir_spec.ops.strategy import microbatches
from stagec.schedule.registry import SCHEDULES
from stagec.support.diagnostics import DiagnosticError, error

BATCH = "B"


def checked(options: JobOptions, sizes: Mapping[str, int]) -> Request:
    """What a job asks for, whose ranks and batch are written down, of a model of these sizes.
    Raises `DiagnosticError` for what does not go together."""
    check_experts(options, sizes)
    axes = mesh_axes(options)
    _check_batch(options, axes, sizes)
    given = request(options, axes, sizes)
    errors = [d for d in check(given) if d.severity == "error"]
    if errors:
        raise DiagnosticError(*errors)
    _check_schedule(options, axes.get("pp") or 1)
    return given


def _check_batch(
    options: JobOptions, axes: Mapping[str, int | None], sizes: Mapping[str, int]
) -> None:
    """Every data-parallel rank has whole sequences in each microbatch."""
    ranks, count = prod(axes.get(a) or 1 for a in (*DATA_AXES, "ep")), count_of(options)
    batch = sizes.get(BATCH) or ranks * count
    if batch % (ranks * count):
        raise error(
            f"B = {batch} does not divide over {count} microbatches of {ranks} data-parallel ranks",
            remedy="choose fewer of them",
        )


def _check_schedule(options: JobOptions, stages: int) -> None:
    """The schedule takes so many stages, chunks and microbatches; those of plug-ins are left to the
    compiler."""
    schedule = SCHEDULES.get(options.schedule)
    if stages > 1 and schedule is not None:
        chunks = options.chunks or schedule.default_chunks
        schedule.check(stages, count_of(options), chunks)


def size_of(options: JobOptions, axis: str) -> int:
    """The ranks of an axis, of options whose ranks are written down."""
    sizes = options.mesh if options.mesh is not None else {axis: getattr(options, axis)}
    return sizes.get(axis) or 1


def count_of(options: JobOptions) -> int:
    """How many microbatches a job of flags has."""
    return microbatches(options.microbatches, size_of(options, "pp"))
