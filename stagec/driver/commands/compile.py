"""`stagec compile`: from a model and a strategy to one execution trace per rank."""

import sys
from typing import Any

import click

from stagec.answers.compile import COMPILE, compile_job, strategy_to_compile
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.options import take_options, takes_job
from stagec.driver.shell.sections import LongCommand
from stagec.driver.shell.session import the_session
from stagec.jobs.written import log_written


@click.command("compile", cls=LongCommand)
@takes_job
@takes(*COMPILE)
def command(**given: Any) -> int:
    """Compile a model for a strategy and write one Chakra trace per rank, a groups file and a
    manifest.

    MODEL is a model of the library, a .stg file, or a config.json (or its folder); STRATEGY is a
    .stg file with a stg.strategy, in place of flags.

        stagec compile llama3-8b -o traces --tp 8 --dp 8 --sp --zero 3
    """
    options = take_options(given)
    if options.print_strategy:
        sys.stdout.write(strategy_to_compile(options, given, the_session()))
        return 0
    answer = compile_job(options, given, the_session())
    if not given["quiet"]:
        answer.print(sys.stdout)
        sys.stdout.flush()  # before what follows on stderr
        if answer.output is not None and answer.written:
            log_written(answer.written, answer.output, answer.times, the_session())
    return 0
