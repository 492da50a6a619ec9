"""`stagec time`: how long a training step takes on a machine, why, and what would help."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagec.driver.common import write_output
from stagec.driver.job import JobBuilder
from stagec.driver.limit import limit_option
from stagec.driver.machine import machine_option
from stagec.driver.options import JobOptions, job_options, take_options
from stagec.driver.sweep import check_alone, sweep, sweep_options
from stagec.driver.sweep_rows import Case
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.machines import Machine
    from stagec.time.costs import Measurements
    from stagec.time.tables import Table

#: More pieces than these make a replay take more than about half a second: levers are a dozen.
_MANY = 40_000


@click.command("time")
@job_options
@machine_option("The machine that the job runs on: a name that 'stagec machines' lists, or a file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--overlap/--no-overlap",
    default=True,
    help="Whether collectives run beside computations, or all of them are blocking.",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Measured times (CSV or JSON, see docs/measured.md), which win over the models.",
)
@click.option(
    "--kernels-from",
    type=click.Choice(["aiconfigurator"]),
    help="Measured tables of a package: pip install 'stagec\\[kernels]'.",
)
@click.option(
    "--levers/--no-levers",
    default=None,
    help="Whether to try what would help. By default if it takes no more than seconds.",
)
@sweep_options
@limit_option("Of --sweep: say what holds no more, of a size or a device such as h100.")
@click.option("-o", "--output", metavar="FILE", help="Write the result here instead of stdout.")
def command(**given: Any) -> int:
    """Tell how long one training step takes on a machine, where the time goes, and what would help.

    MODEL is a .stg file or the name of a library model; STRATEGY a .stg file with a stg.strategy.
    """
    options = take_options(given)
    swept = {name for axis in given["sweep"] for name in axis.sets}
    if given["machine"] is None and "machine" not in swept:
        raise error("a time needs a machine", remedy="add --machine h100-sxm, for example")
    if given["sweep"]:
        from stagec.driver.sweep_table import TIME

        files = tuple(path.resolve() for path in given["measured"])
        case = Case(options, given["machine"], given["overlap"], files, given["kernels_from"])
        return sweep(case, given, TIME)
    check_alone(given)
    if given["limit"] is not None:
        raise error("--limit of one job is for 'stagec memory'", remedy="add --sweep, or run that")
    found = time_of(
        JobBuilder(options),
        given["machine"],
        overlap=given["overlap"],
        levers=given["levers"],
        measured=measurements(given["measured"], given["kernels_from"], given["machine"]),
    )
    if given["as_json"]:
        write_output(json.dumps(found.as_json(), indent=1) + "\n", given["output"])
        return 0
    from stagec.driver.time_table import print_time

    table = StringIO()
    print_time(found, table if given["output"] else sys.stdout)
    if given["output"]:
        write_output(table.getvalue(), given["output"])
    return 0


def measurements(
    files: Sequence[Path], package: str | None, machine: Machine
) -> Measurements | None:
    """What was measured: files of users, and the tables of a package for a machine. Raises
    `DiagnosticError`."""
    if not files and package is None:
        return None
    from stagec.time.costs import Measurements
    from stagec.time.measured import read_measured

    others: list[Table] = []
    if package is not None:
        from stagec.time.aiconfigurator import read_tables

        others = read_tables(machine.name)
    return Measurements([table for file in files for table in read_measured(file)], others)


def time_of(
    builder: JobBuilder,
    machine: Machine,
    *,
    overlap: bool = True,
    levers: bool | None = None,
    measured: Measurements | None = None,
) -> TimeReport:
    """The time of a job's step. Raises `DiagnosticError`."""
    from stagec.analysis.time_report import time_report
    from stagec.driver.figures import compiled_job
    from stagec.time.levers import levers as all_levers
    from stagec.time.step import step_time

    compiled, values = compiled_job(builder)
    issued = compiled.issued(values)
    step = step_time(issued, machine, overlap=overlap, measured=measured)
    pieces = sum(len(each.plan) for each in step.classes)
    tried = levers if levers is not None else pieces <= _MANY
    return time_report(
        builder.model_name,
        issued,
        machine,
        step,
        model_flops=compiled.model_flops(values),
        tokens=compiled.tokens(values),
        levers=all_levers(issued, machine, overlap=overlap) if tried else (),
    )
