"""`stagec memory`: what every GPU holds, when and why; whether it fits, and what would make it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from typing import Any

import click

from stagec.driver.job.builder import JobBuilder
from stagec.driver.job.pod_options import has_pods
from stagec.driver.memory.limits import judge
from stagec.driver.memory.picture import draw, picture_options
from stagec.driver.memory.pods import memory_of_pods
from stagec.driver.output.common import write_output
from stagec.driver.output.streams import tell
from stagec.driver.request.limit import Limit, limit_option
from stagec.driver.request.options import job_options, take_options
from stagec.driver.request.result import RESULT
from stagec.driver.request.sections import LongCommand
from stagec.driver.sweep.rows import Case
from stagec.driver.sweep.run import check_alone, sweep, sweep_options
from stagec.pipeline.instrument import PLAN
from stagec.support.diagnostics import error


@click.command("memory", cls=LongCommand)
@job_options
@limit_option(
    "Say whether it fits: exit with 1 if a rank holds more than a size, or than a device such as "
    "h100 has."
)
@click.option(
    "--advise",
    is_flag=True,
    help="Of --limit: look for flags with which it fits, which may take a minute.",
)
@click.option(
    "--fit",
    type=click.Choice(["best-fit", "caching"]),
    help="Place all buffers: in one arena, or as PyTorch's caching allocator does.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@picture_options
@sweep_options
@click.option(
    "-o", "--output", type=RESULT, metavar="FILE", help="Write the result here instead of stdout."
)
def command(**given: Any) -> int:
    """Plan the memory of one training step: what every rank holds at its worst moment.

    MODEL is a model of the library, a .stg file, or a config.json (or its folder); STRATEGY is a
    .stg file with a stg.strategy, in place of flags.

        stagec memory llama3-8b --tp 8 --dp 8 --sp --zero 3 --limit h100
    """
    options = take_options(given)
    if given["sweep"]:
        from stagec.driver.sweep.table import FOOTPRINT

        return sweep(Case(options), given, FOOTPRINT)
    check_alone(given)
    if given["advise"] and (given["limit"] is None or has_pods(options)):
        raise error(
            "--advise looks for what fits a limit, of a job without pods",
            remedy="leave it out, or add --limit h100"
            if given["limit"] is None
            else "leave it out",
        )
    if has_pods(options):
        return memory_of_pods(options, given)
    builder = JobBuilder(options)
    if options.print_strategy:
        write_output(builder.strategy(), given["output"])
        return 0
    from stagec.analysis.footprint import footprint

    module = builder.lower(PLAN)
    result = footprint(module, builder.model_name, given["fit"])
    limit: Limit | None = given["limit"]
    worst = None if limit is None else judge(result, limit, given)
    draw(builder, options, result, given)  # first: a reader of the table may close the pipe
    _print(result, given)
    if limit is None or worst is None:
        return 0
    _tell_why(worst)
    if given["advise"]:
        from stagec.driver.advice.suggestions import suggest

        suggest(builder, limit)
    else:
        tell("--advise looks for flags with which it fits")
    return 1


def _tell_why(worst: Mapping[str, Any]) -> None:
    """What dominates in a class that holds too much."""
    from stagec.driver.output.tables import bytes_text

    category = max(worst["categories"], key=lambda c: worst["categories"][c])
    size = bytes_text(worst["categories"][category])
    tell(f"most of it is {category}: {size}; the peak is at {worst['at']}")


def _print(result: dict[str, Any], given: dict[str, Any]) -> None:
    if given["as_json"]:
        write_output(json.dumps(result, indent=1) + "\n", given["output"])
        return
    from stagec.driver.output.analysis_table import print_footprint

    text = io.StringIO()
    print_footprint(result, text if given["output"] else sys.stdout)
    if given["output"]:
        write_output(text.getvalue(), given["output"])
