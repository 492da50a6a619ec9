"""How much of its peaks a machine reaches: the constants of the cost models.

All have a physical meaning. What a text does not state has the defaults below, which are published
figures of devices of its kind.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from stagec.machines.figures import Bytes, Seconds, Share, Text
from stagec.machines.kernel_efficiency import (
    AttentionEfficiency,
    MatmulEfficiency,
    MemoryEfficiency,
)

#: Kernels of all_reduces that read the memory of other ranks.
Direct = Literal["one_shot", "two_shot", "messages"]
Algorithm = Literal["ring", "tree", "multicast", "hierarchical"]


class Protocol(Text):
    """A way to move data over a link.

    `start`: seconds before the first byte moves. `hops`: the time of one step of an algorithm, in
    latencies of the level. `share`: the share of the bandwidth of the level that data get. `copy`:
    the cost of the part that stays on a rank and is copied there, in parts that move. `adds`: how
    often a ring moves what it adds through the memory of the device while no link moves it (0: what
    is added meanwhile hides). `gap`: seconds that a link of the level needs for each message of a
    ring beside its bytes.
    """

    start: Seconds
    hops: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    share: Share = 1.0
    copy_: Annotated[float, Field(ge=0, allow_inf_nan=False, alias="copy")] = 0.0
    adds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    gap: Seconds = 0.0


class NetworkEfficiency(Text):
    """Constants of the collectives and messages of one level; `fitted` says on what, if at all.

    `protocols` are those of rings and trees, `pairs` those of messages and all_to_all, `multicast`
    that of reductions in switches. The fastest is taken.
    `check`: seconds that a collective holds up the hosts of its group for each rank that it reaches
    over the level, where ranks compare what they call before they call it (PyTorch,
    `TORCH_DISTRIBUTED_DEBUG=DETAIL`: a barrier in which rank 0 asks one rank after the other).
    `direct` are those of kernels of engines that reach the memory of other ranks: all_reduces in
    `one_shot` and `two_shot` (`stg.collectives`), and `messages` of tokens to experts (DeepEP, see
    `stg.moe`); a level without them has the communication library only. `direct_fitted` says on
    what they were fitted.
    """

    protocols: dict[str, Protocol] = Field(min_length=1)
    pairs: dict[str, Protocol] = Field(min_length=1)
    multicast: Protocol
    check: Seconds = 0.0
    direct: dict[Direct, Protocol] = Field(default_factory=dict[Direct, Protocol])
    direct_fitted: str = ""
    fitted: str = ""


class Interference(Text):
    """What collectives and computations that run at once cost each other.

    `computations`: the share of a computation's speed that a collective beside it takes (processors
    and memory bandwidth). `collectives`: how many times as long a collective takes that is issued
    to run beside computations.
    """

    computations: Annotated[float, Field(ge=0, lt=1)] = 0.0
    collectives: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    fitted: str = ""


class Sustained(Text):
    """What is left in a step of what kernels reach alone.

    `products`: the share of the speed of matrix products and of attention. Tables time kernels for
    milliseconds on a cool device; in a step that goes on for hours its power is limited, and so is
    its clock. `experts`: what grouped products of experts keep of that, where a framework says it
    (`stg.sustained`). `power`: times what stacks say of the family. At a limit of power a clock
    follows its 2/3 power (H100 at 500 and 700 W: 0.615 and 0.77 of the same peak), so that
    is (P / P')^(2/3) (peak' / peak), with P' and peak' of the family's first device.
    """

    products: Share = 1.0
    experts: Share = 1.0
    power: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    fitted: str = ""


class Host(Text):
    """The program that launches kernels.

    `issue`: seconds from one computation to the next, where devices wait for it: a framework
    without a compiler or graphs runs its own code between any two (PyTorch, autograd).
    """

    issue: Seconds = 0.0
    fitted: str = ""


class Rendezvous(Text):
    """Messages that wait for their receiver, instead of being kept somewhere until it takes them.

    `above`: those of more bytes wait. `handshake`: the bytes of the message by which the receiver
    says that it is there, over the same links the other way (0: it takes their latency alone). What
    collectives wait for is in the constants of their protocols.
    """

    above: Bytes
    handshake: Bytes = 0


class Efficiency(Text):
    """Constants by kind of work.

    `kernels` says how kernels cost: by `tiles` and the constants here, or by the `roofline` alone,
    the larger of FLOPs over the peak and bytes over the bandwidth, without constants: nor those of
    hosts and of what is sustained.
    `collectives` are the algorithms that the communication library has, `network` the constants of
    each level of the network, by its name. `streams` says how a device communicates: on one stream
    for `each` communicator and neighbour, as frameworks do, or on `one` for all collectives, sends
    and copies, in the order of issue. Without `rendezvous` senders never wait for receivers.
    """

    kernels: Literal["tiles", "roofline"] = "tiles"
    matmul: MatmulEfficiency = MatmulEfficiency()
    attention: AttentionEfficiency = AttentionEfficiency()
    memory: MemoryEfficiency = MemoryEfficiency()
    sustained: Sustained = Sustained()
    host: Host = Host()
    interference: Interference = Interference()
    collectives: tuple[Algorithm, ...]
    streams: Literal["each", "one"] = "each"
    rendezvous: Rendezvous | None = None
    network: dict[str, NetworkEfficiency]

    @field_validator("collectives")
    @classmethod
    def _complete(cls, value: tuple[Algorithm, ...]) -> tuple[Algorithm, ...]:
        """Trees and switches do not gather."""
        if not {"ring", "hierarchical"} & set(value):
            raise ValueError(
                "expects 'ring' or 'hierarchical' among them: the other algorithms only reduce"
            )
        return value


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
#: What the fits of all devices with tables have in common: messages to several ranks go at once.
_PAIRS = {
    "ll": {"start": "8 us", "hops": 0.3, "share": 0.05},
    "simple": {"start": "15 us", "hops": 0.3, "share": 0.7},
}
#: A card of the network is as fast for an all_to_all as for a ring: 46 to 49 of 50 GB/s.
_PAIRS_OUTSIDE = {**_PAIRS, "simple": {**_PAIRS["simple"], "share": 0.92}}
_NVLS = {"start": "48 us", "share": 0.6}
#: DeepEP writes tokens by RDMA from a kernel, so a peer costs nothing: its README, low latency, 128
#: tokens on H800 with 400 Gb/s; fitted on 16, 64 and 256 ranks, 32 and 128 within 1 to 8%.
_MESSAGES = {"start": "28.8 us", "hops": 0.0, "share": 0.9}


def collective_defaults(kind: str) -> tuple[str, ...]:
    """The algorithms of a machine with such an innermost level: those of NCCL, or on a torus rings
    along its axes, one after the other."""
    return ("hierarchical",) if kind == "ring" else ("ring", "tree", "multicast")


def network_defaults(kind: str) -> dict[str, object]:
    """The constants of a level whose text states none, as they would stand in it.

    Source: github.com/NVIDIA/nccl, src/graph/tuning.cc: baseLat, hwLat over the hop of protocol LL,
    bandwidth factors of the protocols. `pairs` and the share of `multicast` are near those of
    the devices for which they are fitted; between nodes the share of `pairs` is that of a ring
    (github.com/NVIDIA/nccl-tests, issues 267 and 290).
    """
    if kind != "fat-tree":
        return {"protocols": _NCCL_INSIDE, "pairs": _PAIRS, "multicast": _NVLS}
    direct = {"messages": _MESSAGES}
    return {
        "protocols": _NCCL_OUTSIDE,
        "pairs": _PAIRS_OUTSIDE,
        "multicast": _NVLS,
        "direct": direct,
    }
