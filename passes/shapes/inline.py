"""inline: opens calls of private functions, and makes parameters arguments of the function.

    stg.func @ffn[private] (%x) {
      %w = stg.param : bf16[D, D]
      %y = stg.einsum["bd,de->be"](%x, %w)
      stg.return(%y)
    }
    stg.func @train (%x: bf16[B, D]) {                 @train (%x: ..., %layers/ffn/w: bf16[L, D, D | param])
      %r = stg.repeat @layers[count = L] (%h = %x) {     (%layers/h = %x, %layers/ffn/w_i = %layers/ffn/w)
        %a = stg.call @ffn(%h)                             %layers/ffn/y = stg.einsum(%layers/h, %layers/ffn/w_i)
        stg.yield(%a)                                      stg.yield(%layers/ffn/y)

A value is named by its path: the repeats and functions around it. The location of an operation is
its place in the function, under the path of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stagec.api import Expr, Module, Operation, Pass, Region, TensorType, Value, error
from stagec.ir.core import Attr, substitute_attr
from stagec.ir.facts import Relation
from stagec.ir.traits import Repeats
from stagec.ir.types import Dim, Type
from stagec.ir_spec.ops.functions import AS, CallOp, ParamOp
from stagec.support.diagnostics import note
from stagec.support.source import Loc, NameLoc, file_loc
from stagec.support.suggest import did_you_mean
from stagec.text.imports import Block, read_blocks


@dataclass(frozen=True)
class Inline(Pass):
    """Open calls of private functions, those of imported texts included.

    Parameters become arguments of the function, with a leading dimension for each repeat around
    them. Values are named by their path.

    Before:
        stg.symbols[B, D, L]
        stg.func @ffn[private] (%x) {
          %w = stg.param : bf16[D, D]
          %y = stg.einsum["bd,de->be"](%x, %w)
          stg.return(%y)
        }
        stg.func @f(%x: bf16[B, D]) {
          %r = stg.repeat @layers[count = L] (%h = %x) {
            %a = stg.call @ffn(%h)
            stg.yield(%a)
          }
          stg.return(%r)
        }
    After:
        stg.symbols[B, D, L]
        stg.func @f(%x: bf16[B, D], %layers/ffn/w: bf16[L, D, D | param]) {
          %r = stg.repeat @layers[count = L] (%layers/h = %x, %layers/ffn/w_i = %layers/ffn/w) {
            %layers/ffn/y = stg.einsum["bd,de->be"](%layers/h, %layers/ffn/w_i)
            stg.yield(%layers/ffn/y)
          }
          stg.return(%r)
        }
    """

    name = "inline"

    def applies(self, module: Module) -> bool:
        opened = (ParamOp, CallOp)
        return any(
            op.definition.declares == "import"
            or op.flag("private")
            or isinstance(op.definition, opened)
            for op in module.walk()
        )

    def run(self, module: Module) -> None:
        inline(module)


def inline(module: Module) -> None:
    """Open all calls in the main function, and drop private functions and imports.

    Raises `DiagnosticError` for a call that does not fit its function, and as `read_blocks` does.
    """
    blocks = read_blocks(module)
    _Inliner(module, blocks).run()
    for op in list(module.root.body.ops):
        if op.flag("private") or op.definition.declares == "import":
            op.erase()


@dataclass(frozen=True, slots=True)
class _Context:
    """Where operations stand: their path, the repeats around them, and the calls on the way."""

    path: tuple[str, ...] = ()
    repeats: tuple[Operation, ...] = ()
    calls: tuple[str, ...] = ()

    def named(self, name: str) -> str:
        """A name with its path."""
        return "/".join((*self.path, name))


class _Inliner:
    def __init__(self, module: Module, blocks: Mapping[str, Block]) -> None:
        self._module, self._blocks, self._main = module, blocks, module.main
        self._declared = module.symbols.keys()
        self._relations = {r for r, _ in module.relations}

    def run(self) -> None:
        self._ops(list(self._main.body.ops), _Context())

    def _ops(self, ops: Iterable[Operation], at: _Context) -> None:
        for op in ops:
            if isinstance(op.definition, CallOp):
                self._open(op, at)
            elif isinstance(op.definition, ParamOp):
                self._hoist(op, at)
            elif op.region is not None:
                self._enter(op, op.region, at)

    def _enter(self, op: Operation, region: Region, at: _Context) -> None:
        if op.symbol:
            at = replace(at, path=(*at.path, op.symbol))
        for value in (*region.args, *(r for inner in region.ops for r in inner.results)):
            value.name = at.named(value.name.rpartition("/")[2])
        if op.has(Repeats):
            at = replace(at, repeats=(*at.repeats, op))
        self._ops(list(region.ops), at)

    # -- parameters --------------------------------------------------------------------------------

    def _hoist(self, op: Operation, at: _Context) -> None:
        """An argument of the function, sliced by each repeat around."""
        type_ = op.result.type
        if not isinstance(type_, TensorType):
            raise error(
                f"%{op.result.name} has no type",
                op.loc,
                remedy=f"write '%{op.result.name} = stg.param : bf16[...]'",
            )
        counts = tuple(Dim(repeat.expr("count")) for repeat in at.repeats)
        stacked = replace(type_, dims=(*counts, *type_.dims), role=type_.role or "param")
        value = self._main.body.add_arg(op.result.name, stacked, op.result.loc)
        for repeat in at.repeats:
            repeat.add_operand(value)
            value = repeat.body.add_arg(f"{op.result.name}_i", None, op.result.loc)
        op.result.replace_with(value)
        op.erase()

    # -- calls -------------------------------------------------------------------------------------

    def _open(self, call: Operation, at: _Context) -> None:
        """Put the operations of a function in the place of its call."""
        name = call.symbol or ""
        block = self._block(call, name, at)
        sizes = self._sizes(call, block, name)
        inner = replace(at, path=(*at.path, call.text(AS, name)), calls=(*at.calls, name))
        body, region = block.func.body, call.parent
        if region is None:
            raise ValueError("a call stands in a region")
        values = dict(zip(body.args, call.operands, strict=True))
        for arg, given in values.items():
            _settle(given, arg.type, sizes)
        copier = _Copier(values, sizes, inner)
        made = [copier.copy(op) for op in body.ops[:-1]]
        place = call.position()
        for number, op in enumerate(made):
            region.insert(place + number, op)
        self._check_sizes(call, made, name)
        self._assume(call, block, sizes)
        found = [copier.values[v] for v in body.terminator.operands]
        for value, type_ in zip(found, body.returns, strict=False):
            _settle(value, type_, sizes)
        for result, value in zip(call.results, found, strict=True):
            result.replace_with(value)
        call.erase()
        self._ops(made, inner)

    def _block(self, call: Operation, name: str, at: _Context) -> Block:
        """The function that is called. Raises `DiagnosticError` if the call does not fit it."""
        block = self._blocks.get(name)
        if block is None:
            raise error(
                f"there is no private function @{name}",
                call.loc,
                remedy=did_you_mean(name, self._blocks, "@") or "define it, or import its text",
            )
        if name in at.calls:
            raise error(
                f"@{name} calls itself: {' -> '.join((*at.calls, name))}",
                call.loc,
                remedy="repeat layers with stg.repeat",
            )
        body = block.func.body
        takes, gives = len(body.args), len(body.terminator.operands)
        for what, found, expected in (
            ("arguments", len(call.operands), takes),
            ("results", len(call.results), gives),
        ):
            if found != expected:
                raise error(
                    f"@{name} has {expected} {what}, the call {found}",
                    call.loc,
                    remedy=f"give it {expected}",
                    notes=[note("it is defined here", block.func.loc)],
                )
        return block

    def _sizes(self, call: Operation, block: Block, name: str) -> dict[str, Expr]:
        """The values that a call gives symbols. Raises `DiagnosticError` for one that the function
        does not have."""
        sizes = {k: v for k, v in call.attrs.items() if k != AS and isinstance(v, Expr)}
        known = _symbols(block.func.body.walk()) | _symbols([block.func])
        for symbol in sizes:
            if symbol not in known:
                raise error(
                    f"@{name} has no size {symbol}",
                    call.loc,
                    remedy=did_you_mean(symbol, known) or f"its sizes are: {', '.join(sorted(known))}",
                )
        return sizes

    def _check_sizes(self, call: Operation, made: Sequence[Operation], name: str) -> None:
        inside = (o for op in made for o in (op, *(op.region.walk() if op.region else ())))
        missing = sorted(_symbols(inside) - self._declared)
        if missing:
            listed = ", ".join(missing)
            raise error(
                f"@{name} needs {listed}, which the module does not declare",
                call.loc,
                remedy=f"declare it: stg.symbols[{listed}], or give it a value in the call: "
                f"stg.call @{name}[{missing[0]} = ...]",
            )

    def _assume(self, call: Operation, block: Block, sizes: Mapping[str, Expr]) -> None:
        """Keep what the text of a function states, in the sizes of the call."""
        found = (r.substitute(sizes) for r in block.relations)
        new = [r for r in found if r.symbols <= self._declared and r not in self._relations]
        for relation in new:
            if not relation.symbols and not relation.holds({}):
                raise error(
                    f"@{call.symbol} expects {relation}", call.loc, remedy="give other sizes"
                )
        kept = tuple(dict.fromkeys(r for r in new if r.symbols))
        if kept:
            self._relations.update(kept)
            definition = self._module.registry["stg.assume"]
            op = Operation(definition, (), {"relations": kept}, loc=call.loc)
            self._module.root.body.insert(self._main.position(), op)


class _Copier:
    """Copies operations of a function: other values, sizes and names."""

    def __init__(
        self, values: dict[Value, Value], sizes: Mapping[str, Expr], at: _Context
    ) -> None:
        self.values, self._sizes, self._at = values, sizes, at

    def copy(self, op: Operation) -> Operation:
        """A copy that stands nowhere yet."""
        attrs: dict[str, Attr] = {k: substitute_attr(v, self._sizes) for k, v in op.attrs.items()}
        operands = [self.values.get(v, v) for v in op.operands]
        new = Operation(op.definition, operands, attrs, symbol=op.symbol, loc=self._loc(op.loc))
        if op.region is not None:
            inner = new.make_region()
            for arg in op.region.args:
                self.values[arg] = inner.add_arg(
                    self._at.named(arg.name), self._type(arg.type), arg.loc
                )
            for child in op.region.ops:
                inner.append(self.copy(child))
        for result in op.results:
            self.values[result] = new.add_result(
                self._at.named(result.name), self._type(result.type), result.loc
            )
        return new

    def _type(self, type_: Type | None) -> Type | None:
        return type_.substitute(self._sizes) if isinstance(type_, TensorType) else type_

    def _loc(self, loc: Loc) -> Loc:
        place = file_loc(loc)
        return loc if place is None else NameLoc("/".join(self._at.path), place)


def _settle(value: Value, type_: Type | None, sizes: Mapping[str, Expr]) -> None:
    """A value has the type that a function states for it; shape inference compares."""
    if value.type is None and isinstance(type_, TensorType):
        value.type = type_.substitute(sizes).inner


def _symbols(ops: Iterable[Operation]) -> set[str]:
    """The symbols in the parameters and types of operations."""
    found: set[str] = set()
    for op in ops:
        for name, value in op.attrs.items():
            if not (isinstance(op.definition, CallOp) and name == AS):
                found |= _in_attr(value)
        values = (*op.results, *(op.region.args if op.region is not None else ()))
        for value in values:
            if isinstance(value.type, TensorType):
                found |= {s for d in value.type.dims for s in d.size.symbols}
    return found


def _in_attr(value: Attr) -> set[str]:
    if isinstance(value, Expr | Relation):
        return set(value.symbols)
    if isinstance(value, tuple):
        return {s for item in value for s in _in_attr(item)}
    return set()
