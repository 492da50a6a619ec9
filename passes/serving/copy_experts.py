"""copy-experts: adds redundant experts, copies of some of those among which the router chooses."""

from collections.abc import Iterator, Mapping
from dataclasses import field, replace

from stagec.api import (
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Relation,
    Value,
    const,
    error,
    evaluate,
    read_strategy,
    symbol,
)
from stagec.ir.core import substitute_attr
from stagec.ir.infer import infer_again
from stagec.ir_spec.ops.moe import Dispatch
from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.redundant_experts import CopiesRule

#: The parameter of ops that choose among experts with copies.
COPIES = "copies"


class CopyExperts(Pass):
    """Add redundant experts, copies of popular experts on servers (`stg.redundant_experts`):
    routers choose among the others.

    The number of experts of the module, E, becomes that with copies. Routers, the values that only
    they use, and assumptions, such as that groups of experts divide them, keep that without. The
    load is even over all experts. Experts without weights, which `stg.dispatch[slots]` says a
    router also chooses, have no copies.

    Before:
        stg.strategy @s {
          stg.redundant_experts[count = 32]
        }
        stg.symbols[B, S, D, T, E = 256]
        stg.func @f(%x: bf16[B, S, D], %r: bf16[D, E | frozen]) {
          %l = stg.einsum["bsd,de->bse"](%x, %r) : bf16[B, S, E]
          %g, %e = stg.route[k = T](%l) : (f32[B, S, T], i32[B, S, T])
          %xs = stg.dispatch[count = E](%x, %e) : bf16[E, B, S*T/E, D | routed(E=2, T)]
          stg.return(%xs)
        }
    After:
        stg.strategy @s {
          stg.redundant_experts[count = 32]
        }
        stg.symbols[B, S, D, T, E = 288]
        stg.assume[E >= 64]
        stg.func @f(%x: bf16[B, S, D], %r: bf16[D, E - 32 | frozen]) {
          %l = stg.einsum["bsd,de->bse"](%x, %r) : bf16[B, S, E - 32]
          %g, %e = stg.route[k = T, copies = 32](%l) : (f32[B, S, T], i32[B, S, T])
          %xs = stg.dispatch[count = E](%x, %e) : bf16[E, B, S*T/E, D | routed(E=2, T)]
          stg.return(%xs)
        }
    """

    needs = Phase.SHAPED

    count: int = field(default=0, metadata={"help": "copies (default: of the strategy)"})

    def applies(self, module: Module) -> bool:
        return bool(self.count or read_strategy(module).one(CopiesRule).count)

    def run(self, module: Module) -> None:
        copy_experts(module, self.count or read_strategy(module).one(CopiesRule).count)


def copy_experts(module: Module, count: int) -> None:
    """Make `count` of the experts copies, in place.

    Raises `DiagnosticError` for a model without routers, for more copies than experts, and for a
    negative count.
    """
    if count < 0:
        raise error(
            f"copy-experts expects 0 or more copies, found {count}",
            remedy="give a positive number, as in copy-experts{count=32}",
        )
    _add(module, count)
    dispatches = [op for op in module.walk() if _chooses_slots(op)]
    stored = {op.expr("slots"): op.expr("count") for op in dispatches}
    routers = [op for op in module.walk() if COPIES in op.definition.params_by_name]
    if not routers and "part" not in module.main.attrs:  # another part may have the experts
        raise module.main.error(
            "the model has no op that chooses among experts",
            remedy="leave stg.redundant_experts out, or choose a mixture of experts",
        )
    for op in routers:
        experts = op.operands[0].tensor.shape[-1]
        copied = stored.get(experts, experts)  # those with weights
        if copied.symbols <= module.env.keys() and 2 * count > evaluate(copied, module.env):
            others = evaluate(copied, module.env) - count
            raise op.error(
                f"{count} copies are more than the {others} experts of the model",
                remedy=f"give at most {others} copies",
            )
        for value in _chosen_by(op, experts):
            for d, dim in enumerate(value.tensor.dims):
                if dim.size == experts:
                    value.type = value.tensor.with_dim(d, replace(dim, size=experts - count))
        op.attrs[COPIES] = const(count)
        if copied != experts:
            op.attrs["weightless"] = experts - copied
        module.assume(Relation(copied, ">=", const(2 * count)), op.loc)
    for op in dispatches:  # as many tokens choose experts without weights as without copies
        all_experts, choices = op.expr("count"), op.expr("slots")
        op.attrs["slots"] = all_experts * (choices - count) / (all_experts - count)
    infer_again(module)


def _add(module: Module, count: int) -> None:
    """Add copies to the number of experts; what is assumed about the model's number stays so."""
    own: Mapping[str, Expr] = {EXPERTS: symbol(EXPERTS) - count}
    for op in module.declaring("relations"):
        op.attrs = {name: substitute_attr(value, own) for name, value in op.attrs.items()}
    experts = module.symbols.get(EXPERTS)
    if experts is not None:
        module.set_values({EXPERTS: experts + count})


def _chooses_slots(op: Operation) -> bool:
    """Whether an op deals rows of a router that also chooses experts without weights."""
    return isinstance(op.definition, Dispatch) and "slots" in op.attrs


def _chosen_by(op: Operation, experts: Expr) -> Iterator[Value]:
    """The arguments with a dimension of experts on which the choice of an op depends, in each
    region through which they are passed."""
    seen: set[Value] = set()
    stack = list(op.operands)
    while stack:
        value = stack.pop()
        if value in seen or experts not in value.tensor.shape:
            continue
        seen.add(value)
        if value.producer is not None:
            stack += value.producer.operands
            continue
        yield value
        owner = value.region.owner
        if value.index < len(owner.operands):
            stack.append(owner.operands[value.index])
