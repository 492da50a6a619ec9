"""split-weight-gradients: splits backward in two parts, for zero-bubble schedules.

The gradients of activations, for which the previous stage waits, come first; those of parameters
can come later.
"""

from stagec.api import Module, Operation, Pass, Phase, Region, Value, made_by
from stagec.ir.core import renumber
from stagec.ir.layers import kind_of
from stagec.ir.rewrite import bind, carried, stacked
from stagec.ir_spec.strategy.pipeline import PipelineRule
from stagec.passes.pipeline_stages.layers import runs_layers
from stagec.passes.pipeline_stages.relayed_values import critical_ops
from stagec.passes.pipeline_stages.sections import dissect
from stagec.schedule.attached import schedule_of
from stagec.sharding.stages import accumulation, pipeline_rule


class SplitWeightGradients(Pass):
    """Split each backward repeat in two where the schedule runs the gradients of weights later.

    The first repeat computes the gradients of activations; the second one computes those of
    parameters and carries nothing. Values that the second one needs are stacked results of the
    first. Without a `stg.pipeline` whose schedule splits backward nothing happens.

    Before:
        stg.symbols[B, D, L]
        stg.mesh @pod[pp = 2]
        stg.func @train(%x: bf16[B, D | rep], %W: bf16[L, D, D | rep param]) {
          %d_x, %g_W = stg.accumulate[
              count = 4, split = B, pipeline = pp, pipeline_schedule = "zb-h1"] (
              %x_mb: bf16[B/4, D | rep] = %x) {
            %y, %H = stg.repeat[count = L, carry = 1] (
                %h: bf16[B/4, D | rep] = %x_mb, %w: bf16[D, D | rep] = %W) {
              %u = stg.einsum["bd,de->be"](%h, %w) : bf16[B/4, D | rep]
              stg.yield(%u, %h)
            } : (bf16[B/4, D | rep], bf16[L, B/4, D | rep])
            %d_x, %g_W = stg.repeat[reverse, count = L, carry = 1, phase = backward] (
                %d: bf16[B/4, D | rep] = %y, %w: bf16[D, D | rep] = %W,
                %h: bf16[B/4, D | rep] = %H) {
              %d_h = stg.einsum["be,de->bd"](%d, %w) : bf16[B/4, D | rep]
              %d_w = stg.einsum["bd,be->de"](%h, %d) : bf16[D, D | rep]
              stg.yield(%d_h, %d_w)
            } : (bf16[B/4, D | rep], bf16[L, D, D | rep])
            stg.yield(%d_x, %g_W)
          } : (bf16[B, D | rep], bf16[L, D, D | rep])
          stg.return(%d_x, %g_W)
        }
    After:
        stg.symbols[B, D, L]
        stg.mesh @pod[pp = 2]
        stg.func @train (%x: bf16[B, D | rep], %W: bf16[L, D, D | rep param]) {
          %d_x, %g_W = stg.accumulate[
              count = 4, split = B, pipeline = pp, pipeline_schedule = "zb-h1"] (
              %x_mb: bf16[B/4, D | rep] = %x) {
            %y, %H = stg.repeat[count = L, carry = 1] (
                %h: bf16[B/4, D | rep] = %x_mb, %w: bf16[D, D | rep] = %W) {
              %u = stg.einsum["bd,de->be"](%h, %w) : bf16[B/4, D | rep]
              stg.yield(%u, %h)
            } : (bf16[B/4, D | rep], bf16[L, B/4, D | rep])
            %d_x, %hand_d = stg.repeat[reverse, count = L, carry = 1, phase = backward] (
                %d: bf16[B/4, D | rep] = %y, %w: bf16[D, D | rep] = %W,
                %h: bf16[B/4, D | rep] = %H) {
              %d_h = stg.einsum["be,de->bd"](%d, %w) : bf16[B/4, D | rep]
              stg.yield(%d_h, %d)
            } : (bf16[B/4, D | rep], bf16[L, B/4, D | rep])
            %g_W = stg.repeat[reverse, count = L, carry = 0, phase = backward] (
                %h: bf16[B/4, D | rep] = %H, %d: bf16[B/4, D | rep] = %hand_d) {
              %d_w = stg.einsum["bd,be->de"](%h, %d) : bf16[D, D | rep]
              stg.yield(%d_w)
            } : bf16[L, D, D | rep]
            stg.yield(%d_x, %g_W)
          } : (bf16[B, D | rep], bf16[L, D, D | rep])
          stg.return(%d_x, %g_W)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        rule = pipeline_rule(accumulation(module.main))
        return rule is not None and _splits(module, rule)

    def run(self, module: Module) -> None:
        accumulate = accumulation(module.main)
        if accumulate is not None:
            split_weight_gradients(module, accumulate.body)


def _splits(module: Module, rule: PipelineRule) -> bool:
    return schedule_of(module.registry, rule.schedule).splits_weight_gradient


def split_weight_gradients(module: Module, body: Region) -> None:
    """Split every backward repeat in the region of a step, in place. Raises `DiagnosticError` if
    the step is not a chain of repeats."""
    critical = critical_ops(dissect(body))
    for op in list(body.ops):
        if runs_layers(op) and op.phase != "forward" and carried(op):
            _Split(module, op, op.body, critical).run()


class _Split:
    def __init__(
        self, module: Module, op: Operation, region: Region, critical: set[Operation]
    ) -> None:
        self._module, self._op, self._region = module, op, region
        self._carry = carried(op)
        self._end = region.terminator
        pairs = zip(op.results[self._carry :], self._end.operands[self._carry :], strict=True)
        awaited = [y for r, y in pairs if any(user in critical for user, _ in r.uses)]
        first = region.ancestors((*self._end.operands[: self._carry], *awaited))
        self._later = [o for o in region.ops[:-1] if o not in first]
        self._inside: dict[Value, Value] = {}

    def run(self) -> None:
        if not self._later:
            return
        op, registry = self._op, self._module.registry
        count = op.expr("count")
        loc = made_by(SplitWeightGradients.name, op.loc)
        attrs = {**op.attrs, "carry": count - count, "phase": op.phase}
        second = Operation(op.definition, (), attrs, symbol=kind_of(op), loc=loc)
        new = second.make_region()
        yielded = list(self._end.operands)
        moved = [i for i, v in enumerate(yielded) if v.producer in self._later]
        for inner in self._later:
            self._region.ops.remove(inner)
            new.append(inner)
        for inner in list(new.walk()):
            for index, value in enumerate(inner.operands):
                if value.region is self._region:
                    inner.set_operand(index, self._bound(second, value))
        new.append(Operation(registry["stg.yield"], [yielded[i] for i in moved], loc=loc))
        for i in moved:
            old = op.results[i]
            old.replace_with(second.add_result(old.name, old.type, old.loc))
        kept = [i for i in range(len(yielded)) if i not in moved]
        kept += range(len(yielded), len(self._end.operands))  # values for the second repeat
        self._end.set_operands([self._end.operands[i] for i in kept])
        op.results[:] = [op.results[i] for i in kept]
        renumber(op.results)
        op.home.insert(op.position() + 1, second)

    def _bound(self, second: Operation, value: Value) -> Value:
        """The argument of the second repeat for a value of the first."""
        if value not in self._inside:
            if isinstance(value.owner, Region) and value.index >= self._carry:
                outer = self._op.operands[value.index]
            else:
                outer = stacked(self._op, value, value.prefixed("hand_"))
            self._inside[value] = bind(second, outer, value)
        return self._inside[value]
