"""The answer for a server over time: latencies of requests, and throughput of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from stagec.answers.requests.rollouts import ROLLOUT_HEADS, RolloutsFigures, rollouts_figures
from stagec.answers.time.table import TITLES, costed_text, seconds_text, spreads_table
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.jobs.pod_options import machines_text
from stagec.output.report import Report
from stagec.output.svg_text import SVGText
from stagec.output.tables import console, table
from stagec.serving.latency import PERCENTILES, SecondsSpread, latencies
from stagec.serving.served import ServedRequest
from stagec.serving.simulate import Simulation
from stagec.serving.step_times import SECOND
from stagec.support.diagnostics import error
from stagec.support.words import counted

if TYPE_CHECKING:
    from stagec.answers.requests.run import Pool
    from stagec.jobs.step_surface import SurfaceCheck
    from stagec.machines import Machine
    from stagec.serving.requests import Request

SCHEMA = 1

#: The columns of the table of replicas.
POOL_HEADS = (
    *("", "number", "ranks each", "busy", "running", "waiting", "cache", "steps"),
    *("preempted", "prefix hits"),
)


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """A pool of identical replicas: the share of time with a running step (`busy`), the mean share
    of the cache in use (`cache`, None without a bound), mean numbers of sequences, and counts of
    `stagec.serving.replica.Tally`. `loaded` is the part of `hits` that came from each tier below
    the device, and `adapters` counts loads into slots. `blocks` and `max_batch` are per replica.
    `held` is the mean number of replicas that occupy ranks, `replica_seconds` its integral over
    time, and `up` the mean number that takes requests; `start_seconds` is the time of a start."""

    replicas: int
    ranks: int
    max_batch: int
    max_tokens: int
    blocks: int | None
    block: int
    busy: float
    running: float
    waiting: float
    cache: float | None
    steps: int
    computed: int
    decoded: int
    hits: int
    loaded: Mapping[str, int]
    lost: int
    preempted: int
    swapped: int
    adapters: int
    held: float
    up: float
    replica_seconds: float
    started: int
    stopped: int
    failed: int
    start_seconds: float

    @property
    def changes(self) -> int:
        """The number of starts, stops and failures."""
        return self.started + self.stopped + self.failed


@dataclass(frozen=True, slots=True)
class LoadMoment:
    """A window of time that ends at `seconds`, with means over all replicas of a pool: `busy` and
    `cache` are shares, `running` and `waiting` requests, `held` replicas that occupy ranks, and
    `up` replicas that take requests."""

    seconds: float
    busy: float
    running: float
    waiting: float
    cache: float | None
    held: float
    up: float


@dataclass(frozen=True)
class RequestsAnswer(Report):
    """A server over time. `spreads` has the seconds of served requests: `ttft` from arrival to the
    first token, `tpot` between tokens (the mean of each request), and `latency` to the last token.
    They are of the `measured` requests that follow those of the warm-up, `good` of which are within
    the limits. `pools` has the replicas by their role.
    `costed_by`, which JSON calls `found`, counts the kernels and collectives of all evaluated
    steps by the source of their times; it is empty without measurements. `rollouts` are
    those that follow each other, if there are any. `command` is the command line."""

    model: str
    machine: str
    stack: str
    load: str
    route: str
    requests: int
    served: int
    measured: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    kept_tokens: int
    ranks: int
    spreads: Mapping[str, SecondsSpread]
    limits: Mapping[str, float]
    good: int | None
    pools: Mapping[str, PoolFigures]
    moments: Mapping[str, Sequence[LoadMoment]]
    ends: Sequence[float]
    steps: SurfaceCheck
    evaluations: int
    points: int
    hourly: float | None
    costed_by: Mapping[str, int] = field(default_factory=dict[str, int])
    rollouts: RolloutsFigures | None = None
    command: str = ""

    @property
    def title(self) -> str:
        return f"{self.model} on {self.machine}"

    @property
    def per_rank(self) -> float:
        """Output tokens per second per occupied rank."""
        return self.output_tokens / self.seconds / self.held_ranks

    @property
    def held_ranks(self) -> float:
        """The mean number of ranks that replicas occupy."""
        return sum(pool.held * pool.ranks for pool in self.pools.values())

    @property
    def good_rate(self) -> float:
        """Requests per second within the limits, if those of the warm-up are as good as others."""
        return (self.good or 0) / max(1, self.measured) * self.served / self.seconds

    @property
    def rank_seconds(self) -> float:
        """The rank-seconds that replicas occupy."""
        return sum(pool.replica_seconds * pool.ranks for pool in self.pools.values())

    @property
    def cost(self) -> float | None:
        """The cost of 10^6 output tokens: rank-hours, times their price if given; None without
        tokens."""
        if not self.output_tokens:
            return None
        return self.rank_seconds / 3600 * (self.hourly or 1.0) / self.output_tokens * 1e6

    def as_json(self) -> dict[str, Any]:
        goodput = None
        if self.good is not None:
            goodput = {
                "limits": dict(self.limits),
                "share": self.good / max(1, self.measured),
                "requests_per_second": self.good_rate,
                "per_rank": self.good_rate / self.held_ranks,
            }
        named = (
            *("model", "machine", "stack", "load", "route", "ranks", "requests", "served"),
            *("measured", "seconds", "prompt_tokens", "output_tokens", "kept_tokens"),
        )
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in named},
            "requests_per_second": self.served / self.seconds,
            "tokens_per_second": self.output_tokens / self.seconds,
            "per_rank": self.per_rank,
            "held_ranks": self.held_ranks,
            "rank_seconds": self.rank_seconds,
            "price": self.hourly,
            "cost": self.cost,
            "times": {name: spread.as_json() for name, spread in self.spreads.items()},
            "goodput": goodput,
            "pools": {name: asdict(pool) for name, pool in self.pools.items()},
            **({} if self.rollouts is None else {"rollouts": self.rollouts.as_json()}),
            "ends": {f"p{n}": SecondsSpread(self.ends).percentile(n) for n in (*PERCENTILES, 100)},
            "steps": {
                "grid": self.points or None,
                "evaluated": self.evaluations,
                "checked": self.steps.steps,
                "median_error": self.steps.median,
                "largest_error": self.steps.largest,
            },
            **({"found": dict(self.costed_by)} if self.costed_by else {}),
            "over_time": {n: [asdict(m) for m in each] for n, each in self.moments.items()},
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row with all figures except those over time."""
        return [{name: v for name, v in self.as_json().items() if name != "over_time"}]

    def page(self) -> str:
        """The load of replicas over time, the distributions of latencies, and all figures."""
        from stagec.answers.requests.requests_page import requests_page

        return requests_page(self)

    def plot(self) -> SVGText:
        from stagec.answers.requests.requests_page import load_plot

        return SVGText(load_plot(self).svg())

    def print(self, stream: TextIO) -> None:
        out = console(stream)
        ranks = counted(self.ranks, "rank")
        out.print(f"{self.model} on {self.machine}, stack {self.stack}, {ranks}: {self.load}")
        out.print(spreads_table({TITLES[n]: s.as_json() for n, s in self.spreads.items()}))
        for line in self.lines():
            out.print(line)
        out.print(table("Replicas", *POOL_HEADS, rows=self.pool_cells()))
        if self.rollouts is not None:
            out.print(table("Rollouts", *ROLLOUT_HEADS, rows=self.rollouts.cells()))

    def lines(self) -> list[str]:
        """The sentences beside the tables."""
        every = f"{self.served:,} of {self.requests:,} requests"
        if self.served == self.requests:
            every = f"{self.requests:,} requests"
        lines = [
            (
                f"{every} with {self.output_tokens:,} output tokens in "
                f"{seconds_text(self.seconds)}: {self.served / self.seconds:,.4g} requests/s, "
                f"{self.output_tokens / self.seconds:,.1f} tokens/s, {self.per_rank:,.1f} per rank"
            )
        ]
        if self.kept_tokens:
            lines.append(f"Requests that are not done have {self.kept_tokens:,} tokens")
        if self.measured < self.served:
            lines.append(f"Times are of the {self.measured:,} requests behind the warm-up")
        if self.good is not None:
            limits = ", ".join(f"{TITLES[n]} {seconds_text(v)}" for n, v in self.limits.items())
            lines.append(
                f"Within {limits}: {self.good:,} of them "
                f"({self.good / max(1, self.measured):.1%}), {self.good_rate:,.4g} requests/s, "
                f"{self.good_rate / self.held_ranks:,.4g} per rank"
            )
        lines += filter(None, (self._changes(name) for name in self.pools))
        lines += filter(None, map(_loaded_text, self.pools.values()))
        if loads := sum(pool.adapters for pool in self.pools.values()):
            lines.append(f"{counted(loads, 'load')} of adapters, for {self.requests:,} requests")
        if self.hourly is not None and self.cost is not None:
            lines.append(
                f"{self.rank_seconds / 3600:,.4g} rank-hours at {self.hourly:g}: "
                f"{self.cost:,.4g} per 10^6 tokens"
            )
        half, most, last = (SecondsSpread(self.ends).percentile(n) for n in (50, 90, 100))
        if self.rollouts is not None:
            lines.append(self.rollouts.line())
        elif self.load.startswith("rollout"):
            lines.append(
                f"Half of them are done after {seconds_text(half)}, 90% after "
                f"{seconds_text(most)}; the last ones take {1 - most / last:.1%} of the time"
            )
        if self.steps.steps:
            lines.append(
                f"Seconds of steps are interpolated between {self.evaluations:,} exact ones; the "
                f"error of {self.steps.steps} steps of the run is {self.steps.median:.2%} in the "
                f"median and {self.steps.largest:.2%} at most"
            )
        else:
            lines.append(f"Seconds of {self.evaluations:,} distinct steps are exact")
        lines += filter(None, [costed_text(self.costed_by)])
        return lines

    def _changes(self, name: str) -> str:
        """A sentence about the starts, stops and failures of a pool; empty without any."""
        pool = self.pools[name]
        if not pool.changes:
            return ""
        which = f" of {name}" if len(self.pools) > 1 else ""
        starts = f"{counted(pool.started, 'start')}"
        if pool.start_seconds and (pool.started or pool.failed):
            starts += f" of {seconds_text(pool.start_seconds)}"
        return (
            f"Replicas{which}: {pool.held:,.2f} occupy ranks on average, "
            f"{pool.up:,.2f} take requests; {starts}, {counted(pool.stopped, 'stop')}, "
            f"{counted(pool.failed, 'failure')}, {pool.replica_seconds:,.4g} replica-seconds; "
            f"{pool.lost:,} cached tokens were lost"
        )

    def pool_cells(self) -> list[list[str]]:
        """A row of `POOL_HEADS` for each kind of replicas."""
        return [
            [
                name,
                *(f"{p.replicas:,}", f"{p.ranks:,}", f"{p.busy:.1%}"),
                *(f"{p.running:,.1f}", f"{p.waiting:,.1f}"),
                "no bound" if p.cache is None else f"{p.cache:.1%} of {(p.blocks or 0):,} blocks",
                *(f"{p.steps:,}", f"{p.preempted:,}", f"{p.hits:,}"),
            ]
            for name, p in self.pools.items()
        ]


