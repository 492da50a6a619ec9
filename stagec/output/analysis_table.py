"""Tables of an analysis: what the ranks of a class do in a step, and what they hold; of a step of
serving also what bounds its ops."""

from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stagec.analysis.memory_fit import MemoryFit
from stagec.output.tables import bytes_text, console, count_text, fit_text, ranks_text, table
from stagec.support.words import counted


def print_analysis(result: dict[str, Any], stream: TextIO) -> None:
    """The whole analysis."""
    out = console(stream)
    mesh = " x ".join(f"{a} {n}" for a, n in result["mesh"].items()) or "one device"
    params = result["parameters"]
    some = result["trainable_parameters"]
    trained = f" ({_exact(some)} trained)" if some != params else ""
    sizes = f": {_exact(params)} parameters{trained}, {counted(result['ranks'], 'rank')} ({mesh})"
    out.print(Text.assemble((result["model"], "bold"), sizes))
    _print_fit(result, out)
    if "serving" in result:
        print_serving(result["serving"], out)
    groups = _alike(result["classes"])
    if len(result["classes"]) > len(groups):
        out.print(_overview(result["classes"]))
    for group in groups:
        _print_class(group, out)
    _print_worst([(c["name"], c["worst"]) for c in result["classes"] if c["worst"]], out)


def _print_fit(result: dict[str, Any], out: Console) -> None:
    """Whether it fits, if that was asked."""
    if (given := result.get("fit")) is not None:
        fit = MemoryFit(given["peak"], given["room"])
        out.print(f"{given.get('class', 'memory')}: {fit_text(fit)}")


