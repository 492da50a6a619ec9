"""From the options of a server to its simulation, and to an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from stagec.analysis.serving_rates import step_pace
from stagec.answers.requests.answer import RequestsAnswer, answer_of
from stagec.answers.requests.fleet_options import failures, plan_of, replicas_of, scaling_of
from stagec.answers.requests.options import asked_requests, page_of, prefix_block, rollouts_of
from stagec.answers.requests.tiers import most_bytes, tiers_below, token_bytes
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.ir_spec.strategy.hosts import HostsRule
from stagec.ir_spec.strategy.moe import MoeRule
from stagec.ir_spec.strategy.part import MAIN
from stagec.ir_spec.strategy.scheduler import SchedulerRule
from stagec.jobs.admission import Room, largest_step
from stagec.jobs.lowered import job_costs
from stagec.jobs.pod_options import options_of_draft, options_of_pod
from stagec.jobs.request.acceptance import take_acceptance
from stagec.jobs.request.options import IDEAL, JobOptions
from stagec.jobs.request.serving_flags import DISAGGREGATED, check_draft
from stagec.jobs.served_models import ServedModels
from stagec.jobs.session import Session
from stagec.jobs.stage_steps import of_a_stage
from stagec.jobs.step_surface import DraftedSteps, ExactSteps, StepSurface
from stagec.jobs.step_timer import StepTimer
from stagec.serving.adapters import AdapterSlots
from stagec.serving.fleet import FleetPlan
from stagec.serving.pipelined import PipelinedReplica
from stagec.serving.policy import ServerLimits
from stagec.serving.replica import Replica
from stagec.serving.requests import Request, turns
from stagec.serving.routing import ROUTERS
from stagec.serving.simulate import Simulation
from stagec.serving.step import SequenceClass, Step, step_of
from stagec.serving.step_times import SECOND
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import Diagnostic, error

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.machines import Machine

#: Seconds for which the link of a pod is busy with the caches of a prompt of so many tokens, and
#: those that are left behind the step.
Handover = Callable[[int], tuple[float, float]]
#: Femtoseconds of steps.
Costs: TypeAlias = StepSurface | ExactSteps | DraftedSteps


@dataclass
class Pool:
    """Replicas that are alike: what compiles and schedules their steps, how many seconds hosts
    take for a request outside of these, how long they take, and on pipeline stages the slowest one
    for them, what each holds, how many ranks each has, and how they come and go."""

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
    handover: Callable[[JobOptions], Handover],
) -> RequestsAnswer:
    """Serve requests over time; `handover` is asked for that of two pods. Raises
    `DiagnosticError`, `OSError`."""
    with session.once() as aside, session.progress("serving", "requests") as progress:
        server = made_server(options, timer, given, aside, handover, progress)
        run, every = server.run, server.requests
        try:
            run.run()
        except KeyboardInterrupt:
            session.log(f"interrupted with {len(run.done):,} of {len(every):,} requests served")
            raise
        answer = answer_of(timer.machine, given, every, run, server.pools, server.outside)
        return replace(answer, costed_by=timer.measured_counts(session))


@dataclass(frozen=True)
class MadeServer:
    """A server before it runs: its requests, each turn of a conversation one, and its replicas by
    what they do."""

    requests: Sequence[Request]
    pools: Mapping[str, Pool]
    run: Simulation

    @property
    def outside(self) -> float:
        """The seconds that hosts take for a request outside of its steps."""
        return self.pools[PREFILL if PREFILL in self.pools else DECODE].outside


def made_server(
    options: JobOptions,
    timer: StepTimer,
    given: Mapping[str, Any],
    session: Session,
    handover: Callable[[JobOptions], Handover],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MadeServer:
    """The server of options and the requests to it. Raises `DiagnosticError`, `OSError`."""
    two_pods = options.serve == DISAGGREGATED
    _refuse(options, given, two_pods=two_pods)
    requests = asked_requests(options, given)
    every = list(turns(requests))
    pools = _pools(options, timer, given, every, session, two_pods=two_pods)
    decode = pools[DECODE]
    prefills = pools[PREFILL].replicas if two_pods else []
    sent = _femtoseconds(handover(_prompted(options, every))) if two_pods else None
    update = max(_update(given, pool.models, timer.machine) for pool in pools.values())
    _check(every, list(pools.values()), session)
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
    server = MadeServer(every, pools, run)
    run.outside = round(server.outside * SECOND)
    return server


def _refuse(options: JobOptions, given: Mapping[str, Any], *, two_pods: bool) -> None:
    """Raise `DiagnosticError` for options that this server does not take."""
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
        options_of_draft(MAIN, options.draft, options)  # refuses what makes other pods
    if options.part:
        raise error(
            "--part cannot be used with requests over time, whose steps are of one pod",
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


def _prompted(options: JobOptions, requests: Sequence[Request]) -> JobOptions:
    """Options of pods, with a prompt."""
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
    """The replicas that decode, and of two pods those that prefill. A step that verifies drafts
    gives each sequence the tokens that are accepted on average, one by one: each takes its share
    of the step. Raises `DiagnosticError`."""
    accepted = take_acceptance(options, given).tokens
    each = {DECODE: options}
    if two_pods:
        asked = _prompted(options, requests)
        each = {pod: options_of_pod(pod, asked) for pod in (PREFILL, DECODE)}
    first = 0
    pools: dict[str, Pool] = {}
    for pod, own in each.items():
        prefills = pod == PREFILL
        copies = replicas_of(given, prefills=prefills)[1]
        pool = _pool(own, timer, given, requests, session, accepted, prefills=prefills)
        alone = pool.models.replicas
        swap = _swap(pool, timer.machine) if given["preempt"] == "swap" else 0
        computes = prefills or not two_pods
        kept = prefix_block(own, given, requests) if computes else 0
        tiers = tiers_below(pool.models, timer.machine, given, kept) if computes else None
        load = _load(own, timer.machine, session) if any(r.adapter for r in requests) else 0
        made: Callable[..., Replica] = Replica
        if pool.pace is not None:
            made = partial(PipelinedReplica, pace=pool.pace, stages=pool.stages)
        pool.replicas += (
            made(
                first + number,
                pool.limits,
                pool.costs,
                prefix_block=kept,
                tiers=tiers() if tiers is not None else None,
                swap=swap,
                prefills=prefills,
                scheduler=pool.scheduler,
                adapters=AdapterSlots(own.max_loras, load) if load else None,
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
    outside = strategy.one(HostsRule).request_seconds
    tokens, sequences = given["max_tokens"] or scheduler.tokens, given["max_batch"]
    if sequences > tokens:
        raise error(
            f"--max-batch {sequences} sequences decode a token each, but a step has at most "
            f"{tokens} tokens",
            remedy=f"raise --max-tokens to {sequences} or more, or lower --max-batch",
        )
    room, blocks, fixed = None, given["cache_blocks"], 0
    halves = strategy.one(MoeRule).halves * max(1, strategy.microbatches)
    if blocks is None:
        largest = largest_step(requests, -(-tokens // halves), -(-sequences // halves))
        room = models.room(timer.machine, largest, block, given.get("limit"))
        blocks, fixed = room.blocks, room.fixed
    of_ranks = groups // halves
    of_groups = tokens * of_ranks, sequences * of_ranks, blocks * groups or None
    limits = ServerLimits(*of_groups, block, tokens, of_ranks, fixed)

    about = options, timer, session, models, groups, halves, accepted
    costs, pace = _costs(given, *about)
    start = partial(_start, models, timer.machine)
    plan = plan_of(given, limits.sequences, start, prefills=prefills)
    if alone > 1:  # all of them are there
        plan = replace(plan, first=None)
    ranks, stages = models.ranks // alone, _stages(options)
    return Pool(models, scheduler, outside, costs, pace, stages, limits, room, ranks, [], plan)


def _stages(options: JobOptions) -> int:
    """Pipeline stages with steps of their own."""
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
    """How long steps take, and on pipeline stages how long the slowest one takes for them."""

    @cache
    def plain(step: Step) -> list[TimeReport]:
        return models.each(timer.time, step)

    @cache
    def drafted(step: Step) -> list[TimeReport]:
        (each,) = step.classes
        how = {"batch": each.count * models.main.groups, "context": each.cached}
        asked = options.changed(serve=DECODE, prompt=None, **how)
        return [timer.time(job_costs(of_a_stage(asked), session))]

    def costs(
        of: Callable[[TimeReport], float], step: Callable[[Step], list[TimeReport]], tokens: float
    ) -> StepSurface | ExactSteps:
        def exact(each: Step) -> int:
            return max(1, round(models.joined(map(of, step(each))) * SECOND / tokens))

        points = given["step_grid"]
        if not points:
            return ExactSteps(exact, groups, halves)
        return StepSurface(exact, points, groups, halves, given["seed"])

    def both(of: Callable[[TimeReport], float]) -> Costs:
        every = costs(of, plain, 1.0)
        return DraftedSteps(costs(of, drafted, accepted), every) if options.speculative else every

    stages = _stages(options)
    paced = partial(step_pace, stages=stages)
    pace = both(lambda report: paced(report.breakdown)) if stages > 1 else None
    return both(lambda report: report.step_seconds), pace


def _start(models: ServedModels, machine: Machine) -> int:
    """Femtoseconds in which the weights of a rank come from its host."""
    bytes_ = models.together(most_bytes("parameters"), step_of([SequenceClass(1, 1, 1, 1)]))
    return max(1, round(bytes_ / machine.host.bandwidth.value * SECOND))


def _update(given: Mapping[str, Any], models: ServedModels, machine: Machine) -> int:
    """Femtoseconds in which a rank gets new weights between rollouts, over the level of the network
    that joins it to one of another pod. Raises `DiagnosticError`."""
    from stagec.time.costs.network import level_between_pods

    if given["iterations"] is None or given["update_time"] is not None:
        return round((given["update_time"] or 0.0) * SECOND)
    bytes_ = models.together(most_bytes("parameters"), step_of([SequenceClass(1, 1, 1, 1)]))
    mesh = models.main.builder.module.axis_sizes
    return round(bytes_ / level_between_pods(machine, [mesh, mesh]).bandwidth.value * SECOND)


def _load(options: JobOptions, machine: Machine, session: Session) -> int:
    """Femtoseconds in which an adapter of a rank comes from its host: the bytes of one more slot,
    of the modules that it is for. Raises `DiagnosticError`."""
    one, two = (
        ServedModels.of(options.changed(max_loras=slots, stack=IDEAL), session).together(
            most_bytes("parameters"), step_of([SequenceClass(1, 1, 1, 1)])
        )
        for slots in (1, 2)
    )
    return max(1, round((two - one) / machine.host.bandwidth.value * SECOND))


def _swap(pool: Pool, machine: Machine) -> int:
    """Femtoseconds in which a token's keys and values of a rank go to its host."""
    return max(1, round(token_bytes(pool.models) / machine.host.bandwidth.value * SECOND))


