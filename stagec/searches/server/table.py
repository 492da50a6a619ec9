"""The table of a search for servers."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from stagec.answers.serve_answer import limits_text
from stagec.answers.time.table import costed_text, seconds_text
from stagec.output.tables import bytes_text, console, table
from stagec.searches.server.servers import AGGREGATED
from stagec.support.words import counted

_MOST_CUT = 10


def print_servers(answer: Mapping[str, Any], stream: TextIO) -> None:
    """Print the best servers, the front, and the counts of what was left out."""
    out = console(stream, 160)
    out.print(
        f"{answer['model']}, {', '.join(answer['places'])}: "
        f"{counted(format(answer['workers'], ','), 'worker')}, "
        f"{answer['timed']:,} fit, "
        f"{counted(format(answer['servers'], ','), 'server')} of prompts of "
        f"{answer['prompt']:,} tokens, "
        f"{answer['output']:,} tokens come out{limits_text(answer['limits'])}; "
        f"{answer['seconds']:.1f} s"
    )
    if answer["best"]:
        _print_best(answer, out)
    if len(answer["searches"]) > 1:
        out.print(_ranks_table(answer))
    if answer["front"]:
        out.print(_front_table(answer))
    shown = list(answer["cut"].items())[:_MOST_CUT]
    if shown:
        out.print("left out:")
    for why, count in shown:
        out.print(f"  {count:,}: {why}")
    if costed := costed_text(answer.get("found", {})):
        out.print(costed)
    for name, text in launch_files(answer).items():
        out.print(f"--- {name}")
        out.print(text, highlight=False, soft_wrap=True)


def launch_files(answer: Mapping[str, Any]) -> Mapping[str, str]:
    """The launch files by name; empty without --emit-run."""
    launch: Mapping[str, Any] | None = answer["launch"]
    files: Mapping[str, str] = {} if launch is None else launch["files"]
    return files


def _print_best(answer: Mapping[str, Any], out: Any) -> None:
    best, several = answer["best"], len(answer["places"]) > 1
    out.print(_best_table(answer))
    for number, row in enumerate(best, 1):
        out.print(f"[{number}] {row['reason']}")
    if any(row["over_time"] for row in best):
        out.print(_over_time_table(best))
    for mode, row in answer["modes"].items():
        out.print(f"{mode}: {_mode(row, best, several=several)}")
    for number, row in enumerate(best, 1):
        if row["command"]:
            out.print(f"[{number}] {row['command']}")


def _mode(
    row: Mapping[str, Any] | None, best: Sequence[Mapping[str, Any]], *, several: bool
) -> str:
    if row is None:
        return "no server meets the limits"
    change = row["per_rank"] / best[0]["per_rank"] - 1
    more = "the best" if not change else f"{change:+.1%} tokens/s per rank"
    return f"{more}, {server_text(row, several=several)}"


def _best_table(answer: Mapping[str, Any]) -> Any:
    priced, several = answer["priced"], len(answer["places"]) > 1
    servers = table(
        "Best servers",
        *("", "server", "tokens/s/rank", "tokens/s/user", "TTFT", "TPOT"),
        *(["per 10^6 tokens"] if priced else []),
        *("memory", "idle"),
        text_columns=2,
    )
    for number, row in enumerate(answer["best"], 1):
        peaks = [row[p]["memory_peak"] for p in ("prefill", "decode") if row[p] is not None]
        servers.add_row(
            f"[{number}]",
            server_text(row, several=several),
            *figures_of(row),
            *([f"{row['cost']:,.4g}"] if priced else []),
            bytes_text(max(peaks)),
            str(row["idle_ranks"] or ""),
        )
    return servers


def _over_time_table(best: Sequence[Mapping[str, Any]]) -> Any:
    """The servers that ran in a closed loop."""
    servers = table("In a closed loop over time", "", *OVER_TIME_HEADS, text_columns=1)
    for number, row in enumerate(best, 1):
        if row["over_time"] is not None:
            servers.add_row(f"[{number}]", *over_time_figures(row["over_time"]))
    return servers


#: The heads of `over_time_figures`.
OVER_TIME_HEADS = (*("requests", "tokens/s/rank", "TTFT p50", "p90", "TPOT p50", "p90"), "limits")


def over_time_figures(over: Mapping[str, Any]) -> list[str]:
    """Concurrent requests, tokens per second per rank, percentiles of both times, and whether the
    limits are kept; or why the server did not run."""
    if over["refused"]:
        return [*[""] * 6, str(over["refused"])]
    times = [over[name] for name in ("ttft", "tpot")]
    return [
        f"{over['concurrency']:,}",
        f"{over['per_rank']:,.1f}",
        *("" if t is None else seconds_text(t[p]) for t in times for p in ("p50", "p90")),
        "missed" if over["missed"] else "kept",
    ]


def figures_of(row: Mapping[str, Any]) -> list[str]:
    """Tokens per second per rank and per user, and the times to the first and each further
    token."""
    rates = (f"{row[name]:,.1f}" for name in ("per_rank", "per_user"))
    return [*rates, *(seconds_text(row[name]) for name in ("ttft", "tpot"))]


def server_text(row: Mapping[str, Any], *, several: bool) -> str:
    """`2 x --tp 2, prefill batch 1 + 1 x --tp 4, decode batch 128`; with `several` stacks or
    machines also those of each pool."""
    pools = [(name, row[name]) for name in ("prefill", "decode") if row[name] is not None]
    texts: list[str] = []
    for name, pool in pools:
        does = "" if row["mode"] == AGGREGATED else f"{name} "
        text = f"{pool['replicas']} x {pool['strategy']}, {does}batch {pool['batch']}"
        if row["mode"] == AGGREGATED:
            text += f", {pool['max_tokens']:,} tokens per step"
        where = f" ({pool['stack']} on {pool['machine']})" if several else ""
        texts.append(text + where)
    return " + ".join(texts)


def _ranks_table(answer: Mapping[str, Any]) -> Any:
    several = len(answer["places"]) > 1
    rows = table("By ranks", "ranks", "server", "tokens/s/rank", "tokens/s/user", "TTFT", "TPOT")
    for each in answer["searches"]:
        row = each["best"]
        if row is None:
            rows.add_row(str(each["ranks"]), "nothing fits", *[""] * 4)
            continue
        rows.add_row(str(each["ranks"]), server_text(row, several=several), *figures_of(row))
    return rows


def _front_table(answer: Mapping[str, Any]) -> Any:
    several = len(answer["places"]) > 1
    servers = table(
        "Tokens/s per rank against tokens/s per user",
        *("server", "tokens/s/rank", "tokens/s/user", "TTFT", "TPOT"),
        text_columns=1,
    )
    for row in answer["front"]:
        servers.add_row(server_text(row, several=several), *figures_of(row))
    return servers
