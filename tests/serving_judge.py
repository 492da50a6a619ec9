"""The judge of serving: prefill, then one step after the other, gives the logits of the forward of
training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stagec.driver.job import JobBuilder
from stagec.driver.options import JobOptions
from stagec.interp.data import random_inputs
from stagec.interp.machine import run_module
from stagec.ir.core import Region, Value
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.ir.serving import CACHE
from tests.support import run_passes

SHARDED = ",apply-strategy,partition,units"


def served(job: JobOptions, mode: str, new: int, past: int, passes: str = "") -> Module:
    """A step of so many new tokens behind `past` ones, after further passes."""
    module = JobBuilder(job.changed(sizes={**job.sizes, "S": new})).module
    pipeline = f"inline,infer-shapes,to-serving{{mode={mode},context={past}}}{passes}"
    return run_passes(module, pipeline)


def whole(job: JobOptions, tokens: int) -> tuple[dict[str, Array], Array]:
    """Random inputs, and the logits of the forward of so many tokens."""
    plain = JobOptions(job.model, sizes={**job.sizes, "S": tokens})
    module = run_passes(JobBuilder(plain).module, "inline,infer-shapes")
    found = [op.definition.logits(op) for op in module.walk()]
    judged = next(v for v in found if v is not None)
    module.main.body.terminator.set_operands([judged])
    inputs = random_inputs(module.main.body.args, module.env, 1)
    return inputs, run_module(module, module.env, inputs)[0]


def replay(
    job: JobOptions, steps: Sequence[tuple[str, int]], passes: str = "", tokens: int = 0
) -> tuple[list[Array], list[Array]]:
    """The logits of each step (its mode and number of tokens), and those of the whole forward."""
    count = tokens or sum(n for _, n in steps)
    inputs, expected = whole(job, count)
    past, found, wanted = 0, list[Array](), list[Array]()
    state: dict[str, Array] = {}
    for mode, new in steps:
        module = served(job, mode, new, past, passes)
        args = module.main.body.args
        given = {a.name: _given(module, a, inputs, state, past, new) for a in args}
        logits, *kept = run_module(module, module.env, given)
        names = [_argument(v).name for v in module.main.body.terminator.operands[1:]]
        state |= dict(zip(names, kept, strict=True))
        past += new
        first = past - 1 if mode == "prefill" else past - new
        found.append(logits)
        wanted.append(expected[:, first:past])
    return found, wanted


def assert_same_logits(found: Sequence[Array], wanted: Sequence[Array]) -> None:
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


def _given(
    module: Module,
    arg: Value,
    inputs: Mapping[str, Array],
    state: Mapping[str, Array],
    past: int,
    new: int,
) -> Array:
    shape = [int(module_size) for module_size in _shape(module, arg)]
    if arg.tensor.role != CACHE:
        value = inputs[arg.name]
        along = [d for d, (a, b) in enumerate(zip(shape, value.shape, strict=True)) if a != b]
        return value if not along else np.take(value, range(past, past + new), axis=along[0])
    old = state.get(arg.name)
    place = next(_appended(arg), None)
    if place is None or old is None:
        return np.zeros(shape) if old is None else old
    rows = np.zeros(shape)
    kept = min(past, shape[place] - new)
    rows_view, old_view = np.moveaxis(rows, place, 0), np.moveaxis(old, place, 0)
    rows_view[:kept] = old_view[old_view.shape[0] - kept :] if kept else old_view[:0]
    return rows


def _shape(module: Module, arg: Value) -> list[Any]:
    from stagec.ir.expr import evaluate

    return [evaluate(size, module.env) for size in arg.tensor.shape]


def _appended(arg: Value, depth: int = 0) -> Iterator[int]:
    """The dimension along which rows are appended to an argument."""
    for user, index in arg.uses:
        if user.name == "stg.append" and index == 0 and "past" in user.attrs:
            yield user.integer("dim", 1) + depth
        elif user.region is not None and index < len(user.body.args):
            yield from _appended(user.body.args[index], depth + 1)


def _argument(value: Value) -> Value:
    """The argument that a value takes the place of."""
    owner = value.owner
    if isinstance(owner, Region):
        outer = owner.owner
        return value if outer.name == "stg.func" else _argument(outer.operands[value.index])
    if owner.region is not None:
        carried = owner.integer("carry", 1)
        index = value.index if value.index < carried else value.index
        return _argument(owner.body.terminator.operands[index])
    slot = owner.definition.reuses(owner, value.index)
    if slot is None:
        slot = 0
    return _argument(owner.operands[slot])
