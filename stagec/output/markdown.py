"""Answers as Markdown: tables as those of GitHub, other lines as they are printed."""

import io
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

_SPECIAL = re.compile(r"[\\|*<`]")


class TableText(io.StringIO):
    """A stream on which tables have lines of their own (`stagec.output.tables`)."""

    @abstractmethod
    def lines_of(self, table: Table) -> Iterator[str]:
        """The lines of a table."""


class MarkdownText(TableText):
    """A stream on which tables are written as Markdown."""

    def lines_of(self, table: Table) -> Iterator[str]:
        """The table, with its title before it and empty lines around it."""
        if table.title:
            yield from ("", f"**{table.title}**")
        heads = [_cell(column.header) for column in table.columns]
        yield from ("", _row(heads))
        yield _row("---" if c.justify == "left" else "---:" for c in table.columns)
        columns = [[_cell(cell) for cell in column.cells] for column in table.columns]
        yield from map(_row, zip(*columns, strict=True))
        yield ""

    def markdown(self) -> str:
        """What was written: lines of a paragraph stay lines."""
        return "\n".join(_with_breaks(self.getvalue().splitlines())) + "\n"


def _with_breaks(lines: Sequence[str]) -> Iterator[str]:
    """The lines; those that another one of their paragraph follows end in a break."""
    stripped = [line.strip() for line in lines]
    for line, after in zip(stripped, [*stripped[1:], ""], strict=True):
        goes_on = line and after and "|" not in (line[0], after[0])
        yield line + ("  " if goes_on else "")


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(content: object) -> str:
    text = _SPECIAL.sub(lambda match: "\\" + match[0], str(content))
    return " ".join(text.split())
