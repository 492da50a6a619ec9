"""Requests to a server: the arrival, the tokens of the prompt and of the output of each.

Formats of files are distinguished by the names of their columns or members:

    arrival,prompt,output                                        CSV or JSONL, seconds
    arrived_at,num_prefill_tokens,num_decode_tokens              CSV of Vidur, seconds
    arrival_timestamp,prompt_size,token_size                     CSV of Splitwise, seconds
    TIMESTAMP,ContextTokens,GeneratedTokens                      CSV of Azure, times of day
    {"arrival_time_ns": 0, "input_toks": 512, "output_toks": 9}  JSONL of LLMServingSim, nanoseconds
    {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}
                                                                 JSONL of Mooncake, milliseconds

Each format may have `adapter`, the name of a low-rank adapter. Vidur: microsoft/vidur,
`data/processed_traces`; LLMServingSim: casys-kaist/LLMServingSim, `dataset`; Splitwise:
Mutinifni/splitwise-sim, `traces`; Azure: Azure/AzurePublicDataset, `AzureLLMInferenceTrace_*.csv`;
Mooncake: kvcache-ai/Mooncake, `FAST25-release/traces`. Other columns and members are ignored. The
times of Azure count from the first one of the file.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import BinaryIO, cast

from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.source import UNKNOWN, FileLoc, Loc

#: The most requests of a list, and the most bytes of a line.
MAX_REQUESTS = 1_000_000
_LONGEST_LINE = 1 << 20
#: The longest prompt or output, and the latest arrival: a century in nanoseconds is below 2^62.
MAX_LENGTH = 1 << 31
MAX_TIME = 1 << 62
SECOND = 10**9

#: The names of each column; those of arrivals have the nanoseconds of their unit.
_DATED = "TIMESTAMP"
_ARRIVAL: Mapping[str, int] = {
    "arrival": SECOND,
    "arrived_at": SECOND,
    "arrival_timestamp": SECOND,
    "arrival_time_ns": 1,
    "timestamp": SECOND // 1000,
    _DATED: SECOND,
}
_PROMPT = (
    *("prompt", "num_prefill_tokens", "prompt_size", "ContextTokens", "input_toks"),
    "input_length",
)
_OUTPUT = (
    *("output", "num_decode_tokens", "token_size", "GeneratedTokens", "output_toks"),
    "output_length",
)
_PREFIX = "hash_ids"
#: The column of the name of a low-rank adapter, in any format.
_ADAPTER = "adapter"
#: The most characters of the name of an adapter.
_NAME = 256
#: More bits than the numbers of blocks have.
_BLOCK_BITS = 160
#: Tokens of a block that `hash_ids` number (Mooncake's README).
HASH_BLOCK = 512
_DATE = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,12}))?"
    r"(?:Z|\+00:?(?:00)?)?"
)
_REMEDY = "give each request arrival (seconds), prompt and output (tokens), in order of arrival"


@dataclass(frozen=True, slots=True)
class Request:
    """A request: its arrival in nanoseconds from the start, and the tokens of its prompt and of its
    output; `loc` is its place in a file. `prefix` numbers the blocks of its text, of `HASH_BLOCK`
    tokens in files: equal numbers stand for equal texts up to the end of the block. `then` is the
    next turn of a conversation, with the nanoseconds from the end of this turn to its arrival.
    `adapter` names its low-rank adapter; '' stands for no adapter."""

    arrival: int
    prompt: int
    output: int
    loc: Loc = UNKNOWN
    prefix: Sequence[int] = ()
    then: tuple[int, Request] | None = None
    adapter: str = ""

    def with_adapter(self, name: str) -> Request:
        """The request with an adapter, in all turns. Blocks get other numbers for each adapter,
        since an adapter changes their keys and values."""
        first = int.from_bytes(name.encode(errors="surrogatepass"), "big") << _BLOCK_BITS
        prefix = tuple(first + block for block in self.prefix)
        then = self.then and (self.then[0], self.then[1].with_adapter(name))
        return replace(self, adapter=name, prefix=prefix, then=then)


def turns(requests: Iterable[Request]) -> Iterator[Request]:
    """All requests, each followed by the later turns of its conversation."""
    for request in requests:
        last: Request | None = request
        while last is not None:
            yield last
            last = last.then[1] if last.then is not None else None


def read_requests(path: Path) -> list[Request]:
    """The requests in a file, `.csv` or `.jsonl`. Raises `DiagnosticError` with the line of an
    invalid request, or of one that arrives before the one above it, and `OSError`."""
    return checked(_rows(path, timed=True))


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """The tokens of prompts and outputs in such a file, which need not have arrivals. Raises as
    `read_requests`."""
    return [(r.prompt, r.output) for r in _rows(path, timed=False)]


def checked(requests: Iterator[Request] | Sequence[Request]) -> list[Request]:
    """The requests as a list. Raises `DiagnosticError` if there are none or too many, or if they
    are not in order of arrival."""
    valid: list[Request] = []
    for request in requests:
        if valid and request.arrival < valid[-1].arrival:
            raise error(
                f"request {len(valid) + 1} arrives at {seconds_text(request.arrival)}, before the "
                f"one above it at {seconds_text(valid[-1].arrival)}",
                request.loc,
                remedy="sort the requests by arrival",
            )
        valid.append(request)
        if len(valid) > MAX_REQUESTS:
            raise error(
                f"there are more than {MAX_REQUESTS:,} requests",
                request.loc,
                remedy="give a smaller file",
            )
    if not valid:
        raise error("no requests are given", remedy=_REMEDY)
    return valid


def seconds_text(nanoseconds: int) -> str:
    """A time in seconds, exactly: `0.25 s`."""
    whole, rest = divmod(nanoseconds, SECOND)
    digits = f"{rest:09d}".rstrip("0")
    return f"{whole}.{digits} s" if digits else f"{whole} s"


# -- files -----------------------------------------------------------------------------------------


def _rows(path: Path, *, timed: bool) -> Iterator[Request]:
    readers: Mapping[str, Callable[[Iterator[tuple[Loc, str]]], Iterator[_Row]]] = {
        ".csv": _csv_rows,
        ".jsonl": _json_rows,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise error(
            f"'{path}' is neither a .csv nor a .jsonl file",
            remedy="give the file the ending of its format, or write poisson:rate=4,count=100,"
            "prompt=512,output=128",
        )
    count = 0
    first: int | None = None  # days and times count from the first one
    with path.open("rb") as file:
        for loc, row in reader(_lines(file, str(path))):
            request = _request(loc, row, timed=timed)
            if timed and _DATED in row:
                first = request.arrival if first is None else first
                request = replace(request, arrival=request.arrival - first)
            yield request
            count += 1
    if not count:
        raise error(f"'{path}' contains no requests", remedy=_REMEDY)


_Row = tuple[Loc, Mapping[str, object]]


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[Loc, str]]:
    number = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        loc = FileLoc(name, number, 1)
        if len(line) > _LONGEST_LINE:
            raise error(f"the line is longer than {_LONGEST_LINE:,} bytes", loc, remedy=_REMEDY)
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as problem:
            raise error(f"the line is not UTF-8 ({problem.reason})", loc, remedy=_REMEDY) from None
        if text:
            yield loc, text


def _csv_rows(lines: Iterator[tuple[Loc, str]]) -> Iterator[_Row]:
    names: list[str] | None = None
    for loc, line in lines:
        try:
            cells = [cell.strip() for cell in next(csv.reader([line], strict=True))]
        except csv.Error as problem:
            raise error(f"the line is not CSV ({problem})", loc, remedy=_REMEDY) from None
        if names is None:
            if repeated := [name for name in cells if cells.count(name) > 1]:
                raise error(f"two columns are '{repeated[0]:.40}'", loc, remedy=_REMEDY)
            names = cells
        elif len(cells) != len(names):
            raise error(
                f"the line has {len(cells)} cells, the first line {len(names)}", loc, remedy=_REMEDY
            )
        else:
            yield loc, dict(zip(names, cells, strict=True))


def _json_rows(lines: Iterator[tuple[Loc, str]]) -> Iterator[_Row]:
    for loc, line in lines:
        try:
            row = _DECODER.decode(line)
        except (ValueError, RecursionError) as problem:
            raise error(f"the line is not JSON ({problem})", loc, remedy=_REMEDY) from None
        if not isinstance(row, dict):
            raise error("the line is not a JSON object", loc, remedy=_REMEDY)
        yield loc, cast("dict[str, object]", row)


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The members of a JSON object. Raises `ValueError` if two of them have the same name."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("duplicate keys")
    return members


_DECODER = json.JSONDecoder(
    object_pairs_hook=_members, parse_float=str, parse_int=str, parse_constant=str
)


def _request(loc: Loc, row: Mapping[str, object], *, timed: bool) -> Request:
    times = [name for name in _ARRIVAL if name in row]
    if timed and not times:
        raise _missing(loc, "when it arrives", _ARRIVAL)
    arrival = _time(loc, times[0], row[times[0]]) if timed else 0
    prompt, output = _length(loc, row, "prompt", _PROMPT), _length(loc, row, "output", _OUTPUT)
    request = Request(arrival, prompt, output, loc, _prefix(loc, row))
    name = row.get(_ADAPTER)
    if name is None or name == "":
        return request
    if not isinstance(name, str) or len(name) > _NAME:
        raise error(
            f"the {_ADAPTER} is {_shown(name)}, expected a name of at most {_NAME} characters",
            loc,
            remedy="correct it, or leave it out for the model alone",
        )
    return request.with_adapter(name)


def _prefix(loc: Loc, row: Mapping[str, object]) -> tuple[int, ...]:
    """The numbers of the blocks of a text; empty if the row does not state them."""
    blocks = row.get(_PREFIX)
    if blocks is None:
        return ()
    items = cast("list[object]", blocks) if isinstance(blocks, list) else [None]
    ids = [_decimal(item) for item in items]
    if any(n is None or n != n.to_integral_value() for n in ids):
        raise error(
            f"the blocks of the prompt ({_PREFIX}) are {_shown(row[_PREFIX])}, expected a list of "
            "whole numbers",
            loc,
            remedy=f"number each block of {HASH_BLOCK} tokens, or leave {_PREFIX} out",
        )
    return tuple(int(n) for n in ids if n is not None)


def _length(loc: Loc, row: Mapping[str, object], what: str, names: Sequence[str]) -> int:
    name = next((n for n in names if n in row), None)
    if name is None:
        raise _missing(loc, f"the tokens of its {what}", names)
    length = _decimal(row[name])
    if length is None or length != length.to_integral_value() or not 1 <= length <= MAX_LENGTH:
        raise error(
            f"the {what} ({name}) is {_shown(row[name])}, expected a whole number of 1 to "
            f"{MAX_LENGTH:,} tokens",
            loc,
            remedy="correct it, or leave out requests without a prompt or an answer",
        )
    return int(length)


def _time(loc: Loc, name: str, value: object) -> int:
    """An arrival in nanoseconds, rounded to the nearest."""
    if name == _DATED and (day := _DATE.fullmatch(str(value))):
        return _day_time(loc, day, str(value))
    arrival = _decimal(value)
    if arrival is None or not 0 <= arrival * _ARRIVAL[name] <= MAX_TIME:
        raise error(
            f"the arrival ({name}) is {_shown(value)}, expected a time of 0 or more",
            loc,
            remedy=_REMEDY,
        )
    return round(arrival * _ARRIVAL[name])


def _day_time(loc: Loc, day: re.Match[str], text: str) -> int:
    """Nanoseconds of a day and time, since the first of January of the year 1."""
    try:
        since = datetime.fromisoformat(day[1]) - datetime.min
    except ValueError as problem:
        raise error(
            f"the arrival ({_DATED}) is '{text:.40}': {problem}",
            loc,
            remedy="write 2023-11-16 18:15:46.6805900",
        ) from None
    return (since.days * 86400 + since.seconds) * SECOND + int((day[2] or "").ljust(9, "0")[:9])


def _decimal(value: object) -> Decimal | None:
    """The exact value of a finite number of moderate size and length; None for other values."""
    text = value if isinstance(value, str) else ""
    if not text.isascii() or len(text) > 40 or "_" in text:
        return None
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() and -40 <= number.adjusted() <= 40 else None


def _shown(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) and len(value) <= 40 else repr(value)[:40]


def _missing(loc: Loc, what: str, names: Sequence[str] | Mapping[str, object]) -> DiagnosticError:
    return error(f"the request does not say {what}: {' or '.join(names)}", loc, remedy=_REMEDY)
