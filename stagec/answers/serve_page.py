"""The page of a server over batches, and its curve: tokens/s per rank over tokens/s per user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagec.answers.sweep.page import page_of
from stagec.answers.sweep.plot import PlotAxis, PlotPoint, plot
from stagec.answers.time.table import seconds_text
from stagec.output.tables import fit_text

if TYPE_CHECKING:
    from stagec.answers.serve_answer import ServeAnswer, ServedBatch


def serve_plot(answer: ServeAnswer) -> str:
    """The curve, an SVG."""
    points = [
        PlotPoint(row.rates.per_user, row.rates.per_rank, answer.title, _about(row), row.fits)
        for row in answer.points
    ]
    x = PlotAxis("tokens/s per user", lambda v: f"{v:,.3g}")
    y = PlotAxis("tokens/s per rank", lambda v: f"{v:,.3g}")
    return plot(points, x, y, joined=True)


def serve_page(answer: ServeAnswer) -> str:
    """The curve, and a row for each batch."""
    head = [
        "batch",
        "TTFT",
        "TPOT",
        "a request",
        "tokens/s per rank",
        "tokens/s per user",
        "memory",
    ]
    cells = [
        [
            f"{r.batch:,}",
            *map(seconds_text, (r.ttft, r.tpot, r.latency)),
            f"{r.per_rank:,.1f}",
            f"{r.per_user:,.1f}",
            fit_text(fit),
        ]
        for r, fit in ((row.rates, row.fit) for row in answer.points)
    ]
    return page_of(answer.title, serve_plot(answer), head, cells, answer.cautions)


def _about(row: ServedBatch) -> str:
    r = row.rates
    return (
        f"batch {r.batch:,}: TTFT {seconds_text(r.ttft)}, TPOT {seconds_text(r.tpot)}, "
        f"{r.per_rank:,.1f} tokens/s per rank, {fit_text(row.fit)}"
    )
