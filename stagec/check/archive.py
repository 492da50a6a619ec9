"""Checks a job in an archive: each program is read once, and every rank is compared by the groups
and peers that it would get.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from stagec.check.agreement import CheckedJob
from stagec.check.files import GroupsFile
from stagec.check.findings import CheckReport
from stagec.check.ranks import RankReader, RankTrace
from stagec.check.traces import check_traces
from stagec.formats.chakra.files import split_records
from stagec.formats.chakra.format import CHAKRA
from stagec.formats.chakra.nodes import NodeKind, TraceError, decode_node, varint
from stagec.job.archive import Archive, StoredProgram
from stagec.program.nodes import Ints
from stagec.support.diagnostics import DiagnosticError, error

_APART = 1 << 20


def check_archive(path: Path) -> CheckReport:
    """Check the whole job of an archive. Raises `DiagnosticError` if it cannot be opened."""
    report = CheckReport()
    check_traces(read_archive(path, report, RankReader()), report)
    return report


def read_archive(path: Path, report: CheckReport, reader: RankReader) -> CheckedJob:
    """All traces of an archive. What cannot be read is reported; raises `DiagnosticError` if it
    cannot be opened."""
    archive = Archive.open(path)
    if archive.format is not CHAKRA:
        raise error(
            f"'{path}' holds a job in the format '{archive.format.name}', expected Chakra's",
            remedy="compile it with --format chakra: what is checked is the same program",
        )
    traces: dict[int, RankTrace] = {}
    for number, members in enumerate(archive.members):
        program = archive.stored(number)
        try:
            for ranks in _by_widths(program, members):
                for rank, trace in _traces(archive, program, reader, ranks):
                    # stages of one program are told apart: messages along them are no circle
                    class_id = number * _APART + trace.class_id
                    traces[rank] = replace(trace, class_id=class_id)
        except TraceError as problem:
            where = archive.index.classes[number].entry.get("name")
            message = f"class {where}: {problem.where}: {problem.message}"
            report.error(path, "unreadable", message, "write the archive again")
        except DiagnosticError as problem:
            report.error(path, "unreadable", str(problem), "write the archive again")
    table = archive.groups.table()
    groups = GroupsFile(path, {int(n): tuple(ranks) for n, ranks in table.items()})
    every = frozenset(range(archive.groups.ranks))
    return CheckedJob(path, dict(sorted(traces.items())), every, groups)


def _by_widths(program: StoredProgram, members: Ints) -> list[Ints]:
    """The ranks of a class by the widths of their identifiers."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in members.tolist():
        found.setdefault(program.widths(rank), []).append(rank)
    return [np.array(ranks, dtype=np.int64) for ranks in found.values()]


def _traces(
    archive: Archive, program: StoredProgram, reader: RankReader, ranks: Ints
) -> Iterator[tuple[int, RankTrace]]:
    """The traces of ranks whose bytes differ in the digits of groups and peers only: the first one
    is read, the others are derived from it."""
    first = int(ranks[0])
    data, path = program.rank(first), Path(f"{archive.name}.{first}.et")
    like = reader.read_bytes(path, first, bytes(data))
    variant = program.variant(program.widths(first))
    _check_tables(path, data, [*variant.ends.values(), *variant.peers.values()])
    layout = program.layout
    names = {str(n[first]): n[ranks] for n in map(layout.groups.number.__getitem__, variant.ends)}
    ways = {way: layout.peers(ranks, *way) for way in variant.peers}
    known: dict[int, Ints] = {}
    for found in ways.values():
        if not np.array_equal(known.setdefault(int(found[0]), found), found):
            raise TraceError(path, 0, "peers that are one rank here are two elsewhere")
    texts = [names[t].astype(str).tolist() if t in names else [t] * len(ranks) for t in like.groups]
    peers = [known[p].tolist() if p in known else [p] * len(ranks) for p in like.peers]
    for i, rank in enumerate(ranks.tolist()):
        yield (
            rank,
            replace(
                like,
                rank=rank,
                path=Path(f"{archive.name}.{rank}.et"),
                groups=tuple(text[i] for text in texts),
                peers=tuple(peer[i] for peer in peers),
            ),
        )


def _check_tables(path: Path, data: memoryview, tables: list[Ints]) -> None:
    """What is patched are the last bytes of nodes that communicate."""
    ends: list[int] = []
    for offset, raw in split_records(path, bytes(data)):
        if decode_node(path, offset, raw).kind in (NodeKind.COLL, NodeKind.SEND, NodeKind.RECV):
            ends.append(offset + len(varint(len(raw))) + len(raw) - 1)
    for places in tables:
        if not np.isin(places, ends).all():
            raise TraceError(path, 0, "a table of the archive leads to no communication")
