"""cut-part: a pod keeps one part of the training step, and the ends of what crosses."""

from __future__ import annotations

from dataclasses import dataclass, field

from stagec.api import (
    Builder,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    error,
    made_by,
    read_strategy,
)
from stagec.ir.rewrite import drop_unused_bindings, drop_unused_results, erase_unused
from stagec.ir.traits import Accumulates, Repeats
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.parts import crosses, departs, part_names, parts_of
from stagec.sharding.placer import Placer
from stagec.support.suggest import did_you_mean


@dataclass(frozen=True)
class CutPart(Pass):
    """Keep one part of the step: its operations, its parameters, and an end of each value that
    crosses to it or from it.

    Values cross placed as between the layers of this part. The loss is main's.

    Before:
        stg.func @f(%x: f32[B], %w: f32[B | param]) -> f32[] {
          %e = stg.mul(%x, %w) : f32[B]
          %e_main = stg.cross[e, source = encoder, to = main](%e) : f32[B]
          %l = stg.sum["b->"](%e_main) : f32[]
          stg.return(%l)
        }
    After:
        stg.func @f() -> f32[] {
          %e = stg.arrive[e, source = encoder, to = main] : f32[B | rep]
          %l = stg.sum["b->"](%e) : f32[]
          stg.return(%l)
        }
    """

    name = "cut-part"
    needs = Phase.DIFFERENTIATED
    until = Phase.DIFFERENTIATED

    keep: str = field(default="main", metadata={"help": "the part that the pod has"})

    def run(self, module: Module) -> None:
        cut_part(module, self.keep)


def cut_part(module: Module, keep: str) -> None:
    """Keep one part of the main function, in place. Raises `DiagnosticError` for a name that no
    part has, and for a result that takes what several parts get."""
    func, body = module.main, module.main.body
    known = part_names(body)
    if keep not in known:
        raise error(
            f"no part '{keep}'",
            func.loc,
            remedy=did_you_mean(keep, known) or f"its parts are: {', '.join(known) or 'none'}",
        )
    end = body.terminator
    owners = parts_of(module, end.operands)
    kept = [i for i, value in enumerate(end.operands) if owners[value] == keep]
    if len(body.returns) == len(end.operands):
        body.returns = tuple(body.returns[i] for i in kept)
    end.set_operands([end.operands[i] for i in kept])
    _cut(module, keep)
    _sweep(body)
    _drop_arguments(body)
    _drop_orders(module)


def _cut(module: Module, keep: str) -> None:
    """Put the ends of this part in the place of what crosses."""
    strategy = read_strategy(module)
    assumptions = Assumptions(module, CutPart.name, strategy.loc)
    placer = Placer(module, strategy, assumptions)
    for op in crosses(module.main.body):
        value, source, to = op.names("value"), op.text("source"), op.text("to")
        b = Builder.after(module.registry, op, loc=made_by(CutPart.name, op.loc))
        b.phase = op.phase
        placed = placer.place(op.result.tensor.unplaced(), rest=True)
        attrs = {"value": value, "source": source, "to": to}
        if to == keep:
            there = b.value("stg.arrive", (), attrs, type=placed, hint=value[0])
            op.result.replace_with(there)
        elif source == keep:
            x = op.operands[0]
            pinned = b.value("stg.sharding_constraint", [x], type=placed, hint=x.name)
            b.op("stg.depart", [pinned], attrs, types=())
    assumptions.check()


def _sweep(region: Region) -> None:
    """Erase what neither a result nor a value that leaves takes; of operations that update their
    operands, too."""
    for op in reversed(list(region.ops[:-1])):
        if op.region is not None:
            drop_unused_results(op)
            if op.has(Accumulates):
                _sweep(op.region)
            else:
                erase_unused(op.region)
            drop_unused_bindings(op)
        if not _is_used(op):
            op.erase()


def _is_used(op: Operation) -> bool:
    if any(v.uses for v in op.results) or op.name == "stg.depart":
        return True
    return op.region is not None and any(True for _ in departs(op.region))


def _drop_arguments(body: Region) -> None:
    body.args[:] = [arg for arg in body.args if arg.uses]
    for index, arg in enumerate(body.args):
        arg.index = index


def _drop_orders(module: Module) -> None:
    """Remove the orders of layers that other parts have."""
    used = {op.text("order") for op in module.main.body.walk() if op.has(Repeats)}
    for op in module.ops("stg.order"):
        if f"@{op.symbol}" not in used and op.symbol not in used:
            op.erase()
