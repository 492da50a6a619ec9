"""Ops for which the split of a dimension is special: attention and the sequence, for example.

A factor of a rule is special if the op itself deals with its split. With `S` split, fused attention
becomes ring attention. With `V` split, a loss over logits becomes a vocabulary-parallel loss.
"""

from __future__ import annotations

from stagec.ir.core import Operation, Region
from stagec.ir.opdef import factor_sizes


def special_ops(region: Region, name: str) -> list[tuple[Operation, list[int]]]:
    """Ops with a special factor of this size, and the operands that have it."""
    found: list[tuple[Operation, list[int]]] = []
    for op in region.ops:
        if op.region is not None:
            found += special_ops(op.region, name)
            continue
        rule = op.definition.rule(op)
        if rule is None or not rule.special:
            continue
        sizes = factor_sizes(op, rule)
        operands = [
            i
            for f in sorted(rule.special)
            if name in sizes[f].symbols
            for i, _ in rule.occurrences(f)
        ]
        if operands:
            found.append((op, operands))
    return found
