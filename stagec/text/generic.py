"""Printing of the IR in the generic form of MLIR, which MLIR tools accept without definitions of
our ops.

Types are printed inside of `!stg.tensor<...>`; sizes and relations are quoted in
`#stg.expr<"...">`, since a bare `>` would close the attribute. A value without a type has the type
`!stg.unknown`.
"""

import re
from collections.abc import Iterable

from stagec.ir.core import Attr, NamedAttr, Operation, Quoted, Region, SymbolRef, Value
from stagec.ir.expr import MAX_INTEGER, Expr
from stagec.ir.facts import Relation
from stagec.ir.module import Module
from stagec.ir.types import TensorType, Type
from stagec.support.source import FileLoc, Loc, NameLoc

_BARE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_VALUE = re.compile(r"[A-Za-z_][\w.]*|\d+", re.ASCII)


def print_generic(module: Module, *, locations: bool = False) -> str:
    """The module in generic form, ending in a line break."""
    return _Printer(locations).op(module.root, 0) + "\n"


class _Printer:
    def __init__(self, locations: bool) -> None:
        self._locations = locations
        self._names: dict[Value, str] = {}
        self._taken: list[set[str]] = [set()]

    def op(self, op: Operation, indent: int) -> str:
        """One operation at this depth, without a final line break."""
        operands = ", ".join(self._names.get(v, "%undefined") for v in op.operands)
        body = f" ({self._region(op.region, indent)})" if op.region is not None else ""
        takes = ", ".join(type_text(v.type) for v in op.operands)
        gives = _results(type_text(v.type) for v in op.results)
        names = ", ".join(self._define(v) for v in op.results)
        head = "  " * indent + (f"{names} = " if names else "") + f"{_string(op.name)}({operands})"
        tail = f" : ({takes}) -> {gives}"
        return head + body + _dictionary(op) + tail + (_loc(op.loc) if self._locations else "")

    def _region(self, region: Region, indent: int) -> str:
        self._taken.append(set())
        pad = "  " * indent
        text = "{\n"
        if region.args:
            args = ", ".join(f"{self._define(a)}: {type_text(a.type)}" for a in region.args)
            text += f"{pad}^bb0({args}):\n"
        text += "".join(self.op(child, indent + 1) + "\n" for child in region.ops)
        self._taken.pop()
        return text + pad + "}"

    def _define(self, value: Value) -> str:
        base = value.name.replace("/", ".")
        base = base if _VALUE.fullmatch(base) else "v"
        name, number = base, 1
        while any(name in taken for taken in self._taken):
            number += 1
            name = f"v{base}_{number}" if base[0].isdigit() else f"{base}_{number}"
        self._taken[-1].add(name)
        self._names[value] = f"%{name}"
        return f"%{name}"


def type_text(type_: Type | None) -> str:
    """A type in generic form."""
    if type_ is None:
        return "!stg.unknown"
    text = str(type_)
    if not isinstance(type_, TensorType):
        return f"!stg.{text}" if _BARE.fullmatch(text) else f"!stg.opaque<{_string(text)}>"
    return f"!stg.tensor<{text if text.isascii() else _string(text)}>"


def attr_text(value: Attr) -> str:
    """The value of a parameter in generic form."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(attr_text, value))}]"
    if isinstance(value, NamedAttr):
        return f"{{{value.name} = {attr_text(value.value)}}}"
    if isinstance(value, Expr):
        number = value.value
        if number is not None and abs(number) <= MAX_INTEGER:
            return f"{number} : i64"
    if isinstance(value, Expr | Relation):
        return f"#stg.expr<{_string(str(value))}>"
    if isinstance(value, SymbolRef):
        return f"@{value.name}" if _BARE.fullmatch(value.name) else f"@{_string(value.name)}"
    return _string(value.text if isinstance(value, Quoted) else str(value))


def _dictionary(op: Operation) -> str:
    parts = [f"sym_name = {_string(op.symbol)}"] if op.symbol else []
    for name, value in op.attrs.items():
        key = name if _BARE.fullmatch(name) else _string(name)
        parts.append(key if value is True else f"{key} = {attr_text(value)}")
    if op.region is not None and op.region.returns:
        parts.append(f"result_types = [{', '.join(map(type_text, op.region.returns))}]")
    return f" {{{', '.join(parts)}}}" if parts else ""


def _results(types: Iterable[str]) -> str:
    texts = list(types)
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _loc(loc: Loc) -> str:
    return f" loc({_place(loc)})"


def _place(loc: Loc) -> str:
    if isinstance(loc, FileLoc):
        return f"{_string(loc.file)}:{loc.line}:{loc.col}"
    if isinstance(loc, NameLoc):
        return f"{_string(loc.name)}({_place(loc.inner)})"
    return "unknown"
