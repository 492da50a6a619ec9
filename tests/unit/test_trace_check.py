"""The trace checker: a sound job passes, and each thing that can be wrong in files, manifests and
nodes is found by its code.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from stagec.check import ranks as check_ranks
from stagec.check.findings import FINDINGS_PER_CODE, Finding
from stagec.check.ranks import RankReader
from stagec.check.traces import CheckReport, check_directory
from stagec.formats.chakra.nodes import AttrValue, NodeKind, TraceNode
from tests.small_traces import (
    check,
    codes,
    coll,
    comp,
    edited,
    only,
    recv,
    send,
    sound,
    with_attr,
    without_attr,
    write,
)

# ---------------------------------------------------------------- a sound job


def test_sound_job_passes(tmp_path: Path) -> None:
    write(tmp_path, *sound())
    report = check_directory(tmp_path)
    assert (report.errors, report.warnings, report.ok()) == ([], [], True)
    assert (report.ranks, report.nodes, report.collectives) == (4, 20, 8)
    assert (report.groups, report.sends) == (4, 2)


def test_ranks_of_a_class_are_analysed_once(tmp_path: Path) -> None:
    write(tmp_path, *sound())
    reader = RankReader()
    traces = [reader.read(tmp_path / f"job.{rank}.et", rank) for rank in range(4)]
    assert [trace.class_id for trace in traces] == [0, 0, 1, 1]
    assert [trace.groups for trace in traces] == [("1", "3"), ("1", "4"), ("2", "3"), ("2", "4")]
    assert [trace.peers for trace in traces] == [(2,), (3,), (0,), (1,)]
    assert len(reader.classes) == 2


@pytest.mark.parametrize(
    "change",
    [
        with_attr("num_ops", 9),
        with_attr("stage", 1),
        with_attr("num_ops", 8, "uint64"),
        partial(replace, name="other"),
        partial(replace, data_deps=(10,)),
        partial(replace, ctrl_deps=(10,)),
    ],
)
def test_ranks_that_differ_are_not_of_a_class(
    tmp_path: Path, change: Callable[[TraceNode], TraceNode]
) -> None:
    write(tmp_path, edited(1, 13, change), None)
    reader = RankReader()
    ids = [reader.read(tmp_path / f"job.{rank}.et", rank).class_id for rank in range(2)]
    assert ids == [0, 1]


def test_use_of_groups_tells_classes_apart(tmp_path: Path) -> None:
    same, mixed = [coll(1, "5"), coll(2, "5", 1)], [coll(1, "5"), coll(2, "6", 1)]
    write(tmp_path, {0: same, 1: mixed, 2: [coll(1, "8"), coll(2, "7", 1)]}, None)
    reader = RankReader()
    ids = [reader.read(tmp_path / f"job.{rank}.et", rank).class_id for rank in range(3)]
    assert ids == [0, 1, 1]


def test_full_record_cache_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_ranks, "_CACHED_RECORDS", 3)
    assert check(tmp_path, *sound()).ok()


# ---------------------------------------------------------------- files


def test_missing_directory(tmp_path: Path) -> None:
    report = check_directory(tmp_path / "none")
    assert codes(report.errors) == {"no-directory"}
    assert not report.ok()


def test_file_for_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "a.0.et"
    path.write_bytes(b"")
    assert "no-directory" in codes(check_directory(path).errors)


def test_no_traces(tmp_path: Path) -> None:
    only(check_directory(tmp_path).errors, "no-traces")


def test_a_folder_of_another_format_says_which(tmp_path: Path) -> None:
    """Formats that only other tools read cannot be checked; the manifest names them."""
    (tmp_path / "manifest.json").write_text('{"format": "simai"}', encoding="utf-8")
    (problem,) = check_directory(tmp_path).errors
    assert "its format is 'simai': add chakra to --format" in str(problem)


@pytest.mark.parametrize("name", ["job.et", "job.x.et", "job.01.et", "job.-1.et", ".0.et"])
def test_bad_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    finding = only(check(tmp_path, *sound()).errors, "bad-name")
    assert finding.path.name == name


def test_mixed_names(tmp_path: Path) -> None:
    (tmp_path / "other.0.et").write_bytes(b"")
    finding = only(check(tmp_path, *sound()).errors, "mixed-names")
    assert "job, other" in finding.message


def test_missing_rank(tmp_path: Path) -> None:
    ranks = {rank: [comp(1)] for rank in (0, 1, 3)}
    assert "job.2.et" in only(check(tmp_path, ranks, None).errors, "missing-rank").message


def test_unreadable_trace_hides_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, *sound())
    path = tmp_path / "job.3.et"
    path.write_bytes(path.read_bytes()[:-1])
    finding = only(check_directory(tmp_path).errors, "unreadable")
    assert finding.path == path
    assert "truncated" in finding.message


def test_directory_in_place_of_a_trace(tmp_path: Path) -> None:
    (tmp_path / "job.0.et").mkdir()
    only(check(tmp_path, {1: [comp(1)]}, None).errors, "unreadable")


# ---------------------------------------------------------------- the manifest


def manifest(directory: Path) -> dict[str, dict[str, dict[str, object]]]:
    entries: dict[str, dict[str, object]] = {
        path.name: {"crc32": f"{zlib.crc32(path.read_bytes()):08x}", "bytes": path.stat().st_size}
        for path in directory.iterdir()
    }
    return {"files": entries}


def checked_manifest(directory: Path, contents: object) -> CheckReport:
    (directory / "manifest.json").write_text(json.dumps(contents))
    return check_directory(directory)


def test_manifest_that_agrees(tmp_path: Path) -> None:
    write(tmp_path, *sound())
    report = checked_manifest(tmp_path, manifest(tmp_path))
    assert (report.errors, report.warnings) == ([], [])


@pytest.mark.parametrize(
    ("key", "value", "code"), [("bytes", 3, "wrong-size"), ("crc32", "0" * 8, "wrong-checksum")]
)
def test_manifest_that_disagrees(tmp_path: Path, key: str, value: object, code: str) -> None:
    write(tmp_path, *sound())
    contents = manifest(tmp_path)
    contents["files"]["job.2.et"][key] = value
    finding = only(checked_manifest(tmp_path, contents).errors, code)
    assert finding.path.name == "job.2.et"
    assert str(value) in finding.message


def test_manifest_names_a_missing_file(tmp_path: Path) -> None:
    write(tmp_path, *sound())
    contents = manifest(tmp_path)
    contents["files"]["job.4.et"] = contents["files"]["job.0.et"]
    only(checked_manifest(tmp_path, contents).errors, "missing-file")


def test_manifest_lacks_a_trace(tmp_path: Path) -> None:
    write(tmp_path, *sound())
    contents = manifest(tmp_path)
    del contents["files"]["job.1.et"]
    finding = only(checked_manifest(tmp_path, contents).errors, "unlisted-file")
    assert finding.path.name == "job.1.et"


@pytest.mark.parametrize(
    "contents",
    [
        [],
        {},
        {"files": []},
        {"files": {"a": 1}},
        {"files": {"a": {"bytes": 1}}},
        {"files": {"a": {"bytes": "1", "crc32": ""}}},
        {"files": {"../a": {"bytes": 1, "crc32": ""}}},
        {"files": {"..": {"bytes": 1, "crc32": ""}}},
        {"files": {"": {"bytes": 1, "crc32": ""}}},
    ],
)
def test_bad_manifest(tmp_path: Path, contents: object) -> None:
    write(tmp_path, *sound())
    only(checked_manifest(tmp_path, contents).errors, "bad-manifest")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"files": ' + "9" * 5000 + "}", "\0"])
@pytest.mark.parametrize(
    ("name", "code"), [("manifest.json", "bad-manifest"), ("job.json", "bad-groups-file")]
)
def test_json_that_is_none(tmp_path: Path, name: str, code: str, text: str) -> None:
    write(tmp_path, {0: [comp(1)]}, None)
    (tmp_path / name).write_text(text)
    only(check_directory(tmp_path).errors, code)


# ---------------------------------------------------------------- one node


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (10, "is_cpu_op"),
        (10, "num_ops"),
        (10, "tensor_size"),
        (11, "is_cpu_op"),
        (11, "comm_type"),
        (11, "comm_size"),
        (12, "is_cpu_op"),
        (12, "comm_size"),
        (12, "comm_tag"),
    ],
)
def test_missing_attribute(tmp_path: Path, number: int, name: str) -> None:
    report = check(tmp_path, edited(0, number, without_attr(name)), sound()[1])
    finding = next(f for f in report.errors if f.code == "missing-attribute")
    assert (finding.path.name, finding.node) == ("job.0.et", number)
    assert name in finding.message


def test_a_message_without_a_peer(tmp_path: Path) -> None:
    report = check(tmp_path, edited(0, 12, without_attr("comm_dst")), sound()[1])
    assert "missing-attribute" in codes(report.errors)


def test_collectives_without_a_group_are_over_all_ranks(tmp_path: Path) -> None:
    """As simulators take them: all ranks issue the same ones, and no groups file is needed."""
    everywhere = without_attr("pg_name")(coll(1, "1"))
    report = check(tmp_path / "all", {0: [everywhere], 1: [everywhere]}, None)
    assert report.verdict == "well-formed"
    only(report.warnings, "no-group")
    assert (report.collectives, report.groups) == (2, 1)
    report = check(tmp_path / "one", {0: [everywhere], 1: [comp(1)]}, None)
    only(report.errors, "collective-mismatch")
    assert report.verdict == "broken"


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("missing-attribute", without_attr("num_ops")),
        ("missing-dependency", partial(replace, data_deps=(99,))),
        ("no-start", partial(replace, ctrl_deps=(2,))),
        ("dependency-cycle", partial(replace, ctrl_deps=(2,))),
    ],
)
def test_what_a_recorded_trace_lacks_does_not_break_it(
    tmp_path: Path, code: str, change: Callable[[TraceNode], TraceNode]
) -> None:
    """A trace is recorded if it has operations of the host; one that is not is broken."""
    host = with_attr("is_cpu_op", True)
    kernel = replace(comp(2), ctrl_deps=(1,))
    report = check(tmp_path / "recorded", {0: [change(host(comp(1))), kernel]}, None)
    assert (report.verdict, report.ok()) == ("incomplete", False)
    assert not report.errors
    assert code in codes(report.gaps)
    report = check(tmp_path / "written", {0: [change(comp(1)), kernel]}, None)
    assert report.verdict == "broken"
    assert code in codes(report.errors)


def test_a_recorded_trace_that_contradicts_itself_is_broken(tmp_path: Path) -> None:
    host = with_attr("is_cpu_op", True)(without_attr("num_ops")(comp(1)))
    report = check(tmp_path, {0: [host, host]}, None)
    assert report.verdict == "broken"
    assert "duplicate-id" in codes(report.errors)


@pytest.mark.parametrize(
    ("number", "name", "value", "kind"),
    [
        (10, "num_ops", 8, "int32"),
        (10, "tensor_size", 8, "int64"),
        (10, "is_cpu_op", 0, "int64"),
        (11, "comm_size", 64, "uint64"),
        (11, "comm_type", 0, "int32"),
        (12, "comm_tag", 0, "int64"),
        (12, "comm_dst", 2, "uint32"),
    ],
)
def test_wrong_type(tmp_path: Path, number: int, name: str, value: AttrValue, kind: str) -> None:
    ranks = edited(0, number, with_attr(name, value, kind))
    finding = only(check(tmp_path, ranks, sound()[1]).errors, "wrong-type")
    assert finding.node == number
    assert kind in finding.message


@pytest.mark.parametrize(
    ("number", "name", "value"),
    [(10, "num_ops", 0), (10, "num_ops", -1), (10, "tensor_size", 0), (11, "comm_size", 0)],
)
def test_bad_value(tmp_path: Path, number: int, name: str, value: int) -> None:
    report = check(tmp_path, edited(0, number, with_attr(name, value)), sound()[1])
    finding = next(f for f in report.errors if f.code == "bad-value")
    assert f"{name} >= 1" in finding.message
    assert str(value) in finding.message


def test_negative_tag(tmp_path: Path) -> None:
    ranks = {0: [send(1, 1, tag=-1)], 1: [recv(1, 0, tag=-1)]}
    assert codes(check(tmp_path, ranks, None).errors) == {"bad-value"}


@pytest.mark.parametrize("kind", [1, 3, 4, 8, 9, 42, -1])
def test_unsupported_collective(tmp_path: Path, kind: int) -> None:
    ranks = {rank: [coll(1, "1", kind=kind)] for rank in range(2)}
    finding = only(check(tmp_path, ranks, {"1": [0, 1]}).errors, "unsupported-collective")
    assert f"found {kind}" in finding.message
    assert "1 more ranks" in finding.message


@pytest.mark.parametrize("kind", [0, 2, 5, 6, 7])
def test_supported_collective(tmp_path: Path, kind: int) -> None:
    ranks = {rank: [coll(1, "1", kind=kind)] for rank in range(2)}
    assert check(tmp_path, ranks, {"1": [0, 1]}).ok()


def test_metadata_node(tmp_path: Path) -> None:
    ranks = {0: [comp(1), TraceNode(2, "m", NodeKind.METADATA)]}
    assert only(check(tmp_path, ranks, None).errors, "metadata-node").node == 2


@pytest.mark.parametrize("kind", [0, 8, -1])
def test_unknown_kind(tmp_path: Path, kind: int) -> None:
    only(check(tmp_path, {0: [TraceNode(2, "m", kind)]}, None).errors, "unknown-kind")


@pytest.mark.parametrize("kind", [NodeKind.MEM_LOAD, NodeKind.MEM_STORE])
def test_memory_nodes_are_fine(tmp_path: Path, kind: NodeKind) -> None:
    attrs = {"is_cpu_op": False, "tensor_size": 64}
    assert check(tmp_path, {0: [TraceNode(2, "m", kind, attrs=attrs)]}, None).ok()
    report = check(tmp_path, {0: [TraceNode(2, "m", kind, attrs={"is_cpu_op": False})]}, None)
    assert "tensor_size" in only(report.errors, "missing-attribute").message


# ---------------------------------------------------------------- the report


def test_findings_of_a_code_are_limited(tmp_path: Path) -> None:
    nodes = [comp(number, num_ops=0) for number in range(FINDINGS_PER_CODE + 5)]
    report = check(tmp_path, {0: nodes}, None)
    assert len(report.errors) == FINDINGS_PER_CODE
    assert report.omitted == {"bad-value": 5}


def test_finding_as_text() -> None:
    finding = Finding(Path("a.0.et"), 3, "code", "expected this, found that", "do so")
    assert str(finding) == "a.0.et: node 3: expected this, found that [code]; do so"
    assert str(replace(finding, node=None)).startswith("a.0.et: expected")
