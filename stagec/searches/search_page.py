"""The page of `stagec search --html`: charts and tables of the evaluated strategies, in which each
mark is linked with its row."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagec.answers.sweep.order import unbeaten
from stagec.answers.time.table import seconds_text
from stagec.memory.timeline import ALL
from stagec.output.bars import Bar, Bars
from stagec.output.chart import Chart
from stagec.output.page import TableRow, command, facts, figures, page, paragraphs, table
from stagec.output.plot import Plot, PlotAxis, PlotPoint
from stagec.output.tables import bytes_text
from stagec.output.threads import Thread, Threads

#: The most points in charts, the fastest first, and the most whose breakdowns are drawn.
_MOST, _MOST_BARS = 400, 20
_ABOUT = (
    "Each mark, line and row is a strategy that fits: point at it for its figures, choose it to "
    "see it everywhere, with the command that writes the page of its step."
)
_TIME = PlotAxis("step time", seconds_text)


def search_page(answer: Mapping[str, Any], said: str) -> str | None:
    """The text of the page; `said` is the command of the search. None if no strategy fits, so that
    there is nothing to draw."""
    timed = [p for p in answer["evaluations"] if p["step_seconds"] is not None]
    timed.sort(key=lambda p: p["step_seconds"])
    if not timed:
        return None
    shown = timed[:_MOST]
    counts = {
        "points of the space": answer["points"],
        "legal": answer["legal"],
        "evaluated": answer["evaluated"],
        "fit": len(timed),
    }
    machines = dict.fromkeys(f"{p['ranks']:,} x {p['machine']}" for p in shown)
    about = f"{answer['model']} on {', '.join(machines)}"
    body = [
        command(said),
        facts((name, f"{count:,}") for name, count in counts.items()),
        "<h2>The best</h2>",
        *_best(answer["best"]),
        *paragraphs([_ABOUT], "quiet"),
        figures(replace(c, command=said) for c in _charts(shown, about, answer["bounds"])),
        *_tried(answer.get("tried")),
        "<h2>All that was timed</h2>",
        _all(shown),
        *paragraphs(answer["cautions"]),
    ]
    return page(f"Search: {about}", body)


def _charts(
    points: Sequence[Mapping[str, Any]], about: str, bounds: Mapping[str, Sequence[float]]
) -> Iterator[Chart]:
    yield _cloud(points, about, bounds)
    if len(points) > 1:
        yield _threads(points, about)
    best = [(f"p{n}", p) for n, p in enumerate(points[:_MOST_BARS])]
    kinds: tuple[tuple[str, str, PlotAxis, Sequence[str]], ...] = (
        ("Time of a step by part", "breakdown", _TIME, ()),
        ("Peak memory by category", "memory", PlotAxis("bytes per rank", _bytes, 1024), ALL),
    )
    for title, key, axis, order in kinds:
        bars = [Bar(p["strategy"], p[key], key=k) for k, p in best]
        yield Bars(title=f"{title}: the fastest", about=about, bars=bars, axis=axis, order=order)


def _cloud(
    points: Sequence[Mapping[str, Any]], about: str, bounds: Mapping[str, Sequence[float]]
) -> Plot:
    """Memory over time; the bounds of points that were not evaluated are faint."""
    places = [(p["step_seconds"], p["memory_peak"]) for p in points]
    front = sorted(unbeaten(places))
    upto = 1.5 * max(seconds for seconds, _ in places)
    faint = [
        (s, h)
        for s, h in zip(bounds.get("seconds", ()), bounds.get("memory", ()), strict=True)
        if s <= upto
    ]
    marks = [
        PlotPoint(
            seconds, peak, "evaluated" if n else "the fastest", _about(points[n]), key=f"p{n}"
        )
        for n, (seconds, peak) in reversed([*enumerate(places)])
    ]
    room = max((p["room"] for p in points if p["room"] is not None), default=None)
    return Plot(
        title="Peak memory per rank over step time",
        about=about,
        points=marks,
        x=_TIME,
        y=PlotAxis("peak memory per rank", _bytes, 1024),
        front=front if len(front) > 1 else [],
        bounds=faint,
        bounds_about="lower bounds of strategies that were not evaluated",
        limit=None if room is None else (room, f"room {bytes_text(room)}"),
    )


def _threads(points: Sequence[Mapping[str, Any]], about: str) -> Threads:
    """A line for each point through its value of each flag, and its time."""
    names = list(dict.fromkeys(n for p in points for n in p["flags"]))
    names = [n for n in names if len({str(p["flags"].get(n, "")) for p in points}) > 1]
    scales: dict[str, Callable[[float], str]] = {"step time": seconds_text, "memory": _bytes}
    threads = [
        Thread(
            {n.replace("_", "-"): p["flags"].get(n, "") for n in names}
            | {"step time": p["step_seconds"], "memory": p["memory_peak"]},
            _about(p),
            f"p{n}",
        )
        for n, p in enumerate(points)
    ]
    return Threads(
        title="All flags that differ",
        about=about,
        axes=[*(n.replace("_", "-") for n in names), *scales],
        threads=threads,
        scales=scales,
    )


def _about(point: Mapping[str, Any]) -> str:
    mfu = "" if point["mfu"] is None else f", MFU {point['mfu']:.1%}"
    peak = bytes_text(point["memory_peak"])
    return f"{point['strategy']}\n{seconds_text(point['step_seconds'])}{mfu}, {peak} per rank"


def _bytes(value: float) -> str:
    return bytes_text(round(value))


def _all(points: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        TableRow(
            [p["strategy"], p["step_seconds"], p["memory_peak"], p["mfu"], p["limits"]],
            [
                p["strategy"],
                seconds_text(p["step_seconds"]),
                bytes_text(p["memory_peak"]),
                "" if p["mfu"] is None else f"{p['mfu']:.1%}",
                p["limits"],
            ],
            f"p{n}",
            _opens(p, n),
        )
        for n, p in enumerate(points)
    ]
    return table(["strategy", "step time", "peak memory per rank", "MFU", "limited by"], rows)


def _opens(point: Mapping[str, Any], number: int) -> str:
    """The command that writes the page of a point's step, made from the one that compiles it."""
    words = shlex.split(point["command"])[2:-2]
    name = f"step-{number}.html"
    return shlex.join(["stagec", "time", *words, "--machine", point["machine"], "--html", name])


def _best(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "<ol>"
    for row in rows:
        peak = bytes_text(row["memory_peak"])
        said = f"{row['strategy']}: {seconds_text(row['step_seconds'])}, {peak}; {row['reason']}"
        yield f"<li>{''.join(paragraphs([said]))}{command(row['command'])}</li>"
    yield "</ol>"


def _tried(tried: Mapping[str, Any] | None) -> Iterator[str]:
    """The jobs beyond the space that are better than the best of it."""
    if tried is None:
        return
    yield "<h2>Beyond the space</h2>"
    better = len(tried["better"]) or "none"
    counts = f"{tried['count']:,} other values of flags that keep the numerics were tried"
    yield from paragraphs([f"{counts} on the best; {better} made it better."])
    if tried["better"]:
        yield "<ul>"
    for row in tried["better"]:
        said = (
            f"{row['change']}: {seconds_text(row['step_seconds'])} ({row['more']:+.1%}), "
            f"{bytes_text(row['memory_peak'])}"
        )
        yield f"<li>{''.join(paragraphs([said]))}{command(row['command'])}</li>"
    if tried["better"]:
        yield "</ul>"
