"""Small sizes and random inputs for numeric checks."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import eq

import numpy as np

from stagec.ir.core import Value
from stagec.ir.expr import ONE, ZERO, Expr, const, evaluate, numerator_and_denominator
from stagec.ir.factor_sizes import factor_sizes, integral_factors
from stagec.ir.facts import Relation, divisible
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.ir.types import TensorType, axis_size
from stagec.ir_spec.ops.selection import Slice
from stagec.sharding.assignment import distribute
from stagec.support.diagnostics import NotAnIntegerError

_ROUNDS = 64
_LARGEST = 4096


def tiny_sizes(
    module: Module, axis_size: int = 2, fixed: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Small values for all symbols and axes that satisfy the module's relations.

    Raises `DiagnosticError` if none are found.
    """
    mesh = module.mesh
    env = {name: 2 + i % 3 for i, name in enumerate(module.symbols)}
    env |= dict.fromkeys(mesh.axes if mesh else (), axis_size)
    env |= dict(fixed or {})
    relations = [r for r, _ in module.relations]
    relations += _splits(module) + _parts(module) + _groups(module) + _joins(module)
    relations += _rows(module)
    for _ in range(_ROUNDS):
        broken = [r for r in relations if r.symbols <= env.keys() and not _holds(r, env)]
        if not broken:
            return env
        for relation in broken:
            _mend(relation, env, frozenset(fixed or {}) | frozenset(mesh.axes if mesh else ()))
    raise module.root.error(
        f"no small sizes satisfy {relations[0]} and the other assumptions",
        remedy="give sizes with --set",
    )


def _splits(module: Module) -> list[Relation]:
    """The divisibility that placements in types require, whether or not it is assumed."""
    relations: dict[tuple[Expr, tuple[str, ...]], Relation] = {}
    for func in module.functions:
        for op in (func, *func.body.walk()):
            values = [*op.results, *(op.region.args if op.region else ())]
            for d in (d for v in values if isinstance(v.type, TensorType) for d in v.type.dims):
                above, below = numerator_and_denominator(d.size)
                if d.axes or below != ONE:
                    relations[d.size, d.axes] = divisible(above, below * axis_size(d.axes))
    return list(relations.values())


def _holds(relation: Relation, env: Mapping[str, int]) -> bool:
    """Whether a relation holds. It does not if a size is not whole."""
    try:
        return relation.holds(env)
    except (NotAnIntegerError, ZeroDivisionError):
        return False


def _parts(module: Module) -> list[Relation]:
    """Relations that make iteration counts whole, such as the layers of a pipeline stage."""
    relations: dict[Expr, Relation] = {}
    for func in module.functions:
        for op in func.body.walk():
            size = op.attrs.get("count")
            if isinstance(size, Expr) and size.symbols:
                relations[size] = divisible(size, const(1))
    return list(relations.values())


def _groups(module: Module) -> list[Relation]:
    """Relations that make factors whole, such as the number of query heads per key head."""
    ops = (op for func in module.functions for op in func.body.walk())
    sizes = dict.fromkeys(size for op in ops for size in integral_factors(op).values())
    split = map(numerator_and_denominator, sizes)
    return [divisible(above, below) for above, below in split if below.symbols]


def _joins(module: Module) -> list[Relation]:
    """Relations that keep split factors of one dimension in order: one after another is split only
    if that one is split completely, such as the rows of patches before their columns."""
    relations: list[Relation] = []
    for op in (op for func in module.functions for op in func.body.walk()):
        rule = op.definition.rule(op)
        if rule is None or any(not isinstance(v.type, TensorType) for v in op.results):
            continue
        sizes = factor_sizes(op, rule)
        shapes = zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=False)
        for group, d in ((g, d) for v, s in shapes for g, d in zip(s, v.tensor.dims, strict=True)):
            shares = distribute(group, d.axes, sizes, module.facts) if len(group) > 1 else {}
            full = list(shares)[:-1]
            relations += [Relation(sizes[f], "==", axis_size(shares[f])) for f in full]
    return relations


def _rows(module: Module) -> list[Relation]:
    """Relations that give tables the rows that slices take, as positions behind cached ones."""
    ops = (op for func in module.functions for op in func.body.walk())
    slices = (op for op in ops if isinstance(op.definition, Slice))
    return [
        Relation(rows, ">=", op.expr("start", ZERO) + op.expr("size"))
        for op in slices
        if (rows := op.operands[0].tensor.shape[op.integer("dim", 0)]).symbols
    ]


def _mend(relation: Relation, env: dict[str, int], fixed: frozenset[str]) -> None:
    free = sorted(relation.left.symbols - fixed)
    if relation.modulus is not None and free:
        name, size = free[0], env[free[0]]
        tried = (size * k for k in range(2, _ROUNDS) if size * k <= _LARGEST)
        env[name] = next((n for n in tried if _holds(relation, {**env, name: n})), size)
    elif relation.op == ">=" and free:
        env[free[0]] += 1
    elif relation.op == "==" and relation.left.symbol_name in free and relation.left.symbol_name:
        env[relation.left.symbol_name] = evaluate(relation.right, env)
    elif free:
        env[free[0]] = max(1, env[free[0]] - 1)


def random_inputs(args: Sequence[Value], env: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    """A whole array for each argument: normally distributed floats (absolute values for optimizer
    states), random indices below their bound, or zeros for buffers, which nothing reads."""
    inputs: dict[str, Array] = {}
    for arg in args:
        rng = np.random.default_rng([seed, *arg.name.encode()])
        shape = [evaluate(s, env) for s in arg.tensor.shape]
        if arg.tensor.role == "bucket":
            inputs[arg.name] = np.broadcast_to(0.0, shape)
        elif arg.tensor.dtype.startswith(("i", "u")):
            bound = _bound(arg)
            inputs[arg.name] = rng.integers(0, evaluate(bound, env) if bound else 2, shape)
        else:
            values = rng.standard_normal(shape) * 0.5
            inputs[arg.name] = np.abs(values) if arg.tensor.role == "state" else values
    return inputs


def filled(array: Array, shape: Sequence[int]) -> Array:
    """The array with zeros behind its elements, for a parameter of this shape that is padded to
    equal shards: adjacent dimensions of the array are one of the shape, or two, the first of which
    counts parts that are padded each. Raises `ValueError` for an array that is larger."""
    if array.shape == tuple(shape):
        return array
    lead = len(list(takewhile(bool, map(eq, array.shape, shape))))
    rest = zip(reversed(array.shape[lead:]), reversed(shape[lead:]), strict=False)
    behind = [ours for ours, _ in takewhile(lambda pair: eq(*pair), rest)][::-1]
    parts = shape[lead : len(shape) - len(behind) - 1]
    joined = array.reshape(*shape[:lead], *parts, -1, *behind)
    whole = np.zeros(shape)
    whole[tuple(slice(n) for n in joined.shape)] = joined
    return whole


def _bound(value: Value) -> Expr | None:
    for op, index in value.uses:
        bound = op.definition.index_bound(op, index)
        if bound is None and op.region is not None and index < len(op.region.args):
            bound = _bound(op.region.args[index])
        if bound is not None:
            return bound
    return None
