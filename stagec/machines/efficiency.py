"""How much of its peaks a machine reaches: the constants of the cost models.

All have a physical meaning. What a text does not state has the defaults below, which are published
figures of devices of its kind.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagec.machines.figures import Seconds, Share, Text
from stagec.machines.kernel_efficiency import (
    AttentionEfficiency,
    MatmulEfficiency,
    MemoryEfficiency,
)

Algorithm = Literal["ring", "tree", "multicast"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "multicast")


class Protocol(Text):
    """A way to move data over a link.

    `start`: seconds before the first byte moves. `hops`: the time of one step of an algorithm, in
    latencies of the level. `share`: the share of the bandwidth of the level that data get.
    """

    start: Seconds
    hops: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    share: Share


class NetworkEfficiency(Text):
    """Constants of the collectives and messages of one level; `fitted` says on what, or nothing.

    `protocols` are those of rings and trees, `pairs` those of messages and all_to_all, `multicast`
    that of reductions and copies in switches. The fastest is taken.
    """

    algorithms: tuple[Algorithm, ...] = ALGORITHMS
    protocols: dict[str, Protocol] = Field(min_length=1)
    pairs: dict[str, Protocol] = Field(min_length=1)
    multicast: dict[str, Protocol] = Field(min_length=1)
    fitted: str = ""


class Efficiency(Text):
    """Constants by kind of work. `network` has those of levels, by their names.

    `kernels` says how they cost: by `tiles` and the constants here, or by the `roofline` alone,
    the larger of FLOPs over the peak and bytes over the bandwidth, which has no constants.
    """

    kernels: Literal["tiles", "roofline"] = "tiles"
    matmul: MatmulEfficiency = MatmulEfficiency()
    attention: AttentionEfficiency = AttentionEfficiency()
    memory: MemoryEfficiency = MemoryEfficiency()
    network: dict[str, NetworkEfficiency] = Field(default_factory=dict)


_NCCL_INSIDE = {
    "ll": {"start": "6.6 us", "hops": 1.0, "share": 0.25},
    "ll128": {"start": "14 us", "hops": 3.0, "share": 0.85},
    "simple": {"start": "8.4 us", "hops": 5.7, "share": 0.92},
}
_NCCL_OUTSIDE = {
    "ll": {"start": "6.6 us", "hops": 1.0, "share": 0.25},
    "ll128": {"start": "14 us", "hops": 1.5, "share": 0.85},
    "simple": {"start": "8.4 us", "hops": 5.2, "share": 0.92},
}
_NVLS = {"simple": {"start": "48 us", "hops": 0.0, "share": 0.85}}


def network_defaults(kind: str) -> dict[str, object]:
    """The constants of a level whose text states none, as they would stand in it.

    Source: github.com/NVIDIA/nccl, src/graph/tuning.cc: baseLat, hwLat over the hop of protocol LL,
    bandwidth factors of the protocols, efficiency of NVLS on Hopper.
    """
    protocols = _NCCL_OUTSIDE if kind == "fat-tree" else _NCCL_INSIDE
    return {"protocols": protocols, "pairs": protocols, "multicast": _NVLS}
