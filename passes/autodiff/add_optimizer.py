"""add-optimizer: appends gradient norm, clipping and one AdamW update per parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagec.api import (
    Builder,
    Expr,
    Module,
    Pass,
    Phase,
    TensorType,
    Value,
    error,
    made_by,
    read_strategy,
)
from stagec.ir.traits import Accumulates
from stagec.ir_spec.ops.parts import arrive, depart
from stagec.ir_spec.strategy.dtypes import of_parameter
from stagec.ir_spec.strategy.gradients import GradientsRule
from stagec.ir_spec.strategy.part import MAIN
from stagec.sharding.zero import StatePlacement


@dataclass(frozen=True)
class AddOptimizer(Pass):
    """Append the optimizer: the function then returns the loss, updated parameters and updated
    state.

    The function states that `stg.gradients` frees its gradients, for the plan of memory.
    The strategy says which (`stg.optimizer`) and with which element types of the master copy and
    the moments (`stg.dtypes`). Parameters of the type of the copy have none.

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

    name = "add-optimizer"
    needs = Phase.DIFFERENTIATED

    def run(self, module: Module) -> None:
        add_optimizer(module)


PASS = "add-optimizer"


def add_optimizer(module: Module) -> None:
    """Turn a function that returns (loss, gradients) into one that returns (loss, updated
    parameters and state).

    State arguments (`master` copy, moments `m` and `v`) are added, placed as the ZeRO stage says.
    """
    strategy = read_strategy(module)
    if strategy.one(GradientsRule).lifetime == "freed":
        _free_gradients(module, strategy.one(GradientsRule))
    if strategy.optimizer == "none":
        return
    body = module.main.body
    end, params = body.terminator, module.trainable()
    placement = StatePlacement(module, strategy, PASS)
    part = module.main.text("part", MAIN)
    losses = end.operands[: 1 if part == MAIN else 0]
    grads = end.operands[len(losses) :]
    if len(grads) != len(params):
        raise error(
            f"a step of {len(params)} parameters returns {len(grads)} gradients behind the loss",
            end.loc,
            remedy="return one gradient for each parameter, as 'differentiate' does",
        )
    b = Builder(
        module.registry, body, len(body.ops) - 1, loc=made_by(PASS, strategy.loc), phase="optimizer"
    )
    clip = None
    if strategy.clip != 0 and grads:
        clip = _clip_factor(b, grads, strategy.clip, part, module.main.names("peers"))
    outputs: list[Value] = []
    placed: list[TensorType] = []
    for param, grad in zip(params, grads, strict=True):
        b.loc = made_by(PASS, param.loc)
        owned = replace(placement.gradient(param), role="state")
        moment = of_parameter(strategy.dtypes.moment, param.tensor.dtype)
        dtypes = {"master": strategy.dtypes.master, "m": moment, "v": moment}
        if dtypes["master"] in ("none", param.tensor.dtype):
            del dtypes["master"]
        state = {
            kind: body.add_arg(f"{param.name}_{kind}", replace(owned, dtype=dtype), param.loc)
            for kind, dtype in dtypes.items()
        }
        updated = [param, *(state[kind] for kind in ("m", "v", "master") if kind in state)]
        operands = [param, grad, *updated[1:], *([clip] if clip is not None else [])]
        given = (("master", "master" in state), ("clip", clip is not None))
        flags = {name: True for name, there in given if there}
        names = [f"{v.name}_new" for v in updated]
        outputs += b.op("stg.adamw", operands, flags, names=names).results
        placed += [v.tensor.inner for v in updated]
    end.set_operands([*losses, *outputs])
    end.attrs["phase"] = "optimizer"
    body.returns = (*body.returns[: len(losses)], *placed)


def _free_gradients(module: Module, rule: GradientsRule) -> None:
    """State it at the function for the plan of memory, except for sums over microbatches."""
    if any(op.has(Accumulates) for op in module.main.body.ops):
        why = "the sums of gradients over microbatches persist"
        module.diagnostics.remark(f"'stg.gradients[freed]' changes nothing: {why}", rule.loc)
    else:
        module.main.attrs["freed"] = True


def _clip_factor(
    b: Builder, grads: Sequence[Value], clip: Expr, part: str, peers: Sequence[str]
) -> Value:
    """The factor that clips the norm of all gradients. The parts of a model tell each other their
    shares of it."""
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
    return b.value(
        "stg.clip_factor", [_added(b, shares, "norm_sq_all")], {"max": clip}, hint="clip"
    )


def _added(b: Builder, values: Sequence[Value], hint: str) -> Value:
    return b.value("stg.add", values, hint=hint) if len(values) > 1 else values[0]
