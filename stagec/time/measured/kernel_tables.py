"""Tables of measured kernels, in CSV or JSON: reading, with the place of every error, and writing.

    # what was measured, and how
    kind,dtype,extents,causal,op,microseconds,count
    matmul,bf16,1x4096x8192x8192,,,738,120
    attention,bf16,1x32x8x4096x4096x128x128,true,,410,40
    memory,,67108864,,rmsnorm,24.1,40
    all_reduce,,8x536870912,,,2112,20

`causal`, `op` and `count` may be left out; `count`, the number of measurements, is informative. CSV
may begin with comment lines. JSON is a list of objects with the same names, and extents are a list
of integers. Times are medians; a kernel with several rows has their median.
"""

import csv
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stagec.ir.types import DTYPE_BYTES
from stagec.machines.figures import listed
from stagec.program.kernels import EXTENTS
from stagec.support.diagnostics import DiagnosticError, DiagnosticList, error
from stagec.support.json_values import is_object
from stagec.support.source import FileLoc, Loc
from stagec.support.suggest import did_you_mean
from stagec.support.texts import file_text
from stagec.time.measured.tables import Table

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message")
#: The names of the extents of each kind of row.
ROWS: Mapping[str, tuple[str, ...]] = {
    **EXTENTS,
    "memory": ("bytes",),
    **dict.fromkeys(COLLECTIVES, ("ranks", "bytes")),
}
_REQUIRED = ("kind", "extents", "microseconds")
_NAMES = ("kind", "dtype", "extents", "causal", "op", "microseconds", "count")
_NO_NAMES: list[str] = []
_MAX_BYTES = 1 << 28
_MAX_FIELD = 1 << 12
_LARGEST = 1 << 53
#: Microseconds that a kernel takes: a picosecond, the unit of the clock, to a day.
_SHORTEST, _LONGEST = 1e-6, 86_400e6
_REMEDY = "a row is: matmul,bf16,1x4096x8192x8192,738 (kind,dtype,extents,microseconds)"
_EXTENTS = re.compile(r"[0-9]{1,18}(x[0-9]{1,18})*")
_CAUSAL: Mapping[Any, bool] = {"": False, "false": False, "true": True, False: False, True: True}


class Key(NamedTuple):
    """The kernel or collective of a row of a table; the extents are those of `ROWS[kind]`."""

    kind: str
    dtype: str
    extents: tuple[int, ...]
    causal: bool = False
    op: str = ""


def table_text(rows: Iterable[tuple[Key, float, int]], *, as_json: bool = False) -> str:
    """The text of a table, in the order of kinds, types and extents. Each of `rows` is a kernel,
    its seconds, and the number of measurements."""
    kinds = list(ROWS)
    rows = sorted(rows, key=lambda row: (kinds.index(row[0].kind), row[0]))
    lines = [
        (key.kind, key.dtype, key.extents, key.causal, key.op, float(f"{seconds * 1e6:.6g}"), count)
        for key, seconds, count in rows
    ]
    if as_json:
        entries = [json.dumps(dict(zip(_NAMES, line, strict=True))) for line in lines]
        return "[\n" + ",\n".join(entries) + "\n]\n"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_NAMES)
    for kind, dtype, extents, causal, *others in lines:
        mask = "true" if causal else ""
        writer.writerow((kind, dtype, "x".join(map(str, extents)), mask, *others))
    return text.getvalue()


def read_measured(path: Path) -> list[Table]:
    """The tables of a CSV or JSON file. Raises `DiagnosticError` with the line (in JSON: the number
    of the entry) of each row that is not a measurement."""
    text = file_text(path, _MAX_BYTES, "give a table of kernels")
    problems = DiagnosticList()
    together: dict[tuple[str, str, bool, str], list[tuple[list[int], float]]] = defaultdict(list)
    entries = _json(path, text) if path.suffix.lower() == ".json" else _csv(path, text)
    for loc, where, entry in entries:
        try:
            key, extents, seconds = _row(entry)
            together[key].append((extents, seconds))
        except ValueError as problem:
            problems.error(f"{where}{problem}", loc, remedy=_REMEDY)
    problems.check()
    if not together:
        raise error(f"{path}: no measurements", FileLoc(str(path), 1, 1), remedy=_REMEDY)
    return [
        Table(
            *(kind, dtype, causal),
            *(np.array([e for e, _ in rows], np.int64), np.array([s for _, s in rows], float)),
            *(str(path), op),
        )
        for (kind, dtype, causal, op), rows in together.items()
    ]


def _csv(path: Path, text: str) -> Iterator[tuple[Loc, str, Mapping[str, Any]]]:
    csv.field_size_limit(_MAX_FIELD)
    stream = io.StringIO(text, newline="")
    remarks, start = 0, 0
    while stream.readline().startswith("#"):
        remarks, start = remarks + 1, stream.tell()
    stream.seek(start)
    reader = csv.reader(stream, strict=True)
    try:
        names = [name.strip() for name in next(reader, _NO_NAMES)]
        _check_names(names, FileLoc(str(path), remarks + 1, 1))
        for fields in reader:
            place = FileLoc(str(path), remarks + reader.line_num, 1)
            if not fields:
                continue
            if len(fields) != len(names):
                raise error(
                    f"expects {len(names)} fields ({','.join(names)}), found {len(fields)}",
                    place,
                    remedy=_REMEDY,
                )
            yield place, "", {n: f.strip() for n, f in zip(names, fields, strict=True)}
    except csv.Error as e:
        raise error(
            f"not CSV: {e}", FileLoc(str(path), remarks + reader.line_num, 1), remedy=_REMEDY
        ) from e


