"""The tiers below the prefix cache of a device: their sizes in blocks, and their speeds."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from stagec.answers.requests.options import BLOCKING, DISK, HOST, TIERS
from stagec.jobs.request.options import JobOptions
from stagec.jobs.served_models import AnyJob, ServedModels, most_bytes
from stagec.jobs.session import Session
from stagec.machines import Machine
from stagec.memory.timeline import CACHES
from stagec.serving.prefixes import CacheTier, CacheTiers
from stagec.serving.step import SequenceClass, step_of
from stagec.serving.step_times import SECOND
from stagec.support.diagnostics import error


def all_bytes(name: str) -> Callable[[AnyJob], float]:
    """A function from a job to the bytes in a category on all ranks, each stage and pod of which
    has equally many."""

    def total(job: AnyJob) -> float:
        pods = job.figures().each
        each = (sum(s.get(name, 0) for s in p.by_stage) / len(p.by_stage) for p in pods)
        return sum(n * prod(p.mesh.values()) for n, p in zip(each, pods, strict=True))

    return total


def token_bytes(models: ServedModels) -> float:
    """The bytes of the keys and values of a token on a rank."""
    serving = models.main.builder.serving
    many = min(1 << 16, (serving and serving.positions) or 1 << 16)
    one = step_of([SequenceClass(1, many - 1, 1, 1)])
    return models.together(most_bytes(CACHES), one) / many


def context_bytes(options: JobOptions, session: Session) -> float:
    """The bytes per rank of the cached tokens before a prompt, in a prefill step with one sequence
    per group of ranks. Raises `DiagnosticError`."""
    from stagec.jobs.lowered import job_costs

    context, new = options.context or 0, options.prompt or 1
    caches = max(each.get(CACHES, 0) for each in job_costs(options, session).figures().by_stage)
    return caches * context / (context + new)


def loading_speed(tier: str, machine: Machine, disk: float | None) -> float:
    """The bytes per second at which a rank loads from a tier: the bandwidth of its host link, for a
    disk at most that of the disk, `disk` GB/s. Raises `DiagnosticError`."""
    link = machine.host.bandwidth.value
    if tier == HOST:
        return link
    if disk is None:
        raise error(
            "the speed of the disk is missing", remedy="give --disk-bandwidth 6.8, in GB/s per rank"
        )
    return min(link, disk * 1e9)


def tiers_below(
    models: ServedModels, machine: Machine, given: Mapping[str, Any], block: int
) -> Callable[[], CacheTiers | None]:
    """A function that creates the tiers of a replica whose prefix cache has blocks of `block`
    tokens; the sizes are those of all groups of ranks. Raises `DiagnosticError` without a prefix
    cache."""
    sizes = {tier: given[f"{tier}_cache"] for tier in TIERS if given[f"{tier}_cache"] is not None}
    if not sizes:
        return lambda: None
    if not block:
        raise error(
            f"--{next(iter(sizes))}-cache keeps the beginnings of prompts, but no request says "
            "what it begins with",
            remedy="give --turns 4, or --requests with hash_ids",
        )
    each, groups = token_bytes(models) * block, models.main.groups // models.replicas
    speeds = {tier: loading_speed(tier, machine, given["disk_bandwidth"]) for tier in sizes}

    def new_tiers() -> CacheTiers:
        tiers = [
            CacheTier(
                tier,
                int(size * groups / each),
                max(1, round(each / speeds[tier] * SECOND)),
                lasting=tier == DISK,
            )
            for tier, size in sizes.items()
        ]
        return CacheTiers(tiers, given["cache_loads"] == BLOCKING)

    return new_tiers
