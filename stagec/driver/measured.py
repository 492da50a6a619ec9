"""Measured steps as jobs of the compiler."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from stagec.analysis.measured import model_of, path_of
from stagec.driver.common import kept_reports
from stagec.driver.job import JobBuilder
from stagec.driver.options import JobOptions
from stagec.machines import load_machine

if TYPE_CHECKING:
    from stagec.analysis.measured import MeasuredStep
    from stagec.machines import Machine
    from stagec.time.costs import Measurements
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

    with kept_reports():
        return Issued.of(JobBuilder(options_of(step)).lower(verify=False))


def measurements_of(step: MeasuredStep) -> Measurements | None:
    """What its source measured of the machine."""
    return _measurements(step.tables) if step.tables else None


@cache
def _measurements(name: str) -> Measurements:
    from stagec.time.costs import Measurements
    from stagec.time.measured import read_measured

    return Measurements(read_measured(path_of(name)))


def time_of(step: MeasuredStep, issued: Issued, machine: Machine) -> float:
    """The seconds of what its ranks issue, on a machine. Raises `DiagnosticError`."""
    from stagec.time.step import step_time

    found = step_time(issued, machine, overlap=step.overlap, measured=measurements_of(step))
    return found.seconds


def seconds_of(step: MeasuredStep) -> float:
    """The seconds that we predict for it. Raises `DiagnosticError`."""
    return time_of(step, issued_of(step), machine_of(step))
