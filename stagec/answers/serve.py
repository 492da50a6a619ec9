"""What users of a server would meet, and what its ranks give, over batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import takewhile
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from stagec.analysis.serving_rates import (
    PodStep,
    ServingRates,
    chunks_pass,
    colocated,
    disaggregated,
)
from stagec.answers.intervals import stack_errors
from stagec.answers.questions import JobQuestion, needed
from stagec.answers.requests.answer import RequestsAnswer
from stagec.answers.requests.options import DEVICE, OVER_TIME, TIERS, is_over_time
from stagec.answers.requests.run import Handover, serve_requests
from stagec.answers.requests.tiers import context_bytes, loading_speed
from stagec.answers.serve_answer import ServeAnswer, ServedBatch
from stagec.answers.serve_remedies import misfit
from stagec.answers.serve_steps import (
    Mixing,
    decoded,
    groups_of,
    paced_seconds,
    peak_alone,
    request_seconds,
    timed_step,
)
from stagec.answers.time.timed import time_job
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.ir_spec.strategy.moe import MoeRule
from stagec.ir_spec.strategy.part import MAIN
from stagec.jobs.builder import JobBuilder
from stagec.jobs.pod_options import (
    guests,
    has_pods,
    models_alone,
    options_of,
    options_of_draft,
    options_of_pod,
    pod_names,
)
from stagec.jobs.pods import one_group
from stagec.jobs.request.acceptance import ACCEPTANCE, Acceptance, take_acceptance
from stagec.jobs.request.combine import divisors
from stagec.jobs.request.command_line import question_command
from stagec.jobs.request.measurements import MEASURED
from stagec.jobs.request.option import CommandOption, Kind, OneOf, Whole
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.ranges import doubled_texts, is_range
from stagec.jobs.request.serving_flags import DISAGGREGATED
from stagec.jobs.request.times import TimeType
from stagec.jobs.request.units import on_machine
from stagec.jobs.session import Session
from stagec.jobs.stage_steps import of_a_stage, steps_in_flight
from stagec.jobs.step_timer import StepTimer
from stagec.pipeline.verify import verify_module
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import DiagnosticError, error

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.ir.module import Module
    from stagec.machines import Machine
    from stagec.time.transfer import TransferTime

Figures = TypeVar("Figures")

#: The rates of a step of decode, whose options are those and whose ranks hold so many bytes, and
#: what they hold in all steps.
RatesAt: TypeAlias = Callable[[PodStep, JobOptions, int], tuple[ServingRates, int]]
#: The largest batch that is tried.
LARGEST = 1 << 16
_BATCH = re.compile("0*[1-9][0-9]{0,5}")


class Batches(Kind[tuple[int, ...]]):
    """`1,2,4,8`, or `1..8`."""

    name = "N,N,..."

    def read(self, text: str) -> tuple[int, ...]:
        """The batches, in order."""
        given = [p.strip() for p in text.split(",")]
        parts = [t for p in given for t in (doubled_texts(p) if is_range(p) else (p,))]
        if not parts or not all(_BATCH.fullmatch(p) and int(p) <= LARGEST for p in parts):
            raise ValueError(f"expects batches such as 1,8,64 or 1..64, found '{text}'")
        return tuple(sorted({int(p) for p in parts}))


def serve(
    options: JobOptions, machine: Machine | None, given: Mapping[str, Any], session: Session
) -> ServeAnswer | RequestsAnswer:
    """Compute rates of a server: time to the first token (TTFT), time for each further one (TPOT),
    and tokens per second, over batches, or of requests over time.

    Each sequence has --prompt tokens and --output-tokens more. The same ranks prefill and decode;
    with --prompt-steps beside they do both in the same steps, as engines do. With --serve
    disaggregated some pods prefill, with the strategy of --prefill, and others decode, with that of
    --decode. Engines capture steps as graphs, so hosts do not delay devices.

        stagec serve llama3-8b --tp 2 --prompt 1024 --machine h100-sxm

    With --rate, --concurrency, --batch-of or --requests, requests arrive over time, wait, share
    steps and memory, and leave. The answer has percentiles of times, and the load of replicas.

        stagec serve llama3-8b --rate 8 --lengths prompt=~1000,output=~200 --machine h100-sxm
    """
    asked = on_machine(options, needed(machine))
    said = question_command(QUESTION.name, options, machine, QUESTION.options, given)
    timer = StepTimer.of(needed(machine), given)
    if is_over_time(given, whole=asked.serve == DISAGGREGATED):
        caches = partial(handover_between, timer, session.aside())
        over_time = serve_requests(asked, timer, given, session, caches)
        return replace(over_time, command=said)
    answer = _served(asked, timer, session, given, take_acceptance(asked, given))
    session.remark(*answer.cautions)
    return replace(answer, command=said)


QUESTION = JobQuestion(
    "serve",
    serve,
    machine="The machine that serves: a name that 'stagec machines' lists.",
    options=(
        CommandOption(
            "output_tokens",
            Whole(2),
            "Output tokens of each sequence (default: 128).",
            128,
        ),
        CommandOption(
            "batches",
            Batches(),
            "Sequences in decode at any time, over all ranks (default: 1, 2, 4, ... as many as "
            "fit; 1..64 doubles).",
        ),
        CommandOption(
            "prefill_batch",
            Whole(1),
            "Prompts of a step that prefills (default: as few as the strategy takes at once).",
            metavar="N",
            rare=True,
        ),
        *ACCEPTANCE,
        CommandOption("ttft", TimeType(), "Limit of the time to the first token: 500ms."),
        CommandOption("tpot", TimeType(), "Limit of the time for each further token: 30ms."),
        CommandOption(
            "context_from",
            OneOf((DEVICE, *TIERS)),
            "Where the --context tokens of a prompt are kept: TTFT includes loading them from the "
            "host, or from a disk (--disk-bandwidth).",
            DEVICE,
            rare=True,
        ),
        *MEASURED,
        *OVER_TIME,
    ),
)


def _served(
    asked: JobOptions,
    timer: StepTimer,
    session: Session,
    given: Mapping[str, Any],
    accepted: Acceptance,
) -> ServeAnswer:
    """The answer over batches: those that are given, or as they double, while they fit; the best
    is within the limits. Raises `DiagnosticError`."""
    steps, two_pods = _options(asked), asked.serve == DISAGGREGATED
    output_tokens = given["output_tokens"]
    with session.once() as aside:
        target = at_least(steps[DECODE], partial(one_group, session=aside)) if two_pods else None
        first = steps[PREFILL].changed(batch=given["prefill_batch"])
        prefill, transfer = _prefill(first, timer, aside, target)
        pods = _whole_pods(given)
        rates = _rates_at(steps, timer, aside, prefill, output_tokens, pods)
        asking = output_tokens, given["batches"], accepted.tokens, rates
        rows = list(_rows(steps, timer, aside, prefill, *asking, two_pods=two_pods))
        loads = _context_seconds(steps[PREFILL], timer, aside, given)
        rows = [replace(row, rates=row.rates.delayed(loads)) for row in rows]
    return ServeAnswer(
        model=steps[PREFILL].model,
        machine=timer.machine.name,
        ranks={PREFILL: prefill.ranks, DECODE: rows[0].ranks},
        two_pods=two_pods,
        prompt=steps[PREFILL].prompt or 0,
        output=output_tokens,
        handover=transfer,
        points=rows,
        best=_best(rows, given["ttft"], given["tpot"]),
        errors=stack_errors(steps[DECODE].stack, timer.machine),
        costed_by=timer.measured_counts(session),
    )


def _options(options: JobOptions) -> Mapping[str, JobOptions]:
    """The options of both steps: that of prefill has the parts, of which decode has none. Raises
    `DiagnosticError`."""
    if options.preset and options.serve is not None:
        name = options.preset
        raise error(
            f"--preset {name} is one step of {options.serve}, which 'stagec serve' does not take",
            remedy="run 'stagec time' for this step, or write the strategy to a file, 'stagec "
            f"presets {name} > {name}.stg', and give MODEL and the file",
        )
    if options.serve not in (None, DISAGGREGATED):
        raise error(
            f"--serve {options.serve} is one step, which 'stagec serve' does not take",
            remedy="run 'stagec time' for this step; or leave --serve out, or give --serve "
            "disaggregated",
        )
    if options.batch is not None:
        raise error(
            "'stagec serve' takes --batches in place of --batch", remedy="give --batches 1,8,64"
        )
    if options.prompt is None:
        raise error("--prompt is missing: the tokens of each request", remedy="give --prompt 2048")
    if options.part and options.chunk is not None and options.serve == DISAGGREGATED:
        raise error(
            "--chunk cannot be used with --serve disaggregated and --part: the last chunk "
            "transfers caches, but the encoder runs with the first",
            remedy="leave out --chunk, or --serve disaggregated",
        )
    if options.draft is not None:
        options_of_draft(MAIN, options.draft, options)  # refuses what makes other pods
    if options.serve == DISAGGREGATED:
        options = of_a_stage(options)
        return {PREFILL: options, DECODE: options_of_pod(DECODE, options.changed(chunk=None))}
    return {
        PREFILL: of_a_stage(options.changed(serve=PREFILL, speculative=None)),
        DECODE: of_a_stage(
            options.changed(serve=DECODE, prompt=None, chunk=None, context=None, part=())
        ),
    }


# -- steps -----------------------------------------------------------------------------------------


def _prompts(options: JobOptions, timer: StepTimer, session: Session) -> tuple[float, int, float]:
    """The seconds of a step of prefill, its ranks, and what a request takes outside of it. A draft
    model prefills beside the one that verifies, and what takes longer is the step; on the same
    ranks it prefills behind it. Raises `DiagnosticError`."""
    each = [timed_step(model, timer, session) for model in models_alone(options)]
    longest = max(each, key=lambda report: report.step_seconds)
    if guests(options):
        return sum(report.step_seconds for report in each), longest.ranks, request_seconds(longest)
    return paced_seconds(longest, options), longest.ranks, request_seconds(longest)


def sending(
    options: JobOptions, timer: StepTimer, session: Session, target: Module
) -> tuple[TimeReport, TransferTime]:
    """The time of a step of prefill by itself, and of the caches that it hands over to a pod that
    decodes. Raises `DiagnosticError`."""
    from stagec.time.costs.network import level_between_pods
    from stagec.time.transfer import transfer_time

    machine, measured = timer.machine, timer.measured
    peers = {DECODE: target}
    timed = time_job(options, machine, session, levers=False, measured=measured, peers=peers)
    meshes = [job.mesh for job in timed.each.values()]
    level = level_between_pods(machine, [*meshes, target.axis_sizes])
    sent = timed.steps[PREFILL].issued, machine, level, timed.step
    return timer.counted(timed.report), transfer_time(*sent, measured=measured)


def handover_between(timer: StepTimer, session: Session, options: JobOptions) -> Handover:
    """The caches of a prompt on their way between two pods, by its tokens: linear between prompts
    that double, each of which is timed when it is needed. Raises `DiagnosticError`."""
    options = of_a_stage(options)
    decodes = options_of_pod(DECODE, options.changed(batch=None))
    target = at_least(decodes, partial(one_group, session=session))

    @cache
    def of(prompt: int) -> tuple[float, float]:
        def look(each: JobOptions) -> tuple[float, float]:
            _, sent = sending(each, timer, session, target)
            return sent.alone_seconds / (each.batch or 1), sent.exposed_seconds

        return at_least(options.changed(prompt=prompt), look)

    def between(tokens: int) -> tuple[float, float]:
        low = 1 << max(6, tokens.bit_length() - 1)
        share = (tokens - low) / low
        (busy, rest), (later, more) = of(low), of(2 * low)
        return max(0.0, busy + share * (later - busy)), max(0.0, rest + share * (more - rest))

    return between


def _sequences(options: JobOptions) -> Iterator[int]:
    """Numbers of sequences of which a strategy may take the least at once: that which is given, or
    the divisors of its ranks times its microbatches. Raises `DiagnosticError`."""
    if options.batch is not None:
        yield options.batch
        return
    options = options.changed(chunk=None)
    if has_pods(options):
        options = options_of(pod_names(options)[0], options).changed(draft=None)
    module = JobBuilder(options).module
    verify_module(module)  # so that its ranks can be numbered
    strategy = read_strategy(module)
    halves = strategy.one(MoeRule).halves
    most = prod(module.axis_sizes.values()) * max(1, strategy.microbatches) * halves
    yield from divisors(most)


def at_least(options: JobOptions, look: Callable[[JobOptions], Figures]) -> Figures:
    """What is found of a step of as few sequences as the strategy takes at once. Raises
    `DiagnosticError`."""
    problem: DiagnosticError | None = None
    for batch in _sequences(options):
        try:
            return look(options.changed(batch=batch))
        except DiagnosticError as raised:
            problem = problem or raised
    raise problem or error("the strategy has no ranks to serve with")


def _prefill(
    options: JobOptions, timer: StepTimer, session: Session, target: Module | None
) -> tuple[PodStep, TransferTime | None]:
    """The step that prefills as few prompts as the strategy takes at once; with --chunk, its steps
    together. The last of them hands the caches over, if another pod decodes. Raises
    `DiagnosticError`."""

    def look(options: JobOptions) -> tuple[PodStep, TransferTime | None]:
        *before, last = _chunks(options)
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

    return at_least(options, look)


def _context_seconds(
    options: JobOptions, timer: StepTimer, session: Session, given: Mapping[str, Any]
) -> float:
    """The seconds in which the cached tokens before a prompt come from where they are kept. Raises
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
        return context_bytes(job.changed(chunk=None), session)

    speed = loading_speed(where, timer.machine, given["disk_bandwidth"])
    return at_least(_prefills(options), look) / speed