def _loaded_text(pool: PoolFigures) -> str:
    """A sentence about the prefix hits of each tier; empty without tiers below the device."""
    if not pool.loaded:
        return ""
    below = "; ".join(f"{name} {tokens:,}" for name, tokens in pool.loaded.items())
    device = pool.hits - sum(pool.loaded.values())
    share = pool.hits / (pool.hits + pool.computed)
    return f"Prefix hits, tokens: device {device:,}; {below}; {share:.1%} of what prompts need"


def answer_of(
    machine: Machine,
    given: Mapping[str, Any],
    requests: Sequence[Request],
    run: Simulation,
    pools: Mapping[str, Pool],
    outside: float,
) -> RequestsAnswer:
    """The answer of a completed simulation. `outside` is the host time of a request outside of its
    steps, in seconds: it delays the tokens of the request and its next turn, but no step."""
    done, end = run.done, max(1, run.end)
    measured = [job for job in done if job.number > given["warmup"]]
    if done and not measured:
        raise error(
            f"--warmup {given['warmup']:,} leaves none of the {len(done):,} requests",
            remedy="give a smaller number, or more requests (--count)",
        )
    limits = {n: given[n] for n in ("ttft", "tpot") if given[n] is not None}
    names = {PREFILL: "prefill", DECODE: "decode" if len(pools) > 1 else "server"}
    costs = {id(p.costs): p.costs for p in pools.values()}.values()
    checks = [each.check() for each in costs]
    worst = max(checks, key=lambda c: c.largest)
    main = next(iter(pools.values())).models.main.builder
    return RequestsAnswer(
        model=main.model_name,
        machine=machines_text(main.options, machine),
        stack=main.options.stack,
        load=_load_text(given, requests),
        route=given["route"],
        requests=len(requests),
        served=len(done),
        measured=len(measured),
        seconds=end / SECOND,
        prompt_tokens=sum(j.request.prompt for j in done),
        output_tokens=sum(j.request.output for j in done),
        kept_tokens=run.kept_tokens(),
        ranks=sum(p.ranks * len(p.replicas) for p in pools.values()),
        spreads=latencies(measured, outside),
        limits=limits,
        good=sum(_is_good(j, limits, outside) for j in measured) if limits else None,
        pools={names[n]: _figures(p, run) for n, p in pools.items()},
        moments={names[n]: _moments(p, run) for n, p in pools.items()},
        ends=[j.last / SECOND + outside for j in done],
        steps=worst,
        evaluations=sum(each.evaluations for each in costs),
        points=given["step_grid"],
        hourly=given["price"],
        rollouts=rollouts_figures(run, list(pools.values())) if given["iterations"] else None,
    )


