"""The caches and weights of a step of serving, and the largest batch that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagec.ir.expr import Expr, evaluate
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.limit import Limit
from stagec.jobs.request.serving_flags import Serving
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.machines import Machine


def serving_figures(
    module: Module,
    builder: JobBuilder,
    limit: Limit | None,
    machine: Machine | None = None,
    *,
    symbolic: bool = False,
) -> dict[str, Any]:
    """The object `serving` of the analysis, without its ops, for the rank with most bytes of caches
    and weights. `module` is planned; `machine` is that of `--limit machine`. Raises
    `DiagnosticError` for a batch that does not fit the limit."""
    from stagec.analysis.kv_figures import LARGEST, longest_context, served

    serving = builder.serving
    if serving is None:
        raise ValueError("the job is not a step of serving")
    stages = served(module, serving.cached_tokens)
    if symbolic:
        return {**next(iter(stages.values())).shown(str), **dict.fromkeys(LARGEST)}
    env = planned_env(module)

    def number(size: Expr) -> int:
        return evaluate(size, env)

    each = [stage_figures.shown(number) for stage_figures in stages.values()]
    most = max(each, key=lambda f: f["cache_bytes"] + f["state_bytes"] + f["weight_bytes"])
    if limit is None or serving.step is not None:  # a mixed step has no single batch
        return {**most, **dict.fromkeys(LARGEST)}
    room = limit.room(module.axis_sizes, machine)
    longest = longest_context(module, room) if serving.mode == "decode" and serving.past else None
    largest = _largest(module, serving, limit, room)
    return {**most, **dict(zip(LARGEST, (largest, longest), strict=True))}


def _largest(module: Module, serving: Serving, limit: Limit, room: int) -> int:
    """The largest batch that fits. Raises `DiagnosticError` if the batch of the step is larger."""
    from stagec.analysis.kv_figures import largest_batch

    batch = largest_batch(module, room)
    if serving.batch is not None and serving.batch > batch:
        shown = f"the largest that does is {batch}" if batch else "no batch does"
        raise error(
            f"--batch {serving.batch} does not fit {limit.text}: {shown}",
            remedy="give a smaller batch or context, or split the model over more ranks",
        )
    return batch
