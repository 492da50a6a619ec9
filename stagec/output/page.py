"""Pages for a browser: one file that loads nothing from elsewhere.

All pages are made of the parts of this module and of `chart`: figures, commands, tables, and data
that a script draws. The style and the scripts are the files beside this one.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from string import Template
from typing import Any, cast

from stagec.output.chart import Chart, style
from stagec.output.report import flat_row
from stagec.support.texts import package_text

#: Rows of a table below which it needs no search.
_FEW = 8
_FLAG = re.compile(r"(?<!\S)--[\w-]+")


def page(title: str, body: Iterable[str], scripts: Sequence[str] = (), data: Any = None) -> str:
    """The text of a page. `body` is markup; scripts find the data as `data`."""
    about = {
        "title": escape(title),
        "body": "\n".join(body),
        "style": part("output/page.css"),
        "drawing": style(alone=False),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "script": "\n".join(map(part, ("output/table.js", "output/page.js", *scripts))),
    }
    return Template(part("output/page.html")).substitute(about) + "\n"


def part(name: str) -> str:
    """A file of this package."""
    return package_text(name).rstrip()


# -- parts of a body -------------------------------------------------------------------------------


def paragraphs(texts: Iterable[str], kind: str = "") -> Iterator[str]:
    """A paragraph for each text."""
    named = f' class="{kind}"' if kind else ""
    for text in texts:
        yield f"<p{named}>{_wrapping(text)}</p>"


def _wrapping(text: str) -> str:
    """A text whose lines do not end within a flag."""
    return _FLAG.sub(r'<span class="flag">\g<0></span>', escape(text))


def command(text: str, about: str = "") -> str:
    """A command line, to be copied."""
    said = f"<span>{escape(about)}</span>" if about else ""
    return f'<div class="command">{said}<code>{escape(text)}</code></div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Figures, each with its name."""
    each = (f"<div><dt>{escape(name)}</dt><dd>{escape(v)}</dd></div>" for name, v in pairs)
    return f'<dl class="facts">{"".join(each)}</dl>'


def figures(charts: Iterable[Chart]) -> str:
    """Charts, side by side where there is room."""
    return f'<div class="figures">{"".join(chart.figure() for chart in charts)}</div>'


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table: texts, numbers, lists of rows. Marks of charts with its key are about the
    same; `texts` says how values are shown, by default as they are. `opens` is the command that
    writes a page of it, which is shown when the row is chosen."""

    values: Sequence[Any]
    texts: Sequence[str] = ()
    key: str = ""
    opens: str = ""


def table(heads: Sequence[str], rows: Sequence[TableRow], name: str = "rows") -> str:
    """A table that is sorted by its heads, and searched if it has more than a few rows."""
    lines: list[str] = []
    numbers = set(range(len(heads)))
    for row in rows:
        numbers -= {i for i, v in enumerate(row.values) if v is not None and not _is_number(v)}
    wide = {i for row in rows for i, text in enumerate(_texts(row)) if len(text) > _LONG}
    for row in rows:
        key = f' data-key="{escape(row.key)}"' if row.key else ""
        key += f' data-opens="{escape(row.opens)}"' if row.opens else ""
        cells = "".join(map(_cell, row.values, _texts(row), (i in wide for i in count())))
        more = len(heads) - len(row.values)
        cells += f'<td colspan="{more}"></td>' if more else ""
        lines.append(f"<tr{key}>{cells}</tr>")
    head = "".join(
        f"<th{_number if i in numbers and rows else ''}>{escape(h)}</th>"
        for i, h in enumerate(heads)
    )
    search = " data-search" if len(rows) > _FEW else ""
    body = "\n".join(lines)
    return (
        f'<div class="rows"><table class="sorted" data-name="{escape(name)}"{search}>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


_number = ' class="number"'
_LONG = 60


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _texts(row: TableRow) -> Sequence[str]:
    return row.texts or [_shown(value) for value in row.values]


def _cell(value: Any, text: str, wide: bool) -> str:
    if _is_number(value):
        return f'<td class="number" data-value="{value!r}">{escape(text)}</td>'
    items = _items(value)
    if items and all(isinstance(item, Mapping) for item in items):
        return f"<td><details><summary>{len(items):,}</summary>{data_table(items)}</details></td>"
    lines = ' class="wide"' if wide else ""
    return f"<td{lines}>{_wrapping(text) if wide else escape(text)}</td>"


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
    return ", ".join(map(str, _items(value) if isinstance(value, list | tuple) else [value]))


def _items(value: Any) -> Sequence[Any]:
    """What is in a list; nothing of other values."""
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()


def table_page(title: str, text: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page of a text for people, and of rows: nested figures have columns of their own, such
    as `memory.peak`, and lists of rows are tables that open."""
    return page(
        title, [f'<pre tabindex="0">{escape(text)}</pre>', data_table(rows) if rows else ""]
    )


def data_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of plain data."""
    flat = [dict(flat_row(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    return table(names, [TableRow([row.get(name) for name in names]) for row in flat])
