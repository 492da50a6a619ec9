"""Checks of single types: positive sizes, axes used once, and splits that are known to divide."""

from collections.abc import Iterable

from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, evaluate, numerator_and_denominator
from stagec.ir.facts import Facts, divisible
from stagec.ir.module import Module
from stagec.ir.queries import Divides, ask
from stagec.ir.rule import Rule
from stagec.ir.types import Dim, TensorType, axis_size
from stagec.support.diagnostics import (
    Diagnostic,
    DiagnosticError,
    DiagnosticList,
    NotAnIntegerError,
    note,
)
from stagec.support.source import Loc


class TypeChecker:
    """Checks types against the facts of one module; the same dimension is reported once."""

    def __init__(self, module: Module, problems: DiagnosticList, facts: Facts) -> None:
        self._problems = problems
        self._facts = facts
        self._env = module.env
        self._declared = frozenset(module.symbols).union(module.mesh.axes if module.mesh else ())
        self._seen: set[tuple[Expr, tuple[str, ...]]] = set()

    def check(self, type_: TensorType, op: Operation, value: Value | None, loc: Loc) -> None:
        """Append errors of the type of a value (None: a declared result of a function)."""
        for d in type_.dims:
            if not d.size.symbols and (d.size.value is None or d.size.value <= 0):
                self._problems.error(
                    f"a dimension must be a positive integer, found {d.size} in {type_}",
                    loc,
                    remedy="drop the dimension, or give it a size of 1 or more",
                )
            elif d.split and len(set(d.axes)) == len(d.axes):
                self._check_split(d, loc)
        axes = type_.axes
        if len(set(axes)) == len(axes):
            return
        for axis in dict.fromkeys(a for a in axes if axes.count(a) > 1):
            self._problems.add(_used_twice(axis, type_, op, value, loc))

    def _check_split(self, dim: Dim, loc: Loc) -> None:
        key = (dim.size, dim.axes)
        if key in self._seen or not dim.size.symbols.union(dim.axes) <= self._declared:
            return  # an unknown name is reported as such
        self._seen.add(key)
        divisor = axis_size(dim.axes)
        if (dim.size.symbols | divisor.symbols) <= self._env.keys():
            self._check_numbers(dim, divisor, loc)
        elif not self._facts.divides(divisor, dim.size):
            above, below = numerator_and_denominator(dim.size)
            wanted = divisible(above, below * divisor)
            self._problems.error(
                f"cannot show that {dim.size} divides by {divisor}: expected '{wanted}'",
                loc,
                remedy=f"add stg.assume[{wanted}]",
            )

    def _check_numbers(self, dim: Dim, divisor: Expr, loc: Loc) -> None:
        if ask(Divides(divisor, dim.size), self._env):
            return
        count = evaluate(divisor, self._env)
        try:
            size = evaluate(dim.size, self._env)
        except NotAnIntegerError as e:
            self._problems.error(
                f"a dimension must be an integer: {e}", loc, remedy="change one of the values"
            )
            return
        if size % count:
            self._problems.error(
                f"{_equation(dim.size, size)} does not divide over {_equation(divisor, count)}",
                loc,
                remedy=f"change one of them so that {divisible(dim.size, divisor)}",
            )


def _equation(expr: Expr, value: int) -> str:
    return str(value) if expr.value is not None else f"{expr} = {value}"


# -- an axis that is used twice --------------------------------------------------------------------


def _used_twice(
    axis: str, type_: TensorType, op: Operation, value: Value | None, loc: Loc
) -> Diagnostic:
    rule = _rule(op) if value is not None and value.producer is op else None
    places = [i for i, d in enumerate(type_.dims) for a in d.axes if a == axis]
    name = f"%{value.name}" if value else "a result"
    remedy = "give one of the dimensions another axis, or none"
    if rule is None or value is None or len(rule.results[value.index]) != type_.rank:
        uses = [f"dimension {type_.dims[i].size}" for i in places]
        uses += ["its partial sum"] * type_.partial_axes.count(axis)
        message = f"{name} uses axis '{axis}' twice, for {' and '.join(uses)}: {type_}"
        return Diagnostic(message, loc, "error", remedy)
    groups = rule.results[value.index]
    factors = [_name(groups[i]) for i in places]
    if len(factors) < 2:
        message = (
            f"'{op.name}' cannot place factor '{factors[0]}': the result is unreduced over '{axis}'"
        )
    else:
        message = (
            f"'{op.name}' cannot place factor '{factors[-1]}': axis '{axis}' is already used by "
            f"factor '{factors[0]}' of the result"
        )
    return Diagnostic(message, loc, "error", remedy, tuple(_split_here(op, rule, axis, factors)))


def _split_here(op: Operation, rule: Rule, axis: str, factors: list[str]) -> Iterable[Diagnostic]:
    for value, shape in zip(op.operands, rule.operands, strict=False):
        if not isinstance(value.type, TensorType):
            continue
        for d, group in zip(value.type.dims, shape, strict=False):
            if axis in d.axes and _name(group) in factors:
                yield note(f"%{value.name} is split over '{axis}' here", value.loc)


def _rule(op: Operation) -> Rule | None:
    if not all(isinstance(v.type, TensorType) for v in op.operands):
        return None
    try:
        return op.definition.rule(op)
    except (DiagnosticError, ValueError, IndexError, KeyError):
        return None


def _name(group: tuple[str, ...]) -> str:
    return "".join(group)
