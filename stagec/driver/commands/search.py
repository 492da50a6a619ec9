"""`stagec search`: the strategies that fit and are fastest, why the others lose, and the command
that compiles each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

import click

from stagec.driver.output.common import INTERRUPTED, write_output
from stagec.driver.output.streams import tell
from stagec.driver.request import completion
from stagec.driver.request.emission import line_on_terminal, worker_options
from stagec.driver.request.limit import limit_option
from stagec.driver.request.machine import tell_cautions, used_option
from stagec.driver.request.options import SIZES
from stagec.driver.request.result import PAGE, RESULT
from stagec.driver.request.sections import LongCommand
from stagec.driver.search.question import Machines, Pareto, Prices, questions, space_text
from stagec.driver.search.serving import serving_options
from stagec.driver.search.space import BATCHES, KNOBS, RANKS, Values, knob_option
from stagec.ir_spec.ops.statement import Section
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.processors import processors

if TYPE_CHECKING:
    from stagec.driver.search.jobs import Run
    from stagec.driver.search.run import Answer, Question

#: What other commands have of the same name is something else.
_PLACES = {"batch": Section.DATA, "pareto": None, "as_csv": None}
#: The remedy where an interrupt leaves nothing to tell.
_LESS = "let it run, or give a smaller space"
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
        help="What is best: the shortest step (default), most tokens/s of a rank, fewest "
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


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = serving_options(worker_options(function))
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command("search", cls=LongCommand, places=_PLACES)
@_options
def command(**given: Any) -> int:
    """Search the strategies that fit and are fastest, and tell why the others lose.

    Each flag of a strategy takes several values (--tp 1..8 --zero 0,1,3; A..B doubles from A);
    'stagec compile --help' says what it means. What is not given varies as practitioners vary it
    (--print-space), or has its default.

        stagec search llama3-8b --ranks 64 --machine h100-sxm --batch 256
    """
    if given["as_json"] and given["as_csv"]:
        raise error("--json and --csv are two forms of the answer", remedy="choose one of them")
    asked = questions(given)
    if given["print_space"]:
        write_output(space_text(asked[0].space), given["output"])
        return 0
    from stagec.driver.search.cache import cached

    found = cached(given, asked, lambda: _found(asked, given))
    tell_cautions(found["cautions"])
    if given["html"] is not None:
        from stagec.driver.search.page import write_page

        write_page(given["html"], found)
    _print(found, given)
    if not found["proven"]:
        if not found["best"]:
            left = found["left"]
            tell(f"interrupted before a strategy was found; {left:,} points are left: {_LESS}")
        return INTERRUPTED
    if not found["best"]:
        raise _nothing(found["nearest"], serves=given["serve"] is not None)
    return 0


def _found(asked: list[Question], given: Mapping[str, Any]) -> dict[str, Any]:
    """The answers as plain data."""
    from stagec.driver.search.extra import nearest, neighbours, sensitivity
    from stagec.driver.search.run import search
    from stagec.driver.search.table import as_json, least
    from stagec.driver.search.tried import tried

    answers: list[Answer] = []
    with _crew(given) as (run, at_a_time), line_on_terminal() as progress:
        for question in asked:
            try:
                answers.append(search(question, run, at_a_time, progress))
            except KeyboardInterrupt:
                if not answers:
                    tell(f"interrupted while the points were listed: {_LESS}")
                    raise
                answers[-1].interrupted = True
            if answers[-1].interrupted:
                break
        found = as_json(answers)
        first = min((a for a in answers if a.best), key=least, default=None)
        if first is None:
            found["nearest"] = nearest(answers)
        if first is not None and not first.interrupted:
            try:
                found["tried"] = tried(first, run, progress)
                found["neighbours"] = neighbours(first, run if given["neighbours"] else None)
                if given["sensitivity"]:
                    found["sensitivity"] = sensitivity(first, run)
            except KeyboardInterrupt:  # the best are told, and not kept for another time
                found["proven"] = False
    return found


def _nothing(near: Mapping[str, Any] | None, *, serves: bool) -> DiagnosticError:
    """What is told where no point is left."""
    from stagec.driver.output.tables import bytes_text

    if near is None:
        return error(
            "no strategy of this space is left",
            remedy="what was left out is counted above; --print-space prints the space",
        )
    held, room = bytes_text(near["memory_at_least"]), bytes_text(near["room"])
    return error(
        f"no strategy of this space fits: '{near['strategy']}' holds at least {held} a rank, and "
        f"{room} of {near['machine']} are left for it",
        remedy="give more --ranks, another --machine, or what holds less: "
        + ("a smaller --batch" if serves else "--zero 3, --recompute full, --offload activations"),
    )


def _print(found: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    from stagec.driver.search.table import csv_text, print_answer

    if given["as_json"]:
        text = json.dumps(found, indent=1) + "\n"
    elif given["as_csv"]:
        text = csv_text(found)
    else:
        table = StringIO()
        straight = sys.stdout.isatty() and not given["output"]
        print_answer(found, sys.stdout if straight else table)
        text = table.getvalue()
    write_output(text, given["output"])


@contextmanager
def _crew(given: Mapping[str, Any]) -> Generator[tuple[Run, int]]:
    """Who evaluates, and how many jobs at a time."""
    from stagec.driver.search.jobs import kind_of, work

    if given["scheduler"] is not None:
        from stagec.job.cluster import cluster

        with cluster(given["scheduler"], given["jobs"]) as run:
            yield partial(run, work), 64
        return
    from stagec.job.workers import crew

    processes = given["jobs"] or processors()
    with crew(work, processes, kind_of) as local:
        yield local, processes
