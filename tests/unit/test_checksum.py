"""No byte of a written folder or archive changes unseen: every one is mutated."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stagec.check.archive import check_archive
from stagec.check.traces import check_directory
from stagec.support.diagnostics import DiagnosticError
from stagec.traces.checksum import is_intact, with_checksum
from tests.support import LLAMA, stagec

JOB = ["compile", LLAMA, "--dp", "2", "--set", "L=1,B=2,S=8,D=8,H=4,G=4,K=2,F=8,V=16", "--quiet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small job."""
    directory = tmp_path_factory.mktemp("job") / "out"
    ran = stagec(*JOB, "-o", directory)
    assert ran.code == 0, ran.err
    return directory


def flipped(data: bytes, places: Iterator[int]) -> Iterator[bytes]:
    """The bytes with one bit changed at each place."""
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << place % 7
        yield bytes(changed)


def rewritten(data: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """The bytes with some of them cut out, put in or repeated."""
    for _ in range(count):
        start = rng.randrange(len(data))
        end = min(len(data), start + rng.randrange(1, 5))
        for middle in (b"", bytes([rng.randrange(32, 127)]), data[start:end] * 2):
            changed = data[:start] + middle + data[end:]
            if changed != data:
                yield changed


def test_every_byte_of_a_manifest_is_covered(folder: Path) -> None:
    data = (folder / "manifest.json").read_bytes()
    assert is_intact(data)
    assert not any(map(is_intact, flipped(data, iter(range(len(data))))))
    assert not any(map(is_intact, rewritten(data, random.Random(0), 500)))
    assert not is_intact(b"")


@pytest.mark.parametrize("name", ["manifest.json", f"{LLAMA}.json"])
def test_mutated_files_do_not_pass(folder: Path, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    rng = random.Random(1)
    sampled = sorted(rng.sample(range(len(data)), min(len(data), 40)))
    try:
        for changed in (*flipped(data, iter(sampled)), *rewritten(data, rng, 15)):
            path.write_bytes(changed)
            assert not check_directory(folder).ok(), changed
    finally:
        path.write_bytes(data)
    assert check_directory(folder).ok()


def drop_checksum(manifest: dict[str, Any]) -> None:
    del manifest["sha256"]


def older(manifest: dict[str, Any]) -> None:
    manifest["manifest"] = 1


def other_command(manifest: dict[str, Any]) -> None:
    manifest["command"] = "stagec compile gpt3-175b"


def other_groups(manifest: dict[str, Any]) -> None:
    del manifest["files"][f"{LLAMA}.json"]


@pytest.mark.parametrize("change", [drop_checksum, older, other_command, other_groups])
def test_edited_manifests_do_not_pass(
    folder: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path = folder / "manifest.json"
    data = path.read_bytes()
    manifest = json.loads(data)
    change(manifest)
    try:
        path.write_text(json.dumps(manifest, indent=1) + "\n")
        report = check_directory(folder)
    finally:
        path.write_bytes(data)
    assert [f.code for f in report.errors] == ["wrong-checksum"]
    assert "checksum" in report.errors[0].message


def test_a_manifest_without_checksum_may_be_of_another_tool(folder: Path) -> None:
    path = folder / "manifest.json"
    data = path.read_bytes()
    try:
        path.write_text(json.dumps({"files": json.loads(data)["files"]}))
        assert check_directory(folder).ok()
    finally:
        path.write_bytes(data)


def test_a_checksum_changes_nothing_else() -> None:
    assert json.loads(with_checksum({"a": 1, "b": [2]})).keys() == {"a", "b", "sha256"}


def test_mutated_archives_do_not_pass(tmp_path: Path) -> None:
    path = tmp_path / "job.stagec"
    assert stagec(*JOB, "--archive", path).code == 0
    data, rng = path.read_bytes(), random.Random(2)
    for changed in (*flipped(data, iter(range(72))), *rewritten(data, rng, 15)):  # 72: the head
        path.write_bytes(changed)
        try:
            assert not check_archive(path).ok(), len(changed)
        except DiagnosticError:
            continue
