"""Hosts: what they cost nodes, and whether they can ever be late.

The times of a replay are the least ones that keep all orders. So hosts are never behind devices if
there are times for them that keep all orders, and are no later than those of devices wherever it
matters. Such times are looked for piece by piece: each piece is run with what it costs hosts, in
every state in which devices met it.

    device   norm 0..10    gather 10..310    product 310..610    send 610
    host     norm 0..100   gather 100..100   product 100..200    send 200

The norm is late, what is sent is not. A later piece may wait for the norm, if hosts start it late
enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from stagec.ir_spec.ops.optimizer import AccumulateGrad
from stagec.program.groups import GroupAxes
from stagec.time.clock.pieces import Entry, Piece
from stagec.time.clock.replay import ClassReplay
from stagec.time.clock.shapes import Shape, ShapeNode
from stagec.time.streams import Cost

#: The kind of nodes that add gradients up.
_SUM = AccumulateGrad.name.partition(".")[2]


class HostTimes(NamedTuple):
    """Picoseconds that a host spends on a computation, and on a collective of a group."""

    issue: int
    checks: tuple[tuple[GroupAxes, int], ...] = ()


class _Late(NamedTuple):
    """A place of a piece at which hosts are late, and when they are done there."""

    place: int
    end: int


def host_costs(spent: HostTimes, shape: Shape) -> list[Cost]:
    """What nodes cost their host."""
    some, none = Cost(0, spent.issue), Cost(0)
    calls = {axes: Cost(time) for axes, time in spent.checks}
    return [some if _is_issued(step) else calls.get(step.node.group, none) for step in shape.steps]


def _is_issued(step: ShapeNode) -> bool:
    """Whether a node counts. Optimizers launch few kernels, each for many parameters; sums of
    gradients are launched by the engine of backward itself, with no call of a module (PyTorch,
    torch/csrc/autograd/functions/accumulate_grad.cpp)."""
    node = step.node
    return node.is_computation and node.phase != "optimizer" and node.kind != _SUM


def never_late(devices: Sequence[ClassReplay], spent: HostTimes) -> bool:
    """Whether hosts are surely never behind these devices where classes meet, and at the end.
    What they spend on collectives that join classes is not looked at."""
    hosts: dict[Entry, Entry] = {}
    for piece in {piece for each in devices for piece in each.pieces}:
        host = Piece(piece.shape, host_costs(spent, piece.shape))
        for state, device in piece.met:
            found = hosts[device] = host.entry(state._replace(busy=()), 0)
            if not _leaves_in_time(piece.shape, found, device):
                return False
    late = {device: dict(_late(host, device)) for device, host in hosts.items()}
    return all(_waits_in_time(each, hosts, late) for each in devices)


def _leaves_in_time(shape: Shape, host: Entry, device: Entry) -> bool:
    """Whether what comes after a piece on its streams, and to other classes, is not late."""
    return (
        host.compute <= device.compute
        and all(h <= d for (h, _), (d, _) in zip(host.streams, device.streams, strict=True))
        and all(host.ends[place] <= device.ends[place] for place, _ in shape.sends)
    )


def _late(host: Entry, device: Entry) -> Iterator[_Late]:
    ends = zip(host.ends, device.ends, strict=True)
    return (_Late(place, h) for place, (h, d) in enumerate(ends) if h > d)


def _waits_in_time(
    mine: ClassReplay,
    hosts: Mapping[Entry, Entry],
    late: Mapping[Entry, Mapping[int, int]],
) -> bool:
    """Whether what waits for a late node of another piece starts late enough on hosts. What joins
    classes starts there when it does on devices."""
    entries, bases = mine.entries, mine.bases
    waiting = cache(_waiting)
    for number, (shape, inputs) in enumerate(mine.plan):
        for i, (source, place) in enumerate(inputs):
            before = entries[source]
            if before is None or place not in late[before]:
                continue
            done, entry = bases[source] + late[before][place], entries[number]
            starts = [0] if entry is None else hosts[entry].starts
            if any(done > bases[number] + starts[place] for place in waiting(shape)[i]):
                return False
    return True


def _waiting(shape: Shape) -> Sequence[Sequence[int]]:
    """The places that wait for each input of a shape."""
    found: list[list[int]] = [[] for _ in shape.floors]
    for place, step in enumerate(shape.steps):
        for i in step.inputs:
            found[i].append(place)
    return found
