"""The decode and mixed steps of a server, whose pipeline stages and groups of ranks each have their
own sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stagec.analysis.memory_fit import MemoryFit
from stagec.analysis.serving_rates import (
    PodStep,
    ServingRates,
    chunked,
    chunks_pass,
    steady_seconds,
)
from stagec.analysis.steady_server import among_groups, chunks, decoding
from stagec.ir.module import Module
from stagec.ir.serving_step import MIXED
from stagec.ir_spec.strategy.scheduler import BESIDE, SchedulerRule
from stagec.jobs.builder import JobBuilder
from stagec.jobs.pod_options import has_pods
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.jobs.stage_steps import steps_in_flight
from stagec.jobs.step_modules import StepModules, groups_in
from stagec.jobs.step_timer import StepTimer
from stagec.memory.timeline import CACHES, STATIC
from stagec.serving.step import SequenceClass, step_of
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import error
from stagec.time.streams import PICOSECONDS

if TYPE_CHECKING:
    from stagec.analysis.figures import MemoryFigures
    from stagec.analysis.time_report import TimeReport

#: The composition of a step that is compiled for its strategy only.
_ONE = "decode=1x1"


def timed_step(options: JobOptions, timer: StepTimer, session: Session) -> TimeReport:
    """The time of a step whose launches are captured in a graph. Raises `DiagnosticError`."""
    from stagec.jobs.lowered import job_costs

    return timer.time(job_costs(options, session))


def paced_seconds(report: TimeReport, options: JobOptions, most: int | None = None) -> float:
    """The seconds per step while other steps occupy the other pipeline stages, at most `most` steps
    in all."""
    stages = steps_in_flight(options)
    under_way = stages if most is None else min(stages, most)
    return steady_seconds(report.breakdown, report.step_seconds, under_way)


def decode_step(
    options: JobOptions,
    timer: StepTimer,
    session: Session,
    batch: int,
    end: int,
    prompts: Sequence[Sequence[MemoryFigures]] = (),
) -> tuple[TimeReport, MemoryFit | None, int]:
    """The time of a decode step, whether the caches of the whole batch, over all pipeline stages,
    fit the memory that `stg.scheduler` may use, and the bytes that it reserves in addition: with
    `reserve`, for sequences of `end` tokens. `prompts` are the figures by pod of steps that prefill
    on the same pods. Raises `DiagnosticError`."""
    from stagec.jobs.lowered import job_costs, rooms_of

    job = job_costs(options, session)
    report = timer.time(job)
    if report.fit is None:
        return report, None, 0
    rule = read_strategy(JobBuilder(options).module).one(SchedulerRule)
    step = options.batch or batch
    figures = job.figures()
    rooms = [rule.room(room) for room in rooms_of(job, figures, timer.machine)]

    def peaks(figures: MemoryFigures) -> list[int]:
        decodes = [pod.by_stage for pod in figures.each]
        most = [peak_of(pod, batch - step, step) for pod in decodes]
        for each in prompts:
            pods = zip(most, each, decodes, strict=True)
            most = [max(peak, beside_peak(p.by_stage, d)) for peak, p, d in pods]
        return most

    before = whole = peaks(figures)
    if rule.reserve:
        whole = peaks(job_costs(options.changed(context=end), session).figures())
    pods = zip(whole, rooms, before, strict=True)
    fits = [(MemoryFit(peak, room), peak - now) for peak, room, now in pods]
    fit, reserved = min(fits, key=lambda each: each[0].by)
    return report, fit, reserved


def peak_of(stages: Sequence[Mapping[str, int]], others: int, step: int) -> int:
    """The peak of the fullest rank in a step of `step` sequences, with the caches of `others` that
    are on other pipeline stages."""
    sizes = ((sum(each.values()), each.get(CACHES, 0)) for each in stages)
    return max(total + caches * others // step for total, caches in sizes)


def prompts_peak(
    prompts: Sequence[Mapping[str, int]], decode: Sequence[Mapping[str, int]], steps: int
) -> int:
    """The peak of the fullest rank in a step of prompts: by stage its bytes without caches, and the
    caches of `steps` decode steps."""
    pairs = zip(prompts, decode, strict=True)
    return max(sum(p.values()) - p.get(CACHES, 0) + steps * d.get(CACHES, 0) for p, d in pairs)


def beside_peak(prompts: Sequence[Mapping[str, int]], decode: Sequence[Mapping[str, int]]) -> int:
    """The peak of the fullest rank in a step of prompts on ranks that stay as in a decode step:
    with its caches and its weights, which may be those of a further model."""
    stays = [sum(each.get(name, 0) for name in (*STATIC, CACHES)) for each in decode]
    passing = [sum(n for name, n in p.items() if name not in (*STATIC, CACHES)) for p in prompts]
    return max(map(sum, zip(stays, passing, strict=True)))


def request_seconds(report: TimeReport) -> float:
    """The seconds of a request outside of its steps."""
    return report.step.request / PICOSECONDS


def shared_seconds(report: TimeReport) -> float:
    """The seconds of a step for the tokens of several groups of ranks, as experts."""
    from stagec.time.path import shared_time

    return shared_time(report.step.classes) / PICOSECONDS


def coupled_groups(options: JobOptions, module: Module) -> int:
    """The number of groups of ranks that wait for each other and whose prompts come independently;
    1 with `balance`, where prompts wait for those of other groups, and with half batches. Raises
    `DiagnosticError`."""
    strategy = read_strategy(module)
    groups = module.env[strategy.batch]
    if groups == 1 or strategy.in_turn > 1 or strategy.one(SchedulerRule).balance:
        return 1
    plain = options.changed(serve=None, step=None, batch=None, prompt=None, context=None)
    return groups // len(StepModules(plain, Session()).replicas)


def lone_share(options: JobOptions, timer: StepTimer, session: Session) -> tuple[int, float]:
    """The number of groups that wait for each other in steps that only prefill, and the time of
    such a step with a prompt in one of them, as a share of that with a prompt in each. Raises
    `DiagnosticError`."""
    from stagec.jobs.lowered import job_costs

    plain = options.changed(serve=MIXED, step=_ONE, batch=None, prompt=None, context=None)
    module = JobBuilder(plain.changed(chunk=None)).module
    groups = coupled_groups(plain.changed(chunk=None), module)
    if groups == 1:
        return 1, 1.0
    tokens = min(options.prompt or 1, read_strategy(module).one(SchedulerRule).tokens)
    each: list[TimeReport] = []
    for new in (tokens, -(-tokens // groups)):
        step = str(step_of([SequenceClass(new, options.context or 0, 1, 1)]))
        each.append(timer.time(job_costs(plain.changed(chunk=None, step=step), session)))
    every, few = each
    less = max(0.0, shared_seconds(every) - shared_seconds(few))
    return groups, max(every.step_seconds - less, few.step_seconds) / every.step_seconds


def groups_of(decode: JobOptions) -> int:
    """The number of groups of ranks with their own sequences, times the microbatches of a step and
    the overlapping halves of a batch; 1 for several pods, each of which has its own groups."""
    return 1 if has_pods(decode) else groups_in(JobBuilder(decode.changed(batch=None)).module)


@dataclass(frozen=True)
class Mixing:
    """Chunked prefill within decode steps: prompts of `prompt` tokens after `past` cached ones,
    scheduled by `rule`. `groups` counts the groups of ranks with their own sequences, over pipeline
    stages and overlapping halves of a batch, each with half of the tokens of a step; of those of a
    stage `coupled` wait for each other and have prompts independently."""

    options: JobOptions
    rule: SchedulerRule
    groups: int
    past: int
    prompt: int
    output: int
    coupled: int = 1

    @classmethod
    def of(cls, decode: JobOptions, prefill: JobOptions, output: int) -> Mixing | None:
        """The mixing of a server; None if prompts have separate steps, as with drafts, parts and
        several microbatches."""
        stages = steps_in_flight(decode)
        several = decode.pp > stages and not decode.afd
        if several or decode.speculative or has_pods(decode) or has_pods(prefill):
            return None
        module = JobBuilder(decode.changed(serve=MIXED, step=_ONE, context=None)).module
        strategy = read_strategy(module)
        rule = strategy.one(SchedulerRule)
        if rule.prompts != BESIDE:
            return None
        tokens = min(rule.tokens, prefill.chunk or rule.tokens)
        rule = replace(rule, tokens=tokens // strategy.in_turn)
        groups = stages * module.env[strategy.batch]
        about = prefill.context or 0, prefill.prompt or 1, output
        return cls(decode, rule, groups, *about, coupled_groups(decode, module))

    def rates(
        self, decode: PodStep, peak: int, timer: StepTimer, session: Session
    ) -> tuple[ServingRates, int]:
        """The rates at the batch of `decode`, and the peak over decode steps (`peak`) and steps
        with prompts, with `reserve` for all tokens of the sequences. Waiting sequences have no
        caches. Raises `DiagnosticError`."""
        from stagec.jobs.lowered import job_costs

        batch = decode.sequences
        each, past = -(-batch // self.groups), self.past
        load = self.rule.tokens, self.prompt, self.output
        running = decoding(each, *load)
        if each >= self.rule.tokens or (work := chunks(running, *load)) is None:
            raise error(
                f"a step of {self.rule.tokens:,} tokens has no room for prompts beside {each:,} "
                "decoding sequences",
                remedy="give smaller --batches, or more --step-tokens",
            )
        chunk = SequenceClass(work.size, past + work.past, 1, work.prompts)
        asked, last = (
            self._step(SequenceClass(1, past + self.prompt + tokens, 1, running), chunk)
            for tokens in (self.output // 2, self.output - 1)
        )
        job = job_costs(asked, session)
        report = timer.time(job)
        prompts = work.prompts * min(self.groups, batch)
        stages = steps_in_flight(asked)
        most = -(-batch * stages // self.groups)
        seconds = first = paced_seconds(report, asked, most)
        waits = running < each or not work.keeps_up
        if self.coupled > 1 and not waits:
            part = replace(chunk, new=-(-work.size // self.coupled))
            context = past + self.prompt + self.output // 2
            few = self._step(SequenceClass(1, context, 1, running), part)
            other = timer.time(job_costs(few, session))
            less = max(0.0, shared_seconds(report) - shared_seconds(other))
            one = max(seconds - less, paced_seconds(other, few, most))
            share, seconds, first = among_groups(work.share, self.coupled, seconds, one)
            work = replace(work, share=share)
        passes = chunks_pass((work.steps - 1) * first, first, stages)
        request = request_seconds(report)
        mixed = PodStep(prompts, seconds, decode.ranks, request=request, passes=passes)
        largest = job_costs(last, session) if self.rule.reserve else job
        most = peak_of(largest.figures().by_stage, stages - 1, 1)
        peak = max(most, peak) if running == each else most
        under_way = min(stages, most)
        rates = chunked(decode, mixed, work, self.output, stages=under_way, waits=waits)
        return rates, peak

    def _step(self, *sequences: SequenceClass) -> JobOptions:
        """The step with these sequences in each group of ranks."""
        return self.options.changed(serve=MIXED, step=str(step_of(sequences)), context=None)
