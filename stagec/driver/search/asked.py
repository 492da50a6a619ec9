"""The options of a search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from stagec.driver.request import completion
from stagec.driver.request.emission import worker_options
from stagec.driver.request.limit import limit_option
from stagec.driver.request.machine import used_option
from stagec.driver.request.options import SIZES
from stagec.driver.request.result import PAGE, RESULT
from stagec.driver.search.question import Machines, Pareto, Prices
from stagec.driver.search.serving import serving_options
from stagec.driver.search.space import BATCHES, KNOBS, RANKS, Values, knob_option

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.argument("model", required=False, default="", shell_complete=completion.models),
    SIZES,
    click.option(
        "--batch",
        type=Values(BATCHES),
        metavar="N|A..B",
        help="The global batch in sequences, as --set B=N; several (512..2048 doubles): which is "
        "best by the time of a sequence.",
    ),
    click.option(
        "--ranks",
        type=Values(RANKS),
        metavar="N|A..B",
        help="All ranks; several (256..4096 doubles): the best for each.",
    ),
    click.option(
        "--machine",
        type=Machines(),
        shell_complete=completion.machines,
        help="The machine that the job runs on: a name that 'stagec machines' lists, or a file; "
        "several: which is best.",
    ),
    used_option,
    click.option("--space", metavar="FILE", help="What varies, as a text with a stg.space."),
    click.option(
        "--seed-from",
        metavar="PRESET",
        shell_complete=completion.presets,
        help="Start from a published run: its model and sizes, and degrees next to its own.",
    ),
    *(knob_option(flag) for flag in KNOBS.values()),
    limit_option("What a rank may hold (default: the device, less what is not for the job)."),
    click.option("--top", type=click.IntRange(1, 1000), default=5, help="How many to show."),
    click.option(
        "--objective",
        type=click.Choice(["time", "tokens-per-rank", "cost", "memory"]),
        help="What is best: the shortest step (default), most tokens/s per rank, fewest "
        "rank-seconds, or the smallest peak of memory.",
    ),
    click.option(
        "--price",
        type=Prices(),
        help="What a rank costs an hour, in any currency; for several machines one for each.",
    ),
    click.option(
        "--pareto",
        type=Pareto(),
        help="Instead of the best: all that no other beats in these respects.",
    ),
    click.option("--exhaustive", is_flag=True, help="Evaluate every legal point: no bounds."),
    click.option(
        "--neighbours", is_flag=True, help="Evaluate all that differ from the best in one flag."
    ),
    click.option(
        "--sensitivity",
        is_flag=True,
        help="Tell which figure of the machine, halved or doubled, changes which of them is best.",
    ),
    click.option("--print-space", is_flag=True, help="Print what varies, and stop."),
    click.option(
        "--overlap/--no-overlap",
        default=True,
        help="Whether collectives run beside computations, or all of them are blocking.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values."),
    click.option(
        "--html",
        type=PAGE,
        metavar="FILE",
        help="Write a page: memory over time, all flags side by side, and what each is.",
    ),
    click.option(
        "--cache/--no-cache", default=True, help="Whether to keep answers and to use kept ones."
    ),
    click.option(
        "-o", "--output", type=RESULT, metavar="FILE", help="Write the result here, not to stdout."
    ),
)


def search_options(function: F) -> F:
    """Give a command the options of a search."""
    function = serving_options(worker_options(function))
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
