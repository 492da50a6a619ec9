"""The page of a server over time: the load of replicas, and the distributions of latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagec.answers.requests.answer import POOL_HEADS, RequestsAnswer
from stagec.answers.requests.rollouts import ROLLOUT_HEADS
from stagec.answers.time.table import TITLES, seconds_text
from stagec.output.page import TableRow, command, figures, page, paragraphs, table
from stagec.output.plot import Plot, PlotAxis, PlotPoint
from stagec.serving.latency import PERCENTILES

#: Points of a distribution.
_POINTS = 100


def requests_page(answer: RequestsAnswer) -> str:
    """The pictures, the percentiles, and the sentences of the answer."""
    drawn = [load_plot(answer), _SHARES.plot(answer), _spreads(answer)]
    if any(pool.changes for pool in answer.pools.values()):
        drawn.insert(1, _REPLICAS.plot(answer))
    heads = ["figure", "mean", *(f"p{n}" for n in PERCENTILES)]
    rows = [
        TableRow([TITLES[name], *seconds], [TITLES[name], *map(seconds_text, seconds)])
        for name, seconds in (
            (n, spread.as_json().values()) for n, spread in answer.spreads.items()
        )
    ]
    body = [command(answer.command), *paragraphs([answer.load]), figures(drawn), table(heads, rows)]
    pools = answer.pool_cells()
    body.append(table(["replicas", *POOL_HEADS[1:]], [TableRow(cells, cells) for cells in pools]))
    if (rollouts := answer.rollouts) is not None:
        texts = [list(cells) for cells in rollouts.cells()]
        body.append(table(list(ROLLOUT_HEADS), [TableRow(cells, cells) for cells in texts]))
    return page(answer.title, [*body, *paragraphs(answer.lines())])


@dataclass(frozen=True)
class _Curves:
    """Fields of `LoadMoment` over time, by their titles."""

    title: str
    axis: PlotAxis
    figures: Mapping[str, str]

    def plot(self, answer: RequestsAnswer) -> Plot:
        """The curves of each pool."""
        points: list[PlotPoint] = []
        for pool, moments in answer.moments.items():
            for name, figure in self.figures.items():
                series = f"{pool}: {name}" if len(answer.moments) > 1 else name
                for m in moments:
                    if (value := getattr(m, figure)) is not None:
                        about = f"{series} {self.axis.text(value)}, at {m.seconds:,.4g} s"
                        points.append(PlotPoint(m.seconds, value, series, about))
        x = PlotAxis("time, s", "{:,g}".format, linear=True)
        return _joined(answer, self.title, points, x, self.axis)


_LOAD = _Curves(
    "Running and waiting requests",
    PlotAxis("requests", "{:,g}".format, linear=True),
    {"running": "running", "waiting": "waiting"},
)
_REPLICAS = _Curves(
    "Replicas that occupy ranks, and those that take requests",
    PlotAxis("replicas", "{:,.3g}".format, linear=True),
    {"occupy ranks": "held", "take requests": "up"},
)
_SHARES = _Curves(
    "Share of time and cache in use",
    PlotAxis("share", "{:.0%}".format, linear=True),
    {"time in steps": "busy", "cache used": "cache"},
)


def load_plot(answer: RequestsAnswer) -> Plot:
    """Running and waiting requests over time."""
    return _LOAD.plot(answer)


def _joined(
    answer: RequestsAnswer, title: str, points: Sequence[PlotPoint], x: PlotAxis, y: PlotAxis
) -> Plot:
    return Plot(
        title=title,
        about=answer.title,
        command=answer.command,
        points=points,
        x=x,
        y=y,
        joined=True,
        dots=False,
    )


def _spreads(answer: RequestsAnswer) -> Plot:
    points: list[PlotPoint] = []
    for name, spread in answer.spreads.items():
        for n in range(1, _POINTS + 1):
            value = spread.values[max(0, len(spread.values) * n // _POINTS - 1)]
            about = f"{TITLES[name]} of {n}% of the requests: up to {seconds_text(value)}"
            points.append(PlotPoint(value, n / _POINTS, TITLES[name], about))
    x = PlotAxis("time", seconds_text)
    y = PlotAxis("share of the requests", "{:.0%}".format, linear=True)
    return _joined(answer, "Distribution of times: share of requests", points, x, y)
