"""`stagec serve`: latency and throughput of a server over batches or over time."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias, TypeVar

from stagec.analysis.figures import MemoryFigures
from stagec.analysis.serving_rates import PodStep, ServingRates, colocated, disaggregated
from stagec.answers.intervals import stack_errors
from stagec.answers.questions import JobQuestion, needed
from stagec.answers.requests.answer import RequestsAnswer
from stagec.answers.requests.options import DEVICE, OVER_TIME, TIERS, is_over_time
from stagec.answers.requests.run import serve_requests
from stagec.answers.serve_answer import ServeAnswer, ServedBatch
from stagec.answers.serve_prompts import (
    context_seconds,
    prefill_step,
    prompt_chunks,
    prompts_fit,
    transfer_between,
    with_fewest,
)
from stagec.answers.serve_remedies import misfit
from stagec.answers.serve_steps import (
    Mixing,
    decode_step,
    groups_of,
    lone_share,
    paced_seconds,
    prompts_peak,
)
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.ir_spec.strategy.part import MAIN
from stagec.jobs.lowered import job_costs
from stagec.jobs.pod_options import (
    guests,
    has_pods,
    machines_text,
    models_alone,
    of_layers,
    options_of_draft,
    options_of_pod,
)
from stagec.jobs.pods import one_group
from stagec.jobs.request.acceptance import ACCEPTANCE, Acceptance, take_acceptance
from stagec.jobs.request.command_line import question_command
from stagec.jobs.request.machine import on_machine
from stagec.jobs.request.measurements import MEASURED
from stagec.jobs.request.option import CommandOption, Kind, OneOf, TimeType, Whole, rare_option
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.ranges import doubled_texts, is_range
from stagec.jobs.request.serving_flags import DISAGGREGATED
from stagec.jobs.session import Session
from stagec.jobs.stage_steps import of_a_stage, steps_in_flight
from stagec.jobs.step_timer import StepTimer
from stagec.machines import Machine
from stagec.support.diagnostics import DiagnosticError, error

Figures = TypeVar("Figures")

#: From a decode step, its options, its peak in bytes and the reserved part of that, to the rates
#: and the peak over all steps.
RatesAt: TypeAlias = Callable[[PodStep, JobOptions, int, int], tuple[ServingRates, int]]
#: The largest batch.
LARGEST = 1 << 16
_BATCH = re.compile("0*[1-9][0-9]{0,5}")


class Batches(Kind[tuple[int, ...]]):
    """`1,2,4,8`, or `1..8`."""

    name = "N,N,..."

    def read(self, text: str) -> tuple[int, ...]:
        """The batches, in ascending order."""
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
    command = question_command(QUESTION.name, options, machine, QUESTION.options, given)
    timer = StepTimer.of(needed(machine), given)
    if is_over_time(given, whole=asked.serve == DISAGGREGATED):
        caches = partial(transfer_between, timer, session.aside())
        over_time = serve_requests(asked, timer, given, session, caches)
        return replace(over_time, command=command)
    answer = _served(asked, timer, session, given, take_acceptance(asked, given))
    session.remark(*answer.cautions)
    return replace(answer, command=command)


QUESTION = JobQuestion(
    "serve",
    serve,
    machine="The machine that serves: a name that 'stagec machines' lists.",
    options=(
        CommandOption(
            "output_tokens", Whole(2), "Output tokens of each sequence (default: 128).", 128
        ),
        CommandOption(
            "batches",
            Batches(),
            "Sequences in decode at any time, over all ranks (default: 1, 2, 4, ... as many as "
            "fit; 1..64 doubles).",
        ),
        rare_option(
            "prefill_batch",
            Whole(1),
            "Prompts of a step that prefills (default: as few as the strategy takes at once).",
            metavar="N",
        ),
        *ACCEPTANCE,
        CommandOption("ttft", TimeType(), "Limit of the time to the first token: 500ms."),
        CommandOption("tpot", TimeType(), "Limit of the time for each further token: 30ms."),
        rare_option(
            "context_from",
            OneOf((DEVICE, *TIERS)),
            "Where the --context tokens of a prompt are kept: TTFT includes loading them from the "
            "host, or from a disk (--disk-bandwidth).",
            DEVICE,
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
    """The answer over the given batches, or over doubling batches while they fit; the best is
    within the limits. Raises `DiagnosticError`."""
    steps, two_pods = _options(asked), asked.serve == DISAGGREGATED
    output_tokens = given["output_tokens"]
    with session.once() as aside:
        decodes = steps[DECODE].changed(part=())
        target = with_fewest(decodes, partial(one_group, session=aside)) if two_pods else None
        first = steps[PREFILL].changed(batch=given["prefill_batch"])
        prefill, transfer = prefill_step(first, timer, aside, target)
        pods = _whole_pods(given)
        rates = _rates_at(steps, timer, aside, prefill, output_tokens, pods)
        asking = output_tokens, given["batches"], accepted.tokens, rates
        rows = list(_rows(steps, timer, aside, prefill, *asking, two_pods=two_pods))
        delay = context_seconds(steps[PREFILL], timer, aside, given)
        rows = [replace(row, rates=row.rates.delayed(delay)) for row in rows]
        if two_pods:
            fit, more = prompts_fit(first, timer.machine, asked=bool(given["batches"]))
            rows = [replace(row, prompts=fit, cautions=(*more, *row.cautions)) for row in rows]
    return ServeAnswer(
        model=steps[PREFILL].model,
        machine=machines_text(asked, timer.machine),
        stack=steps[DECODE].stack,
        ranks={PREFILL: prefill.ranks, DECODE: rows[0].ranks},
        two_pods=two_pods,
        prompt=steps[PREFILL].prompt or 0,
        output=output_tokens,
        handover=transfer,
        points=rows,
        best=_best(rows, given["ttft"], given["tpot"]),
        limits={n: given[n] for n in ("ttft", "tpot") if given[n] is not None},
        errors=stack_errors(steps[DECODE].stack, timer.machine),
        costed_by=timer.measured_counts(session),
    )


def _options(options: JobOptions) -> Mapping[str, JobOptions]:
    """The options of both steps; parts, such as encoders, are in that of prefill only. Raises
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
    layers = of_layers(options)
    encoders = tuple(part for part in options.part if part not in layers)
    if encoders and options.chunk is not None and options.serve == DISAGGREGATED:
        raise error(
            "--chunk cannot be used with --serve disaggregated and --part: the last chunk "
            "transfers caches, but the encoder runs with the first",
            remedy="leave out --chunk, or --serve disaggregated",
        )
    if options.draft is not None:
        options_of_draft(MAIN, options.draft, options)  # refuses options of other pods
    if options.serve == DISAGGREGATED:
        options = of_a_stage(options.changed(part=encoders))
        decodes = options_of_pod(DECODE, options.changed(chunk=None))
        return {PREFILL: options, DECODE: decodes.changed(part=layers)}
    return {
        PREFILL: of_a_stage(options.changed(serve=PREFILL, speculative=None)),
        DECODE: of_a_stage(
            options.changed(serve=DECODE, prompt=None, chunk=None, context=None, part=layers)
        ),
    }


