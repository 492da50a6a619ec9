"""Latency and throughput of a server, from the seconds of its steps of prefill and of decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Final

from stagec.analysis.steady_server import PromptChunks, among_groups
from stagec.time.streams import BUBBLE, SCHEDULER

#: The part of a step in which stages wait for others.
WAITING: Final = "stages that wait"
_STEPS: Final = 2000
#: The least share of steps with prompts that these show; below it each makes stages wait alone.
_LEAST_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class PodStep:
    """A step of a pod: its `sequences`, its `seconds`, and the `ranks` of the pod. If it transfers
    caches, `sending` are the seconds for which its links are busy with a step, and `exposed` those
    from the end of the step to the arrival of everything. `request` are the seconds of a request
    outside of its steps. `passes` are the seconds in which the chunks of a prompt pass all pipeline
    stages, by default all `seconds`."""

    sequences: int
    seconds: float
    ranks: int
    sending: float = 0.0
    exposed: float = 0.0
    request: float = 0.0
    passes: float = 0.0


@dataclass(frozen=True, slots=True)
class ServingRates:
    """A server under a steady load of `batch` sequences in decode at any time.

    `ttft` is the time from a request to its first token, and to the arrival of its caches in the
    pod that decodes, without waiting for other requests; `tpot` the mean time from one token to the
    next; `latency` that of a whole request; `per_user` and `per_rank` are output tokens per second.
    `prefill_pods` are the prefill pods that keep one decode pod busy, 0 if the same ranks do both.
    """

    batch: int
    ttft: float
    tpot: float
    latency: float
    tokens_per_second: float
    per_rank: float
    prefill_pods: float

    @property
    def per_user(self) -> float:
        """Tokens per second of one sequence."""
        return 1 / self.tpot

    def delayed(self, seconds: float) -> ServingRates:
        """These rates with requests that wait `seconds` before their prompts are computed, while
        the ranks compute others."""
        return replace(self, ttft=self.ttft + seconds, latency=self.latency + seconds)


def steady_parts(parts: Mapping[str, float], seconds: float, stages: int) -> Mapping[str, float]:
    """The breakdown of a step of one microbatch on pipeline stages whose bubble is filled by other
    sequences, as in engines (vLLM's `max_concurrent_batches` is the number of stages). Every stage
    is as busy as the slowest one, whose seconds are `parts`; the rest of the `seconds` of the step
    is waiting. The scheduler counts once."""
    if stages == 1:
        return parts
    times = {name: 1 if name == SCHEDULER else stages for name in parts if name != BUBBLE}
    busy = {name: each * parts[name] for name, each in times.items()}
    return {**busy, WAITING: max(0.0, seconds - sum(busy.values()))}


def steady_seconds(parts: Mapping[str, float], seconds: float, stages: int) -> float:
    """The seconds of such a step: at least the sum of `steady_parts`."""
    least = sum(steady_parts(parts, seconds, stages).values()) if stages > 1 else 0.0
    return max(seconds, least)


def step_pace(parts: Mapping[str, float], stages: int) -> float:
    """The seconds from such a step to the next one, if there are as many steps in flight as stages
    and the slowest stage is never idle."""
    return steady_seconds(parts, 0.0, stages) / stages


def chunks_pass(before: float, last: float, stages: int) -> float:
    """The seconds in which a prompt passes `stages` stages: `before` are those of the steps of all
    chunks except the last one, each of which begins after the first stage of the previous one, and
    `last` those of the last step."""
    return before / stages + last


def tokens_accepted(rate: float, drafts: int) -> float:
    """The mean number of tokens per sequence of a step that verifies `drafts` tokens, each of which
    is accepted at this `rate`, and adds one token (arXiv 2211.17192, equation 1):

        1 + a + a^2 + ... + a^K = (1 - a^(K+1)) / (1 - a)
    """
    return sum(rate**number for number in range(drafts + 1))


def turns_of(
    prefill: PodStep, decode: PodStep, output: int, lone: tuple[int, float]
) -> tuple[float, float, float]:
    """The steps of prefill for each step of decode, and their seconds: on average, and of a given
    prompt. `lone` are the groups of ranks that wait for each other, and the time of a step with a
    prompt in one of them, as a share of that with one in each: their prompts come independently
    (`among_groups`), unless there are several for each step of decode."""
    share, (groups, part) = decode.sequences / prefill.sequences / (output - 1), lone
    if groups == 1 or share >= 1:
        return share, prefill.seconds, prefill.seconds
    return among_groups(share, groups, prefill.seconds, prefill.seconds * part)


def colocated(
    prefill: PodStep,
    decode: PodStep,
    output: int,
    *,
    stages: int = 1,
    lone: tuple[int, float] = (1, 1.0),
) -> ServingRates:
    """The same ranks prefill and decode, in alternating steps.

    While a sequence generates its O tokens, the first of them in prefill, each of B sequences is
    replaced once: the ranks run O - 1 steps of decode and B / b of prefill, with b prompts each. So

        cycle = (O - 1) t_decode + B / b t_prefill
        tokens/s = B O / cycle
        TPOT = t_decode + (B / b - 1) t_prefill / (O - 1)

    where TPOT has B / b - 1 since a sequence waits for the prompts of others, not for its own. In
    the steady state, each sequence that ends is followed by another one. On pipeline `stages` the
    cycle has as many steps of `uneven_seconds`, and t_prefill is what it has beyond decode. The
    number of steps of prefill and their seconds are those of `turns_of`.
    """
    tokens = output - 1
    share, mean, own = turns_of(prefill, decode, output, lone)
    turns = share * tokens
    steps = tokens + turns
    cycle = steps * uneven_seconds(decode.seconds, mean, turns / steps, stages)
    prompts = (cycle - tokens * decode.seconds) / turns
    tpot = decode.seconds + max(0.0, turns - 1) * prompts / tokens
    scale = own / prefill.seconds
    prefill = replace(prefill, seconds=own, passes=prefill.passes * scale)
    return _rates(prefill, decode, output, tpot, decode.sequences * output / cycle, 0.0)


def uneven_seconds(plain: float, mixed: float, share: float, stages: int) -> float:
    """The mean seconds in which a step passes `stages` pipeline stages, with as many steps under
    way, of which a `share` has chunks of prompts and takes `mixed` seconds in place of `plain`.

    A step waits on each stage for the one before it, and a stage for the next step. Step n, of x(n)
    seconds on each stage, ends there at

        E(n, k) = max(E(n, k - 1), E(n - 1, k)) + x(n),  E(n, 0) = E(n - stages, stages)

    Steps with prompts are in an order drawn once, since requests end independently of each other.
    Several of them in the places of one round pass the stages together, and others wait once.
    """
    if stages == 1 or not 0 < share < 1:
        return plain + share * (mixed - plain)
    if share < _LEAST_SHARE:
        least = uneven_seconds(plain, mixed, _LEAST_SHARE, stages)
        return plain + share / _LEAST_SHARE * (least - plain)
    begins, before = deque([0.0] * stages), [0.0] * stages
    for place in _places():
        seconds, end = (mixed if place < share else plain) / stages, begins.popleft()
        for stage, free in enumerate(before):
            end = before[stage] = max(end, free) + seconds
        begins.append(end)
    mean = stages * before[-1] / (_STEPS + stages - 1)  # the last stage begins so much later
    return max(mean, plain + share * (mixed - plain))


@cache
def _places() -> Sequence[float]:
    """Numbers that divide 0 to 1 evenly, in random order: the same ones for all shares, so that a
    larger share never takes less time. Other orders differ by about 1%."""
    places = [(n + 0.5) / _STEPS for n in range(_STEPS)]
    Random(0).shuffle(places)
    return places


def chunked(
    decode: PodStep,
    mixed: PodStep,
    work: PromptChunks,
    output: int,
    *,
    stages: int = 1,
    waits: bool = False,
) -> ServingRates:
    """The same ranks prefill and decode in the same steps: `decode` and `mixed` are steps without
    and with chunks of prompts; `work` has the chunks of each group of ranks, which are in a share s
    of the steps. A sequence has

        TPOT = t_decode + (B - 1) / B (t - t_decode),  t = t_decode + s (t_mixed - t_decode)

    since it waits for the prompts of others, not for its own. The ranks complete

        requests/s = B / ((O - 1) t)

    On pipeline `stages` t is that of `uneven_seconds`. If the prompts of all B sequences arrive
    faster than steps can take them, some sequence `waits`. The mixed step then has the sequences
    that decode (`stagec.analysis.steady_server.decoding`), and every step is mixed: the m steps of
    a prompt bound the rate, with n prompts at a time, and the rest of the B sequences in the server
    waits (Little's law):

        TPOT = t_mixed,  requests/s = n / (m t_mixed)
        TTFT = request + B / (requests/s) - (O - 1) TPOT
    """
    count, turns = decode.sequences, output - 1
    mean = uneven_seconds(decode.seconds, mixed.seconds, work.share, stages)
    first, tpot = mixed.passes or work.steps * mixed.seconds, mixed.seconds
    if waits:
        rate = mixed.sequences / (work.steps * mixed.seconds)
        first = max(first, count / rate - turns * tpot)
    else:
        tpot = decode.seconds + (count - 1) / count * (mean - decode.seconds)
        rate = count / (turns * mean)
    prefill = PodStep(mixed.sequences, first, mixed.ranks, request=mixed.request)
    return _rates(prefill, decode, output, tpot, rate * output, 0.0)


def disaggregated(
    prefill: PodStep, decode: PodStep, output: int, pods: tuple[int, int] | None = None
) -> ServingRates:
    """Some pods prefill and others decode: in the ratio that keeps both busy, or in whole numbers
    `pods`, of which the slower kind bounds the throughput.

    A prefill pod completes b / t_prefill prompts per second, a decode pod B / ((O - 1) t_decode)
    requests, so `B t_prefill / (b (O - 1) t_decode)` prefill pods serve one decode pod. The caches
    of a step are sent while its layers and those of the next step are computed; if the links are
    busy for longer than that, they bound the rate. TTFT ends when the caches have arrived.
    """
    rate = decode.sequences / ((output - 1) * decode.seconds)
    prompts = prefill.sequences / max(prefill.seconds, prefill.sending)
    first, then = pods or (rate / prompts, 1)
    total = output * min(first * prompts, then * rate)
    ranks = then * decode.ranks + first * prefill.ranks
    return _rates(prefill, decode, output, decode.seconds, total, rate / prompts, ranks)


def _rates(
    prefill: PodStep,
    decode: PodStep,
    output: int,
    tpot: float,
    total: float,
    pods: float,
    ranks: float = 0.0,
) -> ServingRates:
    ttft = prefill.request + (prefill.passes or prefill.seconds) + prefill.exposed
    latency = ttft + (output - 1) * tpot
    per_rank = total / (ranks or decode.ranks)
    return ServingRates(decode.sequences, ttft, tpot, latency, total, per_rank, pods)