def _check(requests: Sequence[Request], pools: Sequence[Pool], session: Session) -> None:
    """Refuse requests that no replica ever has room for, and warn of those that reach further than
    the model was trained for."""
    longest = max(requests, key=lambda r: r.prompt + r.output)
    serving = pools[0].models.main.builder.serving
    positions, last = serving.positions if serving is not None else 0, longest.prompt
    last += longest.output - 1
    if positions and last > positions:
        text = f"requests reach position {last:,}, beyond the {positions:,} of the model"
        session.report(Diagnostic(text, longest.loc, severity="warning"))
    for pool in pools:
        limits = pool.limits
        if limits.blocks is None:
            continue
        needed = limits.blocks_for(longest.prompt + longest.output - 1)
        if needed > limits.blocks:
            raise error(
                f"a request with a prompt of {longest.prompt:,} and an output of "
                f"{longest.output:,} tokens needs {needed:,} blocks of {limits.block} tokens, but "
                f"the cache of a replica has {limits.blocks:,}",
                longest.loc,
                remedy="split the model over more ranks, store caches in few bits (--kv-dtype "
                "fp8), or leave the request out",
            )


def _femtoseconds(handover: Handover) -> Callable[[int], tuple[int, int]]:
    def sent(tokens: int) -> tuple[int, int]:
        busy, rest = handover(tokens)
        return round(busy * SECOND), round(rest * SECOND)

    return sent
