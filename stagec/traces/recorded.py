"""A job of recorded traces: its programs by rank class, for a mesh of the same or of more ranks.

A group of a trace is a list of ranks. On a mesh it is what differs along some axes, so more ranks
along an axis are more groups and larger ones, of the same programs:

    dp 2 x tp 2    [0, 1] [2, 3]    along tp         dp 4 x tp 2    [0, 1] [2, 3] [4, 5] [6, 7]
                   [0, 2] [1, 3]    along dp                        [0, 2, 4, 6] [1, 3, 5, 7]

An axis replicates if ranks along it run one program that does not change with their number: they
exchange nothing but gradients and norms, by all_reduce, which has the same bytes in a group of any
size. An all_reduce in a forward pass is of a product in parts, as tensor parallelism has it, and
anything else is of shards: both are of other sizes on more ranks, so they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import permutations, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stagec.formats.base import Durations, Format, Layout, ModelJob
from stagec.formats.chakra.format import CHAKRA
from stagec.formats.chakra.nodes import NodeKind, TraceError, TraceNode
from stagec.formats.chakra.record_files import read_trace
from stagec.program.groups import GroupAxes, Groups, number_groups
from stagec.program.nodes import Ints, Program
from stagec.support.diagnostics import error
from stagec.support.limits import MAX_RANKS
from stagec.traces.decomposition import chunks_of, microbatches_of
from stagec.traces.microbatches import stream_counts, with_turns
from stagec.traces.stored import ProgramReader, Way, static_bytes, stored_seconds
from stagec.traces.turns import Pipelining, Turn, one_after_the_other
from stagec.traces.writer import OfOneMesh, entry_of

if TYPE_CHECKING:
    from stagec.machines import Machine

#: The phases in which replicas reduce what they have found.
_REDUCING = frozenset(("gradient", "optimizer"))
#: What records are made of; others would be lost.
_KNOWN = frozenset(
    ("is_cpu_op", "num_ops", "tensor_size", "alloc_bytes", "free_bytes", "comm_type", "comm_size")
) | frozenset(("pg_name", "comm_tag", "comm_src", "comm_dst"))
Mesh = Mapping[str, int]


@dataclass(frozen=True)
class Recording:
    """The traces of a job by rank, the members of its groups by number, its mesh, outermost axis
    first, and what its manifest says of classes, if it has one."""

    name: str
    paths: Mapping[int, Path]
    groups: Mapping[int, Sequence[int]]
    mesh: Mesh
    entries: Mapping[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])


@dataclass(frozen=True)
class _Class:
    """Ranks that run one program: the `places` that they are at on the axes that do not grow, and
    the recorded `numbers` of the groups of one of them."""

    places: Sequence[Mapping[str, int]]
    program: Program
    example: int
    numbers: Mapping[GroupAxes, int]


@dataclass(frozen=True)
class RecordedJob(OfOneMesh):
    """A recording on a mesh: a source of traces. Made by `scaled`."""

    recording: Recording
    mesh: Mesh
    classes: Sequence[_Class]
    format: Format = CHAKRA
    machine: Machine | None = None
    model: ModelJob | None = None
    models: Sequence[ModelJob] = ()

    @property
    def name(self) -> str:
        """The name of the files."""
        return self.recording.name

    @property
    def members(self) -> Sequence[Ints]:
        """The ranks of each class."""
        return self._members

    @cached_property
    def _members(self) -> Sequence[Ints]:
        names = list(self.mesh)
        grid = np.indices([self.mesh[a] for a in names]).reshape(len(names), -1)
        members: list[Ints] = []
        for each in self.classes:
            own = np.zeros(grid.shape[1], dtype=bool)
            for place in each.places:
                there = (grid[names.index(axis)] == at for axis, at in place.items())
                own |= np.logical_and.reduce([*there, np.ones(grid.shape[1], dtype=bool)])
            members.append(np.flatnonzero(own).astype(np.int64))
        return members

    @property
    def groups(self) -> Groups:
        """The groups, numbered in the order in which the recorded ones are."""
        return self._groups

    @cached_property
    def _groups(self) -> Groups:
        first: dict[GroupAxes, int] = {}
        for each in self.classes:
            for axes, number in each.numbers.items():
                first[axes] = min(number, first.get(axes, number))
        used = [
            ((axes,), ranks)
            for axes in sorted(first, key=first.__getitem__)
            for each, ranks in zip(self.classes, self.members, strict=True)
            if axes in each.program.groups
        ]
        return number_groups(self.mesh, used)

    @property
    def layout(self) -> Layout:
        """Who talks to whom."""
        return Layout(self.mesh, self.groups)

    @property
    def durations(self) -> Durations | None:
        """The times that the records have, if they have some."""
        return self._durations

    @cached_property
    def _durations(self) -> Durations | None:
        timed = any(stored_seconds(n) for each in self.classes for n in each.program.prototypes)
        return stored_seconds if timed else None

    def program(self, number: int) -> Program:
        """The nodes of a class, without kernels."""
        return self.classes[number].program

    def entry(self, number: int) -> dict[str, object]:
        """What the manifest says of a class."""
        each, events = self.classes[number], self.program(number).events
        memory = self.recording.entries.get(each.example, {}).get("memory")
        if memory is not None and events is not None:
            memory = {"static_bytes": events.static, "peak_bytes": events.peak}
        coords = _common(each.places, self.mesh)
        return entry_of(self, number, each.program.name, coords, memory)


def _common(places: Sequence[Mapping[str, int]], mesh: Mesh) -> dict[str, int]:
    """The coordinates of these places and of no others; none if there are none such."""
    shared = {a: c for a, c in places[0].items() if mesh[a] > 1 and all(p[a] == c for p in places)}
    others = prod(mesh[axis] for axis in places[0] if axis not in shared)
    return shared if len(places) == others else {}


def scaled(recording: Recording, mesh: Mesh, more: Microbatches | None = None) -> RecordedJob:
    """The job on another mesh, and with more microbatches. Raises `DiagnosticError` with the reason
    where the traces do not say what its ranks do."""
    grown = _grown(recording, mesh)
    old = {axis: recording.mesh.get(axis, 1) for axis in mesh}
    recording = Recording(recording.name, recording.paths, recording.groups, old, recording.entries)
    first: dict[tuple[int, ...], _Rank] = {}
    classes: dict[tuple[object, ...], list[_Rank]] = {}
    for number in sorted(recording.paths):
        rank, at = _Rank(recording, number), coordinates(old, number)
        like = first.setdefault(tuple(c for a, c in at.items() if a not in grown), rank)
        _check_alike(like, rank, grown)
        if like is rank:
            classes.setdefault(rank.facts(), []).append(rank)
    for alike in classes.values():
        _check_grows(alike[0], recording, grown)
    results = [_class(alike, old, grown) for alike in classes.values()]
    if more is not None:
        streams = stream_counts(each.program for each in results)
        results = [
            _longer(part, old, more, streams) for each in results for part in _stages(each, more)
        ]
    return RecordedJob(recording, mesh, results)


@dataclass(frozen=True)
class Microbatches:
    """How many microbatches a job is to have, and how it goes through them: None without pipeline
    stages."""

    count: int
    pipelining: Pipelining | None = None


def _stages(each: _Class, more: Microbatches) -> Iterator[_Class]:
    """The class by stage: stages that do the same with few microbatches may not with more."""
    axis = more.pipelining.axis if more.pipelining is not None else ""
    stages: dict[int, list[Mapping[str, int]]] = {}
    for place in each.places:
        stages.setdefault(place.get(axis, 0), []).append(place)
    for places in stages.values():
        yield replace(each, places=places)


def _longer(each: _Class, mesh: Mesh, more: Microbatches, streams: Sequence[int]) -> _Class:
    """The class with more microbatches."""
    program, pipelining = each.program, more.pipelining
    old = microbatches_of(program)
    if more.count < old:
        raise error(
            f"--microbatches {more.count} is less than the {old} of the traces",
            remedy=f"give {old} or more",
        )
    if not old:
        raise error(
            "no node name has a microbatch ('forward/mb0/...'), so it is unknown how microbatches "
            "follow each other",
            remedy="record two microbatches or more, with nodes named as stagec names them",
        )
    turns: Callable[[int], list[Turn]] = one_after_the_other
    axis, chunks = "", 1
    if pipelining is not None:
        axis, chunks = pipelining.axis, chunks_of(program)
        turns = partial(pipelining.turns, each.places[0][axis], mesh[axis], chunks)
    given = turns(old), turns(more.count), axis, streams
    return replace(each, program=with_turns(program, *given, chunks=chunks > 1))


def _class(alike: Sequence[_Rank], mesh: Mesh, grown: frozenset[str]) -> _Class:
    at = (coordinates(mesh, rank.rank) for rank in alike)
    places = [{axis: c for axis, c in each.items() if axis not in grown} for each in at]
    return _Class(places, alike[0].program, alike[0].rank, alike[0].numbers)


def _grown(recording: Recording, mesh: Mesh) -> frozenset[str]:
    """The axes with more ranks. Raises `DiagnosticError` for a mesh that the traces have not, and
    for another order of axes."""
    old, count = recording.mesh, prod(recording.mesh.values())
    if count != len(recording.paths):
        raise error(
            f"the mesh {_text(old)} has {count} ranks, but there are {len(recording.paths)} traces",
            remedy="give the mesh of the traces with --from, the axis of neighbouring ranks last",
        )
    if [axis for axis in mesh if axis in old] != [*old]:
        raise error(
            f"the mesh {_text(mesh)} lacks axes of {_text(old)}, or has them in another order",
            remedy=f"write --to with all of {', '.join(old)}, in this order",
        )
    if prod(mesh.values()) > MAX_RANKS:
        raise error(
            f"the mesh {_text(mesh)} has {prod(mesh.values()):,} ranks, expected at most "
            f"{MAX_RANKS:,}",
            remedy="choose a smaller mesh",
        )
    grown = frozenset(axis for axis, size in mesh.items() if size != old.get(axis, 1))
    for axis in sorted(grown):
        if mesh[axis] < old.get(axis, 1):
            raise error(
                f"--to {axis}={mesh[axis]} is less than the {old[axis]} ranks of the traces",
                remedy=f"give {axis}={old[axis]} or more",
            )
    return grown


def _text(mesh: Mesh) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """The coordinates of a rank, row-major."""
    coords: dict[str, int] = {}
    for axis, size in reversed([*mesh.items()]):
        coords[axis], rank = rank % size, rank // size
    return {axis: coords[axis] for axis in mesh}


def _members(mesh: Mesh, axes: GroupAxes, rank: int) -> tuple[int, ...]:
    """The ranks of a rank's group over axes, in ring order."""
    names, at = list(mesh), coordinates(mesh, rank)
    ranks: list[int] = []
    for place in product(*(range(mesh[a]) for a in axes.axes)):
        here = {**at, **dict(zip(axes.axes, place, strict=True))}
        number = 0
        for axis in names:
            number = number * mesh[axis] + here[axis]
        ranks.append(number)
    if axes.mirrored:
        own = at[axes.axes[0]]
        return tuple(sorted((ranks[own], ranks[-1 - own])))
    return tuple(ranks)


