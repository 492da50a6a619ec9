"""The plot of a sweep: two columns of its rows as an SVG that needs nothing else.

Over a swept name rows are joined by lines; over a column they are points, and the front of those
that no other beats is a line. Point at one for what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

WIDTH, HEIGHT = 840, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 260, 24, 52
_COLORS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#9c755f", "#edc948"]
_BINARY, _TWO = 1024, log10(2)
#: From this ratio of the greatest to the least value on, an axis is logarithmic.
_WIDE = 12
_MOST_SERIES, _MOST_MARKS = 14, 10

STYLE = """
.plot { font: 12px system-ui, sans-serif; }
.plot text { fill: #1c1c1e; }
.plot .quiet { fill: #5f6368; }
.plot .grid { stroke: #dadce0; }
.plot .front { stroke: #1c1c1e; fill: none; stroke-dasharray: 4 3; }
.plot .join { fill: none; stroke-width: 1.5; }
.plot circle:hover { stroke: #1c1c1e; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  .plot text { fill: #e8eaed; } .plot .quiet { fill: #a5abb3; } .plot .grid { stroke: #3a3d42; }
  .plot .front, .plot circle:hover { stroke: #e8eaed; }
}
"""


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """A row: its two values, the series that it belongs to, what it is, and whether it fits."""

    x: Any
    y: float
    series: str
    about: str
    fits: bool = True


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """An axis: its title, how its values are written, by which factor its units grow, and whether
    it is linear, however far values are apart."""

    title: str
    text: Callable[[Any], str]
    units: int = 1000
    linear: bool = False


def plot(
    points: Sequence[PlotPoint],
    x: PlotAxis,
    y: PlotAxis,
    *,
    joined: bool,
    dots: bool = True,
    front: Sequence[tuple[Any, float]] = (),
) -> str:
    """The SVG. With `joined` the points of a series are; without `dots` nothing else shows them.
    `front` are points to join by a line."""
    across, up = _Scale([p.x for p in points], x, given=joined), _Scale([p.y for p in points], y)
    series = list(dict.fromkeys(p.series for p in points))
    about = f"{escape(y.title)} over {escape(x.title)}"
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" class="plot" role="img" aria-label="{about}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        f"<style>{STYLE}</style>",
        *_frame(across, up),
    ]

    def place(a: Any, b: float) -> str:
        return f"{_x(across(a)):.1f},{_y(up(b)):.1f}"

    if front:
        line = " ".join(place(a, b) for a, b in front)
        parts.append(f'<polyline class="front" points="{line}"/>')
    for number, name in enumerate(series):
        color = _COLORS[number % len(_COLORS)]
        mine = [p for p in points if p.series == name]
        if joined and len(mine) > 1:
            ordered = sorted(mine, key=lambda p: across(p.x))
            line = " ".join(place(p.x, p.y) for p in ordered)
            parts.append(f'<polyline class="join" stroke="{color}" points="{line}"/>')
        parts += [_dot(p, place(p.x, p.y), color) for p in mine if dots]
        if name and number < _MOST_SERIES:
            at = _TOP + 14 + 18 * number
            parts.append(f'<circle cx="{WIDTH - _RIGHT + 18}" cy="{at - 4}" r="4" fill="{color}"/>')
            parts.append(f'<text x="{WIDTH - _RIGHT + 28}" y="{at}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _dot(point: PlotPoint, place: str, color: str) -> str:
    cx, cy = place.split(",")
    fill = f'fill="{color}"' if point.fits else f'fill="none" stroke="{color}"'
    return f'<circle cx="{cx}" cy="{cy}" r="4" {fill}><title>{escape(point.about)}</title></circle>'


def _x(share: float) -> float:
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


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
        self._log = low > 0 and high / low >= _WIDE and not axis.linear
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


def _frame(across: _Scale, up: _Scale) -> Iterator[str]:
    left, right, bottom, top = _x(0), _x(1), _y(0), _y(1)
    for value in up.ticks():
        at = _y(up(value))
        yield f'<path class="grid" d="M{left:.1f} {at:.1f}H{right:.1f}"/>'
        yield _text(left - 6, at + 4, up.axis.text(value), "end", "quiet")
    for value in across.ticks():
        at = _x(across(value))
        yield f'<path class="grid" d="M{at:.1f} {top:.1f}V{bottom:.1f}"/>'
        yield _text(at, bottom + 16, across.axis.text(value), "middle", "quiet")
    yield _text((left + right) / 2, HEIGHT - 12, across.axis.title, "middle")
    yield _text(left - 80, 14, up.axis.title, "start")


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
