"""Ops for which the split of a dimension is special: attention and the sequence, for example.

A factor of a rule is special if the op itself deals with its split. With `S` split, fused attention
becomes ring attention. With `V` split, a loss over logits becomes a vocabulary-parallel loss.
"""

from __future__ import annotations

from stagec.ir.core import Operation, Region
from stagec.ir.expr import Expr, alternatives, symbol
from stagec.ir.opdef import factor_sizes
from stagec.ir.serving import PAST


def special_ops(
    region: Region, name: str, *, joined: bool = False
) -> list[tuple[Operation, list[int]]]:
    """Ops with a special factor of this size, and the operands that have it. `joined`: also of a
    size that this one is a part of."""
    found: list[tuple[Operation, list[int]]] = []
    for op in region.ops:
        if op.region is not None:
            found += special_ops(op.region, name, joined=joined)
            continue
        rule = op.definition.rule(op)
        if rule is None or not rule.special:
            continue
        sizes = factor_sizes(op, rule)
        operands = [
            i
            for f in sorted(rule.special)
            if is_part(name, sizes[f]) and (joined or _is_alone(name, sizes[f]))
            for i, _ in rule.occurrences(f)
        ]
        if operands:
            found.append((op, operands))
    return found


def is_part(name: str, size: Expr) -> bool:
    """Whether a size is this one, or a sum with it; of a minimum both are.

    | size              | name | part |
    |-------------------|------|------|
    | `S`               | S    | yes  |
    | `S+X`             | S    | yes  |
    | `min(S+X, S+W-1)` | S    | yes  |
    | `S*T`             | S    | no   |
    """
    return all(
        name in a.symbols and name not in (a - symbol(name)).symbols for a in alternatives(size)
    )


def _is_alone(name: str, size: Expr) -> bool:
    """Whether a size that this one is a part of has no other sequence but what is cached of it."""
    return any(a.symbol_name == name or PAST in a.symbols for a in alternatives(size))
