"""Checks that hold in every phase: structure, visibility of values, symbols, types, assumptions.

`check_module` collects everything it finds; what depends on the phase is added by
`stagec.pipeline.verify`.
"""

from collections.abc import Collection, Iterator, Mapping

from stagec.ir.core import Attr, NamedAttr, NotATensorError, Operation, Region, Value
from stagec.ir.expr import Expr, evaluate
from stagec.ir.factor_sizes import integral_factors
from stagec.ir.facts import Relation
from stagec.ir.infer import describe, infer_op, misfit
from stagec.ir.module import Module
from stagec.ir.opdef import UnregisteredOp
from stagec.ir.param import AXES, DIMS, STATICS
from stagec.ir.queries import IsWhole, ask
from stagec.ir.rule import RuleSyntaxError
from stagec.ir.serving_step import MIXED
from stagec.ir.signature import check_signature
from stagec.ir.traits import CopiesMemory, Free, Lowered, OpenParams
from stagec.ir.types import TensorType, index_name
from stagec.ir.verified import VerifiedCache
from stagec.ir.verify_lifetimes import check_lifetimes
from stagec.ir.verify_options import check_options
from stagec.ir.verify_order import check_orders
from stagec.ir.verify_structure import check_structure
from stagec.ir.verify_types import TypeChecker
from stagec.support.diagnostics import DiagnosticError, DiagnosticList, NotAnIntegerError
from stagec.support.source import Loc
from stagec.support.suggest import did_you_mean


def verify_module(module: Module, *, typed: bool = False) -> None:
    """Check a module.

    With `typed`, every value must have a type, and the types must follow from each other. Raises
    `DiagnosticError` with every error.
    """
    problems, verified = DiagnosticList(), VerifiedCache()
    verified.start(module)
    check_module(module, problems, typed=typed, verified=verified)
    problems.check()


def check_module(
    module: Module, problems: DiagnosticList, *, typed: bool, verified: VerifiedCache
) -> None:
    """Append all errors of the module, in text order.

    Sizes come first: with one that is not positive, nothing else can be computed. Operations that
    are `verified` are not checked again.
    """
    declared = DiagnosticList()
    for op in module.declaring("symbols", "axes"):
        if check_signature(op, declared):
            _check_definition(op, declared)
    problems.add(*declared.items)
    if not declared.errors:
        _Checker(module, problems, typed, verified).run()


