"""Answers as notebooks show them: tables of HTML that are sorted by their heads, other lines as
they are printed."""

import re
from collections.abc import Iterator, Sequence
from html import escape

from rich.table import Column, Table

from stagec.output.markdown import TableText
from stagec.support.texts import package_text

#: Units of the cells of tables -> what one is, in bytes, seconds or pieces.
_UNITS = {
    **{f"{prefix}iB": 1024.0**n for n, prefix in enumerate("KMGTPE", 1)},
    **{prefix: 1000.0**n for n, prefix in enumerate("KMGTPEZ", 1)},
    "ms": 1e-3,
    "us": 1e-6,
    "ns": 1e-9,
    "ps": 1e-12,
}
_NUMBER = re.compile(r"([-+]?[\d,]+(?:\.\d+)?)(?: ?(\w+))?")
_START = "for (const table of document.querySelectorAll('.stagec-answer table:not([data-sorts])'))"
_MARK = re.compile("\0(\\d+)\0\n?")


class NotebookText(TableText):
    """A stream on which tables are written as HTML (`stagec.output.tables`)."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: list[str] = []

    def lines_of(self, table: Table) -> Iterator[str]:
        """A mark where the table stands."""
        self._tables.append("".join(_html(table)))
        yield f"\0{len(self._tables) - 1}\0"

    def html(self) -> str:
        """What was written."""
        parts = _MARK.split(self.getvalue())
        shown = [self._tables[int(p)] if n % 2 else _pre(p) for n, p in enumerate(parts)]
        about = f"<style>\n{package_text('output/notebook.css')}</style>" if self._tables else ""
        run = f"{_START} {{ table.dataset.sorts = ''; addSorting(table, () => {{}}); }}"
        script = f"<script>(() => {{\n{package_text('output/table.js')}{run}\n}})()</script>"
        shown += [about, script] if self._tables else []
        return f'<div class="stagec-answer">{"".join(shown)}</div>'


def _pre(text: str) -> str:
    return f"<pre>{escape(text.strip(chr(10)))}</pre>" if text.strip() else ""


def _html(table: Table) -> Iterator[str]:
    title = f"<caption>{escape(str(table.title))}</caption>" if table.title else ""
    kinds = ["text" if c.justify == "left" else "number" for c in table.columns]
    heads = zip(kinds, (str(c.header) for c in table.columns), strict=True)
    yield f"<table>{title}\n<thead><tr>"
    yield from (f'<th class="{kind}">{escape(head)}</th>' for kind, head in heads)
    yield "</tr></thead>\n<tbody>\n"
    columns = [list(_cells(c, k)) for c, k in zip(table.columns, kinds, strict=True)]
    yield from (f"<tr>{''.join(row)}</tr>\n" for row in zip(*columns, strict=True))
    yield "</tbody></table>"


def _cells(column: Column, kind: str) -> Iterator[str]:
    """The cells of a column; with their values if all are numbers, which sort by them."""
    texts = [*map(str, column.cells)]
    for text, value in zip(texts, _values(texts), strict=True):
        sorts = f' data-value="{value:.12g}"' if value is not None else ""
        yield f'<td class="{kind}"{sorts}>{escape(text)}</td>'


def _values(texts: Sequence[str]) -> Sequence[float | None]:
    """The numbers that the cells of a column are; None of each if one is something else."""
    values: list[float | None] = []
    for text in texts:
        match = _NUMBER.match(text)
        if match is None and text not in ("", "-"):
            return [None] * len(texts)
        unit = (match[2] or "").removesuffix("FLOP") if match is not None else ""
        number = float(match[1].replace(",", "")) if match is not None else None
        values.append(None if number is None else number * _UNITS.get(unit, 1.0))
    return values
