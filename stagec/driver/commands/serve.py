"""`stagec serve`: what users of a server would meet, and what its ranks give, over batches."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from stagec.driver.output.report import show
from stagec.driver.request.accepted import accepted_options, take_accepted
from stagec.driver.request.machine import machine_option, tell_cautions
from stagec.driver.request.options import job_options, take_options
from stagec.driver.request.ranges import is_range, values_of
from stagec.driver.request.result import PAGE_OR_PLOT, RESULT
from stagec.driver.request.sections import LongCommand
from stagec.driver.request.times import TimeType
from stagec.driver.request.units import on_machine
from stagec.driver.verbs.serve import LARGEST, serve

if TYPE_CHECKING:
    from stagec.machines import Machine

_BATCH = re.compile("0*[1-9][0-9]{0,5}")


class Batches(click.ParamType[tuple[int, ...]]):
    """`1,2,4,8`, or `1..8`."""

    name = "N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The batches, in order."""
        given = [p.strip() for p in str(value).split(",")]
        parts = [t for p in given for t in (values_of(p) if is_range(p) else (p,))]
        if not parts or not all(_BATCH.fullmatch(p) and int(p) <= LARGEST for p in parts):
            self.fail(f"expects batches such as 1,8,64 or 1..64, found '{value}'", param, ctx)
        return tuple(sorted({int(p) for p in parts}))


@click.command("serve", cls=LongCommand)
@job_options
@machine_option("The machine that serves: a name that 'stagec machines' lists.", required=True)
@click.option(
    "--output-tokens",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    metavar="N",
    help="Tokens that each sequence makes.",
)
@click.option(
    "--batches",
    type=Batches(),
    help="Sequences in decode at any time, of all ranks together (default: 1, 2, 4, ... as fit;"
    " 1..64 doubles).",
)
@accepted_options
@click.option("--ttft", type=TimeType(), help="A limit of the time to the first token: 500ms.")
@click.option("--tpot", type=TimeType(), help="A limit of the time for each further token: 30ms.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--html", type=PAGE_OR_PLOT, metavar="FILE", help="Write a page, or FILE.svg, with the curve."
)
@click.option(
    "-o", "--output", type=RESULT, metavar="FILE", help="Write the result here instead of stdout."
)
def command(**given: Any) -> int:
    """Tell what a server gives: time to the first token (TTFT), time for each further one (TPOT),
    and tokens a second, over batches.

    Sequences come with --prompt tokens and make --output-tokens each. The same ranks prefill and
    decode; with --serve disaggregated some pods prefill, with the strategy of --prefill, and others
    decode, with that of --decode. Engines capture steps as graphs, so hosts do not hold devices up.

        stagec serve llama3-8b --tp 2 --prompt 1024 --machine h100-sxm
    """
    machine: Machine = given["machine"]
    options = take_options(given)
    asked = {name: given[name] for name in ("output_tokens", "batches", "ttft", "tpot")}
    accepted = take_accepted(on_machine(options, machine), given)
    answer = serve(options, machine, **asked, accepted=accepted)
    tell_cautions(answer.cautions)
    show(answer, given)
    return 0
