"""The room of a server for caches: the blocks that fit into the memory of a machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import sub

from stagec.ir_spec.strategy.scheduler import SchedulerRule
from stagec.jobs.figures import CompiledJob
from stagec.jobs.lowered import LoweredJob, rooms_of
from stagec.jobs.request.limit import AT_HAND, Limit
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.steps import BLOCK
from stagec.jobs.session import Session
from stagec.jobs.step_modules import ServedSteps
from stagec.machines import Machine
from stagec.memory.timeline import CACHES, STATIC
from stagec.serving.policy import ServerLimits
from stagec.serving.requests import HASH_BLOCK, Request
from stagec.serving.step import SequenceClass, Step, step_of
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import Diagnostic, error


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a rank of a server: `room` bytes in all, of which weights and the activations
    of the largest step take `taken`. The rest has room for `blocks` blocks of cache of each group
    of ranks. A sequence takes `fixed` blocks in addition to those of its tokens: keys and values of
    an encoder, and states of layers."""

    room: int
    taken: int
    blocks: int
    fixed: int = 0


def largest_step(requests: Sequence[Request], tokens: int, sequences: int) -> Step:
    """A step with `tokens` tokens: a decode of each of `sequences` sequences, and prompts as long
    as the longest one for the rest."""
    decodes = min(sequences, len(requests), tokens)
    longest = max(r.prompt for r in requests)
    prompt = min(longest, max(1, tokens - decodes))
    count = min(len(requests), (tokens - decodes) // prompt)
    decode, prefill = SequenceClass(1, 1, 1, decodes), SequenceClass(prompt, 0, 1, count)
    return step_of([decode, prefill] if count else [decode])


def cache_room(
    models: Sequence[ServedSteps],
    machine: Machine,
    largest: Step,
    tokens: int,
    limit: Limit | None = None,
) -> Room:
    """The room for caches in addition to weights and the activations of the `largest` step, in
    blocks of `tokens` tokens. The memory is the share of the machine that `stg.scheduler` states,
    or a `limit` of a rank. `models` take turns on the same ranks; the first one is served. Layers
    with a window count as if they cached all tokens. Raises `DiagnosticError` if weights and
    activations do not fit."""
    from stagec.output.tables import bytes_text

    jobs = [[each.compiled(step) for step in each.apart(largest)] for each in models]
    rooms = _rooms(models[0], jobs[0][0], machine, limit)
    each_taken = [[*map(_taken, zip(*map(_stages, steps), strict=True))] for steps in jobs]
    stages = list(zip(*each_taken, strict=True))
    taken = [sum(w for w, _ in memory) + max(p for _, p in memory) for memory in stages]
    least, most, room = max(zip(map(sub, taken, rooms), taken, rooms, strict=True))
    if least > 0:
        needed, left, over = map(bytes_text, (most, room, least))
        raise error(
            f"weights and the activations of a step of {largest.tokens:,} tokens need {needed} "
            f"per rank, but {machine.name} has {left}: {over} are missing",
            remedy="split the model over more ranks (--tp, --pp, --ep), store weights in fewer "
            "bits (--weight-dtype fp8), or add --cache-blocks all, which ignores the memory of the "
            "machine",
        )
    ranks = models[0].ranks
    one, two = (_cached(models, SequenceClass(1, n * tokens - 1, 1, ranks)) for n in (1, 2))
    each = [more - c or c for c, more in zip(one, two, strict=True)]  # of a block
    free = map(sub, rooms, taken)
    blocks = [left * ranks // c for left, c in zip(free, each, strict=True) if c]
    fixed = (-(-(c - block) // block) for c, block in zip(one, each, strict=True) if block)
    return Room(room, most, min(blocks, default=0), max(fixed, default=0))


def _rooms(
    models: ServedSteps, job: CompiledJob | LoweredJob, machine: Machine, limit: Limit | None
) -> list[int]:
    """The bytes that a rank of each stage may use."""
    figures = job.figures()
    rooms = rooms_of(job, figures, machine, limit)
    if limit is None or limit.text == AT_HAND:
        scheduler = read_strategy(models.builder.module).one(SchedulerRule)
        rooms = [scheduler.room(room) for room in rooms]
    return [room for pod, room in zip(figures.each, rooms, strict=True) for _ in pod.by_stage]


def _stages(job: CompiledJob | LoweredJob) -> list[Mapping[str, int]]:
    """The memory of a rank of each stage, of all pods."""
    return [stage for pod in job.figures().each for stage in pod.by_stage]


def _taken(steps: Sequence[Mapping[str, int]]) -> tuple[int, int]:
    """The bytes of weights of a stage, and the most bytes of activations in any of these steps."""
    return max(map(_weights, steps)), max(map(_passing, steps))


def _cached(models: Sequence[ServedSteps], sequences: SequenceClass) -> list[int]:
    """The bytes that a rank of each stage caches of sequences."""
    kept = (_stages(each.compiled(step_of([sequences]))) for each in models)
    stages = zip(*kept, strict=True)
    return [sum(memory.get(CACHES, 0) for memory in stage) for stage in stages]


def _weights(memory: Mapping[str, int]) -> int:
    """Bytes that stay in all steps, without caches."""
    return sum(memory.get(name, 0) for name in STATIC)


def _passing(memory: Mapping[str, int]) -> int:
    """Bytes of activations."""
    return sum(memory.values()) - memory.get(CACHES, 0) - _weights(memory)


def page_of(options: JobOptions) -> int:
    """The tokens of a block of the cache."""
    return options.page if options.page > 1 else BLOCK


def prefix_block(options: JobOptions, requests: Sequence[Request]) -> int:
    """The tokens of a block of the prefix cache; 0 if no request states its prefix. Raises
    `DiagnosticError` if pages of the cache do not divide a block."""
    page = page_of(options)
    if not any(request.prefix for request in requests):
        return 0
    if HASH_BLOCK % page:
        raise error(
            f"pages of {page} tokens do not divide the {HASH_BLOCK} tokens of a block in hash_ids",
            remedy=f"choose a divisor of {HASH_BLOCK}, such as --page 16",
        )
    return HASH_BLOCK


def check_requests(
    requests: Sequence[Request], model: ServedSteps, every: Sequence[ServerLimits], session: Session
) -> None:
    """Refuse requests that exceed the cache of a replica with one of these limits, and warn of
    requests beyond the positions of the model."""
    longest = max(requests, key=lambda r: r.prompt + r.output)
    serving = model.builder.serving
    positions, last = serving.positions if serving is not None else 0, longest.prompt
    last += longest.output - 1
    if positions and last > positions:
        text = f"requests reach position {last:,}, beyond the {positions:,} of the model"
        session.report(Diagnostic(text, longest.loc, severity="warning"))
    for limits in every:
        needed = limits.blocks_for(last)
        if limits.blocks is not None and needed > limits.blocks:
            raise error(
                f"a request with a prompt of {longest.prompt:,} and an output of "
                f"{longest.output:,} tokens needs {needed:,} blocks of {limits.block} tokens, but "
                f"the cache of a replica has {limits.blocks:,}",
                longest.loc,
                remedy="split the model over more ranks, store caches in few bits (--kv-dtype "
                "fp8), or leave the request out",
            )
