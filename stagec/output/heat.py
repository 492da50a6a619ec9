"""Heat maps over two axes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import ClassVar

from stagec.output.chart import Chart, legend_rows, svg_text, text_width


@dataclass(frozen=True, slots=True)
class HeatCell:
    """A cell of a heat map: its value, None if it is unknown, and the text in it; what it is,
    whether it fits, and the key of its row."""

    value: float | None
    text: str
    about: str
    fits: bool = True
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Heat(Chart):
    """Values over two axes, by shades and as texts. With `more`, more is better; with `several`,
    cells have the best of several rows."""

    #: From least to greatest, after cividis (Nunez, Anderton and Renslow 2018).
    SHADES: ClassVar[Sequence[str]] = (
        "#00224e",
        "#35456c",
        "#666970",
        "#948e77",
        "#c8b866",
        "#fee838",
    )
    across: tuple[str, Sequence[str]]
    up: tuple[str, Sequence[str]]
    cells: Mapping[tuple[str, str], HeatCell]
    value: str
    more: bool = False
    several: bool = False

    def draw(self, width: int) -> tuple[list[str], float]:
        (x_name, columns), (y_name, rows) = self.across, self.up
        left = max(map(text_width, rows)) + 12
        wide, high, top = (width - left - 4) / len(columns), 34, 22
        wide = min(wide, 130)
        values = [c.value for c in self.cells.values() if c.value is not None]
        low, spread = min(values), (max(values) - min(values)) or 1.0
        parts = [svg_text(0, 13, y_name)]
        for i, row in enumerate(rows):
            y = top + i * high
            parts.append(svg_text(left - 6, y + 21, row, "end", "quiet"))
            for k, column in enumerate(columns):
                if (cell := self.cells.get((column, row))) is not None:
                    share = None if cell.value is None else (cell.value - low) / spread
                    parts += self._cell(cell, share, left + k * wide, y, wide, high)
        bottom, end = top + high * len(rows), -1.0
        for k, column in enumerate(columns):
            at = left + (k + 0.5) * wide
            if at - text_width(column) / 2 > end:
                parts.append(svg_text(at, bottom + 15, column, "middle", "quiet"))
                end = at + text_width(column) / 2 + 5
        parts.append(svg_text(left + wide * len(columns) / 2, bottom + 33, x_name, "middle"))
        best = "largest" if self.more else "smallest"
        items = [
            (_shade(self.SHADES[n], 0, -9, 12, 10), text)
            for n, text in ((0, f"smallest {self.value}"), (-1, f"largest {self.value}"))
        ]
        if self.several:
            items.append(("", f"each cell: the {best} over the other axes"))
        if not all(cell.fits for cell in self.cells.values()):
            items.append(("", "✕: does not fit"))
        if None in (cell.value for cell in self.cells.values()):
            items.append(("", "–: failed"))
        legend, more = legend_rows(items, width, bottom + 40)
        return [*parts, *legend], bottom + 40 + more

    def _cell(
        self, cell: HeatCell, share: float | None, x: float, y: float, wide: float, high: float
    ) -> Iterator[str]:
        key = f' data-key="{escape(cell.key)}"' if cell.key else ""
        title = f"<title>{escape(cell.about)}</title>"
        if share is None:
            box = f'x="{x:.1f}" y="{y}" width="{wide - 2:.1f}" height="{high - 2}"'
            yield f'<rect class="idle" {box}{key}>{title}</rect>'
            ink = "quiet"
        else:
            shade = self.SHADES[round(share * (len(self.SHADES) - 1))]
            yield _shade(shade, x, y, wide - 2, high - 2, key, title)
            ink = "dark-ink" if share >= 0.5 else "light-ink"
        text = cell.text if cell.fits else f"{cell.text} ✕"
        if text_width(text) < wide - 4:
            yield svg_text(x + wide / 2, y + 21, text, "middle", ink, more=' pointer-events="none"')


def _shade(
    color: str, x: float, y: float, wide: float, high: float, key: str = "", title: str = ""
) -> str:
    box = f'x="{x:.1f}" y="{y:g}" width="{wide:.1f}" height="{high:g}"'
    return f'<rect fill="{color}" {box}{key}>{title}</rect>'
