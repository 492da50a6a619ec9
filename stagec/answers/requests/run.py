"""From the options of a server to its simulation and answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from stagec.analysis.serving_rates import step_pace
from stagec.answers.requests.answer import RequestsAnswer, answer_of
from stagec.answers.requests.backlog import backlog_text
from stagec.answers.requests.fleet_options import failures, plan_of, replicas_of, scaling_of
from stagec.answers.requests.options import given_requests, prefix_block_of, rollouts_of
from stagec.answers.requests.tiers import all_bytes, tiers_below, token_bytes
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.ir_spec.strategy.hosts import HostsRule
from stagec.ir_spec.strategy.part import MAIN
from stagec.ir_spec.strategy.scheduler import ALONE, SchedulerRule
from stagec.jobs.admission import Room, check_requests, largest_step, page_of
from stagec.jobs.lowered import LoweredJob, job_costs
from stagec.jobs.pod_options import of_layers, options_of_draft, options_of_pod
from stagec.jobs.request.acceptance import take_acceptance
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import DISAGGREGATED, check_draft
from stagec.jobs.served_models import ServedModels, adapter_slots, most_bytes
from stagec.jobs.session import Session
from stagec.jobs.stage_steps import of_a_stage
from stagec.jobs.step_modules import ServedSteps
from stagec.jobs.step_surface import DraftedSteps, ExactSteps, SharedSteps, StepSurface
from stagec.jobs.step_timer import StepTimer
from stagec.serving.fleet import FleetPlan
from stagec.serving.pipelined import PipelinedReplica
from stagec.serving.policy import ServerLimits
from stagec.serving.replica import Replica
from stagec.serving.requests import Request, turns
from stagec.serving.routing import ROUTERS
from stagec.serving.simulate import NANOSECOND, Simulation
from stagec.serving.step import SequenceClass, Step, step_of
from stagec.serving.step_times import SECOND
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.machines import Machine

#: From the tokens of a prompt to the seconds for which its caches occupy the link of a pod, and to
#: those that remain after the prefill step.
TransferSeconds = Callable[[int], tuple[float, float]]
#: The costs of steps, in femtoseconds.
Costs: TypeAlias = StepSurface | ExactSteps | SharedSteps | DraftedSteps


@dataclass
class Pool:
    """A pool of identical replicas: the models and the scheduler of their steps, the host seconds
    of a request `outside` of its steps, the costs of steps (`pace`: of their slowest pipeline
    stage), the limits of a replica, its memory, its ranks, and the plan of starts and stops."""

    models: ServedModels
    scheduler: SchedulerRule
    outside: float
    costs: Costs
    pace: Costs | None
    stages: int
    limits: ServerLimits
    room: Room | None
    ranks: int
    replicas: list[Replica]
    plan: FleetPlan


def serve_requests(
    options: JobOptions,
    timer: StepTimer,
    given: Mapping[str, Any],
    session: Session,
    transfer: Callable[[JobOptions], TransferSeconds],
) -> RequestsAnswer:
    """Serve requests over time; `transfer` computes the transfer times between two pods. Raises
    `DiagnosticError`, `OSError`."""
    with session.once() as aside, session.progress("serving", "requests") as progress:
        server = server_of(options, timer, given, aside, transfer, progress)
        run, every = server.run, server.requests
        try:
            run.run()
        except KeyboardInterrupt:
            session.log(f"interrupted with {len(run.done):,} of {len(every):,} requests served")
            raise
        if given["concurrency"] is None and run.rollouts is None and run.done:
            last = max(request.arrival for request in run.requests) * NANOSECOND
            session.remark(*filter(None, [backlog_text(run.done, last)]))
        answer = answer_of(timer.machine, given, every, run, server.pools, server.outside)
        return replace(answer, costed_by=timer.measured_counts(session))


@dataclass(frozen=True)
class Server:
    """A server to simulate: its requests (one for each turn of a conversation), and its pools of
    replicas by their role."""

    requests: Sequence[Request]
    pools: Mapping[str, Pool]
    run: Simulation

    @property
    def outside(self) -> float:
        """The host seconds of a request outside of its steps."""
        return self.pools[PREFILL if PREFILL in self.pools else DECODE].outside


def server_of(
    options: JobOptions,
    timer: StepTimer,
    given: Mapping[str, Any],
    session: Session,
    transfer: Callable[[JobOptions], TransferSeconds],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Server:
    """The server and the requests that the options describe. Raises `DiagnosticError`,
    `OSError`."""
    two_pods = options.serve == DISAGGREGATED
    _refuse(options, given, two_pods=two_pods)
    requests = given_requests(options, given)
    every = list(turns(requests))
    pools = _pools(options, timer, given, every, session, two_pods=two_pods)
    decode = pools[DECODE]
    prefills = pools[PREFILL].replicas if two_pods else []
    sent = (
        _femtoseconds(transfer(_with_prompt(options, every).changed(part=()))) if two_pods else None
    )
    update = _update(given, list(pools.values()), timer.machine)
    models = next(iter(pools.values())).models.main
    check_requests(every, models, [pool.limits for pool in pools.values()], session)
    if given["concurrency"] not in (None, 1) and len({(r.prompt, r.output) for r in every}) == 1:
        session.remark(
            "all requests have one length, so those that begin together end together and wait for "
            "each other; benchmarks draw lengths, such as --lengths prompt=820..1024,output=64..80"
        )
    run = Simulation(
        requests,
        decode.replicas,
        ROUTERS[given["route"]],
        prefills,
        sent,
        given["concurrency"],
        failures(given, len(prefills), len(decode.replicas)),
        decode.plan,
        pools[PREFILL].plan if two_pods else FleetPlan(),
        rollouts=rollouts_of(given, update),
        progress=progress,
    )
    server = Server(every, pools, run)
    run.outside = round(server.outside * SECOND)
    return server


def _refuse(options: JobOptions, given: Mapping[str, Any], *, two_pods: bool) -> None:
    """Raise `DiagnosticError` for options that this server does not support."""
    if options.serve is not None and not two_pods:
        raise error(
            f"--serve {options.serve} is one step, but requests over time take many steps",
            remedy="leave it out, or give --serve disaggregated",
        )
    named = {
        "batch": ("--batch cannot be used with requests over time", "give --max-batch N"),
        "chunk": ("--chunk cannot be used with requests over time", "give --max-tokens N"),
        "context": ("--context cannot be used with requests over time", "leave it out"),
        "step": ("--step cannot be used with requests over time", "leave it out"),
    }
    for name, (what, remedy) in named.items():
        if getattr(options, name) is not None:
            raise error(what, remedy=remedy)
    if options.draft is not None:
        check_draft(options)
        options_of_draft(MAIN, options.draft, options)  # refuses options of other pods
    if len(of_layers(options)) < len(options.part):
        raise error(
            "--part cannot be used with requests over time, but for feed-forward: other parts are "
            "not in all steps",
            remedy="leave it out",
        )
    if options.preset:
        raise error(
            "--preset cannot be used with requests over time",
            remedy="leave it out, and give MODEL and flags",
        )
    if given["prefill_replicas"] is not None and not two_pods:
        raise error(
            "--prefill-replicas needs --serve disaggregated",
            remedy="add --serve disaggregated --prefill 'tp=4' --decode 'tp=4'",
        )
    if scaling_of(given, prefills=True) is not None and not two_pods:
        raise error(
            "--autoscale prefill:... needs --serve disaggregated",
            remedy="leave out 'prefill:', or add --serve disaggregated",
        )


def _with_prompt(options: JobOptions, requests: Sequence[Request]) -> JobOptions:
    """The options of two pods, with a prompt."""
    return options.changed(prompt=options.prompt or max(r.prompt for r in requests))


# -- pools -----------------------------------------------------------------------------------------


def _pools(
    options: JobOptions,
    timer: StepTimer,
    given: Mapping[str, Any],
    requests: Sequence[Request],
    session: Session,
    *,
    two_pods: bool,
) -> dict[str, Pool]:
    """The pool that decodes, and with two pods the one that prefills. A step that verifies drafts
    is simulated as the mean number of accepted tokens in turn, each with its share of the step.
    Raises `DiagnosticError`."""
    accepted = take_acceptance(options, given).tokens
    each = {DECODE: options}
    if two_pods:
        both = _with_prompt(options, requests)
        each = {pod: options_of_pod(pod, both) for pod in (PREFILL, DECODE)}
        each[DECODE] = each[DECODE].changed(part=options.part)
    first = 0
    pools: dict[str, Pool] = {}
    for pod, own in each.items():
        prefills = pod == PREFILL
        copies = replicas_of(given, prefills=prefills)[1]
        pool = _pool(own, timer, given, requests, session, accepted, prefills=prefills)
        alone = pool.models.replicas
        swap = _swap_time(pool, timer.machine) if given["preempt"] == "swap" else 0
        computes = prefills or not two_pods
        block = prefix_block_of(own, given, requests) if computes else 0
        tiers = tiers_below(pool.models, timer.machine, given, block) if computes else None
        slots = adapter_slots(own, requests, timer.machine, session)
        new_replica: Callable[..., Replica] = Replica
        if pool.pace is not None:
            new_replica = partial(PipelinedReplica, pace=pool.pace, stages=pool.stages)
        pool.replicas += (
            new_replica(
                first + number,
                pool.limits,
                pool.costs,
                prefix_block=block,
                tiers=tiers() if tiers is not None else None,
                swap=swap,
                prefills=prefills,
                scheduler=pool.scheduler,
                adapters=slots(),
            )
            for number in range(copies * alone)
        )
        first += len(pool.replicas)
        pools[pod] = pool
    return pools


def _pool(
    options: JobOptions,
    timer: StepTimer,
    given: Mapping[str, Any],
    requests: Sequence[Request],
    session: Session,
    accepted: float,
    *,
    prefills: bool,
) -> Pool:
    models = ServedModels.of(options, session)
    strategy = read_strategy(models.main.builder.module)
    alone = models.replicas
    groups = models.main.groups // alone
    if alone > 1 and given["autoscale"]:
        raise error(
            f"--autoscale cannot be used with --dp, here {alone}: it adds copies of the whole job",
            remedy="leave --dp out, so that each replica is a copy of the job",
        )
    block = page_of(options)
    scheduler = strategy.one(SchedulerRule)
    if options.part:  # whose steps decode or prefill
        scheduler = replace(scheduler, prompts=ALONE)
    outside = strategy.one(HostsRule).request_seconds
    tokens, sequences = given["max_tokens"] or scheduler.tokens, given["max_batch"]
    if sequences > tokens:
        raise error(
            f"--max-batch {sequences} sequences decode a token each, but a step has at most "
            f"{tokens} tokens",
            remedy=f"raise --max-tokens to {sequences} or more, or lower --max-batch",
        )
    room, blocks, fixed = None, given["cache_blocks"], 0
    halves = strategy.turns
    if blocks is None:
        largest = largest_step(requests, -(-tokens // halves), -(-sequences // halves))
        room = models.room(timer.machine, largest, block, given.get("limit"))
        blocks, fixed = room.blocks, room.fixed
    of_ranks = groups // halves
    # half batches have room of their own, and share what is given
    blocks *= of_ranks if room is None else groups
    of_groups = tokens * of_ranks, sequences * of_ranks, blocks or None
    limits = ServerLimits(*of_groups, block, tokens, of_ranks, fixed)

    about = options, timer, session, models, groups, halves, accepted
    costs, pace = _costs(given, *about)
    start = partial(_start_time, models, timer.machine)
    plan = plan_of(given, limits.sequences, start, prefills=prefills)
    if alone > 1:  # the replicas of one job all exist from the start
        plan = replace(plan, first=None)
    ranks, stages = models.ranks // alone, _stages(options)
    return Pool(models, scheduler, outside, costs, pace, stages, limits, room, ranks, [], plan)


def _stages(options: JobOptions) -> int:
    """The pipeline stages, each of which has its own steps in flight."""
    return 1 if options.afd else max(1, options.pp)


def _costs(
    given: Mapping[str, Any],
    options: JobOptions,
    timer: StepTimer,
    session: Session,
    models: ServedModels,
    groups: int,
    halves: int,
    accepted: float,
) -> tuple[Costs, Costs | None]:
    """The costs of steps, and on several pipeline stages those of the slowest stage."""
    from stagec.time.path import shared_time
    from stagec.time.streams import PICOSECONDS

    @cache
    def plain(step: Step) -> list[TimeReport]:
        return models.each(timer.time, step)

    @cache
    def drafted(step: Step) -> list[TimeReport]:
        (each,) = step.classes
        how = {"batch": each.count * models.main.groups, "context": each.cached}
        asked = options.changed(serve=DECODE, prompt=None, **how)
        return [timer.time(job_costs(of_a_stage(asked), session))]

    costs = partial(_surface, given, groups=groups, halves=halves)

    def shared(stages: int, step: Step) -> float:
        each = (shared_time(report.step.classes) for report in plain(step))
        return models.joined(each) / PICOSECONDS / stages

    def both(of: Callable[[TimeReport], float], stages: int = 1) -> Costs:
        every: StepSurface | ExactSteps | SharedSteps
        if options.part:
            every = _apart(models.main, timer, costs)
        else:
            every = costs(lambda step: models.joined(map(of, plain(step))))
            if groups > halves:
                every = SharedSteps(every, costs(partial(shared, stages), groups=1, halves=1))
        if not options.speculative:
            return every
        verified = costs(lambda step: models.joined(map(of, drafted(step))) / accepted)
        return DraftedSteps(verified, every)

    stages = _stages(options)
    paced = partial(step_pace, stages=stages)
    pace = both(lambda report: paced(report.breakdown), stages) if stages > 1 else None
    return both(lambda report: report.step_seconds), pace


def _surface(
    given: Mapping[str, Any], seconds: Callable[[Step], float], groups: int, halves: int
) -> StepSurface | ExactSteps:
    """The costs of steps that take `seconds`."""

    def exact(step: Step) -> int:
        return max(1, round(seconds(step) * SECOND))

    points = given["step_grid"]
    if not points:
        return ExactSteps(exact, groups, halves)
    return StepSurface(exact, points, groups, halves, given["seed"])


def _apart(
    models: ServedSteps, timer: StepTimer, costs: Callable[..., StepSurface | ExactSteps]
) -> SharedSteps:
    """The costs of steps with feed-forward on ranks of its own."""

    @cache
    def seconds(step: Step) -> Sequence[float]:
        job = models.compiled(step)
        assert isinstance(job, LoweredJob)
        return [timer.time(job).step_seconds, *timer.alone(job)]

    whole, attention = (costs(partial(_nth, seconds, n)) for n in (0, 1))
    return SharedSteps(whole, costs(partial(_nth, seconds, 2), groups=1, halves=1), attention)


def _nth(seconds: Callable[[Step], Sequence[float]], n: int, step: Step) -> float:
    return seconds(step)[n]


def _start_time(models: ServedModels, machine: Machine) -> int:
    """The femtoseconds in which a rank loads its weights from its host."""
    bytes_ = models.together(most_bytes("parameters"), step_of([SequenceClass(1, 1, 1, 1)]))
    return max(1, round(bytes_ / machine.host.bandwidth.value * SECOND))


def _update(given: Mapping[str, Any], pools: Sequence[Pool], machine: Machine) -> int:
    """Femtoseconds in which servers get new weights between rollouts, over the level of the network
    that joins a rank to one of another pod. Each rank receives its own weights, in their layout and
    type; with `train_ranks` so many send those of all ranks of all replicas, in equal shares,
    whatever their own layout is. Raises `DiagnosticError`."""
    from stagec.time.costs.network import level_between_pods

    if given["update_time"] is not None and given["train_ranks"]:
        raise error(
            "--train-ranks and --update-time cannot be used together: both say how long servers "
            "wait for weights",
            remedy="leave one of them out",
        )
    if given["iterations"] is None or given["update_time"] is not None:
        return round((given["update_time"] or 0.0) * SECOND)
    step, seconds, sent = step_of([SequenceClass(1, 1, 1, 1)]), 0.0, 0.0
    for pool in pools:
        mesh = pool.models.main.builder.module.axis_sizes
        rate = level_between_pods(machine, [mesh, mesh]).bandwidth.value
        received = pool.models.together(most_bytes("parameters"), step)
        seconds = max(seconds, received / rate)
        if ranks := given["train_ranks"]:
            each = sum(pool.models.each(all_bytes("parameters"), step)) / pool.models.replicas
            sent += each * len(pool.replicas) / ranks / rate
    return round(max(seconds, sent) * SECOND)


def _swap_time(pool: Pool, machine: Machine) -> int:
    """The femtoseconds in which a rank moves the keys and values of a token to its host."""
    return max(1, round(token_bytes(pool.models) / machine.host.bandwidth.value * SECOND))


def _femtoseconds(transfer: TransferSeconds) -> Callable[[int], tuple[int, int]]:
    def sent(tokens: int) -> tuple[int, int]:
        busy, rest = transfer(tokens)
        return round(busy * SECOND), round(rest * SECOND)

    return sent
