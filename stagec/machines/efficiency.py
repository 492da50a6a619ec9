"""The share of its peaks that a machine reaches: the constants of the cost models.

All have a physical meaning. The defaults, for constants that a text does not state, are published
figures of similar devices.
"""

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
    the cost of the part that stays on a rank and is copied there, relative to a part that moves.
    `adds`: how often a ring moves the data that it adds through the memory of the device while its
    links are idle (0: additions overlap with transfers). `gap`: seconds that a link of the level
    needs for each message of a ring in addition to its bytes.
    """

    start: Seconds
    hops: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    share: Share = 1.0
    copy_: Annotated[float, Field(ge=0, allow_inf_nan=False, alias="copy")] = 0.0
    adds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    gap: Seconds = 0.0


class NetworkEfficiency(Text):
    """Constants of the collectives and messages of one level; `fitted` names the data that they
    were fitted on, if any.

    `protocols` are those of rings and trees, `pairs` those of messages and all_to_all, `multicast`
    that of reductions in switches. The fastest is used. `check`: seconds by which a collective
    delays the hosts of its group for each rank that it reaches over the level, if ranks compare
    their calls first (PyTorch, `TORCH_DISTRIBUTED_DEBUG=DETAIL`: a barrier in which rank 0 asks one
    rank after the other). `direct` are those of an engine's own kernels, which access the memory of
    other ranks: all_reduces in `one_shot` and `two_shot` (`stg.collectives`), and `messages` of
    tokens to experts (DeepEP, see `stg.moe`); a level without them uses only the communication
    library, as `direct = {}` states: an innermost level that joins each device with each has the
    mean of five devices by default. `direct_fitted` names the data that these were fitted on.
    """

    protocols: dict[str, Protocol] = Field(min_length=1)
    pairs: dict[str, Protocol] = Field(min_length=1)
    multicast: Protocol
    check: Seconds = 0.0
    direct: dict[Direct, Protocol] = Field(default_factory=dict[Direct, Protocol])
    direct_fitted: str = ""
    fitted: str = ""


class Interference(Text):
    """How collectives and computations that run concurrently slow each other down.

    `computations`: the share of its speed that a computation loses to a concurrent collective
    (processors and memory bandwidth). `collectives`: how many times as long a collective takes that
    is issued to overlap with computations.
    """

    computations: Annotated[float, Field(ge=0, lt=1)] = 0.0
    collectives: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    fitted: str = ""


class Sustained(Text):
    """The speed of kernels in long runs, relative to their speed alone.

    `products`: the share for matrix products and attention. Tables time kernels for milliseconds on
    a cool device; in training that runs for hours, the power of the device is limited, and so is
    its clock. The default is the median of what current software sustains on devices with measured
    steps: 0.95 (A100), 0.93 (H200), 0.88 (H100) and 0.83 (B200). `experts`: a further factor for
    grouped products of experts, if a framework states it (`stg.sustained`). `power`: a factor for
    the shares that stacks state for a family of devices. At a limit of power, the clock is
    proportional to its 2/3 power (H100 at 500 and 700 W: 0.615 and 0.77 of the same peak), so the
    factor is (P / P')^(2/3) (peak' / peak), with P' and peak' of the family's first device.
    """

    products: Share = 0.9
    experts: Share = 1.0
    power: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    fitted: str = ""


class Host(Text):
    """The program that launches kernels.

    `issue`: seconds from one computation to the next while devices wait for the host: a framework
    without a compiler or graphs runs its own code between any two (PyTorch, autograd).
    """

    issue: Seconds = 0.0
    fitted: str = ""


class Rendezvous(Text):
    """Messages that wait for their receiver instead of being buffered.

    `above`: messages of more bytes wait. `handshake`: the bytes of the message by which the
    receiver announces that it is ready, over the same links in the other direction (0: it takes
    only their latency). Waiting in collectives is part of the constants of their protocols.
    """

    above: Bytes
    handshake: Bytes = 0


class Efficiency(Text):
    """Constants by kind of work.

    `kernels` is the cost model of kernels: `tiles` with the constants here, or only the `roofline`,
    the larger of FLOPs over the peak and bytes over the bandwidth, without constants, including
    `host` and `sustained`. `collectives` are the algorithms of the communication library, `network`
    the constants of each level of the network, by name. `streams` says how a device communicates:
    on one stream for `each` communicator and neighbour, as frameworks do, or on `one` stream for
    all collectives, sends and copies, in the order of issue. Without `rendezvous`, senders never
    wait for receivers.
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
        """Check that an algorithm can gather: trees and switches only reduce."""
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
#: Common to the fits of all devices with tables: messages to several ranks are concurrent.
_PAIRS = {
    "ll": {"start": "8 us", "hops": 0.3, "share": 0.05},
    "simple": {"start": "15 us", "hops": 0.3, "share": 0.7},
}
#: A network card is as fast in an all_to_all as in a ring: 46 to 49 of 50 GB/s.
_PAIRS_OUTSIDE = {**_PAIRS, "simple": {**_PAIRS["simple"], "share": 0.92}}
_NVLS = {"start": "48 us", "share": 0.6}
#: DeepEP writes tokens by RDMA from a kernel, so another peer costs no time. Source: its README,
#: low latency, 128 tokens on H800 with 400 Gb/s; fitted on 16, 64 and 256 ranks; the error for 32
#: and 128 is 1 to 8%.
_MESSAGES = {"start": "28.8 us", "hops": 0.0, "share": 0.9}
#: Rounded means of the kernels of engines on A100, H100, H200, B200 and GB200.
_ENGINES = {
    "one_shot": {"start": "4 us", "hops": 0.25, "share": 0.65},
    "two_shot": {"start": "10 us", "hops": 0.25, "share": 0.65},
}


def collective_defaults(kind: str) -> tuple[str, ...]:
    """The algorithms of a machine whose innermost level is of this kind: those of NCCL, or, on a
    torus, rings along its axes, one after the other."""
    return ("hierarchical",) if kind == "ring" else ("ring", "tree", "multicast")


def network_defaults(kind: str, *, innermost: bool) -> dict[str, object]:
    """The default constants of a level, in the form of a machine text.

    Kernels of engines reach other ranks over the `innermost` level, if it joins each with each.

    Source: github.com/NVIDIA/nccl, src/graph/tuning.cc: baseLat, hwLat over the hop of protocol LL,
    bandwidth factors of the protocols. `pairs` and the share of `multicast` are close to those of
    the devices for which they are fitted; between nodes, the share of `pairs` is that of a ring
    (github.com/NVIDIA/nccl-tests, issues 267 and 290).
    """
    if kind != "fat-tree":
        inside: dict[str, object] = {"protocols": _NCCL_INSIDE, "pairs": _PAIRS, "multicast": _NVLS}
        return {**inside, "direct": _ENGINES} if innermost and kind != "ring" else inside
    direct = {"messages": _MESSAGES}
    return {
        "protocols": _NCCL_OUTSIDE,
        "pairs": _PAIRS_OUTSIDE,
        "multicast": _NVLS,
        "direct": direct,
    }
