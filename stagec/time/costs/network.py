"""The time of communication: which levels of the network a group of ranks spans, and what a
collective or a message costs over them.

A worked example: an all_reduce of B bytes over 32 ranks, 8 in each of 4 nodes, on `h100-sxm`.

    spans       nvlink: 8 units of 1 rank, infiniband: 4 units of 8 ranks
    ring        2 * 31 steps, 2 * 3 of them between nodes; 2 * 31/32 B bytes at the slower of
                450 GB/s and 8 * 50 GB/s (each rank of a node sends by its own link)
    multicast   switches add inside a node, a tree of parts B/8 joins the nodes
    time        the least over algorithms and protocols
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf, log2, prod
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from stagec.machines import Level, Machine
from stagec.machines.efficiency import Protocol
from stagec.support.diagnostics import error

Floats: TypeAlias = NDArray[np.float64]
#: Bytes of one call, or of many.
Bytes: TypeAlias = "int | float | NDArray[np.int64] | Floats"

#: How often (n-1)/n of the full buffer crosses a ring of n.
ROUNDS: Mapping[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
#: A tree reaches this share of what a ring does: NVIDIA/nccl, src/graph/tuning.cc.
TREE_SHARE = 0.92


@dataclass(frozen=True, slots=True)
class Span:
    """One level of the network that a group crosses.

    `units`: in one unit of this level, the number of inner units with members. `inner`: the members
    in each of these (the fewest, where they differ). `parts`: such inner units in the whole group.
    `size`: the members in one unit of the level. `share`: the part of the links of a rank that the
    group gets when all groups like it communicate at once.

    The spans of a group hold for all machines whose levels have the same kinds and join and use the
    same ranks: cost functions take the figures of the machine that they are given.
    """

    level: Level
    units: int
    inner: int
    parts: int
    size: int
    share: float

    @property
    def rate(self) -> float:
        """Bytes/s of one direction between the units: each member sends by its own link."""
        return self.level.bandwidth.value * self.share * self.inner / self.level.oversubscription


def level_between(machine: Machine, a: int, b: int) -> Level:
    """The innermost level that joins two ranks. Raises `DiagnosticError` if there is none."""
    for level in machine.network:
        if level.unit is None or a // level.unit == b // level.unit:
            return level
    raise _too_many(machine, max(a, b))


def level_between_pods(machine: Machine, meshes: Iterable[Mapping[str, int]]) -> Level:
    """The level of the network that joins pods with these meshes, each of which begins on a node of
    its own. Raises `DiagnosticError` if there is none."""
    node, start, end = machine.network[0].ranks or 1, 0, 0
    for mesh in meshes:
        ranks, used = prod(mesh.values()), machine.for_mesh(mesh).network[0].unit or 1
        end = start + (ranks - 1) // used * node + (ranks - 1) % used
        start = (end // node + 1) * node
    for level in machine.network:
        if level.ranks is None or end < level.ranks:
            return level
    raise _too_many(machine, end)


def spans(machine: Machine, ranks: NDArray[np.int64]) -> tuple[Span, ...]:
    """The levels that a group crosses, from the innermost out; empty for a group of one rank.

    Ranks number the mesh row-major, and consecutive ranks are placed together: unit u of a level of
    which N ranks are used has the ranks uN to (u+1)N - 1. Raises `DiagnosticError` if the network
    does not join them.
    """
    inside = ranks if bool(np.all(np.diff(ranks) > 0)) else np.unique(ranks)
    members = np.ones(len(inside), dtype=np.int64)
    spans: list[Span] = []
    below, places = 1, 1
    for level in machine.network:
        if len(inside) == 1:
            return tuple(spans)
        unit = inside * below // level.unit if level.unit is not None else np.zeros_like(inside)
        first = np.flatnonzero(np.diff(unit, prepend=-1))
        sizes = np.diff(first, append=len(unit))
        units = int(sizes.max())
        size = np.add.reduceat(members, first)
        if units > 1:
            length = level.ranks // places if level.ranks is not None else len(inside)
            least = np.where(sizes > 1, sizes, units + 1).argmin()  # of those that send inside
            share = _share(level, inside[first[least] :][: sizes[least]], length)
            spans.append(
                Span(level, units, int(members.min()), len(inside), int(size.max()), share)
            )
        inside, members, below = unit[first], size, level.unit or below
        places = level.ranks or places
    if len(inside) > 1:
        raise _too_many(machine, int(ranks.max()))
    return tuple(spans)


def _too_many(machine: Machine, rank: int) -> Exception:
    last = machine.network[-1]
    return error(
        f"machine '{machine.name}' has {last.unit} ranks, but the job has a rank {rank}",
        remedy=f"add a network level after '{last.name}', or give '{last.name}' more ranks",
    )


def _share(level: Level, units: NDArray[np.int64], length: int) -> float:
    """The share of the bandwidth of a rank that a group over these units gets.

    On a ring each of the two links carries half. Where the members are `stride` places apart on
    their arc, the shorter way around, that many groups share each link; at the ends of a group that
    does not close the ring only the link of one direction is used, which halves its rate
    (jax-ml/scaling-book, sharding.md). In a mesh a rank uses its links to members only.
    """
    if level.kind == "ring":
        arc = int(units[-1] - units[0])
        if level.ranks is not None:  # all but the widest gap
            arc = length - int(np.diff(units, append=units[0] + length).max())
        stride = max(1, arc // max(1, len(units) - 1))
        closed = len(units) * stride == length and len(units) > 1 and length > 2
        return (1.0 if closed else 0.5) / stride
    return (len(units) - 1) / (length - 1) if level.kind == "mesh" else 1.0


def _lanes(machine: Machine, over: Sequence[Span]) -> Iterable[tuple[Protocol, ...]]:
    """For each protocol that all these levels have, its constants on each of them."""
    levels = [machine.efficiency.network[span.level.name].protocols for span in over]
    names = [n for n in levels[0] if all(n in level for level in levels)]
    return (tuple(level[name] for level in levels) for name in names)


def _rate(over: Sequence[Span], lanes: Sequence[Protocol]) -> float:
    """Bytes/s of the slowest of these levels."""
    return min(span.rate * lane.share for span, lane in zip(over, lanes, strict=True))


def _start(lanes: Iterable[Protocol]) -> float:
    return max(lane.start for lane in lanes)


def _hop(span: Span, lane: Protocol) -> float:
    return span.level.latency.value * lane.hops


def ring(machine: Machine, kind: str, size: Floats, over: Sequence[Span]) -> Floats:
    """Seconds of a ring through all n ranks, node by node, with the fastest protocol.

    start + rounds * sum over levels(steps * hop) + (rounds * (n - 1) + copy)/n * bytes / rate
          + rounds * (n - 1) * gap + (n - 1)/n * bytes * adds / memory bandwidth, where it reduces

    Each of the n - 1 steps of a round costs the hop of the level that it crosses; the rate is that
    of the slowest level, where all members of a unit send. `copy`: each rank also writes its own
    part once, to the result of a gather, or of a sum between its two rounds
    (NVIDIA/nccl, src/device/all_reduce.h, directRecvReduceCopyDirectSend). `gap`: n - 1 messages of
    a round pass each link, one after the other; the link that needs the most for each counts.
    Source: NVIDIA/nccl, src/graph/tuning.cc (ncclTopoTuneModel: nsteps, nInterSteps, latencies,
    bandwidths); `copy` by fit; `gap`: Alexandrov et al., LogGP, 1995; `adds`: astra-sim/astra-sim,
    astra-sim/system/PacketBundle.cc.
    """
    n, rounds = over[-1].size, ROUNDS[kind]
    steps = _steps(over)

    def one(lanes: tuple[Protocol, ...]) -> Floats:
        hops = sum(s * _hop(p, q) for s, p, q in zip(steps, over, lanes, strict=True))
        moved = size * ((rounds * (n - 1) + lanes[0].copy_) / n)
        gaps = (n - 1) * max(lane.gap for lane in lanes)
        time = _start(lanes) + rounds * (hops + gaps) + moved / _rate(over, lanes)
        adds = 0.0 if kind == "all_gather" else lanes[0].adds
        return time + size * ((n - 1) / n * adds / machine.memory.bandwidth.value)

    return _least(map(one, _lanes(machine, over)))


def _steps(over: Sequence[Span]) -> list[int]:
    """How many of the n - 1 steps of a round through all ranks cross each level as the outermost
    one."""
    return [a - b for a, b in pairwise([*(span.parts - 1 for span in over), 0])]


def tree(machine: Machine, kind: str, size: Floats, over: Sequence[Span]) -> Floats:
    """Seconds of an all_reduce by two binary trees over the outermost level, chains inside.

    start + 2 * (sum over inner levels((units - 1) * hop) + ceil(log2(units)) * hop)
          + 2 * bytes / (rate * 0.92)

    Each rank passes half of the buffer up and down in each of the two trees. Source:
    NVIDIA/nccl, src/graph/tuning.cc (NCCL_ALGO_TREE); Sanders, Speck, Träff: Two-tree algorithms
    for full bandwidth broadcast, reduction and scan, 2009.
    """
    if kind != "all_reduce" or (len(over) == 1 and over[0].level.kind != "fat-tree"):
        return np.full_like(size, inf)

    def one(lanes: tuple[Protocol, ...]) -> Floats:
        hops = sum(_depth(p) * _hop(p, q) for p, q in zip(over, lanes, strict=True))
        return _start(lanes) + 2 * (hops + size / (_rate(over, lanes) * TREE_SHARE))

    return _least(map(one, _lanes(machine, over)))


def _depth(span: Span) -> int:
    return ceil(log2(span.units)) if span.level.kind == "fat-tree" else span.units - 1


def multicast(machine: Machine, kind: str, size: Floats, over: Sequence[Span]) -> Floats:
    """Seconds of an all_reduce in which the switches of the innermost level add and copy.

    start + max((1 + 1/units) * bytes / rate, sum of the tree outside)

    A rank sends the buffer to the switch and gets its part of the sum, then sends this part and
    gets the buffer. Outside, every rank of a unit joins a tree of its part; chunks go through both.
    Source: NVIDIA/nccl, src/graph/tuning.cc (NCCL_ALGO_NVLS, NCCL_ALGO_NVLS_TREE).
    """
    inside = over[0]
    if kind != "all_reduce" or not inside.level.reductions or inside.inner > 1:
        return np.full_like(size, inf)
    lane = machine.efficiency.network[inside.level.name].multicast
    time = (1 + 1 / inside.units) * size / (inside.rate * lane.share)
    start = lane.start + 2 * _hop(inside, lane)
    for span in over[1:]:
        constants = machine.efficiency.network[span.level.name]
        fast = max(constants.protocols.values(), key=lambda p: p.share)
        times = 1 + 1 / span.units if span.level.reductions else 2
        outside = times * size / (span.rate * fast.share)
        time, start = np.maximum(time, outside), start + 2 * _depth(span) * _hop(span, fast)
    return start + time


def hierarchical(machine: Machine, kind: str, size: Floats, over: Sequence[Span]) -> Floats:
    """Seconds of rings along each level, one after the other: on the inner ones the whole buffer,
    on the outer ones the part of a rank. The axes of a torus run at once, on parts of the buffer.

    start + rounds * sum over levels((units - 1) * hop + (units - 1)/units * bytes / rate)

    For a torus the units multiply and the rates add up. Source: jax-ml/scaling-book, sharding.md
    (AllGather over several axes: V / (W * axes)); Cho et al., BlueConnect, 2019.
    """
    rounds = ROUNDS[kind]

    def one(lanes: tuple[Protocol, ...]) -> Floats:
        both = list(zip(over, lanes, strict=True))
        torus = [(p, q) for p, q in both if p.level.kind == "ring"]
        rest = [(p, q) for p, q in both if p.level.kind != "ring"]
        hops = sum((p.units - 1) * _hop(p, q) for p, q in both)
        moved = sum(((p.units - 1) / p.units / (p.rate * q.share) for p, q in rest), 0.0)
        if torus:
            units = prod(p.units for p, _ in torus)
            inner = min(p.inner for p, _ in torus)
            total = inner * sum(p.rate / p.inner * q.share for p, q in torus)
            moved += (units - 1) / units / total
        return _start(lanes) + rounds * (hops + size * moved)

    return _least(map(one, _lanes(machine, over)))


def all_to_all(machine: Machine, kind: str, size: Floats, over: Sequence[Span]) -> Floats:
    """Seconds of messages of bytes/n from every rank to every other, all at once.

    start + latency + sum over levels(peers * hops * latency)
          + max over levels(bytes that cross / rate)

    The bytes that cross a level go to the n - inner ranks outside the unit of a rank. `kind` is not
    used. Source: NVIDIA/nccl, src/enqueue.cc (a kernel with all sends and receives of a rank).
    """
    constants = [machine.efficiency.network[span.level.name].pairs for span in over]
    names = [name for name in constants[-1] if all(name in level for level in constants)]
    return _least(_messages(size, over, [level[name] for level in constants]) for name in names)


def _messages(size: Floats, over: Sequence[Span], lanes: Sequence[Protocol]) -> Floats:
    """Seconds of an all_to_all by such messages, see `all_to_all`."""
    n, both = over[-1].size, list(zip(over, lanes, strict=True))
    peers = [span.size - span.inner for span in over]
    hops = sum(k * _hop(p, q) for k, (p, q) in zip(peers, both, strict=True))
    rates = [(n - p.inner + q.copy_) / n / (p.rate / p.inner * q.share) for p, q in both]
    return _start(lanes) + over[-1].level.latency.value + hops + size * max(rates)


def once_a_node(
    machine: Machine, size: Bytes, over: Sequence[Span], copies: int, groups: int
) -> Floats:
    """Seconds of an all_to_all of `size` bytes of tokens with `copies` experts each, in which a
    token goes to each node and to each rank once. The experts of a token lie in at most `groups`
    groups of experts (0: in any).

    Experts are spread over N nodes of m ranks, groups of them over as many. With `n = min(N,
    groups)` nodes that may have experts of a token,

        reached(x) = x (1 - (1 - 1/x)^copies)

    is how many of `x = n` nodes and of `x = n m` ranks have some on average, so `reached(n) /
    copies` of the bytes of an all_to_all cross between nodes. Inside a node tokens are forwarded
    from where they arrive: `reached(n m) / copies` of those bytes, (m - 1)/m of them to others of
    its m ranks. Both run at once, and the slower one determines the time. A group within a node has
    an all_to_all of `reached(m) / copies` of the bytes. With `copies` of 1 a token goes to each of
    its experts, as kernels of low latency send them. Sources: arXiv 2412.19437, section 3.2.2;
    deepseek-ai/DeepEP, "normal kernels" (`num_tokens_per_rank`, `is_token_in_rank`), and its branch
    hybrid-ep.
    """
    sizes = np.asarray(size, dtype=np.float64)
    own = [_own(machine, span.level) for span in over]
    over = [s if s.level is o else replace(s, level=o) for s, o in zip(over, own, strict=True)]
    if not over:
        return np.zeros_like(sizes)
    inside, units = over[0].size, over[-1].size // over[0].size
    n = min(units, groups) if groups else units
    there = sizes * (_reached(n * inside, copies) / copies)
    if len(over) < 2:
        return all_to_all(machine, "", there, over)
    forwarded = (inside - 1) / inside * over[-1].size / (over[-1].size - 1)
    between = _direct_messages(machine, sizes * (_reached(n, copies) / copies), over)
    within = all_to_all(machine, "", there * forwarded, over[:1])
    return np.maximum(between, within)


def _direct_messages(machine: Machine, size: Floats, over: Sequence[Span]) -> Floats:
    """Seconds of an all_to_all by a kernel that writes to the memory of ranks in other nodes, or by
    the communication library if the outermost level has no constants of such kernels."""
    levels = [machine.efficiency.network[span.level.name] for span in over]
    if "messages" not in levels[-1].direct:
        return all_to_all(machine, "", size, over)
    fastest = [max(level.pairs.values(), key=lambda p: p.share) for level in levels]
    lanes = [level.direct.get("messages", p) for level, p in zip(levels, fastest, strict=True)]
    return _messages(size, over, lanes)


def _reached(parts: int, copies: int) -> float:
    """The mean number of `parts` equal parts that have some of the `copies` experts of a token."""
    return parts * (1 - (1 - 1 / parts) ** copies)


def permute(machine: Machine, kind: str, size: Floats, over: Sequence[Span]) -> Floats:
    """Seconds in which every rank sends `size` bytes to the next: a message over the outermost
    level, which some of them cross."""
    return _message(machine, size, over[-1].level)


def broadcast(machine: Machine, kind: str, size: Floats, over: Sequence[Span]) -> Floats:
    """Seconds of a chain of chunks from one rank through all others (or, for a reduce, to it).

    start + sum over levels(steps * hop) + bytes / rate

    Source: NVIDIA/nccl, src/graph/tuning.cc (ncclCollBroadcast, NCCL_ALGO_RING).
    """

    def one(lanes: tuple[Protocol, ...]) -> Floats:
        hops = sum(s * _hop(p, q) for s, p, q in zip(_steps(over), over, lanes, strict=True))
        return _start(lanes) + hops + size / _rate(over, lanes)

    return _least(map(one, _lanes(machine, over)))


def direct_seconds(machine: Machine, size: float, over: Sequence[Span], *, two_shot: bool) -> float:
    """Seconds of an all_reduce of `size` bytes by a kernel that reads the memory of other ranks;
    infinity unless one level joins each of them with each other and has constants of such kernels.

    one_shot: start + (n - 1) * hop + (n - 1) * bytes / rate
    two_shot: start + (n - 1) * hop + 2 * (n - 1)/n * bytes / rate

    In one shot each rank reads the operands of all others, in two each adds one part of n and then
    reads the sums of the others. With `two_shot` the faster one is taken. Source:
    vllm-project/vllm, csrc/custom_all_reduce.cuh (cross_device_reduce_1stage, 2stage); constants by
    fit (tools/fit_direct.py).
    """
    level = over[0].level if len(over) == 1 else None
    if level is None or level.kind not in ("switch", "mesh"):
        return inf
    n, lanes = over[0].size, machine.efficiency.network[level.name].direct
    own = replace(over[0], level=_own(machine, level))
    moved = {"one_shot": n - 1.0, **({"two_shot": 2 * (n - 1) / n} if two_shot else {})}
    each = (
        lane.start + (n - 1) * _hop(own, lane) + moved[way] * size / _rate([own], [lane])
        for way, lane in lanes.items()
        if way in moved
    )
    return min(each, default=inf)


Cost: TypeAlias = Callable[[Machine, str, Floats, Sequence[Span]], Floats]
#: The algorithms that `efficiency.collectives` names; a plug-in may replace one.
ALGORITHMS: dict[str, Cost] = {
    "ring": ring,
    "tree": tree,
    "multicast": multicast,
    "hierarchical": hierarchical,
}
#: The kinds with a single algorithm.
SINGLE: dict[str, Cost] = {
    "all_to_all": all_to_all,
    "collective_permute": permute,
    "broadcast": broadcast,
    "reduce": broadcast,
}


def _least(times: Iterable[Floats]) -> Floats:
    seconds = list(times)
    return seconds[0] if len(seconds) == 1 else np.minimum.reduce(seconds)


@overload
def collective_seconds(
    machine: Machine, kind: str, size: float, over: Sequence[Span], sharing: float = 1
) -> float: ...
@overload
def collective_seconds(
    machine: Machine,
    kind: str,
    size: NDArray[np.int64] | Floats,
    over: Sequence[Span],
    sharing: float = 1,
) -> Floats: ...
def collective_seconds(
    machine: Machine, kind: str, size: Bytes, over: Sequence[Span], sharing: float = 1
) -> float | Floats:
    """Seconds of a collective in a group with these spans: the least over the algorithms of the
    machine; 0 for a group of one. `size` is the larger of the bytes before and after on a rank.

    `sharing` groups use the links of each rank at once. Raises KeyError for a kind that is not in
    `ROUNDS` or `SINGLE`.
    """
    sizes = np.asarray(size, dtype=np.float64)
    own = [_own(machine, span.level) for span in over]
    over = [s if s.level is o else replace(s, level=o) for s, o in zip(over, own, strict=True)]
    if not over:
        ways = [np.zeros_like(sizes)]
    elif kind in SINGLE:
        ways = [SINGLE[kind](machine, kind, sizes * sharing, over)]
    else:
        ROUNDS[kind]
        names = machine.efficiency.collectives
        ways = [ALGORITHMS[name](machine, kind, sizes * sharing, over) for name in names]
    least = _least(ways)
    return least if least.ndim else float(least)


@overload
def message_seconds(machine: Machine, size: float, level: Level) -> float: ...
@overload
def message_seconds(machine: Machine, size: NDArray[np.int64] | Floats, level: Level) -> Floats: ...
def message_seconds(machine: Machine, size: Bytes, level: Level) -> float | Floats:
    """Seconds of a message of `size` bytes between two ranks over a level.

    start + latency + bytes / (bandwidth * share)

    A pair has one of the two links of a ring, and one link in a mesh. Source: the alpha-beta model,
    Hockney 1994; constants of each protocol as in `all_to_all`.
    """
    time = _message(machine, np.asarray(size, dtype=np.float64), _own(machine, level))
    return time if time.ndim else float(time)


def _own(machine: Machine, level: Level) -> Level:
    """The level of this machine with the name of a level of another machine."""
    return next(own for own in machine.network if own.name == level.name)


def _message(machine: Machine, size: Floats, level: Level) -> Floats:
    share = 1 / level.oversubscription
    if level.kind == "ring":
        share /= 2
    elif level.kind == "mesh" and level.ranks is not None:
        share /= max(1, level.ranks // _below(machine, level) - 1)
    bandwidth, lanes = level.bandwidth.value * share, machine.efficiency.network[level.name].pairs
    return level.latency.value + _least(
        lane.start + size / (bandwidth * lane.share) for lane in lanes.values()
    )


def _below(machine: Machine, level: Level) -> int:
    """The number of ranks of one unit inside the level."""
    inside = [1, *(other.ranks or 1 for other in machine.network)]
    return inside[machine.network.index(level)]
