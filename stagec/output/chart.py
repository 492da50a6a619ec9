"""What charts of pages and of papers share: a chart is SVG, with its style, legend and texts. The
kinds of charts are in `plot`, `bars`, `heat` and `threads`.

A page has each twice, for narrow and for wide windows; a file has it alone, with its colors. Pages
add hover, keys and export to marks, whose `<title>` says what they are.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from textwrap import wrap

from stagec.support.texts import package_text

WIDE, NARROW = 880, 380
#: Colors of series, in `colors.css`.
COLORS = 12
#: Pixels of a letter, and of a row of a legend.
_LETTER, _ROW = 6.7, 18
_COLOR = re.compile(r"--(\w+): light-dark\((#\w+), (#\w+)\);")


@cache
def style(*, alone: bool) -> str:
    """The style of charts: of a page, whose colors are variables, or of a picture `alone`."""
    series = (
        f".chart .f{i} {{ fill: var(--c{i}); }} .chart .s{i} {{ stroke: var(--c{i}); }} "
        f".chart .i{i} {{ fill: var(--i{i}); }}"
        for i in range(COLORS)
    )
    rules = [*package_text("output/chart.css").splitlines(), *series]
    colors = package_text("output/colors.css").rstrip()
    if not alone:
        return "\n".join([colors, *rules])
    themes = {name: (light, dark) for name, light, dark in _COLOR.findall(colors)}

    def filled(lines: Iterable[str], theme: int) -> str:
        return re.sub(r"var\(--(\w+)\)", lambda m: themes[m[1]][theme], "\n".join(lines))

    dark = filled((line for line in rules if "var(" in line), 1)
    return f"{filled(rules, 0)}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"


@dataclass(frozen=True, kw_only=True)
class Chart(ABC):
    """A chart: its title, what it is about, such as the model and the machine, and the command of
    its figures. Both are written below it, as far as there is room; its `desc` has the whole
    command."""

    title: str
    about: str = ""
    command: str = ""

    @abstractmethod
    def draw(self, width: int) -> tuple[list[str], float]:
        """The elements at this width in pixels, and the height."""

    def svg(self) -> str:
        """A file of the chart, which needs nothing else."""
        return self._svg(WIDE, style(alone=True)) + "\n"

    def figure(self) -> str:
        """The chart in a page."""
        caption = f"<figcaption><h2>{escape(self.title)}</h2></figcaption>"
        narrow, wide = self._svg(NARROW, kind=" narrow"), self._svg(WIDE, kind=" wide")
        return f"<figure>{caption}\n{narrow}\n{wide}</figure>"

    def _svg(self, width: int, css: str = "", kind: str = "") -> str:
        parts, height = self.draw(width)
        for text in filter(None, (self.about, self.command)):
            for line in wrapped(text, width):
                parts.append(svg_text(0, height + 12, line, style="quiet"))
                height += 16
        head = f'<svg viewBox="0 0 {width} {height:g}" class="chart{kind}" role="img"'
        if css:
            space = "http://www.w3.org/2000/svg"
            head += f' xmlns="{space}" width="{width}" height="{height:g}"'
            css = f"<style>\n{css}\n</style>\n"
        about = f"<desc>{escape(self.command)}</desc>\n" if self.command else ""
        name = escape(self.title)
        return f'{head} aria-label="{name}">\n{about}{css}' + "\n".join([*parts, "</svg>"])


def legend_rows(
    items: Sequence[tuple[str, str]], width: int, top: float
) -> tuple[list[str], float]:
    """Swatches and their texts in rows, and how high these are."""
    parts: list[str] = []
    x, y = 0.0, top + 14
    for swatch, text in items:
        room = 22 if swatch else 0
        wide = room + text_width(text) + 16
        if x and x + wide - 16 > width:
            x, y = 0.0, y + _ROW
        parts.append(
            f'<g transform="translate({x:.1f},{y:g})">{swatch}'
            f"{svg_text(room, 0, shortened(text, width - room))}</g>"
        )
        x += wide
    return parts, (y - top + 8 if items else 4)


def text_width(text: str) -> float:
    """About how many pixels a text is wide."""
    return _LETTER * len(text)


def wrapped(text: str, room: float) -> list[str]:
    """A text on lines, none of which ends within a flag."""
    return wrap(text, max(1, int(room / _LETTER)), break_on_hyphens=False)


def shortened(text: str, room: float) -> str:
    most = max(1, int(room / _LETTER))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def svg_text(
    x: float, y: float, text: str, anchor: str = "start", style: str = "", more: str = ""
) -> str:
    named = f' class="{style}"' if style else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}"{placed}{more}>{escape(text)}</text>'


def halo(x: float, y: float, text: str, anchor: str, style: str = "") -> Iterator[str]:
    """A text that is legible on lines: once as its edge, once above that."""
    yield svg_text(x, y, text, anchor, "halo", ' aria-hidden="true"')
    yield svg_text(x, y, text, anchor, style)
