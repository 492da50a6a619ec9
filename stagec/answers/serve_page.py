"""The page of a server over batches, and its curve: tokens/s per rank over tokens/s per user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagec.answers.time.table import costed_text, seconds_text
from stagec.output.page import TableRow, command, figures, page, paragraphs, table
from stagec.output.plot import Plot, PlotAxis, PlotPoint
from stagec.output.tables import fit_text

if TYPE_CHECKING:
    from stagec.answers.serve_answer import ServeAnswer, ServedBatch

_HEADS = (*("batch", "TTFT", "TPOT", "latency", "tokens/s per rank", "tokens/s per user"), "memory")


def serve_plot(answer: ServeAnswer) -> Plot:
    """The curve over batches."""
    points = [
        PlotPoint(
            *(row.rates.per_user, row.rates.per_rank, answer.title, _about(row), row.fits),
            f"row{n}",
        )
        for n, row in enumerate(answer.points)
    ]
    return Plot(
        title="Tokens per second per rank over tokens per second per user",
        command=answer.command,
        points=points,
        x=PlotAxis("tokens per second per user", lambda v: f"{v:,.6g}"),
        y=PlotAxis("tokens per second per rank", lambda v: f"{v:,.6g}"),
        joined=True,
    )


def serve_page(answer: ServeAnswer) -> str:
    """The curve, and a row for each batch."""
    about = (
        f"Prompts of {answer.prompt:,} tokens, answers of {answer.output:,}. TTFT: the time to the "
        "first token; TPOT: the time for each further one. Choose a row or a mark for the command "
        "that writes the page of its step of decode."
    )
    rows = table(_HEADS, [_row(n, served) for n, served in enumerate(answer.points)])
    body = [figures([serve_plot(answer)]), *paragraphs([about], "quiet"), rows]
    below = [*filter(None, [costed_text(answer.costed_by), *answer.cautions])]
    return page(answer.title, [command(answer.command), *body, *paragraphs(below)])


def _row(number: int, served: ServedBatch) -> TableRow:
    r = served.rates
    return TableRow(
        [r.batch, r.ttft, r.tpot, r.latency, r.per_rank, r.per_user, served.peak],
        [
            f"{r.batch:,}",
            *map(seconds_text, (r.ttft, r.tpot, r.latency)),
            f"{r.per_rank:,.1f}",
            f"{r.per_user:,.1f}",
            fit_text(served.fit),
        ],
        f"row{number}",
        f"{served.command} --html decode-{r.batch}.html",
    )


def _about(row: ServedBatch) -> str:
    r = row.rates
    return (
        f"batch {r.batch:,}: TTFT {seconds_text(r.ttft)}, TPOT {seconds_text(r.tpot)}\n"
        f"{r.per_rank:,.1f} tokens/s per rank, {r.per_user:,.1f} per user\n{fit_text(row.fit)}"
    )
