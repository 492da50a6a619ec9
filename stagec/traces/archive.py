"""A job in one file: class programs as bytes, and tables of what differs between ranks.

The format is described in docs/archive.md. Whatever is in a file, opening and reading it ends in
what it holds or in a `DiagnosticError`, in memory bounded by what its index admits.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import zstandard

from stagec.formats.base import (
    Durations,
    Format,
    JobFormat,
    Layout,
    ModelJob,
    PatchedEncoder,
    RankBytes,
    Variant,
    not_patched,
)
from stagec.formats.chakra.encode import decimal_width
from stagec.formats.chakra.format import ChakraFormat
from stagec.formats.chakra.nodes import TraceNode, decode_node
from stagec.formats.chakra.record_files import split_records
from stagec.formats.registry import find_format
from stagec.program.groups import GroupAxes, Groups, number_groups
from stagec.program.nodes import Ints, Program
from stagec.support.diagnostics import error
from stagec.support.files import new_file
from stagec.support.words import counted
from stagec.traces.archive_index import Index, StoredClass, StoredVariant, parse_index
from stagec.traces.emit import EmittedJob
from stagec.traces.pod_programs import PodsJob, groups_of, of_one_mesh, one_behind_the_other
from stagec.traces.stored import stored_program, stored_seconds
from stagec.traces.writer import DROPPED

if TYPE_CHECKING:
    from stagec.machines import Machine

MAGIC = b"stagec archive\n\0"
VERSION = 1
#: Magic, version, bytes of the index in the file and unpacked, SHA-256 of it unpacked.
_HEAD = struct.Struct("<16sIQQ32s")
_LEVEL = 9
#: Repetitions are found at this distance, and readers need so much memory.
_WINDOW_LOG = 26
MOST_INDEX_BYTES = 256 << 20
_REMEDY = "write the archive again with stagec compile --archive"


def is_archive(path: Path) -> bool:
    """Whether a file begins as an archive does; what cannot be read does not."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def write_archive(job: EmittedJob | PodsJob, path: Path, about: Mapping[str, object]) -> int:
    """Write a job to a file, all or nothing; the bytes of the file. Raises `DiagnosticError` for a
    format without a table of what differs between ranks."""
    if not job.format.patched or isinstance(job.format, JobFormat):
        raise not_patched(job.format)
    with new_file(path) as file:
        _write(job, file, about)
    return path.stat().st_size


def _write(job: EmittedJob | PodsJob, file: BinaryIO, about: Mapping[str, object]) -> None:
    """Frames first, then the index, then the head, whose place was left free."""
    file.write(bytes(_HEAD.size))
    classes = [_class(job, number, file) for number in range(len(job.classes))]
    pods: dict[str, object] = {}
    if isinstance(job, PodsJob):
        pods["pods"] = [_pod(name, layout) for name, layout in job.layouts.items()]
    index = {
        "name": job.name,
        "format": job.format.name,
        "mesh": dict(job.mesh),
        **pods,
        "about": dict(about),
        "classes": classes,
    }
    raw = json.dumps(index, separators=(",", ":")).encode()
    packed = _compressed(raw)
    file.write(packed)
    file.seek(0)
    file.write(_HEAD.pack(MAGIC, VERSION, len(packed), len(raw), hashlib.sha256(raw).digest()))


def _class(job: EmittedJob | PodsJob, number: int, file: BinaryIO) -> dict[str, object]:
    """Write the frames of a class; what the index says of it."""
    each, encoder = job.classes[number], job.encoder(number)
    if not isinstance(encoder, PatchedEncoder):
        raise error(
            f"the encoder of format '{job.format.name}' is not a PatchedEncoder",
            remedy="derive its encoder from stagec.api.PatchedEncoder",
        )
    every = _widths(job.layout_of(number).groups, encoder.axes, job.members[number])
    return {
        "coords": dict(each.coords),
        "uses": [axes.words for axes in each.groups],
        "axes": [axes.words for axes in encoder.axes],
        "entry": job.entry(number),
        "variants": [_frame(encoder.variant(widths), widths, file) for widths in every],
        **({"pod": job.pod_of(number)} if isinstance(job, PodsJob) else {}),
    }


