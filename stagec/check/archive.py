"""Checks a job in an archive: each program is read once, and ranks are compared by the groups and
peers of their traces, which are not written.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from stagec.check.agreement import CheckedJob
from stagec.check.findings import CheckReport
from stagec.check.members import GroupMembers
from stagec.check.ranks import RankReader
from stagec.check.table import ProgramRanks, RankTable, distinct, joined
from stagec.check.trace_files import GroupsFile
from stagec.check.traces import check_traces
from stagec.formats.chakra.encode import decimal_width
from stagec.formats.chakra.format import CHAKRA
from stagec.formats.chakra.nodes import TraceError
from stagec.program.groups import Groups
from stagec.program.nodes import Ints
from stagec.support.diagnostics import DiagnosticError, error
from stagec.traces.archive import Archive, StoredProgram

_STRIDE = 1 << 20


def check_archive(path: Path) -> CheckReport:
    """Check the whole job of an archive. Raises `DiagnosticError` if it cannot be opened."""
    report = CheckReport()
    check_traces(read_archive(path, report, RankReader()), report)
    return report


def read_archive(path: Path, report: CheckReport, reader: RankReader) -> CheckedJob:
    """Read all traces of an archive. Traces that cannot be read are reported. Raises
    `DiagnosticError` if the archive cannot be opened."""
    archive = Archive.open(path)
    texts: dict[str, int] = {}
    if archive.format is not CHAKRA:
        raise error(
            f"'{path}' holds a job in the format '{archive.format.name}', expected Chakra's",
            remedy="compile it with --format chakra, which has the same program",
        )
    parts: list[ProgramRanks] = []
    for number, members in enumerate(archive.members):
        program = archive.stored(number)
        try:
            for ranks in _by_widths(program, members):
                part = _read(archive, program, reader, ranks, texts)
                # stages of one program stay different: messages between them are no cycle
                parts.append(replace(part, number=number * _STRIDE + part.number))
        except TraceError as problem:
            where = archive.index.classes[number].entry.get("name")
            message = f"class {where}: {problem.where}: {problem.message}"
            report.error(path, "unreadable", message, "write the archive again")
        except DiagnosticError as problem:
            report.error(path, "unreadable", str(problem), "write the archive again")
    table = RankTable(parts, partial(_path, archive.name), texts)
    groups = GroupsFile(path, _members(archive.groups))
    return CheckedJob(path, table, range(archive.groups.ranks), groups)


def _path(name: str, rank: int) -> Path:
    return Path(f"{name}.{rank}.et")


def _members(groups: Groups) -> GroupMembers:
    rows = groups.members
    ids = [groups.first[axes] + np.arange(len(each)) for axes, each in rows.items()]
    sizes = [np.full(*each.shape) for each in rows.values()]
    return GroupMembers(*map(joined, (ids, sizes, [each.reshape(-1) for each in rows.values()])))


def _by_widths(program: StoredProgram, members: Ints) -> list[Ints]:
    """The ranks of a class, grouped by the decimal widths of their group identifiers."""
    number = program.layout.groups.number
    widths = [decimal_width(number[axes][members]) for axes in program.axes]
    _, alike = distinct(np.zeros_like(members), *widths)
    return [members[alike == i] for i in range(int(alike.max(initial=-1)) + 1)]


def _read(
    archive: Archive, program: StoredProgram, reader: RankReader, ranks: Ints, texts: dict[str, int]
) -> ProgramRanks:
    """Read ranks whose traces differ only in the digits of groups and peers: only the trace of the
    first one is decoded, and the groups and peers of the others come from the archive's tables."""
    first = int(ranks[0])
    data, path = bytes(program.rank(first)), _path(archive.name, first)
    like = reader.read_bytes(path, first, data)
    variant = program.variant(program.widths(first))
    ends = reader.ends_of_communication(path, data)
    for places in (*variant.ends.values(), *variant.peers.values()):
        if not np.isin(places, ends).all():
            raise TraceError(
                path,
                0,
                "a table of the archive points to a node that is not a collective or message",
            )
    layout = program.layout
    names = {str(n[first]): n[ranks] for n in map(layout.groups.number.__getitem__, variant.ends)}
    peers: dict[int, Ints] = {}
    for way in variant.peers:
        to = layout.peers(ranks, *way)
        if not np.array_equal(peers.setdefault(int(to[0]), to), to):
            raise TraceError(path, 0, "the peers of a program differ between its ranks")
    alone = RankTable.of([like], texts).classes[0]
    return ProgramRanks(
        like.class_id,
        like.analysis,
        ranks,
        [
            names[text] if text in names else np.repeat(same, len(ranks))
            for text, same in zip(like.groups, alone.groups, strict=True)
        ],
        [
            peers[peer] if peer in peers else np.repeat(same, len(ranks))
            for peer, same in zip(like.peers, alone.peers, strict=True)
        ],
    )
