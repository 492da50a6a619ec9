"""`stagec time`: the time of a step on a machine, its breakdown, and the effect of better
machines."""

from typing import Any

import click

from stagec.answers.questions import needed
from stagec.answers.sweep.rows import Case
from stagec.answers.sweep.run import check_alone, sweep, sweep_options
from stagec.answers.time.answer import StepAnswer, time
from stagec.answers.time.perfetto_trace import TIME_FILES, draws, write_perfetto
from stagec.answers.time.table import seconds_text
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.options import take_machine, take_options, takes_job
from stagec.driver.shell.sections import LongCommand
from stagec.driver.shell.session import log, the_session
from stagec.driver.shell.show import show, show_sweep, write_output
from stagec.jobs.pods import Pods
from stagec.jobs.request.acceptance import ACCEPTANCE, take_acceptance
from stagec.jobs.request.limit import limit_option
from stagec.jobs.request.machine import GRAPHS, machine_options, on_machine
from stagec.jobs.request.measurements import MEASURED, measurements
from stagec.jobs.request.option import CommandOption, TimeType, switch
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.result import FORM, JSON, OUTPUT
from stagec.jobs.request.serving_flags import DISAGGREGATED
from stagec.support.diagnostics import error
from stagec.time.costs.replay_options import ReplayOptions


@click.command("time", cls=LongCommand)
@takes_job
@takes(
    *machine_options("The machine: a name that 'stagec machines' lists, or a file."),
    JSON,
    FORM,
    switch(
        "overlap",
        "Whether collectives overlap with computations, or are all blocking.",
        default=True,
    ),
    *MEASURED,
    switch(
        "levers",
        "Whether to time what would help (default: for steps of few actions).",
        default=None,
    ),
    GRAPHS,
    *ACCEPTANCE,
    *sweep_options(timed=True),
    *TIME_FILES,
    CommandOption(
        "within", TimeType(), "Exit with 1 if the step takes longer than this time: 3.5s, 900ms."
    ),
    limit_option(
        "With --sweep: say whether each row fits a size, a device, or 'machine', that of the row.",
        at_hand=True,
    ),
    OUTPUT,
)
def command(**given: Any) -> int:
    """Compute how long a training step takes on a machine, where time goes, and what would help.

    MODEL is a model of the library, a .stg file, or a config.json (or its folder); STRATEGY is a
    .stg file with a stg.strategy, in place of flags.

        stagec time llama3-8b --tp 8 --dp 8 --sp --zero 3 --machine h100-sxm
    """
    options = take_options(given)
    given["machine"] = take_machine(given)
    accepted = take_acceptance(options, given)
    one = not (given["sweep"] or options.print_strategy or options.serve == DISAGGREGATED)
    if given["within"] is not None and not one:
        raise error("--within is for one step of one job", remedy="leave it out, or use --json")
    if given["sweep"]:
        if accepted.given:
            raise error(
                "--accepted cannot be used with --sweep, which has no TPOT", remedy="leave it out"
            )
        return _swept(options, given)
    machine, session = needed(given["machine"]), the_session()
    check_alone(given, plotted=True)
    if given["limit"] is not None:
        raise error(
            "--limit for one job is an option of 'stagec memory'",
            remedy="run 'stagec memory', or add --sweep",
        )
    if options.print_strategy:
        write_output(Pods.of(on_machine(options, machine), session).strategy(), given["output"])
        return 0
    pictures = draws(given)
    measured = measurements(given["measured"], given["kernels_from"], machine)
    replay = ReplayOptions(given["overlap"], given["graphs"], measured)
    with session.live() as progress:
        answer = time(
            *(options, machine, session, replay),
            levers=given["levers"],
            accepted=accepted,
            memory=pictures,
            progress=progress,
        )
    if given["perfetto"] is not None:
        write_perfetto(answer.drawn(), given["perfetto"], given["perfetto_ranks"], session)
    show(answer, given)
    return _late(answer, given["within"]) if isinstance(answer, StepAnswer) else 0


def _late(answer: StepAnswer, within: float | None) -> int:
    """The exit code: 1 if the step takes longer than `within` seconds, which is logged."""
    if within is None or answer.step_seconds <= within:
        return 0
    took, limit = seconds_text(answer.step_seconds), seconds_text(within)
    log(f"a step takes {took}: {answer.step_seconds / within - 1:.1%} more than --within {limit}")
    return 1


def _swept(options: JobOptions, given: dict[str, Any]) -> int:
    """Time many configurations and show them."""
    from stagec.answers.sweep.table import TIME

    if not any("machine" in axis.sets for axis in given["sweep"]):
        needed(given["machine"])
    files = tuple(path.resolve() for path in given["measured"])
    case = Case(
        *(options, given["machine"], given["overlap"], files, given["kernels_from"]),
        graphs=given["graphs"],
        used=given["used_ranks"],
    )
    return show_sweep(sweep(case, given, TIME, the_session()), given)