def _exact(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else str(number)


def _alike(classes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Classes that differ in nothing but their coordinates and their memory, by first one."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in classes:
        work = [entry[n] for n in ("count", "flops", "matmul_flops", "collectives", "p2p", "nodes")]
        groups.setdefault(repr(work), []).append(entry)
    return list(groups.values())


def _overview(classes: list[dict[str, Any]]) -> Table:
    """One line for each class."""
    made = table(
        "Rank classes", "class", "ranks", "FLOPs executed", "sent", "stash", "peak", text_columns=1
    )
    for entry in classes:
        sent = [r["wire_bytes"] for r in entry["collectives"]]
        sent += [r["bytes"] for r in entry["p2p"] if r["dir"] == "send"]
        flops = _sum_text([*entry["flops"].values()], lambda v: count_text(v, "FLOP"))
        memory = (bytes_text(entry["memory"][name]) for name in ("stash", "peak"))
        sums = flops, _sum_text(sent, bytes_text)
        made.add_row(entry["name"], str(entry["count"]), *sums, *memory)
    return made


def _sum_text(values: list[Any], show: Callable[[Any], str]) -> str:
    """The sum of numbers; expressions are left to the tables below."""
    return show(sum(values)) if all(isinstance(v, int) for v in values) else "see below"


def _messages(rows: list[dict[str, Any]]) -> Table:
    """Sends and receives; the neighbour is printed as the difference of its coordinate."""
    made = table(
        "Messages", "end", "over", "peer", "phase", "dtype", "calls", "bytes", text_columns=5
    )
    for row in rows:
        calls, size = row["count"], bytes_text(row["bytes"])
        calls = f"{calls:,}" if isinstance(calls, int) else calls
        peer = f"{row['peer']:+d}" if isinstance(row["peer"], int) else row["peer"]
        made.add_row(*(row["dir"], row["over"], peer, row["phase"], row["dtype"], calls, size))
    return made


def _print_class(group: list[dict[str, Any]], out: Console) -> None:
    entry, name = group[0], group[0]["name"]
    if len(group) > 1:
        name = f"{name} and {len(group) - 1} alike, to {group[-1]['name']}"
    title = f"{name}: {counted(entry['count'], 'rank')}; per rank and step"
    flops = table(title, "FLOPs", "executed", "in matmuls (unmasked)")
    for phase, value in entry["flops"].items():
        if value not in (0, "0"):
            both = value, entry["matmul_flops"].get(phase, 0)
            flops.add_row(phase, *(count_text(each, "FLOP") for each in both))
    out.print(flops)
    if entry["collectives"]:
        heads = ("collective", "over", "phase", "dtype", "calls", "bytes", "sent on a ring")
        comm = table("Communication", *heads, text_columns=4)
        for row in entry["collectives"]:
            comm.add_row(
                row["op"],
                " x ".join(row["over"]) + f" ({row['group_size']})",
                row["phase"],
                row["dtype"],
                f"{calls:,}" if isinstance(calls := row["count"], int) else count_text(calls),
                bytes_text(row["bytes"]),
                bytes_text(row["wire_bytes"]),
            )
        out.print(comm)
    if entry["p2p"]:
        out.print(_messages(entry["p2p"]))
    of = f" of {entry['name']}" if len(group) > 1 else ""
    memory = table(f"Memory{of}", "category", "bytes", "")
    offloaded = entry["memory"]["host"] not in (0, "0")
    for name, value in entry["memory"].items():
        if name == "host" and not offloaded:
            continue
        memory.add_row(name, bytes_text(value), f"{value:,}" if isinstance(value, int) else "")
    out.print(memory)
    if entry["worst"]:
        known = isinstance(entry["memory"]["peak"], int)
        size = "" if known else f"{bytes_text(entry['worst']['peak'])} at these sizes, in "
        out.print(f"peak: {size}{entry['worst']['at']}")
    nodes = entry["nodes"]
    out.print(
        f"Nodes: {nodes['comp']} computations, {nodes['coll']} collectives, {nodes['send']} sends, "
        f"{nodes['recv']} receives{_copies(nodes)}"
    )


def _copies(nodes: dict[str, Any]) -> str:
    copied = any(nodes[kind] not in (0, "0") for kind in ("store", "load"))
    return f", {nodes['store']} stores, {nodes['load']} loads" if copied else ""


def print_footprint(result: dict[str, Any], stream: TextIO) -> None:
    """The software, whether it fits, a row for each rank class, and the largest buffers of the
    worst one."""
    out, classes = console(stream), result["classes"]
    ranks = ranks_text(sum(e["ranks"] for e in classes), result["mesh"])
    out.print(f"{result['model']}, stack {result['stack']}, {ranks}")
    _print_fit(result, out)
    known = dict.fromkeys(c for e in classes for c in e["categories"])
    used = [c for c in known if any(e["categories"].get(c) for e in classes)]
    host = any(e["host"] for e in classes)
    for entry in _without_repeats(classes):
        models = entry.get("models", {})  # of a draft model and its model on the same ranks
        title = f"Memory per rank of {entry['names']} ({counted(entry['ranks'], 'rank')})"
        made = table(title, "category", "bytes", "", *models)
        for name in used:
            each = (bytes_text(models[m].get(name, 0)) for m in models)
            size = entry["categories"].get(name, 0)
            made.add_row(name, bytes_text(size), f"{size:,}", *each)
        made.add_row("peak", bytes_text(entry["peak"]), f"{entry['peak']:,}")
        if host:
            made.add_row("host", bytes_text(entry["host"]), f"{entry['host']:,}")
        for name in ("bound", "allocated", "reserved") if entry["placement"] else ():
            size = entry["placement"][name]
            made.add_row(f"{entry['placement']['model']}: {name}", bytes_text(size), f"{size:,}")
        out.print(made)
        out.print(f"peak: {entry['at']}")
    _print_worst([(c["name"], c) for c in classes], out)


def _without_repeats(classes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring classes with the same numbers as one, named by the first and the last."""
    kept: list[dict[str, Any]] = []
    for entry in classes:
        same = kept and all(kept[-1][n] == entry[n] for n in ("categories", "host", "placement"))
        if same:
            kept[-1]["names"] = f"{kept[-1]['name']} to {entry['name']}"
        else:
            kept.append({**entry, "names": entry["name"]})
    return kept


def _print_worst(classes: list[tuple[str, dict[str, Any]]], out: Console) -> None:
    """Of the class that holds most: what that is in symbols, and the largest buffers."""
    if not classes:
        return
    name, worst = max(classes, key=lambda c: c[1]["peak"])
    heads = ("value", "category", "made at", "each", "count", "bytes")
    made = table(f"Largest buffers of {name} at its peak", *heads, text_columns=4)
    for buffer in worst["largest"]:
        what = (buffer[name] for name in ("category", "line", "type"))
        count = f"x {buffer['count']:,}" if buffer["count"] > 1 else ""
        made.add_row(f"%{buffer['name']}", *what, count, bytes_text(buffer["bytes"]))
    out.print(made)
    out.print(f"{name} in symbols: {worst['expression']} bytes")


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
    rows = figures.get("ops")  # absent in the figures of pods
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
