"""Single ops whose operands and result are placed: few could be split in another way with less that
moves.

The reference tries every plan: each axis splits one factor or none, operands and result are moved
to it (`tests/unit/test_reshard.py` holds the cost of a move against all sequences of collectives).
A plan that moves less counts only if the ranks repeat no more of the work than they do as placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import permutations, product
from math import prod

import pytest

from stagec.ir.expr import evaluate
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.module import Module
from stagec.ir.rule import Rule
from stagec.ir.types import AxisUse, Partial, TensorType
from stagec.ir_spec.ops.comm import Collective, ring_rounds
from stagec.sharding.plans import plans as all_plans
from stagec.sharding.reshard import Axes, Resharding
from stagec.sharding.reshard_cost import Offer, ShardedOp
from stagec.support.diagnostics import DiagnosticError
from tests.support import EXHAUSTIVE, compiled, dim, parse

PLACE = "infer-shapes,propagate-sharding,insert-collectives"
MESH = {"x": 2, "y": 4}
Splits = tuple[Axes, ...]
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """An op of operands and a result of these sizes, and which share of its units may be costlier
    than the best plan, in percent."""

    op: str
    operands: tuple[tuple[str, Sizes], ...]
    result: Sizes
    most: int = 0


KINDS = {
    "product": Kind('stg.einsum["mk,kn->mn"]', (("f32", (64, 64)),) * 2, (64, 64), 5),
    "tall": Kind('stg.einsum["mk,kn->mn"]', (("f32", (256, 16)), ("f32", (16, 32))), (256, 32), 1),
    "sum": Kind("stg.add", (("f32", (16, 256)),) * 2, (16, 256), 0),
    "bias": Kind('stg.add["ab,b->ab"]', (("f32", (64, 64)), ("f32", (64,))), (64, 64), 1),
    "lookup": Kind("stg.embedding", (("f32", (1024, 16)), ("i32", (32,))), (32, 16), 3),
    "gradient": Kind(
        "stg.embedding_grad[rows = 256]", (("i32", (128,)), ("f32", (128, 64))), (256, 64), 3
    ),
}


def placements(rank: int, axes: Sequence[str] = tuple(MESH)) -> Iterator[Splits]:
    """Every split of dimensions, with the axes of each in every order."""
    for where in product(range(-1, rank), repeat=len(axes)):
        members = [[a for a, w in zip(axes, where, strict=True) if w == d] for d in range(rank)]
        yield from product(*map(permutations, members))


def tensor(dtype: str, sizes: Sizes, splits: Splits) -> TensorType:
    """A tensor placed so."""
    dims = tuple(dim(n, *axes) for n, axes in zip(sizes, splits, strict=True))
    return TensorType(dtype, dims, None, placed=True)


def text(kind: Kind, operands: Sequence[TensorType], pin: TensorType, *, behind: bool) -> str:
    """A module of one op whose result is pinned, at the op or behind it."""
    args = ", ".join(f"%a{i}: {t}" for i, t in enumerate(operands))
    call = f"{kind.op}({', '.join(f'%a{i}' for i in range(len(operands)))})"
    body = f"%y = {call} : {pin}"
    if behind:
        body = f"%z = {call}\n    %y = stg.sharding_constraint(%z) : {pin}"
    mesh = ", ".join(f"{a} = {n}" for a, n in MESH.items())
    return (
        f"stg.module @m {{\n  stg.mesh @p[{mesh}]\n  stg.func @f({args}) {{\n    {body}\n"
        "    stg.return(%y)\n  }\n}\n"
    )


def placed(kind: Kind, operands: Sequence[TensorType], pin: TensorType) -> Module:
    """The module with its collectives. A pin that contradicts an operand stands behind the op."""
    try:
        return compiled(text(kind, operands, pin, behind=False), PLACE)
    except DiagnosticError:
        return compiled(text(kind, operands, pin, behind=True), PLACE)


def cost(module: Module, name: str) -> tuple[Fraction, int]:
    """Bytes that a rank sends, and the product of its factors' sizes."""
    sent, work = Fraction(), 0
    for op in module.main.body.walk():
        if isinstance(op.definition, Collective):
            n = prod(module.env[a] for a in op.names("over"))
            size = evaluate(op.definition.buffer(op), module.env)
            sent += Fraction(ring_rounds(op.name.removeprefix("stg.")) * (n - 1), n) * size
        elif op.name == name:
            rule = op.definition.rule(op)
            assert rule is not None
            sizes = factor_sizes(op, rule, local=True).values()
            work += prod(evaluate(size, module.env) for size in sizes)
    return sent, work


