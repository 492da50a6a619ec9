"""Pages for a browser: one file that loads nothing from elsewhere.

The data stand in the page as JSON; scripts and styles are the files beside this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, cast

_PLAIN = """\
body { margin: 1.2rem auto; max-width: 70rem; padding: 0 1rem; }
body { font: 14px/1.4 system-ui, sans-serif; }
"""


def render(title: str, body: str, styles: Sequence[str], scripts: Sequence[str], data: Any) -> str:
    """The text of a page. `body` is markup; scripts find the data as `data`."""
    drawn = Template(part("output/drawn.html")).substitute(
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        script="\n".join(map(part, ("output/page.js", *scripts))),
    )
    style = "\n".join(map(part, ("output/page.css", *styles)))
    return _page(title, f"{body}\n{drawn}", style, "; script-src 'unsafe-inline'")


def plain(title: str, body: str, style: str) -> str:
    """The text of a page without data and scripts; `body` is markup."""
    return _page(title, body, _PLAIN + style.strip(), "")


_TABLE = """
pre { overflow-x: auto; font: 12px/1.3 ui-monospace, monospace; } .rows { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: left; vertical-align: top; white-space: nowrap; }
th { border-bottom: 1px solid; } tr + tr td { border-top: 1px solid #8884; }
td.number { text-align: right; } summary { cursor: pointer; }
"""


def table_page(title: str, text: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page of a text for people, and of rows: nested figures have columns of their own, such
    as `memory.peak`, and lists of rows are tables that open."""
    table = f'<div class="rows">{_table(rows)}</div>' if rows else ""
    return plain(title, f"<pre>{escape(text)}</pre>\n{table}", _TABLE)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    flat = [dict(_flat(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = ("".join(_cell(row.get(name)) for name in names) for row in flat)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _flat(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return f"<td>{'' if value is None else str(value).lower()}</td>"
    if isinstance(value, int | float):
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
        return f'<td class="number">{text}</td>'
    if not isinstance(value, list | tuple):
        return f"<td>{escape(str(value))}</td>"
    items = cast("Sequence[Any]", value)
    if items and all(isinstance(item, Mapping) for item in items):
        return f"<td><details><summary>{len(items):,}</summary>{_table(items)}</details></td>"
    return f"<td>{escape(', '.join(map(str, items)))}</td>"


def _page(title: str, body: str, style: str, scripts: str) -> str:
    about = {"title": escape(title), "body": body, "style": style, "scripts": scripts}
    return Template(part("output/page.html")).substitute(about) + "\n"


def part(name: str) -> str:
    """A file beside this one."""
    return files("stagec").joinpath(name).read_text("utf-8").rstrip()
