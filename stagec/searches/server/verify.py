"""Verifies the best servers over time: a closed loop with as many concurrent requests as the
server's steady state has, in which, unlike there, requests may wait."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

from stagec.answers.requests.options import OVER_TIME
from stagec.answers.requests.run import Server, server_of
from stagec.answers.serve_prompts import transfer_between
from stagec.answers.time.table import seconds_text
from stagec.jobs.request.acceptance import ACCEPTANCE
from stagec.jobs.request.limit import Limit
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.jobs.step_timer import StepTimer
from stagec.searches.server.servers import ServerPlan
from stagec.searches.server.worker import ServerLoad
from stagec.serving.latency import SecondsSpread, latencies
from stagec.serving.step_times import SECOND
from stagec.support.diagnostics import DiagnosticError

#: Prompts and outputs are drawn within this share of the given lengths, so that requests do not end
#: together.
_SPREAD = 0.2
#: The rounds of the loop. The first one, which arrives at once, and the last one, which no requests
#: follow, are left out.
_ROUNDS = 4
#: The share by which the median may exceed a limit: times of steps are interpolated, and the search
#: takes the largest batch whose mean is within the limit.
_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """A server to run over time: its job (`options`), its load, the memory limit of a rank, and the
    values of `MEASURED`."""

    server: ServerPlan
    options: JobOptions
    load: ServerLoad
    limit: Limit
    measured: Mapping[str, Any]

    @property
    def concurrency(self) -> int:
        """The number of concurrent requests in its steady state, by Little's law."""
        server, load = self.server, self.load
        each = server.ttft + (load.output - 1) * server.tpot
        return max(1, round(server.tokens_per_second / load.output * each))


@dataclass(frozen=True, slots=True)
class ServerOverTime:
    """The figures of a closed loop, without its first and its last round: concurrent requests,
    requests counted, output tokens per second, and the distributions of the times to the first
    token and between tokens. `refused` says why a server did not run."""

    concurrency: int = 0
    requests: int = 0
    tokens_per_second: float = 0.0
    ttft: SecondsSpread | None = None
    tpot: SecondsSpread | None = None
    refused: str = ""

    def missed(self, load: ServerLoad) -> list[str]:
        """The limits that half of the requests miss, as texts."""
        missed: list[str] = []
        for name, spread in (("ttft", self.ttft), ("tpot", self.tpot)):
            limit = getattr(load, name)
            if limit is None or spread is None:
                continue
            if (half := spread.percentile(50)) > limit * (1 + _TOLERANCE):
                texts = seconds_text(half), seconds_text(limit)
                missed.append(f"{name.upper()} over time {' > '.join(texts)} (p50)")
        return missed

    def as_json(self, load: ServerLoad, ranks: int) -> dict[str, Any]:
        """The figures as JSON; `missed` lists the limits that are not kept."""
        return {
            "concurrency": self.concurrency,
            "requests": self.requests,
            "tokens_per_second": self.tokens_per_second,
            "per_rank": self.tokens_per_second / ranks,
            **{
                name: None if spread is None else spread.as_json()
                for name, spread in (("ttft", self.ttft), ("tpot", self.tpot))
            },
            "missed": self.missed(load),
            "refused": self.refused or None,
        }


def over_time(task: VerifyTask) -> ServerOverTime:
    """Run a server in a closed loop, if its workers are on one machine."""
    machines = {pool.kind.machine.given: pool.kind.machine for pool in task.server.pools}
    if len(machines) > 1:
        return ServerOverTime(refused="its workers are on different machines")
    if task.load.cached:
        return ServerOverTime(refused="a closed loop has no requests with a common prefix")
    (machine,) = machines.values()
    session, timer = Session(), StepTimer.of(machine, task.measured)
    caches = partial(transfer_between, timer, session)
    try:
        server = server_of(task.options, timer, _given(task), session, caches)
    except DiagnosticError as problem:
        return ServerOverTime(refused=problem.diagnostics[0].message)
    server.run.run()
    return _measured(server, task.concurrency)


def _given(task: VerifyTask) -> Mapping[str, Any]:
    """The options of the simulation of requests."""
    load, server, count = task.load, task.server, task.concurrency
    prefill, decode, point = server.prefill, server.decode, server.point
    sequences = decode.step.sequences // decode.kind.worker.groups
    if point is not None:
        sequences += point.work.prompts * decode.kind.worker.stages
    sequences *= decode.kind.worker.turns  # of a group of ranks
    if prefill is not None:
        worker = prefill.kind.worker
        prompts = prefill.step.sequences // worker.groups // worker.stages
        tokens = prompts * ceil(load.prompt * (1 + _SPREAD))
    else:
        tokens = point.budget if point is not None else 0
    return {
        **{option.name: option.usual for option in (*OVER_TIME, *ACCEPTANCE)},
        "accepted": load.accepted if load.drafts else None,
        "lengths": f"prompt={_drawn(load.prompt)},output={_drawn(load.output)}",
        "concurrency": count,
        "count": _ROUNDS * count,
        "replicas": decode.workers,
        "prefill_replicas": None if prefill is None else prefill.workers,
        "max_batch": sequences,
        "max_tokens": max(tokens, sequences),
        "output_tokens": load.output,
        "limit": task.limit,
    }


def _drawn(mean: int) -> str:
    by = round(mean * _SPREAD)
    return f"{max(1, mean - by)}..{mean + by}"


def _measured(server: Server, count: int) -> ServerOverTime:
    jobs = sorted(server.run.done, key=lambda j: j.last)
    counted = [j for j in jobs if count < j.number <= (_ROUNDS - 1) * count]
    ends = jobs[count : (_ROUNDS - 1) * count]
    seconds = (ends[-1].last - jobs[count - 1].last) / SECOND
    spreads = latencies(counted, server.outside)
    return ServerOverTime(
        count,
        len(counted),
        sum(j.request.output for j in ends) / seconds,
        spreads.get("ttft"),
        spreads.get("tpot"),
    )
