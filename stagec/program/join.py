"""Joins the programs of successive steps into one program.

Each distinct step is unrolled once, between placeholder nodes for the values that it takes from
earlier steps (heads) and for those that later steps take from it (tails). Its columns are then
copied as often as the step runs: heads become edges to the nodes that last produced the value, and
streams continue from step to step.

    step A:  [sampled] [cache] | embed append attend head | [cache] [sampled]
    A, A:    embed append attend head  embed append attend head
                     ^------------------------'  (cache)
                                  ^------'       (sampled)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagec.program.columns import sorted_edges, stream_edges
from stagec.program.groups import Channel
from stagec.program.nodes import MICROBATCH, Ints, Node, Program, marker_of, numbered
from stagec.program.sizes import OpNumbers
from stagec.support.diagnostics import error

#: The largest number of nodes per rank: no consumer can read more.
MOST_NODES = 20_000_000
#: In place of a node: the value existed before the first step.
_NOTHING = 0


@dataclass(frozen=True, eq=False)
class StepProgram:
    """The program of one step. Its first nodes are placeholders for the values that it takes, named
    in `heads`, its last ones for those that it leaves, named in `tails`; a name may be in both.
    `channels` number its message streams."""

    program: Program
    heads: Sequence[str]
    tails: Sequence[str]
    channels: Mapping[Channel, int]

    def __len__(self) -> int:
        return len(self.program) - len(self.heads) - len(self.tails)


@dataclass(frozen=True, eq=False)
class SizedStep:
    """A step that has the same nodes as `form`, but its own `values` of symbols; None if `form` was
    unrolled with its values."""

    form: StepProgram
    values: Mapping[str, int] | None = None


@dataclass(frozen=True)
class _Part:
    """A step without heads and tails; nodes and names are numbers from 0. `nodes` are the
    prototypes, `prototype` the index of each node's. `data` and `order` are the data and control
    edges in two rows: from, to. `takes` has in two rows nodes and the names that they take;
    `leaves` names and the nodes that produce them, or `-1 - name` for a value that the step passes
    on unchanged. `streams` are the numbers of message streams, -1 for other nodes."""

    nodes: Sequence[Node]
    prototype: Ints
    tag: Ints
    streams: Ints
    data: Ints
    order: Ints
    takes: Ints
    leaves: Ints

    def __len__(self) -> int:
        return len(self.prototype)


def joined(name: str, steps: Sequence[SizedStep], order: Sequence[tuple[int, int]]) -> Program:
    """The program that runs steps one after the other. `order` has for each its index in `steps`,
    and its number, which is part of the names of its nodes. A step takes under each name the value
    that was last left under it. Raises `DiagnosticError` for more than `MOST_NODES`."""
    total = sum(len(steps[i].form) for i, _ in order)
    if total > MOST_NODES:
        raise error(
            f"the steps have {total:,} nodes per rank, expected at most {MOST_NODES:,}",
            remedy="write fewer of them (--steps N), or round contexts up (--bucket N)",
        )
    forms = list(dict.fromkeys(step.form for step in steps))
    channels = list(dict.fromkeys(c for form in forms for c in form.channels))
    known = list(dict.fromkeys(n for form in forms for n in (*form.heads, *form.tails)))
    places = {n: i for i, n in enumerate(known)}, {c: i for i, c in enumerate(channels)}
    parts = {form: _part(form, *places) for form in forms}
    prototypes: list[Node] = []
    sizes = OpNumbers({})
    firsts: list[int] = []
    for form, values in ((step.form, step.values) for step in steps):
        firsts.append(len(prototypes))
        if values is None:
            prototypes += parts[form].nodes
            continue
        prototypes += map(sizes.at(values).resized, parts[form].nodes)
    made = np.full(len(known), _NOTHING, dtype=np.int64)
    sent = np.zeros(max(1, 2 * len(channels)), dtype=np.int64)
    columns: list[Ints] = [np.zeros((3, 0), dtype=np.int64)]
    edges: list[Ints] = [np.zeros((3, 0), dtype=np.int64)]
    base = 1
    for which, number in order:
        part = parts[steps[which].form]
        tags = part.tag + np.where(part.streams < 0, 0, sent[part.streams] * len(channels))
        numbers = np.full(len(part), number)
        columns.append(np.stack([part.prototype + firsts[which], numbers, tags]))
        sent += np.bincount(part.streams[part.streams >= 0], minlength=sent.size)
        takers, taken = part.takes[0] + base, made[part.takes[1]]
        there = taken != _NOTHING
        edges += [_edges(part.data + base, 0), _edges(part.order + base, 1)]
        edges.append(_edges(np.stack([takers[there], taken[there]]), 0))
        names, makers = part.leaves
        made[names] = np.where(makers >= 0, makers + base, made[-1 - np.minimum(makers, -1)])
        base += len(part)
    prototype, microbatch, tag = np.concatenate(columns, axis=1)
    sources, targets = stream_edges(prototypes, prototype)
    every = np.concatenate([*edges, _edges(np.stack([sources, targets]), 1)], axis=1)
    starts, middle, indices = sorted_edges(len(prototype), *every)
    return Program(name, prototypes, prototype, microbatch, tag, starts, middle, indices)


def _edges(pairs: Ints, control: int) -> Ints:
    return np.concatenate([pairs, np.full((1, pairs.shape[1]), control, dtype=np.int64)])


def _part(step: StepProgram, names: Mapping[str, int], channels: Mapping[Channel, int]) -> _Part:
    """The columns of a step, with the numbers of `names` and `channels` in the joined program."""
    program, first = step.program, len(step.heads)
    last = first + len(step)
    count = len(program)
    sources = np.repeat(np.arange(count), np.diff(program.starts))
    targets = program.edges - 1
    ordered = np.arange(len(program.edges)) >= np.repeat(program.control, np.diff(program.starts))
    inside = (sources >= first) & (sources < last)
    within = inside & (targets >= first)
    taking = inside & (targets < first) & ~ordered
    heads = np.array([names[n] for n in step.heads], dtype=np.int64)
    takes = np.stack([sources[taking] - first, heads[targets[taking]]])
    pairs = np.stack([sources, targets]) - first
    given = slice(first, last)
    streams, tag = _streams(program, given, step.channels, channels)
    data, order = pairs[:, within & ~ordered], pairs[:, within & ordered]
    return _Part(
        *_prototypes(program, given), tag, streams, data, order, takes, _leaves(step, names)
    )


def _prototypes(program: Program, given: slice) -> tuple[list[Node], Ints]:
    """The prototypes of the nodes `given`, with a marker for the number of the step in their names
    (`s3/forward/mb0/x`), and the index of each node's prototype. Nodes of different microbatches
    have different prototypes."""
    which, numbers = program.prototype[given], program.microbatch[given]
    marked = np.array([bool(marker_of(n.name)) for n in program.prototypes])[which]
    pairs = np.stack([which, np.where(marked, numbers, 0)], axis=1)
    used, inverse = np.unique(pairs, axis=0, return_inverse=True)
    prototypes: list[Node] = []
    rows: list[tuple[int, int]] = used.tolist()
    for number, microbatch in rows:
        node = program.prototypes[number]
        names = (numbered(n, microbatch) for n in (node.name, node.scope))
        full, scope = (f"s{MICROBATCH[0]}/{n}" for n in names)
        prototypes.append(replace(node, name=full, scope=scope))
    return prototypes, np.asarray(inverse, dtype=np.int64).reshape(-1)


def _streams(
    program: Program, given: slice, own: Mapping[Channel, int], channels: Mapping[Channel, int]
) -> tuple[Ints, Ints]:
    """The stream of each message, and its tag: its number in the stream times the number of
    channels, plus the channel."""
    sends = np.array([n.kind == "send" for n in program.prototypes])[program.prototype[given]]
    messages = np.array([n.is_message for n in program.prototypes])[program.prototype[given]]
    tag = program.tag[given]
    table = np.array([channels[c] for c in sorted(own, key=own.__getitem__)], dtype=np.int64)
    if not len(table):
        return np.full(len(tag), -1, dtype=np.int64), np.zeros(len(tag), dtype=np.int64)
    channel = table[tag % len(table)]
    streams = np.where(messages, channel + np.where(sends, 0, len(channels)), -1)
    return streams, np.where(messages, tag // len(table) * len(channels) + channel, 0)


def _leaves(step: StepProgram, names: Mapping[str, int]) -> Ints:
    """The rows `leaves` of a `_Part`: for each name the last node that its tail depends on, or a
    value that the step takes under the same or another name."""
    program, first = step.program, len(step.heads)
    last = first + len(step)
    leaves: list[tuple[int, int]] = []
    for i, name in enumerate(step.tails, last):
        made = program.edges[program.starts[i] : program.control[i]] - 1
        if len(made):
            maker = int(made.max())
            there = maker >= first
            leaves.append((names[name], maker - first if there else -1 - names[step.heads[maker]]))
    return np.array(leaves, dtype=np.int64).reshape(-1, 2).T
