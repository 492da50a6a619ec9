"""Families of what others may have written: archives, and folders of traces."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, cast

import zstandard

from stagec.check.archive import check_archive
from stagec.check.traces import check_directory
from stagec.formats.chakra.nodes import TraceError
from stagec.formats.chakra.show import totals
from stagec.job.archive import MAGIC, VERSION, Archive
from stagec.job.folder import MANIFEST, check_target
from stagec.job.seal import SEAL, sealed
from tools.fuzzing.base import Family, job, quietly
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
        found: Any = json.loads(changed or b"0")
        if isinstance(found, dict):
            changed = sealed({k: v for k, v in cast("dict[str, Any]", found).items() if k != SEAL})
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


JOBS = (
    Family("archives", _archives, _mutate_archive, _run_archive),
    Family("folders", _folders, _mutate_folder, _run_folder),
)
