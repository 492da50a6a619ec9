"""Rendering of an IR text for notebooks, with colors and regions that can be folded."""

import re
from collections.abc import Iterator
from html import escape

#: A region of more lines is folded initially.
FOLDED = 60
_STYLE = (
    "font-family: monospace; font-size: 0.9em; line-height: 1.35; overflow-x: auto; "
    "padding-left: 1.4em"
)
#: The triangle of a region is left of its line, so that the line keeps its indentation.
_SUMMARY = "cursor: pointer; list-style-position: outside"
#: Colors by kind of token: the variable of the JupyterLab theme, and a default that is legible on
#: white and on black.
_COLORS = {
    "comment": ("comment", "#7a7a7a"),
    "string": ("string", "#b5562a"),
    "op": ("keyword", "#8a63d2"),
    "symbol": ("def", "#3b7dd8"),
    "value": ("variable-2", "#2f8a57"),
    "number": ("number", "#a8711c"),
}
_TOKEN = re.compile(
    r"(?P<comment>//.*)|(?P<string>\"[^\"\n]*\")|(?P<op>\b[a-z_]\w*\.[a-z_]\w*)"
    r"|(?P<symbol>@\w+)|(?P<value>%\w+(?:/\w+)*)|(?P<number>\b\d+(?:\.\d+)?\b)"
)


class IRText(str):
    """A text of the IR. It is a `str` that notebooks show with colors and with regions that can be
    folded. Regions of more than 60 lines are folded initially, except that of the module."""

    __slots__ = ()

    def html(self) -> str:
        """The text as HTML."""
        lines = self.splitlines()
        return f'<div style="{_STYLE}; white-space: pre">{"".join(_folding(lines))}</div>'

    def _repr_html_(self) -> str:
        return self.html()


def op_names(text: str) -> Iterator[str]:
    """The names of the operations of a text, in text order."""
    for line in text.splitlines():
        yield from (m["op"] for m in _TOKEN.finditer(line) if m["op"])


def _folding(lines: list[str]) -> Iterator[str]:
    """The lines as HTML; each region is a `details` element."""
    ends, depth = _ends(lines), 0
    for number, line in enumerate(lines):
        if number in ends.values():
            yield "</details>"
            depth -= 1
        if number not in ends:
            yield f"<div>{_colored(line) or ' '}</div>"
            continue
        size = ends[number] - number - 1
        shown = " open" if depth == 0 or size <= FOLDED else ""
        count = f" {_colored(f'// {size} lines')}" if not shown else ""
        yield f'<details{shown}><summary style="{_SUMMARY}">{_colored(line)}{count}</summary>'
        depth += 1


def _ends(lines: list[str]) -> dict[int, int]:
    """Maps the line that opens a region to the line that closes it. A truncated text lacks some
    ends; those regions are not folded."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for number, line in enumerate(lines):
        code = line.partition("//")[0].strip()
        if code.startswith("}") and opened:
            ends[opened.pop()] = number
        if code.endswith("{"):
            opened.append(number)
    return ends


def _colored(line: str) -> str:
    done, parts = 0, list[str]()
    for match in _TOKEN.finditer(line):
        name, color = _COLORS[match.lastgroup or ""]
        parts.append(escape(line[done : match.start()]))
        parts.append(
            f'<span style="color: var(--jp-mirror-editor-{name}-color, {color})">'
            f"{escape(match[0])}</span>"
        )
        done = match.end()
    return "".join(parts) + escape(line[done:])
