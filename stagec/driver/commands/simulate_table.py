"""The tables of `stagec simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from stagec.output.tables import bytes_text

if TYPE_CHECKING:
    from stagec.driver.commands.simulate import Simulated


def print_simulated(run: Simulated, out: TextIO) -> None:
    """For people: the step, then where the time of the slowest rank goes."""
    slowest = run.slowest
    mfu = "" if run.mfu is None else f", MFU {run.mfu:.1%}"
    out.write(f"{run.name}: {len(run.ends)} ranks, a step takes {_ms(slowest.end)}{mfu}\n")
    if run.peak_bytes is not None:
        out.write(f"peak of local memory: {run.peak_bytes:,} bytes\n")
    if run.parts is None:
        out.write(f"rank {slowest.rank}: {_ms(slowest.exposed)} without a computation\n")
        return
    out.write(f"rank {slowest.rank}, the slowest:\n")
    rows = [("computation", "", "", "", run.parts.computation)]
    for row in run.parts.exposed:
        name = f"{row.kind} over {row.over}" if row.over else row.kind
        rows.append((name, f"{row.calls:,}", bytes_text(row.bytes), _ms(row.busy), row.exposed))
    rows.append(("idle", "", "", "", run.parts.idle))
    title = ("", "calls", "bytes", "under way", "exposed", "of the step")
    shown = [(*r[:4], _ms(r[4]), f"{r[4] / max(1, slowest.end):.1%}") for r in rows]
    widths = [max(len(line[i]) for line in (title, *shown)) for i in range(len(title))]
    for line in (title, *shown):
        cells = (
            c.ljust(w) if not i else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        out.write("  ".join(("", *cells)).rstrip() + "\n")


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f} ms"
