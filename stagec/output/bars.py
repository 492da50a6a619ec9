"""Stacked bars, one for each configuration or class."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from html import escape
from math import floor

from stagec.output.chart import COLORS, Chart, halo, legend_rows, svg_text, text_width, wrapped
from stagec.output.plot import PlotAxis, round_step


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
    Of very many bars the first are drawn. The smallest parts for which there is no color of their
    own are one, `others`."""

    bars: Sequence[Bar]
    axis: PlotAxis
    limit: tuple[float, str] | None = None
    #: Parts whose place among colors is kept, such as all categories of memory.
    order: Sequence[str] = ()
    most: int = 60

    def draw(self, width: int) -> tuple[list[str], float]:
        bars = self._bars()
        names = list(dict.fromkeys(n for bar in bars for n, v in bar.parts.items() if v))
        colors = {n: i % COLORS for i, n in enumerate(dict.fromkeys((*self.order, *names)))}
        sums = [sum(bar.parts.values()) for bar in bars]
        totals = [
            self.axis.text(s) + ("" if b.fits else " ✕") for s, b in zip(sums, bars, strict=True)
        ]
        left = max(text_width(b.name) for b in bars) + 10
        beside = width > 560 and left <= 0.36 * width
        left, high, top = (left, 17, 8) if beside else (0.0, 17, 6)
        above: list[list[str]] = [[] if beside else wrapped(b.name, width) for b in bars]
        rows = [24 if beside else 22 + 16 * len(lines) for lines in above]
        right = width - max(map(text_width, totals)) - 12
        upto = max(sums) or 1.0
        if self.limit is not None and self.limit[0] < 1.6 * upto:
            upto = max(upto, self.limit[0])
        scale, bottom = (right - left) / upto, top + sum(rows)
        line = left + self.limit[0] * scale if self.limit and self.limit[0] <= upto else None
        parts: list[str] = []
        labels: list[str] = []
        step = round_step(upto / (8 if beside else 4), self.axis.units)
        for i in range(floor(upto / step) + 1):
            x, anchor = left + i * step * scale, "middle" if i else "start"
            parts.append(f'<path class="grid" d="M{x:.1f},{top}V{bottom}"/>')
            parts.append(svg_text(x, bottom + 15, self.axis.mark(i * step), anchor, "quiet"))
        for number, (bar, total) in enumerate(zip(bars, totals, strict=True)):
            y = top + sum(rows[:number]) + 16 * len(above[number])
            for up, text in enumerate(reversed(above[number])):
                labels += halo(0, y - 4 - 16 * up, text, "start")
            if beside:
                labels.append(svg_text(left - 8, y + 13, bar.name, "end"))
            parts += self._bar(bar, left, y, high, scale, colors)
            x = left + sums[number] * scale + 6
            if line is not None and x - 6 <= line < x + text_width(total) + 4:
                x = line + 6  # next to the line, not across it
            labels += halo(x, y + 13, total, "start", "quiet")
        if line is not None:
            parts.append(f'<path class="limit" d="M{line:.1f},{top - 6}V{bottom}"/>')
        title = svg_text((left + right) / 2, bottom + 33, self.axis.title, "middle")
        legend, more = self._legend(names, colors, width, bottom + 40)
        return [*parts, *labels, title, *legend], bottom + 40 + more

    def _legend(
        self, names: Sequence[str], colors: Mapping[str, int], width: int, top: float
    ) -> tuple[list[str], float]:
        swatches = [(f'<path class="f{colors[n]}" d="M0,-9h12v10h-12z"/>', n) for n in names]
        items = swatches if len(names) > 1 else []
        if self.limit is not None:
            items.append(('<path class="limit" d="M0,-4H16"/>', self.limit[1]))
        if not all(bar.fits for bar in self.bars[: self.most]):
            items.append(("", "✕: does not fit the memory"))
        if len(self.bars) > self.most:
            items.append(("", f"the first {self.most} of {len(self.bars):,}"))
        return legend_rows(items, width, top)

    def _bars(self) -> list[Bar]:
        """The bars that are drawn, each of parts that have colors of their own."""
        bars = list(self.bars[: self.most])
        sums = Counter[str]()
        for bar in bars:
            sums.update(bar.parts)
        if self.order or len(sums) <= COLORS:
            return bars
        own = {name for name, _ in sums.most_common(COLORS - 1)}
        return [replace(bar, parts=_joined(bar.parts, own)) for bar in bars]

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
            if text_width(name) < wide - 8 and len(colors) > 1:
                yield svg_text(
                    x + 4, y + 13, name, style=f"i{color}", more=' pointer-events="none"'
                )
            x += wide


def _joined(parts: Mapping[str, float], own: Set[str]) -> dict[str, float]:
    """The parts, those that are not among `own` as one at the end."""
    shown = {name: value for name, value in parts.items() if name in own}
    return {**shown, "others": sum(v for name, v in parts.items() if name not in own)}
