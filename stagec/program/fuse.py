"""Coarser programs: consecutive computations become one node.

A computation is merged into the ones before it if everything else that it depends on is complete
when the first of them starts. So no node depends on itself, and every collective and message keeps
its place. The totals of FLOPs and bytes do not change. A roofline of the sums would be faster than
the sum over the parts, so a merged node keeps the kernels of its parts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from stagec.program.columns import sorted_edges
from stagec.program.nodes import Events, Ints, Node, Program

Granularity = Literal["op", "block", "layer"]


def fused(program: Program, granularity: Granularity) -> Program:
    """The program with one node for each run of computations of one layer, microbatch and phase.
    With `block`, each matrix product starts a new node; with `layer`, it does not."""
    if granularity == "op":
        return program
    first = _firsts(program, split=granularity == "block")
    kept = first == np.arange(len(program))
    number = np.cumsum(kept)[first]  # the new identifier of each node
    order = np.argsort(first, kind="stable")
    known: dict[tuple[int, ...], int] = {}
    prototypes: list[Node] = []
    prototype: list[int] = []
    runs = np.flatnonzero(np.diff(first[order])) + 1
    for run in np.split(program.prototype[order], runs):
        key = tuple(cast("list[int]", run.tolist()))
        if key not in known:
            known[key] = len(prototypes)
            prototypes.append(_fused([program.prototypes[i] for i in key]))
        prototype.append(known[key])
    counts = np.diff(program.starts)
    places = np.arange(len(program.edges)) - np.repeat(program.starts[:-1], counts)
    data = np.repeat(program.control - program.starts[:-1], counts)
    sources, targets = np.repeat(number, counts), number[program.edges - 1]
    outer = sources != targets
    control = (places >= data).astype(np.int64)
    return Program(
        program.name,
        prototypes,
        np.array(prototype, dtype=np.int64),
        program.microbatch[kept],
        program.tag[kept],
        *sorted_edges(len(prototype), sources[outer], targets[outer], control[outer]),
        _fused_events(program.events, kept),
    )


def _fused_events(events: Events | None, kept: npt.NDArray[np.bool_]) -> Events | None:
    """The events of the merged nodes. A computation that was merged across other nodes counts with
    the last node before it."""
    return events.merged(np.flatnonzero(kept)) if events is not None else None


def _firsts(program: Program, *, split: bool) -> Ints:
    """For each node, the index of the first node of its run."""
    keys = [n.scope if n.is_computation else "" for n in program.prototypes]
    products = [split and bool(n.matmul) for n in program.prototypes]
    prototype: list[int] = program.prototype.tolist()
    microbatch: list[int] = program.microbatch.tolist()
    starts: list[int] = program.starts.tolist()
    edges: list[int] = program.edges.tolist()
    first = list(range(len(prototype)))
    start, before = 0, ("", 0)
    for i, p in enumerate(prototype):
        if not keys[p]:
            continue
        key = keys[p], microbatch[i]
        targets = edges[starts[i] : starts[i + 1]]
        ready = all(t - 1 < start or first[t - 1] == start for t in targets)
        if key != before or products[p] or not ready:
            start, before = i, key
        first[i] = start
    return np.array(first, dtype=np.int64)


def _fused(nodes: Sequence[Node]) -> Node:
    if len(nodes) == 1:
        return nodes[0]
    return replace(
        nodes[0],
        size=sum(max(1, n.size) for n in nodes),
        flops=sum(max(1, n.flops) for n in nodes),
        matmul=sum(n.matmul for n in nodes),
        out=sum(n.out for n in nodes),
        kernel=None,
        parts=tuple(kernel for n in nodes for kernel in n.kernels),
    )
