"""Which ranks of a job sit together: how many of the ranks that a unit of a level of the network
joins a job uses, and the levels that the groups of a mesh cross.

Ranks number the mesh row-major and fill unit after unit, so the groups of an axis lie in blocks: of
mesh dp=4, ep=64 those of ep are the ranks 0-63, 64-127, ... In racks of 72 the second block would
have 8 ranks in the first rack and 56 in the next; a job that uses 64 of each has whole blocks in
each.

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
    """Groups of an axis that cross a level a unit of which, of so many `ranks`, has room for them:
    each lies in a `block` of so many. With `better` used ranks none crosses it."""

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
    if not changed:
        return machine
    network = tuple(changed.get(level.name, level) for level in machine.network)
    return machine.model_copy(update={"network": network})


def straddling(machine: Machine, mesh: Mapping[str, int]) -> Iterator[Straddling]:
    """For each level the innermost axis whose groups cross it without need."""
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
    """For each axis of two ranks or more the innermost level that joins each of its groups; None
    for what the network does not join."""
    blocks, used = _blocks(mesh), for_mesh(machine, mesh).network
    all_ = max(blocks.values(), default=1)

    def joins(level: Level, block: int) -> bool:
        return level.unit is None or level.unit >= all_ or level.unit % block == 0

    return {a: next((x for x in used if joins(x, b)), None) for a, b in blocks.items()}


def _blocks(mesh: Mapping[str, int]) -> dict[str, int]:
    """The ranks of the blocks in which the groups of each axis lie, the innermost axis first."""
    sizes = {a: n for a, n in reversed(list(mesh.items())) if n > 1}
    blocks, ranks = dict[str, int](), 1
    for axis, size in sizes.items():
        blocks[axis] = ranks = ranks * size
    return blocks


def _used(machine: Machine, blocks: Mapping[str, int]) -> Iterator[tuple[Level, int, int]]:
    """Each level that joins a number of ranks, how many of them the job uses, and the most that it
    could."""
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
            used = whole  # what a text says of an outer level goes by whole units
        yield level, used, whole
        inside, below = level.ranks, used


def _most(whole: int, below: int, blocks: Mapping[str, int]) -> int:
    """The ranks of a unit that go with the groups of a job, of so many in units of `below`: the
    most that are whole blocks, and of those that are more than half of them rather such that
    larger blocks are whole units too. All, if no number is whole blocks."""
    if whole >= max(blocks.values(), default=1):
        return whole
    step = lcm(below, max((b for b in blocks.values() if b <= whole), default=1))
    large = [b for b in blocks.values() if b > whole]
    numbers = range(whole // step * step, whole // 2, -step)
    even = (n for n in numbers if not any(b % n for b in large))
    return next(even, whole // step * step) or whole
