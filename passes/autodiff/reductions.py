"""Reductions of the gradients of parameters: in each microbatch and layer, or once per step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stagec.api import Builder, Module, Operation, Strategy, Value, const, made_by
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ZERO
from stagec.ir.layers import kind_of
from stagec.ir.module import uncast
from stagec.ir.traits import Recasts
from stagec.ir_spec.ops.contraction import cast_to
from stagec.ir_spec.ops.selection import Pad
from stagec.ir_spec.strategy.dtypes import of_parameter, on_the_wire
from stagec.ir_spec.strategy.gradients import GradientsRule
from stagec.sharding.zero import StatePlacement

PASS = "differentiate"


class GradientReductions:
    """Places the reductions of the gradients of a step. If it `accumulates`, microbatches add up
    gradients."""

    def __init__(self, module: Module, strategy: Strategy) -> None:
        self._module, self._strategy = module, strategy
        self._registry, self._rule = module.registry, strategy.one(GradientsRule)
        self._placement = StatePlacement(module, strategy, PASS)
        self.accumulates = False

    def inside(self) -> bool:
        """Whether gradients are reduced per microbatch and layer (ZeRO-2 and 3, and updates in
        backward) instead of once per step."""
        if self._strategy.optimizer.form == "in_backward":
            return True
        return self._strategy.zero >= 2 and not self._adds_whole()

    def _adds_whole(self) -> bool:
        """Whether microbatches add up unreduced gradients of ZeRO-2 and 3."""
        once = self.accumulates and self._strategy.reduces_once
        return once and self._strategy.zero >= 2

    def local(self, b: Builder, grad: Value, param: Value, *, sliced: bool) -> Value:
        """The contribution of a microbatch to the gradient of a parameter. It is reduced at `b`, or
        added to those before it.

        A contribution is cast directly after the op that makes it. Unreduced sums of ZeRO-2 and 3
        are cast at `b`, where their unit ends (`FSDPParam.to_accumulated_grad_if_needed` of
        PyTorch). A reduced contribution is added next to its reduction, which is no kernel in the
        stream of computations."""
        dtypes, whole, at = self._strategy.dtypes, self._adds_whole(), where_made(b, [grad])
        if self.inside():
            wire = cast_once(at, grad, self._wire(param))
            return self._reduced(b, wire, param, sliced=sliced)
        if not self.accumulates:
            return cast_once(at, grad, self._wire(param))
        to = of_parameter(dtypes.grad, param.tensor.dtype)
        if whole:
            to, source = self._wire(param), uncast(grad)
            if source.tensor.dtype != dtypes.compute:  # a cast of autocast is a node of the graph
                source = grad
            grad = _unfilled(source)
            at = b if grad.tensor.dtype != to else where_made(b, [grad])
        attrs: dict[str, RawAttr] = {"to": to, **({"phase": "gradient"} if at is b else {})}
        if self._rule.sums == "cast" and grad.tensor.dtype != to:
            attrs["cast"] = True
        return at.value("stg.accumulate_grad", [grad], attrs, hint=f"{grad.name}_sum")

    def _wire(self, param: Value) -> str:
        """The element type in which the gradient of a parameter is reduced."""
        return on_the_wire(self._strategy.dtypes, self._strategy.zero, param.tensor.dtype)

    def behind(
        self, sums: Mapping[Value, Value], loops: Mapping[Value, Operation]
    ) -> Mapping[Value, Value]:
        """The gradients of a step, reduced after its backward in the order of the parameters.
        Unreduced sums of layers are reduced layer by layer, because each layer is a unit."""
        func = self._module.main
        b = Builder.before(self._registry, func.body.terminator, loc=func.loc, phase="gradient")
        units: dict[Operation, list[Value]] = {}
        for param in loops if self._adds_whole() else ():
            units.setdefault(loops[param], []).append(param)
        reduced: dict[Value, Value] = {}
        for param in (p for p in sums if p not in reduced):
            if unit := units.get(loops[param]) if param in loops else None:
                reduced |= self._reduced_in_turn(b, loops[param], {p: sums[p] for p in unit})
            else:
                reduced[param] = self._reduced(b, sums[param], param, sliced=False)
        return reduced

    def _reduced_in_turn(
        self, b: Builder, loop: Operation, sums: Mapping[Value, Value]
    ) -> Mapping[Value, Value]:
        """The reduced gradients of the parameters that a loop of backward slices, layer by layer in
        its order."""
        names = ("count", "order", "reverse")
        attrs: dict[str, RawAttr] = {n: loop.attrs[n] for n in names if n in loop.attrs}
        attrs["carry"] = ZERO
        b.loc = made_by(PASS, loop.loc)
        turns = b.op("stg.repeat", list(sums.values()), attrs, types=(), symbol=kind_of(loop))
        inner = Builder(self._registry, turns.make_region(), loc=b.loc, phase="gradient")
        made: list[Value] = []
        for param, value in sums.items():
            arg = turns.body.add_arg(param.prefixed("d_"), value.tensor.sliced(), param.loc)
            made.append(self._reduced(inner, arg, param, sliced=True))
        turns.body.append(Operation(self._registry["stg.yield"], made, loc=loop.loc))
        count = turns.expr("count")
        return {
            p: turns.add_result(p.prefixed("g_"), g.tensor.stacked(count), p.loc)
            for p, g in zip(sums, made, strict=True)
        }

    def _reduced(self, b: Builder, grad: Value, param: Value, *, sliced: bool) -> Value:
        dtypes = self._strategy.dtypes
        loc, phase = b.loc, b.phase
        b.loc, b.phase = made_by(PASS, param.loc), "gradient"
        for d, size in enumerate(param.tensor.shape[param.tensor.rank - grad.tensor.rank :]):
            if grad.tensor.shape[d] != size:
                attrs: dict[str, RawAttr] = {"dim": const(d), "size": size}
                grad = b.value("stg.pad", [grad], attrs, hint=grad.name)
        wire = cast_once(b, grad, self._wire(param))
        place = self._placement.gradient(param)
        place = replace(place.sliced() if sliced else place.inner, dtype=wire.tensor.dtype)
        if self._strategy.zero == 1 and self._rule.collective == "all_reduce":
            whole = param.tensor.sliced() if sliced else param.tensor.inner
            whole = replace(whole, dtype=wire.tensor.dtype)
            if whole != place:
                wire = b.value("stg.gradient", [wire], type=whole, hint=param.prefixed("sum_"))
        final = b.value("stg.gradient", [wire], type=place, hint=param.prefixed("g_"))
        result = cast_once(b, final, of_parameter(dtypes.grad, param.tensor.dtype))
        b.loc, b.phase = loc, phase
        return result


def _unfilled(grad: Value) -> Value:
    """The gradient of a parameter before it was padded for a number of ranks that does not divide
    it. PyTorch pads at the reduction (`FSDPParam.unsharded_accumulated_grad` is not padded)."""
    made = grad.producer
    filled = made is not None and isinstance(made.definition, Pad) and "start" not in made.attrs
    return made.operands[0] if made is not None and filled else grad


def where_made(b: Builder, values: Sequence[Value]) -> Builder:
    """A builder directly after the op that makes the last of these values; `b` if no op makes
    them."""
    makers = [op for v in values if (op := v.producer) is not None]
    if not makers:
        return b
    last = max(makers, key=Operation.position)
    phase = b.phase if last.phase == "forward" else last.phase  # forward makes some gradients
    return Builder.after(b.registry, last, loc=b.loc, phase=phase)


def cast_once(b: Builder, value: Value, dtype: str) -> Value:
    """The value in an element type. The operand of a cast that made the value is reused if it has
    that type."""
    made = value.producer
    widened = made is not None and made.has(Recasts) and value.tensor.dtype != dtype
    if made is not None and widened and made.operands[0].tensor.dtype == dtype:
        return made.operands[0]
    return cast_to(b, value, dtype)
