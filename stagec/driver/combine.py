"""Which options go together: every rule is one function, all are asked before any work.

A rule yields an error that names the constraint and the nearest choices that satisfy it, or a
warning for what has no effect. `complete` fills in the axis that `--ranks` leaves open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from stagec.driver.options import DATA_AXES, REDUCED, JobOptions
from stagec.driver.strategy_text import microbatches, recomputed
from stagec.ir_spec.ops.strategy import RECOMPUTE
from stagec.support.diagnostics import Diagnostic, error

#: Axes that flags give a size, slowest first; expert parallelism is a part of data parallelism.
AXES = ("pp", *DATA_AXES, "cp", "tp")


@dataclass(frozen=True)
class Job:
    """Options, the axes that they give (None: of open size) and the sizes of the model that are
    known."""

    options: JobOptions
    axes: Mapping[str, int | None]
    sizes: Mapping[str, int]

    def ranks(self, *axes: str) -> int:
        """The ranks along these axes."""
        return prod(self.axes.get(a) or 1 for a in axes)


Rule = Callable[[Job], Iterator[Diagnostic]]
_NAME = re.compile(r"[A-Za-z_][\w.]*")


def flag(name: str) -> str:
    """`--dp-shard` for `dp_shard`."""
    return "--" + name.replace("_", "-")


def given_axes(options: JobOptions) -> list[str]:
    """The axes that flags other than --mesh give a size."""
    return [a for a in AXES if getattr(options, a) > 1]


def nearest(wanted: int, valid: Iterable[int], count: int = 3) -> str:
    """The valid numbers that are nearest to what was tried."""
    best = sorted(sorted(valid), key=lambda n: abs(n - wanted))[:count]
    return ", ".join(map(str, sorted(best))) or "none"


def divisors(number: int) -> list[int]:
    """All divisors of a number that a job may have, in order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _error(message: str, remedy: str) -> Diagnostic:
    return Diagnostic(message, severity="error", remedy=remedy)


def _warning(message: str) -> Diagnostic:
    return Diagnostic(message, severity="warning")


# -- ranks -----------------------------------------------------------------------------------------


def complete(options: JobOptions) -> JobOptions:
    """The options with the axis filled in that --ranks leaves open: one of --mesh without a size,
    else data parallelism. Raises `DiagnosticError` if no size of it fits."""
    from_text = options.strategy is not None or bool(options.preset)
    if options.ranks is None or (from_text and options.mesh is None):
        return options
    if options.mesh is not None:
        unsized = [a for a, n in options.mesh.items() if n is None]
        if len(unsized) != 1:
            return options
        others = {a: n for a, n in options.mesh.items() if n is not None}
        size = _quotient(options.ranks, unsized[0], others)
        return replace(options, mesh={**options.mesh, unsized[0]: size})
    others = {a: int(getattr(options, a)) for a in given_axes(options)}
    axis = _left_open(others)
    if axis is None:
        return options
    size = _quotient(options.ranks, axis, others)
    match axis:
        case "dp":
            return replace(options, dp=size)
        case "dp_shard":
            return replace(options, dp_shard=size)
        case _:
            return replace(options, dp_replicate=size)


def _left_open(given: Mapping[str, int]) -> str | None:
    """The data-parallel axis that no flag gives: dp, or the other half of hybrid sharding."""
    hybrid = [a for a in ("dp_replicate", "dp_shard") if a in given]
    if len(hybrid) == 2 or "dp" in given:
        return None
    if hybrid:
        return "dp_shard" if hybrid == ["dp_replicate"] else "dp_replicate"
    return "dp"


