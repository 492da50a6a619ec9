"""`stagec show`: one trace as a table or as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from stagec.driver.shell.session import log
from stagec.output.trace_files import check_is_trace
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.formats.chakra.show import Row


@click.command("show")
@click.argument("trace", type=Path)
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=50, help="Rows to print (default 50)."
)
@click.option("--all", "everything", is_flag=True, help="Print all rows.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(trace: Path, limit: int, everything: bool, as_json: bool) -> None:
    """Print the nodes of an execution trace, and totals by kind."""
    from stagec.formats.chakra.nodes import TraceError
    from stagec.formats.chakra.show import describe, totals

    check_is_trace(trace)
    try:
        rows = list(describe(trace, None if everything else limit))
        summary = None if as_json else totals(trace)
    except TraceError as e:
        raise error(str(e), remedy="give a complete trace, protobuf or JSON") from None
    if as_json:
        for row in rows:
            sys.stdout.write(json.dumps(dataclasses.asdict(row)) + "\n")
        return
    from stagec.output.tables import console, table

    out = console(sys.stdout, 160)
    if rows:
        columns = [c for c in _COLUMNS if any(_cell(row, c) for row in rows)]
        texts = ((_cell(row, c) for c in columns) for row in rows)
        out.print(table(str(trace), *columns, rows=texts, text_columns=3))
    if summary is not None:
        if summary.nodes > len(rows):
            log(f"{len(rows)} of {summary.nodes} nodes shown; --all shows the rest")
        sums = (
            (kind, *(f"{getattr(total, name, 0):,}" for name in _TOTALS.values()))
            for kind, total in summary.by_kind.items()
        )
        out.print(table("Totals", "kind", *_TOTALS, rows=sums))


_COLUMNS = (
    "id",
    "kind",
    "name",
    "flops",
    "bytes",
    "alloc bytes",
    "free bytes",
    "group",
    "peer",
    "tag",
    "data deps",
    "ctrl deps",
)
_TOTALS = {
    "nodes": "nodes",
    "FLOPs": "flops",
    "bytes touched": "tensor_bytes",
    "bytes communicated": "comm_bytes",
}


def _cell(row: Row, column: str) -> str:
    """The text of a cell; the kind of a collective is that of its communication."""
    match column:
        case "kind":
            return row.collective or row.kind
        case "bytes":
            return _text(row.tensor_bytes if row.comm_bytes is None else row.comm_bytes)
        case _:
            return _text(getattr(row, column.replace(" ", "_")))


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(str(v) for v in cast(tuple[object, ...], value))
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)
