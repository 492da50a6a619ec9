"""`stagec analyze`: counts of a training step, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from io import StringIO
from typing import Any

import click

from stagec.driver.job.builder import JobBuilder
from stagec.driver.job.compile_pods import analyze_pods
from stagec.driver.job.planned import Planned
from stagec.driver.job.pod_options import has_pods
from stagec.driver.job.serving import serving_figures
from stagec.driver.job.verdict import verdict_on
from stagec.driver.output.common import write_output
from stagec.driver.request.limit import AT_HAND, limit_option
from stagec.driver.request.machine import machine_option
from stagec.driver.request.options import job_options, take_options
from stagec.driver.request.result import PAGE_OR_PLOT, RESULT
from stagec.driver.request.sections import LongCommand
from stagec.driver.request.units import on_machine
from stagec.driver.sweep.rows import Case
from stagec.driver.sweep.run import check_alone, sweep, sweep_options
from stagec.pipeline.instrument import STATED, Hooks
from stagec.support.diagnostics import DiagnosticError, error


@click.command("analyze", cls=LongCommand)
@job_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--symbolic", is_flag=True, help="Print expressions in the symbols instead of numbers."
)
@sweep_options
@click.option(
    "--html",
    type=PAGE_OR_PLOT,
    metavar="FILE",
    help="Of --sweep: write a page, or FILE.svg, with a plot.",
)
@machine_option("Of --serve: say whether each op waits for memory or computes, on this machine.")
@limit_option(
    "Of --sweep: say what holds no more, of a size or a device such as h100; of --serve: the "
    "largest batch that does."
)
@click.option(
    "-o", "--output", type=RESULT, metavar="FILE", help="Write the result here instead of stdout."
)
def command(**given: Any) -> int:
    """Count parameters, FLOPs, communication and memory of one training step, per rank.

    MODEL is a model of the library, a .stg file, or a config.json (or its folder); STRATEGY is a
    .stg file with a stg.strategy, in place of flags.

        stagec analyze llama3-8b --tp 8 --dp 8 --sp --zero 3
    """
    options = take_options(given)
    several = given["sweep"] or has_pods(options)
    if several and given["machine"] is not None:
        raise _of_one_step()
    if given["sweep"]:
        from stagec.driver.sweep.table import ANALYSIS

        return sweep(Case(options), given, ANALYSIS)
    check_alone(given)
    if has_pods(options):
        return analyze_pods(options, given)
    if given["html"] is not None:
        raise error("--html of one job is for 'stagec memory'", remedy="add --sweep, or run that")
    limit, machine, symbolic = given["limit"], given["machine"], given["symbolic"]
    builder = JobBuilder(on_machine(options, machine), symbolic=symbolic)
    _check(builder, given)
    if options.print_strategy:
        write_output(builder.strategy(), given["output"])
        return 0
    from stagec.analysis.footprint import peak_bytes, worst_moments
    from stagec.analysis.model_flops import model_flops
    from stagec.analysis.report import analysis

    worst, flops = Planned(worst_moments), Planned(model_flops, *STATED)
    kept = Planned(lambda m: serving_figures(m, builder, limit, machine, symbolic=symbolic))
    most = Planned(peak_bytes)
    watching: list[Hooks] = [
        worst,
        flops,
        *([most] if machine is not None else []),
        *([kept] if builder.serving is not None else []),
    ]
    module = builder.lower(watching=watching)
    result = analysis(
        module,
        builder.model_name,
        symbolic=symbolic,
        worst=worst.found or {},
        flops=flops.found,
    )
    result["repeated"] = builder.repeated.shares
    if kept.found is not None:
        from stagec.analysis.op_bounds import op_bounds

        ops = op_bounds(module, symbolic=symbolic, machine=machine)
        result["serving"] = {**kept.found, "ops": ops}
    if machine is not None:
        result |= verdict_on(machine, result["mesh"], most.found)
    if given["as_json"]:
        write_output(json.dumps(result, indent=1) + "\n", given["output"])
    else:
        from stagec.driver.output.analysis_table import print_analysis

        table = StringIO()
        print_analysis(result, table if given["output"] else sys.stdout)
        if given["output"]:
            write_output(table.getvalue(), given["output"])
    return 0


def _check(builder: JobBuilder, given: Mapping[str, Any]) -> None:
    """Refuse what is about serving where there is none, and a limit that is not given."""
    limit, machine = given["limit"], given["machine"]
    if limit is not None and builder.serving is None:
        raise error("--limit of one job is for 'stagec memory'", remedy="add --sweep, or run that")
    if limit is not None and limit.text == AT_HAND and machine is None:
        raise error("--limit machine is about the --machine", remedy="add --machine h100")
    if machine is not None and builder.serving is None:
        raise _of_one_step()


def _of_one_step() -> DiagnosticError:
    return error(
        "--machine is about the ops of one step of serving",
        remedy="leave it out, or run 'stagec time'",
    )
