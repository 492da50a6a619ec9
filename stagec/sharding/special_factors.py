"""Ops for which the split of a dimension is special: attention and the sequence, for example.

A factor of a rule is special if the op handles its split itself. With `S` split, fused attention
becomes ring attention. With `V` split, a loss over logits becomes a vocabulary-parallel loss.
"""

from collections.abc import Collection

from stagec.ir.core import Operation, Region
from stagec.ir.expr import Expr, alternatives, symbol
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.serving_step import PAST


def special_ops(
    region: Region, name: str, joined: Collection[str] | None = ()
) -> list[tuple[Operation, list[int]]]:
    """Ops with a special factor of this size, and the indices of operands that have it. Also sizes
    that contain this one and otherwise only the names `joined` (None: any names) count."""
    ops: list[tuple[Operation, list[int]]] = []
    for op in region.ops:
        if op.region is not None:
            ops += special_ops(op.region, name, joined)
            continue
        rule = op.definition.rule(op)
        if rule is None or not rule.special:
            continue
        sizes = factor_sizes(op, rule)
        operands = [
            i
            for f in sorted(rule.special)
            if is_part(name, sizes[f]) and _is_joined(name, sizes[f], joined)
            for i, _ in rule.occurrences(f)
        ]
        if operands:
            ops.append((op, operands))
    return ops


def is_part(name: str, size: Expr) -> bool:
    """Whether a size is this one, its square, or a sum with one of them; in a minimum, whether both
    alternatives are.

    | size              | name | part |
    |-------------------|------|------|
    | `S`               | S    | yes  |
    | `S+X`             | S    | yes  |
    | `min(S+X, S+W-1)` | S    | yes  |
    | `S + X*X`         | X    | yes  |
    | `S*T`             | S    | no   |
    """
    one = symbol(name)
    return all(
        name in a.symbols and any(name not in (a - n).symbols for n in (one, one * one))
        for a in alternatives(size)
    )


def _is_joined(name: str, size: Expr, joined: Collection[str] | None) -> bool:
    """Whether a size that contains this one has, apart from cached tokens, only the names `joined`
    besides it."""
    if joined is None or any(PAST in a.symbols for a in alternatives(size)):
        return True
    return any(a.symbols <= {name, *joined} for a in alternatives(size))
