"""The time of a step as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, TextIO

from rich.table import Table

from stagec.output.tables import console, count_text, fit_text, ranks_text, table
from stagec.serving.latency import PERCENTILES
from stagec.time.streams import LAUNCH

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.jobs.request.acceptance import Acceptance

#: The number of printed lines of the critical path.
_LINKS = 8
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
#: The titles of the times of requests.
TITLES = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}


def seconds_text(seconds: float) -> str:
    """`1.234 s`, `56.70 ms`."""
    scale, unit = next((u for u in _UNITS if seconds >= u[0]), _UNITS[-1])
    return f"{seconds / scale:,.3f} {unit}" if unit == "s" else f"{seconds / scale:,.2f} {unit}"


def difference_text(seconds: float) -> str:
    """`+1.2 s`, `-56.7 ms`: three digits."""
    scale, unit = next((u for u in _UNITS if abs(seconds) >= 0.9995 * u[0]), _UNITS[-1])
    long = abs(seconds) >= 999.5
    return f"{seconds:+,.0f} s" if long else f"{seconds / scale:+.3g} {unit}"


def spreads_table(spreads: Mapping[str, Mapping[str, float]]) -> Table:
    """A table of seconds of served requests by figure: the mean and percentiles."""
    names = ("mean", *(f"p{n}" for n in PERCENTILES))
    rows = ((what, *(seconds_text(each[n]) for n in names)) for what, each in spreads.items())
    return table("Requests that were served", "", *names, rows=rows)


def interval_text(interval: Mapping[str, Any] | None, measured: str) -> str:
    """A sentence about the interval of a step; `measured` describes the measurements."""
    if interval is None:
        return f"interval: unknown, {measured}"
    low, high = (seconds_text(interval[n]) for n in ("low_seconds", "high_seconds"))
    return f"interval: {low} to {high}, as 8 of 10 of {measured}"


def print_time(
    report: TimeReport,
    stream: TextIO,
    stack: str,
    interval: str = "",
    *,
    tokens: str = "tokens/s",
    pod: str = "",
) -> None:
    """Print a step: its time and interval, the breakdown, the critical path, and the effect of
    better machines. `stack` is the software, `tokens` the unit of the rate, `pod` the name of
    the pod if there are several."""
    out = console(stream)
    of = f"{pod}: " if pod else ""
    ranks = ranks_text(report.ranks, report.mesh)
    out.print(f"{of}{report.model} on {report.machine}, stack {stack}, {ranks}")
    facts = [f"a step takes {seconds_text(report.step_seconds)}"]
    if report.tokens_per_second is not None and report.tokens_per_second_per_rank is not None:
        each = report.tokens_per_second_per_rank
        facts.append(f"{report.tokens_per_second:,.0f} {tokens} ({each:,.1f} per rank)")
    if report.mfu is not None:
        facts.append(f"MFU {report.mfu:.1%}")
    facts.append(f"HFU {report.hfu:.1%}")
    facts.append(f"of {count_text(round(report.peak_flops), 'FLOP/s')}")
    out.print(", ".join(facts))
    if interval:
        out.print(interval)
    if costed := costed_text(report.costed_by):
        out.print(costed)
    if report.fit is not None:
        out.print(f"memory: {fit_text(report.fit)}")
    if report.attention:
        out.print(f"attention: {report.attention}")
    for level, used in report.used_ranks.items():
        out.print(f"the job uses {used} ranks of each {level}")
    _print_breakdown(report, stream)
    _print_path(report, stream)
    if report.levers:
        ordered = sorted(report.levers, key=lambda each: each.step_seconds)
        texts = ((e.name, seconds_text(e.step_seconds), f"{e.speedup - 1:.1%}") for e in ordered)
        out.print(table("What would help", "with", "step", "faster by", rows=texts))


def costed_text(costed_by: Mapping[str, int]) -> str:
    """The numbers of kernels and collectives by the source of their times; empty if all are
    modelled."""
    if not costed_by or costed_by["modelled"] == sum(costed_by.values()):
        return ""
    counts = ", ".join(f"{count:,} {way}" for way, count in costed_by.items())
    return f"kernels and collectives: {counts}"


def rate_unit(accepted: Acceptance) -> str:
    """The unit of tokens per second: a step that verifies drafts also computes rejected ones."""
    return "verified tokens/s" if accepted.speculates else "tokens/s"


def accepted_text(step: float, accepted: Acceptance) -> str:
    """A line about the time per token of a step that verifies drafts and takes `step` seconds;
    empty for other steps."""
    if not accepted.speculates:
        return ""
    if accepted.given:
        each = seconds_text(step / accepted.tokens)
        return f"TPOT {each}: {accepted.tokens:.2f} tokens per sequence and step\n"
    drafts, most = accepted.most - 1, seconds_text(step / accepted.most)
    return (
        f"TPOT {seconds_text(step)} if no draft is right, {most} if all {drafts} are: --accepted "
        "or --acceptance says how many\n"
    )


def _print_breakdown(report: TimeReport, stream: TextIO) -> None:
    """Print the breakdown of the slowest class, and of the other class with the largest bubble."""
    others = [c for c in report.classes if c.name != report.slowest]
    idle = max(others, key=lambda c: c.breakdown.get("bubble", 0.0), default=None)
    titles = [report.slowest, "", *([idle.name, ""] if idle else [])]
    rows = table("Where the time goes", "part", *titles)
    parts = dict.fromkeys([*report.breakdown, *(idle.breakdown if idle else ())])
    for part in parts:
        row = [part]
        for breakdown in (report.breakdown, *((idle.breakdown,) if idle else ())):
            time = breakdown.get(part, 0.0)
            row += [seconds_text(time), f"{time / report.step_seconds:.1%}"] if time else ["", ""]
        rows.add_row(*row)
    console(stream).print(rows)
    if 2 * report.breakdown.get(LAUNCH, 0.0) > report.step_seconds or report.step.waits_for_hosts:
        console(stream).print(
            f"Hosts hold this step up: they issue computations more slowly than devices run them "
            f"({LAUNCH}). --host-issue states the time of another host, --host-graphs "
            "a step that is captured as a graph.\n"
        )


def _print_path(report: TimeReport, stream: TextIO) -> None:
    links = [astuple(link) for link in report.critical_path]
    links, rest = links[:_LINKS], links[_LINKS:]
    if rest:
        links.append(("others", "", "", "", sum(r[4] for r in rest), sum(r[5] for r in rest)))
    rows = (
        (*what, f"{nodes:,}", seconds_text(seconds), f"{seconds / report.step_seconds:.1%}")
        for *what, nodes, seconds in links
    )
    heads = "class", "phase", "op", "counts as", "nodes", "time", ""
    console(stream).print(table("Critical path", *heads, rows=rows, text_columns=4))
