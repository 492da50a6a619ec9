"""The main pod of a job, whose flags a search varies. The flags of a part (`--part`) and of a draft
model (`--draft`) are fixed."""

from collections.abc import Mapping
from math import prod

from stagec.ir.drafts import DRAFT
from stagec.ir.expr import evaluate
from stagec.ir.module import BATCH
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.ir_spec.strategy.part import MAIN
from stagec.jobs.builder import JobBuilder
from stagec.jobs.pod_options import guests, has_pods, options_of, pod_names
from stagec.jobs.request.combine import complete
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session

#: The pass that leaves a pod its part of the model.
_CUT = "cut-part"


def main_pod(options: JobOptions, session: Session, *, symbolic: bool) -> JobBuilder:
    """The builder of the main pod of a job, lowered to its part of the model. Raises
    `DiagnosticError`, once for all points, for errors that do not depend on the strategy of this
    pod, such as an unknown draft model."""
    if not has_pods(options):
        return JobBuilder(options, session, symbolic=symbolic)
    options = with_batch_option(options)
    builder = JobBuilder(options_of(MAIN, options), session, symbolic=symbolic)
    if options.draft is not None:
        JobBuilder(options_of(DRAFT, options), session, symbolic=symbolic)
    if options.part:
        builder.lower(_CUT)
    return builder


def layers_of_part(builder: JobBuilder, sizes: Mapping[str, int]) -> int:
    """The number of layers of the main pod where other pods have parts of the model; 0 if it
    depends on an open size."""
    counts = [op.expr("count") for op in builder.module.walk() if op.name == "stg.repeat"]
    if any(count.symbols - sizes.keys() for count in counts):
        return 0
    return sum(evaluate(count, sizes) for count in counts)


def ranks_of_others(options: JobOptions) -> int:
    """The number of ranks of all pods except the main one. Raises `DiagnosticError` for flags of a
    pod that do not give a mesh."""
    names = {*pod_names(options)} - {MAIN, *guests(options)} if has_pods(options) else ()
    meshes = (mesh_axes(complete(options_of(name, options))) for name in names)
    return sum(prod(size or 1 for size in mesh.values()) for mesh in meshes)


def with_batch_option(options: JobOptions) -> JobOptions:
    """A job of a search as a command line states it: the batch of a step of serving is `--batch`,
    not the size of a symbol."""
    if options.serve not in (PREFILL, DECODE) or BATCH not in options.sizes:
        return options
    sizes = {n: v for n, v in options.sizes.items() if n != BATCH}
    return options.changed(batch=options.sizes[BATCH], sizes=sizes)
