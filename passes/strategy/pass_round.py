"""Ring attention in a strategy: ops for which a split is special keep it, and pass their parts
round the ranks instead.
"""

from __future__ import annotations

from stagec.api import Attr, Module, Operation, Region, error, factor_sizes, made_by
from stagec.sharding.strategy import RingRule, Strategy

PASS = "apply-strategy"


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
            if sizes[f].symbol_name == name
            for i, _ in rule.occurrences(f)
        ]
        if operands:
            found.append((op, operands))
    return found


def pass_round(module: Module, strategy: Strategy, ring: RingRule) -> tuple[str, ...]:
    """Make the ops concerned rings; the axes over which positions are now in zigzag order.

    Raises `DiagnosticError` if there is no such op, or if the strategy moves the dimension too.
    """
    name = ring.dim
    if name in (*strategy.gathered, *(n for n, _ in strategy.exchanged)):
        raise error(
            f"{name} goes round the ranks and is gathered or exchanged too, expected one of them",
            ring.loc,
            remedy="keep one of stg.ring, stg.gather and stg.exchange",
        )
    found = [op for op, _ in special_ops(module.main.body, name)]
    found = [op for op in found if "ring" in op.definition.params_by_name]
    if not found:
        raise error(
            f"no op can pass its part of {name} round the ranks: there is no fused attention",
            ring.loc,
            remedy="use stg.attention in the model; for other models gather: --cp-mode all-gather",
        )
    for op in found:
        op.attrs["ring"] = ring.order
    over = tuple(
        a for rule in strategy.splits if name in rule.dims and not rule.rest for a in rule.over
    )
    if ring.order != "zigzag" or not over:
        return ()
    root = module.root.body
    places = [i for i, o in enumerate(root.ops) if o.name in ("stg.symbols", "stg.mesh")]
    attrs: dict[str, Attr] = {"dims": (name,), "over": over}
    op = Operation(module.registry["stg.zigzag"], (), attrs, loc=made_by(PASS, ring.loc))
    root.insert(1 + max(places, default=-1), op)
    return over
