"""Searches of a job file, `stagec search job.toml`. The job gives model, sizes, ranks, batch,
machine and step. Its flags are fixed where the space does not vary them, and further candidates
where it does."""

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
#: Flags that follow from the knobs of a search: data parallelism takes the ranks that are left, and
#: the number of microbatches follows from their size.
_FOLLOW = {*DATA_AXES, "microbatches"}


def with_job(
    given: Mapping[str, Any], session: Session
) -> tuple[Mapping[str, Any], Mapping[str, tuple[Any, ...]]]:
    """The options of a search whose model may be a job file, completed by those of the file, and
    the flags of the job, with one value each. Options of the search take precedence. Raises
    `DiagnosticError` for an invalid file, and for a job that is not given by flags."""
    if not is_job_file(given["model"]):
        return given, {}
    job = read_job_file(given["model"], session)
    options = job.options
    _check(options, given["model"])
    step = {n: getattr(options, n) for n in ("serve", *STEP, *CACHES)}
    of_job = {
        **{n: (v,) if n == "batch" and v else v for n, v in step.items()},
        "model": options.model,
        "seed_from": options.preset or None,
        "ranks": (_ranks(options),),
        "machine": (job.machine,) if job.machine else None,
        "used_ranks": dict(job.used_ranks) or None,
        "part": options.part,
        "draft": options.draft,
    }
    missing = {n: v for n, v in of_job.items() if n == "model" or not given[n]}
    if given["stack"] == IDEAL:
        missing["stack"] = options.stack
    sizes = {**options.sizes, **given["sizes"]}
    flags = {n: (getattr(options, n),) for n in KNOBS if n in options.explicit - _FOLLOW}
    return {**given, **missing, "sizes": sizes}, flags


def _ranks(options: JobOptions) -> int:
    """The ranks of a job whose flags give its mesh."""
    return options.ranks or prod(size or 1 for size in mesh_axes(complete(options)).values())


def _check(options: JobOptions, path: str) -> None:
    """Raise `DiagnosticError` for options that no point of a search can have."""
    default = JobOptions("")
    for name in _NOT_VARIED:
        if getattr(options, name) != getattr(default, name):
            what = "strategy_file" if name == "strategy" else name
            raise error(
                f"{path} has '{what}', but a search varies flags",
                remedy="write the job with flags in [strategy]",
            )
