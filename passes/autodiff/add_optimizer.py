"""add-optimizer: appends gradient norm, clipping and the update of each parameter."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stagec.api import (
    Builder,
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Strategy,
    Value,
    const,
    made_by,
    read_strategy,
)
from stagec.ir.rewrite import carried, slice_into, stacked
from stagec.ir.traits import Accumulates, Repeats, Terminates
from stagec.ir_spec.ops.adam8bit import SMALLEST
from stagec.ir_spec.ops.parts import arrive, depart
from stagec.ir_spec.strategy.bucket import BucketRule
from stagec.ir_spec.strategy.gradients import GradientsRule
from stagec.ir_spec.strategy.part import MAIN
from stagec.passes.autodiff.updates import Optimizer, TrainedTensor, matrix_of
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.zero import StatePlacement


class AddOptimizer(Pass):
    """Append the optimizer: the function then returns the loss, updated parameters and updated
    state.

    The strategy states the optimizer (`stg.optimizer`) and the element types of the master copy and
    the moments (`stg.dtypes`). A parameter of the type of the master copy has no copy. If
    `stg.gradients` frees gradients, the function gets the flag `freed` for the memory plan.

    Before:
        stg.func @f(%x: f32[B], %w: f32[B | param]) -> (f32[], f32[B]) {
          %y = stg.mul(%x, %w) : f32[B]
          %l = stg.sum["b->"](%y) : f32[]
          %g_w = stg.gradient[phase = gradient](%x) : f32[B]
          stg.return(%l, %g_w)
        }
    After:
        stg.func @f(%x: f32[B], %w: f32[B | param], %w_m: f32[B | state], %w_v: f32[B | state])
            -> (f32[], f32[B], f32[B], f32[B]) {
          %y = stg.mul(%x, %w) : f32[B]
          %l = stg.sum["b->"](%y) : f32[]
          %g_w = stg.gradient[phase = gradient](%x) : f32[B]
          %sq_g_w = stg.squared_norm[phase = optimizer](%g_w) : f32[]
          %clip = stg.clip_factor[max = 1, phase = optimizer](%sq_g_w) : f32[]
          %w_new, %w_m_new, %w_v_new = stg.adamw[clip, phase = optimizer](
            %w, %g_w, %w_m, %w_v, %clip) : (f32[B], f32[B], f32[B])
          stg.return[phase = optimizer](%l, %w_new, %w_m_new, %w_v_new)
        }
    """

    needs = Phase.DIFFERENTIATED

    def run(self, module: Module) -> None:
        add_optimizer(module)


def add_optimizer(module: Module) -> None:
    """Turn a function that returns (loss, gradients) into one that returns (loss, updated
    parameters and state).

    State arguments (`master` copy, moments `m` and `v`) are added, with the placement of the ZeRO
    stage. Raises `DiagnosticError` if the function does not return one gradient per parameter after
    the loss.
    """
    strategy = read_strategy(module)
    if strategy.optimizer.form == "in_backward":
        module.main.attrs["consumed"] = True
    elif _ends(strategy) and not _stay_in_buckets(strategy):
        _free_gradients(module, strategy)
    if strategy.optimizer.kind == "none":
        return
    body = module.main.body
    end, params = body.terminator, module.trainable()
    part = module.main.text("part", MAIN)
    losses = end.operands[: 1 if part == MAIN else 0]
    grads = end.operands[len(losses) :]
    if len(grads) != len(params):
        raise end.error(
            f"the step returns {len(grads)} gradients after the loss, expected one for each of "
            f"{len(params)} parameters",
            remedy="return one gradient for each parameter, as 'differentiate' does",
        )
    b = module.before(end, loc=strategy.loc, by=AddOptimizer.name, phase="optimizer")
    clip = None
    if strategy.optimizer.clip != 0 and grads:
        peers = module.main.names("peers")
        clip = _clip_factor(b, grads, strategy.optimizer.clip, part, peers)
    updates = _Updates(module, strategy, b)
    tensors = [updates.tensor(p, g, clip) for p, g in zip(params, grads, strict=True)]
    updated = updates.run(tensors)
    outputs = [(v, old) for t in tensors for v, old in zip(updated[t.param], t.olds, strict=True)]
    end.set_operands([*losses, *(v for v, _ in outputs)])
    end.attrs["phase"] = "optimizer"
    placed = (old.tensor.inner for _, old in outputs)
    body.returns = (*body.returns[: len(losses)], *placed)


class _Updates:
    """The updates of all parameters, in the form that the strategy states."""

    def __init__(self, module: Module, strategy: Strategy, b: Builder) -> None:
        self._module, self._body, self._b = module, module.main.body, b
        self._placement = StatePlacement(module, strategy, AddOptimizer.name)
        self._assumptions = Assumptions(module, AddOptimizer.name, strategy.loc)
        self._optimizer = Optimizer(module, strategy, self._assumptions)
        if self._optimizer.form == "in_backward":
            _check_in_backward(module, strategy)

    def tensor(self, param: Value, grad: Value, clip: Value | None) -> TrainedTensor:
        """A parameter with new arguments of the function for its state."""
        owned = replace(self._placement.gradient(param), role="state")
        kept = {
            name: self._body.add_arg(f"{param.name}_{name}", type_, param.loc)
            for name, type_ in self._optimizer.states(param, owned).items()
        }
        return TrainedTensor(param, grad, kept, matrix_of(param), clip)

    def run(self, tensors: Sequence[TrainedTensor]) -> Mapping[Value, Sequence[Value]]:
        """Build the updates. Returns the updated values of each parameter."""
        self._assumptions.check()
        if self._optimizer.kind == "adam8bit" and not any("m_scale" in t.kept for t in tensors):
            why = f"no tensor has {SMALLEST} elements or more, as moments of 8 bits need"
            self._module.diagnostics.remark(
                f"'stg.optimizer[adam8bit]' is AdamW: {why}", self._optimizer.loc
            )
        if self._optimizer.form == "in_backward":
            return {t.param: self._where_made(t) for t in tensors}
        if not self._optimizer.by_slices:
            return self._together(self._b, tensors)
        updated: dict[Value, Sequence[Value]] = {}
        stacks: dict[Operation | None, list[TrainedTensor]] = {}
        for t in tensors:
            stacks.setdefault(_stack_of(t.param) if t.matrix.depth else None, []).append(t)
        for repeat, members in stacks.items():
            if repeat is None:
                for t in members:
                    updated |= self._together(self._b, [t])
            else:
                updated |= self._layer_by_layer(repeat, members)
        return updated

    def _together(
        self, b: Builder, tensors: Sequence[TrainedTensor]
    ) -> Mapping[Value, Sequence[Value]]:
        """Updates by kernels that run one after the other, each for all tensors."""
        updated: dict[Value, Sequence[Value]] = {}
        running = {t: self._optimizer.update(b, t) for t in tensors}
        while running:
            for t, update in list(running.items()):
                b.loc = made_by(AddOptimizer.name, t.param.loc)
                try:
                    next(update)
                except StopIteration as end:
                    updated[t.param] = end.value
                    del running[t]
        return updated

    def _layer_by_layer(
        self, repeat: Operation, tensors: Sequence[TrainedTensor]
    ) -> Mapping[Value, Sequence[Value]]:
        """A repeat that updates the layers of stacks one after the other."""
        b = self._b
        b.loc = made_by(AddOptimizer.name, repeat.loc)
        attrs = {"count": repeat.expr("count"), "carry": const(0)}
        loop = b.op("stg.repeat", (), attrs, types=())
        region = loop.make_region()
        end = Operation(b.registry["stg.yield"], (), loc=loop.loc)
        region.append(end)
        inner = Builder(b.registry, region, 0, loc=b.loc, phase="optimizer")
        values: dict[Value, Sequence[Value]] = {}
        for t in tensors:
            sliced = self._sliced(loop, t, slice_into(loop, t.grad))
            (updated,) = self._together(inner, [sliced]).values()
            values[t.param] = _stacked(loop, updated, t)
        return values

    def _sliced(self, loop: Operation, t: TrainedTensor, grad: Value) -> TrainedTensor:
        """A slice of a tensor in a loop."""
        kept = {name: slice_into(loop, v) for name, v in t.kept.items()}
        places = [i for i, v in enumerate(loop.operands) if v is t.param and i >= carried(loop)]
        param = loop.body.args[places[0]] if places else slice_into(loop, t.param)
        return TrainedTensor(param, grad, kept, t.matrix.sliced(1), t.clip)

    def _where_made(self, t: TrainedTensor) -> Sequence[Value]:
        """Update a parameter in backward, after its gradient and its last use."""
        made = t.grad.producer
        if made is None:
            raise AssertionError(f"%{t.grad.name} is made by backward")
        inside = made.has(Repeats) and t.grad.index >= carried(made)
        if not inside:
            (value,) = self._together(self._behind(t), [t]).values()
            return value
        sliced = self._sliced(made, t, made.body.terminator.operands[t.grad.index])
        (updated,) = self._together(self._behind(sliced), [sliced]).values()
        return _stacked(made, updated, t)

    def _behind(self, t: TrainedTensor) -> Builder:
        """A builder after the op that makes a gradient and all users of its parameter there."""
        region, mesh = t.grad.region, self._module.mesh
        if mesh is not None and any(size != 1 for size in mesh.sizes.values()):
            # reductions of a layer's gradients are one call, before all updates
            place = len(region.ops) - 1
        else:
            users = [_within(op, region) for op, _ in t.param.uses]
            made = (op.position() for op in (*users, t.grad.producer) if op is not None)
            place = 1 + max(made)
        return Builder(self._b.registry, region, place, loc=self._b.loc, phase="optimizer")


def _within(op: Operation | None, region: Region) -> Operation | None:
    """The operation of a region that is or contains this one; None for its terminator."""
    while op is not None and op.parent is not region:
        op = op.parent_op
    return None if op is None or op.has(Terminates) else op


def _stacked(loop: Operation, updated: Sequence[Value], t: TrainedTensor) -> list[Value]:
    """The results of a loop that updates slices of a tensor."""
    pairs = zip(updated, t.olds, strict=True)
    return [stacked(loop, value, f"{old.name}_new", old.loc) for value, old in pairs]


def _stack_of(param: Value) -> Operation | None:
    """The repeat of forward that slices a parameter."""
    for op, index in param.uses:
        if op.has(Accumulates):
            return _stack_of(op.body.args[index])
        if op.has(Repeats) and op.phase == "forward" and index >= carried(op):
            return op
    return None


def _check_in_backward(module: Module, strategy: Strategy) -> None:
    """Raises `DiagnosticError` where gradients are sums that are complete later."""
    if any(op.has(Accumulates) for op in module.main.body.ops):
        raise strategy.optimizer.error(
            "gradients are summed over microbatches, so they cannot be applied during backward",
            remedy="leave 'in_backward' out, or compile one microbatch",
        )


def _ends(strategy: Strategy) -> bool:
    """Whether gradients are freed before the next step: by their updates not under ZeRO-3."""
    lifetime = strategy.one(GradientsRule).lifetime
    return lifetime == "freed" or (lifetime == "updated" and strategy.zero < 3)


def _stay_in_buckets(strategy: Strategy) -> bool:
    """Whether gradients are views of the flat buffers in which they are reduced."""
    return strategy.zero < 2 and bool(strategy.bucket) and strategy.one(BucketRule).views


def _free_gradients(module: Module, strategy: Strategy) -> None:
    """Set the flag `freed` of the function for the memory plan, and `spent` where updates free
    them, unless the gradients are sums over
    microbatches that persist."""
    late = strategy.pipeline is not None or (strategy.zero >= 2 and strategy.reduces_once)
    if any(op.has(Accumulates) for op in module.main.body.ops) and not late:
        why = "the sums of gradients over microbatches persist"
        loc, lifetime = strategy.one(GradientsRule).loc, strategy.one(GradientsRule).lifetime
        module.diagnostics.remark(f"'stg.gradients[{lifetime}]' changes nothing: {why}", loc)
    else:
        module.main.attrs["freed"] = True
        if strategy.one(GradientsRule).lifetime == "updated":
            module.main.attrs["spent"] = True


def _clip_factor(
    b: Builder, grads: Sequence[Value], clip: Expr, part: str, peers: Sequence[str]
) -> Value:
    """The factor that clips the norm of all gradients. The parts of a model send each other their
    shares of the norm."""
    squares = [b.value("stg.squared_norm", [g], hint=g.prefixed("sq_")) for g in grads]
    norm = _added(b, squares, "norm_sq")
    if peers:  # whole, for itself and for the others
        whole = replace(norm.tensor, placed=True)
        norm = b.value("stg.sharding_constraint", [norm], type=whole, hint=norm.name)
    shares = [norm]
    for peer in peers:
        ends = {"value": f"norm_sq_{part}", "source": part, "to": peer}
        depart(b, norm, replace(norm.tensor, placed=False), ends)
    for peer in peers:
        ends = {"value": f"norm_sq_{peer}", "source": peer, "to": part}
        shares.append(arrive(b, replace(norm.tensor, placed=True), ends, f"norm_sq_{peer}"))
    every = _added(b, shares, "norm_sq_all")
    return b.value("stg.clip_factor", [every], {"max": clip}, hint="clip")


def _added(b: Builder, values: Sequence[Value], hint: str) -> Value:
    return b.value("stg.add", values, hint=hint) if len(values) > 1 else values[0]
