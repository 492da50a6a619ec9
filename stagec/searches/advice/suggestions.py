"""Suggestions for a job that does not fit: runs the search of `advice` with worker processes that
compile, prints what it tried on stderr, and returns its answer as JSON."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagec.analysis.figures import Figures
from stagec.answers.memory.answer import MemoryPlan
from stagec.ir.module import BATCH
from stagec.ir.serving_step import MIXED
from stagec.jobs.lowered import job_costs
from stagec.jobs.pod_options import has_pods
from stagec.jobs.request.combine import complete
from stagec.jobs.request.command_line import job_words
from stagec.jobs.request.limit import Limit
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.output.tables import bytes_text, console, count_text, table
from stagec.searches.advice.search import BUDGET, MOST_CHANGES, Advice, Suggestion, advise
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError
from stagec.support.processors import processors
from stagec.traces.workers import run_units

#: Options that observe a compile are off for the jobs of the search.
_SILENT: Mapping[str, Any] = {
    "print_after": (),
    "dump_dir": None,
    "time_passes": False,
    "reproducer": None,
    "check_numerics": False,
}


def advised(plan: MemoryPlan, limit: Limit, session: Session) -> MemoryPlan:
    """The plan of a job; if it does not fit the limit, with `advice`: changes with which it fits,
    which are printed with their commands. The flags that change are those of the job, which hold
    for all pods without flags of their own. Raises `DiagnosticError` if the job cannot be
    lowered."""
    if plan.fits is not False:
        return plan
    options, builder = plan.options, next(iter(plan.planned.values()))()
    if builder.from_texts:
        session.log("the strategy is a text, which flags do not change: edit the text")
        return plan
    sizes = {n: v for n, v in builder.module.symbols.items() if v is not None}
    options = options if has_pods(options) else builder.options
    options = complete(options).changed(ranks=None, **_SILENT)
    if options.serve == MIXED:  # each group of ranks has the step
        sizes.pop(BATCH, None)
    elif options.serve:
        options = options.changed(batch=sizes.get(BATCH))
    elif BATCH in sizes:  # fixed, so that no change changes the work
        options = options.changed(sizes={**options.sizes, BATCH: sizes[BATCH]})
    before = job_costs(options).figures()
    with session.progress("looking for what fits", "jobs") as progress:
        evaluate = _compiler(progress)
        advice = advise(options, before, sizes, limit.room, evaluate, budget=BUDGET)
    _log(advice, limit, session)
    more = {
        "tried": advice.tried,
        "count": advice.count,
        "left": advice.left,
        "smallest": _as_json(advice.smallest, before, limit),
        "suggestions": [_as_json(each, before, limit) for each in advice.suggestions],
    }
    return replace(plan, data={**plan.data, "advice": more})


def _compiler(
    progress: Callable[[int, int], None],
) -> Callable[[Sequence[JobOptions]], list[Figures | None]]:
    """A function that compiles jobs in worker processes and reports their number to `progress`."""
    done, processes = 0, processors()

    def evaluate(jobs: Sequence[JobOptions]) -> list[Figures | None]:
        nonlocal done
        results: list[Figures | None] = [None] * len(jobs)
        for number, result in run_units(_figures, jobs, processes):
            results[number] = result
            done += 1
            progress(done, BUDGET)
        return results

    return evaluate


def _figures(options: JobOptions) -> Figures | None:
    """The figures of a job; None if it is invalid, without a report."""
    try:
        return job_costs(options).figures()
    except (DiagnosticError, NotAnIntegerError):
        return None


# -- output ----------------------------------------------------------------------------------------


def _log(advice: Advice, limit: Limit, session: Session) -> None:
    least = advice.smallest
    if not advice.suggestions:
        peak = bytes_text(least.figures.peak)
        change = f"with {least.text}" if least.changes else "as it is"
        session.log(f"nothing fits; the lowest peak is {peak}, {change}: use more ranks")
    else:
        _table(advice, session)
        for number, suggestion in enumerate(advice.suggestions, 1):
            session.log(f"[{number}] {command_of(suggestion.options, limit)}")
    session.log(
        f"{advice.tried} of {advice.count:,} combinations of up to {MOST_CHANGES} changes were "
        f"compiled, {_left(advice)}"
    )


def _as_json(each: Suggestion, before: Figures, limit: Limit) -> dict[str, Any]:
    """The changes of a suggestion, its peak, and what it adds to a step."""
    figures = each.figures
    return {
        "changes": {change.knob: change.value for change in each.changes},
        "command": command_of(each.options, limit),
        "peak": figures.peak,
        "more_sent": figures.sent - before.sent,
        "more_copied": figures.copied - before.copied,
        "more_flops": figures.flops - before.flops,
        "bubble": float(figures.idle),
    }


def _left(advice: Advice) -> str:
    if advice.left:
        return f"{advice.left:,} that may fit as well are left untried"
    return f"the others are not expected to fit{', or to cost less' if advice.suggestions else ''}"


def _table(advice: Advice, session: Session) -> None:
    """Print a row for each suggestion: changes, peak, and additional cost."""
    before = advice.before
    copies = any(s.figures.copied != before.copied for s in advice.suggestions)
    bubbles = any(s.figures.idle != before.idle for s in advice.suggestions)
    more = [*(["copied to host and back"] if copies else []), *(["bubble"] if bubbles else [])]
    title = "What fits, cheapest first: peak per rank, additional bytes sent and FLOPs per step"
    rows = table(title, "", "changes", "peak", "sent", "FLOPs", *more, text_columns=2)
    for number, each in enumerate(advice.suggestions, 1):
        rows.add_row(f"[{number}]", each.text, *_costs(each, before, copies, bubbles))
    if session.stream is not None:
        console(session.stream).print(rows)


def _costs(each: Suggestion, before: Figures, copies: bool, bubbles: bool) -> Iterator[str]:
    figures = each.figures
    yield bytes_text(figures.peak)
    yield _more(figures.sent - before.sent, bytes_text)
    yield _more(figures.flops - before.flops, count_text)
    if copies:
        yield _more(figures.copied - before.copied, bytes_text)
    if bubbles:
        yield f"{float(figures.idle):.1%}"


def _more(difference: int, text: Callable[[int], str]) -> str:
    """`+1.00 GiB`."""
    return ("-" if difference < 0 else "+") + text(abs(difference))


def command_of(options: JobOptions, limit: Limit) -> str:
    """The command that plans the memory of a job."""
    return shlex.join(["stagec", "memory", *job_words(options), "--limit", limit.text])
