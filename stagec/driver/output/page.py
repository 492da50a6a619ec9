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


def render(title: str, body: str, styles: Sequence[str], scripts: Sequence[str], data: Any) -> str:
    """The text of a page. `body` is markup; scripts find the data as `data`."""
    return Template(part("output/page.html")).substitute(
        title=escape(title),
        body=body,
        style="\n".join(map(part, ("output/page.css", *styles))),
        script="\n".join(map(part, ("output/page.js", *scripts))),
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


def part(name: str) -> str:
    """A file beside this one."""
    return files("stagec.driver").joinpath(name).read_text("utf-8").rstrip()
