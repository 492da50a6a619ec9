"""Families of what others may have written: archives, and folders of traces."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, cast

import zstandard

from stagec.check.archive import check_archive
from stagec.check.compare import compare
from stagec.check.traces import check_directory
from stagec.formats.chakra.nodes import TraceError, encode_metadata, encode_node, json_of_record
from stagec.formats.chakra.record_files import read_all_records, read_trace
from stagec.formats.chakra.show import totals
from stagec.traces.archive import MAGIC, VERSION, Archive
from stagec.traces.checksum import CHECKSUM, with_checksum
from stagec.traces.folder import MANIFEST, check_target
from tools.fuzzing.base import Family, FaultError, in_process, job, quietly
from tools.fuzzing.mutate import mutate_bytes, mutate_json

_HEAD = struct.Struct("<16sIQQ32s")


def _archives() -> list[bytes]:
    return [job().archive.read_bytes()]


def _mutate_archive(chance: Random, seed: bytes, _: Sequence[bytes]) -> bytes:
    """Mostly the index, with a right checksum, so that what comes behind it is reached."""
    if chance.random() < 0.3:
        return mutate_bytes(chance, seed)
    size = _HEAD.unpack(seed[: _HEAD.size])[2]
    index = zstandard.ZstdDecompressor().decompress(seed[-size:])
    raw = mutate_bytes(chance, index) if chance.random() < 0.1 else mutate_json(chance, index)
    packed = zstandard.ZstdCompressor().compress(raw)
    head = _HEAD.pack(MAGIC, VERSION, len(packed), len(raw), sha256(raw).digest())
    return head + seed[_HEAD.size : len(seed) - size] + packed


def _run_archive(data: bytes, folder: Path) -> None:
    path = folder / "fuzz.stagec"
    path.write_bytes(data)

    def run() -> None:
        check_archive(path)
        archive = Archive.open(path)
        for rank in (0, archive.groups.ranks - 1):
            list(archive.nodes(rank))

    try:
        quietly(run)
    except TraceError as problem:
        str(problem)


def _folders() -> list[bytes]:
    return [name.encode() + b"\n" + data for name, data in job().files.items()]


def _mutate_folder(chance: Random, seed: bytes, __: Sequence[bytes]) -> bytes:
    """One file of a folder; a manifest mostly with a right checksum."""
    name, _, data = seed.partition(b"\n")
    if not name.endswith(b".json") or chance.random() < 0.2:
        return name + b"\n" + mutate_bytes(chance, data)
    changed = mutate_json(chance, data)
    if name == MANIFEST.encode() and chance.random() < 0.8:
        manifest: Any = json.loads(changed or b"0")
        if isinstance(manifest, dict):
            changed = with_checksum(
                {k: v for k, v in cast("dict[str, Any]", manifest).items() if k != CHECKSUM}
            )
    return name + b"\n" + changed


def _run_folder(data: bytes, folder: Path) -> None:
    """Checking reports, showing reads, and nothing of others is replaced."""
    target = folder / "job"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    name, _, content = data.partition(b"\n")
    for other, usual in job().files.items():
        (target / other).write_bytes(content if other.encode() == name else usual)
    report = check_directory(target)
    for finding in (*report.errors, *report.warnings):
        str(finding)
    if name.endswith(b".et"):
        try:
            totals(target / name.decode())
        except TraceError as problem:
            str(problem)
    quietly(lambda: check_target(target, force=True))


@lru_cache(maxsize=1)
def _traces() -> list[bytes]:
    """A trace in every form, with durations: protobuf, JSON, the JSON of Chakra's feeder, gzip."""
    trace = job().folder / "tiny.0.et"
    nodes = [replace(node, duration_micros=node.id) for node in read_trace(trace)]
    binary = encode_metadata("0.0.4") + b"".join(map(encode_node, nodes))
    records = [record for _, record in read_all_records(trace)]
    texts = (json_of_record(record, metadata=not i) for i, record in enumerate(records))
    fed = [
        {"Id": n.id, "Name": n.name, "NodeType": n.kind, "data_deps": n.data_deps, **n.attrs}
        for n in nodes
    ]
    graph = json.dumps({"workload_graph": fed}).encode()
    text = "".join(texts).encode()
    return [binary, text, graph, *(gzip.compress(each, 1, mtime=0) for each in (binary, text))]


#: Records of a trace that has more than its metadata and a node.
_FEWEST = 2


def _mutate_trace(chance: Random, seed: bytes, _: Sequence[bytes]) -> bytes:
    """Mostly what is packed, and the values of texts, so that what comes behind them is reached."""
    if seed.startswith(b"\x1f\x8b") and chance.random() < 0.7:
        return gzip.compress(_mutate_trace(chance, gzip.decompress(seed), ()), 1, mtime=0)
    if seed.startswith(b'{"workload_graph"') and chance.random() < 0.7:
        return mutate_json(chance, seed)
    parts = seed.split(b"}{")
    if len(parts) > _FEWEST and chance.random() < 0.7:
        at = chance.randrange(1, len(parts) - 1)
        parts[at] = mutate_json(chance, b"{" + parts[at] + b"}")[1:-1]
        return b"}{".join(parts)
    return mutate_bytes(chance, seed)


def _run_trace(data: bytes, folder: Path) -> None:
    """Shown, compared, converted, checked: a result or a diagnostic, and nothing half written."""
    path, out = folder / "tiny.0.et", folder / "out"
    path.write_bytes(data)
    try:
        totals(path)
    except TraceError as problem:
        str(problem)
    quietly(lambda: compare(path, job().folder / "tiny.0.et"))
    report = check_directory(folder)
    for finding in (*report.errors, *report.warnings):
        str(finding)
    for to in ("chakra", "json", "kineto", "chrome", "perfetto"):
        out.unlink(missing_ok=True)
        words = ["convert", str(path), "-o", str(out), "--to", to, "--quiet"]
        code, _, err = in_process(words)
        if code not in (0, 1) or (code == 1) != ("error: " in err) or out.exists() != (code == 0):
            raise FaultError(f"convert --to {to} ends with {code}: {err[-300:]}")
    out.unlink(missing_ok=True)
    path.unlink()


JOBS = (
    Family("archives", _archives, _mutate_archive, _run_archive),
    Family("folders", _folders, _mutate_folder, _run_folder),
    Family("traces", _traces, _mutate_trace, _run_trace),
)