def _frame(variant: Variant, widths: Sequence[int], file: BinaryIO) -> dict[str, object]:
    """Write the frame of a variant; what the index says of it."""
    raw, ends, peers = _payload(variant)
    start, size = file.tell(), file.write(_compressed(raw))
    return {
        "widths": list(widths),
        "start": start,
        "size": size,
        "bytes": len(raw),
        "trace_bytes": len(variant.data),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "groups": ends,
        "peers": peers,
    }


def _pod(name: str, layout: Layout) -> dict[str, object]:
    """What the index says of a pod: its mesh, and for each other pod the ranks there that message
    after message of its own ranks meets, each list once."""
    other_pods: dict[str, object] = {}
    for other, numbered in layout.other_pods.items():
        lists: dict[bytes, tuple[int, Ints]] = {}
        numbers = [lists.setdefault(r.tobytes(), (len(lists), r))[0] for r in numbered]
        other_pods[other] = {"ranks": [r.tolist() for _, r in lists.values()], "messages": numbers}
    return {"name": name, "mesh": dict(layout.mesh), "far": other_pods}


def _widths(groups: Groups, axes: Sequence[GroupAxes], members: Ints) -> list[tuple[int, ...]]:
    """The combinations of widths of identifiers that occur among ranks."""
    digits = [decimal_width(groups.number[a][members]) for a in axes]
    if not digits:
        return [()]
    rows = np.unique(np.stack(digits, axis=1), axis=0)
    return [tuple(row) for row in cast("list[list[int]]", rows.tolist())]


def _payload(variant: Variant) -> tuple[bytes, list[Any], list[Any]]:
    """The bytes of a program and its tables; what the index says of the tables."""
    parts = [variant.data.tobytes()]
    for places in (*variant.ends.values(), *variant.peers.values()):
        parts.append(np.diff(places, prepend=0).astype("<u4").tobytes())
    ends = [[axes.words, len(places)] for axes, places in variant.ends.items()]
    peers = [[axis, by, len(places)] for (axis, by), places in variant.peers.items()]
    return b"".join(parts), ends, peers


