"""Writes a job: one file per rank, the groups file and the manifest, all or nothing.

A job comes from a `Source`: a compiled module, or an archive of one. Files are written by worker
processes, each for ranges of ranks; the result does not depend on their number. What an interrupted
run left is compared, byte for byte, with what is to be there.
"""

from __future__ import annotations

import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from stagec.formats.base import (
    Durations,
    Format,
    JobFormat,
    Layout,
    RankBytes,
    TraceJob,
    check_needs,
)
from stagec.program.groups import Groups
from stagec.program.nodes import NODE_KINDS, Ints
from stagec.support.diagnostics import error
from stagec.support.limits import MAX_RANKS
from stagec.support.words import counted
from stagec.traces.checksum import CHECKSUM_VERSION, with_checksum
from stagec.traces.folder import MANIFEST, check_same_job, real_folder, working_folder
from stagec.traces.workers import run_units

#: Called with the ranks done and their total.
Progress = Callable[[int, int], None]
#: A worker takes about so many bytes at a time.
_UNIT_BYTES = 64 << 20
#: A smaller job is written without workers.
_SMALL_JOB = 16 << 20
#: The sizes of so many classes are an estimate for all.
_SAMPLES = 4


class TraceSource(TraceJob, Protocol):
    """A job that can be written."""

    @property
    def format(self) -> Format:
        """The format of its files."""
        ...

    @property
    def mesh(self) -> Mapping[str, int]:
        """Its mesh."""
        ...

    @property
    def groups(self) -> Groups:
        """The numbered communicator groups."""
        ...

    def entry(self, number: int) -> dict[str, object]:
        """What the manifest says of a class."""
        ...

    def encoder(self, number: int) -> RankBytes:
        """The program of a class."""
        ...


class OfOneMesh:
    """What sources of one mesh have in common."""

    def layout_of(self: TraceSource, number: int) -> Layout:
        """That of the ranks of a class: the same for all."""
        return self.layout

    def durations_of(self: TraceSource, number: int) -> Durations | None:
        """The same for all classes."""
        return self.durations

    def encoder(self: TraceSource, number: int) -> RankBytes:
        """The program of a class as bytes."""
        return self.format.encoder(self.program(number), self.layout, self.durations)


