"""The format of MLCommons Chakra, as ASTRA-sim and its relatives read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stagec.formats.base import Durations, Format, Layout
from stagec.formats.chakra.encode import Encoder, fixed_varint
from stagec.formats.chakra.limits import exceeded_limits
from stagec.formats.chakra.nodes import varint
from stagec.program.groups import Groups
from stagec.program.nodes import Program


class ChakraFormat(Format):
    """Chakra execution traces: protobuf records, one file a rank, and a file of groups."""

    name = "chakra"
    suffix = "et"
    patched = True

    def encoder(self, program: Program, layout: Layout, durations: Durations | None) -> Encoder:
        return Encoder(self, program, layout, durations)

    def peer(self, rank: int, ranks: int) -> bytes:
        return fixed_varint(rank, len(varint(ranks - 1)))

    def warnings(self, path: Path, groups: Groups, nodes: int) -> Sequence[str]:
        found = exceeded_limits(groups.ids, groups.ranks, nodes)
        if "empty" in str(path):
            found.append("ASTRA-sim takes a path with the word 'empty' for no groups file at all")
        return found


CHAKRA = ChakraFormat()
