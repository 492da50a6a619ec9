"""Checks whether a job of flags is legal, without compiling it, so that `compile` accepts the jobs
that searches propose."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

from stagec.ir.module import BATCH
from stagec.ir_spec.strategy.axes import DATA_AXES, WITHIN
from stagec.ir_spec.strategy.flag_values import FlagValues
from stagec.ir_spec.strategy.microbatches import microbatches
from stagec.ir_spec.strategy.statement import Flag
from stagec.jobs.request.combine import RULES, Rule, lacking, without_effect
from stagec.jobs.request.experts import check_experts, mesh_axes
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.options import JobOptions, request
from stagec.schedule.registry import SCHEDULES
from stagec.sharding.stages import shared_out
from stagec.support.diagnostics import Diagnostic, DiagnosticError, error

#: Returns why a job of flags is not legal; None if the rule accepts it.
LegalRule: TypeAlias = Callable[[JobOptions], "Diagnostic | None"]


def checked(options: JobOptions, sizes: Mapping[str, int], layers: int | None = None) -> FlagValues:
    """The values of the flags of a job with given ranks and batch, for a model of these sizes;
    `layers` is the number of layers that a pipeline may divide, if known. Raises `DiagnosticError`
    if a rule refuses the job."""
    for rule in rules(sizes, layers):
        if (problem := rule(options)) is not None:
            raise DiagnosticError(problem)
    return request(options, mesh_axes(options), sizes)


def rules(sizes: Mapping[str, int], layers: int | None = None) -> list[LegalRule]:
    """All rules that may refuse a job for a model of these sizes."""

    def experts(options: JobOptions) -> Diagnostic | None:
        return _refusal(lambda: check_experts(options, sizes))

    def batch(options: JobOptions) -> Diagnostic | None:
        return _refusal(lambda: _check_batch(options, mesh_axes(options), sizes))

    def schedule(options: JobOptions) -> Diagnostic | None:
        return _refusal(lambda: _check_schedule(options, layers))

    def combined(rule: Rule) -> LegalRule:
        def problem(options: JobOptions) -> Diagnostic | None:
            problems = rule(FlagValues(_Flags(options), _Axes(options), sizes))
            return next((d for d in problems if d.severity == "error"), None)

        return problem

    refusing = (rule for rule in RULES if rule is not without_effect)
    return [experts, batch, *map(combined, refusing), schedule]


def needless(flag: Flag, options: JobOptions, sizes: Mapping[str, int]) -> bool:
    """Whether a flag has no effect in a job."""
    return lacking(FlagValues(_Flags(options), _Axes(options), sizes), flag) is not None


def idle(options: JobOptions, sizes: Mapping[str, int]) -> frozenset[str]:
    """The messages of `compile` on flags without effect in a job."""
    warnings = without_effect(FlagValues(_Flags(options), _Axes(options), sizes))
    return frozenset(each.message for each in warnings)


def _refusal(check: Callable[[], None]) -> Diagnostic | None:
    try:
        check()
    except DiagnosticError as problem:
        return problem.diagnostics[0]
    return None


class _Flags(Mapping[str, Any]):
    """The flags of a job, read on demand."""

    def __init__(self, options: JobOptions) -> None:
        self._options = options

    def __getitem__(self, flag: str) -> Any:
        return getattr(self._options, flag)

    def __iter__(self) -> Iterator[str]:
        return iter(FLAGS)

    def __len__(self) -> int:
        return len(FLAGS)


class _Axes(Mapping[str, "int | None"]):
    """The axes of the mesh of a job, computed on demand."""

    def __init__(self, options: JobOptions) -> None:
        self._options = options

    @cached_property
    def _axes(self) -> Mapping[str, int | None]:
        return mesh_axes(self._options)

    def __getitem__(self, axis: str) -> int | None:
        return self._axes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)


def _check_batch(
    options: JobOptions, axes: Mapping[str, int | None], sizes: Mapping[str, int]
) -> None:
    """Raise `DiagnosticError` unless every data-parallel rank has whole sequences in each
    microbatch."""
    ranks, count = prod(axes.get(a) or 1 for a in (*DATA_AXES, WITHIN, "ep")), count_of(options)
    batch = sizes.get(BATCH) or ranks * count
    if batch % (ranks * count):
        raise error(
            f"B = {batch} does not divide over {count} microbatches of {ranks} data-parallel ranks",
            remedy="choose fewer microbatches or ranks, or a --batch that is a multiple of "
            f"{count * ranks}",
        )


def _check_schedule(options: JobOptions, layers: int | None) -> None:
    """Raise `DiagnosticError` if the schedule refuses the stages, chunks or microbatches of a job,
    or the model has too few layers. Schedules of plug-ins are not checked here."""
    stages, schedule = size_of(options, "pp"), SCHEDULES.get(options.schedule)
    if stages > 1 and schedule is not None:
        chunks = options.chunks or schedule.default_chunks
        schedule.check(stages, count_of(options), chunks)
        parts = schedule.placement(stages, chunks).depth
        if layers is not None:
            shape = f"({stages} stages of {chunks})"
            shared_out(layers, parts, tuple(options.stage_layers), shape=shape)


def size_of(options: JobOptions, axis: str) -> int:
    """The number of ranks of an axis, for options that give all sizes."""
    sizes = options.mesh if options.mesh is not None else {axis: getattr(options, axis)}
    return sizes.get(axis) or 1


def count_of(options: JobOptions) -> int:
    """The number of microbatches of a job of flags."""
    stages = size_of(options, "pp")
    take_turns = 2 if options.afd and stages > 1 else 0
    return microbatches(options.microbatches or take_turns, stages)