PLANS = Resharding(MESH, lambda axes, d: True)


@cache
def move(have: TensorType, splits: Splits) -> Fraction:
    """Bytes that a rank sends."""
    share = PLANS.find(have, splits).cost
    return share * prod(evaluate(d.size, {}) for d in have.dims) * 4


def plans(
    rule: Rule, sizes: Mapping[str, int], operands: Sequence[TensorType], pin: TensorType
) -> Iterator[tuple[Fraction, int]]:
    """The cost of every way to split the factors."""
    for splits in placements(len(sizes)):
        given = dict(zip(sizes, splits, strict=True))
        local = [n // prod(MESH[a] for a in given[f]) for f, n in sizes.items()]
        gone = tuple(a for f in rule.contracted(0) for a in given[f])
        result = pin.with_splits(
            [given[f] for (f,) in rule.results[0]], Partial("sum", gone) if gone else None
        )
        moved = [
            move(t, tuple(given[f] for (f,) in shape))
            for t, shape in zip(operands, rule.operands, strict=True)
        ]
        yield sum(moved, move(result, tuple(d.axes for d in pin.dims))), prod(local)


def costlier(kind: Kind, placement: Sequence[Splits]) -> bool:
    """Whether a plan sends less than the placed op, and its ranks repeat no more work."""
    *splits, end = placement
    operands = [tensor(t, n, s) for (t, n), s in zip(kind.operands, splits, strict=True)]
    pin = tensor("f32", kind.result, end)
    module = placed(kind, operands, pin)
    op = next(op for op in module.main.body.ops if op.name == kind.op.partition("[")[0])
    rule = op.definition.rule(op)
    assert rule is not None
    sizes = {f: evaluate(n, {}) for f, n in factor_sizes(op, rule).items()}
    sent, work = cost(module, op.name)
    return any(b < sent and w <= work for b, w in plans(rule, sizes, operands, pin))


@pytest.mark.parametrize(
    ("kind", "every"),
    [(kind, 101) for kind in KINDS] + [pytest.param(kind, 1, marks=EXHAUSTIVE) for kind in KINDS],
)
def test_few_ops_have_a_plan_that_moves_less(kind: str, every: int) -> None:
    this = KINDS[kind]
    ranks = [len(n) for _, n in this.operands] + [len(this.result)]
    units = list(product(*map(placements, ranks)))[::every]
    wrong = [unit for unit in units if costlier(this, unit)]
    assert len(wrong) * 100 <= this.most * len(units), wrong


def test_a_plan_can_be_read_from_types() -> None:
    """No operand is split along k over both axes, so no type could say that the op is."""
    operands = [tensor("f32", (64, 64), s) for s in (((), ("x",)), (("y",), ()))]
    module = parse(text(KINDS["product"], operands, operands[0], behind=False))
    (op, *_) = module.main.body.ops
    rule = op.definition.rule(op)
    assert rule is not None
    node = ShardedOp(op, rule, factor_sizes(op, rule))
    offers = [Offer(0, ("k",), (AxisUse(axis),)) for axis in MESH]
    actual = [
        {o.group[0]: len(o.split) for o in plan} for plan in all_plans(node, offers, module.facts)
    ]
    assert {"k": 1, "m": 1} in actual
    assert max(plan.get("k", 0) for plan in actual) == 1
