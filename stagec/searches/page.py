"""`--html` of a search: a page of what was evaluated, in which every point leads to what it is.

Marks are links to the details below them, so the page needs no script and loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from stagec.answers.sweep.order import unbeaten
from stagec.answers.sweep.plot import WIDTH
from stagec.answers.time.table import seconds_text
from stagec.output.page import plain
from stagec.output.tables import bytes_text

_BODY = """<p>{about}. Red is the best, the dashed line joins those that no other beats in both
respects, and each mark leads to where its time and memory go.</p>
<h2>Memory over time</h2>
{scatter}
<h2>All flags side by side</h2>
{parallel}
<h2>The best</h2>
{best}
{tried}
<h2>All that was timed</h2>
{details}"""
_STYLE = """
svg { width: 100%; font: 12px system-ui, sans-serif; } svg text { fill: currentColor; }
.axis { stroke: currentColor; opacity: .35; } .line { fill: none; stroke: #4e79a7; opacity: .3; }
.line.first { stroke: #e15759; opacity: 1; stroke-width: 2.5; }
.front { fill: none; stroke: currentColor; stroke-dasharray: 4 3; }
.value { paint-order: stroke; stroke: Canvas; stroke-width: 4px; pointer-events: none; }
a:hover .line, a:focus .line { opacity: 1; stroke-width: 3; } circle { fill: #4e79a7; }
circle.first { fill: #e15759; }
a:hover circle, a:focus circle { stroke: currentColor; stroke-width: 2; }
details { border-top: 1px solid #8886; padding: .2rem 0; }
details:target { outline: 2px solid #e15759; }
summary { cursor: pointer; } code { font-size: 12px; overflow-wrap: anywhere; }
.bar { display: flex; height: 1.1rem; margin: .3rem 0; }
.bar span { overflow: hidden; font-size: 11px; color: #111; }
"""
_COLORS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#9c755f", "#edc948"),
)
_HEIGHT, _LEFT, _BOTTOM = 380, 80, 40
_MOST = 400


def search_page(found: Mapping[str, Any]) -> str | None:
    """The text of the page; None where nothing was timed, so that there is nothing to draw."""
    timed = [p for p in found["evaluations"] if p["step_seconds"] is not None]
    timed.sort(key=lambda p: p["step_seconds"])
    if not timed:
        return None
    shown = timed[:_MOST]
    about = (
        f"{found['points']:,} points, {found['legal']:,} legal, {found['evaluated']:,} evaluated, "
        f"{len(timed):,} of them fit"
    )
    told = "".join(f"\n<p>{escape(text)}</p>" for text in found["cautions"])
    body = _BODY.format(
        about=escape(about),
        scatter=_scatter(shown),
        parallel=_parallel(shown),
        best="\n".join(_best(found["best"])),
        tried="\n".join(_tried(found.get("tried"))),
        details="\n".join(_details(shown)),
    )
    return plain(f"search: {found['model']}", body + told, _STYLE)


def _link(number: int, point: Mapping[str, Any], mark: str) -> str:
    title = f"{point['strategy']}: {seconds_text(point['step_seconds'])}"
    return f'<a href="#p{number}"><title>{escape(title)}</title>{mark}</a>'


def _scaled(values: Sequence[float], low: float, high: float) -> list[float]:
    """Values as places between two others."""
    least, most = min(values), max(values)
    spread = (most - least) or 1.0
    return [low + (v - least) / spread * (high - low) for v in values]


def _scatter(points: Sequence[Mapping[str, Any]]) -> str:
    times = [p["step_seconds"] for p in points]
    held = [p["memory_peak"] for p in points]
    xs = _scaled(times, _LEFT, WIDTH - 20)
    ys = _scaled(held, _HEIGHT - _BOTTOM, 20)
    kept = unbeaten(list(zip(times, held, strict=True)))
    places = zip(zip(times, held, strict=True), xs, ys, strict=True)
    front = sorted({(x, y) for at, x, y in places if at in kept})
    marks = [
        _link(n, p, f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"{_first(n)}/>')
        for n, (p, x, y) in enumerate(zip(points, xs, ys, strict=True))
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in front)
    foot, low, right = _HEIGHT - 10, _HEIGHT - _BOTTOM + 10, WIDTH - 20
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {_HEIGHT}" role="img" aria-label="memory over time">',
            f'<path class="axis" fill="none" d="M{_LEFT - 10},10V{low}H{WIDTH - 10}"/>',
            f'<polyline class="front" points="{line}"/>',
            *reversed(marks),
            f'<text x="{_LEFT}" y="{foot}">{seconds_text(min(times))}</text>',
            f'<text x="{right}" y="{foot}" text-anchor="end">{seconds_text(max(times))}</text>',
            f'<text x="0" y="{low - 8}">{bytes_text(min(held))}</text>',
            f'<text x="0" y="24">{bytes_text(max(held))}</text>',
            "</svg>",
        ]
    )


def _first(number: int) -> str:
    return ' class="first"' if number == 0 else ""


def _parallel(points: Sequence[Mapping[str, Any]]) -> str:
    """A line for each point through its value of each flag, and its time."""
    names = list(dict.fromkeys(n for p in points for n in p["flags"]))
    names = [n for n in names if len({str(p["flags"].get(n, "")) for p in points}) > 1]
    columns = [*names, "step"]
    xs = _scaled(list(range(len(columns))), 40, WIDTH - 60) if len(columns) > 1 else [40.0]
    heights: list[list[float]] = []
    axes: list[str] = []
    labels: list[str] = []
    for name, x in zip(columns, xs, strict=True):
        axes.append(f'<path class="axis" d="M{x:.1f},30V{_HEIGHT - 40}"/>')
        axes.append(f'<text x="{x:.1f}" y="14" text-anchor="middle">{escape(name)}</text>')
        if name == "step":
            times = [-p["step_seconds"] for p in points]
            heights.append(_scaled(times, _HEIGHT - 50, 40))
            ends = {seconds_text(-max(times)): 40, seconds_text(-min(times)): _HEIGHT - 50}
            labels += [_label(x, y, text) for text, y in ends.items()]
            continue
        values = [p["flags"].get(name, "") for p in points]
        order = sorted(set(values), key=lambda v: (isinstance(v, str), v))
        at = dict(zip(order, _scaled(list(range(len(order))), _HEIGHT - 50, 40), strict=True))
        heights.append([at[v] for v in values])
        labels += [_label(x, y, str(v)) for v, y in at.items()]
    lines: list[str] = []
    for n, point in enumerate(points):
        path = " ".join(f"{x:.1f},{h[n]:.1f}" for x, h in zip(xs, heights, strict=True))
        kind = "line first" if n == 0 else "line"
        lines.append(_link(n, point, f'<polyline class="{kind}" points="{path}"/>'))
    box = f'viewBox="0 0 {WIDTH} {_HEIGHT}" role="img" aria-label="flags side by side"'
    return "\n".join([f"<svg {box}>", *axes, *reversed(lines), *labels, "</svg>"])


def _label(x: float, y: float, text: str) -> str:
    return f'<text class="value" x="{x + 4:.1f}" y="{y + 4:.1f}">{escape(text)}</text>'


def _best(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "<ol>"
    for row in rows:
        yield (
            f"<li>{escape(row['strategy'])}: {seconds_text(row['step_seconds'])}, "
            f"{bytes_text(row['memory_peak'])}; {escape(row['reason'])}"
            f"<br><code>{escape(row['command'])}</code></li>"
        )
    yield "</ol>"


def _tried(found: Mapping[str, Any] | None) -> Iterator[str]:
    """What is better than the best of the space."""
    if found is None:
        return
    yield "<h2>Beyond the space</h2>"
    yield f"<p>{found['count']:,} other values of flags that keep the numerics were tried on the "
    yield f"best; {len(found['better']) or 'none'} made it better.</p><ul>"
    for row in found["better"]:
        yield (
            f"<li>{escape(row['change'])}: {seconds_text(row['step_seconds'])} "
            f"({row['more']:+.1%}), {bytes_text(row['memory_peak'])}"
            f"<br><code>{escape(row['command'])}</code></li>"
        )
    yield "</ul>"


def _details(points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for n, point in enumerate(points):
        times, held = point["breakdown"], point["memory"]
        mfu = "" if point["mfu"] is None else f", MFU {point['mfu']:.1%}"
        yield (
            f'<details id="p{n}" open><summary>{escape(point["strategy"])}: '
            f"{seconds_text(point['step_seconds'])}{mfu}, {bytes_text(point['memory_peak'])}"
            f"</summary>{_bar(times, seconds_text)}{_bar(held, bytes_text)}"
            f"<code>{escape(point['command'])}</code></details>"
        )


def _bar(parts: Mapping[str, Any], text: Any) -> str:
    total = sum(parts.values()) or 1
    cells = [
        f'<span style="width:{100 * value / total:.2f}%;background:{_COLORS[i % len(_COLORS)]}" '
        f'title="{escape(name)}: {text(value)}">{escape(name)}</span>'
        for i, (name, value) in enumerate(parts.items())
        if value
    ]
    return f'<div class="bar">{"".join(cells)}</div>'
