"""add-optimizer: appends gradient norm, clipping and one AdamW update per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from stagec.ir_spec.ops.parts import MAIN
from stagec.sharding.parts import parts_of
from stagec.sharding.zero import StatePlacement


@dataclass(frozen=True)
class AddOptimizer(Pass):
    """Append the optimizer: the function then returns the loss, updated parameters and updated
    state.

    The strategy says which (`stg.optimizer`) and with which element type of the master copy
    (`stg.dtypes`). Parameters of that type have no master copy.

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
    if strategy.optimizer == "none":
        return
    body = module.main.body
    end, params = body.terminator, module.trainable()
    placement = StatePlacement(module, strategy, PASS)
    grads = end.operands[1:]
    if len(grads) != len(params):
        raise error(
            f"a step of {len(params)} parameters returns {len(grads)} gradients behind the loss",
            end.loc,
            remedy="return one gradient for each parameter, as 'differentiate' does",
        )
    b = Builder(
        module.registry, body, len(body.ops) - 1, loc=made_by(PASS, strategy.loc), phase="optimizer"
    )
    clips = _clip_factors(b, module, grads, strategy.clip) if strategy.clip != 0 else {}
    outputs: list[Value] = []
    placed: list[TensorType] = []
    for param, grad in zip(params, grads, strict=True):
        b.loc = made_by(PASS, param.loc)
        owned = replace(placement.gradient(param), role="state")
        dtypes = {"master": strategy.dtypes.master, "m": "f32", "v": "f32"}
        if param.tensor.dtype == strategy.dtypes.master:
            del dtypes["master"]
        state = {
            kind: body.add_arg(f"{param.name}_{kind}", replace(owned, dtype=dtype), param.loc)
            for kind, dtype in dtypes.items()
        }
        updated = [param, *(state[kind] for kind in ("m", "v", "master") if kind in state)]
        operands = [param, grad, *updated[1:], *([clips[grad]] if clips else [])]
        given = (("master", "master" in state), ("clip", bool(clips)))
        flags = {name: True for name, there in given if there}
        names = [f"{v.name}_new" for v in updated]
        outputs += b.op("stg.adamw", operands, flags, names=names).results
        placed += [v.tensor.inner for v in updated]
    end.set_operands([end.operands[0], *outputs])
    end.attrs["phase"] = "optimizer"
    body.returns = (*body.returns[:1], *placed)


def _clip_factors(
    b: Builder, module: Module, grads: tuple[Value, ...], clip: Expr
) -> Mapping[Value, Value]:
    """The factor that clips each gradient. The norm is that of all gradients; parts of the model
    tell each other their shares of it."""
    owners = parts_of(module, grads)
    shares: dict[str, Value] = {}
    for part in dict.fromkeys(owners.values()):
        squares = [
            b.value("stg.squared_norm", [g], hint=g.prefixed("sq_"))
            for g in grads
            if owners[g] == part
        ]
        shares[part] = _added(b, squares, "norm_sq" if part == MAIN else f"norm_sq_{part}")
    told = {
        (to, source): _crossed(b, share, source, to)
        for source, share in shares.items()
        for to in shares
        if to != source
    }
    found: dict[str, Value] = {}
    for part, share in shares.items():
        others = [v for (to, _), v in told.items() if to == part]
        norm = _added(b, [share, *others], f"norm_sq_of_all_{part}")
        hint = "clip" if part == MAIN else f"clip_{part}"
        found[part] = b.value("stg.clip_factor", [norm], {"max": clip}, hint=hint)
    return {grad: found[part] for grad, part in owners.items()}


def _added(b: Builder, values: Sequence[Value], hint: str) -> Value:
    return b.value("stg.add", values, hint=hint) if len(values) > 1 else values[0]


def _crossed(b: Builder, share: Value, source: str, to: str) -> Value:
    attrs = {"value": f"norm_sq_{source}", "source": source, "to": to}
    return b.value("stg.cross", [share], attrs, hint=f"norm_sq_{source}_{to}")
