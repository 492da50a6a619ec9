"""Reads TOML, with the place of a mistake."""

import re
import tomllib
from typing import Any

from stagec.support.diagnostics import error
from stagec.support.json_values import is_list, is_object
from stagec.support.source import FileLoc, Source

#: Deepest nesting; jobs, machines and sweeps have three levels.
_MAX_DEPTH = 32
_PLACE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)")


def toml_tables(source: Source, remedy: str) -> dict[str, Any]:
    """The tables of a text. Raises `DiagnosticError` at the place of what is not TOML."""
    try:
        tables = tomllib.loads(source.text)
        too_deep = _is_deeper(tables, _MAX_DEPTH)
    except RecursionError:
        too_deep, tables = True, {}
    except ValueError as e:
        lines = source.text.split("\n")
        given = _PLACE.search(str(e))
        line, column = given.groups() if given and given[1] else (len(lines), len(lines[-1]) + 1)
        place = FileLoc(source.name, int(line), int(column))
        raise error(f"not TOML: {_PLACE.sub('', str(e))}", place, remedy=remedy) from None
    if too_deep:
        raise error("not TOML: nested too deep", FileLoc(source.name, 1, 1), remedy=remedy)
    return tables


def _is_deeper(value: object, levels: int) -> bool:
    """Whether tables and lists are nested in more levels."""
    inside = list(value.values()) if is_object(value) else value if is_list(value) else None
    return inside is not None and (
        not levels or any(_is_deeper(each, levels - 1) for each in inside)
    )
