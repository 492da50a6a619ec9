"""What a strategy says by name: values that are pinned, ops that are computed again.

Names are checked before any work; an unknown one is an error that tells the nearest known one.
"""

from __future__ import annotations

from collections.abc import Iterator

from stagec.api import (
    Builder,
    DiagnosticList,
    Loc,
    Module,
    Region,
    Registry,
    TensorType,
    Value,
    error,
)
from stagec.ir.traits import Repeats
from stagec.sharding.strategy import SplitRule, Strategy
from stagec.support.suggest import did_you_mean


def check_recompute(module: Module, strategy: Strategy) -> None:
    """Refuse names of ops of which the model's blocks have none, and offloading what only some
    blocks stash."""
    what = strategy.recompute
    if "activations" in strategy.offload and (what.layers or what.every):
        raise error(
            "activations that only some layers stash cannot be offloaded yet",
            what.loc,
            remedy="recompute in all layers, or in none",
        )
    repeats = [op for op in module.main.body.walk() if op.has(Repeats)]
    inside = (op for repeat in repeats for op in repeat.body.ops if op.definition.rule(op))
    known = sorted({op.name.partition(".")[2] for op in inside})
    for name in what.ops:
        if name not in known:
            raise error(
                f"no block of the model has an op '{name}' to compute again",
                what.loc,
                remedy=did_you_mean(name, known) or f"its ops are: {', '.join(known)}",
            )


def check_values(rule: SplitRule, body: Region, problems: DiagnosticList) -> None:
    """Refuse names of values that there are not, and values without such a dimension."""
    known = {v.name: v for v in _named(body)} if rule.of else {}
    for name in rule.of:
        if name not in known:
            problems.error(
                f"the model has no value '%{name}'",
                rule.loc,
                remedy=did_you_mean(name, known) or "'stagec models NAME' prints the model's text",
            )
        elif not any(s.symbols & set(rule.dims) for s in known[name].tensor.shape):
            problems.error(
                f"%{name} has no dimension {', '.join(rule.dims)}: {known[name].type}",
                rule.loc,
                remedy="name a dimension that it has",
            )


def pin(registry: Registry, value: Value, type_: TensorType, loc: Loc) -> None:
    """Give all users of a value a pinned one in its place."""
    users, owner = list(value.uses), value.owner
    b = (
        Builder(registry, owner, 0, loc=loc)
        if isinstance(owner, Region)
        else Builder.after(registry, owner, loc=loc)
    )
    pinned = b.value("stg.sharding_constraint", [value], type=type_, hint=value.name)
    for user, index in users:
        user.set_operand(index, pinned)


def _named(body: Region) -> Iterator[Value]:
    """All values of a function."""
    yield from body.args
    for op in body.walk():
        yield from op.results
        yield from op.region.args if op.region is not None else ()