class _Checker:
    def __init__(
        self, module: Module, problems: DiagnosticList, typed: bool, verified: VerifiedCache
    ) -> None:
        self._module, self._problems, self._typed = module, problems, typed
        self._verified, self._check = verified, "typed" if typed else "untyped"
        mesh = module.mesh
        self._axes = frozenset(mesh.axes if mesh else ())
        indices = {index_name(a) for a in self._axes} if module.phase == "lowered" else set[str]()
        loads = {name for load in module.loads for name in load.names}
        self._declared = frozenset(module.symbols) | self._axes | indices | loads
        self._env = module.env
        self._types = TypeChecker(module, problems, verified.facts)
        self._visible: set[Value] = set()
        self._disordered: frozenset[Operation] = frozenset()

    def run(self) -> None:
        """Run all checks that the state of the module allows."""
        self._relations()
        self._disordered = check_structure(self._module, self._problems, self._verified)
        self._op(self._module.root)
        check_options(self._module, self._problems)
        if not self._problems.errors:
            check_orders(self._module, self._problems)
            check_lifetimes(self._module, self._problems)
        if self._typed and not self._problems.errors:
            for func in self._module.functions:
                for op in func.region.ops if func.region else ():
                    infer_op(op, self._problems, self._verified)

    # -- operations ----------------------------------------------------------------------------

    def _region(self, region: Region) -> bool:
        """Check a region. Returns whether it is valid for the definition of its owner."""
        outer = set(self._visible)
        for value in region.args:
            self._value(region.owner, value)
        for type_ in region.returns:
            if isinstance(type_, TensorType):
                self._symbols_of_type(type_, region.owner.loc)
                self._types.check(type_, region.owner, None, region.owner.loc)
        valid = [self._op(op) for op in region.ops]
        if self._typed and region.ops:
            self._returned(region)
        self._visible = outer
        return all(valid) and region.owner not in self._disordered

    def _returned(self, region: Region) -> None:
        """Check that returned values have the declared ranks and element types.

        Sizes may differ: a function may return one microbatch of a value.
        """
        for value, declared in zip(region.terminator.operands, region.returns, strict=False):
            stated = value.type
            if not isinstance(stated, TensorType) or not isinstance(declared, TensorType):
                continue
            if (stated.dtype, stated.rank) != (declared.dtype, declared.rank):
                self._problems.error(
                    f"%{value.name} is returned as {stated}, but declared as {declared}",
                    region.terminator.loc,
                    remedy="correct the type behind '->', or return another value",
                )

    def _op(self, op: Operation) -> bool:
        """Check an operation. Returns whether its signature, and those in its region, are valid.

        Only then does the definition verify it, since it reads parameters and regions without
        checking that they exist.
        """
        if self._verified.knows(op, self._check) and self._visible.issuperset(
            self._verified.uses(op)
        ):
            self._visible.update(op.results)
            return True
        before = len(self._problems.items)
        for value in op.operands:
            if value not in self._visible:
                self._problems.error(
                    f"'{op.name}' uses %{value.name}, which is not visible here",
                    op.loc,
                    remedy="define it before its use, in this region or around it",
                )
        valid = check_signature(op, self._problems)
        if self._typed and not isinstance(op.definition, UnregisteredOp):
            self._tensors(op)
        for name, attr in op.attrs.items():
            self._attr(op, name, attr)
        if op.region is not None:
            valid &= self._region(op.region)
        for value in op.results:
            self._value(op, value)
        foreign = isinstance(op.definition, UnregisteredOp)
        if valid and not foreign and STATICS not in op.attrs and _has_types(op):
            _check_definition(op, self._problems)
            self._memory(op)
            self._factors(op)
        if len(self._problems.items) == before:
            self._verified.passed(op, self._check)
        return valid

    def _tensors(self, op: Operation) -> None:
        args = op.region.args if op.region is not None else ()
        for value in (*op.operands, *op.results, *args):
            producer = value.producer
            foreign = producer is not None and isinstance(producer.definition, UnregisteredOp)
            if isinstance(value.type, TensorType) or (value.type is None and not foreign):
                continue  # a missing type is reported where the value is made
            if not op.has(Lowered):
                self._problems.error(
                    f"'{op.name}' works on tensors, but %{value.name} is not a tensor",
                    value.loc if value in op.results or value in args else op.loc,
                    remedy=f"write its type, such as '%{value.name}: bf16[B, S]'",
                )

    def _factors(self, op: Operation) -> None:
        """Check that integral factors are integers for known sizes."""
        try:
            sizes = integral_factors(op)
        except (DiagnosticError, RuleSyntaxError, NotATensorError, LookupError, ValueError):
            return  # the definition or inference reports it
        for factor, size in sizes.items():
            if not size.symbols <= self._env.keys():
                continue
            if ask(IsWhole(size), self._env):
                continue
            try:
                evaluate(size, self._env)
            except NotAnIntegerError as e:
                self._problems.error(
                    f"'{op.name}' needs a whole number for factor '{factor}': {e}",
                    op.loc,
                    remedy="change one of the values",
                )

    def _memory(self, op: Operation) -> None:
        """Check that computations use values on the device only."""
        for value in () if op.has(Free) or op.has(CopiesMemory) else op.operands:
            if isinstance(value.type, TensorType) and value.type.memory != "device":
                self._problems.error(
                    f"'{op.name}' works on the device, but %{value.name} is in {value.type.memory} "
                    f"memory: {value.type}",
                    op.loc,
                    remedy="copy it there: stg.copy[to = device]",
                )

    def _value(self, op: Operation, value: Value) -> None:
        self._visible.add(value)
        if isinstance(value.type, TensorType):
            if self._verified.knows_type(value.type):
                return
            before = len(self._problems.items)
            self._symbols_of_type(value.type, value.loc)
            self._types.check(value.type, op, value, value.loc)
            if len(self._problems.items) == before:
                self._verified.passed_type(value.type)
        elif value.type is None and self._typed and not isinstance(op.definition, UnregisteredOp):
            self._problems.error(
                f"%{value.name} has no type, but the module is {self._module.phase}",
                value.loc,
                remedy="write its type, or say phase = parsed and run 'infer-shapes'",
            )

    # -- symbols -------------------------------------------------------------------------------

    def _symbols_of_type(self, type_: TensorType, loc: Loc) -> None:
        for dim in type_.dims:
            self._declared_symbols(dim.size.symbols, loc)
            if dim.routed is not None:
                self._declared_symbols(dim.routed.of.symbols | dim.routed.k.symbols, loc)
            if dim.load is not None:
                self._declared_symbols(frozenset({dim.load.of}), loc)
        for axis in type_.axes:
            self._axis(axis, loc)
        if type_.stage is not None:
            self._axis(type_.stage[0], loc)

    def _attr(self, op: Operation, name: str, attr: Attr) -> None:
        if isinstance(attr, (Expr, Relation)):
            if self._may_be_word(op, attr):
                return
            self._declared_symbols(attr.symbols, op.loc)
        elif isinstance(attr, NamedAttr):
            self._attr(op, name, attr.value)
        elif isinstance(attr, tuple):
            for item in attr:
                self._attr(op, name, item)
        elif isinstance(attr, str):
            param = op.definition.params_by_name.get(name)
            if param is not None and param.kind in AXES:
                self._axis(attr, op.loc)
            elif param is not None and param.kind in DIMS:
                self._dimension(attr, op.loc)

    def _may_be_word(self, op: Operation, attr: Expr | Relation) -> bool:
        """Whether a name need not be a symbol: in any size of an op without a definition, and as a
        single name where the op accepts words."""
        if isinstance(op.definition, UnregisteredOp):
            return isinstance(attr, Expr)
        params = op.definition.trait(OpenParams)
        words = params is not None and params.words
        return words and isinstance(attr, Expr) and attr.symbol_name is not None

    def _declared_symbols(self, names: frozenset[str], loc: Loc) -> None:
        for name in () if names <= self._declared else sorted(names - self._declared):
            self._problems.error(
                f"'{name}' is neither a declared symbol nor a mesh axis",
                loc,
                remedy=did_you_mean(name, self._declared) or f"declare it: stg.symbols[{name}]",
            )

    def _dimension(self, name: str, loc: Loc) -> None:
        self._expect("the model has no dimension", name, self._module.symbols, "symbols", loc)

    def _axis(self, name: str, loc: Loc) -> None:
        self._expect("the mesh has no axis", name, sorted(self._axes), "axes", loc)

    def _expect(self, lacks: str, name: str, known: Collection[str], what: str, loc: Loc) -> None:
        """Report a name that is not known."""
        if name not in known:
            names = f"its {what} are: {', '.join(known) or 'none'}"
            remedy = did_you_mean(name, known) or names
            self._problems.error(f"{lacks} '{name}'", loc, remedy=remedy)

    # -- assumptions ---------------------------------------------------------------------------

    def _relations(self) -> None:
        mixed = self._module.serving == MIXED
        for relation, op in self._module.relations:
            known = relation.symbols and relation.symbols <= self._env.keys()
            if not known or (mixed and self._module.limits_length(relation)):
                continue
            problem = broken(relation, self._env)
            if problem:
                self._problems.error(
                    problem, op.loc, remedy="change one of the values, or drop the assumption"
                )


