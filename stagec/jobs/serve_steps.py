"""Jobs of several steps of serving: `stagec compile --serve ... --steps N`.

Requests and a policy, or a first step, determine the sequences of each step. Distinct steps are
compiled once; the trace of a rank has all steps one after the other.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from stagec.ir.serving_step import MIXED
from stagec.ir_spec.strategy.scheduler import SchedulerRule
from stagec.jobs.admission import Room, check_requests, largest_step, page_of, prefix_block
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.steps import MAX_STEPS, SEQUENCES
from stagec.jobs.served_models import adapter_slots
from stagec.jobs.session import Session
from stagec.jobs.step_modules import StepModules
from stagec.machines import Machine
from stagec.serving.adapters import AdapterSlots
from stagec.serving.arrivals import requests_of
from stagec.serving.latency import latencies
from stagec.serving.policy import BatchingPolicy, ServerLimits, find_policy, policies_of
from stagec.serving.requests import Request
from stagec.serving.served import ServedRequest
from stagec.serving.step import SequenceClass, Step, step_of
from stagec.serving.stepped import ServedStep, StepTime, stepped_server
from stagec.support.diagnostics import error

#: The number of steps between two progress messages.
_OFTEN = 100


@dataclass(frozen=True)
class StepList:
    """The steps of a job: one run of all ranks, or one for each replica of the server.

    `about` describes their origin in the manifest. `served` are the requests that are done by all
    `groups` of ranks.
    """

    runs: Sequence[Sequence[ServedStep]]
    about: Mapping[str, object]
    groups: int = 1
    served: Sequence[ServedRequest] = ()
    room: Room | None = None

    @property
    def own(self) -> Iterator[Step]:
        """The steps of each group of ranks, without padding."""
        return (step for run in self.runs for each in run for step in each.groups)

    @property
    def tokens(self) -> Mapping[str, int]:
        """The computed tokens of all groups by kind of class."""
        tokens = Counter[str]()
        for each in (c for step in self.own for c in step.classes):
            tokens[each.kind] += each.tokens
        return tokens

    @property
    def sampled(self) -> int:
        """The tokens of all groups that get logits."""
        return sum(step.sampled for step in self.own)

    @property
    def distinct(self) -> Mapping[Step, int]:
        """The distinct steps, in order of first use, with their places."""
        return places(each for run in self.runs for each in run)

    def manifest(self) -> dict[str, object]:
        """The entry of the manifest: the distinct steps, and for each run the consecutive steps as
        pairs of a number among these and a count."""
        distinct = self.distinct
        orders = ((distinct[each.step] for each in run) for run in self.runs)
        runs = [[[n, len(list(same))] for n, same in groupby(order)] for order in orders]
        times = {name: spread.as_json() for name, spread in latencies(self.served).items()}
        about = {**self.about, **({"times": times} if times else {})}
        return {**about, "compositions": [str(s) for s in distinct], "steps": runs}


def places(steps: Iterable[ServedStep]) -> dict[Step, int]:
    """The distinct ones of these steps, in order of first use, with their places."""
    return {step: i for i, step in enumerate(dict.fromkeys(each.step for each in steps))}


@dataclass(frozen=True)
class StepsAsked:
    """The question of a job of steps: its options, its compiles, and `scheduler`, on `depth`
    pipeline stages. Each of `groups` groups of ranks has requests of its own, and `coupled` of them
    wait for each other. `times` gives the times of a step, by a `clock` that the manifest names,
    and `room` the room for caches on the `machine`, if there is one."""

    options: JobOptions
    given: Mapping[str, Any]
    session: Session
    modules: StepModules
    scheduler: SchedulerRule
    depth: int
    groups: int
    coupled: int
    times: StepTime
    clock: Mapping[str, str]
    room: Callable[[Step, int], Room] | None = None
    machine: Machine | None = None

    def steps(self) -> StepList:
        """The steps. For requests, the sequences of a step that decode are one class, since engines
        launch one kernel over all of them. Raises `DiagnosticError`, `OSError`."""
        served = self.given["requests"] is not None
        steps = self._served() if served else self._repeated()
        bucket = self.given["bucket"]

        def rounded(step: Step) -> Step:
            step = step.rounded(bucket)
            return step.together(prompts=False) if served else step

        runs = [[replace(each, step=rounded(each.step)) for each in run] for run in steps.runs]
        about = {**steps.about, **({"bucket": bucket} if bucket > 1 else {})}
        return replace(steps, runs=runs, about=about)

    # -- requests ----------------------------------------------------------------------------------

    def _served(self) -> StepList:
        given = self.given
        self._refuse("step", "context", "prompt", "speculative")
        extras = self.modules.builder.module.registry.extras
        policy = find_policy(given["policy"], policies_of(extras))
        requests = requests_of(given["requests"])
        self._check_prompts(requests)
        replicas = self.groups // self.coupled
        if len(requests) < replicas:
            raise error(
                f"{len(requests)} requests are fewer than the {replicas} replicas of the server, "
                "so some would get none",
                remedy=f"use at most {len(requests)} replicas (--dp), or more requests",
            )
        limits, room = self._limits(requests)
        check_requests(requests, self.modules, [limits], self.session)
        slots = adapter_slots(self.options, requests, self.machine, self.session)
        rows = [self._run(requests[r::replicas], policy, limits, slots) for r in range(replicas)]
        served = [job for _, done in rows for job in done]
        if unserved := len(requests) - len(served):
            text = f"{unserved:,} of {len(requests):,} requests are not done after the steps"
            self.session.remark(text)
        shared = {"groups": self.groups, "sharing": "round robin"} if self.groups > 1 else {}
        about = {
            "requests": len(requests),
            "served": len(served),
            "policy": given["policy"],
            "tokens": limits.tokens,
            "sequences": limits.sequences,
            **({} if limits.blocks is None else {"blocks": limits.blocks, "block": limits.block}),
            **shared,
            **self.clock,
        }
        return StepList([steps for steps, _ in rows], about, self.groups, served, room)

    def _run(
        self,
        requests: Sequence[Request],
        policy: BatchingPolicy | None,
        limits: ServerLimits,
        slots: Callable[[], AdapterSlots | None],
    ) -> tuple[Sequence[ServedStep], Sequence[ServedRequest]]:
        """The steps of the groups of ranks of one replica, and the requests that they have served.
        Raises `DiagnosticError` if the policy never serves one."""
        most, bucket = self.given["steps"] or MAX_STEPS, self.given["bucket"]
        with self.session.live() as progress:
            replica, run = stepped_server(
                requests,
                limits,
                _counted(lambda step: self.times(step.rounded(bucket)), most, progress),
                most,
                policy=policy,
                stages=self.depth,
                groups=self.coupled,
                scheduler=self.scheduler,
                prefix_block=prefix_block(self.options, requests),
                slots=slots if policy is None else lambda: None,
            )
            try:
                run.run()
            except KeyboardInterrupt:
                of = f"{len(run.done):,} of {len(requests):,}"
                self.session.log(f"interrupted with {of} requests served")
                raise
        replica.check(len(requests) - len(run.done))
        return replica.steps, run.done

    def _limits(self, requests: Sequence[Request]) -> tuple[ServerLimits, Room | None]:
        """The limits of a group of ranks, and the room for caches on the machine, if that
        determines them."""
        options, blocks = self.options, self.given["cache_blocks"]
        tokens, sequences = options.chunk or self.scheduler.tokens, options.batch or SEQUENCES
        block = page_of(options)
        if blocks is not None or self.room is None:
            return ServerLimits(tokens, sequences, blocks or None, block), None
        room = self.room(largest_step(requests, tokens, sequences), block)
        return ServerLimits(tokens, sequences, room.blocks, block, fixed=room.fixed), room

    def _refuse(self, *names: str) -> None:
        for name in names:
            if getattr(self.options, name) is not None:
                raise error(
                    f"--{name} and --requests cannot be used together: both give the sequences of "
                    "a step",
                    remedy="leave one of them out",
                )

    def _check_prompts(self, requests: Sequence[Request]) -> None:
        """Raise `DiagnosticError` for a prompt beyond the positions of the model."""
        serving = self.modules.builder.serving
        positions = serving.positions if serving is not None else 0
        for number, request in enumerate(requests, 1):
            if positions and request.prompt > positions:
                raise error(
                    f"request {number} has a prompt of {request.prompt:,} tokens, but the model "
                    f"has {positions:,} positions",
                    request.loc,
                    remedy="remove the request, or serve a model with more positions",
                )

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
        run = [
            ServedStep(step, (step,), len(parts) if i >= len(parts) else 0, 0)
            for i, step in enumerate(steps)
        ]
        return StepList([run], {"first": str(first)})

    def _first(self) -> Step:
        from stagec.jobs.request.serving_flags import mixed_step

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
        serving = self.modules.builder.serving
        new = options.chunk or options.prompt or (serving.longest if serving is not None else 0)
        if not new:
            raise error(
                "--serve prefill needs --prompt: the tokens of each sequence",
                remedy="give --prompt 2048",
            )
        return step_of([SequenceClass(new, context, 1, count)])


def _counted(times: StepTime, most: int, progress: Callable[[str], None]) -> StepTime:
    """The same times; `progress` is called with the number of steps timed so far."""
    done = 0

    def counted(step: Step) -> tuple[int, int]:
        nonlocal done
        done += 1
        if done % _OFTEN == 1:
            progress(f"serving: {done:,} of at most {most:,} steps timed")
        return times(step)

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
