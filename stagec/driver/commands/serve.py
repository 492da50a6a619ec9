"""`stagec serve`: what users of a server would meet, and what its ranks give, over batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagec.driver.output.report import show
from stagec.driver.output.tables import fit_text
from stagec.driver.request.accepted import ACCEPTED, take_accepted
from stagec.driver.request.machine import machine_of, machine_options, tell_cautions
from stagec.driver.request.option import Kind, Option, Whole
from stagec.driver.request.ranges import is_range, values_of
from stagec.driver.request.result import JSON, OUTPUT, PAGE_OR_PLOT
from stagec.driver.request.times import TimeType
from stagec.driver.request.units import on_machine
from stagec.driver.shell.options import take_options, takes, takes_job
from stagec.driver.shell.sections import LongCommand
from stagec.driver.sweep.page import page_of
from stagec.driver.sweep.plot import PlotAxis, PlotPoint, plot
from stagec.driver.time.table import seconds_text
from stagec.driver.verbs.serve import LARGEST, ServeAnswer, ServedBatch, serve
from stagec.support.files import write_file

if TYPE_CHECKING:
    pass

_BATCH = re.compile("0*[1-9][0-9]{0,5}")


class Batches(Kind[tuple[int, ...]]):
    """`1,2,4,8`, or `1..8`."""

    name = "N,N,..."

    def read(self, text: str) -> tuple[int, ...]:
        """The batches, in order."""
        given = [p.strip() for p in text.split(",")]
        parts = [t for p in given for t in (values_of(p) if is_range(p) else (p,))]
        if not parts or not all(_BATCH.fullmatch(p) and int(p) <= LARGEST for p in parts):
            raise ValueError(f"expects batches such as 1,8,64 or 1..64, found '{text}'")
        return tuple(sorted({int(p) for p in parts}))


@click.command("serve", cls=LongCommand)
@takes_job
@takes(
    *machine_options(
        "The machine that serves: a name that 'stagec machines' lists.", required=True
    ),
    Option(
        "output_tokens",
        Whole(2),
        "Tokens that each sequence makes (default: 128).",
        128,
        metavar="N",
    ),
    Option(
        "batches",
        Batches(),
        "Sequences in decode at any time, of all ranks together (default: 1, 2, 4, ... as fit; "
        "1..64 doubles).",
    ),
    *ACCEPTED,
    Option("ttft", TimeType(), "A limit of the time to the first token: 500ms."),
    Option("tpot", TimeType(), "A limit of the time for each further token: 30ms."),
    JSON,
    Option("html", PAGE_OR_PLOT, "Write a page, or FILE.svg, with the curve.", metavar="FILE"),
    OUTPUT,
)
def command(**given: Any) -> int:
    """Tell what a server gives: time to the first token (TTFT), time for each further one (TPOT),
    and tokens a second, over batches.

    Sequences come with --prompt tokens and make --output-tokens each. The same ranks prefill and
    decode; with --serve disaggregated some pods prefill, with the strategy of --prefill, and others
    decode, with that of --decode. Engines capture steps as graphs, so hosts do not hold devices up.

        stagec serve llama3-8b --tp 2 --prompt 1024 --machine h100-sxm
    """
    options = take_options(given)
    machine = machine_of(given["machine"], given["used_ranks"])
    asked = {name: given[name] for name in ("output_tokens", "batches", "ttft", "tpot")}
    accepted = take_accepted(on_machine(options, machine), given)
    answer = serve(options, machine, **asked, accepted=accepted)
    tell_cautions(answer.cautions)
    if given["html"] is not None:
        _draw(given["html"], answer)
    show(answer, given)
    return 0


def _draw(file: Path, found: ServeAnswer) -> None:
    """The curve: tokens of a rank over tokens of a user."""
    title, rows = f"{found.model} on {found.machine}", found.points
    points = [
        PlotPoint(row.rates.per_user, row.rates.per_rank, title, _about(row), row.fits)
        for row in rows
    ]
    x = PlotAxis("tokens/s of a user", lambda v: f"{v:,.3g}")
    y = PlotAxis("tokens/s of a rank", lambda v: f"{v:,.3g}")
    drawn = plot(points, x, y, joined=True)
    head = ["batch", "TTFT", "TPOT", "a request", "tokens/s a rank", "tokens/s a user", "memory"]
    cells = [
        [
            f"{r.batch:,}",
            *map(seconds_text, (r.ttft, r.tpot, r.latency)),
            f"{r.per_rank:,.1f}",
            f"{r.per_user:,.1f}",
            fit_text(fit),
        ]
        for r, fit in ((row.rates, row.fit) for row in rows)
    ]
    page = page_of(title, drawn, head, cells, found.cautions)
    write_file(file, drawn if file.suffix == ".svg" else page)


def _about(row: ServedBatch) -> str:
    r = row.rates
    return (
        f"batch {r.batch:,}: TTFT {seconds_text(r.ttft)}, TPOT {seconds_text(r.tpot)}, "
        f"{r.per_rank:,.1f} tokens/s a rank, {fit_text(row.fit)}"
    )
