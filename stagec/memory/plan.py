"""The memory plan of a step: lifetimes made explicit, and the bytes of each category.

Gradient buffers are held through the whole step, as frameworks with persistent gradient buffers do;
the peak is the worst moment of everything else on top of the static state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import ZERO, Expr, evaluate, maximum, terms, total
from stagec.ir.module import Module
from stagec.ir_spec.ops.pipeline import ActionOp
from stagec.memory.liveness import (
    Moment,
    Sets,
    classify,
    device_bytes,
    held_bytes,
    last_users,
    moments,
    root,
)
from stagec.support.source import made_by

PASS = "plan-memory"


def plan_memory(module: Module) -> None:
    """Insert `stg.free` after each buffer's last user and a `stg.memory` with the bytes on one
    rank."""
    for func in module.functions:
        _plan(module, func)


def _plan(module: Module, func: Operation) -> None:
    body = func.body
    sets = classify(body)
    actions = [op for op in body.walk() if isinstance(op.definition, ActionOp)]
    steps = list(_staged_moments(body, actions, sets) if actions else moments(body, sets))
    env = module.env
    attrs = _of_stages(func, actions, sets)
    static = _bytes(v for v in body.args if v.tensor.role == "param")
    optimizer = _bytes(v for v in body.args if v.tensor.role == "state")
    gradients = _bytes(sets.gradients)
    stash = total(held_bytes(v) for v in _sorted(sets.stash))
    working = _worst([m.bytes() for m in steps], env)
    transient = _worst([_bytes(m.live) for m in steps], env)
    states = {v for v in body.args if v.tensor.role == "state"}
    host = total(v.tensor.local_bytes for v in _sorted(states | sets.stash) if _on_host(v))
    _insert_frees(module, body, keep=sets.gradients | sets.static)
    b = Builder(module.registry, module.root.body, loc=made_by(PASS, func.loc))
    b.op(
        "stg.memory",
        (),
        attrs
        | {
            "parameters": static,
            "gradients": gradients,
            "optimizer": optimizer,
            "stash": stash,
            "transient": transient,
            "peak": static + gradients + optimizer + (stash + transient if actions else working),
            **({"host": host} if host != 0 else {}),
        },
        types=(),
    )


def _of_stages(func: Operation, actions: list[Operation], sets: Sets) -> dict[str, RawAttr]:
    """Of a pipeline stage: what one microbatch keeps on each chunk, from forward to backward and
    from backward to weights. The schedule says how many are kept at once."""
    if not actions:
        return {}
    chunks = 1 + max(op.integer("chunk") for op in actions)
    kept = {
        kind: tuple(
            _bytes({root(r) for op in actions if _is(op, kind, c) for r in op.results} - other)
            for c in range(chunks)
        )
        for kind, other in (("forward", sets.gradients), ("backward", sets.gradients))
    }
    attrs: dict[str, RawAttr] = {"stages": func.attrs["stages"], "chunks": kept["forward"]}
    return attrs | ({"handed": kept["backward"]} if any(n != 0 for n in kept["backward"]) else {})


def _is(op: Operation, kind: str, chunk: int) -> bool:
    return op.text("kind") == kind and op.integer("chunk") == chunk


def _staged_moments(body: Region, actions: list[Operation], sets: Sets) -> Iterator[Moment]:
    """Moments inside each action by itself, and those of the step behind the microbatches."""
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


def _worst(candidates: list[Expr], env: Mapping[str, int]) -> Expr:
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
