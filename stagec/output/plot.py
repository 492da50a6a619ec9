"""Points and lines over two axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

from stagec.output.chart import COLORS, Chart, halo, legend_rows, svg_text, text_width

#: Pixels of the room at the right.
_RIGHT = 22
_BINARY, _TWO = 1024, log10(2)
#: From this ratio of the greatest to the least value on, an axis is logarithmic.
_LARGE_RATIO = 12
_MOST_SERIES, _MOST_MARKS = 24, 10
_DASHES = ("", "7 4", "2 3", "10 3 2 3")


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


def _is_short(value: Any) -> bool:
    """Whether a value is whole or has few digits, as those that are chosen and not computed."""
    return bool(value in (int(value), float(f"{value:.3g}")))


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
        legend, high = legend_rows(items, width, frame.height)
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
        self._given = sorted(set(values)) if given and all(map(_is_short, values)) else []
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
            step = round_step((self._high - self._low) / 5, self.axis.units)
            first = ceil(self._low / step)
            yield from (step * i for i in range(first, floor(self._high / step) + 1))


def round_step(about: float, units: int) -> float:
    """1, 2 or 5 times a power of ten of a unit, or the next unit."""
    unit = float(units) ** floor(log10(about) / log10(units))
    power = unit * 10.0 ** floor(log10(about / unit))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= about)
    return step if step < 1000 * unit else unit * units


class _Frame:
    """Two axes with their marks: the title of the upright one above it, that of the other below."""

    def __init__(self, across: _Scale, up: _Scale, width: int, height: float) -> None:
        self.across, self.up, self.height = across, up, height
        widest = max((text_width(up.axis.mark(v)) for v in up.ticks()), default=0)
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
            yield svg_text(self._right, 12, f"{text}, above the picture", "end", "alarm")
            return
        yield f'<path class="limit" d="M{self._left:.1f},{y:.1f}H{self._right:.1f}"/>'
        yield from halo(self._right, y - 5, text, "end", "alarm")

    def draw(self) -> Iterator[str]:
        """Lines and texts; of marks across those that have room."""
        for value in self.up.ticks():
            at = self._bottom - self.up(value) * (self._bottom - self._top)
            yield f'<path class="grid" d="M{self._left:.1f} {at:.1f}H{self._right:.1f}"/>'
            yield svg_text(self._left - 6, at + 4, self.up.axis.mark(value), "end", "quiet")
        end = -1.0
        for value in self.across.ticks():
            at = self._left + self.across(value) * (self._right - self._left)
            yield f'<path class="grid" d="M{at:.1f} {self._top:.1f}V{self._bottom:.1f}"/>'
            text = self.across.axis.mark(value)
            if at - text_width(text) / 2 > end:
                yield svg_text(at, self._bottom + 16, text, "middle", "quiet")
                end = at + text_width(text) / 2 + 6
        middle = (self._left + self._right) / 2
        yield svg_text(middle, self._bottom + 34, self.across.axis.title, "middle")
        yield svg_text(0, 13, self.up.axis.title)
