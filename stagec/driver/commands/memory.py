"""`stagec memory`: the memory of every rank, whether it fits, and remedies."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from stagec.analysis.memory_fit import MemoryFit
from stagec.answers.memory.answer import FIT, MemoryPlan, memory
from stagec.answers.memory.picture import LIMIT, PICTURES, Changes, draw
from stagec.answers.sweep.rows import Case
from stagec.answers.sweep.run import check_alone, sweep, sweep_options
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.options import options_of_compare, take_options, takes_job
from stagec.driver.shell.sections import LongCommand
from stagec.driver.shell.session import log, the_session
from stagec.driver.shell.show import show, show_sweep, write_output
from stagec.jobs.pods import Pods
from stagec.jobs.request.option import CommandOption, switch
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.result import FORM, JSON, OUTPUT, form_of
from stagec.support.diagnostics import error


@click.command("memory", cls=LongCommand)
@takes_job
@takes(
    LIMIT,
    switch("advise", "With --limit: search for flags with which it fits, which may take a minute."),
    CommandOption(
        "fit", FIT, "Place all buffers: in one arena, or as PyTorch's caching allocator does."
    ),
    JSON,
    FORM,
    *PICTURES,
    *sweep_options(),
    OUTPUT,
)
def command(**given: Any) -> int:
    """Plan the memory of one training step: the peak of each rank, and what it holds then.

    MODEL is a model of the library, a .stg file, or a config.json (or its folder); STRATEGY is a
    .stg file with a stg.strategy, in place of flags.

        stagec memory llama3-8b --tp 8 --dp 8 --sp --zero 3 --limit h100
    """
    options = take_options(given)
    given["compare"] = [Changes(text, options_of_compare(text)) for text in given["compare"]]
    if given["sweep"]:
        from stagec.answers.sweep.table import FOOTPRINT

        return show_sweep(sweep(Case(options), given, FOOTPRINT, the_session()), given)
    check_alone(given)
    if given["advise"] and given["limit"] is None:
        raise error(
            "--advise needs --limit, the memory that a rank may use", remedy="add --limit h100"
        )
    if options.print_strategy:
        write_output(Pods.of(options, the_session()).strategy(), given["output"])
        return 0
    return _planned(options, given)


def _planned(options: JobOptions, given: Mapping[str, Any]) -> int:
    """Plan, draw and show a job; the exit code is 1 if it does not fit."""
    plan = memory(options, the_session(), fit=given["fit"], limit=given["limit"])
    each = plan.pods
    if (data := form_of(given) in ("json", "csv")) or given["output"]:
        for pod, one in each.items():
            _print_verdict(f"{pod}/" if pod else "", one)
    builders = {pod: planned() for pod, planned in plan.planned.items()}
    drawing = draw(
        builders, {pod: one.data for pod, one in each.items()}, options, given, the_session()
    )
    plan = replace(plan, drawing=drawing)
    if not data:  # people read it while the search runs
        show(plan, given)
    if plan.fits is False:
        for pod, one in each.items():
            if not one.fits:
                _print_reasons(f"{pod}: " if pod else "", one.worst)
        if given["advise"]:
            from stagec.searches.advice.suggestions import advised

            plan = advised(plan, given["limit"], the_session())
        else:
            log("--advise looks for flags with which it fits")
    if data:
        show(plan, given)
    return 1 if plan.fits is False else 0


def _print_verdict(of: str, plan: MemoryPlan) -> None:
    """Log whether a plan fits, if no table states it."""
    from stagec.output.tables import fit_text

    if (fit := plan.data.get("fit")) is not None:
        log(f"{of}{fit['class']}: {fit_text(MemoryFit(fit['peak'], fit['room']))}")


def _print_reasons(of: str, worst: Mapping[str, Any]) -> None:
    """Log the largest category of a class that does not fit."""
    from stagec.output.tables import bytes_text

    category = max(worst["categories"], key=lambda c: worst["categories"][c])
    size = bytes_text(worst["categories"][category])
    log(f"{of}most of it is {category}: {size}; the peak is at {worst['at']}")
