"""Writing the answers of commands in the requested forms."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.jobs.request.result import form_of
from stagec.output.report import Report
from stagec.output.svg_text import pdf
from stagec.support.files import write_file

if TYPE_CHECKING:
    from stagec.answers.sweep.run import SweepAnswer


def show(report: Report, given: Mapping[str, Any]) -> None:
    """Write an answer in the requested forms: its page or plot to `--html`, and its text in the
    form of `--format`, `--json` or `--csv` to `-o` or to stdout. The page is written first, since
    the reader of stdout may close the pipe. Raises `DiagnosticError`, `OSError`."""
    form = form_of(given)
    if (file := given.get("html")) is not None:
        write_file(file, _picture(report, file.suffix))
    if form is None and not given["output"]:
        report.print(sys.stdout)
    else:
        write_output(_text(report, form), given["output"])


def _picture(report: Report, suffix: str) -> str | bytes:
    """The page of a report, or its plot for a file that ends in `.svg` or `.pdf`."""
    match suffix:
        case ".svg":
            return report.plot()
        case ".pdf":
            return pdf(report.plot())
        case _:
            return report.page()


def _text(report: Report, form: str | None) -> str:
    match form:
        case "json":
            return _json(report.as_json())
        case "csv":
            return report.as_csv()
        case "markdown":
            return report.as_markdown()
        case "rich":
            text = _TerminalText()
            report.print(text)
            return text.getvalue()
        case _:
            return str(report)


class _TerminalText(io.StringIO):
    """A text for a terminal: with its width, and with colors unless NO_COLOR is set."""

    def isatty(self) -> bool:
        return True


def show_sweep(answer: SweepAnswer, given: Mapping[str, Any]) -> int:
    """Show the rows of a sweep; the exit code is 1 if none is a job within the limit."""
    show(answer, given)
    return 0 if answer.possible else 1


def write_json(value: Any) -> None:
    """Print a value as JSON."""
    write_output(_json(value), None)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def write_output(text: str, path: Path | str | None) -> None:
    """Write a result to a file, or to stdout for None or '-'."""
    if path is None or str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()  # before what follows on stderr
    else:
        write_file(Path(path), text)
