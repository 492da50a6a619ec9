"""`stagec compile --serve ... --steps N`: a job of several steps of serving.

Requests and a policy, or a first step, say what each step holds; distinct steps are compiled, and a
rank's trace is all steps one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from stagec.driver.output.common import report
from stagec.driver.request.steps import BUDGET, MAX_STEPS, SEQUENCES, TICK
from stagec.ir.serving import MIXED
from stagec.serving.arrivals import requests_of
from stagec.serving.engine import Duration, Engine, Served
from stagec.serving.latency import latencies
from stagec.serving.policy import ServerLimits, find_policy, policies_of
from stagec.serving.requests import Request, seconds_text
from stagec.serving.step import SequenceClass, Step, step_of
from stagec.support.diagnostics import Diagnostic, error

if TYPE_CHECKING:
    from stagec.driver.request.options import JobOptions
    from stagec.ir.opdef import Registry


@dataclass(frozen=True)
class StepList:
    """What the steps hold. `after[i]` says how many steps before the tokens of step i were sampled;
    `about` is what the manifest says of where they come from. `served` are the requests that are
    done, and `end` when the last step ends, in nanoseconds."""

    steps: Sequence[Step]
    after: Sequence[int]
    about: Mapping[str, object]
    served: Sequence[Served] = ()
    end: int = 0

    @property
    def distinct(self) -> list[Step]:
        """The distinct steps, in order of first use."""
        return list(dict.fromkeys(self.steps))

    @property
    def order(self) -> list[int]:
        """Each step as the number of a distinct one."""
        place = {step: i for i, step in enumerate(self.distinct)}
        return [place[step] for step in self.steps]

    def manifest(self) -> dict[str, object]:
        """What the manifest says: the distinct steps, and which of them run how often in a row."""
        runs = [[number, len(list(same))] for number, same in groupby(self.order)]
        times = {name: spread.as_json() for name, spread in latencies(self.served).items()}
        about = {**self.about, **({"times": times} if times else {})}
        return {**about, "compositions": [str(s) for s in self.distinct], "steps": runs}


@dataclass(frozen=True)
class StepsAsked:
    """What a job of steps is asked for: its options, on so many pipeline stages, of a model with so
    many positions (0: not known), whose text has sequences of `longest` tokens (0: open); `groups`
    of ranks have requests of their own. `times` says how long a step takes on the machine, if there
    is one."""

    options: JobOptions
    given: Mapping[str, Any]
    registry: Registry
    depth: int
    positions: int
    longest: int
    groups: int
    times: Callable[[Step], int] | None = None

    def steps(self) -> StepList:
        """The steps. Raises `DiagnosticError`, `OSError`."""
        found = self._served() if self.given["requests"] is not None else self._repeated()
        bucket = self.given["bucket"]
        steps = [step.rounded(bucket) for step in found.steps]
        about = {**found.about, **({"bucket": bucket} if bucket > 1 else {})}
        return replace(found, steps=steps, about=about)

    # -- requests ----------------------------------------------------------------------------------

    def _served(self) -> StepList:
        options, given = self.options, self.given
        self._refuse("step", "context", "prompt", "speculative")
        policy = find_policy(given["policy"], policies_of(self.registry.extras))
        requests = requests_of(given["requests"])
        self._check_positions(requests)
        limits = ServerLimits(
            options.chunk or BUDGET, options.batch or SEQUENCES, given["cache_blocks"]
        )
        engine = Engine(requests, policy, limits, self._duration, self.depth)
        end = 0
        steps: list[Step] = []
        after: list[int] = []
        for stretch in engine.stretches(given["steps"] or MAX_STEPS):
            steps += stretch.steps
            after += [stretch.after, *[1] * (stretch.count - 1)]
            end = stretch.end
        if engine.unserved:
            text = f"{engine.unserved:,} of {len(requests):,} requests are not done after the steps"
            report(Diagnostic(text, severity="remark"))
        about = {
            "requests": len(requests),
            "served": len(engine.served),
            "policy": policy.name,
            "tokens": limits.tokens,
            "sequences": limits.sequences,
            **({} if limits.blocks is None else {"blocks": limits.blocks, "block": limits.block}),
            **self._clock,
        }
        return StepList(steps, after, about, engine.served, end)

    @property
    def _duration(self) -> Duration:
        """How long steps take, in nanoseconds."""
        times, bucket = self.times, self.given["bucket"]
        if self.given["tick"] is not None or times is None:
            return int(self.given["tick"] or TICK)
        return lambda step: times(step.rounded(bucket))

    @property
    def _clock(self) -> Mapping[str, str]:
        """What the manifest says of how long steps take."""
        duration = self._duration
        if isinstance(duration, int):
            return {"tick_seconds": seconds_text(duration)}
        return {"machine": str(self.given["machine"])}

    def _refuse(self, *names: str) -> None:
        for name in names:
            if getattr(self.options, name) is not None:
                raise error(
                    f"--{name} and --requests both say what a step holds", remedy="leave out one"
                )

    def _check_positions(self, requests: Sequence[Request]) -> None:
        """Prompts are within the positions of the model; so are outputs, or a warning says so."""
        if not self.positions:
            return
        for number, request in enumerate(requests, 1):
            if request.prompt > self.positions:
                raise error(
                    f"request {number} has a prompt of {request.prompt:,} tokens, and the model "
                    f"has {self.positions:,} positions",
                    request.loc,
                    remedy="leave it out, or serve a model of more positions",
                )
        most = max(requests, key=lambda r: r.prompt + r.output)
        if most.prompt + most.output - 1 > self.positions:
            text = (
                f"requests reach position {most.prompt + most.output - 1:,}, beyond the "
                f"{self.positions:,} of the model"
            )
            report(Diagnostic(text, most.loc, severity="warning"))

    # -- a first step ------------------------------------------------------------------------------

    def _repeated(self) -> StepList:
        """So many steps from the first one on; contexts grow. On pipeline stages a batch that
        decodes is cut into as many parts, which follow each other."""
        for name in ("cache_blocks",):
            if self.given[name] is not None:
                raise error("--cache-blocks is for --requests", remedy="leave it out")
        first, count = self._first(), self.given["steps"]
        parts = [first]
        if self.depth > 1 and all(c.kind in ("decode", "verify") for c in first.classes):
            parts = _parts(first, self.depth)
        steps = [part.later(i) for i in range(count) for part in parts]
        after = [min(i, len(parts)) if i >= len(parts) else 0 for i in range(len(steps))]
        return StepList(steps, after, {"first": str(first)})

    def _first(self) -> Step:
        from stagec.driver.request.serving import mixed_step

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
                    "--serve decode expects --context: the tokens that are cached",
                    remedy="give --context 4096",
                )
            new = 1 + (options.speculative or 0)
            return step_of([SequenceClass(new, context, new, count)])
        new = options.chunk or options.prompt or self.longest
        if not new:
            raise error("--serve prefill expects --prompt", remedy="give --prompt 2048")
        return step_of([SequenceClass(new, context, 1, count)])


def _parts(step: Step, depth: int) -> list[Step]:
    """The step in as many equal parts. Raises `DiagnosticError` if its sequences do not divide."""
    if any(c.count % depth for c in step.classes):
        raise error(
            f"the sequences of the step, {step}, do not divide over {depth} pipeline stages",
            remedy=f"give a multiple of {depth} of each class",
        )
    classes = [SequenceClass(c.new, c.cached, c.sampled, c.count // depth) for c in step.classes]
    return [step_of(classes)] * depth