def _compressed(data: bytes) -> bytes:
    window = min(_WINDOW_LOG, max(10, len(data).bit_length()))
    parameters = zstandard.ZstdCompressionParameters(
        compression_level=_LEVEL, window_log=window, enable_ldm=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


def _decompressed(packed: bytes, size: int) -> bytes:
    """Exactly `size` bytes. Raises ValueError for anything else."""
    try:
        unpack = zstandard.ZstdDecompressor(max_window_size=1 << (_WINDOW_LOG + 1))
        with unpack.stream_reader(packed) as reader:
            data = reader.read(size + 1)
    except (zstandard.ZstdError, MemoryError) as problem:
        raise ValueError(str(problem)) from None
    if len(data) != size:
        raise ValueError(
            f"expected {size} bytes, found {'more' if len(data) > size else len(data)}"
        )
    return data


@dataclass(frozen=True)
class Archive:
    """An open archive: a source of traces, and of the nodes of any rank. `digest` is the SHA-256 of
    its index, which holds those of all programs."""

    path: Path
    index: Index
    digest: str
    format: Format
    machine: Machine | None = None
    model: ModelJob | None = None
    models: Sequence[ModelJob] = ()
    original: Format | None = None

    @classmethod
    def open(cls, path: Path, formats: Iterable[Format] = ()) -> Archive:
        """Open an archive of a built-in format, or of one of these. Raises `DiagnosticError` for
        a file that is not an archive."""
        try:
            with path.open("rb") as file:
                parsed, digest = _read_index(file)
                index = parse_index(parsed, path.stat().st_size)
                return cls(path, index, digest, find_format(index.format, formats))
        except ValueError as problem:
            raise error(f"'{path}' is not a readable archive: {problem}", remedy=_REMEDY) from None

    def as_format(self, format_: Format, machine: Machine | None) -> Archive:
        """The same job for files of another format. Raises `DiagnosticError` if this one is not
        Chakra's, which alone can be read."""
        if format_ is self.format or (format_ == self.format and machine is None):
            return self
        if not isinstance(self.format, ChakraFormat):
            raise error(
                f"'{self.path}' holds a job in the format '{self.format.name}'; only Chakra "
                "archives can be converted",
                remedy="write the archive with --format chakra",
            )
        if self.index.several_pods and not format_.pods:
            raise of_one_mesh(format_)
        return replace(self, format=format_, machine=machine, original=self.format)

    @property
    def name(self) -> str:
        """The name of the files."""
        return self.index.name

    @property
    def mesh(self) -> Mapping[str, int]:
        """The mesh of the job."""
        return self.index.mesh

    @property
    def about(self) -> Mapping[str, object]:
        """What the manifest says of where the traces come from."""
        return self.index.about

    @property
    def members(self) -> Sequence[Ints]:
        """The ranks of each class."""
        return self.index.members

    @property
    def groups(self) -> Groups:
        """The numbered communicator groups."""
        return self._groups

    @cached_property
    def _groups(self) -> Groups:
        if self.index.several_pods:
            return groups_of(self._layouts)
        return self.layout_of(0).groups

    @cached_property
    def _layouts(self) -> Mapping[str, Layout]:
        """The layout of each pod."""
        layouts: list[Layout] = []
        for name, pod in self.index.pods.items():
            classes = zip(self.index.classes, self.members, strict=True)
            used = [(c.uses, ranks - pod.start) for c, ranks in classes if c.pod == name]
            layouts.append(
                Layout(pod.mesh, number_groups(pod.mesh, used), other_pods=pod.other_pods, pod=name)
            )
        return dict(zip(self.index.pods, one_behind_the_other(layouts), strict=True))

    @property
    def layout(self) -> Layout:
        """The mesh and all groups; of several pods, who talks to whom is in `layout_of`."""
        return Layout(self.mesh, self.groups) if self.index.several_pods else self.layout_of(0)

    def layout_of(self, number: int) -> Layout:
        """Who talks to whom, of the ranks of a class."""
        return self._layouts[self.index.classes[number].pod]

    @property
    def durations(self) -> Durations | None:
        """The times that its records have, if they have some."""
        return self._durations

    @cached_property
    def _durations(self) -> Durations | None:
        return stored_seconds if any(map(stored_seconds, self.program(0).prototypes)) else None

    def durations_of(self, number: int) -> Durations | None:
        """The same: a record has the time that its pod had."""
        return self.durations

    def entry(self, number: int) -> dict[str, object]:
        """What the manifest says of a class."""
        fields = dict(self.index.classes[number].entry)
        if self.original is None:
            return fields
        fields.pop(DROPPED, None)
        dropped = list(self.format.drops(self.program(number), self.layout_of(number)))
        return {**fields, **({DROPPED: dropped} if dropped else {})}

    def encoder(self, number: int) -> RankBytes:
        """The program of a class as bytes."""
        if self.original is None:
            return self.stored(number)
        layout = self.layout_of(number)
        return self.format.encoder(self.program(number), layout, self.durations)

    def stored(self, number: int) -> StoredProgram:
        """The program of a class as it is in the file."""
        format_ = self.original or self.format
        return StoredProgram(self.path, self.index.classes[number], format_, self.layout_of(number))

    def program(self, number: int) -> Program:
        """The nodes of a class, without kernels. Raises `DiagnosticError`."""
        stored = self.stored(number)
        variant = stored.variant(stored.widths(int(self.members[number][0])))
        entry = self.index.classes[number].entry
        mesh = self.layout_of(number).mesh
        about = str(entry.get("name")), variant, mesh, self.path, entry.get("memory")
        return stored_program(*about)

    def class_of(self, rank: int) -> int:
        """The class of a rank. Raises `DiagnosticError` if there is no such rank."""
        if not 0 <= rank < self.groups.ranks:
            raise error(
                f"there is no rank {rank}: the job has {counted(self.groups.ranks, 'rank')}",
                remedy="they are numbered from 0",
            )
        return next(
            i for i, m in enumerate(self.members) if m[np.searchsorted(m, rank) % len(m)] == rank
        )

    def nodes(self, rank: int) -> Iterator[TraceNode]:
        """The nodes of a rank, without writing anything. Raises `DiagnosticError`."""
        data = self.stored(self.class_of(rank)).rank(rank)
        yield from nodes_of(Path(f"{self.name}.{rank}.et"), data)


def nodes_of(path: Path, data: memoryview) -> Iterator[TraceNode]:
    """The nodes in the bytes of a trace. Raises `TraceError`."""
    return (decode_node(path, at, record) for at, record in split_records(path, bytes(data)))


class StoredProgram(PatchedEncoder):
    """The program of a class in an archive."""

    def __init__(self, path: Path, stored: StoredClass, format_: Format, layout: Layout) -> None:
        super().__init__(format_, layout, stored.axes)
        self._path, self._stored = path, stored

    def serialised(self, widths: Mapping[GroupAxes, int]) -> Variant:
        """The program for identifiers of these widths. Raises `DiagnosticError`."""
        try:
            return self._read(tuple(widths[axes] for axes in self.axes))
        except ValueError as problem:
            raise error(
                f"'{self._path}' is damaged, in a program: {problem}", remedy=_REMEDY
            ) from None

    def _read(self, widths: tuple[int, ...]) -> Variant:
        stored = self._stored.variants.get(widths)
        if stored is None:
            raise ValueError(f"it has no program for identifiers of {widths} digits")
        with self._path.open("rb") as file:
            file.seek(stored.start)
            packed = file.read(stored.size)
        raw = _decompressed(packed, stored.bytes)
        if hashlib.sha256(raw).hexdigest() != stored.sha256:
            raise ValueError("its checksum does not match its content")
        width = len(self.format.peer(0, self.layout.groups.ranks))
        return _variant(stored, raw, width)


def _variant(stored: StoredVariant, raw: bytes, peer_width: int) -> Variant:
    data = np.frombuffer(raw, dtype=np.uint8, count=stored.trace_bytes).copy()
    tables = np.frombuffer(raw, dtype="<u4", offset=stored.trace_bytes)
    at = 0

    def take(count: int, width: int) -> Ints:
        nonlocal at
        places = np.cumsum(tables[at : at + count], dtype=np.int64)
        at += count
        if len(places) and (places[0] < width - 1 or places[-1] >= len(data)):
            raise ValueError("a table points past its end")
        return places

    ends = {axes: take(count, 20) for axes, count in stored.groups.items()}
    peers = {way: take(count, peer_width) for way, count in stored.peers.items()}
    return Variant(data, ends, peers)


def _read_index(file: BinaryIO) -> tuple[object, str]:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise ValueError("it does not start with the header of an archive")
    _, version, packed_bytes, raw_bytes, digest = _HEAD.unpack(head)
    if version != VERSION:
        raise ValueError(f"it has version {version}, expected {VERSION}")
    if max(packed_bytes, raw_bytes) > MOST_INDEX_BYTES:
        raise ValueError("its index is too large")
    file.seek(0, os.SEEK_END)
    file.seek(max(_HEAD.size, file.tell() - packed_bytes))
    raw = _decompressed(file.read(packed_bytes), raw_bytes)
    if hashlib.sha256(raw).digest() != digest:
        raise ValueError("the checksum of its index does not match")
    try:
        return json.loads(raw), digest.hex()
    except RecursionError:
        raise ValueError("its index is nested too deeply") from None
