"""Values side by side: a line for each configuration through its value of each flag."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from stagec.output.chart import Chart, halo, legend_rows, svg_text, text_width


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
        left = max(text_width(name) for name in self.axes) + 16
        row, top, right = 46, 24, width - 46
        places: dict[str, Mapping[Any, float]] = {}
        parts: list[str] = []
        labels: list[str] = []
        for number, name in enumerate(self.axes):
            y = top + row * number
            parts.append(f'<path class="axis" d="M{left:.1f},{y}H{right:.1f}"/>')
            labels.append(svg_text(0, y + 4, name))
            values = sorted(
                {t.values[name] for t in self.threads}, key=lambda v: (isinstance(v, str), v)
            )
            places[name] = _spread(values, name in self.scales, left + 8, right)
            marked = [values[0], values[-1]] if name in self.scales else values
            write = self.scales.get(name, str)
            end = -1.0
            for value in dict.fromkeys(marked):
                at, text = places[name][value], write(value)
                if at - text_width(text) / 2 > end:
                    labels += halo(at, y - 6, text, "middle")
                    end = at + text_width(text) / 2 + 4
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
        legend, more = legend_rows(items, width, height)
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
