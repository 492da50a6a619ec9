"""The page of `stagec analyze --html`: FLOPs, memory and communication of each class of ranks."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from stagec.memory.timeline import ALL
from stagec.output.bars import Bar, Bars
from stagec.output.page import TableRow, command, facts, figures, page, paragraphs, table
from stagec.output.plot import PlotAxis
from stagec.output.tables import bytes_text, count_text

_Parts: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, int]]
_CALLS = ("class", "collective", "over", "phase", "dtype", "calls", "bytes", "sent on a ring")
_BUFFERS = ("class", "value", "category", "made at", "type", "count", "bytes")


def analysis_page(
    title: str,
    pairs: Mapping[str, str],
    classes: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    asked: str,
) -> str:
    """The page of classes of ranks; `pairs` are figures of the job, `notes` are sentences about
    all of it, and `asked` is its command."""
    numbered = [(f"class{n}", each) for n, each in enumerate(classes)]
    about = ["Charts and tables are about one rank and one step.", *notes]
    body = [command(asked), facts(pairs.items()), *paragraphs(about, "quiet")]
    body.append(figures(_charts(title, numbered, asked)))
    calls = [_call(key, each, row) for key, each in numbered for row in each["collectives"]]
    if calls:
        body += ["<h2>Collectives</h2>", table(_CALLS, calls, "collectives")]
    most = ((key, each) for key, each in numbered if each["worst"])
    buffers = [_buffer(key, each, row) for key, each in most for row in each["worst"]["largest"]]
    if buffers:
        body += ["<h2>Largest buffers at the peak</h2>", table(_BUFFERS, buffers, "buffers")]
    return page(title, body)


def _charts(
    about: str, classes: Sequence[tuple[str, Mapping[str, Any]]], asked: str
) -> Iterator[Bars]:
    flops = PlotAxis("FLOPs per rank and step", lambda v: count_text(round(v), "FLOP"))
    size = PlotAxis("bytes per rank", lambda v: bytes_text(round(v)), 1024)
    sent = PlotAxis("bytes sent per rank and step", size.text, 1024)
    kinds: Sequence[tuple[str, PlotAxis, _Parts, Sequence[str]]] = (
        ("FLOPs by phase", flops, lambda each: each["flops"], ()),
        ("Peak memory by category", size, _memory_by_category, ALL),
        ("Bytes sent by axis of the mesh", sent, _sent, ()),
    )
    for title, axis, parts, order in kinds:
        bars = [Bar(each["name"], parts(each), key=key) for key, each in classes]
        if any(any(bar.parts.values()) for bar in bars):
            yield Bars(title=title, about=about, command=asked, bars=bars, axis=axis, order=order)


def _memory_by_category(entry: Mapping[str, Any]) -> Mapping[str, int]:
    """The bytes of each category at the peak."""
    return entry["worst"]["categories"] if entry["worst"] else {}


def _sent(entry: Mapping[str, Any]) -> Mapping[str, int]:
    """The bytes that a rank sends over each axis, in collectives (as rings) and messages."""
    sent = Counter[str]()
    for row in entry["collectives"]:
        sent[" x ".join(row["over"])] += row["wire_bytes"]
    for row in entry["p2p"]:
        if row["dir"] == "send":
            sent[f"messages over {row['over']}"] += row["bytes"]
    return sent


def _call(key: str, entry: Mapping[str, Any], row: Mapping[str, Any]) -> TableRow:
    over = f"{' x '.join(row['over'])} ({row['group_size']})"
    texts = [entry["name"], row["op"], over, row["phase"], row["dtype"]]
    numbers = [row["count"], row["bytes"], row["wire_bytes"]]
    shown = [f"{row['count']:,}", *map(bytes_text, numbers[1:])]
    return TableRow([*texts, *numbers], [*texts, *shown], key)


def _buffer(key: str, entry: Mapping[str, Any], row: Mapping[str, Any]) -> TableRow:
    texts = [entry["name"], f"%{row['name']}", row["category"], row["line"], row["type"]]
    shown = [f"{row['count']:,}", bytes_text(row["bytes"])]
    return TableRow([*texts, row["count"], row["bytes"]], [*texts, *shown], key)
