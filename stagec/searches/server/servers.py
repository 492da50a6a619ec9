"""Combines workers to aggregated and disaggregated servers on a number of ranks; the Pareto front
of servers, and why one is behind another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stagec.analysis.serving_rates import WAITING
from stagec.analysis.steady_server import matched, per_token
from stagec.searches.explore.branch import beats
from stagec.searches.server.worker import MixedPoint, ServerLoad, StepPoint, Worker
from stagec.time.costs.network import message_seconds

if TYPE_CHECKING:
    from stagec.jobs.request.options import JobOptions
    from stagec.machines import Machine

AGGREGATED, DISAGGREGATED = "aggregated", "disaggregated"
_IDLE, _WAITS = "idle ranks", "pools that wait"
#: Differences below this share of a token's rank-seconds are left out, and at most this many are
#: reported.
_LEAST, _MOST = 0.005, 3


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A kind of worker: its job and machine, its timed steps, and the price of a rank for an hour
    if that is known."""

    options: JobOptions
    machine: Machine
    worker: Worker
    price: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """Workers of one kind: their number, and the step that each of them runs."""

    kind: WorkerKind
    workers: int
    step: StepPoint

    @property
    def ranks(self) -> int:
        """The number of ranks of all workers."""
        return self.workers * self.kind.worker.ranks


