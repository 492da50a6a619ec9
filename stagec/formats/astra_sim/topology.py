"""A machine as the dimensions of ASTRA-sim's network.

Ranks number the mesh row-major, and ASTRA-sim's dimension 0 is the fastest, so each axis of the
mesh becomes a dimension, innermost first. An axis uses the innermost level of the machine that
connects all ranks of each of its groups:

    mesh dp=4, tp=4, levels of 8 ranks (nvlink) and of any number (infiniband)
    tp -> 4 over nvlink;  dp -> 4 over infiniband, though pairs of its ranks share a node

An axis that crosses units of a level is not divided: a ring is as fast as its slowest link, and
between ranks that differ along two dimensions, ASTRA-sim sends over the link of the inner one.

Pods of a job have different meshes, but ASTRA-sim has one network, so with several pods the
dimensions are the levels: each connects the units of the level inside it:

    main dp=2, tp=8 (16 ranks), encoder dp=8 (8 ranks)
    8 over nvlink (tp of main, dp of the encoder);  3 over infiniband (dp of main, and between pods)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from stagec.machines import Level, Machine
from stagec.machines.placement import crossed
from stagec.support.diagnostics import DiagnosticError, error
from stagec.time.costs.network import level_between_pods

#: ASTRA-sim's GB, analytical/common/NetworkFunction.cpp.
GIB = 2**30
_KINDS = {"switch": "Switch", "fat-tree": "Switch", "ring": "Ring", "mesh": "FullyConnected"}


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of `ranks` ranks along `axis`, over a level of the machine.

    `bandwidth` is that of one link in one direction, in GiB/s, `latency` that of one link, in ns.
    """

    axis: str
    ranks: int
    level: str
    kind: str
    bandwidth: float
    latency: float


def dimensions(mesh: Mapping[str, int], machine: Machine) -> list[Dimension]:
    """The dimensions of a job, innermost first, each with at least two ranks; their product is the
    number of ranks. Raises `DiagnosticError` for a job of one rank, and for one that the machine
    does not connect."""
    ranks = prod(mesh.values())
    if ranks == 1:
        raise error(
            "the job has one rank, but ASTRA-sim's network needs two or more",
            remedy="add --dp 2: both ranks then do the same work",
        )
    return [_dimension(axis, mesh[axis], level) for axis, level in _levels(machine, mesh).items()]


def _levels(machine: Machine, mesh: Mapping[str, int]) -> dict[str, Level]:
    """The level of each axis of two or more ranks, innermost first. Raises `DiagnosticError` if the
    machine does not connect all ranks."""
    levels = crossed(machine, mesh)
    joined = {axis: level for axis, level in levels.items() if level is not None}
    if len(joined) < len(levels):
        ranks, most = prod(mesh.values()), machine.network[-1].unit
        raise error(
            f"the job has {ranks} ranks, and '{machine.name}' joins {most}",
            remedy="choose a smaller mesh, or a machine with one more network level",
        )
    return joined


@dataclass(frozen=True, slots=True)
class _Span:
    """An axis of a pod: the ranks of a group are `stride` apart, within a block of `block` ranks.
    `level` is the index of its level, from the inside out."""

    axis: str
    stride: int
    block: int
    level: int


def pod_dimensions(pods: Mapping[str, Mapping[str, int]], machine: Machine) -> list[Dimension]:
    """The dimensions of a job of several pods with consecutive ranks: one for each level that they
    use. The ranks of a group differ only along the dimension of its level, ranks of different pods
    also along that of the level between pods. Raises `DiagnosticError` for pods that do not form
    such a grid."""
    names = [level.name for level in machine.network]
    spans = [span for pod, mesh in pods.items() for span in _spans(pod, mesh, machine, names)]
    ranks = [prod(mesh.values()) for mesh in pods.values()]
    between = names.index(level_between_pods(machine, pods.values()).name)
    ordered: list[Dimension] = []
    below = 1
    for number, level in enumerate(machine.network):
        outside = [span.stride for span in spans if span.level > number]
        all_joined = between <= number and not outside
        block = sum(ranks) if all_joined else gcd(*outside, *ranks)
        inside = [span for span in spans if span.level == number]
        wrong = next((span for span in inside if block % span.block), None)
        if wrong is not None and not all_joined:
            why = f"'{wrong.axis}' has {wrong.block} ranks over {level.name}"
            raise _no_grid(why, ranks, block)
        whole = all((s.stride, s.block) == (below, block) for s in inside)
        if _KINDS[level.kind] != "Switch" and not (whole and number != between):
            raise _no_grid(f"'{level.name}' is a {level.kind}, not a switch", ranks, block)
        if block > below:
            over = [*(span.axis for span in inside), *(["pods"] if number == between else [])]
            ordered.append(_dimension(", ".join(over), block // below, level))
        below = block
    return ordered


def _spans(
    pod: str, mesh: Mapping[str, int], machine: Machine, names: Sequence[str]
) -> Iterator[_Span]:
    block = 1
    for axis, level in _levels(machine, mesh).items():
        stride, block = block, block * mesh[axis]
        yield _Span(f"{pod}/{axis}", stride, block, names.index(level.name))


def _no_grid(why: str, ranks: Sequence[int], block: int) -> DiagnosticError:
    return error(
        f"pods of {' and '.join(map(str, ranks))} ranks do not form a grid, as the network of "
        f"ASTRA-sim does: {why}, in blocks of {block}",
        remedy="give each pod whole nodes of the machine, or write --format chakra",
    )


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
    """`network.yml`: lists with an entry per dimension."""
    axes = ", ".join(f"{d.axis} {d.ranks} over {d.level}" for d in dims)
    columns: dict[str, tuple[Sequence[object], str]] = {
        "topology": ([d.kind for d in dims], f"innermost first: {axes}"),
        "npus_count": ([d.ranks for d in dims], ""),
        "bandwidth": ([d.bandwidth for d in dims], "GB/s of 2^30 bytes, a link and direction"),
        "latency": ([d.latency for d in dims], "ns of a link"),
    }
    lines = (
        f"{key}: [ {', '.join(map(str, values))} ]" + (f"  # {text}" if text else "")
        for key, (values, text) in columns.items()
    )
    return "".join(f"{line}\n" for line in lines)
