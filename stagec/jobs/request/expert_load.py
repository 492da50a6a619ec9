"""The option `--expert-load`: a JSON file, or the list itself."""

import json
from pathlib import Path
from typing import Any, TypeAlias

from stagec.ir.expr import MAX_INTEGER
from stagec.jobs.request.option import Kind
from stagec.support.diagnostics import error
from stagec.support.json_values import is_list
from stagec.support.source import UNKNOWN, FileLoc, Loc

#: One tuple for all layers, or one for each.
ExpertLoads: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]

_MOST_BYTES = 1 << 20
_WHOLE = range(MAX_INTEGER + 1)


class LoadFile(Kind[ExpertLoads]):
    """A JSON file with a number for each expert, or a list of such lists, one for each layer; or
    such a list itself."""

    name = "FILE"
    annotated = "str | Path | Sequence[int] | Sequence[Sequence[int]]"

    def read(self, text: str) -> ExpertLoads:
        """The loads."""
        return _parsed("--expert-load", text) if text.startswith("[") else read_loads(Path(text))

    def of(self, given: Any) -> ExpertLoads:
        if isinstance(given, list | tuple):
            return _parsed("expert_load", json.dumps(given))
        return super().of(given)


def read_loads(path: Path) -> ExpertLoads:
    """The loads in a file. Raises `DiagnosticError` for invalid loads, `OSError`."""
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise _wrong(str(path), f"more than {_MOST_BYTES:,} bytes")
    return _parsed(str(path), text)


def _parsed(where: str, text: str | bytes) -> ExpertLoads:
    try:
        parsed: object = json.loads(text)
    except json.JSONDecodeError as e:
        raise _wrong(where, f"not JSON ({e.msg})", FileLoc(where, e.lineno, e.colno)) from None
    except (ValueError, RecursionError) as e:
        raise _wrong(where, f"not JSON ({e})") from None
    if is_list(parsed) and parsed and all(map(is_list, parsed)):
        return tuple(_row(where, row) for row in parsed)
    return _row(where, parsed)


def _row(where: str, value: object) -> tuple[int, ...]:
    numbers: list[int] = []
    for number in value if is_list(value) else ():
        if isinstance(number, bool) or not isinstance(number, int) or number not in _WHOLE:
            raise _wrong(where, f"{json.dumps(number)[:40]} among the loads")
        numbers.append(number)
    if not numbers:
        raise _wrong(where, "no list of numbers")
    return tuple(numbers)


def _wrong(where: str, problem: str, loc: Loc = UNKNOWN) -> Exception:
    head = "" if isinstance(loc, FileLoc) else f"{where}: "
    return error(
        f"{head}expected whole numbers of 0 or more, one for each expert, found {problem}",
        loc,
        remedy="write [5, 1, 1, 1], or a list of such lists, one for each layer with experts",
    )