@dataclass(frozen=True, slots=True)
class CacheTransfer:
    """The transfer of the caches of a prompt: the seconds for which it occupies the links of a
    rank, and those that remain behind the step. It is `exact` if both pods were compiled."""

    busy: float
    exposed: float
    exact: bool = False


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server on `ranks` ranks. The workers of `decode` also prefill (`point`), unless there are
    workers of `prefill`, which send their caches (`sent`). `parts` breaks down the rank-seconds of
    an output token; `ttft` and `tpot` are in seconds."""

    ranks: int
    decode: WorkerPool
    ttft: float
    tpot: float
    tokens_per_second: float
    parts: Mapping[str, float] = field(repr=False)
    point: MixedPoint | None = None
    prefill: WorkerPool | None = None
    sent: CacheTransfer | None = None

    @property
    def mode(self) -> str:
        """`aggregated` if the same workers prefill and decode, else `disaggregated`."""
        return AGGREGATED if self.prefill is None else DISAGGREGATED

    @property
    def pools(self) -> list[WorkerPool]:
        """The pools of workers, that of prefill first."""
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]

    @property
    def used(self) -> int:
        """The number of ranks that are not idle."""
        return sum(pool.ranks for pool in self.pools)

    @property
    def per_rank(self) -> float:
        """Output tokens per second per rank, idle ranks included."""
        return self.tokens_per_second / self.ranks

    @property
    def per_user(self) -> float:
        """Output tokens per second of one sequence."""
        return 1 / self.tpot

    @property
    def cost(self) -> float:
        """The cost of 10^6 output tokens: rank-hours of the ranks that are used, times their price
        if that is known."""
        hourly = sum(pool.ranks * (pool.kind.price or 1.0) for pool in self.pools)
        return hourly / 3600 / self.tokens_per_second * 1e6

    @property
    def layout(self) -> tuple[object, ...]:
        """A key that servers share if they differ only in batches, numbers of workers, and the
        workers that prefill."""
        return self.ranks, self.mode, id(self.decode.kind)

    def is_within(self, load: ServerLoad) -> bool:
        """Whether it is within the limits of time."""
        first = load.ttft is None or self.ttft <= load.ttft
        return first and (load.tpot is None or self.tpot <= load.tpot)


def aggregated_servers(
    kinds: Iterable[WorkerKind], ranks: int, load: ServerLoad
) -> Iterator[ServerPlan]:
    """Aggregated servers, with as many workers of a kind as the ranks allow."""
    for kind in kinds:
        worker = kind.worker
        copies = ranks // worker.ranks
        for point in worker.mixed if copies else ():
            steady = point.steady
            tokens = copies * steady.tokens_per_second
            share = point.work.share
            scale = copies * worker.ranks / tokens / point.mean_seconds
            more = {
                n: share * (point.mixed.parts.get(n, 0.0) - point.decode.parts.get(n, 0.0))
                for n in {**point.mixed.parts, **point.decode.parts}
            }
            waits = point.mean_seconds - sum(point.decode.parts.values()) - sum(more.values())
            if worker.stages > 1:
                more[WAITING] = more.get(WAITING, 0.0) + waits
            parts = {
                **_named(DECODE_PART, per_token(point.decode.parts, scale)),
                **_named(PREFILL_PART, per_token(more, scale)),
                _IDLE: (ranks - copies * worker.ranks) / tokens,
            }
            pool = WorkerPool(kind, copies, point.decode)
            about = steady.ttft, steady.tpot, tokens, parts, point
            yield ServerPlan(ranks, pool, *about)


DECODE_PART, PREFILL_PART = "decode", "prefill"


def _named(what: str, parts: Mapping[str, float]) -> dict[str, float]:
    return {f"{what} {name}": seconds for name, seconds in parts.items()}


@dataclass(frozen=True, slots=True)
class _Prefills:
    """A worker that prefills: its step, requests per second, seconds to the first token, and the
    transfer of caches."""

    kind: WorkerKind
    step: StepPoint
    rate: float
    ttft: float
    sent: CacheTransfer


def disaggregated_servers(
    kinds: Sequence[WorkerKind],
    ranks: int,
    load: ServerLoad,
    layers: int,
    *,
    sends: Callable[[WorkerKind, WorkerKind], bool] = lambda prefill, decode: True,
    cheap: bool,
) -> Iterator[ServerPlan]:
    """Disaggregated servers: each kind of worker that decodes, with each kind that prefills with
    the same stack and `sends` it caches. Of workers that prefill on equally many ranks and stages
    of a machine, only the Pareto front of requests per second and time to the first token is used.
    Servers have workers on all ranks, or if `cheap` the fewest that serve as many requests."""
    every = [p for kind in kinds for p in _prefills(kind, load, layers)]
    first = [p for p in every if not any(_beats(q, p) for q in every)]
    for kind in kinds:
        worker = kind.worker
        same_stack = [p for p in first if p.kind.options.stack == kind.options.stack]
        senders = [p for p in same_stack if sends(p.kind, kind)]
        for point in worker.decode:
            rate = decode_rate(point, load)
            for prefill in senders:
                sizes = prefill.kind.worker.ranks, worker.ranks
                pools = matched(ranks, *sizes, prefill.rate, rate)
                if pools is not None:
                    pools = pools if cheap else pools.filled(ranks, *sizes)
                    decode = WorkerPool(kind, pools.decode, point)
                    before = WorkerPool(prefill.kind, pools.prefill, prefill.step)
                    yield joined(ranks, load, before, decode, prefill.sent, pools.requests)


def _beats(one: _Prefills, other: _Prefills) -> bool:
    """Whether a worker beats another one with the same stack, machine, ranks and stages."""
    return _place(one) == _place(other) and beats((-one.rate, one.ttft), (-other.rate, other.ttft))


def _place(prefill: _Prefills) -> tuple[str, str, int, int]:
    kind = prefill.kind
    return kind.options.stack, kind.machine.given, kind.worker.ranks, kind.worker.stages


def joined(
    ranks: int,
    load: ServerLoad,
    prefill: WorkerPool,
    decode: WorkerPool,
    sent: CacheTransfer,
    requests: float,
) -> ServerPlan:
    """The server of two pools that serve `requests` requests per second."""
    first, worker = prefill.step, prefill.kind.worker
    tokens, turns = requests * load.output, load.output - 1
    of_prefill = worker.ranks / first.sequences / load.output
    of_decode = decode.kind.worker.ranks * turns / decode.step.sequences / load.output
    parts = {
        **_named(DECODE_PART, per_token(decode.step.parts, of_decode)),
        **_named(PREFILL_PART, per_token(first.parts, of_prefill)),
    }
    used = prefill.ranks + decode.ranks
    parts[_WAITS] = used / tokens - sum(parts.values())
    parts[_IDLE] = (ranks - used) / tokens
    ttft = worker.request + first.passes + sent.exposed
    about = ttft, decode.step.seconds, tokens, parts
    return ServerPlan(ranks, decode, *about, prefill=prefill, sent=sent)


def prefill_rate(step: StepPoint, sent: CacheTransfer) -> float:
    """Requests per second of a worker that prefills: the slower of computation and transfer."""
    return min(step.sequences / step.seconds, 1 / sent.busy if sent.busy else float("inf"))


def decode_rate(step: StepPoint, load: ServerLoad) -> float:
    """Requests per second of a worker that only decodes, in output - 1 steps each."""
    return step.sequences / ((load.output - 1) * step.seconds)


def _prefills(kind: WorkerKind, load: ServerLoad, layers: int) -> Iterator[_Prefills]:
    worker, machine = kind.worker, kind.machine
    for step in worker.prefill:
        sent = estimated(machine, worker, step, layers)
        ttft = worker.request + step.passes + sent.exposed
        if load.ttft is None or ttft <= load.ttft:
            yield _Prefills(kind, step, prefill_rate(step, sent), ttft, sent)


def estimated(machine: Machine, worker: Worker, step: StepPoint, layers: int) -> CacheTransfer:
    """An estimate of the transfer of caches that does not depend on the pool that decodes. The rank
    with most of them sends them over the outermost level of the network, layer by layer while the
    next one is computed, so that the last one remains. `busy` is that of one request."""
    prompts, layers = step.sequences // worker.stages, max(1, layers // worker.stages)
    each = message_seconds(machine, worker.cached / layers, machine.network[-1])
    whole = each * prompts * layers
    return CacheTransfer(each * layers, max(whole - step.seconds, 0.0) + each * prompts)


def front(servers: Iterable[ServerPlan]) -> list[ServerPlan]:
    """The Pareto front of tokens per second per rank and per user, the fastest for users first."""
    plans: list[ServerPlan] = []
    for each in sorted(servers, key=lambda s: (-s.per_user, -s.per_rank, s.ttft)):
        if not plans or each.per_rank > plans[-1].per_rank * (1 + 1e-9):
            plans.append(each)
    return plans


def behind(mine: ServerPlan, best: ServerPlan) -> str:
    """`-10.9% tokens/s per rank: decode computation +8.1%, ...`: the categories in which a token
    takes more rank-seconds than with the best server, as shares of all that it takes there."""
    total = sum(best.parts.values())
    change = mine.per_rank / best.per_rank - 1
    names = {**mine.parts, **best.parts}
    more = {n: (mine.parts.get(n, 0.0) - best.parts.get(n, 0.0)) / total for n in names}
    order = sorted(more.items(), key=lambda item: (-abs(item[1]), item[0]))
    reasons = [f"{n} {d:+.1%}" for n, d in order[:_MOST] if abs(d) >= _LEAST]
    why = ", ".join(reasons) or "no part differs by as much as 0.5%"
    return f"{change:+.1%} tokens/s per rank: {why}"
