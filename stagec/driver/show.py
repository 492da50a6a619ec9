"""`stagec show`: one trace as a table or as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, cast

import click

from stagec.driver.common import tell


@click.command("show")
@click.argument("trace", type=Path)
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=50, help="Rows to print (default 50)."
)
@click.option("--all", "everything", is_flag=True, help="Print all rows.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def command(trace: Path, limit: int, everything: bool, as_json: bool) -> None:
    """Print the nodes of an execution trace, and totals by kind."""
    from stagec.support.diagnostics import error
    from stagec.trace.chakra import TraceError
    from stagec.trace.show import describe, totals

    try:
        rows = list(describe(trace, None if everything else limit))
        summary = None if as_json else totals(trace)
    except TraceError as e:
        raise error(str(e), remedy="give an .et file that is complete") from None
    if as_json:
        for row in rows:
            sys.stdout.write(json.dumps(dataclasses.asdict(row)) + "\n")
        return
    from stagec.driver.tables import console, table

    shown = (
        table(str(trace), *(f.name.replace("_", " ") for f in dataclasses.fields(rows[0])))
        if rows
        else None
    )
    if shown is not None:
        for row in rows:
            shown.add_row(*(_text(v) for v in dataclasses.astuple(row)))
        console(sys.stdout).print(shown)
    if summary is not None:
        if summary.nodes > len(rows):
            tell(f"{len(rows)} of {summary.nodes} nodes shown; --all shows the rest")
        sums = table("Totals", "kind", *_TOTALS)
        for kind, total in summary.by_kind.items():
            sums.add_row(kind, *(f"{getattr(total, name, 0):,}" for name in _TOTALS))
        console(sys.stdout).print(sums)


_TOTALS = ("nodes", "flops", "bytes")


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(str(v) for v in cast(tuple[object, ...], value))
    return "" if value is None else str(value)
