"""The page of a search for servers, and its chart of tokens per rank over tokens per user."""

from collections.abc import Mapping
from typing import Any

from stagec.output.page import TableRow, command, figures, page, paragraphs, table
from stagec.output.plot import Plot, PlotAxis, PlotPoint
from stagec.searches.server.table import OVER_TIME_HEADS, figures_of, over_time_figures, server_text

_HEADS = ("server", "tokens/s per rank", "tokens/s per user", "TTFT", "TPOT", "why")
_FIGURES = ("per_rank", "per_user", "ttft", "tpot")


def front_plot(answer: Mapping[str, Any], said: str) -> Plot:
    """The chart of the Pareto front, which marks servers within the limits of time; `said` is the
    command of the search."""
    several = len(answer["places"]) > 1
    points = [
        PlotPoint(
            row["per_user"],
            row["per_rank"],
            row["mode"],
            server_text(row, several=several),
            row["within"],
        )
        for row in answer["front"]
    ]
    front = [(p.x, p.y) for p in points]
    return Plot(
        title="Tokens per second per rank over tokens per second per user",
        about=f"{answer['model']}: {', '.join(answer['places'])}",
        command=said,
        points=points,
        x=PlotAxis("tokens per second per user", lambda v: f"{v:,.6g}"),
        y=PlotAxis("tokens per second per rank", lambda v: f"{v:,.6g}"),
        joined=False,
        front=front if len(front) > 1 else [],
        unfit_about="slower than --ttft or --tpot allow",
    )


def server_page(title: str, answer: Mapping[str, Any], said: str) -> str:
    """The page with the chart of the front and a row for each of the best servers; `said` is the
    command of the search."""
    several = len(answer["places"]) > 1
    rows = [
        TableRow(
            [name, *(row[each] for each in _FIGURES), row["reason"]],
            [name, *figures_of(row), row["reason"]],
            f"row{n}",
        )
        for n, row in enumerate(answer["best"])
        for name in [server_text(row, several=several)]
    ]
    body = [
        command(said),
        figures([front_plot(answer, said)]),
        "<h2>The best</h2>",
        table(_HEADS, rows),
    ]
    checked = [
        TableRow([name, *texts], [name, *texts])
        for row in answer["best"]
        if row["over_time"] is not None
        for name in [server_text(row, several=several)]
        for texts in [over_time_figures(row["over_time"])]
    ]
    if checked:
        heads = ("server", *OVER_TIME_HEADS)
        body += ["<h2>In a closed loop over time</h2>", table(heads, checked)]
    return page(title, [*body, *paragraphs(answer["cautions"])])
