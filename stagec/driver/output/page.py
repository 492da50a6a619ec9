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


_PLAIN = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>
body { margin: 1.2rem auto; max-width: 70rem; padding: 0 1rem; }
body { font: 14px/1.4 system-ui, sans-serif; }
$style
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
"""


def plain(title: str, body: str, style: str) -> str:
    """The text of a page without data and scripts; `body` is markup."""
    return Template(_PLAIN).substitute(title=escape(title), body=body, style=style.strip())


def part(name: str) -> str:
    """A file beside this one."""
    return files("stagec.driver").joinpath(name).read_text("utf-8").rstrip()
