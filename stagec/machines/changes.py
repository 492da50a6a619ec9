"""Machines with other figures: what levers and sweeps try.

A path is the way to a figure in a text. Changes copy the objects on that way and check the new
value alone, so that thousands of machines are cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from stagec.machines.figures import KINDS, Figure, is_table, listed, quantity
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.machines.schema import Machine

_Apply = Callable[[Any, type[Figure] | None], Any]
#: Fields that are no figures.
_TOLD = frozenset(
    {"name", "title", "aliases", "kind", "collectives", "fitted", "reductions", "packed"}
)
_SOURCE = "changed from the text"


def changed(machine: Machine, values: Mapping[str, float | str]) -> Machine:
    """See `Machine.changed`."""
    for path, value in values.items():
        machine = _at(machine, path, partial(_replaced, path, value))
    return machine


def scaled(machine: Machine, path: str, factor: float) -> Machine:
    """See `Machine.scaled`."""
    return _at(machine, path, lambda old, kind: _checked(path, old * factor, old, kind))


def _at(machine: Machine, path: str, apply: _Apply) -> Machine:
    found: Machine | None = _walk(machine, path.split("."), apply)
    if found is None:
        known = paths(machine)
        raise error(
            f"machine {machine.name} has no figure '{path}'",
            remedy=did_you_mean(path, known) or f"the figures are: {', '.join(known)}",
        )
    return found


def _walk(node: Any, path: list[str], apply: _Apply) -> Any:
    """The node with the figures of the path changed; None if there is no such path."""
    if isinstance(node, Figure):
        if path:
            return None
        value = apply(node.value, type(node))
        return node.model_copy(update={"value": value, "source": _SOURCE})
    if isinstance(node, BaseModel):
        if not path or path[0] in _TOLD or path[0] not in type(node).model_fields:
            return None
        inner = _walk(getattr(node, path[0]), path[1:], apply)
        return None if inner is None else node.model_copy(update={path[0]: inner})
    if is_table(node):
        return _each(node, path, apply)
    if parts := listed(node):
        levels = _each({level.name: level for level in parts}, path, apply)
        return None if levels is None else tuple(levels.values())
    if path or not isinstance(node, int | float):
        return None
    return apply(node, None)


def _each(items: dict[str, Any], path: list[str], apply: _Apply) -> dict[str, Any] | None:
    """Of named things the one that the path names, or else all."""
    if path and path[0] in items:
        inner = _walk(items[path[0]], path[1:], apply)
        return None if inner is None else {**items, path[0]: inner}
    found = {name: _walk(item, path, apply) for name, item in items.items()}
    return found if found and None not in found.values() else None


def _replaced(path: str, value: float | str, old: Any, kind: type[Figure] | None) -> Any:
    if not isinstance(value, str):
        return _checked(path, value, old, kind)
    try:
        number = quantity(KINDS[kind], value) if kind and kind in KINDS else float(value)
    except ValueError as e:
        raise error(f"machine figure '{path}': {e}", remedy="give a figure with its unit") from None
    return _checked(path, float(number), old, kind)


def _checked(path: str, value: float, old: Any, kind: type[Figure] | None) -> Any:
    """The value in the type of the old one; infinity where that is no count."""
    whole = isinstance(old, int)
    least = 0 if kind is None or KINDS.get(kind) == "time" else math.ulp(0.0)
    if not value >= least or (whole and (math.isinf(value) or value < 1)):
        raise error(
            f"machine figure '{path}' cannot be {value}",
            remedy="give a number that is not negative" if not least else "give more than zero",
        )
    return round(value) if whole else float(value)


def figures(machine: Machine) -> Iterator[tuple[str, Figure]]:
    """See `Machine.figures`."""
    return ((path, node) for path, node in _leaves(machine, "") if isinstance(node, Figure))


def paths(machine: Machine) -> list[str]:
    """See `Machine.paths`."""
    return [path for path, _ in _leaves(machine, "")]


def _leaves(node: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Figure) or (isinstance(node, int | float) and not isinstance(node, bool)):
        yield path, node
        return
    for name, item in _items(node):
        yield from _leaves(item, f"{path}.{name}" if path else name)


def _items(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, BaseModel):
        yield from ((n, getattr(node, n)) for n in type(node).model_fields if n not in _TOLD)
    elif is_table(node):
        yield from node.items()
    else:
        yield from ((level.name, level) for level in listed(node))
