"""The options, space and time limits of `stagec search --serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import TYPE_CHECKING, Any

from stagec.ir.module import BATCH
from stagec.ir.serving_step import DECODE, MIXED, MODES, PREFILL
from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.jobs.request.acceptance import ACCEPTANCE
from stagec.jobs.request.option import CommandOption, OneOf, TimeType, Whole
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import CACHES, STEP, mixed_step
from stagec.searches.explore.space import Space, doubled
from stagec.serving.step import Step
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.machines import Machine

#: Whole servers, aggregated or disaggregated: see `stagec.searches.server`.
SERVER = "server"
#: The most sequences of a step that are tried if no batch is given.
_MOST = {DECODE: 4096, PREFILL: 64}
#: The limits of the time of a step, and the kinds of steps that they apply to.
_LIMITS = {"ttft": (PREFILL, MIXED, SERVER), "tpot": (DECODE, MIXED, SERVER)}
#: Options of the step that are not knobs of the search.
_STEP = tuple(n for n in STEP if n != "batch")

#: The options of a search for a step of serving.
SERVING = (
    CommandOption(
        "serve",
        OneOf((*MODES, SERVER)),
        "Search for a step of serving, by default with most tokens/s per rank. --batch counts "
        "its sequences, in mixed steps the decoding ones of each group. server: search for a "
        "whole server of --prompt and --output-tokens, aggregated or disaggregated; --chunk is "
        "the most tokens of a step, --batch the decoding sequences of each worker.",
    ),
    *(STEP[n] for n in _STEP),
    CommandOption(
        "output_tokens",
        Whole(2),
        "With --serve server: output tokens of each sequence (default: 128).",
        128,
        metavar="N",
    ),
    *CACHES.values(),
    *ACCEPTANCE,
    CommandOption(
        "ttft",
        TimeType(),
        "With --serve prefill, mixed or server: limit of the time to the first token, 500ms.",
    ),
    CommandOption(
        "tpot",
        TimeType(),
        "With --serve decode, mixed or server: limit of the time for each further token, 30ms.",
    ),
)


def step_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the step, as options of a job. Raises `DiagnosticError` for limits that do not
    apply to it."""
    for name, modes in _LIMITS.items():
        if given[name] is not None and given["serve"] not in modes:
            raise error(
                f"--{name} needs --serve {' or '.join(modes)}",
                remedy=f"leave it out, or add --serve {modes[0]}",
            )
    for name in (each.name for each in ACCEPTANCE if given[each.name] is not None):
        raise error(
            f"--{name} needs --serve {SERVER}", remedy=f"leave it out, or add --serve {SERVER}"
        )
    return {n: given[n] for n in ("serve", *_STEP, *CACHES) if given[n] is not None}


def steps_of_batches(
    options: JobOptions, given: Mapping[str, Any], sizes: Mapping[str, int]
) -> Iterator[tuple[JobOptions, dict[str, int]]]:
    """The step with each batch, and the sizes of all symbols. The batch of a mixed step is that of
    each group of ranks; the number of groups depends on the strategy."""
    if options.serve == MIXED:
        open_ = {n: v for n, v in sizes.items() if n != BATCH}
        for batch in given["batch"] or (None,):
            yield options.changed(batch=batch), open_
        return
    fixed = options.sizes.get(BATCH)
    tried = (fixed,) if fixed else doubled(1, _MOST[options.serve or DECODE])
    for batch in given["batch"] or tried:
        yield options.changed(sizes={**options.sizes, BATCH: batch}), {**sizes, BATCH: batch}


def most_seconds(given: Mapping[str, Any], options: JobOptions) -> float | None:
    """The limit of the seconds of a step: a further token takes one step, drafts not counted, and
    the first one takes as many steps as its prompt has chunks. None without limits."""
    limits = [s for s in (given["tpot"], _of_first(given["ttft"], options)) if s is not None]
    return min(limits, default=None)


def _of_first(ttft: float | None, options: JobOptions) -> float | None:
    if ttft is None or options.serve == PREFILL:
        return ttft
    classes = [c for c in mixed_step(options).classes if c.kind in (PREFILL, "chunk")]
    return ttft / max((ceil((c.cached + c.new) / c.new) for c in classes), default=1)


def step_of_groups(options: JobOptions) -> Step | None:
    """The mixed step of each group of ranks; None for other steps, whose batch is that of all
    ranks."""
    return mixed_step(options) if options.serve == MIXED else None


def serving_space(
    sizes: Mapping[str, int], layers: int, ranks: int, machine: Machine, mode: str | None
) -> Space:
    """The default space of serving: tensor, pipeline and expert parallelism, and data-parallel
    attention. Prefill always has sequence parallelism. A mixed step has one stage. A worker of a
    server for a model with experts, whose space is large, has one stage, or one on each node."""
    node = machine.network[0].ranks or ranks
    stages = doubled(1, min(8, ranks, layers))
    if mode == SERVER and EXPERTS in sizes:
        stages = tuple(dict.fromkeys((1, min(layers, max(1, ranks // node)))))
    knobs: dict[str, tuple[Any, ...]] = {
        "pp": (1,) if mode == MIXED else stages,
        "tp": doubled(1, min(16, node, ranks)),
        "sp": (mode == PREFILL,),
        "dp_attention": (False, True) if mode != PREFILL else (False,),
    }
    if experts := sizes.get(EXPERTS):
        knobs["ep"] = doubled(1, min(experts, ranks))
        knobs["etp"] = (0, 1)
    return Space(knobs)


def without_step(options: JobOptions) -> JobOptions:
    """A job without the options of its step."""
    plain = JobOptions("")
    return options.changed(**{n: getattr(plain, n) for n in ("serve", *STEP, *CACHES)})


def of_preset(step: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the step of a preset that the search does not give itself."""
    options = {**step, **({"batch": (step["batch"],)} if "batch" in step else {})}
    return {n: v for n, v in options.items() if given[n] is None}
