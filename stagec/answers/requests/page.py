"""The page of a server over time: what replicas do, and how requests' times are spread."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from stagec.answers.sweep.page import page_of
from stagec.answers.sweep.plot import PlotAxis, PlotPoint, plot
from stagec.answers.time.table import seconds_text
from stagec.serving.latency import PERCENTILES

if TYPE_CHECKING:
    from stagec.answers.requests.answer import LoadMoment, RequestsAnswer

#: Points of a curve of times.
_POINTS = 100
_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "latency": "a request"}


def requests_page(answer: RequestsAnswer) -> str:
    """The pictures, the percentiles, and what there is to say."""
    drawn = [
        ("Requests that run and wait", load_plot(answer)),
        ("Shares of time and of the cache", _shares(answer)),
        ("Share of the requests within a time", _spreads(answer)),
    ]
    pictures = "\n".join(f"<h2>{escape(title)}</h2>\n{svg}" for title, svg in drawn)
    head = ["", "mean", *(f"p{n}" for n in PERCENTILES)]
    rows = [
        [_TITLES[name], *map(seconds_text, spread.as_json().values())]
        for name, spread in answer.spreads.items()
    ]
    about = f"<p>{escape(answer.load)}</p>\n"
    return page_of(answer.title, about + pictures, head, rows, answer.lines())


def load_plot(answer: RequestsAnswer) -> str:
    """Requests that run and that wait, over time."""
    figures: dict[str, Callable[[LoadMoment], float | None]] = {
        "running": lambda m: m.running,
        "waiting": lambda m: m.waiting,
    }
    return _over_time(answer, "requests", figures, lambda v: f"{v:,g}")


def _shares(answer: RequestsAnswer) -> str:
    figures: dict[str, Callable[[LoadMoment], float | None]] = {
        "with a step": lambda m: m.busy,
        "cache used": lambda m: m.cache,
    }
    return _over_time(answer, "share", figures, lambda v: f"{v:.0%}")


def _over_time(
    answer: RequestsAnswer,
    title: str,
    figures: dict[str, Callable[[LoadMoment], float | None]],
    text: Callable[[float], str],
) -> str:
    points = [
        PlotPoint(m.seconds, value, _named(answer, pool, name), "")
        for pool, moments in answer.moments.items()
        for name, figure in figures.items()
        for m in moments
        if (value := figure(m)) is not None
    ]
    x = PlotAxis("seconds", lambda v: f"{v:,g}", linear=True)
    return plot(points, x, PlotAxis(title, text, linear=True), joined=True, dots=False)


def _named(answer: RequestsAnswer, pool: str, name: str) -> str:
    return f"{pool}: {name}" if len(answer.moments) > 1 else name


def _spreads(answer: RequestsAnswer) -> str:
    points = [
        PlotPoint(
            spread.values[max(0, len(spread.values) * n // _POINTS - 1)],
            n / _POINTS,
            _TITLES[name],
            "",
        )
        for name, spread in answer.spreads.items()
        for n in range(1, _POINTS + 1)
    ]
    x = PlotAxis("time", seconds_text)
    y = PlotAxis("share of the requests", lambda v: f"{v:.0%}", linear=True)
    return plot(points, x, y, joined=True, dots=False)
