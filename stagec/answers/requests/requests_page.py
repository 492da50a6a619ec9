"""The page of a server over time: what replicas do, and how requests' times are spread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stagec.answers.time.table import seconds_text
from stagec.output.page import TableRow, command, figures, page, paragraphs, table
from stagec.output.plot import Plot, PlotAxis, PlotPoint
from stagec.serving.latency import PERCENTILES

if TYPE_CHECKING:
    from stagec.answers.requests.answer import LoadMoment, RequestsAnswer

#: Points of a curve of times.
_POINTS = 100
_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}


def requests_page(answer: RequestsAnswer) -> str:
    """The pictures, the percentiles, and what there is to say."""
    drawn = [load_plot(answer), _shares(answer), _spreads(answer)]
    if any(pool.changes for pool in answer.pools.values()):
        drawn.insert(1, _replicas(answer))
    heads = ["figure", "mean", *(f"p{n}" for n in PERCENTILES)]
    rows = [
        TableRow([_TITLES[name], *seconds], [_TITLES[name], *map(seconds_text, seconds)])
        for name, seconds in (
            (n, spread.as_json().values()) for n, spread in answer.spreads.items()
        )
    ]
    body = [command(answer.command), *paragraphs([answer.load]), figures(drawn), table(heads, rows)]
    return page(answer.title, [*body, *paragraphs(answer.lines())])


def load_plot(answer: RequestsAnswer) -> Plot:
    """Requests that run and that wait, over time."""
    figures: dict[str, Callable[[LoadMoment], float | None]] = {
        "running": lambda m: m.running,
        "waiting": lambda m: m.waiting,
    }
    axis = PlotAxis("requests", lambda v: f"{v:,g}", linear=True)
    return _over_time(answer, "Running and waiting requests", axis, figures)


def _replicas(answer: RequestsAnswer) -> Plot:
    figures: dict[str, Callable[[LoadMoment], float | None]] = {
        "held": lambda m: m.held,
        "take requests": lambda m: m.up,
    }
    axis = PlotAxis("replicas", lambda v: f"{v:,.3g}", linear=True)
    title = "Replicas that hold their ranks, and those that take requests"
    return _over_time(answer, title, axis, figures)


def _shares(answer: RequestsAnswer) -> Plot:
    figures: dict[str, Callable[[LoadMoment], float | None]] = {
        "time in steps": lambda m: m.busy,
        "cache used": lambda m: m.cache,
    }
    axis = PlotAxis("share", lambda v: f"{v:.0%}", linear=True)
    return _over_time(answer, "Share of time and cache in use", axis, figures)


def _over_time(
    answer: RequestsAnswer,
    title: str,
    axis: PlotAxis,
    figures: dict[str, Callable[[LoadMoment], float | None]],
) -> Plot:
    points: list[PlotPoint] = []
    for pool, moments in answer.moments.items():
        for name, figure in figures.items():
            series = f"{pool}: {name}" if len(answer.moments) > 1 else name
            for m in moments:
                if (value := figure(m)) is not None:
                    about = f"{series} {axis.text(value)}, at {m.seconds:,.4g} s"
                    points.append(PlotPoint(m.seconds, value, series, about))
    x = PlotAxis("time, s", lambda v: f"{v:,g}", linear=True)
    about = answer.title
    return Plot(
        title=title,
        about=about,
        command=answer.command,
        points=points,
        x=x,
        y=axis,
        joined=True,
        dots=False,
    )


def _spreads(answer: RequestsAnswer) -> Plot:
    points: list[PlotPoint] = []
    for name, spread in answer.spreads.items():
        for n in range(1, _POINTS + 1):
            value = spread.values[max(0, len(spread.values) * n // _POINTS - 1)]
            about = f"{_TITLES[name]} of {n}% of the requests: up to {seconds_text(value)}"
            points.append(PlotPoint(value, n / _POINTS, _TITLES[name], about))
    return Plot(
        title="Distribution of times: share of requests",
        about=answer.title,
        command=answer.command,
        points=points,
        x=PlotAxis("time", seconds_text),
        y=PlotAxis("share of the requests", lambda v: f"{v:.0%}", linear=True),
        joined=True,
        dots=False,
    )
