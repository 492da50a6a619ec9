"""The clauses of a type, after its bar: `sum(tp)`, `param`, `load(E=2)`, `routed(E=2, T)`.

A clause is a word with arguments in brackets: names or sizes, each with or without a number.
"""

from dataclasses import replace
from typing import Any, TypeAlias

from stagec.ir.expr import Expr, fraction
from stagec.ir.types import ROLES, Dim, Load, Partial, Routed
from stagec.support.suggest import did_you_mean

_Names: TypeAlias = list[tuple[str, int | None]]
_Sizes: TypeAlias = list[tuple[Any, int | None]]


class SyntaxLimitError(Exception):
    """A text that matches the grammar but is not valid; `token` marks the location."""

    def __init__(self, message: str, token: str | None = None, remedy: str | None = None) -> None:
        self.message, self.token, self.remedy = message, token, remedy
        super().__init__(message)


def names_of(token: str, coords: _Sizes) -> _Names:
    """The arguments of a clause whose arguments are names. Raises `SyntaxLimitError`."""
    names: _Names = []
    for name, number in coords:
        text = name.symbol_name if isinstance(name, Expr) else str(name)
        if text is None:
            raise SyntaxLimitError(f"'{token}' expects names, found {name}", token)
        names.append((text, number))
    return names


def routed(dims: tuple[Dim, ...], token: str, coords: _Sizes) -> tuple[Dim, ...]:
    """The dimensions with routed rows: with `routed(E=2, T)` those of dimension 2 are routed to E
    experts, T of them per token. A third word `spread` states that some experts get more tokens.
    Raises `SyntaxLimitError`."""
    last = coords[-1][0] if len(coords) == 3 and coords[-1][1] is None else None
    spread = isinstance(last, Expr) and last.symbol_name == "spread"
    coords = coords[:-1] if spread else coords
    sizes = [c for c, _ in coords if isinstance(c, Expr)]
    index = coords[0][1] if len(sizes) == len(coords) == 2 and coords[1][1] is None else None
    if index is None or index >= len(dims) or any(s == 0 for s in sizes):
        raise SyntaxLimitError(
            "'routed' expects the number of experts, the dimension of their rows, and the experts "
            "per token",
            token,
            "write routed(E=2, T)",
        )
    dealt = replace(dims[index], routed=Routed(sizes[0], sizes[1], spread))
    return (*dims[:index], dealt, *dims[index + 1 :])


def loaded(dims: tuple[Dim, ...], token: str, coords: _Names) -> tuple[Dim, ...]:
    """The dimensions with a load: `load(E=2, first=58)` is the load of experts E in dimension 2, in
    layers from 58 on. Raises `SyntaxLimitError`."""
    (of, index), *rest = coords or [("", None)]
    first = rest[0][1] if len(rest) == 1 and rest[0][0] == "first" else None
    if index is None or index >= len(dims) or (rest and first is None):
        raise SyntaxLimitError(
            "'load' expects the experts that have it and one of the dimensions",
            token,
            "write load(E=2), or load(E=2, first=58)",
        )
    loaded = replace(dims[index], load=Load(of, first or 0))
    return (*dims[:index], loaded, *dims[index + 1 :])


def memory_clause(token: str, coords: _Sizes) -> dict[str, Any]:
    """The fields of a type for `mem(host)`, or `mem(host, 1/2)` for a share of the bytes. Raises
    `SyntaxLimitError`."""
    name = names_of(token, coords[:1])[0][0] if coords else ""
    share = coords[1][0] if len(coords) == 2 and coords[1][1] is None else None
    if not name or len(coords) > 2 or (len(coords) == 2 and not _is_share(share)):
        raise SyntaxLimitError(
            "'mem' expects a memory and, if only a part of the bytes is in it, the share",
            token,
            "write mem(host), or mem(host, 1/2)",
        )
    return {"memory": name} | ({} if share is None else {"share": fraction(share)})


def _is_share(value: object) -> bool:
    return isinstance(value, Expr) and not value.symbols and 0 < fraction(value) < 1


def set_clause(fields: dict[str, Any], token: str, coords: _Names) -> None:
    """Set the fields of a type for any other clause. Raises `SyntaxLimitError`."""
    name, names = str(token), tuple(n for n, _ in coords)
    if name in ("sum", "max") and coords:
        _set_once(fields, "partial", Partial(name, names), token)
    elif name in ROLES:
        _set_once(fields, "role", name, token)
        return
    elif name == "part" and coords and coords[0][1] is not None:
        _set_once(fields, "part", (coords[0][0], coords[0][1]), token)
        return
    elif name == "on" and coords and coords[0][1] is not None:
        _set_once(fields, "stage", (coords[0][0], coords[0][1]), token)
        return
    elif name != "rep":
        known = ("sum", "max", "rep", "mem", "on", "load", "routed", "part", *ROLES)
        raise SyntaxLimitError(
            f"unknown clause '{name}' in a type",
            token,
            did_you_mean(name, known)
            or "use sum(axis), max(axis), rep, param, state, mem(..), on(..), load(..), routed(..)",
        )
    fields["placed"] = True


#: The clauses that set a field of a type.
_CLAUSES = {"partial": "sum(..) or max(..)", "role": "role", "part": "part(..)", "stage": "on(..)"}


def _set_once(fields: dict[str, Any], field: str, value: object, token: str) -> None:
    if field in fields:
        raise SyntaxLimitError(
            f"a type has one {_CLAUSES[field]}, '{token}' is another one",
            token,
            "keep one of them: several axes stand in one clause, as in sum(dp, tp)"
            if field == "partial"
            else "keep one of them",
        )
    fields[field] = value
