"""Reads machine texts from TOML into a `Machine`, with the location of every mistake."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

from pydantic import ValidationError

from stagec.machines.changes import with_tiles
from stagec.machines.efficiency import collective_defaults, network_defaults
from stagec.machines.figures import listed
from stagec.machines.schema import Machine
from stagec.support import texts
from stagec.support.diagnostics import Diagnostic, DiagnosticError, error
from stagec.support.json_values import is_object
from stagec.support.limits import MAX_BYTES
from stagec.support.source import FileLoc, Loc, Source
from stagec.support.suggest import did_you_mean
from stagec.support.toml_text import toml_tables

Tables: TypeAlias = dict[str, Any]
_HEAD = re.compile(r"\s*(\[\[|\[)([^\[\]]+)\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=")
_REMEDY = "docs/machines.md has the schema"
#: The longest chain of texts with bases.
_MOST_BASES = 8


def file_text(path: Path) -> str:
    """The content of a file. Raises `DiagnosticError` for a file that cannot be a text."""
    return texts.file_text(path, MAX_BYTES, _REMEDY)


def parsed(text: str, file: str) -> Tables:
    """The tables of a text. Raises `DiagnosticError` if it is not TOML."""
    return toml_tables(Source(file, text), "write KEY = VALUE")


def bases(tables: Tables, file: str, text: str, read: Callable[[str], tuple[str, str]]) -> Tables:
    """Merge tables with those of their base, its base, and so on; `read` returns the file and the
    text of a base. Raises `DiagnosticError` for an unknown base and for a cycle."""
    chain = [(tables, file, text)]
    while "base" in chain[-1][0]:
        last, its_file, its_text = chain[-1]
        wanted = _base(last, its_file, its_text)
        place = _place(lines_of(its_text), ("base",), its_file)
        try:
            next_file, next_text = read(wanted)
        except DiagnosticError as e:
            first = e.diagnostics[0]
            raise error(f"base: {first.message}", place, remedy=first.remedy) from None
        if len(chain) > _MOST_BASES or next_file in [f for _, f, _ in chain]:
            raise error(
                f"base '{wanted}' makes a cycle, or a chain of more than {_MOST_BASES} files",
                place,
                remedy="remove 'base' from one file of the chain",
            )
        chain.append((parsed(next_text, next_file), next_file, next_text))
    result = chain.pop()[0]
    for above, _, _ in reversed(chain):
        result = on_base(result, above)
    return result


def _base(tables: Tables, file: str, text: str) -> str:
    base = tables["base"]
    if not isinstance(base, str):
        place = _place(lines_of(text), ("base",), file)
        raise error("'base' expects a name or a file", place, remedy='write base = "h100-sxm"')
    return base


def on_base(base: Tables, tables: Tables) -> Tables:
    """Merge the tables of a text into those of its base.

    A figure replaces a figure, value and source together; the constants of a level replace those of
    the level, since they were fitted together. A list of levels that are all in the base changes
    these; a list with any other name replaces that of the base, and removes the constants of its
    other levels.
    """
    result = _merged(base, tables)
    kept = {str(level.get("name")) for level in listed(result.get("network")) if is_object(level)}
    given = tables.get("efficiency")
    own = given.get("network") if is_object(given) else None
    kept |= set(own) if is_object(own) else set()
    efficiency = result.get("efficiency")
    if is_object(efficiency) and is_object(efficiency.get("network")):
        network = {n: v for n, v in efficiency["network"].items() if n in kept}
        result["efficiency"] = {**efficiency, "network": network}
    return result


def _merged(base: Tables, tables: Tables) -> Tables:
    result = {n: v for n, v in base.items() if n not in ("aliases", "base")}
    for name, value in tables.items():
        old = result.get(name)
        if name == "network" and is_object(old) and is_object(value):
            result[name] = {**old, **value}
        elif name == "network" and listed(old):
            result[name] = _levels(listed(old), value)
        elif is_object(old) and is_object(value) and "value" not in value:
            result[name] = _merged(old, value)
        elif name != "base":
            result[name] = value
    return result


def _levels(old: tuple[Any, ...], new: object) -> object:
    if not listed(new) or not all(map(is_object, listed(new))):
        return new  # the schema reports what is not a list of levels
    changed = {str(level.get("name")): level for level in listed(new) if is_object(level)}
    known = [level for level in old if is_object(level)]
    if not set(changed) <= {str(level.get("name")) for level in known}:
        return new
    return [_merged(level, changed.get(str(level.get("name")), {})) for level in known]


def checked(name: str, tables: Tables, file: str, text: str) -> Machine:
    """The machine that tables describe. Raises `DiagnosticError` with the location of every
    mistake."""
    known = lines_of(text)
    _check_levels(tables, known, file)
    try:
        return with_tiles(Machine.model_validate({**_completed(tables), "name": name}))
    except ValidationError as e:
        own = _names_of_levels(parsed(text, file))
        merged = _names_of_levels(tables)

        def place(way: tuple[Any, ...]) -> Loc:
            """The location of a path; levels in the text have other indices than in the merged
            tables."""
            if way[:1] == ("network",) and len(way) > 1 and merged[way[1]] in own:
                way = ("network", own.index(merged[way[1]]), *way[2:])
            return _place(known, way, file)

        problems = [d for d in e.errors() if (d["loc"], d["type"]) != (("efficiency",), "missing")]
        raise DiagnosticError(*(_diagnostic(d, place(d["loc"])) for d in problems)) from None


def _names_of_levels(tables: Tables) -> list[object]:
    return [t.get("name") if is_object(t) else None for t in listed(tables.get("network"))]


def _check_levels(
    tables: Tables, known: Mapping[tuple[Any, ...], tuple[int, int]], file: str
) -> None:
    """Raises `DiagnosticError` if levels are not tables, or constants belong to an unknown
    level."""
    network = tables.get("network", [{}])
    if not listed(network) or not all(map(is_object, listed(network))):
        place = next((way for way in known if way[0] == "network"), ("network",))
        raise error(
            "network: expects levels, each under its own [[network]]",
            _place(known, place, file),
            remedy='write [[network]], then name = "nvlink" and its figures',
        )
    efficiency = tables.get("efficiency")
    given = efficiency.get("network") if is_object(efficiency) else None
    names = [str(name) for name in _names_of_levels(tables)]
    for name in given if is_object(given) and names else ():
        if name not in names:
            way = ("efficiency", "network", name)
            raise error(
                f"efficiency.network has no level '{name}'",
                _place(known, way, file),
                remedy=did_you_mean(name, names) or f"the levels are: {', '.join(names)}",
            )


def _completed(tables: Tables) -> Tables:
    """The tables with default constants for every level of the network."""
    levels = [level for level in listed(tables.get("network")) if is_object(level)]
    efficiency = tables.get("efficiency", {})
    if not levels or not is_object(efficiency) or not is_object(efficiency.get("network", {})):
        return tables
    network: Tables = dict(efficiency.get("network", {}))
    for level in levels:
        name, own = str(level.get("name")), network.get(str(level.get("name")), {})
        if is_object(own):
            kind, innermost = str(level.get("kind")), level is levels[0]
            network[name] = {**network_defaults(kind, innermost=innermost), **own}
    first = {"collectives": collective_defaults(str(levels[0].get("kind")))}
    return {**tables, "efficiency": {**first, **efficiency, "network": network}}


def _diagnostic(problem: Any, place: Loc) -> Diagnostic:
    way = tuple(problem["loc"])
    where = ".".join(map(str, way))
    message = problem["msg"].removeprefix("Value error, ")
    remedy = _REMEDY
    if problem["type"] == "extra_forbidden":
        message = "is not in the schema"
        names = _names(way[:-1])
        remedy = did_you_mean(str(way[-1]), names) or f"the names here are: {', '.join(names)}"
    elif problem["type"] == "missing":
        message = "is missing"
        remedy = f"write {_expected(way)}; {_REMEDY}"
    elif problem["type"] == "model_type":
        message = 'expects a figure, { value = "...", source = "..." }, or a table'
    return Diagnostic(f"{f'{where}: ' if where else ''}{message}", place, "error", remedy)


def _expected(way: tuple[Any, ...]) -> str:
    """What a missing table or figure consists of."""
    levels = way == ("network",)
    fields = _fields((*way, 0) if levels else way)
    needed = [name for name, field in fields.items() if field.is_required()]
    if not needed:
        return "it"
    if "source" in needed:
        return "it, with its source"
    head = "[[network]]" if levels else f"[{'.'.join(map(str, way))}]"
    names = ", ".join(needed)
    return f'{head} with {names}, or take it from another machine: base = "h100-sxm"'


def _names(way: tuple[Any, ...]) -> list[str]:
    """The names in the schema at this path in a text."""
    return [n for n in _fields(way) if n != "name" or way]


def _fields(way: tuple[Any, ...]) -> dict[str, Any]:
    """The fields in the schema at this path in a text, by their names there."""
    here: Any = Machine
    for step in way:
        fields = getattr(here, "model_fields", None)
        if fields is not None:
            here = fields[step].annotation if step in fields else None
        else:
            here = next((a for a in reversed(get_args(here)) if a is not Ellipsis), None)
        while get_origin(here) in (Annotated, Union, UnionType):
            here = get_args(here)[0]
    return {f.alias or n: f for n, f in getattr(here, "model_fields", {}).items()}


def _place(
    known: Mapping[tuple[Any, ...], tuple[int, int]], way: tuple[Any, ...], file: str
) -> Loc:
    """The location of the longest known prefix of a path, or the first line."""
    for end in range(len(way), 0, -1):
        if way[:end] in known:
            line, col = known[way[:end]]
            return FileLoc(file, line, col, len(str(way[end - 1])))
    return FileLoc(file, 1, 1)


def lines_of(text: str) -> dict[tuple[Any, ...], tuple[int, int]]:
    """The line and column of the keys and tables of a text, as far as a scan of its lines finds
    them."""
    lines: dict[tuple[Any, ...], tuple[int, int]] = {}
    table: tuple[Any, ...] = ()
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        head = _HEAD.fullmatch(line)
        if head is not None:
            table = _parts(head[2])
            if head[1] == "[[":
                index = counts[head[2]] = counts.get(head[2], -1) + 1
                table = (*table, index)
            lines.setdefault(table, (number, head.start(2) + 1))
            continue
        key = _KEY.match(line)
        if key is not None:
            way = (*table, *_parts(key[1]))
            lines.setdefault(way, (number, key.start(1) + 1))
            for inner in re.finditer(r"[{,]\s*([A-Za-z0-9_-]+)\s*=", line):
                lines.setdefault((*way, inner[1]), (number, inner.start(1) + 1))
    return lines


def _parts(key: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in key.split("."))
