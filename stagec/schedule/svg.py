"""A timeline as one self-contained SVG, without scripts, fonts or links, for dark and light
themes."""

from collections.abc import Iterator, Sequence
from html import escape

from stagec.schedule.simulate import Event, ScheduleEvents
from stagec.support.texts import package_text

_ROW, _GAP, _LEFT, _LINE = 22, 4, 60, 16
_CELL, _NARROWEST, _WIDEST = 26, 640, 8000
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}


def timeline_svg(timeline: ScheduleEvents, title: str, facts: Sequence[str] = ()) -> str:
    """The text of an SVG image, with `facts` as lines above the picture.

    Each cell shows its action and its times on hover.
    """
    top = 2 * _LINE + _LINE * len(facts) + 14
    scale = _scale(timeline)
    width = _LEFT + timeline.ticks * scale + _GAP
    height = top + timeline.ranks * (_ROW + _GAP)
    size = f'viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
        f'<title id="title">{_text(title)}</title>',
        f'<desc id="desc">{_text("; ".join(facts))}</desc>',
        f"<style>\n{package_text('schedule/svg.css')}</style>",
        f'<rect class="back" width="{width:g}" height="{height}"/>',
        f'<text class="title" x="{_GAP}" y="18">{_text(title)}</text>',
    )
    lines = (
        f'<text x="{_GAP}" y="{18 + _LINE * (i + 1)}">{_text(fact)}</text>'
        for i, fact in enumerate(facts)
    )
    legend = _legend(timeline, top - 22)
    rows = (line for rank in range(timeline.ranks) for line in _row(timeline, rank, scale, top))
    return "\n".join([*head, *lines, *legend, *rows, "</svg>", ""])


def _scale(timeline: ScheduleEvents) -> float:
    """Pixels per tick: space for a label in the shortest action, within limits of the width."""
    ticks = max(1, timeline.ticks)
    shortest = min((e.end - e.start for row in timeline.rows for e in row), default=1)
    wanted = max(_CELL / max(1, shortest), _NARROWEST / ticks)
    return min(wanted, _WIDEST / ticks)


def _legend(timeline: ScheduleEvents, y: int) -> Iterator[str]:
    kinds = {event.action.kind for event in timeline.rows[0]}
    x = _LEFT
    for kind, name in _NAMES.items():
        if kind not in kinds:
            continue
        yield f'<rect class="{kind}0" x="{x}" y="{y}" width="14" height="12"/>'
        yield f'<text x="{x + 19}" y="{y + 10}">{kind} {name}</text>'
        x += 120
    if len(timeline.placement) > timeline.ranks:
        yield f'<text x="{x}" y="{y + 10}">darker: odd chunks</text>'


def _row(timeline: ScheduleEvents, rank: int, scale: float, top: int) -> Iterator[str]:
    y = top + rank * (_ROW + _GAP)
    yield f'<text x="{_GAP}" y="{y + 15}">rank {rank}</text>'
    width = timeline.ticks * scale
    yield f'<rect class="idle" x="{_LEFT}" y="{y}" width="{width:g}" height="{_ROW}"/>'
    for step in timeline.steps(rank):
        height = _ROW // len(step)
        for index, event in enumerate(step):
            yield _cell(event, scale, y + index * height, height, timeline)


def _cell(event: Event, scale: float, y: int, height: int, timeline: ScheduleEvents) -> str:
    action, start, end = event
    x, width = round(_LEFT + start * scale, 2), round((end - start) * scale, 2)
    what = f"{_NAMES[action.kind]} of microbatch {action.microbatch}, chunk {action.chunk}"
    when = f"from {start * timeline.tick} to {end * timeline.tick}"
    label = str(action.microbatch)
    size = min(11, height - 1)
    shown = (
        f'<text x="{x + width / 2:g}" y="{y + height - (height - size) // 2 - 1:g}" '
        f'style="font-size:{size}px">{label}</text>'
        if width >= 0.65 * size * len(label)
        else ""
    )
    shade = f"{action.kind}{action.chunk % 2}"
    return (
        f'<g class="cell"><title>{what}, {when}</title><rect class="{shade}" '
        f'x="{x:g}" y="{y}" width="{width:g}" height="{height}"/>{shown}</g>'
    )


def _text(text: str) -> str:
    """Text escaped for XML, without control characters."""
    return escape("".join(c if c.isprintable() else " " for c in text))
