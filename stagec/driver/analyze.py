"""`stagec analyze`: counts of a training step, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import click

from stagec.driver.common import write_output
from stagec.driver.compile_pods import analyze_pods
from stagec.driver.job import JobBuilder
from stagec.driver.limit import limit_option
from stagec.driver.options import job_options, take_options
from stagec.driver.planned import Planned
from stagec.driver.serving import DISAGGREGATED, serving_figures
from stagec.driver.sweep import check_alone, sweep, sweep_options
from stagec.driver.sweep_rows import Case
from stagec.pipeline.instrument import TYPED, Hooks
from stagec.support.diagnostics import error


@click.command("analyze")
@job_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--symbolic", is_flag=True, help="Print expressions in the symbols instead of numbers."
)
@sweep_options
@click.option(
    "--html", type=Path, metavar="FILE", help="Of --sweep: write a page, or FILE.svg, with a plot."
)
@limit_option(
    "Of --sweep: say what holds no more, of a size or a device such as h100; of --serve: the "
    "largest batch that does."
)
@click.option("-o", "--output", metavar="FILE", help="Write the result here instead of stdout.")
def command(**given: Any) -> int:
    """Count parameters, FLOPs, communication and memory of one training step, per rank.

    MODEL is a .stg file or the name of a library model; STRATEGY a .stg file with a stg.strategy.
    """
    options = take_options(given)
    if given["sweep"]:
        from stagec.driver.sweep_table import ANALYSIS

        return sweep(Case(options), given, ANALYSIS)
    check_alone(given)
    if options.serve == DISAGGREGATED:
        return analyze_pods(options, given)
    if given["html"] is not None:
        raise error("--html of one job is for 'stagec memory'", remedy="add --sweep, or run that")
    limit = given["limit"]
    if limit is not None and options.serve is None:
        raise error("--limit of one job is for 'stagec memory'", remedy="add --sweep, or run that")
    builder = JobBuilder(options, symbolic=given["symbolic"])
    if options.print_strategy:
        write_output(builder.strategy(), given["output"])
        return 0
    from stagec.analysis.footprint import worst_moments
    from stagec.analysis.model_flops import model_flops
    from stagec.analysis.report import analysis

    worst, forward = Planned(worst_moments), Planned(model_flops, after=TYPED)
    kept = Planned(lambda m: serving_figures(m, builder, limit, symbolic=given["symbolic"]))
    watching: list[Hooks] = [worst, forward, *([kept] if builder.serving is not None else [])]
    module = builder.lower(watching=watching)
    result = analysis(
        module,
        builder.model_name,
        symbolic=given["symbolic"],
        worst=worst.found or {},
        forward=forward.found,
    )
    if kept.found is not None:
        result["serving"] = kept.found
    if given["as_json"]:
        write_output(json.dumps(result, indent=1) + "\n", given["output"])
    else:
        from stagec.driver.tables import print_analysis

        table = StringIO()
        print_analysis(result, table if given["output"] else sys.stdout)
        if given["output"]:
            write_output(table.getvalue(), given["output"])
    return 0
