"""Turns the options of a search for servers into a question."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stagec.ir.module import BATCH
from stagec.ir.serving_step import MIXED
from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.acceptance import take_acceptance
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.limit import AT_HAND, Limit
from stagec.jobs.request.machine import machine_of, on_machine, with_used
from stagec.jobs.request.measurements import MEASURED, measurements
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import CACHES
from stagec.jobs.session import Session
from stagec.machines import Machine
from stagec.searches.explore.layout import Layers
from stagec.searches.explore.space import doubled
from stagec.searches.job_file import with_job
from stagec.searches.question import (
    GOODPUT,
    layers_of,
    prices_of,
    said_values,
    space_of,
    with_weights,
)
from stagec.searches.server.apart import ApartSpace, with_two_stages
from stagec.searches.server.launch import EngineRun, engine_of, layout_of
from stagec.searches.server.worker import ServerLoad, WorkerTask
from stagec.searches.serving_space import SERVER
from stagec.searches.space import list_jobs
from stagec.searches.stack import with_stack
from stagec.support.diagnostics import error

#: Options of other searches, which do not apply to servers, and why.
_OTHERS = {
    "step": "the steps follow from --prompt, --output-tokens and --chunk",
    "draft": "give --speculative K, which uses the draft modules of the model",
    "pareto": "the answer has the Pareto front of tokens/s per rank and per user",
    "seed_from": "a preset is one step",
    "exhaustive": "all workers are evaluated",
    "neighbours": "all workers are evaluated",
    "sensitivity": "it is for one step",
    "scheduler": "workers are timed on this machine; --jobs says by how many processes",
}
#: The default number of servers that run over time.
VERIFIED = 3
OBJECTIVES = (GOODPUT, "cost")
#: The reason to leave out data-parallel ranks that share nothing: they are separate workers.
_COPIES = "copies of a smaller worker"
_SAME = "the engine has the flags of another worker for it"
#: The flags that determine the layout of a worker.
_LAYOUT = {"tp", "pp", "dp", "ep", "etp", "dp_attention"}


@dataclass(frozen=True)
class ServerQuestion:
    """The question of a search for servers of a model on each of `ranks`.

    `tasks` are the workers to time; `refused` counts those that were left out, by message. `layers`
    is the number of layers of the model, `experts` that of the experts of a layer (0: none). `run`
    is the engine whose launch files are wanted, `verified` the number of the best servers that run
    over time, `measured` the values of `MEASURED`.
    """

    model: JobOptions
    load: ServerLoad
    ranks: Sequence[int]
    layers: int
    tasks: Sequence[WorkerTask]
    objective: str
    wanted: int
    points: int
    experts: int = 0
    run: EngineRun | None = None
    refused: Counter[str] = field(default_factory=Counter[str])
    verified: int = VERIFIED
    measured: Mapping[str, Any] = field(default_factory=dict[str, Any])


def server_question(given: Mapping[str, Any], session: Session) -> ServerQuestion:
    """The question that these options ask. Raises `DiagnosticError`, `OSError`."""
    given, of_job = with_job(given, session)
    _check(given)
    asked: Sequence[str | Machine] = given["machine"]
    used = given["used_ranks"]
    machines = [
        machine_of(m, session, used) if isinstance(m, str) else with_used(m, used) for m in asked
    ]
    for machine in machines:  # reports files that cannot be read before workers are started
        measurements(given["measured"], given["kernels_from"], machine)
    caches = {n: given[n] for n in CACHES if given[n] is not None}
    plain = JobOptions(given["model"], sizes=dict(given["sizes"]), serve=MIXED, **caches)
    with session.once(session.aside()) as aside:
        builder = JobBuilder(with_weights(plain.changed(step="decode=1x1"), given), aside)
    known = {n: v for n, v in builder.module.symbols.items() if v is not None and n != BATCH}
    layers = layers_of(builder.module, known)
    drafts = given["speculative"] or 0
    accepted = take_acceptance(plain.changed(speculative=drafts), given).tokens
    about = given["ttft"], given["tpot"], given["context"] or 0, drafts, accepted
    load = ServerLoad(given["prompt"], given["output_tokens"], *about)
    if drafts:
        session.remark(
            "steps with drafts only decode, so all these servers have separate ranks for prefill"
        )
    question = ServerQuestion(
        plain,
        load,
        given["ranks"],
        layers.total,
        [],
        given["objective"] or OBJECTIVES[0],
        given["top"],
        0,
        known.get(EXPERTS, 0),
        given["emit_run"],
        verified=given["verify"],
        measured={option.name: given[option.name] for option in MEASURED},
    )
    return _with_tasks(question, given, of_job, machines, known, layers, session)


def _check(given: Mapping[str, Any]) -> None:
    """Raise `DiagnosticError` for missing options, and for options of other searches."""
    for name, why in _OTHERS.items():
        if given[name]:
            raise error(
                f"--{name.replace('_', '-')} cannot be used with --serve {SERVER}: {why}",
                remedy="leave it out",
            )
    if not given["levers"]:
        raise error(
            f"--no-levers cannot be used with --serve {SERVER}, which tries no levers",
            remedy="leave it out",
        )
    if given["speculative"] and given["emit_run"] is not None:
        raise error(
            "--emit-run does not support drafts", remedy="leave out --emit-run or --speculative"
        )
    needed = {
        "machine": ("no machine is given", "add --machine h100-sxm, for example"),
        "ranks": ("the number of ranks is not given", "add --ranks 8, for example"),
        "prompt": (
            f"--serve {SERVER} needs --prompt, the tokens of a request",
            "add --prompt 2048, for example",
        ),
    }
    for name, (what, remedy) in needed.items():
        if not given[name]:
            raise error(what, remedy=remedy)
    if given["objective"] not in (None, *OBJECTIVES):
        raise error(
            f"--objective {given['objective']} is an objective of one step, not of --serve "
            f"{SERVER}",
            remedy=f"give {' or '.join(OBJECTIVES)}",
        )


def _with_tasks(
    question: ServerQuestion,
    given: Mapping[str, Any],
    of_job: Mapping[str, tuple[Any, ...]],
    machines: Sequence[Machine],
    sizes: Mapping[str, int],
    layers: Layers,
    session: Session,
) -> ServerQuestion:
    """The question with the workers of its space, for each machine and stack, on 1, 2, 4, ... ranks
    up to all of them."""
    said = said_values(given, session)
    stacks = dict.fromkeys(name.strip() for name in given["stack"].split(","))
    budgets = (given["chunk"],) if given["chunk"] else ()
    tasks: list[WorkerTask] = []
    refused, points = Counter[str](), 0
    limit = given["limit"] or Limit(AT_HAND, 0)
    most = max(question.ranks)
    apart = ApartSpace.of(given["part"] or (), sizes, priced=given["price"] is not None)
    for machine, price in zip(machines, prices_of(machines, given["price"]), strict=True):
        for stack in stacks:
            base = on_machine(question.model.changed(stack=stack), machine)
            for ranks in doubled(1, most):
                about_space = given, said, of_job, sizes, layers.total, ranks, machine
                space = with_two_stages(space_of(*about_space), said)
                flags = with_stack(base, space.knobs, session).changed(ranks=ranks)
                listing = list_jobs(space, flags.changed(step="decode=1x1"), sizes, layers.total)
                points += listing.points
                refused += listing.refused
                jobs_of = (listing.jobs[n] for n in range(len(listing.jobs)))
                every = [_adapted(question, job, sizes) for job in jobs_of]
                single = [job for job in every if not _is_copied(job)]
                refused[_COPIES] += len(listing.jobs) - len(single)
                lacks = [_lacks(question, job) for job in single]
                refused.update(filter(None, lacks))
                jobs = [job for job, why in zip(single, lacks, strict=True) if not why]
                distinct = _launched_once(question, space.knobs.keys() - _LAYOUT, jobs)
                refused[_SAME] += len(jobs) - len(distinct)
                if apart is not None:
                    own = list(apart.jobs(space, flags, most, refused))
                    lacks = [_lacks(question, job) for job in own]
                    refused.update(filter(None, lacks))
                    distinct += [job for job, why in zip(own, lacks, strict=True) if not why]
                about = limit, question.load, budgets, given["batch"], price, question.measured
                tasks += (WorkerTask(job.changed(step=None), machine, *about) for job in distinct)
    return replace(question, tasks=tasks, refused=+refused, points=points)


def _lacks(question: ServerQuestion, job: JobOptions) -> str:
    """Why the engine of a worker cannot run it; empty if it can."""
    name = _engine(question, job)
    engine = engine_of(name)
    layout = layout_of(job, experts=question.experts > 0)
    what = engine.lacks(layout, job) if engine is not None else ""
    return f"{name} has no flags for {what}" if what else ""


def why_unsent(question: ServerQuestion, prefill: JobOptions, decode: JobOptions) -> str:
    """Why the engine of a worker that prefills does not send its caches to one that decodes; empty
    if it does."""
    name = _engine(question, decode)
    engine = engine_of(name)
    layouts = (layout_of(job, experts=question.experts > 0) for job in (prefill, decode))
    what = engine.unsent(*layouts) if engine is not None else ""
    return f"{name} sends no {what}" if what else ""


def _adapted(question: ServerQuestion, job: JobOptions, sizes: Mapping[str, int]) -> JobOptions:
    """A worker as its engine starts it."""
    engine = engine_of(_engine(question, job))
    return job if engine is None else engine.adapted(job, sizes)


def _engine(question: ServerQuestion, job: JobOptions) -> str:
    """The engine of --emit-run, or else the stack of a worker."""
    return job.stack if question.run is None else question.run.engine


def _launched_once(
    question: ServerQuestion, knobs: Iterable[str], jobs: Sequence[JobOptions]
) -> list[JobOptions]:
    """The workers without those that an engine starts with the same flags as an earlier one, such
    as ep 8 with dp 8 or with tp 8 and attention data parallelism. `knobs` are the other flags in
    which workers may differ."""
    chosen: dict[tuple[object, ...], JobOptions] = {}
    for number, job in enumerate(jobs):
        layout: object = layout_of(job, experts=question.experts > 0)
        if engine_of(_engine(question, job)) is None:
            layout = number
        chosen.setdefault((layout, *(getattr(job, knob) for knob in knobs)), job)
    return [*chosen.values()]


def _is_copied(options: JobOptions) -> bool:
    """Whether the ranks of a job are several workers, that is data-parallel ranks."""
    return (mesh_axes(options).get("dp") or 1) > 1
