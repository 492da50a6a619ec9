"""The prefill steps of a server, of whole prompts or chunks, and the transfer of their caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import lcm, prod
from typing import TYPE_CHECKING, Any, TypeVar

from stagec.analysis.memory_fit import MemoryFit
from stagec.analysis.serving_rates import PodStep, chunks_pass
from stagec.answers.requests.options import DEVICE
from stagec.answers.requests.run import TransferSeconds
from stagec.answers.requests.tiers import context_bytes, loading_speed
from stagec.answers.serve_remedies import misfit
from stagec.answers.serve_steps import paced_seconds, peak_of, request_seconds, timed_step
from stagec.answers.time.timed import time_job
from stagec.ir.module import Module
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.ir_spec.strategy.scheduler import SchedulerRule
from stagec.jobs.builder import JobBuilder
from stagec.jobs.lowered import job_costs, rooms_of
from stagec.jobs.pod_options import (
    guests,
    has_pods,
    models_alone,
    of_layers,
    options_of,
    options_of_pod,
    pod_names,
)
from stagec.jobs.pods import Pods, one_group
from stagec.jobs.request.combine import divisors
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import DISAGGREGATED
from stagec.jobs.session import Session
from stagec.jobs.stage_steps import of_a_stage, steps_in_flight
from stagec.jobs.step_timer import StepTimer
from stagec.machines import Machine
from stagec.pipeline.verify import verify_module
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import DiagnosticError, error
from stagec.time.costs.network import level_between_pods
from stagec.time.costs.replay_options import ReplayOptions

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.time.transfer import TransferTime

Figures = TypeVar("Figures")


def _prompts(options: JobOptions, timer: StepTimer, session: Session) -> tuple[float, int, float]:
    """The seconds of a prefill step, its ranks, and the seconds of a request outside of it. A draft
    model on its own ranks prefills at the same time as the main model, so the slower one counts; on
    the same ranks they prefill in turn. Raises `DiagnosticError`."""
    each = [timed_step(model, timer, session) for model in models_alone(options)]
    longest = max(each, key=lambda report: report.step_seconds)
    if guests(options):
        return sum(report.step_seconds for report in each), longest.ranks, request_seconds(longest)
    return paced_seconds(longest, options), longest.ranks, request_seconds(longest)


def sending(
    options: JobOptions, timer: StepTimer, session: Session, target: Module
) -> tuple[TimeReport, TransferTime]:
    """The time of a prefill step without transfers, and that of the transfer of its caches to the
    pod that decodes. Raises `DiagnosticError`."""
    from stagec.time.transfer import transfer_time

    machine, replay = timer.machine, ReplayOptions(measured=timer.measured)
    peers = {DECODE: target}
    timed = time_job(options, machine, session, replay, levers=False, peers=peers)
    meshes = [job.mesh for job in timed.each.values()]
    level = level_between_pods(machine, [*meshes, target.axis_sizes])
    sent = timed.steps[PREFILL].issued, machine, level, timed.step
    return timer.counted(timed.report), transfer_time(*sent, replay)


def transfer_between(timer: StepTimer, session: Session, options: JobOptions) -> TransferSeconds:
    """The transfer times of the caches of a prompt, by its tokens: interpolated linearly between
    powers of two, which are timed on demand. Raises `DiagnosticError`."""
    options = of_a_stage(options)
    decodes = options_of_pod(DECODE, options.changed(batch=None))
    target = with_fewest(decodes, partial(one_group, session=session))

    @cache
    def of(prompt: int) -> tuple[float, float]:
        def look(each: JobOptions) -> tuple[float, float]:
            _, sent = sending(each, timer, session, target)
            return sent.alone_seconds / (each.batch or 1), sent.exposed_seconds

        return with_fewest(options.changed(prompt=prompt), look)

    def between(tokens: int) -> tuple[float, float]:
        low = 1 << max(6, tokens.bit_length() - 1)
        share = (tokens - low) / low
        (busy, rest), (later, more) = of(low), of(2 * low)
        return max(0.0, busy + share * (later - busy)), max(0.0, rest + share * (more - rest))

    return between


def _sequences(options: JobOptions) -> Iterator[int]:
    """Candidates for the fewest sequences of a step: the given batch, or the divisors of the ranks
    times the microbatches. Raises `DiagnosticError`."""
    if options.batch is not None:
        yield options.batch
        return
    module = _prompts_module(options.changed(chunk=None))
    verify_module(module)  # so that its ranks can be numbered
    strategy = read_strategy(module)
    halves = strategy.in_turn
    if options.serve == DISAGGREGATED:  # caches cross in halves if either pod has half batches
        decode = JobBuilder(options_of_pod(DECODE, options.changed(chunk=None))).module
        halves = max(halves, read_strategy(decode).in_turn)
    ranks = prod(module.axis_sizes.values())
    if of_layers(options):  # each pod has groups of its own
        pods = Pods.of(options.changed(chunk=None), Session()).modules.values()
        ranks = lcm(*(prod(each.axis_sizes.values()) for each in pods))
    yield from divisors(ranks * max(1, strategy.microbatches) * halves)


def _prompts_module(options: JobOptions) -> Module:
    """The module of the pod that processes prompts. Raises `DiagnosticError`."""
    if has_pods(options):
        options = options_of(pod_names(options)[0], options).changed(draft=None)
    return JobBuilder(options).module


def with_fewest(options: JobOptions, look: Callable[[JobOptions], Figures]) -> Figures:
    """The result of `look` for a step of the fewest sequences that the strategy supports. Raises
    `DiagnosticError`."""
    problem: DiagnosticError | None = None
    for batch in _sequences(options):
        try:
            return look(options.changed(batch=batch))
        except DiagnosticError as raised:
            problem = raised  # of the most sequences, which groups of ranks divide
    raise problem or error("the strategy has no ranks to serve with")


def prefill_step(
    options: JobOptions, timer: StepTimer, session: Session, target: Module | None
) -> tuple[PodStep, TransferTime | None]:
    """The step that prefills the fewest prompts that the strategy supports; with --chunk, all its
    chunks. The last one transfers the caches if another pod decodes. Raises `DiagnosticError`."""

    def look(options: JobOptions) -> tuple[PodStep, TransferTime | None]:
        *before, last = prompt_chunks(options)
        aside = session.aside()  # the last chunk reaches the last position
        first = [_prompts(_prefills(each), timer, aside) for each in before]
        seconds, most = sum(each[0] for each in first), max((each[1] for each in first), default=0)
        sequences = options.batch or 1
        if target is None:
            more, ranks, request = _prompts(last, timer, session)
            stages = steps_in_flight(options)
            ways = {"request": request, "passes": chunks_pass(seconds, more, stages)}
            ranks = max(most, ranks)
            return PodStep(sequences * stages, seconds + more, ranks, **ways), None
        step, sent = sending(last, timer, session, target)
        pod = _prefills(last)
        stages = steps_in_flight(pod)
        links = stages * sent.alone_seconds, sent.exposed_seconds, request_seconds(step)
        ranks, paced = max(most, step.ranks), seconds + paced_seconds(step, pod)
        passes = chunks_pass(seconds, step.step_seconds, stages)
        return PodStep(sequences * stages, paced, ranks, *links, passes), sent

    return with_fewest(options, look)


def prompts_fit(
    options: JobOptions, machine: Machine, *, asked: bool
) -> tuple[MemoryFit, Sequence[str]]:
    """Whether the memory of a prefill pod fits the part that `stg.scheduler` may use, in its
    largest chunk and on the rank with the least memory left, and remedies if it does not. Every
    stage holds the caches of the prompts in flight. Raises `DiagnosticError`, also if it does not
    fit and batches were not `asked` for."""

    def look(options: JobOptions) -> tuple[MemoryFit, JobOptions, Mapping[str, int]]:
        fits: list[tuple[MemoryFit, JobOptions, Mapping[str, int]]] = []
        for pod in map(_prefills, prompt_chunks(options)):
            rule = read_strategy(_prompts_module(pod)).one(SchedulerRule)
            job = job_costs(pod)
            figures = job.figures()
            for each, room in zip(figures.each, rooms_of(job, figures, machine), strict=True):
                peak = peak_of(each.by_stage, steps_in_flight(pod) - 1, 1)
                fits.append((MemoryFit(peak, rule.room(room)), pod, each.mesh))
        return min(fits, key=lambda each: each[0].by)

    fit, pod, mesh = with_fewest(options, look)
    return fit, () if fit.fits else (misfit(pod, machine, fit, mesh, asked=asked, pod=PREFILL),)


def context_seconds(
    options: JobOptions, timer: StepTimer, session: Session, given: Mapping[str, Any]
) -> float:
    """The seconds in which the cached tokens before a prompt are loaded from their tier. Raises
    `DiagnosticError`."""
    where, context = given["context_from"], options.context or 0
    if where == DEVICE:
        return 0.0
    if not context:
        raise error(
            f"--context-from {where} needs --context: the tokens of a prompt that are cached",
            remedy="give --context 4096",
        )

    def look(job: JobOptions) -> float:
        each = (context_bytes(m, session) for m in models_alone(job.changed(chunk=None)))
        return sum(each) if guests(job) else max(each)

    speed = loading_speed(where, timer.machine, given["disk_bandwidth"])
    return with_fewest(_prefills(options), look) / speed


def _prefills(options: JobOptions) -> JobOptions:
    """The options of a prefill step without transfers."""
    if options.serve != DISAGGREGATED:
        return options
    return options_of_pod(PREFILL, options).changed(part=options.part)


def prompt_chunks(options: JobOptions) -> Iterator[JobOptions]:
    """The steps of a prompt: one, or one for each chunk; the first one has the encoder."""
    prompt, past = options.prompt or 1, options.context or 0
    chunk = options.chunk or prompt
    for start in range(0, prompt, chunk):
        size = min(chunk, prompt - start)
        part = of_layers(options) if start else options.part
        yield options.changed(prompt=size, chunk=None, context=past + start, part=part)
