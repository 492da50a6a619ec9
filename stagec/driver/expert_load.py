"""Loads of experts on the command line: a JSON file, and the statements that say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import click

from stagec.ir.expr import MAX_INTEGER
from stagec.support.diagnostics import error

#: One tuple for all layers, or one for each.
ExpertLoads: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]

_MOST_BYTES = 1 << 20


class LoadFile(click.ParamType[ExpertLoads]):
    """A JSON file with a number for each expert, or a list of such lists, one for each layer."""

    name = "FILE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> ExpertLoads:
        """The loads."""
        return value if isinstance(value, tuple) else read_loads(Path(str(value)))


def read_loads(path: Path) -> ExpertLoads:
    """The loads in a file. Raises `DiagnosticError` for what are no loads, `OSError`."""
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    try:
        if len(text) > _MOST_BYTES:
            raise _wrong(path, f"more than {_MOST_BYTES:,} bytes")
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise _wrong(path, f"no JSON ({e})") from None
    if isinstance(found, list) and found and all(isinstance(row, list) for row in found):
        return tuple(_row(path, row) for row in found)
    return _row(path, found)


def _row(path: Path, found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not found:
        raise _wrong(path, "no list of numbers")
    for number in found:
        if type(number) is not int or not 0 <= number <= MAX_INTEGER:
            raise _wrong(path, f"{json.dumps(number)[:40]} among the loads")
    return tuple(found)


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
