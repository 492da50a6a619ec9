"""Archives: what is materialized is what would have been written; damage and malice are refused."""

from __future__ import annotations

import json
import os
import random
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from stagec.check.archive import check_archive
from stagec.check.traces import CheckReport, check_directory
from stagec.formats.base import Layout
from stagec.formats.chakra.nodes import TraceError
from stagec.formats.chakra.record_files import read_trace
from stagec.program.nodes import Ints
from stagec.support.diagnostics import DiagnosticError
from stagec.traces.archive import MAGIC, Archive
from tests.support import LLAMA, stagec, tries

SIZES = "L=4,B=32,S=4,D=8,H=4,G=4,K=2,F=8,V=16"
MESH = ["--dp", "4", "--tp", "2", "--pp", "2"]
COPIES = ["--offload", "activations", "--memory-nodes"]
HOW = ["--microbatches", "4", "--sp", "--zero", "1", "--quiet", *COPIES]
JOB = ["compile", LLAMA, "--set", SIZES, *MESH, *HOW]
HEAD = struct.Struct("<16sIQQ32s")


def content(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "job.stagec"
    assert stagec(*JOB, "--archive", path).code == 0
    return path


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "out"
    assert stagec(*JOB, "-o", path).code == 0
    return path


@pytest.mark.long
def test_what_is_materialized_is_what_would_have_been_written(
    archive: Path, direct: Path, tmp_path: Path
) -> None:
    assert stagec("materialize", archive, "-o", tmp_path / "out", "--quiet").code == 0
    assert content(tmp_path / "out") == content(direct)
    some = ["--only-ranks", "1,6-7", "--jobs", "2", "--quiet"]
    assert stagec("materialize", archive, "-o", tmp_path / "some", *some).code == 0
    assert stagec(*JOB, "-o", tmp_path / "direct", *some[:2]).code == 0
    assert content(tmp_path / "some") == content(tmp_path / "direct")


@pytest.mark.long
def test_nodes_of_a_rank_without_writing(archive: Path, direct: Path) -> None:
    opened = Archive.open(archive)
    for rank in (0, 5, 15):
        assert list(opened.nodes(rank)) == list(read_trace(direct / f"{LLAMA}.{rank}.et"))
    with pytest.raises(DiagnosticError, match="there is no rank 16"):
        list(opened.nodes(16))


def test_two_archives_of_a_job_are_the_same_bytes(archive: Path, tmp_path: Path) -> None:
    assert stagec(*JOB, "--archive", tmp_path / "again").code == 0
    assert (tmp_path / "again").read_bytes() == archive.read_bytes()


def test_the_check_of_an_archive_counts_what_that_of_its_files_counts(
    archive: Path, direct: Path
) -> None:
    of_files = stagec("check", direct)
    of_archive = stagec("check", archive)
    assert (of_files.code, of_archive.code) == (0, 0), of_archive.err
    assert of_archive.out.split(": ", 1)[1] == of_files.out.split(": ", 1)[1]


@pytest.mark.parametrize("rank", [6, 0, 15])
@pytest.mark.parametrize("what", ["group", "peer"])
def test_a_wrong_rank_of_an_archive_is_found_as_in_its_files(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, what: str
) -> None:
    """Ranks of an archive are compared as arrays, and one of them that has another group or peer
    than its class is found: what is said of it is what is said of the files."""
    opened, peers_of = Archive.open(archive), Layout.peers
    if what == "group":
        for numbers in opened.groups.number.values():
            numbers[rank] = numbers[rank - 5]

    def peers(self: Layout, ranks: Ints, over: str, by: int) -> Ints:
        right = peers_of(self, ranks, over, by)
        return np.where(ranks == rank, (right + 4) % 16, right) if what == "peer" else right

    def reopened(_: Path) -> Archive:
        return opened

    monkeypatch.setattr(Layout, "peers", peers)
    monkeypatch.setattr(Archive, "open", reopened)
    for each in range(16):
        data = opened.encoder(opened.class_of(each)).rank(each)
        (tmp_path / f"{LLAMA}.{each}.et").write_bytes(data)
    (tmp_path / f"{LLAMA}.json").write_text(json.dumps(opened.groups.table()))
    of_archive, of_files = check_archive(archive), check_directory(tmp_path)
    of_rank = {f.code for f in of_archive.errors if f.path.name == f"{LLAMA}.{rank}.et"}
    assert {"group": "not-a-member", "peer": "unmatched-send"}[what] in of_rank
    assert said(of_archive) == said(of_files)


def said(report: CheckReport) -> list[tuple[str, int | None, str, str]]:
    """What a report says is wrong, and where; the groups file is a part of an archive."""
    return [
        (f.path.name if f.path.suffix == ".et" else "", f.node, f.code, f.message)
        for f in report.errors
    ]


def test_a_file_that_is_there_is_kept(archive: Path, tmp_path: Path) -> None:
    before = archive.read_bytes()
    ran = stagec(*JOB, "--archive", archive)
    assert (ran.code, "--force" in ran.err) == (1, True)
    assert archive.read_bytes() == before
    assert stagec(*JOB, "--archive", tmp_path / "x", "--resume").code == 1
    assert stagec(*JOB, "--archive", tmp_path / "x", "-o", tmp_path / "y").code == 1


# -- damage


def outcome(path: Path) -> str:
    """Opening and checking end in a result or in a diagnostic."""
    try:
        report = check_archive(path)
        for rank in (0, 15):
            list(Archive.open(path).nodes(rank))
    except (DiagnosticError, TraceError) as problem:
        return str(problem)
    return "" if report.ok() else str(report.errors[0])


def test_a_truncated_archive_is_refused(archive: Path, tmp_path: Path) -> None:
    data, cut = archive.read_bytes(), tmp_path / "cut"
    for size in (0, 1, 15, 16, 40, HEAD.size, HEAD.size + 1, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:size])
        ran = stagec("materialize", cut, "-o", tmp_path / "out")
        assert ran.code == 1, size
        assert "help: write the archive again" in ran.err
        assert "internal error" not in ran.err
        assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_any_changed_byte_is_found(archive: Path, tmp_path: Path) -> None:
    data, broken = archive.read_bytes(), tmp_path / "broken"
    chance = random.Random(1)
    for _ in range(tries(60)):
        changed = bytearray(data)
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        broken.write_bytes(changed)
        assert outcome(broken)


