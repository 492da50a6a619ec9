"""What a file format of traces is: from the program of a rank class to the bytes of any of its
ranks.

Ranks of a class differ in the identifiers of their communicators and in their peers only. An
encoder may make every rank anew, or serialise a class once and write over the few bytes in which
ranks differ:

    class          ... pg_name="9" ... comm_dst=  ...      serialised once: a `Variant`
    rank 5         ... pg_name="3" ... comm_dst=6 ...      the same memory, written over
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stagec.program.groups import GroupAxes, Groups, neighbours
from stagec.program.nodes import Ints, Node, Program
from stagec.support.diagnostics import DiagnosticError, error

#: A mesh axis, and a difference of coordinates along it.
Neighbour = tuple[str, int]
Bytes = npt.NDArray[np.uint8]
#: The seconds of a computation.
Durations = Callable[[Node], float]


class RankBytes(Protocol):
    """Makes the file of any rank of a class."""

    def rank(self, rank: int) -> bytes | memoryview:
        """The bytes of a rank, good until the next is made."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """Who talks to whom in a job: what the bytes of a rank need beside those of its class."""

    mesh: Mapping[str, int]
    groups: Groups

    def peer(self, rank: int, axis: str, by: int) -> int:
        """The rank that is `by` places further along an axis, round the ring."""
        return int(neighbours(self.mesh, axis, by, np.array([rank]))[0])


class Format:
    """Base of file formats. One is brought by `Plugin(formats=...)`, and chosen by `--format`.

    `suffix` ends the names of files, `NAME.RANK.SUFFIX`. What has `patched` makes encoders that are
    `PatchedEncoder`s: its jobs can be kept in archives, and be written by clusters, which get them
    as archives. All formats go with worker processes, `--only-ranks` and `--resume`.
    """

    name: str = ""
    suffix: str = ""
    patched: bool = False

    def encoder(self, program: Program, layout: Layout, durations: Durations | None) -> RankBytes:
        """Makes the files of the ranks that run a program; with `durations` the times of its
        computations are known."""
        raise error(f"the format '{self.name}' has no encoder", remedy="define 'encoder' in it")

    def peer(self, rank: int, ranks: int) -> bytes:
        """How a peer is written into patched bytes: by as many bytes for all ranks of a job."""
        raise error(f"the format '{self.name}' writes no peers", remedy="define 'peer' in it")

    def tables(self, name: str, groups: Groups) -> Mapping[str, bytes]:
        """The files that a job has beside those of its ranks, by name: its communicator groups."""
        return {f"{name}.json": json.dumps(groups.table()).encode()}

    def warnings(self, path: Path, groups: Groups, nodes: int) -> Sequence[str]:
        """What consumers cannot take of a job at this path, whose ranks have up to `nodes`
        nodes."""
        return ()


def not_patched(format_: Format) -> DiagnosticError:
    """The error for a format that archives and clusters cannot take."""
    return error(
        f"the format '{format_.name}' makes every rank anew, so no archive can hold it, and no "
        "cluster write it",
        remedy="write files by processes here: -o DIR, without --archive and --scheduler",
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """A serialised program; for each axes and each neighbour, the positions of the last byte of
    its identifiers, and what is written there now."""

    data: Bytes
    ends: Mapping[GroupAxes, Ints]
    peers: Mapping[Neighbour, Ints]
    _there: dict[GroupAxes | Neighbour, bytes] = field(
        default_factory=dict[GroupAxes | Neighbour, bytes]
    )

    def put(self, key: GroupAxes | Neighbour, ends: Ints, text: bytes) -> None:
        """Write an identifier at its places, as far as another one is there."""
        there = self._there.get(key, b"")
        for place in range(1, len(text) + 1):
            if text[-place:][:1] != there[-place:][:1]:
                self.data[ends - (place - 1)] = text[-place]
        self._there[key] = text


class PatchedEncoder:
    """Writes what ranks differ in over the bytes of their class.

    A program is serialised once for each combination of the widths of its groups' identifiers,
    which are decimal numbers of `axes`.
    """

    def __init__(self, format_: Format, layout: Layout, axes: Sequence[GroupAxes]) -> None:
        self.format, self.layout, self.axes = format_, layout, axes
        self._variants: dict[tuple[int, ...], Variant] = {}

    def serialised(self, widths: Mapping[GroupAxes, int]) -> Variant:
        """The program for identifiers of these widths. Raises `DiagnosticError`: an encoder has
        its own."""
        raise error(
            f"the encoder of format '{self.format.name}' does not say how it serialises",
            remedy="give it a method serialised(widths)",
        )

    def rank(self, rank: int) -> memoryview:
        """The bytes of a rank, good until the next rank is made: the same places are written over
        for every rank."""
        variant, layout = self.variant(self.widths(rank)), self.layout
        for axes, ends in variant.ends.items():
            variant.put(axes, ends, str(layout.groups.of_rank(axes, rank)).encode())
        for way, ends in variant.peers.items():
            peer = self.format.peer(layout.peer(rank, *way), layout.groups.ranks)
            variant.put(way, ends, peer)
        return variant.data.data

    def widths(self, rank: int) -> tuple[int, ...]:
        """Digits of the identifiers of the rank's groups, in the order of `axes`."""
        return tuple(len(str(self.layout.groups.of_rank(axes, rank))) for axes in self.axes)

    def variant(self, widths: tuple[int, ...]) -> Variant:
        """The same, made once."""
        if widths not in self._variants:
            given = dict(zip(self.axes, widths, strict=True))
            self._variants[widths] = self.serialised(given)
        return self._variants[widths]
