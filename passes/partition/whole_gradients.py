"""whole-gradients: makes the gradient of all rows of a split embedding table on each rank."""

from collections.abc import Iterator
from dataclasses import replace

from stagec.api import Module, Operation, Partial, Pass, Phase, Value, read_strategy
from stagec.ir.traits import Accumulates, AddsToSum, FinalGradient, Recasts, Terminates
from stagec.ir_spec.ops.vocabulary import EmbeddingGrad
from stagec.ir_spec.strategy.gradients import GradientsRule


class WholeGradients(Pass):
    """Give each rank the gradient of all rows of a table, as `stg.gradients[tables = whole]`
    states: a partial sum over the axes that split the tokens. A gradient that only these axes
    reduce is reduced by the update, and stays until the step ends; one that data-parallel ranks
    also reduce is reduced in backward.

    Before:
        stg.mesh @pod[tp]
        stg.assume[S % tp == 0, V % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.gradients[tables = whole]
        }
        stg.func @f(%t: i32[B, S@tp], %d: bf16[B, S@tp, D]) {
          %d_e = stg.embedding_grad[rows = V, phase = backward](%t, %d) : bf16[V@tp, D]
          %g_e = stg.gradient[phase = gradient](%d_e) : bf16[V@tp, D]
          stg.return(%g_e)
        }
    After:
        stg.mesh @pod[tp]
        stg.assume[S % tp == 0, V % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.gradients[tables = whole]
        }
        stg.func @f(%t: i32[B, S@tp], %d: bf16[B, S@tp, D]) {
          %d_e = stg.embedding_grad[rows = V, phase = backward](%t, %d) : bf16[V, D | sum(tp)]
          %g_e = stg.gradient[phase = optimizer](%d_e) : bf16[V@tp, D]
          stg.return(%g_e)
        }
    """

    needs = Phase.SHARDED
    gives = Phase.SHARDED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).one(GradientsRule).tables == "whole"

    def run(self, module: Module) -> None:
        for op in list(module.main.body.walk()):
            if isinstance(op.definition, EmbeddingGrad):
                make_whole(op)


def make_whole(op: Operation) -> None:
    """Give the gradient of a table, its casts and its sums over microbatches all rows, in place."""
    table = op.result.tensor
    axes = table.dims[0].axes
    tokens = {a for d in op.operands[1].tensor.dims[:-1] for a in d.axes}
    over = (*table.partial_axes, *(a for a in axes if a in tokens))
    for value in _becomes(op.result):
        rows, *others = value.tensor.dims
        value.type = replace(
            value.tensor,
            dims=(replace(rows, split=()), *others),
            partial=Partial("sum", over) if over else None,
        )
        for user, _ in value.uses:
            if axes and user.has(FinalGradient) and set(over) <= {*axes}:
                user.attrs["phase"] = "optimizer"


def _becomes(value: Value) -> Iterator[Value]:
    """A gradient, its casts, and its sums over microbatches."""
    yield value
    for user, index in list(value.uses):
        owner = user.parent_op
        if user.has(Recasts) or user.has(AddsToSum):
            yield from _becomes(user.result)
        elif user.has(Terminates) and owner is not None and owner.has(Accumulates):
            yield from _becomes(owner.results[index])
