"""What users of a server meet, and what its ranks give: from the seconds of a step of prefill, and
those of a step of decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stagec.analysis.steady_server import PromptChunks
from stagec.time.streams import BUBBLE, SCHEDULER


@dataclass(frozen=True, slots=True)
class PodStep:
    """A pod at work: `sequences` of a step, its `seconds`, and the `ranks` of the pod. Where it
    hands over what it computed, `sending` are the seconds that its links are busy with a step, and
    `exposed` those until everything has arrived, behind the step. `request` are the seconds of a
    request outside of its steps. A prompt passes pipeline stages in `passes` seconds, one chunk
    behind the other, by default in all `seconds` of its steps."""

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

    `ttft` is the time from a request to its first token, and to its caches where they are decoded,
    without waiting for others; `tpot` the mean time from one token to the next; `latency` that of a
    whole request; `per_user` and `per_rank` are output tokens per second. `prefill_pods` are
    the pods for prefill that keep one pod for decode busy, 0 where the same ranks do both.
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
        """The same with requests that wait for so many seconds before their prompts are computed,
        while the ranks compute others."""
        return replace(self, ttft=self.ttft + seconds, latency=self.latency + seconds)


def steady_parts(parts: Mapping[str, float], seconds: float, stages: int) -> Mapping[str, float]:
    """Where the seconds of a step of one microbatch on pipeline stages go, of which other sequences
    fill the bubble, as in engines (vLLM's `max_concurrent_batches` is the number of stages): as
    many stages as busy as the slowest one, of which `parts` are the seconds; what is left of its
    `seconds` from the first stage to the last are stages that wait. The scheduler is there once."""
    if stages == 1:
        return parts
    times = {name: 1 if name == SCHEDULER else stages for name in parts if name != BUBBLE}
    busy = {name: each * parts[name] for name, each in times.items()}
    return {**busy, "stages that wait": max(0.0, seconds - sum(busy.values()))}


def steady_seconds(parts: Mapping[str, float], seconds: float, stages: int) -> float:
    """The seconds of such a step, which takes no less than all of `steady_parts`."""
    least = sum(steady_parts(parts, seconds, stages).values()) if stages > 1 else 0.0
    return max(seconds, least)


def step_pace(parts: Mapping[str, float], stages: int) -> float:
    """The seconds from such a step to the next one, where as many as stages are under way and the
    slowest one is never idle."""
    return steady_seconds(parts, 0.0, stages) / stages


def chunks_pass(before: float, last: float, stages: int) -> float:
    """The seconds in which a prompt passes so many stages: those of the steps of its chunks but
    the last one, each of which begins when the first stage has done the one `before`, and of its
    last step."""
    return before / stages + last


def tokens_accepted(rate: float, drafts: int) -> float:
    """The tokens of a sequence that a step gives on average, which verifies drafts of which each
    is right by this `rate`, and one token more (arXiv 2211.17192, equation 1):

        1 + a + a^2 + ... + a^K = (1 - a^(K+1)) / (1 - a)
    """
    return sum(rate**number for number in range(drafts + 1))


def colocated(prefill: PodStep, decode: PodStep, output: int) -> ServingRates:
    """The same ranks prefill and decode, a step of one or of the other at a time.

    While a sequence makes its O tokens, the first of which its prompt gives, B others come and go:
    the ranks run O - 1 steps of decode and B / b of prefill, with b prompts each. So

        cycle = (O - 1) t_decode + B / b t_prefill
        tokens/s = B O / cycle
        TPOT = t_decode + (B / b - 1) t_prefill / (O - 1)

    the last one since a sequence waits for the prompts of others, not for its own. Steady state:
    each sequence that ends is followed by another one.
    """
    turns = decode.sequences / prefill.sequences
    cycle = (output - 1) * decode.seconds + turns * prefill.seconds
    tpot = decode.seconds + max(0.0, turns - 1) * prefill.seconds / (output - 1)
    return _rates(prefill, decode, output, tpot, decode.sequences * output / cycle, 0.0)


def beside(
    decode: PodStep, mixed: PodStep, work: PromptChunks, output: int, *, waits: bool = False
) -> ServingRates:
    """The same ranks prefill and decode in the same steps: `decode` and `mixed` are a step without
    and with chunks of so many prompts, as `work` has them for each group of ranks in a share s of
    the steps. Of a sequence

        TPOT = t_decode + s (B - 1) / B (t_mixed - t_decode)

    as it waits for the prompts of others, not for its own. The ranks end

        requests/s = B / ((O - 1) (t_decode + s (t_mixed - t_decode)))

    Where prompts of all B would come faster than steps take them, some sequence `waits`. The mixed
    step has those that decode (`stagec.analysis.steady_server.decoding`), and each step is one, so
    m steps of a prompt bound the rate, with n prompts at a time, and what is left of the B
    sequences that the server has at any time waits (Little's law):

        TPOT = t_mixed,  requests/s = n / (m t_mixed)
        TTFT = request + B / (requests/s) - (O - 1) TPOT
    """
    count, turns = decode.sequences, output - 1
    more = mixed.seconds - decode.seconds
    first, tpot = mixed.passes or work.steps * mixed.seconds, mixed.seconds
    if waits:
        rate = mixed.sequences / (work.steps * mixed.seconds)
        first = max(first, count / rate - turns * tpot)
    else:
        tpot = decode.seconds + work.share * (count - 1) / count * more
        rate = count / (turns * (decode.seconds + work.share * more))
    prefill = PodStep(mixed.sequences, first, mixed.ranks, request=mixed.request)
    return _rates(prefill, decode, output, tpot, rate * output, 0.0)


def disaggregated(
    prefill: PodStep, decode: PodStep, output: int, pods: tuple[int, int] | None = None
) -> ServingRates:
    """Some pods prefill, others decode: as many of each as keep each other busy, or so many whole
    `pods` of each, of which the slower ones say how many requests end.

    A pod for prefill ends b / t_prefill prompts per second, one for decode B / ((O - 1) t_decode),
    so `B t_prefill / (b (O - 1) t_decode)` pods prefill for one that decodes. The caches of a step
    cross while its layers and those of the next step are computed; a pod whose links are busy for
    longer than it computes ends as many prompts as they send. TTFT is there when the caches are.
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