def test_a_newer_version_is_named(archive: Path, tmp_path: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[16] = 9
    (tmp_path / "new").write_bytes(data)
    assert "version 9, expected 1" in stagec("check", tmp_path / "new").err


# -- malice: an index with a right checksum


def with_index(archive: Path, index: object, raw: bytes | None = None) -> bytes:
    data = archive.read_bytes()
    size = HEAD.unpack(data[: HEAD.size])[2]
    raw = json.dumps(index).encode() if raw is None else raw
    packed = zstandard.ZstdCompressor().compress(raw)
    head = HEAD.pack(MAGIC, 1, len(packed), len(raw), sha256(raw).digest())
    return head + data[HEAD.size : len(data) - size] + packed


def index_of(archive: Path) -> Any:
    data = archive.read_bytes()
    size = HEAD.unpack(data[: HEAD.size])[2]
    return json.loads(zstandard.ZstdDecompressor().decompress(data[-size:]))


EVIL: list[tuple[list[str | int], Any]] = [
    (["name"], "../evil"),
    (["name"], "manifest"),
    (["name"], 3),
    (["mesh", "dp"], 1 << 40),
    (["mesh", "dp"], 0),
    (["mesh", "dp"], -4),
    (["mesh", "dp"], 5),
    (["mesh"], {}),
    (["about"], []),
    (["classes"], []),
    (["classes", 0, "coords"], {"tp": 0}),
    (["classes", 0, "coords", "nowhere"], 1),
    (["classes", 0, "uses"], []),
    (["classes", 0, "uses", 0], ["tp", "tp"]),
    (["classes", 0, "axes", 0], []),
    (["classes", 0, "entry", "count"], 3),
    (["classes", 0, "entry", "nodes"], {}),
    (["classes", 0, "variants"], []),
    (["classes", 0, "variants", 0, "start"], 1 << 50),
    (["classes", 0, "variants", 0, "size"], -1),
    (["classes", 0, "variants", 0, "bytes"], 1 << 40),
    (["classes", 0, "variants", 0, "trace_bytes"], 1),
    (["classes", 0, "variants", 0, "sha256"], "0" * 64),
    (["classes", 0, "variants", 0, "peers", 0, 0], "nowhere"),
    (["classes", 0, "variants", 0, "peers", 0, 2], 1 << 30),
    (["classes", 0, "variants", 0, "widths"], [1]),
]


@pytest.mark.parametrize(("path", "value"), EVIL, ids=lambda v: str(v)[:40])
def test_an_evil_index_is_refused(
    path: list[str | int], value: Any, archive: Path, tmp_path: Path
) -> None:
    index = index_of(archive)
    inner = index
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (tmp_path / "evil").write_bytes(with_index(archive, index))
    assert outcome(tmp_path / "evil")
    ran = stagec("materialize", tmp_path / "evil", "-o", tmp_path / "out", "--quiet")
    assert ran.code == 1, ran.err
    assert "internal error" not in ran.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["evil"]


@pytest.mark.parametrize("raw", [b"", b"[" * 100_000, b"null", b"{", b"1e999", b'{"name": NaN}'])
def test_an_index_that_is_none(raw: bytes, archive: Path, tmp_path: Path) -> None:
    (tmp_path / "evil").write_bytes(with_index(archive, None, raw))
    assert "not a readable archive" in outcome(tmp_path / "evil")


def test_an_index_that_unpacks_to_more_than_it_says(archive: Path, tmp_path: Path) -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    head = HEAD.pack(MAGIC, 1, len(packed), 1000, bytes(32))
    (tmp_path / "bomb").write_bytes(head + packed)
    assert "found more" in outcome(tmp_path / "bomb")


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(os.urandom(4096))
    done = stagec("materialize", tmp_path / "noise", "-o", tmp_path / "out")
    assert (done.code, "does not start with the header of an archive" in done.err) == (1, True)
    done = stagec("check", tmp_path / "noise")
    assert (done.code, "[unreadable]" in done.err) == (1, True)
    assert stagec("check", tmp_path / "nowhere").code == 1
    assert stagec("materialize", tmp_path / "nowhere", "-o", tmp_path / "out").code == 1