def _is_good(job: ServedRequest, limits: Mapping[str, float], outside: float) -> bool:
    """Whether a request is within the limits."""
    first = (job.first - job.arrival) / SECOND + outside
    each = (job.last - job.first) / SECOND / max(1, job.request.output - 1)
    return first <= limits.get("ttft", first) and each <= limits.get("tpot", each)


def _load_text(given: Mapping[str, Any], requests: Sequence[Request]) -> str:
    """The load in words."""
    number = f"{len(requests):,} requests"
    if given["requests"] is not None:
        return f"{number} of {given['requests'].name}"
    prompt = sum(r.prompt for r in requests) / len(requests)
    output = sum(r.output for r in requests) / len(requests)
    number += " in conversations" if given["turns"] is not None else ""
    sizes = f"{prompt:,.1f} prompt and {output:,.1f} output tokens on average"
    if given["concurrency"] is not None:
        return f"{number}, {given['concurrency']:,} at any time, {sizes}"
    if given["batch_of"] is not None:
        if (times := given["iterations"]) is not None:
            each = f"{times:,} rollouts of {given['batch_of']:,} requests"
            return f"{each}, {len(requests):,} in all, {sizes}"
        return f"rollout of {number}, {sizes}"
    burst = f" (burst {given['burst']:g})" if given["burst"] != 1 else ""
    return f"{number}, {given['rate']:g} per second{burst}, {sizes}"


