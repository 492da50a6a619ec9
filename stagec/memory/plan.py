"""The memory plan of a step: lifetimes made explicit, and the bytes of each category.

Gradient buffers are held through the whole step, as frameworks with persistent gradient buffers do;
the peak is the worst moment of everything else on top of the static state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import (
    ZERO,
    Env,
    Expr,
    evaluate,
    maximum,
    substitute,
    symbol,
    terms,
    total,
)
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir_spec.ops.pipeline import ActionOp
from stagec.memory.lifetimes import Buffer, lifetimes
from stagec.memory.liveness import Moment as Moments
from stagec.memory.liveness import (
    Sets,
    classify,
    device_bytes,
    held_bytes,
    last_users,
    moments,
    root,
)
from stagec.memory.step import Moment, Planner, Work, turns
from stagec.schedule.attached import actions_of, stages_of
from stagec.support.source import made_by

PASS = "plan-memory"
_LARGE = 4096


def plan_memory(module: Module, prefetch: int = 1) -> None:
    """Insert `stg.free` after each buffer's last user and a `stg.memory` with the bytes on one
    rank. Parameters are gathered `prefetch` iterations ahead."""
    for func in module.functions:
        _plan(module, func, prefetch)


def _plan(module: Module, func: Operation, prefetch: int) -> None:
    body, env = func.body, planned_env(module)
    sets = classify(body)
    planner = Planner(lifetimes(body, env, prefetch))
    parts = {
        "parameters": _bytes(v for v in body.args if v.tensor.role == "param"),
        "gradients": _bytes(sets.gradients),
        "optimizer": _bytes(v for v in body.args if v.tensor.role == "state"),
    }
    static = total(parts.values())
    counts = {n for op in body.walk() if op.definition.carries for n in op.expr("count").symbols}
    long = frozenset(counts - frozenset(module.mesh.axes if module.mesh else ()))
    actions = [op for op in body.walk() if isinstance(op.definition, ActionOp)]
    transient = [_bytes(m.live) for m in _staged_moments(body, actions, sets)]
    states = {v for v in body.args if v.tensor.role == "state"}
    held = states if actions else states | sets.stash  # what microbatches hold, actions state
    host = total(v.tensor.local_bytes for v in _sorted(held) if _on_host(v))
    attrs: dict[str, RawAttr] = {
        **parts,
        "stash": total(held_bytes(v) for v in _sorted(sets.stash)),
        "transient": _worst(transient, env),
        "peak": static + worst_of(planner.whole(), env, long),
        **({"host": host} if host != 0 else {}),
    }
    b = Builder(module.registry, module.root.body, loc=made_by(PASS, func.loc))
    if actions:
        attrs |= {"stages": func.attrs["stages"], "around": device_total(planner.around())}
    _insert_frees(module, body, keep=sets.gradients | sets.static)
    b.op("stg.memory", (), attrs, types=())
    for runs, before in _works(module, func, planner) if actions else ():
        peak = worst_of(planner.moments((runs, before)), env, long)
        now, then = planner.held(before), planner.held(before | frozenset(runs))
        left, host = (
            _total(then - now, space) - _total(now - then, space) for space in ("device", "host")
        )
        names = {"runs": runs, "after": sorted(before)}
        b.op(
            "stg.working",
            (),
            {n: tuple(f"{k}_{c}" for k, c in rs) for n, rs in names.items() if rs}
            | {"peak": peak, "left": left}
            | ({"host": host} if host != 0 else {})
            | {"stages": func.attrs["stages"]},
            types=(),
        )


def _works(module: Module, func: Operation, planner: Planner) -> list[Work]:
    """All works of the stages that run a function, in the order in which they first occur."""
    found: dict[Work, None] = {}
    for stage in stages_of(func):
        order = actions_of(module, func, stage)
        for turn in turns(order, planner.regions, holds=lambda _: False):
            found.update(dict.fromkeys(w for w in turn.works if w[0]))
    return list(found)


def device_total(buffers: Iterable[Buffer]) -> Expr:
    """Bytes of buffers in device memory."""
    return _total(buffers, "device")


def _total(buffers: Iterable[Buffer], space: str) -> Expr:
    return total(b.size for b in buffers if b.space == space)


def worst_of(moments_: Iterable[Moment], env: Env, long: frozenset[str] = frozenset()) -> Expr:
    """The most bytes that are held at one of these moments, on top of what was held at the
    start; with open sizes for large values of the symbols in `long`, such as many layers."""
    candidates = list(moments_)
    if not candidates:
        return ZERO
    buffers = {b for m in candidates for b in m.made | m.gone if b.space == "device"}
    sizes = {b: b.size for b in buffers}
    if all(e.symbols <= env.keys() for e in sizes.values()):
        known = {b: evaluate(e, env) for b, e in sizes.items()}
        worst = max(candidates, key=lambda m: _sum(m.made, known) - _sum(m.gone, known))
        return device_total(worst.made) - device_total(worst.gone)
    more = {n: symbol(n) + _LARGE for n in long}
    parts = {b: terms(substitute(e, more)) for b, e in sizes.items()}
    kept: list[tuple[Moment, Mapping[str, Fraction]]] = []
    for moment in {(m.made, m.gone): m for m in candidates}.values():
        mine = _added((parts.get(b, {}) for b in moment.made), 1)
        mine = _added((mine, *(_added([parts.get(b, {})], -1) for b in moment.gone)), 1)
        if any(_covers(other, mine) for _, other in kept):
            continue
        kept = [(m, t) for m, t in kept if not _covers(mine, t)] + [(moment, mine)]
    return maximum(device_total(m.made) - device_total(m.gone) for m, _ in kept)


def _added(parts: Iterable[Mapping[str, Fraction]], sign: int) -> Mapping[str, Fraction]:
    found: dict[str, Fraction] = {}
    for part in parts:
        for monomial, number in part.items():
            found[monomial] = found.get(monomial, Fraction(0)) + sign * number
    return found


def _sum(buffers: Iterable[Buffer], known: Mapping[Buffer, int]) -> int:
    return sum(known.get(b, 0) for b in buffers)


def _staged_moments(body: Region, actions: list[Operation], sets: Sets) -> Iterator[Moments]:
    """Moments inside each action by itself, and those of the step behind the microbatches."""
    if not actions:
        yield from moments(body, sets)
        return
    for op in actions:
        yield from moments(op.body, sets)
    for moment in moments(body, sets):
        if moment.op.parent is body:
            yield moment


def _bytes(values: Iterable[Value]) -> Expr:
    return total(device_bytes(v) for v in _sorted(values))


def _sorted(values: Iterable[Value]) -> list[Value]:
    return sorted(values, key=lambda v: v.name)


def _on_host(value: Value) -> bool:
    return value.tensor.memory != "device"


def _worst(candidates: list[Expr], env: Env) -> Expr:
    """The largest; decided by the known sizes if all are known, else kept as a `max` of what may be
    largest."""
    unique = list(dict.fromkeys(candidates))
    if not unique:
        return ZERO
    if all(e.symbols <= env.keys() for e in unique):
        return max(unique, key=lambda e: evaluate(e, env))
    return maximum(_undominated(unique))


def _undominated(candidates: list[Expr]) -> list[Expr]:
    """Drop what is never largest: every term of it is at most the same term of another (sizes are
    positive)."""
    kept: list[tuple[Expr, Mapping[str, Fraction]]] = []
    for candidate in candidates:
        mine = terms(candidate)
        if any(_covers(other, mine) for _, other in kept):
            continue
        kept = [(e, t) for e, t in kept if not _covers(mine, t)] + [(candidate, mine)]
    return [e for e, _ in kept]


def _covers(big: Mapping[str, Fraction], small: Mapping[str, Fraction]) -> bool:
    return all(
        big.get(k, Fraction(0)) >= small.get(k, Fraction(0)) for k in big.keys() | small.keys()
    )


def _insert_frees(module: Module, region: Region, keep: set[Value]) -> None:
    """One `stg.free` after each op, naming the buffers that die there."""
    dying: dict[Operation, list[Value]] = {}
    for value, user in last_users(region).items():
        if value not in keep and user is not region.terminator and root(value) is value:
            dying.setdefault(user, []).append(value)
    for op, values in dying.items():
        Builder.after(module.registry, op).op("stg.free", values, types=())
    for op in list(region.ops):
        if op.region is not None:
            _insert_frees(
                module, op.region, keep | {a for a in op.region.args if not _is_carried(op, a)}
            )


def _is_carried(op: Operation, arg: Value) -> bool:
    return op.definition.carries and arg.index < op.integer("carry", 1)
