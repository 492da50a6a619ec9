"""Appends the optimizer to a differentiated step: gradient norm, clipping, one AdamW update per
parameter."""

from __future__ import annotations

from dataclasses import replace

from stagec.ir.builder import Builder
from stagec.ir.core import Value
from stagec.ir.expr import Expr
from stagec.ir.module import Module
from stagec.sharding.strategy import read_strategy
from stagec.support.source import made_by
from stagec.transform.state import StatePlacement

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
    end, params = body.terminator, module.parameters()
    placement = StatePlacement(module, strategy)
    grads = end.operands[1:]
    b = Builder(
        module.registry, body, len(body.ops) - 1, loc=made_by(PASS, strategy.loc), phase="optimizer"
    )
    clip = _clip_factor(b, grads, strategy.clip) if strategy.clip != 0 else None
    outputs: list[Value] = []
    for param, grad in zip(params, grads, strict=True):
        b.loc = made_by(PASS, param.loc)
        home = replace(placement.gradient(param), role="state")
        kinds = (() if param.tensor.dtype == strategy.dtypes.master else ("master",)) + ("m", "v")
        dtypes = {"master": strategy.dtypes.master, "m": "f32", "v": "f32"}
        state = {
            k: body.add_arg(f"{param.name}_{k}", replace(home, dtype=dtypes[k]), param.loc)
            for k in kinds
        }
        operands = [
            param,
            grad,
            state["m"],
            state["v"],
            *([state["master"]] if "master" in state else []),
            *([clip] if clip is not None else []),
        ]
        flags = {
            n: True
            for n, there in (("master", "master" in state), ("clip", clip is not None))
            if there
        }
        names = [f"{v.name}_new" for v in (param, *operands[2 : 2 + len(kinds)])]
        outputs += b.op("stg.adamw", operands, flags, names=names).results
    homes = [replace(v.tensor, role="") for p in params for v in (p, *_states(body.args, p))]
    end.set_operands([end.operands[0], *outputs])
    end.attrs["phase"] = "optimizer"
    body.returns = (*body.returns[:1], *homes)


def _states(args: list[Value], param: Value) -> list[Value]:
    by_name = {a.name: a for a in args}
    found = (by_name.get(f"{param.name}_{k}") for k in ("m", "v", "master"))
    return [v for v in found if v is not None]


def _clip_factor(b: Builder, grads: tuple[Value, ...], clip: Expr) -> Value:
    squares = [b.value("stg.squared_norm", [g], hint=f"sq_{g.name}") for g in grads]
    norm = b.value("stg.add", squares, hint="norm_sq") if len(squares) > 1 else squares[0]
    return b.value("stg.clip_factor", [norm], {"max": clip}, hint="clip")
