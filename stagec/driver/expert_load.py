"""Loads of experts on the command line: a JSON file, and the statements that say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias, cast

import click

from stagec.ir.expr import MAX_INTEGER
from stagec.support.diagnostics import error

#: One tuple for all layers, or one for each.
ExpertLoads: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]

_MOST_BYTES = 1 << 20
_WHOLE = range(MAX_INTEGER + 1)


class LoadFile(click.ParamType[ExpertLoads]):
    """A JSON file with a number for each expert, or a list of such lists, one for each layer."""

    name = "FILE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> ExpertLoads:
        """The loads."""
        # click converts defaults too
        return cast(ExpertLoads, value) if isinstance(value, tuple) else read_loads(Path(value))


def read_loads(path: Path) -> ExpertLoads:
    """The loads in a file. Raises `DiagnosticError` for what are no loads, `OSError`."""
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    try:
        if len(text) > _MOST_BYTES:
            raise _wrong(path, f"more than {_MOST_BYTES:,} bytes")
        found = cast(object, json.loads(text))
    except (ValueError, RecursionError) as e:
        raise _wrong(path, f"no JSON ({e})") from None
    rows = _list(found)
    if rows and all(isinstance(row, list) for row in rows):
        return tuple(_row(path, row) for row in rows)
    return _row(path, found)


def _list(found: object) -> list[object]:
    return cast(list[object], found) if isinstance(found, list) else []


def _row(path: Path, found: object) -> tuple[int, ...]:
    numbers: list[int] = []
    for number in _list(found):
        if isinstance(number, bool) or not isinstance(number, int) or number not in _WHOLE:
            raise _wrong(path, f"{json.dumps(number)[:40]} among the loads")
        numbers.append(number)
    if not numbers:
        raise _wrong(path, "no list of numbers")
    return tuple(numbers)


def _wrong(path: Path, found: str) -> Exception:
    return error(
        f"{path}: expected whole numbers of 0 or more, one for each expert, found {found}",
        remedy="write [5, 1, 1, 1], or a list of such lists, one for each layer with experts",
    )


def load_statements(loads: ExpertLoads) -> Iterator[str]:
    """The statements of a strategy that say the same."""
    for layer, row in enumerate(loads):
        if isinstance(row, tuple):
            yield f"stg.expert_load[loads = ({', '.join(map(str, row))}), layer = {layer}]"
    if loads and not isinstance(loads[0], tuple):
        yield f"stg.expert_load[loads = ({', '.join(map(str, loads))})]"
