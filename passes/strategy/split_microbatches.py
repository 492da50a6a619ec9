"""split-microbatches: makes the step a loop over microbatches, for gradient accumulation and
pipelines."""

from stagec.api import (
    Builder,
    DiagnosticList,
    Module,
    Operation,
    Pass,
    Phase,
    Strategy,
    TensorType,
    const,
    made_by,
    read_strategy,
    symbol,
)
from stagec.ir.core import substitute_attr
from stagec.ir.infer import forget_types, infer_op
from stagec.ir.rewrite import repeats_in
from stagec.ir.types import CACHED
from stagec.ir_spec.ops.parts import Arrive
from stagec.ir_spec.strategy.pipeline import PipelineRule
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.stages import cut, pipeline_attrs, read_pipeline


class SplitMicrobatches(Pass):
    """Wrap the step into a `stg.accumulate` over the microbatches of `stg.microbatches`.

    Data arguments become those of one microbatch, and so do sizes that ops state, such as those of
    a broadcast. `stg.pipeline` becomes attributes of the `stg.accumulate`, also with one
    microbatch: 'split-stages' reads them there. A number of layers without a value is assumed to
    divide into the parts of the pipeline.

    Before:
        stg.strategy @s {
          stg.microbatches[count = 4]
        }
        stg.func @f(%x: bf16[B, D], %w: bf16[D, F | param]) -> bf16[B, F] {
          %y = stg.einsum["bd,df->bf"](%x, %w) : bf16[B, F]
          stg.return(%y)
        }
    After:
        stg.assume[B % 4 == 0]
        stg.strategy @s {
          stg.microbatches[count = 4]
        }
        stg.func @f(%x: bf16[B, D], %w: bf16[D, F | param]) -> bf16[B, F] {
          %y_sum = stg.accumulate[count = 4, split = B] (%x_mb: bf16[B/4, D] = %x) {
            %y = stg.einsum["bd,df->bf"](%x_mb, %w) : bf16[B/4, F]
            stg.yield(%y)
          } : bf16[B, F]
          stg.return(%y_sum)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        return strategy.microbatches > 1 or strategy.pipeline is not None

    def run(self, module: Module) -> None:
        split_microbatches(module, read_strategy(module))


def split_microbatches(module: Module, strategy: Strategy) -> None:
    """Wrap the body of the main function, in place.

    Raises `DiagnosticError` if no argument has the batch, and for an impossible pipeline.
    """
    rule = strategy.pipeline
    assumptions = Assumptions(module, SplitMicrobatches.name, strategy.loc)
    if rule is not None:
        _check_pipeline(module, rule, strategy.microbatches, assumptions)
    op = _accumulate(module, strategy, assumptions)
    if rule is not None:
        op.attrs |= pipeline_attrs(rule)
        op.loc = made_by(SplitMicrobatches.name, rule.loc)
    assumptions.check()


# -- the pipeline ----------------------------------------------------------------------------------


def _check_pipeline(
    module: Module, rule: PipelineRule, microbatches: int, assumptions: Assumptions
) -> None:
    """Raise `DiagnosticError` for impossible stages early; assume that a symbolic number of layers
    divides."""
    pipeline = read_pipeline(module, rule, microbatches)
    repeats = repeats_in(module.main.body)
    cut(module, pipeline, repeats)
    counts = [op.expr("count") for op in repeats]
    if len(counts) == 1 and not rule.layers and counts[0].symbols - module.env.keys():
        assumptions.divides(counts[0], const(pipeline.parts), rule.loc)
    if microbatches == 1 and pipeline.stages > 1:
        module.diagnostics.remark(
            f"with one microbatch the {pipeline.stages} stages work one after another; a "
            f"pipeline needs several: stg.microbatches[count = {2 * pipeline.stages}]",
            rule.loc,
        )


# -- the wrapper -----------------------------------------------------------------------------------


def _accumulate(module: Module, strategy: Strategy, assumptions: Assumptions) -> Operation:
    """Move the body of the function into a `stg.accumulate`."""
    body, batch, count = module.main.body, strategy.batch, strategy.microbatches
    split = any(batch in rule.dims for rule in strategy.splits)
    if batch in module.symbols and not split:  # else 'place-values' assumes more
        assumptions.divides(symbol(batch), const(count), strategy.loc)
    end = body.terminator
    inner = [op for op in body.ops if op is not end]
    ours = {"", *CACHED}
    data = [a for a in body.args if a.tensor.role in ours and _has(a.tensor, batch)]
    if not data and not any(isinstance(op.definition, Arrive) for op in inner):
        raise strategy.error(
            f"no argument has the dimension {batch}, which microbatches split",
            remedy="name the batch symbol: stg.microbatches[count = 2, split = N]",
        )
    b = Builder(module.registry, body, 0, loc=made_by(SplitMicrobatches.name, strategy.loc))
    op = b.op("stg.accumulate", data, {"count": count, "split": batch}, types=())
    region = op.make_region()
    for arg in data:
        inside = region.add_arg(f"{arg.name}_mb", None, arg.loc)
        for user, index in list(arg.uses):
            if user is not op:
                user.set_operand(index, inside)
    for child in inner:
        body.ops.remove(child)
        region.append(child)
        _shrink(child, batch, count)
    outputs = end.operands
    region.append(Operation(module.registry["stg.yield"], outputs, loc=end.loc))
    forget_types(op)
    for value in outputs:
        result = op.add_result(value.name + "_sum", None, value.loc)
        end.set_operand(end.operands.index(value), result)
    problems = DiagnosticList()
    infer_op(op, problems)
    problems.check()
    return op


def _shrink(op: Operation, batch: str, count: int) -> None:
    """Replace sizes that an op and those in its region state by those of a microbatch. Raises
    `DiagnosticError` for a value of pairs along the batch."""
    env = {batch: symbol(batch) / const(count)}
    for inner in op.walk():
        for value in inner.results if count > 1 else ():
            if isinstance(value.type, TensorType) and _times(value.type, batch) > 1:
                raise inner.error(
                    f"%{value.name} has pairs along {batch}, so microbatches cannot compute it: "
                    f"{value.type}",
                    remedy="keep the batch whole: --microbatches 1",
                )
        for name, param in inner.definition.params_by_name.items():
            if param.kind in ("size", "sizes") and not param.of_step and name in inner.attrs:
                inner.attrs[name] = substitute_attr(inner.attrs[name], env)


def _times(type_: TensorType, name: str) -> int:
    return sum(name in d.size.symbols for d in type_.dims)


def _has(type_: TensorType, name: str) -> bool:
    return any(name in d.size.symbols for d in type_.dims)