class _Rank:
    """A recorded rank: its nodes, and what their groups and peers are on its mesh."""

    def __init__(self, recording: Recording, rank: int) -> None:
        self.rank, self.path = rank, recording.paths[rank]
        self._mesh, self._groups = recording.mesh, recording.groups
        self._axes: dict[str, GroupAxes] = {}
        self.program = self._program(recording.entries.get(rank, {}))

    @property
    def numbers(self) -> dict[GroupAxes, int]:
        """The recorded number of its group over axes."""
        return {axes: int(text) for text, axes in self._axes.items()}

    def facts(self) -> tuple[object, ...]:
        """What it does, without whom it does that with but for the axes."""
        program = self.program
        columns = (program.prototype, program.tag, program.starts, program.control, program.edges)
        events = program.events
        memory = None if events is None else (events.alloc.tobytes(), events.free.tobytes())
        nodes = tuple(
            (n.kind, n.name, n.size, n.flops, stored_seconds(n), n.group, n.over, n.by, n.to)
            for n in program.prototypes
        )
        return *(column.tobytes() for column in columns), memory, nodes

    def _program(self, entry: Mapping[str, Any]) -> Program:
        reader = ProgramReader(self._mesh)
        try:
            for node in read_trace(self.path):
                _check_known(node)
                coll, message = node.kind == NodeKind.COLL, node.kind in _MESSAGES
                axes = self._group(node) if coll else GroupAxes()
                reader.take(node, axes, self._way(node) if message else ("", 0))
        except TraceError as problem:
            raise error(str(problem), remedy="give complete traces") from None
        except (KeyError, OverflowError, ValueError) as problem:
            raise error(
                f"{self.path}: {problem}",
                remedy="'stagec scale' reads traces as stagec writes them",
            ) from None
        name = str(entry.get("name", f"rank{self.rank}"))
        return reader.program(name, static_bytes(entry.get("memory")))

    def _group(self, node: TraceNode) -> GroupAxes:
        """The axes along which the members of a group differ."""
        text = str(node.attrs.get("pg_name"))
        if text not in self._axes:
            members = self._groups.get(int(text)) if text.isdecimal() else None
            if members is None:
                raise ValueError(f"{node.label}: no groups file lists the ranks of group '{text}'")
            self._axes[text] = self._axes_of(node, tuple(members))
        return self._axes[text]

    def _axes_of(self, node: TraceNode, members: tuple[int, ...]) -> GroupAxes:
        """Of two communicators of the same ranks each gets its own reading: on an axis of two ranks
        the pairs of coordinates i and n-1-i are all of it."""
        several = [axis for axis, size in self._mesh.items() if size > 1]
        for count in range(1, len(several) + 1):
            for axes in permutations(several, count):
                for mirrored in (False, True)[: 1 + (count == 1)]:
                    group = GroupAxes(axes, mirrored)
                    if group.size(self._mesh) != len(members) or group in self._axes.values():
                        continue
                    if _members(self._mesh, group, self.rank) == members:
                        return group
        raise ValueError(
            f"{node.label}: ranks {list(members)[:8]} of its group do not lie along axes of "
            f"{_text(self._mesh)} at rank {self.rank}"
        )

    def _way(self, node: TraceNode) -> Way:
        """The axis of a message, and how much further the other end is."""
        peer = node.attrs.get(_MESSAGES[NodeKind(node.kind)])
        if not isinstance(peer, int) or not 0 <= peer < prod(self._mesh.values()):
            raise ValueError(f"{node.label}: its peer is not a rank of the mesh")
        here, there = coordinates(self._mesh, self.rank), coordinates(self._mesh, peer)
        ways = [(a, (there[a] - here[a]) % n) for a, n in self._mesh.items() if there[a] != here[a]]
        if len(ways) != 1:
            raise ValueError(f"{node.label}: rank {peer} differs along more than one axis")
        return ways[0]


