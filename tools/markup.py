"""Shared parts of the generated pages: their head, anchors, and docstrings as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ACCEPT = "make docs"
MARK = f"<!-- Generated from the definitions; `{ACCEPT}` rewrites it. -->"


def page(title: str, intro: str, body: Iterable[str]) -> str:
    """A whole page, marked as generated."""
    text = "\n".join([MARK, "", f"# {title}", "", intro, "", *body])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def anchor(heading: str) -> str:
    """The anchor that a Markdown reader gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def page_name(heading: str) -> str:
    """The name of the page with this heading: `Views, placement, gradients` is
    `views-placement-gradients`."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def paragraphs(doc: str) -> Iterator[list[str]]:
    """The paragraphs of a docstring as lines."""
    lines: list[str] = []
    for line in [*doc.splitlines(), ""]:
        if line.strip():
            lines.append(line)
        elif lines:
            yield lines
            lines = []


def markdown(doc: str) -> Iterator[str]:
    """A docstring as Markdown: joined prose and items, unchanged tables, and fenced `Before:` and
    `After:` blocks."""
    for number, lines in enumerate(paragraphs(doc)):
        if number:
            yield ""
        yield from _sections(lines)


def _sections(lines: Sequence[str]) -> Iterator[str]:
    if lines[0].startswith("|"):
        yield from lines
        return
    prose: list[str] = []
    code: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("    "):
            if prose:
                yield from (" ".join(prose), "")
                prose = []
            code.append(line[4:])
            continue
        if code:
            yield from ("```text", *code, "```", "")
            code = []
        if line.startswith("- ") and prose:  # an item is a line of its own
            yield " ".join(prose)
            yield from () if prose[0].startswith("- ") else ("",)
            prose = []
        if line:
            prose.append(line.strip())
    if prose:
        yield " ".join(prose)
