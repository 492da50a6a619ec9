"""The memory of a step of serving: bytes of caches, state and weights on a rank, and the largest
batch that fits."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagec.ir.core import Operation, Value
from stagec.ir.expr import (
    ONE,
    ZERO,
    Expr,
    call,
    evaluate,
    expand,
    product,
    substitute,
    symbol,
    total,
)
from stagec.ir.module import BATCH, Module
from stagec.ir.serving_step import PAST
from stagec.ir.types import CACHED, WEIGHTS, axis_size, bytes_of
from stagec.ir_spec.ops.cache_rows import rows_of
from stagec.memory.timeline import MemoryTimeline
from stagec.schedule.attached import stages_of
from stagec.support.diagnostics import NotAnIntegerError

#: The names of the figures per rank, and of those under a limit: the largest batch over all ranks,
#: and the largest number of cached tokens of each sequence.
FIGURES = ("cache_bytes_per_token", "cache_bytes", "state_bytes", "weight_bytes")
LARGEST = ("max_batch", "max_context")
_MOST = 1 << 40
#: The number of the class of a mixed step, in the name of its cache.
_CLASS = re.compile(r"_(\d+)_cache")


@dataclass(frozen=True, slots=True)
class ServedBytes:
    """The bytes of a rank that runs a function of a step: those of another token of one sequence,
    of the caches of all its sequences, of state of fixed size, and of weights."""

    per_token: Expr
    caches: Expr
    state: Expr
    weights: Expr

    def shown(self, show: Callable[[Expr], Any]) -> dict[str, Any]:
        """The figures by name, with each expression converted by `show`."""
        each = (self.per_token, self.caches, self.state, self.weights)
        return dict(zip(FIGURES, (show(expand(e)) for e in each), strict=False))


def served(module: Module, tokens: Expr | None) -> dict[int, ServedBytes]:
    """The figures of each stage of a planned step whose sequences have `tokens` cached each. None
    means a mixed step: each class has its own number of tokens after the step, and `per_token` is
    that of the first class."""
    served: dict[int, ServedBytes] = {}
    for func in module.functions:
        figures = _of_function(func, tokens) if tokens is not None else _of_mixed(module, func)
        served |= dict.fromkeys(stages_of(func) or (0,), figures)
    return served


def _of_function(func: Operation, tokens: Expr) -> ServedBytes:
    args = func.body.args
    rows = [a for a in args if a.tensor.role == "cache"]
    return _served(
        args, total(_of_one(a, tokens) for a in rows), total(_bytes(a, tokens) for a in rows)
    )


def _of_mixed(module: Module, func: Operation) -> ServedBytes:
    one, caches = ZERO, ZERO
    for cache in (a for a in func.body.args if a.tensor.role == "cache"):
        match = _CLASS.search(cache.name)
        number = match[1] if match is not None else "0"
        past = symbol(f"past{number}") if f"past{number}" in module.symbols else ZERO
        tokens = past + symbol(f"new{number}")
        caches += _bytes(cache, tokens)
        if number == "0":
            one += _of_one(cache, tokens)
    return _served(func.body.args, one, caches)


def _served(args: Sequence[Value], one: Expr, caches: Expr) -> ServedBytes:
    return ServedBytes(
        one,
        caches,
        total(a.tensor.local_bytes for a in args if a.tensor.role in CACHED - {"cache"}),
        total(a.tensor.local_bytes for a in args if a.tensor.role in WEIGHTS | {"state"}),
    )


def _of_one(cache: Value, tokens: Expr) -> Expr:
    """Bytes per rank of one more token of one sequence, rounded up; the mean over ranks that split
    the tokens."""
    more = _bytes(cache, tokens + 1, one=True) - _bytes(cache, tokens, one=True)
    along = rows_of(cache)
    axes = cache.tensor.dims[along.dim].axes if along is not None else ()
    return call("ceildiv", [more, axis_size(axes)]) if axes else more


def _bytes(cache: Value, tokens: Expr, *, one: bool = False) -> Expr:
    """The bytes of a cache on a rank whose sequences have `tokens` cached, or of `one` sequence of
    it over all ranks. If ranks split the tokens, they are those of the fullest rank."""
    along, sizes = rows_of(cache), list[Expr]()
    for d, dim in enumerate(cache.tensor.dims):
        if along is not None and d == along.dim:
            rows = along.cached(tokens)
            split = dim.split and not one
            rows = call("ceildiv", [rows, axis_size(dim.axes)]) if split else rows
            sizes.append(rows if one else along.paged(rows))
        elif one and BATCH in dim.size.symbols:
            size = substitute(dim.size, {BATCH: ONE})
            sizes.append(ONE if {"new0", "count0"} & size.symbols else size)
        else:
            sizes.append(dim.local)
    return bytes_of(product(sizes), cache.tensor.dtype)


# -- the largest batch -----------------------------------------------------------------------------


def largest_batch(module: Module, room: int) -> int:
    """The largest global batch with which no rank of a planned step exceeds `room` bytes, 0 if none
    fits. It is found by bisection among the batches that satisfy the assumptions of the module,
    since bytes grow with the batch. Raises `DiagnosticError` if a size is open."""
    return _largest(module, BATCH, room, _unit(module))


def longest_context(module: Module, room: int) -> int | None:
    """The largest number of cached tokens of each sequence of a decode step with which no rank
    exceeds `room` bytes; None if it is unbounded. Raises `DiagnosticError` if a size is open."""
    context = _largest(module, PAST, room, 1)
    return context if context < _MOST // 2 else None


def _largest(module: Module, name: str, room: int, unit: int) -> int:
    """The largest multiple of `unit` as the value of a symbol with which a step fits; 0 if none."""
    before = module.env[name]
    try:
        low, high = 0, 1
        while high * unit < _MOST and _peak(module, name, high * unit) <= room:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            fits = _peak(module, name, middle * unit) <= room
            low, high = (middle, high) if fits else (low, middle)
    finally:
        module.set_values({name: before})
    return low * unit


def _unit(module: Module) -> int:
    """The smallest batch that satisfies the assumptions, of which other batches are multiples."""
    relations = [r for r, _ in module.relations if BATCH in r.symbols]
    env = {**module.env}
    for batch in range(1, 1 + max(1, *_products(module))):
        if all(_holds(r, {**env, BATCH: batch}) for r in relations):
            return batch
    return env[BATCH]


def _products(module: Module) -> tuple[int, int]:
    mesh = module.mesh
    ranks = evaluate(axis_size(mesh.axes if mesh else ()), module.env)
    return module.env[BATCH], ranks


def _holds(relation: Any, env: Mapping[str, int]) -> bool:
    try:
        return bool(relation.holds(env))
    except NotAnIntegerError:
        return False


def _peak(module: Module, name: str, value: int) -> int:
    """The bytes of the fullest rank with this value of a symbol."""
    module.set_values({name: value})
    peak = 0
    for func in module.functions:
        planner = MemoryTimeline.planner(module, func)
        for stage in stages_of(func) or (0,):
            peak = max(peak, MemoryTimeline(module, func, stage, planner).peak().total)
    return peak