_MESSAGES = {NodeKind.SEND: "comm_dst", NodeKind.RECV: "comm_src"}


def _check_known(node: TraceNode) -> None:
    """Refuse what would be lost. Raises ValueError."""
    unknown = sorted({*node.attrs} - _KNOWN)
    if unknown:
        raise ValueError(f"{node.label}: the attribute '{unknown[0]}' cannot be scaled")
    if node.attrs.get("is_cpu_op") is not False or node.start_micros:
        raise ValueError(f"{node.label} runs on a host, or has a start time")


def _check_alike(first: _Rank, other: _Rank, grown: frozenset[str]) -> None:
    """Ranks that differ along the axes that grow run one program. Raises `DiagnosticError`."""
    if first is other or first.facts() == other.facts():
        return
    raise error(
        f"ranks {first.rank} and {other.rank}, which differ only along "
        f"{', '.join(sorted(grown))}, run different programs",
        remedy=f"compile the larger job; 'stagec diff {first.path} {other.path}' shows how",
    )


def _check_grows(rank: _Rank, recording: Recording, grown: frozenset[str]) -> None:
    """No number of ranks along the axes changes the program. Raises `DiagnosticError`."""
    new = sorted(axis for axis in grown if recording.mesh[axis] == 1)
    other = next((n.name for n in rank.program.prototypes if n.phase != "forward"), None)
    if new and other is not None:
        raise error(
            f"the traces have one rank along {', '.join(new)}, so what ranks along it exchange in "
            f"the backward pass is unknown: '{other}'",
            remedy=f"record two ranks along it: --from {new[0]}=2,...",
        )
    for node in rank.program.prototypes:
        along = sorted(grown & {*node.group.axes, node.over})
        if not along or (node.kind == "all_reduce" and node.phase in _REDUCING):
            continue
        raise error(
            f"'{node.name}', {node.kind} along {', '.join(along)}, is not named as a reduction of "
            "gradients ('gradient/...'): it exchanges shards, whose sizes change with the ranks",
            remedy="scale along an axis that only replicates (no ZeRO, tp, ep or cp along it), or "
            "compile the larger job",
        )
