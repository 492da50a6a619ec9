"""The placement of a job's ranks: how many ranks of each unit of a network level a job uses, and
which levels the groups of a mesh cross.

Ranks number the mesh row-major and fill one unit after another, so the groups of an axis are in
blocks: for a mesh dp=4, ep=64, those of ep are the ranks 0-63, 64-127, ... In racks of 72, the
second block would have 8 ranks in the first rack and 56 in the next; a job that uses 64 ranks of
each has whole blocks in each.

    72 ranks, mesh dp 4, ep 64     64: whole blocks of 64
    72 ranks, mesh dp 16, tp 8     64: whole blocks of 8, and dp is shared out evenly
    72 ranks, mesh dp 5, tp 16     64: whole blocks of 16; dp cannot be shared out evenly
    8 ranks, mesh dp 2, tp 6        8: nodes of a power of two are used whole
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stagec.machines.schema import Level, Machine


class Straddling(NamedTuple):
    """Groups of an axis that cross a level although its units have enough `ranks` for them: each is
    in a `block` of that many ranks. If a job used `better` ranks of each unit, none would cross
    it."""

    axis: str
    block: int
    level: str
    ranks: int
    better: int


def for_mesh(machine: Machine, mesh: Mapping[str, int]) -> Machine:
    """See `Machine.for_mesh`."""
    blocks = _blocks(mesh)
    changed = {
        level.name: level.model_copy(update={"used": used})
        for level, used, _ in _used(machine, blocks)
        if used != level.unit
    }
    last = machine.network[-1]
    if last.kind == "ring" and last.ranks is None:
        changed[last.name] = _closed(last, changed, machine, max(blocks.values(), default=1))
    if not changed:
        return machine
    network = tuple(changed.get(level.name, level) for level in machine.network)
    return machine.model_copy(update={"network": network})


def _closed(ring: Level, changed: Mapping[str, Level], machine: Machine, ranks: int) -> Level:
    """A ring level without `ranks`, closed around the units that a job of `ranks` ranks uses."""
    inner = machine.network[-2:-1]
    joined = max((level.ranks or 1 for level in inner), default=1)
    below = max((changed.get(level.name, level).unit or 1 for level in inner), default=1)
    units = -(-ranks // below)
    used = None if below == joined else units * below
    return ring.model_copy(update={"ranks": units * joined, "used": used})


def straddling(machine: Machine, mesh: Mapping[str, int]) -> Iterator[Straddling]:
    """For each level, the innermost axis whose groups cross it unnecessarily."""
    blocks, below = _blocks(mesh), 1
    stated = [level.used for level in machine.network if level.used is not None]
    ranks = max(blocks.values(), default=1)
    for level, used, whole in _used(machine, blocks):
        better = _most(whole, below, blocks)
        free = used < ranks and not any(n % better for n in stated if n > used)
        inside = {a: b for a, b in blocks.items() if free and b <= whole}
        for axis, block in inside.items():
            if used % block and better % block == 0:
                yield Straddling(axis, block, level.name, level.ranks or whole, better)
                break
        below = used


def crossed(machine: Machine, mesh: Mapping[str, int]) -> dict[str, Level | None]:
    """For each axis of two or more ranks, the innermost level that connects each of its groups;
    None if the network does not connect them."""
    blocks, used = _blocks(mesh), for_mesh(machine, mesh).network
    all_ = max(blocks.values(), default=1)

    def joins(level: Level, block: int) -> bool:
        return level.unit is None or level.unit >= all_ or level.unit % block == 0

    return {a: next((x for x in used if joins(x, b)), None) for a, b in blocks.items()}


def _blocks(mesh: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the blocks that contain the groups of each axis, the innermost axis first."""
    sizes = {a: n for a, n in reversed(list(mesh.items())) if n > 1}
    blocks, ranks = dict[str, int](), 1
    for axis, size in sizes.items():
        blocks[axis] = ranks = ranks * size
    return blocks


def _used(machine: Machine, blocks: Mapping[str, int]) -> Iterator[tuple[Level, int, int]]:
    """Each level with a number of ranks, with the number of ranks per unit that the job uses, and
    the most that it could use."""
    inside, below = 1, 1
    stated = [level.used for level in machine.network if level.used is not None]
    for level in machine.network:
        if level.ranks is None:
            return
        count = level.ranks // inside
        whole = count * below
        used = level.used or whole
        if level.used is None and count & (count - 1) and level is not machine.network[-1]:
            used = _most(whole, below, blocks)
        if any(n % used for n in stated if n >= used):
            used = whole  # the `used` of an outer level counts whole units
        yield level, used, whole
        inside, below = level.ranks, used


def _most(whole: int, below: int, blocks: Mapping[str, int]) -> int:
    """How many of `whole` ranks of a unit fit the groups of a job, in multiples of `below`: the
    largest number of whole blocks, preferably one more than half of `whole` of which larger blocks
    are multiples. All, if no whole block fits."""
    if whole >= max(blocks.values(), default=1):
        return whole
    step = lcm(below, max((b for b in blocks.values() if b <= whole), default=1))
    large = [b for b in blocks.values() if b > whole]
    numbers = range(whole // step * step, whole // 2, -step)
    even = (n for n in numbers if not any(b % n for b in large))
    return next(even, whole // step * step) or whole
