"""Printing of the IR: one rule for all ops, the inverse of the parser.

Names are kept; if two visible values have the same name, the later one gets a number.
"""

from __future__ import annotations

from collections.abc import Iterable

from stagec.ir.core import Operation, Region, Value
from stagec.ir.module import Module
from stagec.ir.param import attr_text
from stagec.ir.traits import OpenParams
from stagec.ir.types import Type
from stagec.support.source import FileLoc, Loc, NameLoc
from stagec.text.ir_text import IRText

_WIDTH = 110


def print_module(module: Module, *, locations: bool = False) -> str:
    """The text of a module, ending in a line break."""
    return _Printer(locations).op_text(module.root, 0) + "\n"


def _html(module: Module) -> str:
    return IRText(print_module(module)).html()


Module.as_html = _html


def print_op(op: Operation) -> str:
    """The text of one operation, for messages and tests."""
    return _Printer(False).op_text(op, 0)


class _Printer:
    def __init__(self, locations: bool) -> None:
        self._locations = locations
        self._names: dict[Value, str] = {}
        self._visible: list[set[str]] = [set()]

    # -- names -------------------------------------------------------------------------------------

    def _define(self, value: Value) -> str:
        name, number = value.name, 1
        while any(name in names for names in self._visible):
            number += 1
            name = f"{value.name}_{number}"
        self._visible[-1].add(name)
        self._names[value] = name
        return "%" + name

    def _use(self, value: Value) -> str:
        return "%" + self._names.get(value, value.name)

    # -- operations --------------------------------------------------------------------------------

    def op_text(self, op: Operation, indent: int) -> str:
        """The operation at this depth, without a final line break."""
        head = op.name + (f" @{op.symbol}" if op.symbol else "") + self._params(op)
        region = op.region
        bound = region is not None and bool(region.args) and len(op.operands) == len(region.args)
        if op.operands and not bound:
            head += f"({', '.join(map(self._use, op.operands))})"
        if region is not None:
            head += self._region(op, region, bound, indent)
        names = ", ".join(self._define(r) for r in op.results)
        types = [r.type for r in op.results if r.type is not None]
        tail = _types(" : ", types) if len(types) == len(op.results) else ""
        if self._locations:
            text = loc_text(op.loc)
            tail += f" loc({text})" if text else ""
        return "  " * indent + (names + " = " if names else "") + head + tail

    def _params(self, op: Operation) -> str:
        definition = op.definition
        positional = [p.name for p in definition.params if p.positional and p.name in op.attrs]
        flags = [n for n, v in op.attrs.items() if v is True]
        declared = [p.name for p in definition.params if p.name in op.attrs]
        rest = [n for n in (*declared, *op.attrs) if n not in positional and n not in flags]
        parts = [_spread(op, n) if _is_list(op, n) else attr_text(op.attrs[n]) for n in positional]
        if definition.has(OpenParams):  # declarations keep their order
            named = [n for n in op.attrs if n not in positional]
            parts += [n if op.attrs[n] is True else _named(op, n) for n in named]
        else:
            parts += flags + [_named(op, n) for n in dict.fromkeys(rest)]
        return f"[{', '.join(parts)}]" if parts else ""

    def _region(self, op: Operation, region: Region, bound: bool, indent: int) -> str:
        self._visible.append(set())
        binds = [f" = {self._use(v)}" for v in op.operands] if bound else [""] * len(region.args)
        args = [
            self._define(a) + (f": {a.type}" if a.type is not None else "") + bind
            for a, bind in zip(region.args, binds, strict=True)
        ]
        pad = "  " * (indent + 2)
        text = " "
        if args:
            line, lines = f"({', '.join(args)})", f",\n{pad}".join(args)
            text += f"{line} " if len(line) + 2 * indent < _WIDTH else f"(\n{pad}{lines}) "
        if region.returns:
            text += _types("-> ", region.returns) + " "
        body = [self.op_text(child, indent + 1) for child in region.ops]
        self._visible.pop()
        return text + "{\n" + "".join(line + "\n" for line in body) + "  " * indent + "}"


def _is_list(op: Operation, name: str) -> bool:
    return any(p.name == name and p.kind == "relations" for p in op.definition.params)


def _spread(op: Operation, name: str) -> str:
    value = op.attrs[name]
    return ", ".join(map(attr_text, value)) if isinstance(value, tuple) else attr_text(value)


def _named(op: Operation, name: str) -> str:
    return attr_text(op.attrs[name]) if name.isdigit() else f"{name} = {attr_text(op.attrs[name])}"


def _types(lead: str, types: Iterable[Type]) -> str:
    texts = [str(t) for t in types]
    if not texts:
        return ""
    return lead + (texts[0] if len(texts) == 1 else f"({', '.join(texts)})")


def loc_text(loc: Loc) -> str:
    """The text inside of `loc(...)`, empty for an unknown location."""
    if isinstance(loc, FileLoc):
        return f'"{loc.file}":{loc.line}:{loc.col}'
    if isinstance(loc, NameLoc):
        inner = loc_text(loc.inner)
        return f'"{loc.name}"({inner})' if inner else ""
    return ""
