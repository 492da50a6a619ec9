"""The rows of a sweep as a table or as comma-separated values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from stagec.answers.sweep.rows import fits, notes
from stagec.answers.time.table import seconds_text
from stagec.memory.timeline import CACHES, STATIC
from stagec.output.report import csv_text
from stagec.output.tables import bytes_text, console, count_text, table

SweepRow = Mapping[str, Any]

_SWITCH = {"True": "on", "False": "off"}
_YES = {True: "yes", False: "no"}
_MOST_REASONS = 3
#: The width of a table in a file or pipe, in characters.
_WIDTH = 160
_ERROR = "error"
_NUMBERS = ("ranks", "parameters", "flops", "sent_bytes", "host_bytes", "peak_bytes")


@dataclass(frozen=True, slots=True)
class SweepColumn:
    """A column: its name for `--sort`, its title, its value in a row, and the text of that; `more`
    is set if larger is better, and `long` is the title of axes."""

    name: str
    title: str
    value: Callable[[SweepRow], Any]
    text: Callable[[Any], str] = str
    more: bool = False
    aliases: tuple[str, ...] = ()
    long: str = ""

    def __reduce__(self) -> tuple[Callable[[str], SweepColumn], tuple[str]]:
        return column_named, (self.name,)

    @property
    def full(self) -> str:
        """The title on the axes of charts."""
        return self.long or self.title

    def is_named(self, name: str) -> bool:
        """Whether it has this name."""
        return name == self.name or name in self.aliases


def _memory_column(name: str) -> SweepColumn:
    long = f"{name} per rank"
    return SweepColumn(name, name, lambda row: row["memory"][name], bytes_text, long=long)


def _passing(row: SweepRow) -> int:
    """The bytes at the peak that are not held for the whole step."""
    size: int = row["peak_bytes"] - sum(row["memory"].get(name, 0) for name in (*STATIC, CACHES))
    return size


_RANKS = SweepColumn("ranks", "ranks", lambda row: row["ranks"])
_PEAK = SweepColumn(
    "peak",
    "peak",
    lambda row: row["peak_bytes"],
    bytes_text,
    aliases=("memory",),
    long="peak memory per rank",
)
#: The column of a sweep with a limit or a machine; jobs that fit sort first.
FITS = SweepColumn("fits", "fits", lambda row: not fits(row), lambda value: _YES[not value])
#: The columns of `analyze`.
ANALYSIS = (
    _RANKS,
    SweepColumn(
        "flops",
        "FLOPs executed",
        lambda row: row["flops"],
        lambda n: count_text(n, "FLOP"),
        long="FLOPs executed per rank",
    ),
    SweepColumn(
        "sent", "sent", lambda row: row["sent_bytes"], bytes_text, long="bytes sent per rank"
    ),
    _PEAK,
)
#: The columns of `memory`.
FOOTPRINT = (
    _RANKS,
    _memory_column("parameters"),
    _memory_column("gradients"),
    _memory_column("optimizer"),
    SweepColumn("others", "others", _passing, bytes_text, long="other memory at the peak"),
    _PEAK,
    SweepColumn("host", "host", lambda row: row["host_bytes"], bytes_text, long="host memory"),
)


def _timed(
    name: str,
    title: str,
    field: str,
    text: Callable[[Any], str],
    *,
    more: bool = False,
    aliases: tuple[str, ...] = (),
    long: str = "",
) -> SweepColumn:
    """A column of a figure of the time; a missing figure is a dash."""

    def shown(value: Any) -> str:
        return "-" if value is None else text(value)

    return SweepColumn(name, title, lambda row: row["time"][field], shown, more, aliases, long)


def _share(value: float) -> str:
    return f"{value:.1%}"


def _bound(name: str, title: str, figure: str, long: str) -> SweepColumn:
    """A column of a bound of the interval of a step; a dash without measurements of its stack."""

    def value(row: SweepRow) -> float | None:
        interval: Mapping[str, float] = row["time"].get("interval") or {}
        return interval.get(figure)

    def text(value: float | None) -> str:
        return "-" if value is None else seconds_text(value)

    return SweepColumn(name, title, value, text, long=long)


#: The columns of a sweep with a stack: the seconds between which 8 of 10 measurements lie.
INTERVAL = (
    _bound("low", "8 of 10 from", "low_seconds", "least step of 8 of 10"),
    _bound("high", "to", "high_seconds", "most step of 8 of 10"),
)
#: The columns of `time`.
TIME = (
    _RANKS,
    _timed("time", "step", "step_seconds", seconds_text, aliases=("step",), long="step time"),
    *INTERVAL,
    _timed(
        *("tokens", "tokens/s", "tokens_per_second", "{:,.0f}".format),
        more=True,
        long="tokens per second",
    ),
    _timed(
        *("each", "per rank", "tokens_per_second_per_rank", "{:,.1f}".format),
        more=True,
        long="tokens per second per rank",
    ),
    _timed("mfu", "MFU", "mfu", _share, more=True, long="model FLOPs utilization (MFU)"),
    _timed("hfu", "HFU", "hfu", _share, more=True, long="hardware FLOPs utilization (HFU)"),
    _PEAK,
    FITS,
    _timed("bubble", "bubble", "bubble_share", _share, long="share of the pipeline bubble"),
    _timed(*("exposed", "exposed", "exposed_share", _share), long="share of exposed communication"),
)


def of_rows(columns: Sequence[SweepColumn], rows: Sequence[SweepRow]) -> Sequence[SweepColumn]:
    """The columns without those of intervals, if no row has one: the ideal stack."""
    if any("interval" in row.get("time", {}) for row in rows):
        return columns
    return [column for column in columns if column not in INTERVAL]


def column_named(name: str) -> SweepColumn:
    """The column of this name, which is how a pickle states it."""
    return next(each for each in (*ANALYSIS, *FOOTPRINT, *TIME) if each.name == name)


def chosen_text(value: object) -> str:
    """The text of a swept value: `on` and `off` for switches."""
    return _SWITCH.get(str(value), str(value))


def value_of(row: SweepRow, name: str, columns: Sequence[SweepColumn]) -> Any:
    """The value of a job in a column, or on an axis of the sweep."""
    if name in row["configuration"]:
        return row["configuration"][name]
    return next(c for c in columns if c.is_named(name)).value(row)


def print_sweep(rows: Sequence[SweepRow], columns: Sequence[SweepColumn], stream: TextIO) -> None:
    """Print a line for each configuration that is a job, then notes, then one line with the number
    and the reasons of failures."""
    jobs = [row for row in rows if "error" not in row]
    columns = [c for c in columns if not rows or c.name not in rows[0]["configuration"]]
    out, numbers = console(stream, _WIDTH), dict[str, int]()
    swept = (name.removeprefix("machine.").replace(".", "\n") for name in rows[0]["configuration"])
    marked = any(map(notes, jobs))
    titles = *swept, *(c.title for c in columns), *([""] if marked else [])
    title = "Configurations; the most of any rank and step"
    if any("time" in row for row in jobs):
        title += ", the time of the slowest class"
    lines = table(title, *titles, text_columns=0)
    for column, value in zip(lines.columns, [*rows[0]["configuration"].values()], strict=False):
        column.justify = "left" if isinstance(value, str) else "right"
    if marked:
        lines.columns[-1].justify = "left"
    for row in jobs:
        marks = " ".join(f"[{numbers.setdefault(t, len(numbers) + 1)}]" for t in notes(row))
        chosen = (chosen_text(value) for value in row["configuration"].values())
        values = (c.text(c.value(row)) for c in columns)
        lines.add_row(*chosen, *values, *([marks] if marked else []))
    if jobs:
        out.print(lines)
    for text, number in numbers.items():
        out.print(f"[{number}] {text}")
    if len(jobs) < len(rows):
        out.print(_refused(rows))


def _refused(rows: Sequence[SweepRow]) -> str:
    """`2 of 6 configurations failed: H = 32 does not divide over tp = 3 (2)`."""
    reasons = Counter(row["error"] for row in rows if "error" in row)
    texts = [f"{reason} ({count})" for reason, count in reasons.most_common(_MOST_REASONS)]
    others = sum(reasons.values()) - sum(n for _, n in reasons.most_common(_MOST_REASONS))
    texts += [f"and for other reasons, which --json has ({others})"] if others else []
    chosen = ({n: v for n, v in row["configuration"].items() if n != "pod"} for row in rows)
    count = len({str(each) for each in chosen})
    return f"{reasons.total()} of {count} configurations failed: {'; '.join(texts)}"


def sweep_csv(rows: Sequence[SweepRow]) -> str:
    """A line for each configuration, with numbers in full; a failed one has only its reason."""
    lines = [_flat(row) for row in rows]
    names = dict.fromkeys(name for line in lines for name in line if name != _ERROR)
    return csv_text([*names, _ERROR], lines)


def _flat(row: SweepRow) -> dict[str, object]:
    """A row without nesting: every figure and whether it fits, or the reason of the failure."""
    cells: dict[str, object] = {
        name: _SWITCH.get(str(value), value) for name, value in row["configuration"].items()
    }
    if _ERROR in row:
        return {**cells, _ERROR: row[_ERROR]}
    cells |= {name: row[name] for name in _NUMBERS}
    cells |= {_column(name, "bytes"): size for name, size in row["memory"].items()}
    time = dict(row.get("time", {}))
    parts = time.pop("breakdown", {})
    interval: Mapping[str, object] = time.pop("interval", None) or {}
    cells |= {f"interval_{name}": value for name, value in interval.items()}
    cells |= {name: value for name, value in time.items() if name not in cells}
    cells |= {_column(part, "seconds"): seconds for part, seconds in parts.items()}
    cells |= {"room_bytes": row["fit"]["room"]} if "fit" in row else {}
    fit = fits(row)
    return (
        cells | ({} if fit is None else {"fits": _YES[fit]}) | {"cautions": "; ".join(notes(row))}
    )


def _column(name: str, unit: str) -> str:
    """`gathered_weights_bytes`."""
    return f"{name.replace(' ', '_')}_{unit}"
