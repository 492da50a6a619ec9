"""Writing the answers of commands in the requested forms, lists among them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stagec.driver.shell.session import log
from stagec.jobs.request.option import switch
from stagec.jobs.request.result import FORM, form_of
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


#: The options of a command that prints a list.
LISTING = switch("as_json", "Print one JSON list.", "--json"), FORM


@dataclass(frozen=True)
class Listing(Report):
    """A list: its objects for JSON, and the cells of its table; `head` has the title and the
    columns."""

    objects: Sequence[Mapping[str, Any]]
    head: Sequence[str]
    cells: Iterable[Iterable[str]]
    width: int = 150

    def as_json(self) -> list[dict[str, Any]]:
        return [dict(each) for each in self.objects]

    def print(self, stream: TextIO) -> None:
        from stagec.output.tables import console, table

        shown = table(*self.head, rows=self.cells, text_columns=len(self.head))
        console(stream, self.width).print(shown)


def show_list(listing: Report, given: Mapping[str, Any], hint: str = "") -> None:
    """Print a list in the form of `LISTING`; a table is followed by a hint on stderr."""
    show(listing, {**given, "output": None})
    if hint and form_of(given) is None:
        log(hint)
