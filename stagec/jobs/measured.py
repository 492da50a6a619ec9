"""Measured steps as jobs of the compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagec.analysis.measured import model_of
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.machines import load_machine

if TYPE_CHECKING:
    from stagec.analysis.measured import MeasuredStep
    from stagec.machines import Machine
    from stagec.time.step import Issued


def options_of(step: MeasuredStep) -> JobOptions:
    """The options of the job that was measured."""
    return JobOptions(model_of(step), sizes=step.sizes, **step.flags)


def machine_of(step: MeasuredStep) -> Machine:
    """The machine that it ran on."""
    return load_machine(step.machine).changed(step.changes)


def issued_of(step: MeasuredStep) -> Issued:
    """What its ranks issue. Raises `DiagnosticError`."""
    from stagec.time.step import Issued

    return Issued.of(JobBuilder(options_of(step)).lower(verify=False))


def seconds_of(step: MeasuredStep) -> float:
    """The seconds that we predict for it. Raises `DiagnosticError`."""
    from stagec.time.step import step_time

    return step_time(issued_of(step), machine_of(step), overlap=step.overlap).seconds
