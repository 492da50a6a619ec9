"""The command of a question about a job."""

from inspect import getdoc
from typing import Any

import click

from stagec.answers.questions import JobQuestion
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.options import take_machine, take_options, takes_job
from stagec.driver.shell.sections import LongCommand
from stagec.driver.shell.session import the_session
from stagec.driver.shell.show import show
from stagec.jobs.request.machine import machine_options
from stagec.jobs.request.option import CommandOption
from stagec.jobs.request.result import FORM, JSON, OUTPUT, PAGE_OR_PLOT

_HTML = CommandOption(
    "html", PAGE_OR_PLOT, "Write a page with the answer, or its plot as FILE.svg or FILE.pdf."
)


def command_of(question: JobQuestion) -> click.Command:
    """A command that takes a job and the options of the question, and shows its answer."""
    machine = machine_options(question.machine) if question.machine else ()

    @click.command(question.name, cls=LongCommand, help=getdoc(question.ask))
    @takes_job
    @takes(*machine, *question.options, JSON, FORM, _HTML, OUTPUT)
    def command(**given: Any) -> int:
        options, session = take_options(given), the_session()
        values = {option.name: given[option.name] for option in question.options}
        on = take_machine(given) if machine else None
        show(question.ask(options, on, values, session), given)
        return 0

    return command
