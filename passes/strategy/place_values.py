"""place-values: turns splits of a strategy into placements of arguments, carried and named
values."""

from stagec.api import (
    Builder,
    Expr,
    Loc,
    Module,
    Pass,
    Phase,
    Region,
    Registry,
    Strategy,
    TensorType,
    Value,
    axis_size,
    made_by,
    read_strategy,
    symbol,
)
from stagec.ir.expr import numerator_and_denominator
from stagec.ir.rewrite import carried
from stagec.ir.traits import InPlace, Repeats
from stagec.ir.types import WEIGHTS
from stagec.ir_spec.ops.parts import Arrive, Depart
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.placer import Placer
from stagec.sharding.propagate import is_carried


class PlaceValues(Pass):
    """Place the arguments of the function, carried values, the values that statements name, and
    values that cross to another part of the model.

    `stg.split` states the axes over which a dimension is split; `stg.gather[..., of = ...]` names
    values that are not split. The pass assumes that the sizes divide. A placement that the model
    pins takes precedence. All other values get their placements from 'propagate-sharding'.

    Before:
        stg.mesh @pod[dp = 2]
        stg.strategy @s[mesh = @pod] {
          stg.split[B, over = dp]
        }
        stg.func @f(%x: bf16[B, D]) -> bf16[B, D] {
          stg.return(%x)
        }
    After:
        stg.mesh @pod[dp = 2]
        stg.assume[B % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.split[B, over = dp]
        }
        stg.func @f(%x: bf16[B@dp, D]) -> bf16[B, D] {
          stg.return(%x)
        }
    """

    needs = Phase.SHAPED
    gives = Phase.PLACED

    def run(self, module: Module) -> None:
        place_values(module, read_strategy(module))


def place_values(module: Module, strategy: Strategy) -> None:
    """Place values as the strategy states, in place. Raises `DiagnosticError` for sizes that do not
    divide."""
    assumptions = Assumptions(module, PlaceValues.name, strategy.loc)
    placer, body = Placer(module, strategy, assumptions), module.main.body
    for arg in body.args:
        arg.type = placer.place(arg.tensor, rest=arg.tensor.role in WEIGHTS, value=arg)
    if any(rule.rest for rule in strategy.splits):
        _place_carried(placer, body)
    _place_named(module, strategy, placer)
    _place_crossing(module, placer)
    _place_appended(module)
    _divide_shares(module, strategy, assumptions)
    assumptions.check()


def _place_carried(placer: Placer, region: Region) -> None:
    for op in region.walk():
        if op.has(Repeats):
            for arg in op.body.args[: carried(op)]:
                arg.type = placer.place(arg.tensor, rest=True, value=arg)


def _place_named(module: Module, strategy: Strategy, placer: Placer) -> None:
    """Pin the values inside the function that statements name. Gradients get their placements
    later.

    Carried values get a type, all others a `stg.sharding_constraint`.
    """
    named = {name: rule.loc for rule in strategy.whole for name in rule.of}
    named |= {name: rule.loc for rule in strategy.splits for name in rule.of}
    body = module.main.body
    for value in [v for v in body.values() if v.owner is not body]:
        called = next((name for name in named if value.is_called(name)), None)
        if called is None:
            continue
        rest = isinstance(value.owner, Region)
        type_ = placer.place(value.tensor.unplaced(), rest=rest, value=value)
        if isinstance(value.owner, Region) and is_carried(value):
            value.type = type_
        else:
            _pin(module.registry, value, type_, named[called])


def _place_crossing(module: Module, placer: Placer) -> None:
    """Pin values that cross to or from another part of the model, like those between layers."""
    for op in list(module.main.body.walk()):
        if isinstance(op.definition, Arrive):
            value = op.result
            value.type = placer.place(value.tensor, rest=True, value=value)
        elif isinstance(op.definition, Depart):
            value = op.operands[0]
            type_ = placer.place(value.tensor.unplaced(), rest=True, value=value)
            b = module.before(op, by=PlaceValues.name)
            pinned = b.value("stg.sharding_constraint", [value], type=type_, hint=value.name)
            op.set_operand(0, pinned)


def _place_appended(module: Module) -> None:
    """Pin values that are written into caches to the placements of the caches: few new rows are
    moved, and the cache is not."""
    for op in list(module.main.body.walk()):
        if not op.has(InPlace) or not op.results:
            continue
        kept = op.definition.reuses(op, 0)
        cache = _argument(op.operands[kept]) if kept is not None else None
        rule = op.definition.rule(op)
        if cache is None or kept is None or rule is None or cache.tensor.role != "cache":
            continue
        dims = cache.tensor.dims[-op.operands[kept].tensor.rank :]
        splits = dict(zip(rule.operands[kept], (d.axes for d in dims), strict=True))
        b = module.before(op, by=PlaceValues.name)
        for index, value in enumerate(op.operands):
            if index != kept:
                axes = [splits.get(group, ()) for group in rule.operands[index]]
                type_ = value.tensor.unplaced().with_splits(axes)
                pinned = b.value("stg.sharding_constraint", [value], type=type_, hint=value.name)
                op.set_operand(index, pinned)


def _argument(value: Value) -> Value | None:
    """The argument of the function of which a value is all, a slice or a microbatch, or None."""
    while value.producer is None:
        owner = value.region.owner
        if value.index >= len(owner.operands):
            return value
        value = owner.operands[value.index]
    return None


def _pin(registry: Registry, value: Value, type_: TensorType, loc: Loc) -> None:
    """Replace a value by a pinned one for all users."""
    b = Builder.behind(registry, value, made_by(PlaceValues.name, loc))
    value.replace_with(b.value("stg.sharding_constraint", [value], type=type_, hint=value.name))


def _divide_shares(module: Module, strategy: Strategy, assumptions: Assumptions) -> None:
    """Assume that a dimension divides if it is a fraction of a split one, as S*T/E is of S."""
    values = [v for v in module.main.body.values() if v.producer]
    for size in dict.fromkeys(s for v in values for s in v.tensor.shape):
        above, below = numerator_and_denominator(size)
        rules = [r for r in strategy.splits if _factors(above) & set(r.dims)]
        over = dict.fromkeys(a for r in rules for a in r.over)
        if below.symbols and over:
            assumptions.divides(size, axis_size(over), rules[0].loc)


def _factors(size: Expr) -> set[str]:
    """The symbols that are factors of a size: S and T in S*T, neither in S - T."""
    others = {s: numerator_and_denominator(size / symbol(s))[1] for s in size.symbols}
    return {s for s, below in others.items() if s not in below.symbols}
