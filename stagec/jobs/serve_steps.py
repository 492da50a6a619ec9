"""Jobs of several steps of serving: `stagec compile --serve ... --steps N`.

Requests and a policy, or a first step, determine the sequences of each step. Distinct steps are
compiled once; the trace of a rank has all steps one after the other.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from stagec.ir.opdef import Registry
from stagec.ir.serving_step import MIXED
from stagec.ir_spec.strategy.scheduler import BUDGET
from stagec.jobs.admission import Room, largest_step
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import mixed_step
from stagec.jobs.request.steps import BLOCK, MAX_STEPS, SEQUENCES, TICK
from stagec.jobs.session import Session
from stagec.serving.arrivals import requests_of
from stagec.serving.engine import Duration, Engine, Served, Stretch
from stagec.serving.latency import latencies
from stagec.serving.policy import BatchingPolicy, ServerLimits, find_policy, policies_of
from stagec.serving.requests import Request, seconds_text
from stagec.serving.step import SequenceClass, Step, step_of
from stagec.support.diagnostics import Diagnostic, error

#: The number of steps between two progress messages.
_OFTEN = 100


@dataclass(frozen=True)
class StepRun:
    """The consecutive steps of ranks that step together. The tokens of step i were sampled
    `after[i]` steps before it (0: by no step)."""

    steps: Sequence[Step]
    after: Sequence[int]

    @property
    def distinct(self) -> list[Step]:
        """The distinct steps, in order of first use."""
        return list(dict.fromkeys(self.steps))

    def order(self, distinct: Sequence[Step]) -> list[int]:
        """The place of each step among distinct ones."""
        place = {step: i for i, step in enumerate(distinct)}
        return [place[step] for step in self.steps]


@dataclass(frozen=True)
class StepList:
    """The steps of a job: one run of all ranks, or one for each replica of the server.

    `about` describes their origin in the manifest. `tokens` counts computed tokens by kind of
    class, `sampled` those that get logits, summed over `groups` of ranks, without padding. `served`
    are the requests that are done; the last step ends at `end`, in nanoseconds.
    """

    runs: Sequence[StepRun]
    about: Mapping[str, object]
    tokens: Mapping[str, int]
    sampled: int
    groups: int = 1
    served: Sequence[Served] = ()
    end: int = 0
    room: Room | None = None

    @property
    def distinct(self) -> list[Step]:
        """The distinct steps, in order of first use."""
        return list(dict.fromkeys(step for run in self.runs for step in run.steps))

    def manifest(self) -> dict[str, object]:
        """The entry of the manifest: the distinct steps, and for each run the consecutive steps as
        pairs of a number among these and a count."""
        distinct = self.distinct
        orders = (run.order(distinct) for run in self.runs)
        runs = [[[n, len(list(same))] for n, same in groupby(order)] for order in orders]
        times = {name: spread.as_json() for name, spread in latencies(self.served).items()}
        about = {**self.about, **({"times": times} if times else {})}
        return {**about, "compositions": [str(s) for s in distinct], "steps": runs}


@dataclass(frozen=True)
class StepsAsked:
    """The question of a job of steps: its options, on `depth` pipeline stages, for a model with
    `positions` positions (0: not known) and sequences of `longest` tokens in its text (0: open).
    Each of `groups` groups of ranks has requests of its own, and `coupled` of them wait for each
    other. `times` gives the nanoseconds of a step on the machine, if there is one, and `room` the
    room for caches."""

    options: JobOptions
    given: Mapping[str, Any]
    session: Session
    registry: Registry
    depth: int
    positions: int
    longest: int
    groups: int
    coupled: int
    times: Callable[[Step], int] | None = None
    room: Callable[[Step, int], Room] | None = None

    def steps(self) -> StepList:
        """The steps. For requests, the sequences of a step that decode are one class, since engines
        launch one kernel over all of them. Raises `DiagnosticError`, `OSError`."""
        served = self.given["requests"] is not None
        steps = self._served() if served else self._repeated()
        bucket = self.given["bucket"]
        rows = [[step.rounded(bucket) for step in run.steps] for run in steps.runs]
        if served:
            rows = [[step.together(prompts=False) for step in row] for row in rows]
        runs = [replace(run, steps=row) for run, row in zip(steps.runs, rows, strict=True)]
        about = {**steps.about, **({"bucket": bucket} if bucket > 1 else {})}
        return replace(steps, runs=runs, about=about)

    # -- requests ----------------------------------------------------------------------------------

    def _served(self) -> StepList:
        given = self.given
        self._refuse("step", "context", "prompt", "speculative")
        policy = find_policy(given["policy"], policies_of(self.registry.extras))
        requests = requests_of(given["requests"])
        self._check_positions(requests)
        replicas = self.groups // self.coupled
        if len(requests) < replicas:
            raise error(
                f"{len(requests)} requests are fewer than the {replicas} replicas of the server, "
                "so some would get none",
                remedy=f"use at most {len(requests)} replicas (--dp), or more requests",
            )
        limits, room = self._limits(requests)
        per_replica = [self._run(requests[r::replicas], policy, limits) for r in range(replicas)]
        engines = [engine for engine, _ in per_replica]
        if unserved := sum(engine.unserved for engine in engines):
            text = f"{unserved:,} of {len(requests):,} requests are not done after the steps"
            self.session.remark(text)
        served = [
            replace(each, number=1 + r + replicas * (each.number - 1))
            for r, engine in enumerate(engines)
            for each in engine.served
        ]
        shared = {"groups": self.groups, "sharing": "round robin"} if self.groups > 1 else {}
        about = {
            "requests": len(requests),
            "served": len(served),
            "policy": policy.name,
            "tokens": limits.tokens,
            "sequences": limits.sequences,
            **({} if limits.blocks is None else {"blocks": limits.blocks, "block": limits.block}),
            **shared,
            **self._clock,
        }
        runs = [
            StepRun(
                [step for each in stretches for step in each.steps],
                [n for each in stretches for n in (each.after, *[1] * (each.count - 1))],
            )
            for _, stretches in per_replica
        ]
        tokens, sampled = Counter[str](), 0
        for each in (each for _, stretches in per_replica for each in stretches):
            for step in each.groups:
                sampled += step.sampled * each.count
                for c in step.classes:
                    tokens[c.kind] += c.tokens * each.count
        end = max(stretches[-1].end for _, stretches in per_replica)
        return StepList(runs, about, tokens, sampled, self.groups, served, end, room)

    def _run(
        self, requests: Sequence[Request], policy: BatchingPolicy, limits: ServerLimits
    ) -> tuple[Engine, Sequence[Stretch]]:
        """Serve requests by the groups of ranks of one replica."""
        most = self.given["steps"] or MAX_STEPS
        with self.session.live() as progress:
            duration = _counted(self._duration, most, progress)
            engine = Engine(requests, policy, limits, duration, self.depth, self.coupled)
            try:
                return engine, list(engine.stretches(most))
            except KeyboardInterrupt:
                of = f"{len(engine.served):,} of {len(requests):,}"
                self.session.log(f"interrupted with {of} requests served")
                raise

    def _limits(self, requests: Sequence[Request]) -> tuple[ServerLimits, Room | None]:
        """The limits of a group of ranks, and the room for caches on the machine, if that
        determines them."""
        options, blocks = self.options, self.given["cache_blocks"]
        tokens, sequences = options.chunk or BUDGET, options.batch or SEQUENCES
        block = options.page if options.page > 1 else BLOCK
        if blocks is not None or self.room is None:
            return ServerLimits(tokens, sequences, blocks or None, block), None
        room = self.room(largest_step(requests, tokens, sequences), block)
        return ServerLimits(tokens, sequences, room.blocks, block, fixed=room.fixed), room

    @property
    def _duration(self) -> Duration:
        """The nanoseconds of steps: a constant, or a function of the step."""
        times, bucket = self.times, self.given["bucket"]
        if self.given["tick"] is not None or times is None:
            return int(self.given["tick"] or TICK)
        return lambda step: times(step.rounded(bucket))

    @property
    def _clock(self) -> Mapping[str, str]:
        """The entry of the manifest on the times of steps."""
        duration = self._duration
        if isinstance(duration, int):
            return {"tick_seconds": seconds_text(duration)}
        return {"machine": str(self.given["machine"])}

    def _refuse(self, *names: str) -> None:
        for name in names:
            if getattr(self.options, name) is not None:
                raise error(
                    f"--{name} and --requests cannot be used together: both give the sequences of "
                    "a step",
                    remedy="leave one of them out",
                )

    def _check_positions(self, requests: Sequence[Request]) -> None:
        """Raise `DiagnosticError` for a prompt beyond the positions of the model, and warn of an
        output beyond them."""
        if not self.positions:
            return
        for number, request in enumerate(requests, 1):
            if request.prompt > self.positions:
                raise error(
                    f"request {number} has a prompt of {request.prompt:,} tokens, but the model "
                    f"has {self.positions:,} positions",
                    request.loc,
                    remedy="remove the request, or serve a model with more positions",
                )
        most = max(requests, key=lambda r: r.prompt + r.output)
        if most.prompt + most.output - 1 > self.positions:
            text = (
                f"requests reach position {most.prompt + most.output - 1:,}, beyond the "
                f"{self.positions:,} of the model"
            )
            self.session.report(Diagnostic(text, most.loc, severity="warning"))

    # -- a first step ------------------------------------------------------------------------------

    def _repeated(self) -> StepList:
        """The first step and `--steps` - 1 further ones, with growing contexts. On pipeline stages
        a batch that decodes is divided into one part for each stage; these follow each other."""
        if self.given["cache_blocks"] is not None:
            raise error("--cache-blocks needs --requests", remedy="leave it out")
        first, count = self._first(), self.given["steps"]
        parts = [first]
        if self.depth > 1 and all(c.kind in ("decode", "verify") for c in first.classes):
            parts = _parts(first, self.depth)
        steps = [part.later(i) for i in range(count) for part in parts]
        after = [min(i, len(parts)) if i >= len(parts) else 0 for i in range(len(steps))]
        tokens = Counter[str]()
        for each in (c for step in steps for c in step.classes):
            tokens[each.kind] += each.tokens
        sampled = sum(step.sampled for step in steps)
        return StepList([StepRun(steps, after)], {"first": str(first)}, tokens, sampled)

    def _first(self) -> Step:
        options = self.options
        if options.serve == MIXED:
            return mixed_step(options)
        batch = options.batch or self.groups
        if batch % self.groups:
            raise error(
                f"--batch {batch} does not divide over {self.groups} groups of ranks",
                remedy=f"give a multiple of {self.groups}",
            )
        count, context = batch // self.groups, options.context or 0
        if options.serve == "decode":
            if options.context is None:
                raise error(
                    "--serve decode needs --context: the cached tokens of each sequence",
                    remedy="give --context 4096",
                )
            new = 1 + (options.speculative or 0)
            return step_of([SequenceClass(new, context, new, count)])
        new = options.chunk or options.prompt or self.longest
        if not new:
            raise error(
                "--serve prefill needs --prompt: the tokens of each sequence",
                remedy="give --prompt 2048",
            )
        return step_of([SequenceClass(new, context, 1, count)])


def _counted(duration: Duration, most: int, progress: Callable[[str], None]) -> Duration:
    """The same durations; `progress` is called with the number of steps timed so far."""
    if isinstance(duration, int):
        return duration
    done = 0

    def counted(step: Step) -> int:
        nonlocal done
        done += 1
        if done % _OFTEN == 1:
            progress(f"serving: {done:,} of at most {most:,} steps timed")
        return duration(step)

    return counted


def _parts(step: Step, depth: int) -> list[Step]:
    """A step divided into `depth` equal parts. Raises `DiagnosticError` if its sequences do not
    divide."""
    if any(c.count % depth for c in step.classes):
        raise error(
            f"the sequences of the step, {step}, do not divide over {depth} pipeline stages",
            remedy=f"give each class a multiple of {depth} sequences",
        )
    classes = [SequenceClass(c.new, c.cached, c.sampled, c.count // depth) for c in step.classes]
    return [step_of(classes)] * depth
