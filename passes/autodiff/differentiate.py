"""differentiate: reverse-mode differentiation of the training step, by the gradients that ops
define.

The backward of a repeat is a repeat in reverse. Forward values that it uses are stacked results of
the forward repeat: the stash is explicit. L layers h + gelu(h w), types left out, become

    %y, %stash_u, %stash_h = stg.repeat[count = L] (%h = %x, %w = %W) {
      %u = stg.einsum["bd,de->be"](%h, %w)
      %g = stg.gelu(%u)
      %r = stg.add(%h, %g)
      stg.yield(%r, %u, %h)                   forward yields what backward uses
    }
    %d_x, %g_W = stg.repeat[reverse, count = L, carry = 1, phase = backward] (
      %d_r = %d_y,                            the gradient is carried from layer to layer
      %u = %stash_u, %h = %stash_h, %w = %W) {
      %d_u = stg.gelu_grad(%d_r, %u)
      %d_h = stg.einsum["be,de->bd"](%d_u, %w)
      %d_w = stg.einsum["bd,be->de"](%h, %d_u)
      %d_w_f32 = stg.cast[f32](%d_w)
      %d_h_2 = stg.add(%d_r, %d_h)            two contributions: of the sum, and of the product
      stg.yield(%d_h_2, %d_w_f32)
    }
    %g_W_2 = stg.gradient[phase = gradient](%g_W)

Gradients of parameters end in `stg.gradient`, where they are reduced. A sum or a cast before the
reduction is placed directly after the gradient, so that the reduction does not wait for other
gradients.

Values that depend on no trained parameter need no gradient.

With a frozen tower in front of a trained model,

    %v = stg.repeat[count = L] (%h = %image, %w = %frozen) { ... }
    %e = stg.einsum["bnd,de->bne"](%v, %w1)

%v needs no gradient, and the tower stashes nothing. If `%w1` is frozen too, neither does `%e`. A
value from another part of the model needs one if that part trains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stagec.api import (
    Builder,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Strategy,
    TensorType,
    Value,
    const,
    letters,
    made_by,
    read_strategy,
)
from stagec.ir.builder import RawAttr
from stagec.ir.layers import kind_of, stack_of
from stagec.ir.rewrite import erase_unused
from stagec.ir.trained import trained_values
from stagec.ir.traits import BeginsBackward, Free
from stagec.ir.types import FLOATS
from stagec.ir_spec.ops.parts import Arrive
from stagec.ir_spec.strategy.fusion import COMPILED, FusionRule
from stagec.ir_spec.strategy.moe import MoeRule
from stagec.ir_spec.strategy.part import MAIN
from stagec.ir_spec.strategy.recompute import RecomputeRule
from stagec.ir_spec.strategy.saved_tensors import SavedTensorsRule
from stagec.passes.autodiff.carried_values import hand_over, pin_again
from stagec.passes.autodiff.reductions import PASS, GradientReductions, cast_once, where_made
from stagec.sharding.gathers import is_of_parameter
from stagec.sharding.stages import accumulation


class Differentiate(Pass):
    """Append the gradient of the loss with respect to every parameter, through repeats and
    accumulation.

    A forward repeat yields the values that its backward needs, stacked over layers: the stash is
    explicit.

    Before:
        stg.func @f(%x: f32[B], %w: f32[B | param]) -> f32[] {
          %y = stg.mul(%x, %w) : f32[B]
          %l = stg.sum["b->"](%y) : f32[]
          stg.return(%l)
        }
    After:
        stg.func @f(%x: f32[B], %w: f32[B | param]) -> (f32[], f32[B]) {
          %y = stg.mul(%x, %w) : f32[B]
          %l = stg.sum["b->"](%y) : f32[]
          %d_loss = stg.constant[value = 1, phase = backward] : f32[]
          %d_y = stg.broadcast["->b", sizes = B, phase = backward](%d_loss) : f32[B]
          %d_x = stg.mul[phase = backward](%d_y, %w) : f32[B]
          %d_w = stg.mul[phase = backward](%d_y, %x) : f32[B]
          %g_w = stg.gradient[phase = gradient](%d_w) : f32[B]
          stg.return(%l, %g_w)
        }
    """

    needs = Phase.SHAPED
    until = Phase.PLACED
    gives = Phase.DIFFERENTIATED

    def run(self, module: Module) -> None:
        if module.phase == Phase.SHAPED.label and module.ops("stg.strategy"):
            module.diagnostics.remark(
                "the strategy is not applied: run 'apply-strategy' before 'differentiate'",
                module.ops("stg.strategy")[0].loc,
            )
        differentiate(module)
        what = read_strategy(module).recompute
        if what != RecomputeRule() and not any(op.phase == "recompute" for op in module.walk()):
            module.diagnostics.remark(
                f"'stg.recompute' changes nothing: no layer's backward needs a value that "
                f"'{what.policy}' drops (selective: one that grows with the square of a dimension, "
                "such as scores; fused attention keeps none); recompute more: "
                "--recompute-selective attention or products, or --recompute full",
                what.loc,
            )


def differentiate(module: Module) -> None:
    """Append the backward of the main function: it then returns the loss and one gradient per
    parameter.

    A part of a model that has no loss begins with the gradients that other parts send back; a part
    that trains nothing is left unchanged. Raises `DiagnosticError` if there is no scalar loss, no
    parameter, or a parameter that does not influence the loss.
    """
    func, params = module.main, module.trainable()
    is_part = "part" in func.attrs
    if is_part and not params and not _passes_on(func):
        return
    loss = _scalar_loss(func) if func.text("part", MAIN) == MAIN else None
    if not params and not is_part:
        raise func.error(
            f"@{func.symbol} has no parameters to train",
            remedy="mark them: '%w: bf16[D, F | param]'",
        )
    _TrainingStep(module, read_strategy(module), params).run(loss)


def _scalar_loss(func: Operation) -> Value:
    """The first result of a function. Raises `DiagnosticError` if that is not a scalar loss."""
    end = func.body.terminator
    loss = end.operands[0] if end.operands else None
    type_ = loss.type if loss is not None else None
    if loss is None or not isinstance(type_, TensorType) or type_.rank or type_.dtype not in FLOATS:
        type_shown = "nothing" if loss is None else type_
        raise end.error(
            f"'differentiate' expects @{func.symbol} to return a scalar loss, found {type_shown}",
            remedy="return a loss first, or compile without backward: --pipeline forward",
        )
    return loss


def _passes_on(func: Operation) -> bool:
    """Whether a part returns gradients of values that it receives from trained parts."""
    return any(isinstance(op.definition, Arrive) and op.flag("trained") for op in func.body.walk())


class _TrainingStep:
    """Builds the backward of a training step."""

    def __init__(self, module: Module, strategy: Strategy, params: list[Value]) -> None:
        self._module, self._strategy, self._params = module, strategy, params
        self._registry = module.registry
        self._reductions = GradientReductions(module, strategy)
        self.keeps_saved = strategy.one(SavedTensorsRule).until == "node"
        self.compiled = strategy.one(FusionRule).kind in COMPILED
        self.saves_needed = strategy.one(SavedTensorsRule).first == "needed"
        self.blocks = strategy.one(SavedTensorsRule).blocks
        self.keeps_graphs = strategy.one(MoeRule).names == "layer"
        self.idle = idle_values(module)

    def run(self, loss: Value | None) -> None:
        func = self._module.main
        region = func.body
        wrapped = accumulation(func)
        if wrapped is not None and (loss is None or loss.producer is wrapped):
            region = wrapped.body
            self._reductions.accumulates = True
            loss = region.terminator.operands[loss.index] if loss is not None else None
        at = made_by(PASS, loss.loc if loss is not None else func.loc)
        builder = Builder.before(self._registry, region.terminator, loc=at, phase="backward")
        tape = _Tape(self, builder)
        if loss is not None:
            one = builder.value("stg.constant", attrs={"value": 1}, hint="d_loss")
            if (dtype := loss.tensor.dtype) != one.tensor.dtype:
                one = builder.value("stg.cast", [one], {"to": dtype}, hint=f"d_loss_{dtype}")
            tape.give(loss, one)
        tape.backward(list(region.ops[:-1]))
        sums = {p: self._finish(tape, p, region, wrapped) for p in self._params}
        reductions = self._reductions
        grads = sums if reductions.inside() else reductions.behind(sums, tape.loops)
        end = func.body.terminator
        losses = end.operands[: 1 if loss is not None else 0]
        returns = func.body.returns or tuple(v.tensor for v in losses)
        end.set_operands([*losses, *(grads[p] for p in self._params)])
        func.body.returns = (*returns[: len(losses)], *(grads[p].tensor for p in self._params))

    # -- gradients of parameters -------------------------------------------------------------------

    def _finish(
        self, tape: _Tape, param: Value, region: Region, wrapped: Operation | None
    ) -> Value:
        grad = tape.take(param, at_once=True)
        if grad is None:
            raise param.error(
                f"parameter %{param.name} does not influence the loss",
                remedy="use it, or drop the clause 'param'",
            )
        loc = made_by(PASS, param.loc)
        b = Builder.before(self._registry, region.terminator, loc=loc, phase="gradient")
        if self._strategy.optimizer.form == "in_backward":
            b = where_made(b, [grad])
            b.phase = "gradient"
        if param not in tape.loops:
            grad = self._reductions.local(b, grad, param, sliced=False)
        if wrapped is not None:
            end = wrapped.body.terminator
            end.add_operand(grad)
            grad = wrapped.add_result(param.prefixed("g_"), grad.type, param.loc)
        return grad

    # -- repeats -----------------------------------------------------------------------------------

    def repeat_backward(self, tape: _Tape, op: Operation) -> None:
        """Append the backward of a repeat: a reversed repeat over the same slices and the stash."""
        carry, count = op.integer("carry", 1), op.expr("count")
        given = [tape.take(r) for r in op.results[:carry]]
        if any(tape.has(r) for r in op.results[carry:]):
            raise op.error(
                "stacked results of a repeat have no gradient yet",
                remedy="return them beside the loss instead of using them for it",
            )
        live = self._live_carries(op, {i for i, g in enumerate(given) if g is not None})
        if not live:
            return
        ends = [(given[i], op.results[i]) for i in live]
        starts = [_zero(tape.builder, r) if g is None else g for g, r in ends]
        order = {"order": op.attrs["order"]} if "order" in op.attrs else {}
        attrs = {"count": count, "carry": const(len(live)), **order}
        back = tape.builder.op("stg.repeat", starts, attrs, types=(), symbol=kind_of(op))
        if not op.flag("reverse"):
            back.attrs["reverse"] = True
        region = back.make_region()
        inner = _Tape(self, Builder(self._registry, region, loc=tape.builder.loc, phase="backward"))
        for i in live:
            name, type_ = op.results[i].prefixed("d_"), op.body.args[i].tensor.unplaced()
            inner.give(op.body.terminator.operands[i], region.add_arg(name, type_, op.loc))
        inner.backward(list(op.body.ops[:-1]))
        self._close_repeat(tape, op, back, inner, live)

    def _live_carries(self, op: Operation, given: set[int]) -> list[int]:
        """The indices of carried values of a repeat that have a gradient in some layer of its
        stack: those with a gradient after the last layer, and those from which these are
        computed."""
        bodies, live = [member.body for member in stack_of(op).members], set(given)
        while True:
            more = set[int]()
            for body in bodies:
                ends = [body.terminator.operands[i] for i in live]
                behind = {*ends, *(v for o in body.ancestors(ends) for v in o.reads())}
                args = enumerate(body.args[: op.integer("carry", 1)])
                more |= {i for i, a in args if a in behind and a.tensor.dtype in FLOATS}
            more = {i for i in more - live if any(b.args[i] not in self.idle for b in bodies)}
            if not more:
                return sorted(live)
            live |= more

    def _close_repeat(
        self, tape: _Tape, op: Operation, back: Operation, inner: _Tape, live: list[int]
    ) -> None:
        carry, count, region = op.integer("carry", 1), op.expr("count"), back.body
        carried = [inner.take(op.body.args[i]) for i in live]
        if any(c is None for c in carried):
            raise op.error(
                "a carried value of this repeat does not influence what it yields",
                remedy="do not carry it",
            )
        yields: list[Value] = [c for c in carried if c is not None]
        slots: list[tuple[Value, bool]] = []
        for arg, outer in zip(op.body.args[carry:], op.operands[carry:], strict=True):
            is_param = outer in self._params
            grad = inner.take(arg, at_once=is_param)
            if grad is None:
                continue
            if is_param:
                grad = self._reductions.local(inner.builder, grad, outer, sliced=True)
            yields.append(grad)
            slots.append((outer, is_param))
        shared = inner.leftovers()
        yields += [g for _, g in shared]
        region.append(Operation(self._registry["stg.yield"], yields, loc=back.loc))
        if self.saves_needed and all(op.operands[i] in self.idle for i in live):
            back.attrs["first_idle"] = True
        for i, value in zip(live, yields, strict=False):
            back.add_result(op.operands[i].prefixed("d_"), value.tensor)
            tape.give(op.operands[i], back.results[-1])
        for (outer, is_param), value in zip(slots, yields[len(live) :], strict=False):
            name = outer.prefixed("g_" if is_param else "d_")
            tape.give(outer, back.add_result(name, value.tensor.stacked(count)))
            tape.loops |= {outer: back} if is_param else {}
        for outer, grad in shared:
            result = back.add_result(outer.prefixed("d_") + "_stack", grad.tensor.stacked(count))
            tape.give(outer, _sum_stack(tape.builder, result, outer.prefixed("d_")))
        if self.idle:
            erase_unused(region)  # so that unused values are not stashed
        keeps = {"keep_inputs": self.keeps_saved, "keep_idle": not self.compiled}
        sums = inner.sums if self.keeps_graphs else {}
        hand_over(
            self._registry, op, back, **keeps, blocks=self.blocks, origins=inner.origins, sums=sums
        )


class _Tape:
    """Accumulates the gradients of the values of one region."""

    def __init__(self, step: _TrainingStep, builder: Builder) -> None:
        self._step, self.builder = step, builder
        self._grads: dict[Value, list[Value]] = {}
        #: Maps a parameter that a loop slices to the loop that makes its gradient, slice by slice.
        self.loops: dict[Value, Operation] = {}
        #: Maps operations to those of forward of which they compute gradients.
        self.origins: dict[Operation, Operation] = {}
        #: Maps values to their complete gradients.
        self.sums: dict[Value, Value] = {}

    def give(self, value: Value, grad: Value) -> None:
        """Add a contribution, if the value needs a gradient. PyTorch adds it to the earlier ones at
        once (`InputBuffer::add` of torch/csrc/autograd); other frameworks add all in one op."""
        if value in self._step.idle:
            return
        before = self._grads.setdefault(value, [])
        if before and self._step.keeps_saved:
            grad = self.builder.value("stg.add", [before.pop(), grad], hint=value.prefixed("d_"))
        before.append(grad)

    def has(self, value: Value) -> bool:
        """Whether the value has a gradient."""
        return value in self._grads

    def take(self, value: Value, *, at_once: bool = False) -> Value | None:
        """The sum of the contributions, computed at the builder or, with `at_once`, directly after
        the last contribution, or None."""
        gradients = self._grads.pop(value, [])
        if len(gradients) > 1:
            b = where_made(self.builder, gradients) if at_once else self.builder
            gradients = [b.value("stg.add", gradients, hint=value.prefixed("d_"))]
        if not gradients:
            return None
        self.sums[value] = gradients[0]
        return gradients[0]

    def leftovers(self) -> list[tuple[Value, Value]]:
        """Values from outside of the region with the gradients that one iteration contributes."""
        outside = [(v, self.take(v)) for v in list(self._grads)]
        return [(v, g) for v, g in outside if g is not None]

    def backward(self, ops: Iterable[Operation]) -> None:
        """Differentiate operations in reverse order."""
        for op in reversed(list(ops)):
            if not any(self.has(r) for r in op.results) and not op.has(BeginsBackward):
                continue
            self.builder.loc = made_by(PASS, op.loc)
            if op.region is not None:
                self._step.repeat_backward(self, op)
                continue
            results = [self.take(r) for r in op.results]
            made = list[Operation]()
            self.builder.finish = made.append
            grads = op.definition.grad(self.builder, op, results)
            if self._step.keeps_saved:
                self._keep_saved(op, made)
            self.builder.finish = None
            self.origins |= dict.fromkeys(made, op)
            for value, grad in zip(op.operands, grads, strict=True):
                if grad is not None and value.tensor.dtype in FLOATS:
                    self.give(value, grad)
        pin_again(self.builder.region, self.origins)

    def _keep_saved(self, op: Operation, made: Sequence[Operation]) -> None:
        """Keep the activations that an op has saved until its last gradient op."""
        last = next((each for each in reversed(made) if not each.has(Free)), None)
        if any(each.flag("saved") for each in made):
            return
        saved = {v for v in (*op.operands, *op.results) if not is_of_parameter(v)}
        read = dict.fromkeys(v for each in made for v in each.operands if v in saved)
        if last is not None and (kept := [v for v in read if v not in last.operands]):
            self.builder.op("stg.discard", kept, types=())


def _zero(b: Builder, value: Value) -> Value:
    """A gradient of zeros for a value."""
    type_ = value.tensor
    zero = cast_once(b, b.value("stg.constant", attrs={"value": 0}, hint="zero"), type_.dtype)
    if not type_.rank:
        return zero
    attrs: dict[str, RawAttr] = {"spec": f"->{letters(type_.rank)}", "sizes": type_.shape}
    return b.value("stg.broadcast", [zero], attrs, hint=value.prefixed("d_"))


def _sum_stack(b: Builder, stack: Value, hint: str) -> Value:
    """The sum over the iterations of a repeat."""
    text = letters(stack.tensor.rank)
    return b.value("stg.sum", [stack], {"spec": f"{text}->{text[1:]}"}, hint=hint)


def idle_values(module: Module) -> frozenset[Value]:
    """The values of the main function that need no gradient; empty if no parameter is frozen."""
    trained = set(module.trainable())
    if len(trained) == len(module.parameters()):
        return frozenset()
    body = module.main.body
    ends = (op for op in body.walk() if isinstance(op.definition, Arrive) and op.flag("trained"))
    trained_set = trained_values(body, trained | {op.result for op in ends})
    values = [*body.args, *(v for op in body.walk() for v in _values(op))]
    return frozenset(v for v in values if v not in trained_set)


def _values(op: Operation) -> Iterable[Value]:
    return (*op.results, *(op.region.args if op.region is not None else ()))
