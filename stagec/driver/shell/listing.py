"""Lists that commands print, such as `stagec models`, in every form of `--format`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from stagec.driver.shell.session import log
from stagec.driver.shell.show import show
from stagec.jobs.request.option import switch
from stagec.jobs.request.result import FORM, form_of
from stagec.output.report import Report

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
