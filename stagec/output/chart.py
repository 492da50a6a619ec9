"""Charts of pages and of papers, as SVG: points and lines, stacked bars, heat maps, and values side
by side.

A page has each twice, for narrow and for wide windows; a file has it alone, with its colors. Pages
add hover, keys and export to marks, whose `<title>` says what they are.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from math import ceil, floor, log10
from typing import Any, ClassVar

WIDE, NARROW = 880, 380
#: Colors of series, in `colors.css`.
COLORS = 12
#: Pixels of a letter, of a row of a legend and of the room at the right.
_LETTER, _ROW, _RIGHT = 6.7, 18, 22
_BINARY, _TWO = 1024, log10(2)
#: From this ratio of the greatest to the least value on, an axis is logarithmic.
_LARGE_RATIO = 12
_MOST_SERIES, _MOST_MARKS = 24, 10
_DASHES = ("", "7 4", "2 3", "10 3 2 3")
_COLOR = re.compile(r"--(\w+): light-dark\((#\w+), (#\w+)\);")


@cache
def style(*, alone: bool) -> str:
    """The style of charts: of a page, whose colors are variables, or of a picture `alone`."""
    series = (
        f".chart .f{i} {{ fill: var(--c{i}); }} .chart .s{i} {{ stroke: var(--c{i}); }} "
        f".chart .i{i} {{ fill: var(--i{i}); }}"
        for i in range(COLORS)
    )
    rules = [*_file("chart.css").splitlines(), *series]
    if not alone:
        return "\n".join([_file("colors.css"), *rules])
    colors = {name: (light, dark) for name, light, dark in _COLOR.findall(_file("colors.css"))}

    def filled(lines: Iterable[str], theme: int) -> str:
        return re.sub(r"var\(--(\w+)\)", lambda m: colors[m[1]][theme], "\n".join(lines))

    dark = filled((line for line in rules if "var(" in line), 1)
    return f"{filled(rules, 0)}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"


def _file(name: str) -> str:
    return files("stagec.output").joinpath(name).read_text("utf-8").rstrip()


@dataclass(frozen=True, kw_only=True)
class Chart(ABC):
    """A chart: its title, and what it is about, such as the model, the machine and the command."""

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
        if self.about:
            parts.append(_text(0, height + 12, self.about, style="quiet"))
            height += 20
        head = f'<svg viewBox="0 0 {width} {height:g}" class="chart{kind}" role="img"'
        if css:
            space = "http://www.w3.org/2000/svg"
            head += f' xmlns="{space}" width="{width}" height="{height:g}"'
            css = f"<style>\n{css}\n</style>\n"
        about = f"<desc>{escape(self.command)}</desc>\n" if self.command else ""
        name = escape(self.title)
        return f'{head} aria-label="{name}">\n{about}{css}' + "\n".join([*parts, "</svg>"])


# -- points and lines ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """A point: its two values, the series that it belongs to, what it is, whether it fits, and the
    key of the row of the page that is about the same."""

    x: Any
    y: float
    series: str
    about: str
    fits: bool = True
    key: str = ""


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """An axis: its title, how its values are written, by which factor its units grow, and whether
    it is linear, however far values are apart."""

    title: str
    text: Callable[[Any], str]
    units: int = 1000
    linear: bool = False

    def mark(self, value: Any) -> str:
        """A value beside the axis, without zeros at its end."""
        text = "0" if _is_zero(value) else self.text(value)
        return re.sub(r"\.0+(?!\d)|(\.\d*?)0+(?!\d)", r"\1", text)


def _is_zero(value: Any) -> bool:
    return not isinstance(value, bool) and bool(value == 0)


@dataclass(frozen=True, kw_only=True)
class Plot(Chart):
    """Points over two axes. With `joined` the points of a series are; without `dots` lines alone
    are seen. `front` are points to join by a line, `bounds` points that are faint, and `limit` is a
    line at this height, with its text. `unfit_about` says why points do not fit, for the
    legend."""

    points: Sequence[PlotPoint]
    x: PlotAxis
    y: PlotAxis
    joined: bool = False
    dots: bool = True
    front: Sequence[tuple[Any, float]] = ()
    bounds: Sequence[tuple[float, float]] = ()
    bounds_about: str = ""
    limit: tuple[float, str] | None = None
    unfit_about: str = "does not fit the memory"

    def draw(self, width: int) -> tuple[list[str], float]:
        xs = [*(p.x for p in self.points), *(b[0] for b in self.bounds)]
        ys = [*(p.y for p in self.points), *(b[1] for b in self.bounds)]
        if self.limit is not None and self.limit[0] <= 2 * max(ys):
            ys.append(self.limit[0])
        frame = _Frame(
            _Scale(xs, self.x, given=self.joined), _Scale(ys, self.y), width, width * 0.3 + 150
        )
        parts = [*frame.draw()]
        place, series = frame.place, list(dict.fromkeys(p.series for p in self.points))
        for a, b in self.bounds:
            x, y = place(a, b)
            parts.append(f'<circle class="bound" cx="{x:.1f}" cy="{y:.1f}" r="2"/>')
        if self.front:
            parts.append(_polyline("front", (place(a, b) for a, b in self.front)))
        if self.limit is not None:
            parts += frame.limit(*self.limit)
        for number, name in enumerate(series):
            parts += self._series(number, [p for p in self.points if p.series == name], frame)
        items = [(self._swatch(n), name) for n, name in enumerate(series[:_MOST_SERIES]) if name]
        if len(series) > _MOST_SERIES:
            items.append(("", f"and {len(series) - _MOST_SERIES} others"))
        if not all(p.fits for p in self.points):
            hollow = '<circle class="unfit s6" cx="7" cy="-4" r="4"/>'
            items.append((hollow, f"hollow: {self.unfit_about}"))
        if self.front:
            line = '<path class="front" d="M0,-4H16"/>'
            items.append((line, "no other is better in both respects"))
        if self.bounds:
            items.append(('<circle class="bound" cx="7" cy="-4" r="2.5"/>', self.bounds_about))
        legend, high = _legend(items, width, frame.height)
        return [*parts, *legend], frame.height + high

    def _series(self, number: int, points: Sequence[PlotPoint], frame: _Frame) -> Iterator[str]:
        color = number % COLORS
        if self.joined and len(points) > 1:
            ordered = sorted(points, key=lambda p: frame.across(p.x))
            dash = _DASHES[number % len(_DASHES)]
            line = (frame.place(p.x, p.y) for p in ordered)
            yield _polyline(f"join s{color}", line, dash)
        for point in points:
            x, y = frame.place(point.x, point.y)
            kind = f"f{color}" if point.fits else f"unfit s{color}"
            hidden = "" if self.dots else ' fill-opacity="0"'
            key = f' data-key="{escape(point.key)}"' if point.key else ""
            title = f"<title>{escape(point.about)}</title>" if point.about else ""
            shape = _marker(number if self.dots else 0, x, y)
            yield f'<{shape} class="{kind}"{hidden}{key}>{title}</{shape.split()[0]}>'

    def _swatch(self, number: int) -> str:
        color, dash = number % COLORS, _DASHES[number % len(_DASHES)]
        line = _polyline(f"join s{color}", [(0, -4), (18, -4)], dash) if self.joined else ""
        mark = f'<{_marker(number, 9, -4)} class="f{color}"/>' if self.dots else ""
        return line + mark


def _marker(number: int, x: float, y: float) -> str:
    """An element without its end: circles, squares, triangles and diamonds take turns, and later
    ones are smaller, so that a mark below another one is seen."""
    size = 5 - 0.6 * (number % 4)
    if number % 4 == 0:
        return f'circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}"'
    corners = (
        ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        ((0, -1.3), (1.25, 1), (-1.25, 1)),
        ((0, -1.5), (1.5, 0), (0, 1.5), (-1.5, 0)),
    )[number % 4 - 1]
    return f'path d="M{"L".join(f"{x + size * a:.1f},{y + size * b:.1f}" for a, b in corners)}Z"'


def _polyline(kind: str, points: Iterable[tuple[float, float]], dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}"{dashed} points="{line}"/>'


class _Scale:
    """Values to shares of an axis: linear, logarithmic, or one after the other for texts."""

    def __init__(self, values: Sequence[Any], axis: PlotAxis, *, given: bool | None = None) -> None:
        """The axis along which values stand: upwards from zero, or across, where values that were
        `given` are marked."""
        self.axis = axis
        self._places: dict[Any, int] = {}
        self._log, self._given = False, list[Any]()
        if any(isinstance(v, str | bool) for v in values):
            self._places = {v: i for i, v in enumerate(dict.fromkeys(values))}
            self._low, self._high = -0.5, len(self._places) - 0.5
            return
        self._given = sorted(set(values)) if given else []
        low, high = min(values), max(values)
        self._log = low > 0 and high / low >= _LARGE_RATIO and not axis.linear
        if self._log:
            self._low, self._high = log10(low) - 0.05, log10(high) + 0.05
            return
        if given is None:  # heights compare from zero
            low = min(low, 0)
        room = 0.04 * (high - low) or abs(high) or 1
        self._low, self._high = low - (room if low else 0), high + room

    def __call__(self, value: Any) -> float:
        """The share of the axis, from 0 to 1."""
        if self._places:
            at: float = self._places[value]
        else:
            at = log10(value) if self._log else value
        return (at - self._low) / (self._high - self._low)

    def ticks(self) -> Iterator[Any]:
        """Values to mark."""
        if self._places:
            yield from self._places
        elif 0 < len(self._given) <= _MOST_MARKS:
            yield from self._given
        elif self._log and self.axis.units == _BINARY:
            yield from (2.0**p for p in range(ceil(self._low / _TWO), floor(self._high / _TWO) + 1))
        elif self._log:
            powers = range(floor(self._low), ceil(self._high) + 1)
            few = self._high - self._low < 2
            marks = [m * 10.0**p for p in powers for m in ((1, 2, 5) if few else (1,))]
            yield from (m for m in marks if self._low <= log10(m) <= self._high)
        else:
            step = _round_step((self._high - self._low) / 5, self.axis.units)
            first = ceil(self._low / step)
            yield from (step * i for i in range(first, floor(self._high / step) + 1))


def _round_step(about: float, units: int) -> float:
    """1, 2 or 5 times a power of ten of a unit."""
    unit = float(units) ** floor(log10(about) / log10(units))
    power = unit * 10.0 ** floor(log10(about / unit))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= about)


class _Frame:
    """Two axes with their marks: the title of the upright one above it, that of the other below."""

    def __init__(self, across: _Scale, up: _Scale, width: int, height: float) -> None:
        self.across, self.up, self.height = across, up, height
        widest = max((_wide(up.axis.mark(v)) for v in up.ticks()), default=0)
        self._left, self._right = widest + 12, width - _RIGHT
        self._top, self._bottom = 26.0, height - 42

    def place(self, x: Any, y: float) -> tuple[float, float]:
        """Where a point is."""
        across = self._left + self.across(x) * (self._right - self._left)
        return across, self._bottom - self.up(y) * (self._bottom - self._top)

    def limit(self, value: float, text: str) -> Iterator[str]:
        """A line at a height, or above the picture what it would say."""
        share = self.up(value)
        y = self._bottom - share * (self._bottom - self._top)
        if share > 1:
            yield _text(self._right, 12, f"{text}, above the picture", "end", "alarm")
            return
        yield f'<path class="limit" d="M{self._left:.1f},{y:.1f}H{self._right:.1f}"/>'
        yield from _halo(self._right, y - 5, text, "end", "alarm")

    def draw(self) -> Iterator[str]:
        """Lines and texts; of marks across those that have room."""
        for value in self.up.ticks():
            at = self._bottom - self.up(value) * (self._bottom - self._top)
            yield f'<path class="grid" d="M{self._left:.1f} {at:.1f}H{self._right:.1f}"/>'
            yield _text(self._left - 6, at + 4, self.up.axis.mark(value), "end", "quiet")
        end = -1.0
        for value in self.across.ticks():
            at = self._left + self.across(value) * (self._right - self._left)
            yield f'<path class="grid" d="M{at:.1f} {self._top:.1f}V{self._bottom:.1f}"/>'
            text = self.across.axis.mark(value)
            if at - _wide(text) / 2 > end:
                yield _text(at, self._bottom + 16, text, "middle", "quiet")
                end = at + _wide(text) / 2 + 6
        middle = (self._left + self._right) / 2
        yield _text(middle, self._bottom + 34, self.across.axis.title, "middle")
        yield _text(0, 13, self.up.axis.title)


# -- stacked bars ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its name, its parts in their order, whether it fits, and the key of its row."""

    name: str
    parts: Mapping[str, float]
    fits: bool = True
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Stacked bars, one below the other, on one axis from zero; a `limit` is a line with its text.
    Of very many bars the first are drawn."""

    bars: Sequence[Bar]
    axis: PlotAxis
    limit: tuple[float, str] | None = None
    #: Parts whose place among colors is kept, such as all categories of memory.
    order: Sequence[str] = ()
    most: int = 60

    def draw(self, width: int) -> tuple[list[str], float]:
        bars = self.bars[: self.most]
        names = list(dict.fromkeys(n for bar in bars for n, v in bar.parts.items() if v))
        colors = {n: i % COLORS for i, n in enumerate(dict.fromkeys((*self.order, *names)))}
        sums = [sum(bar.parts.values()) for bar in bars]
        totals = [
            self.axis.text(s) + ("" if b.fits else " ✕") for s, b in zip(sums, bars, strict=True)
        ]
        beside = width > 560
        left = min(0.36 * width, max(_wide(b.name) for b in bars) + 10) if beside else 0.0
        row, high, top = (24, 17, 8) if beside else (38, 17, 6)
        right = width - max(map(_wide, totals)) - 12
        upto = max(sums) or 1.0
        if self.limit is not None and self.limit[0] < 1.6 * upto:
            upto = max(upto, self.limit[0])
        scale, bottom = (right - left) / upto, top + row * len(bars)
        parts: list[str] = []
        step = _round_step(upto / (8 if beside else 4), self.axis.units)
        for i in range(floor(upto / step) + 1):
            x = left + i * step * scale
            parts.append(f'<path class="grid" d="M{x:.1f},{top}V{bottom}"/>')
            parts.append(
                _text(x, bottom + 15, self.axis.mark(i * step), "middle" if i else "start", "quiet")
            )
        for number, (bar, total) in enumerate(zip(bars, totals, strict=True)):
            y = top + row * number + (0 if beside else 16)
            name = _short(bar.name, left - 10 if beside else width)
            parts.append(_text(left - 8, y + 13, name, "end") if beside else _text(0, y - 4, name))
            parts += self._bar(bar, left, y, high, scale, colors)
            parts.append(_text(left + sums[number] * scale + 6, y + 13, total, style="quiet"))
        if self.limit is not None and self.limit[0] <= upto:
            x = left + self.limit[0] * scale
            parts.append(f'<path class="limit" d="M{x:.1f},{top - 6}V{bottom}"/>')
        parts.append(_text((left + right) / 2, bottom + 33, self.axis.title, "middle"))
        swatches = [(f'<path class="f{colors[n]}" d="M0,-9h12v10h-12z"/>', n) for n in names]
        items = swatches if len(names) > 1 else []
        if self.limit is not None:
            items.append(('<path class="limit" d="M0,-4H16"/>', self.limit[1]))
        if not all(bar.fits for bar in bars):
            items.append(("", "✕: does not fit the memory"))
        if len(self.bars) > len(bars):
            items.append(("", f"the first {len(bars)} of {len(self.bars):,}"))
        legend, more = _legend(items, width, bottom + 40)
        return [*parts, *legend], bottom + 40 + more

    def _bar(
        self, bar: Bar, left: float, y: float, high: float, scale: float, colors: Mapping[str, int]
    ) -> Iterator[str]:
        x, total = left, sum(bar.parts.values()) or 1
        key = f' data-key="{escape(bar.key)}"' if bar.key else ""
        for name, value in bar.parts.items():
            if value <= 0:
                continue
            wide, color = value * scale, colors[name]
            text = f"{bar.name}\n{name}: {self.axis.text(value)}, {value / total:.1%}"
            box = f'x="{x:.1f}" y="{y:g}" width="{max(wide - 0.6, 0.4):.1f}" height="{high:g}"'
            yield f'<rect class="f{color}" {box}{key}><title>{escape(text)}</title></rect>'
            if _wide(name) < wide - 8 and len(colors) > 1:
                yield _text(x + 4, y + 13, name, style=f"i{color}", more=' pointer-events="none"')
            x += wide


# -- heat maps -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeatCell:
    """A cell of a heat map: its value, None where there is none, and the text in it; what it is,
    whether it fits, and the key of its row."""

    value: float | None
    text: str
    about: str
    fits: bool = True
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Heat(Chart):
    """Values over two axes, by shades and as texts. With `more`, more is better."""

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

    def draw(self, width: int) -> tuple[list[str], float]:
        (x_name, columns), (y_name, rows) = self.across, self.up
        left = max(map(_wide, rows)) + 12
        wide, high, top = (width - left - 4) / len(columns), 34, 22
        wide = min(wide, 130)
        found = [c.value for c in self.cells.values() if c.value is not None]
        low, spread = min(found), (max(found) - min(found)) or 1.0
        parts = [_text(0, 13, y_name)]
        for i, row in enumerate(rows):
            y = top + i * high
            parts.append(_text(left - 6, y + 21, row, "end", "quiet"))
            for k, column in enumerate(columns):
                if (cell := self.cells.get((column, row))) is not None:
                    share = None if cell.value is None else (cell.value - low) / spread
                    parts += self._cell(cell, share, left + k * wide, y, wide, high)
        bottom, end = top + high * len(rows), -1.0
        for k, column in enumerate(columns):
            at = left + (k + 0.5) * wide
            if at - _wide(column) / 2 > end:
                parts.append(_text(at, bottom + 15, column, "middle", "quiet"))
                end = at + _wide(column) / 2 + 5
        parts.append(_text(left + wide * len(columns) / 2, bottom + 33, x_name, "middle"))
        best = "greatest" if self.more else "least"
        items = [
            (_shade(self.SHADES[n], 0, -9, 12, 10), text)
            for n, text in ((0, f"least {self.value}"), (-1, f"greatest {self.value}"))
        ]
        items += [("", f"each cell: the {best} over what else is swept"), ("", "✕: does not fit")]
        legend, more = _legend(items, width, bottom + 40)
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
        if _wide(text) < wide - 4:
            yield _text(x + wide / 2, y + 21, text, "middle", ink, more=' pointer-events="none"')


def _shade(
    color: str, x: float, y: float, wide: float, high: float, key: str = "", title: str = ""
) -> str:
    box = f'x="{x:.1f}" y="{y:g}" width="{wide:.1f}" height="{high:g}"'
    return f'<rect fill="{color}" {box}{key}>{title}</rect>'


# -- values side by side ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Thread:
    """A line through the value of each axis: what it is, and the key of its row."""

    values: Mapping[str, Any]
    about: str
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Threads(Chart):
    """All axes one below the other, and a line for each point through its values; the first one is
    the best. An axis of numbers with a formatter in `scales` is a scale, others have a place for
    each value."""

    axes: Sequence[str]
    threads: Sequence[Thread]
    scales: Mapping[str, Callable[[float], str]]

    def draw(self, width: int) -> tuple[list[str], float]:
        left = max(_wide(name) for name in self.axes) + 16
        row, top, right = 46, 24, width - 46
        places: dict[str, Mapping[Any, float]] = {}
        parts: list[str] = []
        labels: list[str] = []
        for number, name in enumerate(self.axes):
            y = top + row * number
            parts.append(f'<path class="axis" d="M{left:.1f},{y}H{right:.1f}"/>')
            labels.append(_text(0, y + 4, name))
            values = sorted(
                {t.values[name] for t in self.threads}, key=lambda v: (isinstance(v, str), v)
            )
            places[name] = _spread(values, name in self.scales, left + 8, right)
            marked = [values[0], values[-1]] if name in self.scales else values
            write = self.scales.get(name, str)
            end = -1.0
            for value in dict.fromkeys(marked):
                at, text = places[name][value], write(value)
                if at - _wide(text) / 2 > end:
                    labels += _halo(at, y - 6, text, "middle")
                    end = at + _wide(text) / 2 + 4
        for number, thread in reversed([*enumerate(self.threads)]):
            line = " ".join(
                f"{places[name][thread.values[name]]:.1f},{top + row * i}"
                for i, name in enumerate(self.axes)
            )
            kind = "many best" if number == 0 else "many"
            key = f' data-key="{escape(thread.key)}"' if thread.key else ""
            title = f"<title>{escape(thread.about)}</title>"
            parts.append(f'<polyline class="{kind}" points="{line}"{key}>{title}</polyline>')
        height = top + row * (len(self.axes) - 1) + 12
        items = [('<path class="many best" d="M0,-4H16"/>', "the best")]
        legend, more = _legend(items, width, height)
        return [*parts, *labels, *legend], height + more


def _spread(values: Sequence[Any], scaled: bool, left: float, right: float) -> dict[Any, float]:
    """Where each value is between two places: by its size, or in its order."""
    low, spread = (
        (values[0], values[-1] - values[0] or 1) if scaled else (0, max(1, len(values) - 1))
    )
    return {
        v: left + ((v if scaled else i) - low) / spread * (right - left)
        for i, v in enumerate(values)
    }


# -- texts -----------------------------------------------------------------------------------------


def _legend(items: Sequence[tuple[str, str]], width: int, top: float) -> tuple[list[str], float]:
    """Swatches and their texts in rows, and how high these are."""
    parts: list[str] = []
    x, y = 0.0, top + 14
    for swatch, text in items:
        room = 22 if swatch else 0
        wide = room + _wide(text) + 16
        if x and x + wide - 16 > width:
            x, y = 0.0, y + _ROW
        parts.append(
            f'<g transform="translate({x:.1f},{y:g})">{swatch}'
            f"{_text(room, 0, _short(text, width - room))}</g>"
        )
        x += wide
    return parts, (y - top + 8 if items else 4)


def _wide(text: str) -> float:
    """About how many pixels a text is wide."""
    return _LETTER * len(text)


def _short(text: str, room: float) -> str:
    most = max(1, int(room / _LETTER))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _text(
    x: float, y: float, text: str, anchor: str = "start", style: str = "", more: str = ""
) -> str:
    named = f' class="{style}"' if style else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}"{placed}{more}>{escape(text)}</text>'


def _halo(x: float, y: float, text: str, anchor: str, style: str = "") -> Iterator[str]:
    """A text that is legible on lines: once as its edge, once above that."""
    yield _text(x, y, text, anchor, "halo", ' aria-hidden="true"')
    yield _text(x, y, text, anchor, style)
