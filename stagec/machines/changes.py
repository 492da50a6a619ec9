"""Machines with changed figures, for levers and sweeps.

A path names a figure in a text. A change copies the objects on the path and checks only the new
value, so that thousands of machines are cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast, get_args

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError

from stagec.machines.figures import KINDS, Figure, Unit, listed, quantity
from stagec.machines.kernel_efficiency import tile_defaults
from stagec.support.diagnostics import error
from stagec.support.json_values import is_object
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.machines.schema import Machine


class _Form(NamedTuple):
    """The schema of a number: the kind of its quantity, None without a unit, and its other
    rules."""

    kind: str | None
    rules: TypeAdapter[Any]


_Apply = Callable[[Any, _Form], Any]
_SOURCE = "changed from the text"
_REMEDY = "docs/machines.md has the schema"


def changed(machine: Machine, values: Mapping[str, float | str]) -> Machine:
    """See `Machine.changed`."""
    if not isinstance(cast("object", values), Mapping):
        about = f"expected a dictionary of figures of the machine, found {values!r:.60}"
        raise error(about, remedy='write {"memory.bandwidth": "2 TB/s"}')
    for path, value in values.items():
        machine = _at(machine, str(path), partial(_replaced, path, value))
    return machine


def scaled(machine: Machine, path: str, factor: float) -> Machine:
    """See `Machine.scaled`."""
    _check_number(path, factor, remedy="give a number such as 2")
    return _at(machine, path, lambda old, form: _checked(path, old * factor, old, form))


def _at(machine: Machine, path: str, apply: _Apply) -> Machine:
    changed: Machine | None = _walk(machine, path.split("."), apply, None)
    if changed is None:
        known = paths(machine)
        raise error(
            f"machine '{machine.name}' has no figure '{path}'",
            remedy=did_you_mean(path, known) or f"the figures are: {', '.join(known)}",
        )
    return with_tiles(changed) if path.startswith("compute.") else changed


def with_tiles(machine: Machine) -> Machine:
    """The machine with the constants that follow from the size of a processor, where neither its
    text nor a change states them."""
    compute, efficiency = machine.compute, machine.efficiency
    peaks = (each for each in (compute.matrix.get(name) for name in ("bf16", "f16")) if each)
    peak = next(peaks, None)
    if peak is None:
        return machine
    defaults = tile_defaults(peak.value / compute.processors.value, compute.clock.value)
    changed: dict[str, Any] = {}
    for name, values in zip(("matmul", "attention"), defaults, strict=True):
        own = getattr(efficiency, name)
        lacks = {n: v for n, v in values.items() if n not in own.model_fields_set}
        changed[name] = own.model_copy(update=lacks)
        changed[name].model_fields_set.difference_update(lacks)  # still derived
    return machine.model_copy(update={"efficiency": efficiency.model_copy(update=changed)})


def _walk(node: Any, path: list[str], apply: _Apply, hint: Any) -> Any:
    """A copy of a node with the figures at a path changed; None if there is no such path. `hint` is
    the annotation of the node in the schema."""
    if isinstance(node, Figure):
        if path:
            return None
        value = apply(node.value, _form(_hints(type(node))["value"][1], KINDS.get(type(node))))
        return node.model_copy(update={"value": value, "source": _SOURCE})
    if isinstance(node, BaseModel):
        name, inside = _hints(type(node)).get(path[0] if path else "", ("", None))
        inner = _walk(getattr(node, name), path[1:], apply, inside) if name else None
        return None if inner is None else node.model_copy(update={name: inner})
    if is_object(node):
        return _each(node, path, apply, get_args(hint)[-1])
    if levels := _levels(node):
        items = _each(levels, path, apply, None)
        return None if items is None else tuple(items.values())
    if path or not (_is_number(node) or _is_open(node, hint)):
        return None
    return apply(0 if node is None else node, _form(hint))


def _each(
    items: dict[str, Any], path: list[str], apply: _Apply, hint: Any
) -> dict[str, Any] | None:
    """Change the item that the path names, or, if it names none, all items."""
    if path and path[0] in items:
        inner = _walk(items[path[0]], path[1:], apply, hint)
        return None if inner is None else {**items, path[0]: inner}
    changed = {name: _walk(item, path, apply, hint) for name, item in items.items()}
    return changed if changed and None not in changed.values() else None


def _is_number(node: object) -> bool:
    return isinstance(node, int | float) and not isinstance(node, bool)


def _is_open(node: object, hint: Any) -> bool:
    """Whether a node is an optional whole number that a text leaves out."""
    return node is None and any(getattr(a, "__origin__", a) is int for a in get_args(hint))


def _levels(node: object) -> dict[str, Any]:
    """The levels of a network by name; empty for a list of texts."""
    return {part.name: part for part in listed(node) if hasattr(part, "name")}


@cache
def _hints(owner: type[BaseModel]) -> Mapping[str, tuple[str, Any]]:
    """For each name in a text, the name of the field and its annotation with all of its rules."""
    return {
        f.alias or name: (name, _with(f.annotation, f.metadata))
        for name, f in owner.model_fields.items()
    }


def _with(annotation: Any, rules: Sequence[Any]) -> Any:
    return Annotated[annotation, *rules] if rules else annotation


@cache
def _form(hint: Any, kind: str | None = None) -> _Form:
    """The rules of a number, without the validator that reads the text of a quantity."""
    hint = next((a for a in get_args(hint) if _is_annotated(a)), hint)  # of an optional number
    base, *metadata = (hint.__origin__, *hint.__metadata__) if _is_annotated(hint) else (hint,)
    kind = kind or next((m.kind for m in metadata if isinstance(m, Unit)), None)
    kept = [m for m in metadata if kind is None or not isinstance(m, BeforeValidator)]
    return _Form(kind, TypeAdapter(_with(base, kept)))


def _is_annotated(hint: Any) -> bool:
    return hasattr(hint, "__metadata__")


def _replaced(path: str, value: float | str, old: Any, form: _Form) -> Any:
    if not isinstance(value, str):
        _check_number(path, value, remedy="give a number, or a text with its unit")
        return _checked(path, value, old, form)
    try:
        number = _number(value) if form.kind is None else quantity(form.kind, value)
    except ValueError as e:
        both = ", and both ends of a range the same one" if ".." in value else ""
        remedy = f"give a figure with its unit{both}"
        raise error(f"machine figure '{path}': {e}", remedy=remedy) from None
    if isinstance(old, int) and form.kind is None and number % 1:
        raise error(f"machine figure '{path}' cannot be {value}", remedy="give a whole number")
    return _checked(path, float(number), old, form)


def _check_number(path: str, value: object, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(f"machine figure '{path}' cannot be {value!r:.60}", remedy=remedy)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expects a number, found '{text}'") from None


def _checked(path: str, value: float, old: Any, form: _Form) -> Any:
    """The value, validated by the schema and converted to the type of the old one; rates and
    bandwidths may be infinite. Raises `DiagnosticError`."""
    whole, time = isinstance(old, int), form.kind == "time"
    least = math.ulp(0.0) if form.kind and not time else 0
    if not value >= least or (math.isinf(value) and (whole or time)) or (whole and value < 1):
        remedy = "give more than zero" if least or whole else "give a number that is not negative"
        raise error(f"machine figure '{path}' cannot be {value}", remedy=remedy)
    result = round(value) if whole else float(value)
    try:
        return form.rules.validate_python(result)
    except ValidationError as e:
        why = e.errors()[0]["msg"].removeprefix("Value error, ")
        why = why.replace("Input should be", "expects")
        raise error(f"machine figure '{path}' cannot be {value}: {why}", remedy=_REMEDY) from None


def figures(machine: Machine) -> Iterator[tuple[str, Figure]]:
    """See `Machine.figures`."""
    return ((path, node) for path, node in _leaves(machine, "") if isinstance(node, Figure))


def paths(machine: Machine) -> list[str]:
    """See `Machine.paths`."""
    return [path for path, _ in _leaves(machine, "")]


def _leaves(node: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Figure) or _is_number(node):
        yield path, node
        return
    for name, item in _items(node):
        yield from _leaves(item, f"{path}.{name}" if path else name)


def _items(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, BaseModel):
        yield from ((n, getattr(node, field)) for n, (field, _) in _hints(type(node)).items())
    elif is_object(node):
        yield from node.items()
    else:
        yield from _levels(node).items()
