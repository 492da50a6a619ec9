"""The room of a server for caches: the blocks that fit into the memory of a machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from stagec.analysis.memory_fit import room_of
from stagec.ir_spec.strategy.scheduler import SchedulerRule
from stagec.jobs.request.limit import AT_HAND, Limit
from stagec.jobs.step_modules import StepModules
from stagec.machines import Machine
from stagec.memory.timeline import CACHES, STATIC
from stagec.serving.requests import Request
from stagec.serving.step import SequenceClass, Step, step_of
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import error


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
    models: Sequence[StepModules],
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

    full = [each.compiled(largest).figures() for each in models]
    mesh = full[0].mesh
    if limit is None or limit.text == AT_HAND:
        scheduler = read_strategy(models[0].builder.module).one(SchedulerRule)
        room = scheduler.room(room_of(machine, mesh))
    else:
        room = limit.room(mesh)
    stages = list(zip(*(each.by_stage for each in full), strict=True))
    taken = [sum(map(_weights, memory)) + max(map(_passing, memory)) for memory in stages]
    if max(taken) > room:
        needed, left, over = map(bytes_text, (max(taken), room, max(taken) - room))
        raise error(
            f"weights and the activations of a step of {largest.tokens:,} tokens need {needed} "
            f"per rank, but {machine.name} has {left}: {over} are missing",
            remedy="split the model over more ranks (--tp, --pp, --ep), store weights in fewer "
            "bits (--weight-dtype fp8), or add --cache-blocks all, which ignores the memory of the "
            "machine",
        )
    ranks = prod(mesh.values())
    one, two = (_cached(models, SequenceClass(1, n * tokens - 1, 1, ranks)) for n in (1, 2))
    each = [more - c or c for c, more in zip(one, two, strict=True)]  # of a block
    blocks = [(room - memory) * ranks // c for memory, c in zip(taken, each, strict=True) if c]
    fixed = (-(-(c - block) // block) for c, block in zip(one, each, strict=True) if block)
    return Room(room, max(taken), min(blocks, default=0), max(fixed, default=0))


def _cached(models: Sequence[StepModules], sequences: SequenceClass) -> list[int]:
    """The bytes that a rank of each stage caches of sequences."""
    kept = (each.compiled(step_of([sequences])).figures().by_stage for each in models)
    stages = zip(*kept, strict=True)
    return [sum(memory.get(CACHES, 0) for memory in stage) for stage in stages]


def _weights(memory: Mapping[str, int]) -> int:
    """Bytes that stay in all steps, without caches."""
    return sum(memory.get(name, 0) for name in STATIC)


def _passing(memory: Mapping[str, int]) -> int:
    """Bytes of activations."""
    return sum(memory.values()) - memory.get(CACHES, 0) - _weights(memory)