def _prefills(options: JobOptions) -> JobOptions:
    """The options of a step that hands nothing over."""
    if options.serve != DISAGGREGATED:
        return options
    return options_of_pod(PREFILL, options).changed(part=options.part)


def _chunks(options: JobOptions) -> Iterator[JobOptions]:
    """The steps of a prompt: one, or one for each chunk, of which the first one has the encoder."""
    prompt, past = options.prompt or 1, options.context or 0
    chunk = options.chunk or prompt
    for start in range(0, prompt, chunk):
        size = min(chunk, prompt - start)
        part = () if start else options.part
        yield options.changed(prompt=size, chunk=None, context=past + start, part=part)


def _whole_pods(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Pods that prefill and that decode, if their numbers are given."""
    first, then = given["prefill_replicas"], given["replicas"]
    return None if first is None and then == 1 else (first or 1, then)


def _rates_at(
    options: Mapping[str, JobOptions],
    timer: StepTimer,
    session: Session,
    prefill: PodStep,
    output: int,
    pods: tuple[int, int] | None,
) -> RatesAt:
    """The rates of the same ranks, or of pods, as many as keep each other busy or so many. Raises
    `DiagnosticError`."""
    first = options[PREFILL]
    if first.serve == DISAGGREGATED:
        return lambda decode, job, peak: (disaggregated(prefill, decode, output, pods), peak)
    mixes = Mixing.of(options[DECODE], first, output)
    if mixes is not None:
        return lambda decode, job, peak: mixes.rates(decode, peak, timer, session)
    from stagec.jobs.lowered import job_costs

    batch = prefill.sequences // steps_in_flight(first)
    chunks = [*_chunks(first.changed(batch=batch))]

    def alone(decode: PodStep, job: JobOptions, peak: int) -> tuple[ServingRates, int]:
        # no more prompts are in a step, and on stages, than there are sequences
        prompts = replace(prefill, sequences=min(prefill.sequences, decode.sequences))
        rates = colocated(prompts, decode, output)
        if has_pods(first) or has_pods(job):
            return rates, peak
        kept = job_costs(job, session).figures().by_stage
        steps = (job_costs(step, session).figures().by_stage for step in chunks)
        stages = steps_in_flight(job)
        return rates, max(peak, *(peak_alone(each, kept, stages) for each in steps))

    return alone


def _rows(
    options: Mapping[str, JobOptions],
    timer: StepTimer,
    session: Session,
    prefill: PodStep,
    output: int,
    wanted: Sequence[int] | None,
    accepted: float,
    rates_at: RatesAt,
    *,
    two_pods: bool,
) -> Iterator[ServedBatch]:
    """A row for each batch: those that are wanted, or as they double from a sequence for each group
    of ranks on, while they fit, with its rates. Of each sequence a step gives the tokens that are
    `accepted`. Where groups do not divide a batch, the step is that of the fullest. A remark states
    what a wanted batch is left out for beside others."""
    start = (options[PREFILL].context or 0) + (options[PREFILL].prompt or 0)
    middle, end = start + output // 2, start + output - 1
    decode = options[DECODE].changed(context=middle)
    stages, groups = steps_in_flight(decode), groups_of(decode)
    problems: list[tuple[int, DiagnosticError]] = []
    fits_once = False
    doubled = (groups << power for power in range(LARGEST.bit_length()))
    for batch in wanted or takewhile(LARGEST.__ge__, doubled):
        whole = -(-batch // groups) * groups
        job = decode.changed(batch=-(-batch // (groups * stages)) * groups)
        try:
            report, fit, reserved = decoded(job, timer, session, whole, end)
        except DiagnosticError as raised:
            problems.append((batch, raised))
            continue
        first = not fits_once
        fits_once = True
        if fit is None:
            raise error(
                "'stagec serve' needs the memory of a step, which this --pipeline does not plan",
                remedy="leave --pipeline out",
            )
        cautions = (*report.cautions, *_places_left(batch, whole))
        ranks = report.ranks if two_pods else max(report.ranks, prefill.ranks)
        seconds = paced_seconds(report, job, -(-batch // groups))
        engine = PodStep(batch, seconds / accepted, ranks)
        rates, peak = None, fit.peak - reserved
        if fit.fits or wanted:
            rates, peak = rates_at(engine, job, peak)
        fit = replace(fit, peak=peak + reserved)
        if not fit.fits and first:
            asked, mesh = job.changed(batch=whole), report.mesh
            cautions = (*cautions, misfit(asked, timer.machine, fit, mesh, asked=bool(wanted)))
        if rates is None or not (fit.fits or wanted):
            return
        command, steps = timer.command(job), (prefill, engine)
        yield ServedBatch(rates, steps, ranks, fit, cautions, command)
    if not fits_once and problems:
        raise problems[0][1]
    if wanted:
        session.remark(*(f"--batches {batch} is left out: {why}" for batch, why in problems))


def _places_left(batch: int, whole: int) -> Iterator[str]:
    """What to know of a batch of fewer sequences than the fullest group of ranks has times their
    number."""
    if whole > batch:
        yield f"groups of ranks do not divide batch {batch:,}: its step is that of {whole:,}"


def _best(
    rows: Sequence[ServedBatch], ttft: float | None, tpot: float | None
) -> ServedBatch | None:
    """The row with the highest throughput per rank within the limits."""
    within = [
        row
        for row in rows
        if row.fits
        and (ttft is None or row.rates.ttft <= ttft)
        and (tpot is None or row.rates.tpot <= tpot)
    ]
    return max(within, key=lambda row: row.rates.per_rank, default=None)
