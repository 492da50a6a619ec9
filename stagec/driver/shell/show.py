"""Answers as commands were asked to write them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagec.answers.sweep.run import SweepAnswer
from stagec.jobs.request.result import PLOTS
from stagec.output.report import Report
from stagec.support.files import write_file


def show(report: Report, given: Mapping[str, Any]) -> None:
    """Write an answer as a command was asked to: its page or plot to `--html`, and `--json`,
    `--csv`, or a text, to `-o` or to stdout, where a text is as wide as the terminal. The page is
    written first: a reader of the text may close the pipe. Raises `DiagnosticError`, `OSError`."""
    if (file := given.get("html")) is not None:
        write_file(file, _drawn(report, file))
    if given["as_json"]:
        write_output(json.dumps(report.as_json(), indent=1) + "\n", given["output"])
    elif given.get("as_csv"):
        write_output(report.as_csv(), given["output"])
    elif given["output"]:
        write_output(str(report), given["output"])
    else:
        report.print(sys.stdout)


def _drawn(report: Report, file: Path) -> str | bytes:
    """The page, or the plot alone where the name of the file says so."""
    if file.suffix not in PLOTS:
        return report.page()
    plot = report.plot()
    if file.suffix == ".svg":
        return plot
    from stagec.output.chart import pdf_of

    return pdf_of(plot)


def show_sweep(answer: SweepAnswer, given: Mapping[str, Any]) -> int:
    """Show the rows of a sweep; 1 if none of them is a job, or holds no more than the limit."""
    show(answer, given)
    return 0 if answer.possible else 1


def write_output(text: str, path: Path | str | None) -> None:
    """Write a result to a file, or to stdout for None or '-'."""
    if path is None or str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()  # before what follows on stderr
    else:
        write_file(Path(path), text)
