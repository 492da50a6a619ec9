"""A machine as the dimensions of ASTRA-sim's network.

Ranks number the mesh row-major, and ASTRA-sim's dimension 0 is the fastest, so the axes of the mesh
become dimensions innermost first, one each. An axis takes the innermost level of the machine that
joins all ranks of each of its groups:

    mesh dp=4, tp=4, levels of 8 ranks (nvlink) and of any number (infiniband)
    tp -> 4 over nvlink;  dp -> 4 over infiniband, though pairs of its ranks share a node

An axis is not cut where it leads out of a level. A ring is as fast as its slowest link, and
ASTRA-sim sends between ranks that differ along two dimensions by the link of the inner one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from stagec.machines import Level, Machine
from stagec.machines.placement import crossed
from stagec.support.diagnostics import error

#: ASTRA-sim's GB, analytical/common/NetworkFunction.cpp.
GIB = 2**30
_KINDS = {"switch": "Switch", "fat-tree": "Switch", "ring": "Ring", "mesh": "FullyConnected"}


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension: `ranks` of them along `axis`, over a level of the machine.

    `bandwidth` is that of one link and direction, in GiB/s, `latency` that of one link, in ns.
    """

    axis: str
    ranks: int
    level: str
    kind: str
    bandwidth: float
    latency: float


def dimensions(mesh: Mapping[str, int], machine: Machine) -> list[Dimension]:
    """The dimensions of a job, innermost first, each of two ranks at least; their product is the
    number of ranks. Raises `DiagnosticError` for a job of one rank, and for one that the machine
    does not join."""
    ranks = prod(mesh.values())
    if ranks == 1:
        raise error(
            "the job has one rank, and ASTRA-sim's network has two at least",
            remedy="add --dp 2: both ranks then do the same",
        )
    levels = crossed(machine, mesh)
    found = [_dimension(a, mesh[a], level) for a, level in levels.items() if level is not None]
    if len(found) < len(levels):
        raise error(
            f"the job has {ranks} ranks, and '{machine.name}' joins {machine.network[-1].unit}",
            remedy="choose a smaller mesh, or a machine with a further level",
        )
    return found


def _dimension(axis: str, ranks: int, level: Level) -> Dimension:
    kind = _KINDS[level.kind]
    if kind == "Ring" and ranks == 2:
        kind = "Switch"  # a ring of two has two links between the same ranks
    links = {"Switch": 1, "Ring": 2, "FullyConnected": ranks - 1}[kind]
    bandwidth = level.bandwidth.value / level.oversubscription / links / GIB
    hops = 2 if kind == "Switch" else 1  # to the switch, and from it
    latency = level.latency.value * 1e9 / hops
    return Dimension(axis, ranks, level.name, kind, bandwidth, latency)


def network_text(dims: list[Dimension]) -> str:
    """`network.yml`: lists of one length, one entry a dimension."""
    columns: dict[str, tuple[Sequence[object], str]] = {
        "topology": ([d.kind for d in dims], "innermost first: " + _axes(dims)),
        "npus_count": ([d.ranks for d in dims], ""),
        "bandwidth": ([d.bandwidth for d in dims], "GB/s of 2^30 bytes, a link and direction"),
        "latency": ([d.latency for d in dims], "ns of a link"),
    }
    lines = (
        f"{key}: [ {', '.join(map(str, values))} ]" + (f"  # {text}" if text else "")
        for key, (values, text) in columns.items()
    )
    return "".join(f"{line}\n" for line in lines)


def _axes(dims: list[Dimension]) -> str:
    return ", ".join(f"{d.axis} {d.ranks} over {d.level}" for d in dims)
