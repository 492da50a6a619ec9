"""What would fit, told on stderr: the search of `advice`, with compilers for it, and its answer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from stagec.analysis.figures import Figures
from stagec.driver.advice.search import BUDGET, MOST_CHANGES, Advice, Suggestion, advise
from stagec.driver.job.builder import JobBuilder
from stagec.driver.job.figures import figures
from stagec.driver.output.common import kept_reports
from stagec.driver.output.streams import tell
from stagec.driver.output.tables import bytes_text, console, count_text, table
from stagec.driver.request.command_line import job_words
from stagec.driver.request.emission import progress_bar
from stagec.driver.request.limit import Limit
from stagec.driver.request.options import JobOptions
from stagec.ir.module import BATCH
from stagec.ir.serving import MIXED
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError
from stagec.support.processors import processors
from stagec.traces.workers import run_units

#: Nothing that looks inside is for the jobs of a search.
_SILENT: Mapping[str, Any] = {
    "print_after": (),
    "dump_dir": None,
    "time_passes": False,
    "reproducer": None,
    "check_numerics": False,
}


def suggest(builder: JobBuilder, limit: Limit) -> None:
    """Tell what would make a job fit in a limit, and the commands that show it. Raises
    `DiagnosticError` if its pipeline does not lower it."""
    if builder.from_texts:
        tell("the strategy is a text, which no flag changes: write what holds less into it")
        return
    sizes = {n: v for n, v in builder.module.symbols.items() if v is not None}
    options = builder.options.changed(ranks=None, **_SILENT)
    if options.serve == MIXED:  # each group of ranks has the step
        sizes.pop(BATCH, None)
    elif options.serve:
        options = options.changed(batch=sizes.get(BATCH))
    elif BATCH in sizes:  # written down, so that no change changes the work
        options = options.changed(sizes={**options.sizes, BATCH: sizes[BATCH]})
    with kept_reports():
        before = figures(options)
    with _compiler() as evaluate:
        advice = advise(options, before, sizes, limit.room, evaluate, budget=BUDGET)
    _tell(advice, limit)


@contextmanager
def _compiler() -> Generator[Callable[[Sequence[JobOptions]], list[Figures | None]]]:
    """Compiles jobs by worker processes; on a terminal it tells how many."""
    done, processes = 0, processors()

    def evaluate(jobs: Sequence[JobOptions], told: Callable[[int], None]) -> list[Figures | None]:
        nonlocal done
        found: list[Figures | None] = [None] * len(jobs)
        for number, result in run_units(_figures, jobs, processes):
            found[number] = result
            done += 1
            told(done)
        return found

    if not sys.stderr.isatty():
        yield lambda jobs: evaluate(jobs, lambda _: None)
        return
    with progress_bar("looking for what fits", "jobs") as progress:
        yield lambda jobs: evaluate(jobs, lambda n: progress(n, BUDGET))


def _figures(options: JobOptions) -> Figures | None:
    """The figures of a job, None for what is none; what is wrong with it is not told."""
    try:
        with kept_reports():
            return figures(options)
    except (DiagnosticError, NotAnIntegerError):
        return None


# -- telling ---------------------------------------------------------------------------------------


def _tell(advice: Advice, limit: Limit) -> None:
    least = advice.smallest
    if not advice.found:
        held = bytes_text(least.figures.peak)
        change = f"with {least.text}" if least.changes else "as it is"
        tell(f"nothing that fits was found; least is held {change}: {held}; use more ranks")
    else:
        _table(advice)
        for number, suggestion in enumerate(advice.found, 1):
            tell(f"[{number}] {command_of(suggestion.options, limit)}")
    tell(
        f"{advice.tried} of {advice.count:,} combinations of up to {MOST_CHANGES} changes were "
        f"compiled, {_left(advice)}"
    )


def _left(advice: Advice) -> str:
    if advice.left:
        return f"{advice.left:,} that may fit as well are left untried"
    return f"the others are not expected to fit{', or to cost less' if advice.found else ''}"


def _table(advice: Advice) -> None:
    """A row for each suggestion: what it is, what it holds, and what it costs more than before."""
    before = advice.before
    copies = any(s.figures.copied != before.copied for s in advice.found)
    bubbles = any(s.figures.idle != before.idle for s in advice.found)
    more = [*(["copied to host and back"] if copies else []), *(["bubble"] if bubbles else [])]
    title = "What fits, cheapest first; a rank's peak, and what it sends and computes more a step"
    made = table(title, "", "changes", "peak", "sent", "FLOPs", *more, text_columns=2)
    for number, each in enumerate(advice.found, 1):
        made.add_row(rf"\[{number}]", each.text, *_costs(each, before, copies, bubbles))
    console(sys.stderr).print(made)


def _costs(each: Suggestion, before: Figures, copies: bool, bubbles: bool) -> Iterator[str]:
    found = each.figures
    yield bytes_text(found.peak)
    yield _more(found.sent - before.sent, bytes_text)
    yield _more(found.flops - before.flops, count_text)
    if copies:
        yield _more(found.copied - before.copied, bytes_text)
    if bubbles:
        yield f"{float(found.idle):.1%}"


def _more(difference: int, text: Callable[[int], str]) -> str:
    """`+1.00 GiB`."""
    return ("-" if difference < 0 else "+") + text(abs(difference))


def command_of(options: JobOptions, limit: Limit) -> str:
    """The command that plans the memory of a job, to be pasted."""
    return shlex.join(["stagec", "memory", *job_words(options), "--limit", limit.text])