def _figures(pool: Pool, run: Simulation) -> PoolFigures:
    replicas, limits = pool.replicas, pool.limits
    busy, running, waiting, pages = run.means(replicas)
    fleet = run.fleet_of(replicas)
    held, up, parked = (value / max(1, run.end) for value in fleet.series.totals)
    tallies = [r.tally for r in replicas]
    blocks = limits.blocks
    counts = ("steps", "computed", "decoded", "hits", "lost", "preempted", "swapped", "adapters")
    return PoolFigures(
        replicas=len(replicas),
        ranks=pool.ranks,
        max_batch=limits.sequences,
        max_tokens=limits.tokens,
        blocks=blocks,
        block=limits.block,
        busy=busy / held,
        running=running,
        waiting=waiting + parked,
        cache=None if blocks is None else pages / held / blocks,
        held=held,
        up=up,
        replica_seconds=fleet.series.totals[0] / SECOND,
        start_seconds=pool.plan.start / SECOND,
        **asdict(fleet.tally),
        loaded=dict(sum((t.loaded for t in tallies), Counter[str]())),
        **{name: sum(getattr(t, name) for t in tallies) for name in counts},
    )


def _moments(pool: Pool, run: Simulation) -> list[LoadMoment]:
    width, rows = run.over_time(pool.replicas)
    blocks = pool.limits.blocks
    moments: list[LoadMoment] = []
    for place, row in enumerate(zip(*rows, strict=True), 1):
        busy, running, waiting, pages, held, up, parked = row
        cache = None if blocks is None else pages / held / blocks
        at = min(place * width, run.end) / SECOND
        moments.append(LoadMoment(at, busy / held, running, waiting + parked, cache, held, up))
    return moments
