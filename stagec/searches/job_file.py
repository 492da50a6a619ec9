"""A search of a job file, `stagec search job.toml`: the job says model, sizes, ranks, batch,
machine and step; its flags are fixed where the search varies nothing, and candidates where it
does."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from stagec.ir_spec.strategy.axes import DATA_AXES
from stagec.jobs.request.combine import complete
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.job_file import is_job_file, read_job_file
from stagec.jobs.request.options import IDEAL, JobOptions
from stagec.jobs.request.serving_flags import CACHES, STEP
from stagec.jobs.session import Session
from stagec.searches.space import KNOBS
from stagec.support.diagnostics import error

#: Options of a job that no point of a search can have.
_NOT_VARIED = ("strategy", "mesh", "pipeline", "plugin", "prefill", "decode")
#: Flags that follow from what a search varies: data-parallel ranks are those that are left, and
#: microbatches are counted by their size.
_FOLLOW = {*DATA_AXES, "microbatches"}


def with_job(
    given: Mapping[str, Any], session: Session
) -> tuple[Mapping[str, Any], Mapping[str, tuple[Any, ...]]]:
    """The options of a search with those of the job file that stands where the model does, and the
    flags that the job gives, one value each; what is given beside the file wins. Raises
    `DiagnosticError` for a file that is wrong, and for a job that is not one of flags."""
    if not is_job_file(given["model"]):
        return given, {}
    job = read_job_file(given["model"], session)
    options = job.options
    _check(options, given["model"])
    step = {n: getattr(options, n) for n in ("serve", *STEP, *CACHES)}
    said = {
        **{n: (v,) if n == "batch" and v else v for n, v in step.items()},
        "model": options.model,
        "seed_from": options.preset or None,
        "ranks": (_ranks(options),),
        "machine": (job.machine,) if job.machine else None,
        "used_ranks": dict(job.used_ranks) or None,
        "part": options.part,
        "draft": options.draft,
    }
    taken = {n: v for n, v in said.items() if n == "model" or not given[n]}
    if given["stack"] == IDEAL:
        taken["stack"] = options.stack
    sizes = {**options.sizes, **given["sizes"]}
    flags = {n: (getattr(options, n),) for n in KNOBS if n in options.explicit - _FOLLOW}
    return {**given, **taken, "sizes": sizes}, flags


def _ranks(options: JobOptions) -> int:
    """The ranks of a job whose flags give its mesh."""
    return options.ranks or prod(size or 1 for size in mesh_axes(complete(options)).values())


def _check(options: JobOptions, path: str) -> None:
    """Refuse what no point of a search has. Raises `DiagnosticError`."""
    default = JobOptions("")
    for name in _NOT_VARIED:
        if getattr(options, name) != getattr(default, name):
            what = "strategy_file" if name == "strategy" else name
            raise error(
                f"{path} has '{what}', but a search varies flags",
                remedy="write the job with flags in [strategy]",
            )