# -- rows ------------------------------------------------------------------------------------------


def _whole_pods(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """The numbers of prefill and decode pods, if given."""
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
    """The rates of a server whose ranks prefill and decode, or of two kinds of pods, in these
    numbers or in the ratio that keeps both busy. Raises `DiagnosticError`."""
    first = options[PREFILL]
    if first.serve == DISAGGREGATED:
        return lambda decode, job, peak, _: (disaggregated(prefill, decode, output, pods), peak)
    mixes = Mixing.of(options[DECODE], first, output)
    if mixes is not None:
        return lambda decode, job, peak, _: mixes.rates(decode, peak, timer, session)
    lone = (1, 1.0)
    if not (has_pods(first) or has_pods(options[DECODE])):
        lone = lone_share(first, timer, session.aside())
    batch = prefill.sequences // steps_in_flight(first)
    chunks = [*prompt_chunks(first.changed(batch=batch))]

    def alone(
        decode: PodStep, job: JobOptions, peak: int, reserved: int
    ) -> tuple[ServingRates, int]:
        # a step, and all stages together, have at most as many prompts as there are sequences
        prompts = replace(prefill, sequences=min(prefill.sequences, decode.sequences))
        stages = steps_in_flight(job)
        if stages > 1:
            stages = min(stages, -(-decode.sequences // groups_of(job)))
        rates = colocated(prompts, decode, output, stages=stages, lone=lone)
        if has_pods(first) or has_pods(job):
            return rates, peak
        decodes = job_costs(job, session).figures().by_stage
        steps = (job_costs(step, session).figures().by_stage for step in chunks)
        peaks = (prompts_peak(each, decodes, steps_in_flight(job)) + reserved for each in steps)
        return rates, max(peak, *peaks)

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
    """A row for each batch: the `wanted` ones, or doubling ones that fit, from one sequence per
    group of ranks. A step yields `accepted` tokens of each sequence. If groups do not divide a
    batch, the step is that of the fullest group. A remark states why a wanted batch is left out,
    if others are not."""
    start = (options[PREFILL].context or 0) + (options[PREFILL].prompt or 0)
    middle, end = start + output // 2, start + output - 1
    decode = options[DECODE].changed(context=middle)
    stages, groups = steps_in_flight(decode), groups_of(decode)
    problems: list[tuple[int, DiagnosticError]] = []
    fits_once = False
    prompts = [] if two_pods else _figures_of_pods(options[PREFILL], prefill.sequences, session)
    doubled = (groups << power for power in range(LARGEST.bit_length()))
    for batch in wanted or takewhile(LARGEST.__ge__, doubled):
        whole = -(-batch // groups) * groups
        job = decode.changed(batch=-(-batch // (groups * stages)) * groups)
        try:
            report, fit, reserved = decode_step(job, timer, session, whole, end, prompts)
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
        cautions = (*report.cautions, *_rounding_caution(batch, whole))
        ranks = report.ranks if two_pods else max(report.ranks, prefill.ranks)
        seconds = paced_seconds(report, job, -(-batch // groups))
        engine = PodStep(batch, seconds / accepted, ranks)
        rates, peak = None, fit.peak
        if fit.fits or wanted:
            rates, peak = rates_at(engine, job, peak, reserved)
        fit = replace(fit, peak=peak)
        if not fit.fits and first:
            asked, mesh = job.changed(batch=whole), report.mesh
            about, pod = (asked, timer.machine, fit, mesh), DECODE if two_pods else ""
            cautions = (*cautions, misfit(*about, asked=bool(wanted), pod=pod))
        if rates is None or not (fit.fits or wanted):
            return
        command, steps = timer.command(job), (prefill, engine)
        yield ServedBatch(rates, steps, ranks, fit, cautions, command)
    if not fits_once and problems:
        raise problems[0][1]
    if wanted:
        session.remark(*(f"--batches {batch} is left out: {why}" for batch, why in problems))


def _figures_of_pods(
    prefill: JobOptions, sequences: int, session: Session
) -> list[Sequence[MemoryFigures]]:
    """The figures of the steps of a prompt on pods that decode too: those with parts of each layer,
    or with a draft model; empty for other servers. A draft model on the ranks of its model has
    steps of its own."""
    from stagec.jobs.lowered import job_costs

    steps: list[Sequence[MemoryFigures]] = []
    several = bool(of_layers(prefill)) or prefill.draft is not None
    for chunk in prompt_chunks(prefill.changed(batch=sequences)) if several else ():
        each = [job_costs(model, session).figures() for model in models_alone(chunk)]
        pods = [figures.each for figures in each]
        steps += pods if guests(chunk) else [[pod for own in pods for pod in own]]
    return steps


def _rounding_caution(batch: int, whole: int) -> Iterator[str]:
    """A caution if groups of ranks do not divide a batch: its step is that of `whole` sequences."""
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
