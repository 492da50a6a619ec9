"""`stagec search`: the strategies that fit and are fastest, why the others lose, and the command
that compiles each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from stagec.driver.common import kept_reports, write_output
from stagec.driver.emission import worker_options
from stagec.driver.job import JobBuilder
from stagec.driver.limit import AT_HAND, Limit, limit_option
from stagec.driver.machine import machine_option
from stagec.driver.options import JobOptions, Sizes, merged_sizes
from stagec.driver.search_space import (
    KNOBS,
    base_options,
    default_space,
    knob_option,
    values_text,
)
from stagec.explore.space import Space
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.driver.search_run import Answer, Question, Run

#: Points that a search lists one by one.
_MOST_POINTS = 2_000_000


def _knobs(function: Callable[..., Any]) -> Callable[..., Any]:
    for flag in reversed(KNOBS.values()):
        function = knob_option(flag)(function)
    return function


@click.command("search")
@click.argument("model", required=False, default="")
@click.option(
    "--set",
    "sizes",
    type=Sizes(),
    multiple=True,
    callback=merged_sizes,
    help="Sizes of symbols; B is the global batch in sequences.",
)
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="All ranks.")
@machine_option("The machine that the job runs on: a name that 'stagec machines' lists, or a file.")
@_knobs
@limit_option(
    "What a rank may hold: a size or a device (default: 'machine', less what is not for the job)."
)
@click.option("--top", type=click.IntRange(1, 1000), default=5, help="How many to show.")
@click.option(
    "--objective",
    type=click.Choice(["time", "tokens-per-rank", "cost", "memory"]),
    default="time",
    help="What is best: the shortest step, most tokens/s of a rank, fewest rank-seconds, or the "
    "smallest peak of memory.",
)
@click.option("--exhaustive", is_flag=True, help="Evaluate every legal point: no bounds.")
@click.option("--print-space", is_flag=True, help="Print what varies and how many points, and stop.")
@click.option(
    "--overlap/--no-overlap",
    default=True,
    help="Whether collectives run beside computations, or all of them are blocking.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@worker_options
@click.option("-o", "--output", metavar="FILE", help="Write the result here instead of stdout.")
def command(**given: Any) -> int:
    """Search the strategies that fit and are fastest, and tell why the others lose.

    Each flag of a strategy takes several values (--tp 1..8 --zero 0,1,3; A..B doubles from A). What
    is not given varies as practitioners vary it (--print-space), or has its default.
    """
    question = _question(given)
    if given["print_space"]:
        write_output(_space_text(question.space), given["output"])
        return 0
    from stagec.driver.search_run import search
    from stagec.driver.search_table import as_json, print_answer

    with _crew(given) as (run, at_a_time), _line() as tell:
        answer = search(question, run, at_a_time, tell)
    if given["as_json"]:
        write_output(json.dumps(as_json(answer), indent=1) + "\n", given["output"])
    else:
        from io import StringIO

        table = StringIO()
        print_answer(answer, table if given["output"] or not sys.stdout.isatty() else sys.stdout)
        write_output(table.getvalue(), given["output"])
    return 0 if answer.best else 1


def _question(given: Mapping[str, Any]) -> Question:
    """What is asked. Raises `DiagnosticError`."""
    from stagec.driver.probes import LAYERS, Layers
    from stagec.driver.search_run import Question

    if given["machine"] is None:
        raise error("a search needs a machine", remedy="add --machine h100-sxm, for example")
    if given["ranks"] is None:
        raise error("a search needs the number of ranks", remedy="add --ranks 512, for example")
    with kept_reports():
        module = JobBuilder(JobOptions(given["model"], sizes=given["sizes"]), symbolic=True).module
    sizes = {n: v for n, v in module.symbols.items() if v is not None}
    base = base_options(JobOptions(given["model"], sizes=given["sizes"]), sizes)
    counts = [op.expr("count") for op in module.walk() if op.name == "stg.repeat"]
    names = [count.symbol_name for count in counts]
    numbers = [sizes.get(n or "", count.value or 0) for n, count in zip(names, counts, strict=True)]
    at = names.index(LAYERS) if LAYERS in names else len(names)
    layers = Layers(sum(numbers[:at]), sizes.get(LAYERS, 0), sum(numbers[at + 1 :]))
    return Question(
        base,
        sizes,
        layers,
        _space(given, sizes),
        given["machine"],
        given["ranks"],
        given["limit"] or Limit(AT_HAND, 0),
        given["objective"],
        given["top"],
        given["overlap"],
        exhaustive=given["exhaustive"],
    )


def _space(given: Mapping[str, Any], sizes: Mapping[str, int]) -> Space:
    """The default with what flags say instead. Raises `DiagnosticError` for one that is too
    large."""
    knobs = dict(default_space(sizes, given["ranks"], given["machine"]).knobs)
    said = {n: given[n] for n in KNOBS if given[n] is not None}
    if "microbatches" in said:
        knobs.pop("microbatch_size", None)
        if "microbatch_size" in said:
            raise error(
                "--microbatches and --microbatch-size both give the microbatches",
                remedy="give one of them",
            )
    space = Space({**knobs, **said})
    if space.count > _MOST_POINTS:
        seconds = space.count * 1e-4
        raise error(
            f"the space has {space.count:,} points: to list them takes about {_long(seconds)}",
            remedy=f"vary less, up to {_MOST_POINTS:,} points; --print-space tells what varies",
        )
    return space


def _long(seconds: float) -> str:
    for unit, size in (("years", 3.15e7), ("days", 86400.0), ("hours", 3600.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 60:,.0f} minutes"


def _space_text(space: Space) -> str:
    lines = [
        f"--{name.replace('_', '-')} {values_text(name, values)}"
        for name, values in space.knobs.items()
    ]
    return "\n".join([*lines, f"{space.count:,} points", ""])


@contextmanager
def _crew(given: Mapping[str, Any]) -> Generator[tuple[Run, int]]:
    """Who evaluates, and how many jobs at a time."""
    from stagec.driver.search_jobs import work

    if given["scheduler"] is not None:
        from stagec.job.cluster import cluster

        with cluster(given["scheduler"], given["jobs"]) as run:
            yield partial(run, work), 64
        return
    from stagec.job.workers import crew

    processes = given["jobs"] or len(os.sched_getaffinity(0))
    with crew(work, processes) as local:
        yield local, 2 * processes


@contextmanager
def _line() -> Generator[Callable[[str], None]]:
    """A line of progress on a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def tell(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text[:110]}")
        sys.stderr.flush()

    try:
        yield tell
    finally:
        tell("")


def answered(answers: Sequence[Answer]) -> bool:
    """Whether any of them found something."""
    return any(answer.best for answer in answers)
