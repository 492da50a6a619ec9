"""How long requests of a closed loop wait for their first token, from the seconds of two steps: so
many requests are there at any time, as benchmarks keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from stagec.analysis.serving_rates import PodStep
from stagec.jobs.request.steps import BUDGET
from stagec.serving.policy import ServerLimits
from stagec.serving.replica import Replica
from stagec.serving.requests import Request
from stagec.serving.routing import ROUTERS
from stagec.serving.simulate import Simulation
from stagec.serving.step_times import SECOND, StepLine

#: More than the cached tokens of all sequences.
_MOST = 1 << 60
#: Tokens of a block of a cache, which does not run out here.
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class TwoSteps:
    """`StepCosts` of two steps: one that decodes takes `decode` femtoseconds, whatever is cached;
    one with chunks of prompts takes that and `token` femtoseconds for each of their tokens, as
    `stagec.analysis.serving_rates.colocated` has it."""

    decode_time: int
    token: int

    def decode(self, count: int, total: int) -> StepLine:
        """Of sequences that decode."""
        return StepLine(self.decode_time, 0, 0, _MOST)

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        """Of chunks beside them."""
        return self.token * sum(new for new, _ in chunks) + (self.decode_time if count else 0)


def mean_first_token(
    prefill: PodStep, decode: PodStep, prompt: int, output: int, *, share: float, rounds: int
) -> float:
    """The mean seconds from a request to its first token, with what a request takes outside of its
    steps. `prompt` and `output` are means of lengths drawn from `2 share - 1` to 1 of what is
    stated, of which they are the `share`. The first of `rounds` requests of each sequence come at
    once; prompts share steps of as many tokens as servers take, first come first served."""
    source = Random(0)

    def drawn(mean: int) -> int:
        return source.randint(max(1, round(mean * (2 - 1 / share))), round(mean / share))

    count, groups = decode.sequences, prefill.sequences
    requests = [Request(0, drawn(prompt), max(2, drawn(output))) for _ in range(count * rounds)]
    costs = TwoSteps(
        round(decode.seconds * SECOND), round(prefill.seconds / (prompt * groups) * SECOND)
    )
    limits = ServerLimits(BUDGET * groups, count, None, _BLOCK)
    run = Simulation(
        requests, [Replica(0, limits, costs)], ROUTERS["least-loaded"], concurrency=count
    )
    run.run()
    return prefill.request + fmean(job.first - job.arrival for job in run.done) / SECOND