def entry_of(
    source: TraceSource, number: int, name: str, coords: Mapping[str, int], memory: object
) -> dict[str, object]:
    """What the manifest says of a class of a source of one mesh. `memory` is None if nothing is
    known of it."""
    ranks, program = source.members[number], source.program(number)
    nodes: dict[str, int] = dict.fromkeys(NODE_KINDS, 0)
    for node, count in zip(program.prototypes, program.counts.tolist(), strict=True):
        nodes[node.record] += count
    dropped = list(source.format.drops(program, source.layout))
    return {
        "name": name,
        "count": len(ranks),
        "example_rank": int(ranks[0]),
        "coords": dict(coords),
        "nodes": nodes,
        **({"memory": memory} if memory is not None else {}),
        **({DROPPED: dropped} if dropped else {}),
    }


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: bytes of each file, the warnings that go with it, and what the format does
    not carry of the job."""

    directory: Path
    files: Mapping[str, int]
    warnings: tuple[str, ...] = field(default=())
    dropped: tuple[str, ...] = field(default=())

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


#: In what the manifest says of a class: what the format does not carry of it.
DROPPED = "not_carried"
#: A class by number, and some of its ranks.
Unit = tuple[int, Ints]
#: Size and CRC-32 of each file.
Files = dict[str, tuple[int, str]]
#: What the manifest says of each class.
Entries = dict[int, dict[str, object]]
_All = tuple[Entries, Files]
#: What the manifest says of a class, and the files of some of its ranks.
Done = tuple[dict[str, object], Files]
#: Writes ranks into a folder, perhaps on other machines: what is done, with the number of the unit;
#: the flag: what is there already is compared.
Elsewhere = Callable[[Path, Sequence[Unit], bool], Iterator[tuple[int, Done]]]


@dataclass(frozen=True, slots=True)
class Emission:
    """How a job is written: which ranks (all, if None), by how many worker processes, whether an
    interrupted run is completed or earlier output replaced, and who writes if not workers here."""

    ranks: Ints | None = None
    workers: int = 1
    resume: bool = False
    force: bool = False
    progress: Progress | None = None
    elsewhere: Elsewhere | None = None


_ALL_HERE = Emission()


def write_source(
    source: TraceSource, directory: Path, about: Mapping[str, object], how: Emission = _ALL_HERE
) -> Written:
    """Write the traces of a job into `directory`.

    `about` goes into the manifest (inputs, strategy, versions). Raises `DiagnosticError` if the
    directory is not empty (and not `force`), cannot be written, does not fit on the disk, or holds
    another job that would be completed, and for a job that the format refuses.
    """
    check_job(source)
    target, classes = real_folder(directory), _classes(source, how.ranks)
    if how.resume and not how.force:
        check_same_job(target, about)
    with working_folder(target, force=how.force, resume=how.resume) as folder:
        writer = RankWriter(source, folder, how.resume)
        if isinstance(source.format, JobFormat):
            entries, files = _write_whole(source, source.format, writer, how.ranks)
        else:
            entries, files = _write_ranks(writer, classes, how)
        nodes = max(sum(_counts(entry).values()) for entry in entries.values())
        path = directory.resolve() / source.name
        warnings = tuple(source.format.warnings(path, source.groups, nodes))
        beside = source.format.tables(source.name, source.groups), source.format.companions(source)
        for table, content in (pair for part in beside for pair in part.items()):
            files[table] = writer.put(table, content)
        manifest: dict[str, object] = {
            "manifest": CHECKSUM_VERSION,
            **about,
            "format": source.format.name,
            "ranks": source.groups.ranks,
            **({} if how.ranks is None else {"ranks_written": ranges_text(how.ranks)}),
            "mesh": dict(source.mesh),
            "classes": [entry for _, entry in sorted(entries.items(), key=itemgetter(0))],
            "consumer_limits_exceeded": list(warnings),
            "files": {n: {"bytes": size, "crc32": digest} for n, (size, digest) in files.items()},
        }
        files[MANIFEST] = writer.put(MANIFEST, with_checksum(manifest))
        if how.resume or how.elsewhere is not None:
            _remove_others(folder, files)
    dropped = tuple(dict.fromkeys(s for e in entries.values() for s in _dropped(e)))
    return Written(directory, {n: size for n, (size, _) in files.items()}, warnings, dropped)


def check_job(source: TraceSource) -> None:
    """Refuse a job that its format, or the format's consumer, cannot take. Raises
    `DiagnosticError`."""
    check_needs(source.format, source)
    source.format.check(source)


def _write_ranks(writer: RankWriter, classes: Sequence[Unit], how: Emission) -> _All:
    """Write a file for each rank."""
    folder, sizes = writer.folder, writer.sizes(classes)
    total = sum(size * len(ranks) for (_, ranks), size in zip(classes, sizes, strict=True))
    _check_space(folder, total)
    workers = how.workers if total > _SMALL_JOB else 1
    units = list(_units(classes, sizes))
    if how.elsewhere is not None:
        results = how.elsewhere(folder, units, how.resume)
    else:
        results = run_units(writer.write, units, workers)
    entries: Entries = {}
    parts: dict[int, Files] = {}
    for unit, (entry, files) in results:
        entries[units[unit][0]], parts[unit] = entry, files
        if how.progress is not None:
            how.progress(sum(map(len, parts.values())), sum(len(r) for _, r in classes))
    written = (part.items() for _, part in sorted(parts.items(), key=itemgetter(0)))
    return entries, {name: facts for part in written for name, facts in part}


def _named(format_: JobFormat, files: Any) -> Iterator[tuple[str, Iterable[Any]]]:
    """The files of a job with their parts. Raises `DiagnosticError` for what is not a file,
    of a plug-in."""
    remedy = "yield from 'files' a name and its parts for each file: yield name, [text.encode()]"
    if not hasattr(files, "__iter__"):
        kind = type(files).__name__
        raise error(f"the format '{format_.name}' returns a {kind} from 'files'", remedy=remedy)
    for each in files:
        if not _is_named(each):
            raise error(f"the format '{format_.name}' yields {each!r} from 'files'", remedy=remedy)
        yield each


def _is_named(each: object) -> bool:
    """Whether it is a name and the parts of a file."""
    pair = cast("tuple[object, ...]", each) if isinstance(each, tuple) else ()
    return len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Iterable)


def _write_whole(
    source: TraceSource, format_: JobFormat, writer: RankWriter, ranks: Ints | None
) -> _All:
    """Write the files that the format names."""
    estimate = format_.estimate(source, ranks)
    if estimate is not None:
        _check_space(writer.folder, estimate.bytes)
    entries: Entries = {number: source.entry(number) for number, _ in _classes(source, ranks)}
    files: Files = {}
    for name, parts in _named(format_, format_.files(source, ranks)):
        if name in files or name == MANIFEST or Path(name).name != name:
            raise error(
                f"the format '{format_.name}' yields the invalid or repeated file name '{name}'",
                remedy="give each file of a job a name of its own, without folders",
            )
        files[name] = writer.put_parts(name, parts)
    return entries, files


class RankWriter:
    """Writes files of ranks into `folder`; with `compare`, those that are not there already, and
    with `by_rename` under other names first."""

    def __init__(
        self, source: TraceSource, folder: Path, compare: bool, *, by_rename: bool = False
    ) -> None:
        self._source, self.folder, self._compare = source, folder, compare
        self._suffix = f".{uuid.uuid4().hex}" if by_rename else ""
        self._encoders: dict[int, RankBytes] = {}

    def sizes(self, classes: Sequence[Unit]) -> list[int]:
        """About how many bytes per rank each class takes, from a few of them."""
        step = -(-len(classes) // _SAMPLES) or 1
        sizes = {
            i: len(self._bytes(self._encoder(classes[i][0]), int(classes[i][1][0])))
            for i in range(0, len(classes), step)
        }
        largest = max(sizes.values(), default=0)
        return [sizes.get(i, largest) for i in range(len(classes))]

    def write(self, unit: Unit) -> Done:
        """Write some ranks of a class; what the manifest says of the class and of the files."""
        number, ranks = unit
        encoder = self._encoder(number)
        files: Files = {}
        for rank in ranks.tolist():
            name = f"{self._source.name}.{rank}.{self._source.format.suffix}"
            files[name] = self.put(name, self._bytes(encoder, rank))
        return self._source.entry(number), files

    def put(self, name: str, data: bytes | memoryview) -> tuple[int, str]:
        """Write a file; its size and checksum."""
        path = self.folder / name
        if not (self._compare and _holds(path, data)):
            working = path.with_name(f".{name}{self._suffix}") if self._suffix else path
            working.write_bytes(data)
            if self._suffix:
                working.rename(path)
        return len(data), f"{zlib.crc32(data):08x}"

    def put_parts(self, name: str, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
        """Write a file part by part; its size and checksum. Raises `DiagnosticError` for parts that
        are no bytes, of a plug-in."""
        size, digest = 0, 0
        with (self.folder / name).open("wb") as file:
            for part in parts:
                data = self._checked(part, f"as a part of '{name}'", "'files'")
                size, digest = size + file.write(data), zlib.crc32(data, digest)
        return size, f"{digest:08x}"

    def _bytes(self, encoder: RankBytes, rank: int) -> bytes | memoryview:
        """The bytes of a rank. Raises `DiagnosticError` for other objects, of a plug-in."""
        return self._checked(encoder.rank(rank), f"for rank {rank}", "'rank' of its encoder")

    def _checked(self, content: object, what: str, where: str) -> bytes | memoryview:
        if isinstance(content, bytes):
            return content
        if isinstance(content, memoryview):
            return cast("memoryview", content)
        raise error(
            f"the format '{self._source.format.name}' gives a {type(content).__name__} {what}, "
            "expected bytes",
            remedy=f"return bytes from {where}: text.encode()",
        )

    def _encoder(self, number: int) -> RankBytes:
        if number not in self._encoders:
            while len(self._encoders) >= _SAMPLES:
                del self._encoders[next(iter(self._encoders))]
            self._encoders[number] = self._made_encoder(number)
        return self._encoders[number]

    def _made_encoder(self, number: int) -> RankBytes:
        """The encoder of a class. Raises `DiagnosticError` for other objects, of a plug-in."""
        made = self._source.encoder(number)
        if not callable(getattr(made, "rank", None)):
            raise error(
                f"the format '{self._source.format.name}' gives a {type(made).__name__} as its "
                "encoder, which has no method 'rank'",
                remedy="return from 'encoder' what has one: rank(number) -> bytes",
            )
        return made


def _holds(path: Path, data: bytes | memoryview) -> bool:
    """Whether a file has this content."""
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except FileNotFoundError:
        return False


def _remove_others(folder: Path, files: Mapping[str, object]) -> None:
    """Remove what an interrupted run, or a lost worker, left."""
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()


def _classes(source: TraceSource, ranks: Ints | None) -> list[Unit]:
    """The ranks to write, by class. Raises `DiagnosticError` if the job has no such rank."""
    if ranks is None:
        return list(enumerate(source.members))
    if len(ranks) and ranks[-1] >= source.groups.ranks:
        raise error(
            f"there is no rank {ranks[-1]}: the job has {counted(source.groups.ranks, 'rank')}",
            remedy="they are numbered from 0",
        )
    chosen = ((n, m[np.isin(m, ranks)]) for n, m in enumerate(source.members))
    return [(n, m) for n, m in chosen if len(m)]


def _units(classes: Sequence[Unit], sizes: Sequence[int]) -> Iterator[Unit]:
    for (number, ranks), size in zip(classes, sizes, strict=True):
        step = max(1, _UNIT_BYTES // max(1, size))
        for start in range(0, len(ranks), step):
            yield number, ranks[start : start + step]


def _check_space(folder: Path, needed: int) -> None:
    """Refuse a job that does not fit. What is there already will be compared or replaced."""
    there = sum(entry.stat().st_size for entry in os.scandir(folder))
    free = shutil.disk_usage(folder).free
    if needed - there > free:
        raise error(
            f"the traces take about {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free on "
            f"the disk of '{folder.parent}'",
            remedy="free space, write some ranks (--only-ranks), or one archive (--archive FILE)",
        )


def _counts(entry: Mapping[str, Any]) -> Mapping[str, int]:
    nodes: Mapping[str, int] = entry["nodes"]
    return nodes


def _dropped(entry: Mapping[str, Any]) -> Sequence[str]:
    dropped: Sequence[str] = entry.get(DROPPED, ())
    return dropped


def parse_ranges(text: str) -> Ints:
    """The ranks of `0-1023,4096`, in order. Raises `DiagnosticError`."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = [first, last if dash else first]
        if not all(e.isascii() and e.isdigit() and len(e) < _MOST_DIGITS for e in ends):
            raise _no_ranges(part)
        low, high = map(int, ends)
        if high < low or high - low > MAX_RANKS:
            raise _no_ranges(part)
        ranks.update(range(low, high + 1))
    return np.array(sorted(ranks), dtype=np.int64)


_MOST_DIGITS = 9


def _no_ranges(part: str) -> Exception:
    return error(f"'{part}' is not a range of ranks", remedy="write ranks as 0-1023,4096")


def ranges_text(ranks: Ints) -> str:
    """Ranks in order, as ranges."""
    breaks = np.flatnonzero(np.diff(ranks) > 1) + 1
    parts = [p for p in np.split(ranks, breaks) if len(p)]
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
