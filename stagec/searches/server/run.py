"""A search for servers: times workers, combines them to servers, and evaluates the best again with
the exact transfer of caches between their pools."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from stagec.analysis.serving_rates import steady_seconds
from stagec.answers.serve_prompts import sending, with_fewest
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.jobs.pod_options import options_of_pod
from stagec.jobs.pods import one_group
from stagec.jobs.request.command_line import job_words
from stagec.jobs.request.machine import on_machine
from stagec.jobs.request.options import IDEAL, JobOptions
from stagec.jobs.request.serving_flags import DISAGGREGATED as TWO_PODS
from stagec.jobs.session import Session
from stagec.jobs.stage_steps import of_a_stage
from stagec.jobs.step_timer import StepTimer
from stagec.searches.server.launch import LaunchedWorker, layout_of
from stagec.searches.server.question import ServerQuestion, why_unsent
from stagec.searches.server.servers import (
    AGGREGATED,
    DISAGGREGATED,
    CacheTransfer,
    ServerPlan,
    WorkerKind,
    WorkerPool,
    aggregated_servers,
    decode_rate,
    disaggregated_servers,
    front,
    joined,
    prefill_rate,
)
from stagec.searches.server.verify import ServerOverTime, VerifyTask, over_time
from stagec.searches.server.worker import ServerLoad, Worker, kind_of, timed_worker
from stagec.searches.serving_space import SERVER, without_step
from stagec.searches.space import REFUSED
from stagec.searches.stack import as_written
from stagec.support.diagnostics import DiagnosticError
from stagec.time.costs.network import message_seconds
from stagec.traces.workers import crew

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagec.machines import Machine

Log = Callable[[str], None]
#: The bytes of a message by which two networks are compared.
_MESSAGE = 1 << 20


@dataclass(frozen=True)
class FoundServers:
    """The result of a search for servers.

    `best` has the best servers, best first; `by_mode` and `by_ranks` the best of each mode and
    number of ranks; `front` the Pareto front within the limit of the time to the first token.
    `servers` and `timed` are the numbers of servers and of workers that fit, `cut` counts what was
    left out by reason. `over_time` has the closed loops of some of the best, by the `id` of the
    server: those that miss a limit there come after the others. `costed_by` is as in `StepTimer`,
    summed over workers.
    """

    question: ServerQuestion
    best: Sequence[ServerPlan]
    by_mode: dict[str, ServerPlan | None]
    by_ranks: dict[int, ServerPlan | None]
    front: Sequence[ServerPlan]
    servers: int
    timed: int
    cut: Counter[str]
    cautions: Sequence[str]
    seconds: float
    over_time: Mapping[int, ServerOverTime] = field(default_factory=dict[int, ServerOverTime])
    costed_by: Mapping[str, int] = field(default_factory=Counter[str])


def find_servers(question: ServerQuestion, processes: int, log: Log) -> FoundServers:
    """Search the servers of a question. Raises `KeyboardInterrupt`."""
    began = time.monotonic()
    cut = Counter[str](question.refused)
    kinds = list(_kinds(question, processes, log, cut))
    log("matching workers")
    servers = list(_servers(question, kinds, cut))
    within = [s for s in servers if s.is_within(question.load)]
    late = len(servers) - len(within)
    if late:
        cut["servers beyond the limits of time"] += late
    exact = _exact(question, within)
    servers = [exact.get(id(s), s) for s in servers]
    best = sorted(
        (s for s in exact.values() if s.is_within(question.load)), key=lambda s: _value(question, s)
    )
    by_mode = {m: next((s for s in best if s.mode == m), None) for m in _MODES}
    by_ranks = {n: next((s for s in best if s.ranks == n), None) for n in question.ranks}
    load = question.load
    early = [s for s in servers if load.ttft is None or s.ttft <= load.ttft]
    wanted = best[: question.wanted]
    checked = _verified_until_kept(question, wanted, processes, log)
    return FoundServers(
        question,
        sorted(wanted, key=lambda s: _place(checked, s, load)),
        by_mode,
        by_ranks,
        front(early),
        len(servers),
        sum(bool(kind.worker.decode) for kind in kinds),
        cut,
        list(dict.fromkeys(c for kind in kinds for c in kind.worker.cautions)),
        time.monotonic() - began,
        checked,
        sum((Counter(kind.worker.costed_by) for kind in kinds), Counter[str]()),
    )


_MODES = (AGGREGATED, DISAGGREGATED)


def _kinds(
    question: ServerQuestion, processes: int, log: Log, cut: Counter[str]
) -> Iterator[WorkerKind]:
    """The timed workers that fit, in a fixed order, whichever was done first."""
    tasks = sorted(question.tasks, key=lambda t: repr(kind_of(t)))
    workers: dict[int, Worker] = {}
    with crew(timed_worker, processes, kind_of) as run:
        for number, worker in run(tasks):
            workers[number] = worker
            log(f"{len(workers):,} of {len(tasks):,} workers timed")
    for number, task in enumerate(tasks):
        worker = workers[number]
        if worker.refused:
            cut[f"{REFUSED}{worker.refused[:60]}"] += 1
        elif not worker.decode:
            cut["too much memory for one sequence"] += 1
        else:
            yield WorkerKind(task.options, task.machine, worker, task.price)


def _servers(
    question: ServerQuestion, kinds: Sequence[WorkerKind], cut: Counter[str]
) -> Iterator[ServerPlan]:
    unsent: dict[tuple[int, int], str] = {}

    def sends(prefill: WorkerKind, decode: WorkerKind) -> bool:
        key = id(prefill), id(decode)
        if key not in unsent:
            unsent[key] = why_unsent(question, prefill.options, decode.options)
        return not unsent[key]

    cheap = question.objective == "cost"
    about = question.load, question.layers
    for ranks in question.ranks:
        yield from aggregated_servers(kinds, ranks, question.load)
        yield from disaggregated_servers(kinds, ranks, *about, sends=sends, cheap=cheap)
    cut.update(filter(None, unsent.values()))


def _exact(question: ServerQuestion, servers: Iterable[ServerPlan]) -> dict[int, ServerPlan]:
    """The best servers of different layouts, as many as are wanted, and the first of each mode and
    number of ranks, with the exact transfer of caches; by the `id` of the server with the estimated
    one."""
    order = sorted(servers, key=lambda s: _value(question, s))
    by_layout: dict[tuple[object, ...], ServerPlan] = {}
    for server in order:
        by_layout.setdefault(server.layout, server)
    best = list(by_layout.values())
    first: dict[object, ServerPlan] = {}
    for server in best:
        first.setdefault((server.mode, server.ranks), server)
    return {id(s): exactly(question, s) for s in [*best[: question.wanted], *first.values()]}


def _verified_until_kept(
    question: ServerQuestion, servers: Sequence[ServerPlan], processes: int, log: Log
) -> dict[int, ServerOverTime]:
    """The closed loops of as many of these servers as are asked for, and of more of them until one
    keeps the limits, or cannot run."""
    checked: dict[int, ServerOverTime] = {}
    while question.verified and len(checked) < len(servers):
        if any(each.refused or not each.missed(question.load) for each in checked.values()):
            break
        more = servers[len(checked) : len(checked) + question.verified]
        checked |= _verified(question, more, processes, log)
    return checked


def _verified(
    question: ServerQuestion, servers: Sequence[ServerPlan], processes: int, log: Log
) -> dict[int, ServerOverTime]:
    """The closed loops of servers, by their `id`."""
    if not servers:
        return {}
    limit = question.tasks[0].limit  # one for all
    about = question.load, limit, question.measured
    tasks = [VerifyTask(s, _job_of(question, s), *about) for s in servers]
    verified: dict[int, ServerOverTime] = {}
    with crew(over_time, min(processes, len(tasks))) as run:
        for number, each in run(tasks):
            verified[id(servers[number])] = each
            log(f"{len(verified):,} of {len(tasks):,} servers verified over time")
    return verified


def _place(
    checked: Mapping[int, ServerOverTime], server: ServerPlan, load: ServerLoad
) -> tuple[bool, bool]:
    """A key that puts servers which miss a limit over time behind others, and those that did not
    run over time last."""
    each = checked.get(id(server))
    return each is None, each is not None and bool(each.missed(load))


def _job_of(question: ServerQuestion, server: ServerPlan) -> JobOptions:
    """The job of a server for a simulation of requests."""
    if server.prefill is not None:
        return pods_of(question, server.prefill, server.decode)
    return server.decode.kind.options.changed(serve=None, step=None, batch=None)


def _value(question: ServerQuestion, server: ServerPlan) -> tuple[float, ...]:
    """The key by which servers are compared, less being better: the objective, then the other one
    of tokens per rank and cost, then the times between tokens and to the first one."""
    rate, cost = -float(f"{server.per_rank:.9g}"), float(f"{server.cost:.9g}")
    first, then = (cost, rate) if question.objective == "cost" else (rate, cost)
    return first, then, server.tpot, server.ttft


def exactly(question: ServerQuestion, server: ServerPlan) -> ServerPlan:
    """A server with the exact transfer of caches between its pools, message by message as both
    strategies lay them out. If the layouts cannot be matched the estimate stays."""
    if server.prefill is None:
        return server
    prefill, decode = server.prefill, server.decode
    try:
        prefill, sent = _sent(question, prefill, decode)
    except DiagnosticError:
        return server
    rate = prefill_rate(prefill.step, sent)
    each = decode_rate(decode.step, question.load)
    requests = min(prefill.workers * rate, decode.workers * each)
    return joined(server.ranks, question.load, prefill, decode, sent, requests)


def _sent(
    question: ServerQuestion, prefill: WorkerPool, decode: WorkerPool
) -> tuple[WorkerPool, CacheTransfer]:
    session = Session()
    prompts = prefill.step.sequences // prefill.kind.worker.stages
    job = pods_of(question, prefill, decode).changed(part=(), batch=prompts)
    options = of_a_stage(job)
    machine = _joined(prefill.kind.machine, decode.kind.machine)
    target = with_fewest(
        options_of_pod(DECODE, options.changed(batch=None)), partial(one_group, session=session)
    )
    timer = StepTimer.of(machine, question.measured)
    step, sent = sending(on_machine(options, machine), timer, session, target)
    seconds = steady_seconds(step.breakdown, step.step_seconds, prefill.kind.worker.stages)
    if machine is prefill.kind.machine:
        sends = replace(prefill.step, seconds=seconds, passes=step.step_seconds)
        prefill = replace(prefill, step=sends)
    return prefill, CacheTransfer(sent.alone_seconds / prompts, sent.exposed_seconds, exact=True)


def pods_of(question: ServerQuestion, prefill: WorkerPool, decode: WorkerPool) -> JobOptions:
    """The job of a disaggregated server with these pools. Only those that decode have parts."""
    decodes = decode.kind.options
    return question.model.changed(
        stack=decodes.stack,
        serve=TWO_PODS,
        prompt=question.load.prompt,
        context=question.load.cached or None,
        speculative=question.load.drafts or None,
        prefill=strategy_words(prefill.kind.options),
        decode=strategy_words(decodes.changed(part=())),
        part=decodes.part,
    )


def _joined(machine: Machine, other: Machine) -> Machine:
    """A machine whose outermost level is the slower of its own and that of another machine."""
    own, others = machine.network[-1], other.network[-1]
    if message_seconds(machine, _MESSAGE, own) >= message_seconds(other, _MESSAGE, others):
        return machine
    return machine.model_copy(update={"network": [*machine.network[:-1], others]})


def strategy_words(job: JobOptions) -> str:
    """The flags of a worker, in the form of `--prefill` and `--decode`."""
    plain = without_step(job.changed(model="", sizes={}, ranks=None))
    return shlex.join(job_words(as_written(plain).changed(stack=IDEAL)))


def launched(question: ServerQuestion, server: ServerPlan) -> list[LaunchedWorker]:
    """The kinds of workers of a server for the launch files of an engine."""
    load, point = question.load, server.point
    roles = [SERVER] if server.prefill is None else [PREFILL, DECODE]
    workers: list[LaunchedWorker] = []
    for role, pool in zip(roles, server.pools, strict=True):
        options, worker = pool.kind.options, pool.kind.worker
        each = pool.step.sequences // worker.groups
        if role == PREFILL:
            tokens = each // worker.stages * load.prompt
        else:
            tokens = max(point.budget if point is not None else worker.scheduler.tokens, each)
        more = point.work.prompts * worker.stages if point is not None else 0
        layout = layout_of(options, experts=question.experts > 0)
        about = each + more, tokens, load.last + 1, options, worker.scheduler, question.experts
        devices = pool.kind.machine.network[0].ranks or 0
        workers.append(LaunchedWorker(role, pool.workers, layout, *about, devices))
    return workers