def _json(path: Path, text: str) -> Iterator[tuple[Loc, str, Mapping[str, Any]]]:
    try:
        entries: Any = json.loads(text)
    except json.JSONDecodeError as e:
        place = FileLoc(str(path), e.lineno, e.colno)
        raise error(f"not JSON: {e.msg}", place, remedy="write a list of objects") from None
    except (RecursionError, ValueError) as e:
        raise error(f"{path}: not JSON: {e}", remedy="write a list of objects") from None
    place = FileLoc(str(path), 1, 1)
    if not isinstance(entries, list):
        raise error("expects a list of objects", place, remedy='[{"kind": "matmul", ...}]')
    for number, entry in enumerate(listed(entries), 1):
        if not is_object(entry):
            raise error(f"entry {number}: expects an object", place, remedy=_REMEDY)
        try:
            _check_names(list(entry), place)
        except DiagnosticError as e:
            first = e.diagnostics[0]
            raise error(f"entry {number}: {first.message}", place, remedy=first.remedy) from None
        yield place, f"entry {number}: ", entry


def _check_names(names: list[str], place: Loc) -> None:
    for name in names:
        if name not in _NAMES or names.count(name) > 1:
            if name in _NAMES:
                raise error(f"duplicate column '{name}'", place, remedy="remove one of them")
            hint = did_you_mean(name, _NAMES) or f"the columns are: {', '.join(_NAMES)}"
            raise error(f"unknown column '{name:.40}'", place, remedy=hint)
    missing = [n for n in _REQUIRED if n not in names]
    if missing:
        raise error(f"no column '{missing[0]}'", place, remedy=f"write {','.join(_NAMES)}")


def _row(entry: Mapping[str, Any]) -> tuple[tuple[str, str, bool, str], list[int], float]:
    kind, dtype, op = (entry.get(name, "") for name in ("kind", "dtype", "op"))
    if kind not in ROWS if isinstance(kind, str) else True:
        raise ValueError(f"kind: expects one of {', '.join(ROWS)}, found {kind!r:.40}")
    for name, value in (("dtype", dtype), ("op", op)):
        if not isinstance(value, str):
            raise ValueError(f"{name}: expects a name, found {value!r:.40}")
    causal = entry.get("causal", False)
    if not isinstance(causal, (bool, str)) or causal not in _CAUSAL:
        raise ValueError(f"causal: expects true or false, found {causal!r:.40}")
    _check_of_kind(kind, dtype, op, _CAUSAL[causal])
    extents = _whole(entry["extents"], ROWS[kind])
    count = entry.get("count", "")
    if count != "" and not re.fullmatch("[0-9]{1,18}", str(count)):
        raise ValueError(f"count: expects a whole number, found {count!r:.40}")
    key = (kind, dtype, _CAUSAL[causal], op)
    return key, extents, _time(entry["microseconds"]) * 1e-6


def _check_of_kind(kind: str, dtype: str, op: str, causal: bool) -> None:
    """Check that a row has only what kernels of its kind have, since no look-up would match it
    otherwise. Raises `ValueError`."""
    if not EXTENTS.get(kind):
        if dtype:
            raise ValueError(f"dtype: expects nothing in a row of {kind}, found {dtype!r:.40}")
    elif dtype not in DTYPE_BYTES:
        hint = did_you_mean(dtype, DTYPE_BYTES) or f"the types are: {', '.join(DTYPE_BYTES)}"
        raise ValueError(f"dtype: unknown element type {dtype!r:.40}; {hint}")
    if causal and not kind.startswith("attention"):
        raise ValueError(f"causal: expects nothing in a row of {kind}")
    if op and kind != "memory":
        raise ValueError(f"op: expects nothing in a row of {kind}, found {op!r:.40}")


def _whole(value: Any, names: tuple[str, ...]) -> list[int]:
    parts: list[Any] = []
    if isinstance(value, str) and _EXTENTS.fullmatch(value):
        parts = [int(part) for part in value.split("x")]
    else:
        parts = [value] if type(value) is int else list(listed(value))
    if len(parts) != len(names) or not all(type(n) is int and 0 < n < _LARGEST for n in parts):
        raise ValueError(f"extents: expects {'x'.join(names)} as numbers, found {value!r:.60}")
    return [int(n) for n in parts]


def _time(value: Any) -> float:
    try:
        seconds = float(value) if isinstance(value, (str, int, float)) else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if isinstance(value, bool) or not _SHORTEST <= seconds < _LONGEST:
        raise ValueError(f"microseconds: expects a time such as 738, found {value!r:.40}")
    return seconds
