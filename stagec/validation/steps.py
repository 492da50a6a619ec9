"""Measured and published steps, each with its job. docs/accuracy.md shows the errors of
predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.emission import workers
from stagec.jobs.request.option import values_of
from stagec.jobs.request.options import JOB, JobOptions
from stagec.jobs.session import Session
from stagec.machines import Machine, load_machine
from stagec.support.diagnostics import DiagnosticError
from stagec.validation.formula import sizes_of
from stagec.validation.sources import MeasuredRow, ValidationSource, filled, validation_sources

if TYPE_CHECKING:
    from stagec.time.step import Issued

OWN_MODELS = (".stg", ".json")


PredictedT = TypeVar("PredictedT")
PredictedT_co = TypeVar("PredictedT_co", covariant=True)


class MeasuredRun(Protocol[PredictedT_co]):
    """A measured step or server, which counts for the errors of its source if it is `judged`."""

    @property
    def judged(self) -> bool: ...

    def predicted(self) -> PredictedT_co:
        """The predicted seconds. Raises `DiagnosticError`."""
        ...


MeasuredT = TypeVar("MeasuredT", bound=MeasuredRun[object])
#: The number of predicted rows of longer sources, unless all are requested.
_SAMPLE = 60


@dataclass(frozen=True, slots=True)
class StepRow(MeasuredRow):
    """A row of a source in the form of its files.

    `row` is the title and `sweep` the name of a sweep, with `$name` of sizes, flags and notes.
    `measured` is in `unit`. `model` is one of the library, or a text or configuration in the
    folder. A size may be a formula of others. `changes` are figures of the machine that the source
    states.
    """

    row: str
    model: str
    machine: str
    gpus: str
    measured: str
    unit: str
    sweep: str = ""
    changes: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"])


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step of `seconds` on `ranks` GPUs, and the job for `stagec time`.

    Steps with the same `sweep` compare configurations of one model with equal GPUs and batch; it is
    empty for other steps. Constants of the machine were fitted to rows that are `fitted`. Rows that
    are `judged` count for the errors of the source.
    """

    source: str
    row: str
    seconds: float
    ranks: int
    machine: str
    model: str
    sizes: Mapping[str, int]
    flags: Mapping[str, Any]
    sweep: str = ""
    changes: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"])
    judged: bool = True
    fitted: bool = False

    def options(self) -> JobOptions:
        """The options of the job."""
        given = frozenset(self.flags)
        return JobOptions(self.model, sizes=self.sizes, explicit=given, **self.flags)

    def on_machine(self) -> Machine:
        """The machine of the step."""
        return load_machine(self.machine).changed(self.changes)

    def issued(self) -> Issued:
        """The programs of its ranks. Raises `DiagnosticError`."""
        from stagec.time.step import Issued

        return Issued.of(JobBuilder(self.options()).lower(verify=False))

    def predicted(self) -> float:
        """The predicted seconds of the step. Raises `DiagnosticError`."""
        from stagec.time.step import step_time

        return step_time(self.issued(), self.on_machine()).seconds


def _of_throughput(row: StepRow, sizes: Mapping[str, int]) -> float:
    if not {"B", "S"} <= sizes.keys():
        raise ValueError("the tokens of a step need values for B and S")
    return sizes["B"] * sizes["S"] / (int(row.gpus) * float(row.measured))


#: The seconds of a row, by the unit of its measurement.
_UNITS: Final[Mapping[str, Callable[[StepRow, Mapping[str, int]], float]]] = {
    "s": lambda row, _: float(row.measured),
    "ms": lambda row, _: float(row.measured) * 1e-3,
    "tokens/s per GPU": _of_throughput,
}


def measured_steps(source: str | None = None) -> dict[str, list[MeasuredStep]]:
    """The measured steps by source, of one source or of all. Raises `DiagnosticError`."""
    sources = validation_sources(source, kind="steps")
    return {each.name: [*each.measured(StepRow, partial(_step, each))] for each in sources}


def _step(source: ValidationSource, row: StepRow, judged: bool, fitted: bool) -> MeasuredStep:
    sizes = sizes_of(row.sizes)
    if row.unit not in _UNITS:
        raise ValueError(f"unknown unit '{row.unit}': choose among {', '.join(_UNITS)}")
    if not (seconds := _UNITS[row.unit](row, sizes)) > 0:
        raise ValueError(f"a step cannot take {seconds:g} s")
    values, _ = values_of(JOB, row.flags)
    names = {**sizes, **row.flags, "gpus": row.gpus, **row.notes}
    return MeasuredStep(
        source=source.name,
        row=filled(row.row, names),
        seconds=seconds,
        ranks=int(row.gpus),
        machine=row.machine,
        model=str(source.folder / row.model) if row.model.endswith(OWN_MODELS) else row.model,
        sizes=sizes,
        flags={name: values[name] for name in row.flags},
        sweep=filled(row.sweep, names),
        changes=row.changes,
        judged=judged,
        fitted=fitted,
    )


def chosen(source: str | None, *, everything: bool) -> list[MeasuredStep]:
    """The steps to predict, of one source or of all: samples of long sources, or `everything`.
    Raises `DiagnosticError`."""
    by_source = measured_steps(source).values()
    return [s for steps in by_source for s in (steps if everything else sample(steps))]


def sample(steps: list[MeasuredT], most: int = _SAMPLE) -> list[MeasuredT]:
    """All rows of a source, or of more than `most` rows the judged ones at equal distances. The
    distance is odd, since fitted rows are every second one."""
    if len(steps) <= most:
        return steps
    judged = [step for step in steps if step.judged]
    return judged[:: (len(judged) // most) | 1]


def predictions(
    measured: Sequence[MeasuredRun[PredictedT]], session: Session, what: str
) -> list[PredictedT | str]:
    """The seconds of each step or server, or the reason for their absence, by a process per core;
    `what` is the unit of the progress."""
    results: dict[int, PredictedT | str] = {}
    with (
        workers({"scheduler": None, "jobs": None}) as run,
        session.progress("predicting", what) as counted,
    ):
        for done, (number, result) in enumerate(run(seconds_or_problem, measured), 1):
            results[number] = result
            counted(done, len(measured))
    return [results[i] for i in range(len(measured))]


def seconds_or_problem(measured: MeasuredRun[PredictedT]) -> PredictedT | str:
    """The prediction, or the reason for its absence."""
    try:
        return measured.predicted()
    except DiagnosticError as problem:
        return problem.diagnostics[0].message
