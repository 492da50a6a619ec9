"""`stagec analyze`: counts of a training step, as a table or as JSON."""

from typing import Any

import click

from stagec.answers.analyze import analyze
from stagec.answers.sweep.rows import Case
from stagec.answers.sweep.run import check_alone, sweep, sweep_options
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.options import take_machine, take_options, takes_job
from stagec.driver.shell.sections import LongCommand
from stagec.driver.shell.session import the_session
from stagec.driver.shell.show import show, show_sweep, write_output
from stagec.jobs.pods import Pods
from stagec.jobs.request.limit import limit_option
from stagec.jobs.request.machine import machine_options, on_machine
from stagec.jobs.request.option import CommandOption, switch
from stagec.jobs.request.result import FORM, JSON, OUTPUT, PAGE_OR_PLOT
from stagec.support.diagnostics import error


@click.command("analyze", cls=LongCommand)
@takes_job
@takes(
    JSON,
    FORM,
    switch("symbolic", "Print expressions in the symbols instead of numbers."),
    *sweep_options(),
    CommandOption(
        "html",
        PAGE_OR_PLOT,
        "Write a page with the counts; with --sweep a plot (FILE.svg, FILE.pdf: alone).",
    ),
    *machine_options(
        "With --serve: say whether each op is bound by memory or by computation, on this machine."
    ),
    limit_option(
        "With --sweep: say whether each row fits a size or a device such as h100; with --serve: "
        "the largest batch that fits.",
        at_hand=True,
    ),
    OUTPUT,
)
def command(**given: Any) -> int:
    """Count parameters, FLOPs, communication and memory of one training step, per rank.

    MODEL is a model of the library, a .stg file, or a config.json (or its folder); STRATEGY is a
    .stg file with a stg.strategy, in place of flags.

        stagec analyze llama3-8b --tp 8 --dp 8 --sp --zero 3
    """
    flag = given["machine"]
    options = take_options(given)
    if options.serve is None:  # the machine of a job file is for other commands
        given["machine"] = flag
    given["machine"] = take_machine(given)
    if given["sweep"]:
        from stagec.answers.sweep.table import ANALYSIS

        if given["machine"] is not None:
            raise error(
                "'stagec analyze' does not take --machine with --sweep",
                remedy="leave it out, or run 'stagec time --sweep'",
            )
        return show_sweep(sweep(Case(options), given, ANALYSIS, the_session()), given)
    check_alone(given)
    if options.print_strategy:
        job = on_machine(options, given["machine"])
        write_output(
            Pods.of(job, the_session(), symbolic=given["symbolic"]).strategy(), given["output"]
        )
        return 0
    asked = {name: given[name] for name in ("symbolic", "machine", "limit")}
    show(analyze(options, the_session(), **asked), given)
    return 0
