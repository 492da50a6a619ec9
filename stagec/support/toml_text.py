"""Reads TOML, with the place of a mistake."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from stagec.support.diagnostics import error
from stagec.support.source import FileLoc, Source

_PLACE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)")


def toml_tables(source: Source, remedy: str) -> dict[str, Any]:
    """The tables of a text. Raises `DiagnosticError` at the place of what is not TOML."""
    try:
        return tomllib.loads(source.text)
    except RecursionError:
        place = FileLoc(source.name, 1, 1)
        raise error("not TOML: nested too deep", place, remedy=remedy) from None
    except ValueError as e:
        lines = source.text.split("\n")
        given = _PLACE.search(str(e))
        line, column = given.groups() if given and given[1] else (len(lines), len(lines[-1]) + 1)
        place = FileLoc(source.name, int(line), int(column))
        raise error(f"not TOML: {_PLACE.sub('', str(e))}", place, remedy=remedy) from None
