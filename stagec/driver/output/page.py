"""Pages for a browser: one file that loads nothing from elsewhere.

The data stand in the page as JSON; scripts and styles are the files beside this one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

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


def _page(title: str, body: str, style: str, scripts: str) -> str:
    about = {"title": escape(title), "body": body, "style": style, "scripts": scripts}
    return Template(part("output/page.html")).substitute(about) + "\n"


def part(name: str) -> str:
    """A file beside this one."""
    return files("stagec.driver").joinpath(name).read_text("utf-8").rstrip()
