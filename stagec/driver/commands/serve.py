"""`stagec serve`: what users of a server would meet, and what its ranks give, over batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from stagec.answers.serve import Batches, serve
from stagec.driver.shell.options import take_options, takes, takes_job
from stagec.driver.shell.sections import LongCommand
from stagec.driver.shell.session import the_session
from stagec.driver.shell.show import show
from stagec.jobs.request.accepted import ACCEPTED, take_accepted
from stagec.jobs.request.machine import machine_of, machine_options
from stagec.jobs.request.option import CommandOption, Whole
from stagec.jobs.request.result import JSON, OUTPUT, PAGE_OR_PLOT
from stagec.jobs.request.times import TimeType
from stagec.jobs.request.units import on_machine

if TYPE_CHECKING:
    pass


@click.command("serve", cls=LongCommand)
@takes_job
@takes(
    *machine_options(
        "The machine that serves: a name that 'stagec machines' lists.", required=True
    ),
    CommandOption(
        "output_tokens",
        Whole(2),
        "Tokens that each sequence makes (default: 128).",
        128,
        metavar="N",
    ),
    CommandOption(
        "batches",
        Batches(),
        "Sequences in decode at any time, of all ranks together (default: 1, 2, 4, ... as fit; "
        "1..64 doubles).",
    ),
    *ACCEPTED,
    CommandOption("ttft", TimeType(), "A limit of the time to the first token: 500ms."),
    CommandOption("tpot", TimeType(), "A limit of the time for each further token: 30ms."),
    JSON,
    CommandOption(
        "html", PAGE_OR_PLOT, "Write a page, or FILE.svg, with the curve.", metavar="FILE"
    ),
    OUTPUT,
)
def command(**given: Any) -> int:
    """Tell what a server gives: time to the first token (TTFT), time for each further one (TPOT),
    and tokens a second, over batches.

    Sequences come with --prompt tokens and make --output-tokens each. The same ranks prefill and
    decode; with --serve disaggregated some pods prefill, with the strategy of --prefill, and others
    decode, with that of --decode. Engines capture steps as graphs, so hosts do not hold devices up.

        stagec serve llama3-8b --tp 2 --prompt 1024 --machine h100-sxm
    """
    options = take_options(given)
    machine = machine_of(given["machine"], the_session(), given["used_ranks"])
    asked = {name: given[name] for name in ("output_tokens", "batches", "ttft", "tpot")}
    accepted = take_accepted(on_machine(options, machine), given)
    answer = serve(options, machine, the_session(), **asked, accepted=accepted)
    the_session().remark(*answer.cautions)
    show(answer, given)
    return 0
