"""size-experts: capacity factors and loads of experts, and flags of the ops that dispatch rows to
them."""

from stagec.api import (
    Attr,
    Expr,
    Load,
    Loc,
    Module,
    Operation,
    Pass,
    Phase,
    Strategy,
    Value,
    const,
    error,
    evaluate,
    read_strategy,
)
from stagec.ir.expr import UnboundError
from stagec.ir.infer import infer_again
from stagec.ir.traits import Repeats
from stagec.ir_spec.strategy.expert_load import ExpertLoadRule
from stagec.ir_spec.strategy.moe import GATHER, MoeRule
from stagec.ir_spec.strategy.routing import SPREAD, RoutingRule


class SizeExperts(Pass):
    """Give the buffers of experts the sizes of `stg.capacity`, or the loads of `stg.expert_load`.

    With `stg.routing[popularity = spread]` the ops that dispatch rows to experts get the flag
    `spread`. With `stg.moe[dispatch = gather]` those that dispatch and combine rows get the flag
    `local`.

    A capacity factor becomes an attribute of the ops that fill the buffers. With loads, their
    attribute `load_from` is the number of their first layer with experts. Sizes are inferred again.

    Before:
        stg.strategy @s {
          stg.capacity[factor = 5/4]
        }
        stg.func @f(%x: bf16[B, S, D], %r: bf16[D, E | param]) {
          %l = stg.einsum["bsd,de->bse"](%x, %r) : bf16[B, S, E]
          %g, %e = stg.route[k = T](%l) : (f32[B, S, T], i32[B, S, T])
          %xs = stg.dispatch[count = E](%x, %e) : bf16[E, B, S*T/E, D]
          stg.return(%xs)
        }
    After:
        stg.strategy @s {
          stg.capacity[factor = 5/4]
        }
        stg.func @f(%x: bf16[B, S, D], %r: bf16[D, E | param]) {
          %l = stg.einsum["bsd,de->bse"](%x, %r) : bf16[B, S, E]
          %g, %e = stg.route[k = T](%l) : (f32[B, S, T], i32[B, S, T])
          %xs = stg.dispatch[count = E, capacity = 5/4](%x, %e) : bf16[E, B, 5*S*T/(4*E), D]
          stg.return(%xs)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        sized = strategy.capacity is not None or bool(strategy.loads)
        return sized or bool(_flags(strategy))

    def run(self, module: Module) -> None:
        size_experts(module, read_strategy(module))


def size_experts(module: Module, strategy: Strategy) -> None:
    """Give the ops with a capacity the factor of the strategy, or the number of the first layer
    whose experts have loads, in place. Sizes are inferred again.

    Raises `DiagnosticError` for loads that do not match the model.
    """
    if strategy.capacity is not None:
        for op in _with_capacity(module, strategy.loc, "stg.capacity"):
            op.attrs["capacity"] = strategy.capacity
    if strategy.loads:
        _set_loads(module, strategy)
    for name in _flags(strategy):
        for op in module.walk():
            if name in op.definition.params_by_name:
                op.attrs[name] = True
    infer_again(module)


def _flags(strategy: Strategy) -> list[str]:
    """The flags of the ops that dispatch rows to experts, or combine them."""
    spread = strategy.one(RoutingRule).popularity == SPREAD
    local = strategy.one(MoeRule).dispatch == GATHER
    return [name for name, said in (("spread", spread), ("local", local)) if said]


def _set_loads(module: Module, strategy: Strategy) -> None:
    first, loc = const(0), strategy.loads[0].loc
    if strategy.capacity is not None:
        raise error(
            "a capacity factor gives all experts one size, but 'stg.expert_load' gives each its "
            "own",
            loc,
            remedy="leave out stg.capacity (--capacity-factor), or the loads (--expert-load)",
        )
    ops = _with_capacity(module, loc, "stg.expert_load")
    if not ops:
        return
    _check_kinds(ops, strategy)
    numbers: dict[Value, Expr] = {}  # the first layer of the ops that read these choices
    for op in ops:
        count = op.expr("count")
        name = count.symbol_name
        if name is None:
            raise op.error(
                f"loads need a symbol for the number of experts, found {count}",
                remedy="declare it in stg.symbols, and write count = E",
            )
        _check_counts(strategy, name, module.env.get(name))
        new = op.operands[1] not in numbers
        load = Load(name, _known(module, numbers.setdefault(op.operands[1], first), loc))
        _check_symbols(module, load, op.loc)
        op.attrs["load_from"] = const(load.first)
        first += _layers(op) if new else const(0)
    _check_layers(module, strategy, first)


def _check_kinds(ops: list[Operation], strategy: Strategy) -> None:
    """Raise `DiagnosticError` for loads of single layers if several kinds of layers of a stack have
    experts: a layer is found by its slice of the repeat of its kind."""
    kinds: dict[Attr, set[str | None]] = {}
    for op in ops:
        if op.parent_op is not None and "order" in op.parent_op.attrs:
            kinds.setdefault(op.parent_op.attrs["order"], set()).add(op.parent_op.symbol)
    rule = next((rule for rule in strategy.loads if rule.layer is not None), None)
    for name, kind_loads in kinds.items():
        if rule is not None and len(kind_loads) > 1:
            raise rule.error(
                f"loads are given for layer {rule.layer}, but {len(kind_loads)} kinds of layers of "
                f"{name} have experts",
                remedy="give loads of all layers, or leave the order out",
            )


def _layers(op: Operation) -> Expr:
    """The number of layers for which an op stands."""
    around = op.parent_op
    repeated = around is not None and around.has(Repeats)
    return around.expr("count") if around is not None and repeated else const(1)


def _check_counts(strategy: Strategy, name: str, known: int | None) -> None:
    for rule in strategy.loads:
        if known is not None and len(rule.loads) != known:
            raise rule.error(
                f"{len(rule.loads)} loads are given, expected one for each of the "
                f"{name} = {known} experts",
                remedy="give as many numbers as there are experts",
            )


def _check_layers(module: Module, strategy: Strategy, count: Expr) -> None:
    given: dict[int | None, ExpertLoadRule] = {}
    known = evaluate(count, module.env) if count.symbols <= module.env.keys() else None
    for rule in strategy.loads:
        which = "all other layers" if rule.layer is None else f"layer {rule.layer}"
        if rule.layer in given:
            raise rule.error(f"the loads of {which} are given twice", remedy="remove one")
        given[rule.layer] = rule
        if known is not None and rule.layer is not None and rule.layer >= known:
            raise rule.error(
                f"loads are given for layer {rule.layer} of {known} layers with experts",
                remedy=f"they are counted from 0 to {known - 1}",
            )
    even = known - len(given) if known is not None and None not in given else 0
    if even:
        module.diagnostics.remark(
            f"{even} of {known} layers with experts have no loads: their experts are loaded evenly",
            strategy.loads[0].loc,
        )


def _known(module: Module, value: Expr, loc: Loc) -> int:
    try:
        return evaluate(value, module.env)
    except UnboundError:
        raise error(
            f"loads are given by the number of a layer, but {value} has no value",
            loc,
            remedy=module.how_to_set(sorted(value.symbols - module.env.keys())),
        ) from None


def _with_capacity(module: Module, loc: Loc, statement: str) -> list[Operation]:
    ops = [op for op in module.walk() if "capacity" in op.definition.params_by_name]
    if not ops and "part" not in module.main.attrs:  # another part may have the experts
        raise error(
            "no op routes tokens to experts",
            loc,
            remedy=f"leave {statement} out, or choose a mixture of experts",
        )
    return ops


def _check_symbols(module: Module, load: Load, loc: Loc) -> None:
    """Raise `DiagnosticError` if the model declares a symbol of a load, which lowered sizes
    contain."""
    for name in load.names:
        if name in module.symbols:
            raise error(
                f"the model declares the symbol {name}, which 'stg.expert_load' uses for loads of "
                f"{load.of}",
                loc,
                remedy="rename the symbol in the model, or leave out stg.expert_load",
            )
