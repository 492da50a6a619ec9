"""Files that a command writes at its end, looked at before it begins."""

from __future__ import annotations

from pathlib import Path

from stagec.jobs.request.option import CommandOption, Kind, switch
from stagec.support.diagnostics import error
from stagec.support.files import check_new_file

#: Suffixes of files that have a plot alone.
PLOTS = (".svg", ".pdf")


class ResultFile(Kind[Path]):
    """A file to write, or `-` for stdout.

    A command that works for minutes says at once that there is no such folder.
    """

    name = "file"

    def read(self, text: str) -> Path:
        """The path. Raises `OSError` where no file can be written."""
        if text != "-":
            check_new_file(Path(text))
        return Path(text)


class Page(ResultFile):
    """A page to write, by its name; with `plots`, where that ends in .svg or .pdf the plot of it
    alone."""

    def __init__(self, *, plots: bool) -> None:
        self._suffixes = (".html", ".htm", *(PLOTS if plots else ()))

    def read(self, text: str) -> Path:
        """The path. Raises `DiagnosticError` for a name that says of something else."""
        path = super().read(text)
        if path.suffix and path.suffix.lower() not in self._suffixes:
            raise error(
                f"--html writes a page, and '{path}' is named as something else",
                remedy=f"name it {path.with_suffix('.html')}",
            )
        return path


RESULT = ResultFile()
PAGE, PAGE_OR_PLOT = Page(plots=False), Page(plots=True)
#: What commands that answer have in common.
JSON = switch("as_json", "Print one JSON object.", "--json")
CSV = switch("as_csv", "Print comma-separated values.", "--csv")
OUTPUT = CommandOption(
    "output",
    RESULT,
    "Write the result here instead of stdout.",
    metavar="FILE",
    spelling="-o --output",
)
