"""Reads the traces of ranks for the checker, and caches the parts that they share.

A record is decoded once for all ranks that contain the same bytes, and a program is analysed once
for all ranks that differ only in their groups and peers (a rank class).
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stagec.check.program import Analysis, TraceProgram, analyse
from stagec.check.trace_files import ALL_RANKS
from stagec.formats.chakra.nodes import AttrValue, NodeKind, TraceNode, decode_node, varint
from stagec.formats.chakra.record_files import read_records, split_records

_CACHED_RECORDS = 1 << 17

_LINK_OF: Mapping[int, str] = {
    NodeKind.COLL: "pg_name",
    NodeKind.SEND: "comm_dst",
    NodeKind.RECV: "comm_src",
}
LINKS = frozenset({"pg_name", "comm_dst", "comm_src"})


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The trace of one rank: the class of its program, and its groups and peers by slot.

    `groups` contains the `pg_name` of each group slot as written, `peers` the rank of each peer
    slot.
    """

    rank: int
    path: Path
    class_id: int
    analysis: Analysis
    groups: tuple[str, ...]
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Record:
    """A decoded record. `link` is the group or peer that it names, `shape` a digest of everything
    else."""

    node: TraceNode
    shape: bytes
    link: AttrValue | None


class RankReader:
    """Reads trace files, with a cache of records and programs. With `times`, ranks with different
    times of nodes are in different classes."""

    def __init__(
        self, analyse: Callable[[TraceProgram], Analysis] = analyse, *, times: bool = False
    ) -> None:
        self._analyse, self._times = analyse, times
        self._records: dict[bytes, _Record] = {}
        self._class_ids: dict[bytes, int] = {}
        self.classes: list[Analysis] = []

    def read(self, path: Path, rank: int) -> RankTrace:
        """The trace of a rank.

        Raises TraceError for a file that is not a trace.
        """
        return self._trace(path, rank, read_records(path))

    def ends_of_communication(self, path: Path, data: bytes) -> list[int]:
        """The positions of the last bytes of records whose kind names a group or a peer.

        Raises TraceError for what is not a trace.
        """
        records = ((at, raw, self._record(path, at, raw)) for at, raw in split_records(path, data))
        return [
            at + len(varint(len(raw))) + len(raw) - 1
            for at, raw, record in records
            if record.node.kind in _LINK_OF
        ]

    def read_bytes(self, path: Path, rank: int, data: bytes) -> RankTrace:
        """The trace of a rank from the content of its file.

        Raises TraceError for what is not a trace.
        """
        return self._trace(path, rank, split_records(path, data))

    def _trace(self, path: Path, rank: int, raw_records: Iterable[tuple[int, bytes]]) -> RankTrace:
        records = [self._record(path, offset, raw) for offset, raw in raw_records]
        groups: dict[str, int] = {}
        peers: dict[int, int] = {}
        group_slots: dict[int, int] = {}
        peer_slots: dict[int, int] = {}
        for index, record in enumerate(records):
            link = record.link
            if isinstance(link, str):
                group_slots[index] = groups.setdefault(link, len(groups))
            elif isinstance(link, int):
                peer_slots[index] = peers.setdefault(link, len(peers))
        key = _digest(records, group_slots, peer_slots)
        class_id = self._class_ids.get(key)
        if class_id is None:
            class_id = self._class_ids[key] = len(self.classes)
            nodes = tuple(record.node for record in records)
            self.classes.append(self._analyse(TraceProgram(nodes, group_slots, peer_slots)))
        return RankTrace(rank, path, class_id, self.classes[class_id], tuple(groups), tuple(peers))

    def _record(self, path: Path, offset: int, raw: bytes) -> _Record:
        record = self._records.get(raw)
        if record is None:
            node = decode_node(path, offset, raw)
            record = _Record(node, _shape(node, times=self._times), _link(node))
            if len(self._records) >= _CACHED_RECORDS:
                self._records.clear()
            self._records[raw] = record
        return record


def _link(node: TraceNode) -> AttrValue | None:
    """The group or peer of a node, None without one or if its type is wrong."""
    name = _LINK_OF.get(node.kind)
    if name is None:
        return None
    value = node.attrs.get(name)
    if value is None and name == "pg_name":
        return ALL_RANKS
    return value if isinstance(value, str if name == "pg_name" else int) else None


def _shape(node: TraceNode, *, times: bool) -> bytes:
    values = [
        (name, type_name, None if name in LINKS else node.attrs[name])
        for name, type_name in sorted(node.attr_types.items())
    ]
    when = (node.start_micros, node.duration_micros) if times else ()
    facts = (node.id, node.name, node.kind, node.data_deps, node.ctrl_deps, values, when)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


def _digest(
    records: list[_Record], group_slots: Mapping[int, int], peer_slots: Mapping[int, int]
) -> bytes:
    digest = hashlib.sha256(b"".join([record.shape for record in records]))
    for slots in (group_slots, peer_slots):
        digest.update(array("q", [number for pair in slots.items() for number in pair]).tobytes())
        digest.update(b"|")
    return digest.digest()