def _check_definition(op: Operation, problems: DiagnosticList) -> None:
    """Append the errors that the definition of an operation with a valid signature reports."""
    try:
        for message in op.definition.verify(op):
            problems.error(f"'{op.name}' {message}", op.loc, remedy=describe(op))
    except DiagnosticError as e:
        problems.add(*e.diagnostics)
    except (RuleSyntaxError, NotATensorError, IndexError, KeyError, ValueError) as e:
        problems.add(misfit(op, e))


def broken(relation: Relation, env: Mapping[str, int]) -> str | None:
    """Why a relation does not hold for these values of all its symbols; None if it does."""
    try:
        if relation.holds(env):
            return None
    except (ArithmeticError, NotAnIntegerError):
        pass  # the text below says which
    values = ", ".join(f"{name} = {env[name]}" for name in sorted(relation.symbols))
    try:
        left = evaluate(relation.left, env)
        if relation.modulus is not None:
            left %= evaluate(relation.modulus, env)
        return f"the assumption {relation} does not hold for {values}: the left side is {left}"
    except NotAnIntegerError as e:
        return f"the assumption {relation} does not hold for {values}: {e}"
    except ZeroDivisionError:
        return f"the assumption {relation} divides by zero for {values}"


def _has_types(op: Operation) -> bool:
    values = (*op.operands, *op.results, *_inner_values(op.region))
    rule_op = not op.has(Lowered)
    return all(isinstance(v.type, TensorType) if rule_op else v.type is not None for v in values)


def _inner_values(region: Region | None) -> Iterator[Value]:
    if region is not None:
        yield from region.args
        yield from region.ops[-1].operands if region.ops else ()