def _quotient(ranks: int, axis: str, others: Mapping[str, int]) -> int:
    taken = prod(others.values())
    if ranks % taken == 0:
        return ranks // taken
    shown = " x ".join(f"{a} {n}" for a, n in others.items())
    below = ranks // taken * taken
    near = ", ".join(str(n) for n in (below, below + taken) if n)
    choices = [
        f"{flag(a)} among {nearest(n, divisors(ranks * n // taken))}"
        for a, n in others.items()
        if ranks % (taken // n) == 0
    ]
    raise error(
        f"--ranks {ranks} does not divide by {shown} = {taken}, so there is no size for '{axis}'",
        remedy=f"choose {' or '.join([f'--ranks among {near}', *choices])}",
    )


def check_ranks(ranks: int | None, mesh: Mapping[str, int | None]) -> None:
    """Compare the mesh of a job with --ranks. Raises `DiagnosticError` with sizes that would
    fit."""
    sizes = {a: n for a, n in mesh.items() if n is not None}
    product = prod(sizes.values())
    if ranks is None or (len(sizes) == len(mesh) and product == ranks):
        return
    shown = " x ".join(f"{a} {n}" if n else f"{a} open" for a, n in mesh.items()) or "one rank"
    fitting = [
        f"{a} = {ranks * n // product}"
        for a, n in sizes.items()
        if ranks * n % product == 0 and len(sizes) == len(mesh)
    ]
    unsized = [a for a, n in mesh.items() if n is None]
    if len(unsized) > 1:
        raise error(
            f"--ranks {ranks} tells the size of one axis, but {' and '.join(unsized)} are open",
            remedy="give all of them but one a size, such as --mesh dp,tp=8",
        )
    raise error(
        f"--ranks {ranks}, but the mesh is {shown}: {product} ranks",
        remedy=f"choose {' or '.join(fitting)}" if fitting else "give sizes whose product it is",
    )


# -- rules -----------------------------------------------------------------------------------------


def _one_mesh(job: Job) -> Iterator[Diagnostic]:
    options = job.options
    if options.dp > 1 and options.dp_replicate * options.dp_shard > 1:
        yield _error(
            "--dp and --dp-replicate or --dp-shard both give the data-parallel ranks",
            "give --dp, or --dp-replicate R --dp-shard N with R*N ranks",
        )
    sized = given_axes(options)
    if options.mesh is not None and sized:
        yield _error(
            f"--mesh and {flag(sized[0])} both give the mesh", "give the axes in one of them"
        )


def _heads(job: Job) -> Iterator[Diagnostic]:
    """Tensor parallelism beyond the KV heads still needs a query head on every rank."""
    heads, groups = job.sizes.get("H"), job.sizes.get("G")
    tp = job.ranks("tp", "tpr")
    if heads and groups and tp > groups and tp % groups == 0 and heads % tp:
        valid = [n for n in divisors(heads) if n % groups == 0 or groups % n == 0]
        yield _error(
            f"H = {heads} does not divide over tp = {tp}",
            f"choose --tp among {nearest(tp, valid)}",
        )


def _ulysses(job: Job) -> Iterator[Diagnostic]:
    """Ulysses splits the KV heads that tensor parallelism leaves on a rank."""
    heads, cp, tp = job.sizes.get("G"), job.ranks("cp"), job.ranks("tp")
    if job.options.cp_mode != "ulysses" or not heads or cp == 1 or heads % (cp * tp) == 0:
        return
    left = heads // tp if heads % tp == 0 else heads
    yield _error(
        f"G = {heads} does not divide over tp*cp = {tp * cp}: --cp-mode ulysses splits the "
        "key/value heads over cp",
        f"choose --cp among {nearest(cp, divisors(left))}, or --cp-mode all-gather",
    )


def _ring(job: Job) -> Iterator[Diagnostic]:
    options = job.options
    if options.cp_mode != "ring" and options.cp_order != JobOptions.cp_order:
        yield _error(
            f"--cp-order {options.cp_order} is for --cp-mode ring: --cp-mode {options.cp_mode} "
            "leaves the sequence in its order",
            "leave --cp-order out",
        )


def _pipeline(job: Job) -> Iterator[Diagnostic]:
    """What a pipeline does for every microbatch, it does often."""
    options, stages = job.options, job.ranks("pp")
    if stages == 1:
        return
    count = microbatches(options, stages)
    sharded = options.zero == 3 and options.reshard_after_forward != "never"
    if sharded and {"dp", "dp_shard", "ep", "cp"} & job.axes.keys():
        yield _warning(
            f"--zero 3 in a pipeline gathers the parameters of a stage {2 * count} times a step, "
            f"in forward and backward of each of {count} microbatches: --zero 1 gathers them once"
        )


def _fsdp(job: Job) -> Iterator[Diagnostic]:
    options, default = job.options, JobOptions("")
    for name in ("reshard_after_forward", "fsdp_prefetch"):
        value = getattr(options, name)
        if value != getattr(default, name) and options.zero < 3:
            yield _error(
                f"{flag(name)} {value} needs parameters that are sharded: --zero 3, found "
                f"--zero {options.zero}",
                "choose --zero 3, or leave it out",
            )


def _recompute(job: Job) -> Iterator[Diagnostic]:
    options = job.options
    unnamed = [n for n in recomputed(options) if not _NAME.fullmatch(n)]
    if unnamed:
        yield _error(
            f"--recompute {options.recompute}: '{unnamed[0]}' is neither a policy nor the name of "
            "an op",
            f"choose {', '.join(RECOMPUTE)}, or ops of the model, such as silu,multiply",
        )
    for name in ("recompute_layers", "recompute_every"):
        value, layers = getattr(options, name), job.sizes.get("L")
        if value and options.recompute == "none":
            yield _warning(f"{flag(name)} has no effect without --recompute")
        elif value and layers and value > layers:
            yield _error(
                f"{flag(name)} {value}, but the model has L = {layers} layers",
                f"choose {flag(name)} from 1 to {layers}",
            )


#: Options that say how an axis is used.
_OF_AXIS = {
    "pp": ("schedule", "chunks", "stage_layers", "scatter_gather"),
    "tp": ("sp", "no_vocab_parallel", "tp_inputs", "async_tp"),
    "cp": ("cp_mode", "cp_order"),
}


def without_effect(job: Job) -> Iterator[Diagnostic]:
    """Options that change nothing here."""
    options, axes = job.options, job.axes.keys()
    default = JobOptions("")
    if options.zero and not {"dp", "dp_shard", "ep", "cp"} & axes:
        yield _warning("--zero has no effect without --dp")
    for axis, names in _OF_AXIS.items():
        for name in names if axis not in axes else ():
            if getattr(options, name) != getattr(default, name):
                shown = "--no-async-tp" if name == "async_tp" else flag(name)
                yield _warning(f"{shown} has no effect without --{axis}")
    if options.ddp_bucket != default.ddp_bucket and options.zero >= 2:
        yield _warning(
            "--ddp-bucket has no effect with --zero 2 and 3, which reduce layer by layer"
        )
    elif options.ddp_bucket != default.ddp_bucket and axes.isdisjoint(REDUCED):
        yield _warning("--ddp-bucket has no effect without --dp")
    if options.scatter_gather and "pp" in axes and "tp" not in axes:
        yield _warning("--scatter-gather has no effect without --tp")
    elif options.scatter_gather and "pp" in axes and options.sp:
        yield _warning("--scatter-gather has no effect with --sp, which splits messages already")
    if options.memory_nodes and not options.offload:
        yield _warning("--memory-nodes has no effect without --offload")


#: Every rule of combination; a new one is a function and a line here.
RULES: tuple[Rule, ...] = (
    _one_mesh,
    _heads,
    _ulysses,
    _ring,
    _pipeline,
    _fsdp,
    _recompute,
    without_effect,
)


def check(job: Job) -> list[Diagnostic]:
    """What all rules say of a job, errors first."""
    found = [d for rule in RULES for d in rule(job)]
    return sorted(found, key=lambda d: d.severity != "error")
