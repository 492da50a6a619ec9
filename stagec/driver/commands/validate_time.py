"""`stagec validate --time`: published seconds of steps beside ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stagec.analysis.measured import measured_steps
from stagec.driver.shell.session import progress
from stagec.driver.shell.show import write_output
from stagec.jobs.request.emission import workers
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.analysis.measured import MeasuredStep
    from stagec.analysis.step_errors import StepError

#: Of sources with more rows so many are predicted, unless all are asked for.
_SAMPLE = 60


def validate_time(given: Mapping[str, Any]) -> int:
    """Predict measured steps and print the errors. Raises `DiagnosticError` for a source that is
    none."""
    from stagec.analysis.step_errors import StepError, summaries

    steps = chosen(given["source"], everything=given["all_rows"])
    found = list(map(StepError, steps, _predicted(steps)))
    sums = summaries(found)
    if given["as_json"]:
        rows = [_row(each) for each in found]
        text = json.dumps({"rows": rows, "sources": [asdict(s) for s in sums]}, indent=1)
        write_output(text + "\n", None)
        return 0
    from stagec.output.tables import console, table

    out = console(sys.stdout, 160)
    shown = table(
        "Measured and predicted seconds",
        "source",
        "row",
        "GPUs",
        "measured",
        "ours",
        "error",
        "",
        text_columns=2,
    )
    for each in found:
        step = each.step
        told = "fitted" if step.fitted else "" if step.judged else "not judged"
        cells = (step.source, step.row, str(step.ranks), f"{step.seconds:.3f}")
        if each.predicted is None:
            shown.add_row(*cells, "", "", each.problem)
        else:
            shown.add_row(*cells, f"{each.predicted:.3f}", f"{each.error:+.1%}", told)
    out.print(shown)
    total = table(
        "Errors by source",
        "source",
        "rows",
        "median",
        "p90",
        "left out",
        "bias",
        "Spearman",
        "regret",
    )
    for summary in sums:
        ranking = (
            ("", "")
            if summary.spearman is None or summary.regret is None
            else (f"{summary.spearman:.2f}", f"{summary.regret:.1%}")
        )
        total.add_row(
            summary.source,
            str(summary.rows),
            f"{summary.median:.1%}",
            f"{summary.p90:.1%}",
            "" if summary.left_out is None else f"{summary.left_out:.1%}",
            f"{summary.bias:+.1%}",
            *ranking,
        )
    out.print(total)
    return 0


def chosen(source: str | None, *, everything: bool) -> list[MeasuredStep]:
    """The rows to predict: of one source or of all, of long sources a sample at equal distances.
    Raises `DiagnosticError`."""
    sources = measured_steps()
    if source is not None and source not in sources:
        remedy = did_you_mean(source, sources) or f"choose among {', '.join(sources)}"
        raise error(f"--source {source}: no such source", remedy=remedy)
    found: list[MeasuredStep] = []
    for name in [source] if source is not None else sources:
        rows = sources[name]
        if not everything and len(rows) > _SAMPLE:
            # an odd distance: fitted rows are every second one
            rows = [r for r in rows if r.judged]
            rows = rows[:: (len(rows) // _SAMPLE) | 1]
        found += rows
    return found


def _predicted(steps: Sequence[MeasuredStep]) -> list[float | str]:
    """Seconds of each step, or why there are none, by as many processes as there are cores."""
    results: dict[int, float | str] = {}
    with (
        workers({"scheduler": None, "jobs": None}) as run,
        progress("predicting", "steps", quiet=False) as counted,
    ):
        for done, (number, result) in enumerate(run(seconds_or_problem, steps), 1):
            results[number] = result
            counted(done, len(steps))
    return [results[i] for i in range(len(steps))]


def seconds_or_problem(step: MeasuredStep) -> float | str:
    """What we predict for a step, or why we do not."""
    from stagec.jobs.measured import seconds_of

    try:
        return seconds_of(step)
    except DiagnosticError as problem:
        return problem.diagnostics[0].message


def _row(found: StepError) -> dict[str, Any]:
    step = found.step
    row: dict[str, Any] = {
        "source": step.source,
        "row": step.row,
        "sweep": step.sweep,
        "gpus": step.ranks,
        "machine": step.machine,
        "model": step.model,
        "sizes": dict(step.sizes),
        "flags": {n: v if isinstance(v, int | str) else str(v) for n, v in step.flags.items()},
        "fitted": step.fitted,
        "judged": step.judged,
        "measured_seconds": step.seconds,
    }
    if found.predicted is None:
        return {**row, "problem": found.problem}
    return {**row, "predicted_seconds": found.predicted, "error": found.error}
