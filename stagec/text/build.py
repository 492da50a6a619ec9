"""Syntax to IR: resolves names and ops, checks signatures, reports every error it finds.

`parse_module` is the entry point: it turns a text into a module, or raises one `DiagnosticError`
with all errors.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagec.ir.core import Attr, Operation, Region, Value
from stagec.ir.expr import Expr
from stagec.ir.module import Module
from stagec.ir.opdef import OpDef, Registry, unregistered
from stagec.ir.param import OF_ALL, convert_param
from stagec.ir.signature import misfits
from stagec.ir.traits import HasRegion, OpenParams
from stagec.support.diagnostics import DiagnosticList, note
from stagec.support.source import FileLoc, Source
from stagec.support.suggest import did_you_mean
from stagec.support.words import counted
from stagec.text.ast import ArgSyntax, Name, OpSyntax, RegionSyntax
from stagec.text.parser import parse_syntax


def parse_module(source: Source, registry: Registry, *, allow_unregistered: bool = False) -> Module:
    """The module that the text states.

    Raises `DiagnosticError` with every error of names, ops, parameters and signatures.
    """
    root = parse_op(source, registry, allow_unregistered=allow_unregistered)
    if root.name != "stg.module":
        raise root.error(
            f"expected 'stg.module' around everything, found '{root.name}'",
            remedy="wrap the text in 'stg.module @name { ... }'",
        )
    if root.region is None:
        root.make_region()
    return Module(root, registry, {source.name: source})


def parse_op(source: Source, registry: Registry, *, allow_unregistered: bool = False) -> Operation:
    """The one operation that a text states, such as a module or a strategy.

    Raises `DiagnosticError` with every error.
    """
    builder = _Resolver(registry, allow_unregistered)
    op = builder.op(parse_syntax(source), _Scope(None))
    builder.problems.check()
    return op


class _Scope:
    """The values visible in a region; inner regions see outer values, names are never hidden."""

    def __init__(self, outer: _Scope | None) -> None:
        self.outer = outer
        self.values: dict[str, Value] = {}

    def find(self, name: str) -> Value | None:
        value = self.values.get(name)
        return value if value is not None or self.outer is None else self.outer.find(name)

    def names(self) -> set[str]:
        return set(self.values) | (self.outer.names() if self.outer else set[str]())


class _Resolver:
    def __init__(self, registry: Registry, allow_unregistered: bool) -> None:
        self._registry = registry
        self._allow_unregistered = allow_unregistered
        self.problems = DiagnosticList()

    def op(self, syntax: OpSyntax, scope: _Scope) -> Operation:
        definition = self._definition(syntax.name)
        if definition.has(HasRegion) and definition.takes.most == 0 and syntax.region is not None:
            # `stg.func @f (%x) {`: arguments without types are parsed as operands
            loose = [ArgSyntax(name, None, None) for name in syntax.operands]
            syntax.operands, syntax.region.args = [], [*loose, *syntax.region.args]
        symbol = syntax.symbol.text if syntax.symbol else None
        op = Operation(definition, self._operands(syntax, scope), loc=syntax.loc, symbol=symbol)
        places = self._params(op, syntax)
        if syntax.region is not None or definition.has(HasRegion):
            op.make_region()
        for i, name in enumerate(syntax.results):
            op.add_result(name.text, syntax.types[i] if i < len(syntax.types) else None, name.loc)
        for misfit in misfits(op):
            loc = places.get(misfit.param, syntax.name.loc)
            self.problems.error(misfit.message, loc, remedy=misfit.remedy)
        if syntax.region is not None:
            self._region(op.body, syntax.region, scope)
        self._results(op, syntax, scope)
        return op

    def _definition(self, name: Name) -> OpDef:
        definition = self._registry.get(name.text)
        if definition is None:
            definition = unregistered(name.text)
            if not self._allow_unregistered:
                self.problems.error(
                    f"unknown op '{name.text}'", name.loc, remedy=self._registry.suggest(name.text)
                )
        return definition

    def _operands(self, syntax: OpSyntax, scope: _Scope) -> list[Value]:
        names = list(syntax.operands)
        if syntax.region:
            names += [arg.bound for arg in syntax.region.args if arg.bound is not None]
        return [self._use(name, scope) for name in names]

    def _use(self, name: Name, scope: _Scope) -> Value:
        value = scope.find(name.text)
        if value is not None:
            return value
        self.problems.error(
            f"use of undefined value '%{name.text}'",
            name.loc,
            remedy=did_you_mean(name.text, scope.names(), "%") or "define it before its use",
        )
        return Value(name.text, None, Region(Operation(unregistered("stg.undefined"))), 0, name.loc)

    def _define(self, value: Value, loc: FileLoc, scope: _Scope) -> None:
        earlier = scope.find(value.name)
        if earlier is not None:
            first, remedy = note("it is defined here first", earlier.loc), "give it another name"
            message = f"redefinition of '%{value.name}'"
            self.problems.error(message, loc, remedy=remedy, notes=[first])
        scope.values[value.name] = value

    # -- parameters --------------------------------------------------------------------------------

    def _params(self, op: Operation, syntax: OpSyntax) -> dict[str, FileLoc]:
        """Convert the parameters of the op to the forms of their kinds. Returns the location of
        each. An invalid value stays unconverted, so that the check of the signature reports it."""
        places: dict[str, FileLoc] = {}
        for name, value, loc in _parameters(op.definition, syntax):
            if name in places:
                given = f"'{name}' is declared" if op.has(OpenParams) else f"'{name}' is given"
                self.problems.error(f"{given} twice", loc, remedy="drop one of the two")
                continue
            places[name] = loc
            param = op.definition.params_by_name.get(name)
            try:
                op.attrs[name] = convert_param(param, value) if param is not None else value
            except ValueError:
                op.attrs[name] = value
        return places

    def _results(self, op: Operation, syntax: OpSyntax, scope: _Scope) -> None:
        count = len(syntax.results)
        if syntax.types and len(syntax.types) != count:
            self.problems.error(
                f"'{op.name}' has {counted(count, 'result')} but {len(syntax.types)} types",
                syntax.name.loc,
                remedy="give one type per result, in parentheses if several",
            )
        for value, name in zip(op.results, syntax.results, strict=True):
            self._define(value, name.loc, scope)

    # -- regions -----------------------------------------------------------------------------------

    def _region(self, region: Region, syntax: RegionSyntax, outer: _Scope) -> None:
        scope = _Scope(outer)
        bound = [arg for arg in syntax.args if arg.bound is not None]
        if bound and len(bound) != len(syntax.args):
            loose = next(arg for arg in syntax.args if arg.bound is None)
            self.problems.error(
                f"argument '%{loose.name.text}' has no value",
                loose.name.loc,
                remedy=f"write '%{loose.name.text} = %value'",
            )
        region.returns = syntax.returns
        for arg in syntax.args:
            self._define(region.add_arg(arg.name.text, arg.type, arg.name.loc), arg.name.loc, scope)
        for child in syntax.ops:
            region.append(self.op(child, scope))


def _parameters(definition: OpDef, syntax: OpSyntax) -> Iterator[tuple[str, Attr, FileLoc]]:
    """The parameters in text order, each with its name, value and location.

    A parameter without a name is a flag, the next positional parameter, or declared by the op.
    """
    slots = [p for p in definition.params if p.positional]
    flags = {p.name for p in definition.params if p.kind == "flag"}
    pairs = [(name.text, value, name.loc) for name, value in syntax.named]
    if slots and slots[0].kind in OF_ALL and syntax.positional:
        values = tuple(value for value, _ in syntax.positional)
        return iter([(slots[0].name, values, syntax.positional[0][1]), *pairs])
    for place, (value, loc) in enumerate(syntax.positional):
        bare = value.symbol_name if isinstance(value, Expr) else None
        if bare in flags:
            pairs.append((bare, True, loc))
        elif slots:
            pairs.append((slots.pop(0).name, value, loc))
        elif bare is not None:
            pairs.append((bare, True, loc))
        else:
            pairs.append((str(place) if definition.has(OpenParams) else str(value), value, loc))
    return iter(sorted(pairs, key=lambda item: (item[2].line, item[2].col)))
