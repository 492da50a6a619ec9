"""inline: replaces calls of private functions by their bodies, and makes parameters arguments.

    stg.func @ffn[private] (%x) {
      %w = stg.param : bf16[D, D]
      %y = stg.einsum["bd,de->be"](%x, %w)
      stg.return(%y)
    }
    stg.repeat @layers[count = L] (%h = %x) {   (%layers/h = %x, %layers/ffn/w_i = %layers/ffn/w)
      %a = stg.call @ffn(%h)                      %layers/ffn/y = stg.einsum(...)
      stg.yield(%a)                               stg.yield(%layers/ffn/y)

The name of a value is its path: the repeats and functions around it. A second call or repeat of one
name gets a number, and so does a second parameter. The location of an operation is its place in the
function, under the path of the call. Options are resolved while a function is copied
(`stagec.passes.shapes.options`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count

from stagec.api import (
    Attr,
    DiagnosticError,
    Dim,
    Expr,
    Loc,
    Module,
    NameLoc,
    Operation,
    Pass,
    Region,
    Relation,
    TensorType,
    Type,
    Value,
    error,
    made_by,
    note,
)
from stagec.ir.clone import sized
from stagec.ir.core import NamedAttr
from stagec.ir.infer import same_shape, stated
from stagec.ir.opdef import unregistered
from stagec.ir.options import Choice, choice, declared_options
from stagec.ir.param import attr_text
from stagec.ir.traits import Conditional, Repeats
from stagec.ir_spec.ops.functions import AS, CallOp, ParamOp
from stagec.models import blocks
from stagec.passes.shapes.options import ChosenCopier
from stagec.support.limits import MAX_DEPTH, MAX_OPERATIONS
from stagec.support.source import file_loc
from stagec.support.suggest import did_you_mean
from stagec.text.imports import ImportedFunction, read_blocks


class Inline(Pass):
    """Inline calls of private functions, including those of imported texts.

    Parameters become arguments of the function, with a leading dimension for each repeat around
    them. The name of a value becomes its path.

    Before:
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
        stg.func @f(%x: bf16[B, D], %layers/ffn/w: bf16[L, D, D | param]) {
          %r = stg.repeat @layers[count = L] (%layers/h = %x, %layers/ffn/w_i = %layers/ffn/w) {
            %layers/ffn/y = stg.einsum["bd,de->be"](%layers/h, %layers/ffn/w_i)
            stg.yield(%layers/ffn/y)
          }
          stg.return(%r)
        }
    """

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
    """Inline all calls in the main function, and drop private functions and imports.

    Raises `DiagnosticError` for a call that does not match its function, and as `read_blocks` does.
    """
    blocks = read_blocks(module)
    _Inliner(module, blocks).run()
    for op in list(module.root.body.ops):
        if op.flag("private") or op.definition.declares == "import":
            op.erase()


@dataclass(frozen=True, slots=True)
class _Context:
    """The surroundings of operations: their path, the repeats and calls around them, and the
    symbols to which these calls give values."""

    path: tuple[str, ...] = ()
    repeats: tuple[Operation, ...] = ()
    calls: tuple[str, ...] = ()
    sizes: Mapping[str, Expr] = field(default_factory=dict[str, Expr])

    def named(self, name: str) -> str:
        """A name with its path."""
        return "/".join((*self.path, name))

    def placed(self, loc: Loc) -> Loc:
        """A location in the text, with the path."""
        place = file_loc(loc)
        return loc if place is None else NameLoc("/".join(self.path), place)


class _Inliner:
    def __init__(self, module: Module, blocks: Mapping[str, ImportedFunction]) -> None:
        self._module, self._blocks, self._main = module, blocks, module.main
        self._declared = module.symbols.keys() | (module.mesh.axes if module.mesh else ())
        self._relations = {r for r, _ in module.relations}
        self._scopes: set[tuple[str, ...]] = set()
        self._operations = 0
        self._known: dict[str, set[str]] = {}
        self._nothing = Operation(unregistered("stg.nothing")).add_result("nothing")

    def run(self) -> None:
        self._ops(list(self._main.body.ops), _Context())

    def _scope(self, at: _Context, name: str) -> tuple[str, ...]:
        """A new path for a call or a repeat; each has its own."""
        path = _untaken(name, lambda n: (*at.path, n) in self._scopes)
        self._scopes.add((*at.path, path))
        return (*at.path, path)

    def _ops(self, ops: Iterable[Operation], at: _Context) -> None:
        for op in ops:
            if isinstance(op.definition, CallOp):
                self._open(op, at)
            elif isinstance(op.definition, ParamOp):
                self._hoist(op, at)
            elif op.region is not None:
                self._enter(op, op.region, at)

    def _enter(self, op: Operation, region: Region, at: _Context) -> None:
        around = at.named("")
        if op.symbol:
            at = replace(at, path=self._scope(at, op.symbol))
        for value in (*region.args, *(r for inner in region.ops for r in inner.results)):
            value.name = at.named(value.name.removeprefix(around))
        if op.has(Repeats):
            at = replace(at, repeats=(*at.repeats, op))
        self._ops(list(region.ops), at)

    # -- parameters --------------------------------------------------------------------------------

    def _hoist(self, op: Operation, at: _Context) -> None:
        """Make a parameter an argument of the function, sliced by each repeat around it."""
        type_ = op.result.type
        if not isinstance(type_, TensorType):
            raise op.error(
                f"%{op.result.name} has no type",
                remedy=f"write '%{op.result.name} = stg.param : bf16[...]'",
            )
        counts = tuple(Dim(repeat.expr("count")) for repeat in at.repeats)
        stacked = replace(type_, dims=(*counts, *type_.dims), role=type_.role or "param")
        args = self._main.body.args
        name = _untaken(op.result.name, lambda n: any(arg.name == n for arg in args))
        value = self._main.body.add_arg(name, stacked, op.result.loc)
        for repeat in at.repeats:
            repeat.add_operand(value)
            value = repeat.body.add_arg(f"{name}_i", None, op.result.loc)
        op.result.replace_with(value)
        op.erase()

    # -- calls -------------------------------------------------------------------------------------

    def _open(self, call: Operation, at: _Context) -> None:
        """Replace a call by the operations of its function."""
        name = call.symbol or ""
        block = self._block(call, name, at)
        sizes = {**at.sizes, **self._sizes(call, block, name)}
        options = self._options(call, block, sizes)
        path = self._scope(at, call.text(AS, name))
        inner = replace(at, path=path, calls=(*at.calls, name), sizes=sizes)
        body, region = block.func.body, call.parent
        if region is None:
            raise ValueError("a call stands in a region")
        values = dict(zip(body.args, call.operands, strict=False))
        values |= dict.fromkeys(body.args[len(call.operands) :], self._nothing)
        for arg, given in values.items():
            if given is not self._nothing:
                _settle(given, sized(arg.type, sizes), made_by(f"@{name}", call.loc))
        copier = ChosenCopier(
            values, sizes, inner.named, inner.placed, options, self._nothing, call.loc
        )
        made = [each for op in body.ops[:-1] for each in copier.copies(op)]
        self._count(made, call.loc)
        place = call.position()
        for number, op in enumerate(made):
            region.insert(place + number, op)
        self._check_sizes(call, made, name)
        self._assume(call, block, sizes)
        taken = body.terminator.operands[: len(call.results)]
        returned = [copier.given(v, body.terminator) for v in taken]
        for value, type_ in zip(returned, body.returns, strict=False):
            _settle(value, sized(type_, sizes), made_by(f"@{name}", body.terminator.loc))
        for result, value in zip(call.results, returned, strict=True):
            _settle(value, result.type, result.loc)
            result.replace_with(value)
        call.erase()
        self._ops(made, inner)

    def _count(self, made: Iterable[Operation], loc: Loc) -> None:
        """Count inlined operations. Raises `DiagnosticError` if the module gets too long to be read
        again as a text."""
        self._operations += sum(1 for op in made for _ in op.walk())
        if self._operations > MAX_OPERATIONS:
            raise error(
                f"the functions that are called hold more than {MAX_OPERATIONS:,} operations",
                loc,
                remedy="state what runs several times once, in a stg.repeat",
            )

    def _block(self, call: Operation, name: str, at: _Context) -> ImportedFunction:
        """The function of a call. Raises `DiagnosticError` if the call does not match it."""
        block = self._blocks.get(name)
        if block is None:
            text = f"blocks/{name}.stg"
            ours = f'add stg.import["{text}"]' if text in blocks() else ""
            raise call.error(
                f"no private function @{name}",
                remedy=ours
                or did_you_mean(name, self._blocks, "@")
                or "define it, or import its text",
            )
        if name in at.calls:
            raise call.error(
                f"@{name} calls itself: {' -> '.join((*at.calls, name))}",
                remedy="repeat layers with stg.repeat",
            )
        if len(at.calls) >= MAX_DEPTH:
            raise _too_deep(call.loc)
        body = block.func.body
        takes, gives = len(body.args), len(body.terminator.operands)
        least = takes - block.func.integer("optional", 0)
        fewest = gives - block.func.integer("optional_results", 0)
        for what, given, expected in (
            ("arguments", len(call.operands), range(least, takes + 1)),
            ("results", len(call.results), range(fewest, gives + 1)),
        ):
            if given not in expected:
                counts = " to ".join(map(str, sorted({expected[0], expected[-1]})))
                raise call.error(
                    f"@{name} has {counts} {what}, the call {given}",
                    remedy=f"give it {counts}",
                    notes=[note("it is defined here", block.func.loc)],
                )
        return block

    def _options(
        self, call: Operation, block: ImportedFunction, sizes: Mapping[str, Expr]
    ) -> dict[str, Choice]:
        """The values of the options of a function in a call. Raises `DiagnosticError` for an
        invalid one."""
        chosen: dict[str, Choice] = {}
        for name, option in declared_options(block.func).items():
            given = call.attrs.get(name)
            try:
                chosen[name] = choice(option, given, sizes)
            except ValueError as e:
                text = name if given is True else f"{name} = {attr_text(given or False)}"
                raise call.error(
                    f"@{call.symbol} is called with {text}, but the option is {e}",
                    remedy=f"give it one of these, or leave {name} out",
                    notes=[note("it is declared here", option.loc)],
                ) from None
        return chosen

    def _given(self, call: Operation) -> dict[str, Attr]:
        """The attributes of a call that give values to symbols of its function."""
        block = self._blocks.get(call.symbol or "")
        options = declared_options(block.func) if block is not None else {}
        return {n: v for n, v in call.attrs.items() if n != AS and n not in options}

    def _sizes(self, call: Operation, block: ImportedFunction, name: str) -> dict[str, Expr]:
        """The values that a call gives to symbols. Raises `DiagnosticError` for a symbol that the
        function does not have, and for a value that is not a size."""
        sizes: dict[str, Expr] = {}
        given = self._given(call)
        known = self._symbols_of(block) if given else set[str]()
        for symbol, value in given.items():
            if symbol not in known:
                options = declared_options(block.func)
                raise call.error(
                    f"@{name} has no size {symbol}" + (", and no such option" if options else ""),
                    remedy=did_you_mean(symbol, {*known, *options})
                    or f"its sizes are: {', '.join(sorted(known)) or 'none'}"
                    + (f"; its options are: {', '.join(options)}" if options else ""),
                    notes=[note("it is defined here", block.func.loc)],
                )
            if not isinstance(value, Expr):
                raise call.error(
                    f"size {symbol} of @{name} gets {attr_text(value)}, which is not a size",
                    remedy=f"write '{symbol} = F', '{symbol} = 4*D' or a number",
                )
            sizes[symbol] = value
        return sizes

    def _symbols_of(self, block: ImportedFunction, depth: int = 0) -> set[str]:
        """The symbols of a function, and of functions that it calls without giving them values."""
        name = block.func.symbol or ""
        if name not in self._known:
            if depth >= MAX_DEPTH:
                raise _too_deep(block.func.loc)
            self._known[name] = self._symbols([block.func, *block.func.body.walk()])
            for op in block.func.body.walk():
                called = self._blocks.get(op.symbol or "")
                if isinstance(op.definition, CallOp) and called is not None:
                    self._known[name] |= self._symbols_of(called, depth + 1) - op.attrs.keys()
        return self._known[name]

    def _symbols(self, ops: Iterable[Operation]) -> set[str]:
        """The symbols in the parameters and types of operations."""
        symbols: set[str] = set()
        for op in ops:
            attrs = self._given(op) if isinstance(op.definition, CallOp) else op.attrs
            for value in () if op.has(Conditional) else attrs.values():
                symbols |= _in_attr(value)
            for value in (*op.results, *(op.region.args if op.region is not None else ())):
                if isinstance(value.type, TensorType):
                    symbols |= {s for d in value.type.dims for s in d.size.symbols}
        return symbols

    def _check_sizes(self, call: Operation, made: Sequence[Operation], name: str) -> None:
        missing = sorted(
            self._symbols(inner for op in made for inner in op.walk()) - self._declared
        )
        if missing:
            symbols = ", ".join(missing)
            raise call.error(
                f"@{name} needs {symbols}, which the module does not declare",
                remedy=f"declare it: stg.symbols[{symbols}], or give it a value in the call: "
                f"stg.call @{name}[{missing[0]} = ...]",
            )

    def _assume(self, call: Operation, block: ImportedFunction, sizes: Mapping[str, Expr]) -> None:
        """Add the assumptions of the text of a function, in the sizes of the call."""
        relations = (r.substitute(sizes) for r in block.relations)
        new = [
            r
            for r in relations
            if r.symbols <= self._declared and r not in self._relations and r.left != r.modulus
        ]
        for relation in new:
            if not relation.symbols and not relation.holds({}):
                raise call.error(
                    f"@{call.symbol} expects {relation}", remedy="give other sizes in the call"
                )
        kept = tuple(dict.fromkeys(r for r in new if r.symbols))
        if kept:
            self._relations.update(kept)
            definition = self._module.registry["stg.assume"]
            op = Operation(definition, (), {"relations": kept}, loc=call.loc)
            self._module.root.body.insert(self._main.position(), op)


def _settle(value: Value, type_: Type | None, loc: Loc) -> None:
    """Give a value the type that is stated for it at a location. Raises `DiagnosticError` if it has
    another type already."""
    if not isinstance(type_, TensorType):
        return
    if value.type is None:
        value.type, value.loc = type_.inner, loc
        return
    tensor = value.tensor
    if tensor.dtype != type_.dtype or not same_shape(tensor.shape, type_.shape):
        raise error(
            f"%{value.name} is {tensor.unplaced()}, but {stated(loc)} {type_.unplaced()}",
            loc,
            remedy="take another value, or give the call other sizes in brackets",
            notes=[note(f"%{value.name} is defined here", value.loc)],
        )


def _too_deep(loc: Loc) -> DiagnosticError:
    return error(
        f"calls are nested more than {MAX_DEPTH} deep", loc, remedy="call these functions directly"
    )


def _untaken(name: str, taken: Callable[[str], bool]) -> str:
    """The name, with a number if it is taken."""
    return next(n for n in chain([name], (f"{name}_{i}" for i in count(2))) if not taken(n))


def _in_attr(value: Attr) -> set[str]:
    if isinstance(value, Expr | Relation):
        return set(value.symbols)
    if isinstance(value, NamedAttr):
        return _in_attr(value.value)
    if isinstance(value, tuple):
        return {s for item in value for s in _in_attr(item)}
    return set()
