"""Syntax to IR: resolves names and ops, checks signatures, reports every error it finds.

`parse_module` is the entry: text in, module out, or one `DiagnosticError` with all errors.
"""

from __future__ import annotations

from stagec.ir.core import Attr, Operation, Region, Value
from stagec.ir.expr import Expr
from stagec.ir.module import Module
from stagec.ir.opdef import OpDef, Param, Registry, UnregisteredOp, convert_param, unregistered
from stagec.support.diagnostics import DiagnosticList, error, note
from stagec.support.source import FileLoc, Source
from stagec.support.suggest import did_you_mean
from stagec.text.ast import ArgSyntax, Name, OpSyntax, RegionSyntax
from stagec.text.parser import parse_syntax


def parse_module(source: Source, registry: Registry, *, allow_unregistered: bool = False) -> Module:
    """The module that the text states.

    Raises `DiagnosticError` with every error of names, ops, parameters and signatures.
    """
    root = parse_op(source, registry, allow_unregistered=allow_unregistered)
    if root.name != "stg.module":
        raise error(
            f"expected 'stg.module' around everything, found '{root.name}'",
            root.loc,
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
        found = self.values.get(name)
        return found if found is not None or self.outer is None else self.outer.find(name)

    def names(self) -> set[str]:
        return set(self.values) | (self.outer.names() if self.outer else set[str]())


class _Resolver:
    def __init__(self, registry: Registry, allow_unregistered: bool) -> None:
        self._registry = registry
        self._allow_unregistered = allow_unregistered
        self.problems = DiagnosticList()

    def op(self, syntax: OpSyntax, scope: _Scope) -> Operation:
        definition = self._definition(syntax.name)
        operands = self._operands(syntax, scope)
        op = Operation(
            definition,
            operands,
            self._attrs(definition, syntax),
            loc=syntax.loc,
            symbol=syntax.symbol.text if syntax.symbol else None,
        )
        self._check_signature(definition, syntax, len(operands))
        if syntax.region is not None:
            self._region(op, syntax.region, scope)
        elif definition.has_region:
            op.make_region()
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
        found = scope.find(name.text)
        if found is not None:
            return found
        self.problems.error(
            f"use of undefined value '%{name.text}'",
            name.loc,
            remedy=did_you_mean(name.text, scope.names(), "%") or "define it before its use",
        )
        return Value(name.text, None, Region(Operation(unregistered("stg.undefined"))), 0, name.loc)

    def _define(self, value: Value, loc: FileLoc, scope: _Scope) -> None:
        earlier = scope.find(value.name)
        if earlier is not None:
            self.problems.error(
                f"redefinition of '%{value.name}'",
                loc,
                remedy="give it another name",
                notes=[note("it is defined here first", earlier.loc)],
            )
        scope.values[value.name] = value

    # -- parameters --------------------------------------------------------------------------------

    def _attrs(self, definition: OpDef, syntax: OpSyntax) -> dict[str, Attr]:
        known = definition.params_by_name()
        attrs: dict[str, Attr] = {}
        self._positional(definition, syntax, attrs)
        for name, value in syntax.named:
            if name.text in attrs:
                self.problems.error(
                    f"parameter '{name.text}' is given twice", name.loc, remedy="drop one"
                )
            elif definition.open_params and name.text not in known:
                attrs[name.text] = value
            elif name.text not in known:
                self.problems.error(
                    f"'{definition.name}' has no parameter '{name.text}'",
                    name.loc,
                    remedy=did_you_mean(name.text, known) or _list_params(definition),
                )
            else:
                self._convert(known[name.text], value, name.loc, attrs)
        if definition.open_params:
            attrs = _in_text_order(attrs, syntax)
        for param in definition.params:
            if param.required and param.name not in attrs and not _reported(self.problems, syntax):
                self.problems.error(
                    f"'{definition.name}' expects parameter '{param.name}': {param.doc}",
                    syntax.name.loc,
                    remedy=_list_params(definition),
                )
        return attrs

    def _positional(self, definition: OpDef, syntax: OpSyntax, attrs: dict[str, Attr]) -> None:
        slots = [p for p in definition.params if p.positional]
        flags = {p.name: p for p in definition.params if p.kind == "flag"}
        for value, loc in syntax.positional:
            bare = value.symbol_name if isinstance(value, Expr) else None
            if slots and slots[0].kind == "relations":
                attrs[slots[0].name] = tuple(v for v, _ in syntax.positional)
                self._convert(slots[0], attrs[slots[0].name], loc, attrs)
                return
            if bare in flags:
                attrs[bare] = True
            elif slots:
                self._convert(slots.pop(0), value, loc, attrs)
            elif definition.open_params:
                if bare in attrs:
                    self.problems.error(f"'{bare}' is declared twice", loc, remedy="drop one")
                attrs[bare or str(len(attrs))] = True if bare else value
            else:
                self.problems.error(
                    f"'{definition.name}' takes no such parameter: {value}",
                    loc,
                    remedy=did_you_mean(str(bare), flags) or _list_params(definition),
                )

    def _convert(self, param: Param, value: Attr, loc: FileLoc, attrs: dict[str, Attr]) -> None:
        try:
            attrs[param.name] = convert_param(param, value)
        except ValueError as e:
            self.problems.error(str(e), loc, remedy=param.doc or None)

    # -- signature ---------------------------------------------------------------------------------

    def _check_signature(self, definition: OpDef, syntax: OpSyntax, operands: int) -> None:
        if isinstance(definition, UnregisteredOp):
            return
        expected = len(definition.operands)
        names = ", ".join(definition.operands) or "none"
        if definition.variadic:
            if operands < expected - 1:
                self.problems.error(
                    f"'{definition.name}' expects at least {expected - 1} operands, found "
                    f"{operands}",
                    syntax.name.loc,
                    remedy=f"its operands are: {names}",
                )
        elif operands != expected:
            self.problems.error(
                f"'{definition.name}' expects {_count(expected, 'operand')}, found {operands}",
                syntax.name.loc,
                remedy=f"its operands are: {names}",
            )
        if syntax.region and not definition.has_region:
            self.problems.error(
                f"'{definition.name}' takes no region", syntax.name.loc, remedy="remove '{ ... }'"
            )
        if definition.symbol == "required" and syntax.symbol is None:
            self.problems.error(
                f"'{definition.name}' expects a name such as @main",
                syntax.name.loc,
                remedy=f"write '{definition.name} @name'",
            )

    def _results(self, op: Operation, syntax: OpSyntax, scope: _Scope) -> None:
        count = len(syntax.results)
        if syntax.types and len(syntax.types) != count:
            self.problems.error(
                f"'{op.name}' has {_count(count, 'result')} but {len(syntax.types)} types",
                syntax.name.loc,
                remedy="give one type per result, in parentheses if several",
            )
        self._check_result_count(op, syntax)
        for i, name in enumerate(syntax.results):
            value = op.add_result(
                name.text, syntax.types[i] if i < len(syntax.types) else None, name.loc
            )
            self._define(value, name.loc, scope)

    def _check_result_count(self, op: Operation, syntax: OpSyntax) -> None:
        definition, count = op.definition, len(syntax.results)
        if (
            definition.has_region
            or definition.variadic_results
            or isinstance(definition, UnregisteredOp)
        ):
            return
        most = len(definition.results)
        least = most if definition.required_results is None else definition.required_results
        if not least <= count <= most:
            expected = _count(most, "result") if least == most else f"{least} to {most} results"
            self.problems.error(
                f"'{op.name}' has {expected}, found {count} names",
                syntax.name.loc,
                remedy=f"its results are: {', '.join(definition.results) or 'none'}",
            )

    # -- regions -----------------------------------------------------------------------------------

    def _region(self, op: Operation, syntax: RegionSyntax, outer: _Scope) -> None:
        region, scope = op.make_region(), _Scope(outer)
        bound = [arg for arg in syntax.args if arg.bound is not None]
        if bound and len(bound) != len(syntax.args):
            loose = next(arg for arg in syntax.args if arg.bound is None)
            self.problems.error(
                f"argument '%{loose.name.text}' is bound to nothing",
                loose.name.loc,
                remedy=f"write '%{loose.name.text} = %value'",
            )
        region.returns = syntax.returns
        for arg in syntax.args:
            self._arg(region, arg, scope)
        for child in syntax.ops:
            region.append(self.op(child, scope))

    def _arg(self, region: Region, arg: ArgSyntax, scope: _Scope) -> None:
        value = region.add_arg(arg.name.text, arg.type, arg.name.loc)
        self._define(value, arg.name.loc, scope)


def _in_text_order(attrs: dict[str, Attr], syntax: OpSyntax) -> dict[str, Attr]:
    """Declarations keep the order in which they are written, with and without values."""
    places = {name.text: name.loc for name, _ in syntax.named}
    places |= {str(value): loc for value, loc in syntax.positional}
    nameless = [
        loc
        for value, loc in syntax.positional
        if not isinstance(value, Expr) or value.symbol_name is None
    ]
    places |= dict(zip((name for name in attrs if name.isdigit()), nameless, strict=False))
    last = syntax.name.loc
    return dict(
        sorted(
            attrs.items(),
            key=lambda kv: (places.get(kv[0], last).line, places.get(kv[0], last).col),
        )
    )


def _reported(problems: DiagnosticList, syntax: OpSyntax) -> bool:
    """Whether something in the brackets of this op is wrong already (one message is enough)."""
    places = [loc for _, loc in syntax.positional] + [name.loc for name, _ in syntax.named]
    return any(item.loc in places for item in problems.items)


def _list_params(definition: OpDef) -> str:
    names = [p.name for p in definition.params]
    return f"its parameters are: {', '.join(names)}" if names else "it takes no parameters"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
