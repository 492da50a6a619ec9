"""Tables of a step of serving: what it keeps, and what bounds its ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from stagec.output.tables import bytes_text, count_text, table

_KEPT = {
    "cache_bytes_per_token": "caches, per token",
    "cache_bytes": "caches",
    "state_bytes": "state",
    "weight_bytes": "weights",
}
_MEMORY, _COMMUNICATION = "memory", "communication"


def print_serving(figures: dict[str, Any], out: Console) -> None:
    """What the step keeps, the largest batch, and its ops."""
    made = table("Serving, per rank", "kept", "bytes", "")
    for name, text in _KEPT.items():
        value = figures[name]
        made.add_row(text, bytes_text(value), f"{value:,}" if isinstance(value, int) else "")
    if figures["max_batch"] is not None:
        made.add_row("largest batch, of all ranks", "", f"{figures['max_batch']:,}")
    if figures["max_context"] is not None:
        made.add_row("longest context, of this batch", "", f"{figures['max_context']:,}")
    out.print(made)
    rows = figures.get("ops")  # of pods there are none
    if rows:
        out.print(_in_symbols(rows) if isinstance(rows[0]["calls"], str) else _ops(rows))
        for text in _ridges(rows):
            out.print(f"{text}\n")


def _in_symbols(rows: Sequence[dict[str, Any]]) -> Table:
    made = table("Ops", "op", "kernel", "FLOPs for each byte", text_columns=3)
    for row in rows:
        if row["kernel"] not in (_MEMORY, _COMMUNICATION):
            made.add_row(f"%{row['op']}", row["kernel"], row["intensity"])
    return made


def _ops(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each product and attention, one for all that is bound by memory, and one for each
    kind of communication; with a machine what bounds them."""
    bounded = any(r["bound"] not in (None, _COMMUNICATION) for r in rows)
    columns = ["op", "kernel", *(["bound"] if bounded else [])]
    counts = ["calls", "FLOPs", "bytes", "FLOPs/byte"]
    made = table("Ops, per rank and step", *columns, *counts, text_columns=len(columns))
    others: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["kernel"] == _MEMORY:
            others.setdefault(("other ops", _MEMORY), []).append(row)
        elif row["kernel"] == _COMMUNICATION:
            others.setdefault((row["kind"], _COMMUNICATION), []).append(row)
        else:
            kernel = f"{row['kernel']} {row['dtype']}"
            made.add_row(*_row(f"%{row['op']}", kernel, [row], bounded=bounded))
    for (name, kernel), sums in others.items():
        made.add_row(*_row(name, kernel, sums, bounded=bounded))
    return made


def _row(name: str, kernel: str, rows: Sequence[dict[str, Any]], *, bounded: bool) -> list[str]:
    calls, flops, size = (sum(r[n] for r in rows) for n in ("calls", "flops", "bytes"))
    ratio = f"{flops / size:,.2f}" if size and kernel != _COMMUNICATION else ""
    bound = [rows[0]["bound"]] if bounded else []
    shown = count_text(flops, "FLOP") if kernel != _COMMUNICATION else ""
    return [name, kernel, *bound, f"{calls:,}", shown, bytes_text(size), ratio]


def _ridges(rows: Sequence[dict[str, Any]]) -> list[str]:
    """From how many FLOPs for each byte the machine computes, by type."""
    ridges = {r["dtype"]: r["ridge"] for r in rows if r["ridge"] is not None}
    each = [f"{dtype} computes from {ridge:,.1f} FLOPs/byte" for dtype, ridge in ridges.items()]
    return ["; ".join(each)] if each else []
