"""keep-stage-values: extends the lifetimes of values that pipeline stages receive and return."""

from collections.abc import Iterator
from dataclasses import replace

from stagec.api import Module, Operation, Pass, Phase, Value, read_strategy
from stagec.ir.module import uncast
from stagec.ir.traits import Accumulates, TakesLogits
from stagec.ir_spec.ops.comm import AllSlice
from stagec.ir_spec.ops.layout import Discard
from stagec.ir_spec.ops.pipeline import ActionOp, RecvOp, SendOp
from stagec.ir_spec.ops.structure import joined
from stagec.ir_spec.strategy.stage_buffers import AHEAD, NEXT, SENT, STEP, WEIGHTS, StageBuffersRule
from stagec.passes.pipeline_stages.sections import ActionKind, yielded
from stagec.schedule.attached import schedule_of
from stagec.sharding.stages import stage_functions


class KeepStageValues(Pass):
    """Extend the lifetimes of the buffers of a stage, as `stg.stage_buffers` states: the stage
    receives into one buffer per microbatch, and keeps its results until the backward of their
    microbatch or the step ends, the last one until gradients have been reduced if the stage has one
    part of the model. It keeps the gradient that it sends until that of the next microbatch exists.

    Before:
        stg.symbols[B, D]
        stg.assume[B % 4 == 0]
        stg.mesh @pod[pp = 2]
        stg.strategy @s[mesh = @pod] {
          stg.stage_buffers[received = ahead, results = backward]
        }
        stg.func @f_stage0[over = pp, stages = 0, parameters = D^2](
            %x: bf16[B, D | rep], %w: bf16[D, D | rep param]) -> bf16[D, D | rep] {
          %g = stg.accumulate[count = 4, split = B, schedule = "1f1b"] (
              %x_mb: bf16[B/4, D | rep] = %x) {
            stg.action[forward, chunk = 0] {
              %y = stg.einsum["bd,de->be"](%x_mb, %w) : bf16[B/4, D | rep]
              stg.send[over = pp, by = 1](%y)
              stg.yield()
            }
            %d_w = stg.action[backward, chunk = 0, phase = backward] {
              %d_y = stg.recv[over = pp, by = -1, channel = 1] : bf16[B/4, D | rep]
              %d_w = stg.einsum["bd,be->de"](%x_mb, %d_y) : bf16[D, D | rep]
              stg.yield(%d_w)
            } : bf16[D, D | rep]
            stg.yield(%d_w)
          } : bf16[D, D | rep]
          stg.return(%g)
        }
        stg.func @f_stage1[over = pp, stages = 1, parameters = D^2](
            %w: bf16[D, D | rep param]) -> bf16[D, D | rep] {
          %g = stg.accumulate[count = 4, split = B, schedule = "1f1b"] {
            %y = stg.action[forward, chunk = 0] {
              %y = stg.recv[over = pp, by = 1] : bf16[B/4, D | rep]
              stg.yield(%y)
            } : bf16[B/4, D | rep]
            %d_w = stg.action[backward, chunk = 0, phase = backward] {
              %d_y = stg.einsum["bd,de->be"](%y, %w) : bf16[B/4, D | rep]
              stg.send[over = pp, by = -1, channel = 1](%d_y)
              %d_w = stg.einsum["bd,be->de"](%y, %d_y) : bf16[D, D | rep]
              stg.yield(%d_w)
            } : bf16[D, D | rep]
            stg.yield(%d_w)
          } : bf16[D, D | rep]
          stg.return(%g)
        }
    After:
        stg.symbols[B, D]
        stg.assume[B % 4 == 0]
        stg.mesh @pod[pp = 2]
        stg.strategy @s[mesh = @pod] {
          stg.stage_buffers[received = ahead, results = backward]
        }
        stg.func @f_stage0[over = pp, stages = 0, parameters = D^2] (
            %x: bf16[B, D | rep], %w: bf16[D, D | rep param],
            %received_d_y: bf16[4, B/4, D | rep bucket]) -> bf16[D, D | rep] {
          %g = stg.accumulate[count = 4, split = B, schedule = "1f1b"] (
              %x_mb: bf16[B/4, D | rep] = %x) {
            %y = stg.action[forward, chunk = 0] {
              %y = stg.einsum["bd,de->be"](%x_mb, %w) : bf16[B/4, D | rep]
              stg.send[over = pp, by = 1](%y)
              stg.yield(%y)
            } : bf16[B/4, D | rep]
            %d_w = stg.action[backward, chunk = 0, phase = backward] {
              %d_y = stg.recv[over = pp, by = -1, channel = 1](%received_d_y) : bf16[B/4, D | rep]
              %d_w = stg.einsum["bd,be->de"](%x_mb, %d_y) : bf16[D, D | rep]
              stg.discard(%y)
              stg.yield(%d_w)
            } : bf16[D, D | rep]
            stg.yield(%d_w)
          } : bf16[D, D | rep]
          %y_last = stg.workspace[phase = backward] : bf16[B/4, D | rep]
          stg.discard[phase = backward](%y_last)
          stg.return(%g)
        }
        stg.func @f_stage1[over = pp, stages = 1, parameters = D^2] (
            %w: bf16[D, D | rep param], %received_y: bf16[4, B/4, D | rep bucket]) ->
            bf16[D, D | rep] {
          %g = stg.accumulate[count = 4, split = B, schedule = "1f1b"] {
            %y = stg.action[forward, chunk = 0] {
              %y = stg.recv[over = pp, by = 1](%received_y) : bf16[B/4, D | rep]
              stg.yield(%y)
            } : bf16[B/4, D | rep]
            %d_w = stg.action[backward, chunk = 0, phase = backward] {
              %d_y = stg.einsum["bd,de->be"](%y, %w) : bf16[B/4, D | rep]
              stg.send[over = pp, by = -1, channel = 1](%d_y)
              %d_w = stg.einsum["bd,be->de"](%y, %d_y) : bf16[D, D | rep]
              stg.yield(%d_w)
            } : bf16[D, D | rep]
            stg.yield(%d_w)
          } : bf16[D, D | rep]
          stg.return(%g)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        rule = read_strategy(module).one(StageBuffersRule)
        return rule != StageBuffersRule() and bool(stage_functions(module))

    def run(self, module: Module) -> None:
        rule = read_strategy(module).one(StageBuffersRule)
        for func in module.functions:
            accumulate = next(op for op in func.body.ops if op.has(Accumulates))
            if rule.received == AHEAD:
                _receive_ahead(func, accumulate)
            if rule.results != SENT:
                _keep_results(module, accumulate)
                _keep_last(module, func, accumulate)
            if rule.results == STEP:
                _keep_outputs(module, func, accumulate)
            if rule.graph == WEIGHTS:
                _keep_graph(module, func, accumulate)
            schedule = schedule_of(module.registry, accumulate.text("schedule"))
            if rule.gradients == NEXT and schedule.keeps_sent_gradients:
                _keep_gradients(accumulate)


def _receive_ahead(func: Operation, accumulate: Operation) -> None:
    """Give each received message a buffer of the function with one slice per microbatch."""
    for op in [op for op in accumulate.body.walk() if isinstance(op.definition, RecvOp)]:
        stack = op.result.tensor.stacked(accumulate.expr("count"))
        type_ = replace(stack, role="bucket", placed=True)
        op.add_operand(func.body.add_arg(f"received_{op.result.name}", type_, op.loc))
    for value in _handed_over(accumulate):
        stack = value.tensor.stacked(accumulate.expr("count"))
        type_ = replace(stack, role="bucket", placed=True)
        func.body.add_arg(f"received_{value.name}", type_, value.loc)


def _handed_over(accumulate: Operation) -> Iterator[Value]:
    """The values that a chunk of a stage gives to the next one on the same rank, and their
    gradients: they replace the buffers of received ones (`set_local_fwd_input`,
    `set_local_bwd_input` of torch/distributed/pipelining/stage.py)."""
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        actions = _actions(accumulate, kind)
        for action in actions:
            for result in action.results:
                if any(user.parent_op in actions for user, _ in result.uses):
                    yield result


def _keep_results(module: Module, accumulate: Operation) -> None:
    """Keep the results of forward of a chunk until its backward ends."""
    for forward in _actions(accumulate, ActionKind.FORWARD):
        for back in _actions(accumulate, ActionKind.BACKWARD):
            if back.integer("chunk") == forward.integer("chunk"):
                kept = [yielded(forward, v) for v in _returned(forward)]
                if kept:
                    module.before(back.body.terminator, phase="backward").op("stg.discard", kept)


def _keep_last(module: Module, func: Operation, accumulate: Operation) -> None:
    """Keep what the last forward has sent until gradients have been reduced: a schedule of one
    chunk has a name for it (`output` of `ScheduleGPipe` and `Schedule1F1B`)."""
    forward, *others = _actions(accumulate, ActionKind.FORWARD)
    end = next((op for op in func.body.ops if op.phase == "optimizer"), func.body.terminator)
    for op in forward.body.ops if not others else ():
        for value in op.operands if isinstance(op.definition, SendOp) else ():
            after = module.after(accumulate, loc=op.loc, phase="backward")
            last = after.value("stg.workspace", type=value.tensor, hint=f"{value.name}_last")
            module.before(end, loc=op.loc, phase="backward").op("stg.discard", [last])


def _keep_outputs(module: Module, func: Operation, accumulate: Operation) -> None:
    """Join the logits of all microbatches after gradients have been reduced, and keep them to the
    end of the step (`step` and `_merge_outputs` of the schedules of PyTorch)."""
    for forward in _actions(accumulate, ActionKind.FORWARD):
        for value in _logits(forward):
            every = _keep_over_step(module, func, accumulate, yielded(forward, value))
            ends = (op for op in func.body.ops if op.phase == "optimizer")
            last = next(ends, next(user for user, _ in every.uses))
            b = module.before(last, loc=value.loc, phase="forward")
            merged = b.value("stg.reorder", [every], hint=f"{value.name}_merged")
            b.op("stg.discard", [merged])


def _keep_graph(module: Module, func: Operation, accumulate: Operation) -> None:
    """Keep the values that forward of a chunk saves until the gradients of its weights are
    computed, except for the loss, which is detached before, and logits, which no gradient needs.
    Keep the gradients of received values to the end of the step."""
    forwards, backs = (
        {action.integer("chunk"): action for action in _actions(accumulate, kind)}
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
    )
    for weights in _actions(accumulate, ActionKind.WEIGHTS):
        chunk = weights.integer("chunk")
        forward, back = forwards[chunk], backs[chunk]
        pairs = [*zip(forward.results, forward.body.terminator.operands, strict=True)]
        taken = [(r, v.producer) for r, v in pairs if any(u.parent_op is back for u, _ in r.uses)]
        saved = [r for r, made in taken if made is None or not made.has(TakesLogits)]
        logits = [*_logits(forward)]
        given = [r for r, v in pairs if v in logits]  # to the loss, which saves its own result
        saved = [r for r in saved if r not in given or any(map(_computes, r.uses))]
        if saved:
            b = module.before(weights.body.terminator, phase="backward")
            b.op("stg.discard", saved, {"alone": True})
        for value in _returned(back):
            _keep_over_step(module, func, accumulate, yielded(back, value))


def _computes(use: tuple[Operation, int]) -> bool:
    """Whether a value is used to compute, and not only kept."""
    return not isinstance(use[0].definition, Discard)


def _keep_over_step(module: Module, func: Operation, accumulate: Operation, value: Value) -> Value:
    """Keep a value of each microbatch to the end of the step. Returns the value that joins them."""
    accumulate.body.terminator.add_operand(value)
    every = accumulate.add_result(value.name, joined(accumulate, value.tensor), value.loc)
    module.before(func.body.terminator, phase="forward").op("stg.discard", [every])
    return every


def _keep_gradients(accumulate: Operation) -> None:
    """Keep the gradient that backward sends until that of the next microbatch exists."""
    for back in _actions(accumulate, ActionKind.BACKWARD):
        for op in back.body.ops:
            if isinstance(op.definition, SendOp):
                op.attrs["stays"] = True


def _actions(accumulate: Operation, kind: ActionKind) -> list[Operation]:
    actions = (op for op in accumulate.body.ops if isinstance(op.definition, ActionOp))
    return [op for op in actions if op.text("kind") == kind.label]


def _returned(forward: Operation) -> Iterator[Value]:
    """The values that a chunk sends (before ranks take their parts), or gives to the loss."""
    for op in forward.body.ops:
        for value in op.operands if isinstance(op.definition, SendOp) else ():
            made = value.producer
            part = made is not None and isinstance(made.definition, AllSlice)
            yield made.operands[0] if made is not None and part else value
    yield from _logits(forward)


def _logits(forward: Operation) -> Iterator[Value]:
    """The logits of the model before their cast for the loss."""
    for op in forward.body.ops:
        if op.has(TakesLogits):
            yield uncast(op.operands[0])
