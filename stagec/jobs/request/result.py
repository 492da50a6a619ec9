"""The options of a command's results: files, which are checked before the work begins, and the
format of the answer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagec.jobs.request.option import CommandOption, Kind, OneOf, path_of, switch
from stagec.output.svg_text import pdf_writer
from stagec.support.diagnostics import error
from stagec.support.files import check_new_file

#: The endings of files of plots.
PLOTS = (".svg", ".pdf")
_FORMS = ("plain", "rich", "json", "csv", "markdown")


class ResultFile(Kind[Path]):
    """A file to write. A missing folder is reported before the work begins."""

    name = "file"

    def read(self, text: str) -> Path:
        """The path. Raises `ValueError` for `-`, `OSError` if no file can be written there."""
        if text == "-":
            raise ValueError("'-' is not the name of a file")
        path = path_of(text)
        check_new_file(path)
        return path


class _FileOrStdout(ResultFile):
    """A file to write, or `-` for stdout."""

    def read(self, text: str) -> Path:
        """The path. Raises `OSError` if no file can be written there."""
        return Path(text) if text == "-" else super().read(text)


class Page(ResultFile):
    """A page to write; with `plots`, FILE.svg and FILE.pdf write its plot alone."""

    def __init__(self, *, plots: bool) -> None:
        self._plots = plots
        self._suffixes = (".html", ".htm", *(PLOTS if plots else ()))

    def read(self, text: str) -> Path:
        """The path. Raises `DiagnosticError` for another ending, and for a PDF without the package
        that writes PDFs."""
        path = super().read(text)
        if path.suffix and path.suffix.lower() not in self._suffixes:
            raise error(
                f"--html writes a page, but '{path}' does not end in .html",
                remedy=f"give --html {path.with_suffix('.html')}"
                + (f", or {path.with_suffix('.svg')} for a plot" if self._plots else ""),
            )
        if path.suffix.lower() == ".pdf":
            pdf_writer()
        return path


RESULT, FILE_OR_STDOUT = ResultFile(), _FileOrStdout()
PAGE, PAGE_OR_PLOT = Page(plots=False), Page(plots=True)
#: The options that all commands with answers share.
JSON = switch("as_json", "Print one JSON object.", "--json")
CSV = switch("as_csv", "Print comma-separated values.", "--csv")
FORM = CommandOption(
    "form",
    OneOf(_FORMS),
    "How to print the answer. The default is rich, with colors and as wide as the terminal; in a "
    "file or a pipe it is plain.",
    spelling="--format",
)
OUTPUT = CommandOption(
    "output", FILE_OR_STDOUT, "Write the result here instead of stdout.", spelling="-o --output"
)


def form_of(given: Mapping[str, Any]) -> str | None:
    """The form that `--format`, `--json` or `--csv` asks for. Raises `DiagnosticError` for two."""
    asked = {
        "--json": "json" if given.get("as_json") else None,
        "--csv": "csv" if given.get("as_csv") else None,
        f"--format {given.get('form')}": given.get("form"),
    }
    forms = {option: form for option, form in asked.items() if form is not None}
    if len({*forms.values()}) > 1:
        raise error(f"{' and '.join(forms)} cannot be used together", remedy="choose one of them")
    return next(iter(forms.values()), None)
