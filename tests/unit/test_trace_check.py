"""The trace checker: a sound job passes, and each thing that can be wrong is found by its code."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from stagec.check import ranks as check_ranks
from stagec.check.agreement import CheckedJob
from stagec.check.deadlock import check_deadlock
from stagec.check.files import read_groups
from stagec.check.findings import FINDINGS_PER_CODE, Finding
from stagec.check.program import TraceProgram, analyse
from stagec.check.ranks import RankReader
from stagec.check.traces import CheckReport, check_directory
from stagec.formats.chakra.nodes import AttrValue, NodeKind, TraceNode, encode_metadata, encode_node

Ranks = dict[int, list[TraceNode]]
Groups = dict[str, list[int]]


# ---------------------------------------------------------------- small jobs


def comp(number: int, *deps: int, **attrs: AttrValue) -> TraceNode:
    common: dict[str, AttrValue] = {"is_cpu_op": False, "num_ops": 8, "tensor_size": 4}
    return TraceNode(number, f"comp{number}", NodeKind.COMP, deps, attrs=common | attrs)


def coll(number: int, group: str, *deps: int, size: int = 64, kind: int = 0) -> TraceNode:
    attrs: dict[str, AttrValue] = {
        "is_cpu_op": False,
        "comm_type": kind,
        "comm_size": size,
        "pg_name": group,
    }
    return TraceNode(number, f"coll{number}", NodeKind.COLL, ctrl_deps=deps, attrs=attrs)


def message(
    kind: NodeKind, number: int, peer: int, deps: tuple[int, ...], tag: int, size: int
) -> TraceNode:
    link = "comm_dst" if kind == NodeKind.SEND else "comm_src"
    attrs: dict[str, AttrValue] = {
        "is_cpu_op": False,
        "comm_size": size,
        "comm_tag": tag,
        link: peer,
    }
    return TraceNode(number, f"{kind.label}{number}", kind, deps, attrs=attrs)


def send(number: int, peer: int, *deps: int, tag: int = 0, size: int = 32) -> TraceNode:
    return message(NodeKind.SEND, number, peer, deps, tag, size)


def recv(number: int, peer: int, *deps: int, tag: int = 0, size: int = 32) -> TraceNode:
    return message(NodeKind.RECV, number, peer, deps, tag, size)


def sound() -> tuple[Ranks, Groups]:
    """Two pipeline stages of two tensor-parallel ranks, all reducing over rows and columns."""
    groups = {"1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3]}
    ranks: Ranks = {}
    for rank in range(4):
        row, column = str(1 + rank // 2), str(3 + rank % 2)
        hop = send(12, rank + 2, 11) if rank < 2 else recv(12, rank - 2)
        ranks[rank] = [
            comp(10),
            coll(11, row, 10),
            hop,
            comp(13, 12, 11),
            coll(14, column, 13, 11, kind=7, size=128),
        ]
    return ranks, groups


def write(directory: Path, ranks: Mapping[int, Iterable[TraceNode]], groups: object) -> Path:
    for rank, nodes in ranks.items():
        data = encode_metadata("1") + b"".join(map(encode_node, nodes))
        (directory / f"job.{rank}.et").write_bytes(data)
    if groups is not None:
        (directory / "job.json").write_text(json.dumps(groups))
    return directory


def check(directory: Path, ranks: Ranks, groups: object) -> CheckReport:
    return check_directory(write(directory, ranks, groups))


def codes(findings: Iterable[Finding]) -> set[str]:
    return {finding.code for finding in findings}


def only(findings: list[Finding], code: str) -> Finding:
    """The only finding there is, which is complete."""
    assert [finding.code for finding in findings] == [code], [str(f) for f in findings]
    assert findings[0].remedy
    return findings[0]


def edited(rank: int, number: int, change: Callable[[TraceNode], TraceNode]) -> Ranks:
    """The sound job with one node changed."""
    ranks, _ = sound()
    ranks[rank] = [change(node) if node.id == number else node for node in ranks[rank]]
    return ranks


def with_attr(name: str, value: AttrValue, kind: str = "") -> Callable[[TraceNode], TraceNode]:
    def change(node: TraceNode) -> TraceNode:
        types = {name: kind} if kind else {}
        return replace(node, attrs={**node.attrs, name: value}, attr_types=types)

    return change


def without_attr(name: str) -> Callable[[TraceNode], TraceNode]:
    return lambda node: replace(node, attrs={k: v for k, v in node.attrs.items() if k != name})


# ---------------------------------------------------------------- a sound job


def test_sound_job_passes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write(tmp_path, *sound())
    report = check_directory(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert (report.errors, report.warnings, report.ok()) == ([], [], True)
    assert (report.ranks, report.nodes, report.collectives) == (4, 20, 8)
    assert (report.groups, report.sends) == (4, 2)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


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
        path.name: {
            "crc32": f"{zlib.crc32(path.read_bytes()):08x}",
            "bytes": path.stat().st_size,
        }
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
    ("key", "value", "code"),
    [("bytes", 3, "wrong-size"), ("crc32", "0" * 8, "wrong-checksum")],
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


@pytest.mark.parametrize(("number", "name"), [(11, "pg_name"), (12, "comm_dst")])
def test_missing_link(tmp_path: Path, number: int, name: str) -> None:
    report = check(tmp_path, edited(0, number, without_attr(name)), sound()[1])
    assert "missing-attribute" in codes(report.errors)


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


# ---------------------------------------------------------------- one program


def test_no_nodes(tmp_path: Path) -> None:
    only(check(tmp_path, {0: []}, None).errors, "no-nodes")


def test_duplicate_id(tmp_path: Path) -> None:
    finding = only(check(tmp_path, {0: [comp(1), comp(2), comp(2)]}, None).errors, "duplicate-id")
    assert finding.node == 2


@pytest.mark.parametrize("where", ["data_deps", "ctrl_deps"])
def test_missing_dependency(tmp_path: Path, where: str) -> None:
    attrs: dict[str, AttrValue] = {"tensor_size": 8, "is_cpu_op": False}
    node = TraceNode(2, "n", NodeKind.MEM_LOAD, attrs=attrs, **{where: (7,)})  # type: ignore[arg-type]
    finding = only(check(tmp_path, {0: [comp(1), node]}, None).errors, "missing-dependency")
    assert "node 2 'n' depends on node 7" in finding.message


def test_dependency_cycle(tmp_path: Path) -> None:
    ranks = {0: [comp(1), comp(2, 1, 4), comp(3, 2), comp(4, 3), comp(5, 4)]}
    finding = only(check(tmp_path, ranks, None).errors, "dependency-cycle")
    assert (
        "node 2 'comp2' waits for node 4 'comp4' waits for node 3 'comp3' waits for node 2 'comp2'"
        in finding.message
    )


def test_dependency_on_itself(tmp_path: Path) -> None:
    only(check(tmp_path, {0: [comp(1), comp(2, 2)]}, None).errors, "dependency-cycle")


def test_no_start(tmp_path: Path) -> None:
    report = check(tmp_path, {0: [comp(1, 2), comp(2, 1)]}, None)
    assert codes(report.errors) == {"no-start", "dependency-cycle"}


def test_unordered_in_group(tmp_path: Path) -> None:
    ranks = {rank: [comp(1), coll(2, "1", 1), coll(3, "1", 1)] for rank in range(2)}
    report = check(tmp_path, ranks, {"1": [0, 1]})
    assert report.ok()
    finding = only(report.warnings, "unordered-in-group")
    assert "coll2" in finding.message
    assert finding.node == 3


def test_unordered_across_groups(tmp_path: Path) -> None:
    ranks = {rank: [comp(1), coll(2, "1", 1), coll(3, "2", 1)] for rank in range(2)}
    report = check(tmp_path, ranks, {"1": [0, 1], "2": [1, 0]})
    assert report.ok()
    assert "different groups" in only(report.warnings, "unordered-across-groups").message


def test_order_through_other_nodes_counts(tmp_path: Path) -> None:
    ranks = {
        rank: [coll(2, "1"), comp(5, 2), comp(3, 5), coll(1, "2", 3), coll(9, "1", 1)]
        for rank in range(2)
    }
    report = check(tmp_path, ranks, {"1": [0, 1], "2": [0, 1]})
    assert (report.errors, report.warnings) == ([], [])


def test_unordered_messages(tmp_path: Path) -> None:
    ranks = {
        0: [comp(1), send(2, 1, 1), send(3, 1, 2)],
        1: [comp(1), comp(2), recv(3, 0, 1), recv(4, 0, 2)],
    }
    report = check(tmp_path, ranks, None)
    assert report.ok()
    finding = only(report.warnings, "unordered-messages")
    assert finding.path.name == "job.1.et"
    assert "tag" in finding.remedy


def test_messages_with_tags_of_their_own_need_no_order(tmp_path: Path) -> None:
    ranks = {
        0: [send(2, 1, tag=1), send(3, 1, tag=2), send(4, 1, tag=2, size=8)],
        1: [
            comp(1),
            comp(2),
            recv(3, 0, 1, tag=1),
            recv(4, 0, 2, tag=2),
            recv(5, 0, tag=2, size=8),
        ],
    }
    assert check(tmp_path, ranks, None).warnings == []


def test_lowest_id_first_orders_messages_that_are_ready_together(tmp_path: Path) -> None:
    ranks = {
        0: [comp(1), send(2, 1, 1), send(3, 1, 1)],
        1: [comp(1), recv(3, 0), recv(4, 0, 1), comp(5, 3, 4)],
    }
    assert check(tmp_path, ranks, None).warnings == []


# ---------------------------------------------------------------- groups


PAIR: Ranks = {rank: [coll(1, "1")] for rank in range(2)}


@pytest.mark.parametrize(
    "groups",
    [
        [],
        3,
        {"1": [0, 1], "x": [0, 1]},
        {"1": [0, 1], "0": [0, 1]},
        {"1": [0, 1], "-2": [0, 1]},
        {"1": [0, 1], "02": [0, 1]},
        {"1": [0, 1], "2": 3},
        {"1": [0, 1], "2": [0, "1"]},
        {"1": [0, 1], "2": [0, True]},
        {"1": [0, 1], "2": [0, 0]},
        {"1": [0, 1], "2": [-1, 0]},
    ],
)
def test_bad_groups_file(tmp_path: Path, groups: object) -> None:
    report = check(tmp_path, PAIR, groups)
    found = [finding for finding in report.errors if finding.code == "bad-groups-file"]
    assert len(found) == 1
    assert found[0].path.name == "job.json"


def test_group_listed_twice(tmp_path: Path) -> None:
    write(tmp_path, PAIR, None)
    (tmp_path / "job.json").write_text('{"1": [0, 1], "1": [1, 0]}')
    assert "bad-groups-file" in codes(check_directory(tmp_path).errors)


def test_groups_file_of_another_name(tmp_path: Path) -> None:
    write(tmp_path, PAIR, None)
    (tmp_path / "comm_group.json").write_text('{"1": [0, 1]}')
    (tmp_path / "system.json").write_text('{"scheduling": "LIFO"}')
    report = check_directory(tmp_path)
    assert (report.ok(), report.groups) == (True, 1)


def test_no_groups_file(tmp_path: Path) -> None:
    only(check(tmp_path, PAIR, None).errors, "no-groups-file")


def test_no_groups_file_needed_without_collectives(tmp_path: Path) -> None:
    assert check(tmp_path, {0: [comp(1)]}, None).ok()


def test_small_group(tmp_path: Path) -> None:
    report = check(tmp_path, {0: [coll(1, "1")]}, {"1": [0]})
    assert "hangs" in only(report.errors, "small-group").remedy


def test_unknown_member(tmp_path: Path) -> None:
    assert (
        "member 2" in only(check(tmp_path, PAIR, {"1": [0, 1, 2]}).errors, "unknown-member").message
    )


@pytest.mark.parametrize("name", ["x", "0", "-1", "01", "1 ", "", "1.0", "٣", "9" * 30])
def test_bad_group_id(tmp_path: Path, name: str) -> None:
    ranks = {rank: [coll(1, name)] for rank in range(2)}
    assert codes(check(tmp_path, ranks, {}).errors) == {"bad-group-id"}


def test_unknown_group(tmp_path: Path) -> None:
    ranks = {rank: [coll(1, "7")] for rank in range(2)}
    report = check(tmp_path, ranks, {"1": [0, 1]})
    assert codes(report.errors) == {"unknown-group"}
    assert report.errors[0].node == 1


def test_not_a_member(tmp_path: Path) -> None:
    ranks = {**PAIR, 2: [coll(1, "1")]}
    finding = only(check(tmp_path, ranks, {"1": [0, 1]}).errors, "not-a-member")
    assert "rank 2" in finding.message
    assert "members are 0, 1" in finding.message


def test_unused_group(tmp_path: Path) -> None:
    report = check(tmp_path, PAIR, {"1": [0, 1], "2": [0, 1]})
    assert report.ok()
    assert "group 2" in only(report.warnings, "unused-group").message


def test_path_with_the_word_empty(tmp_path: Path) -> None:
    directory = tmp_path / "emptyish"
    directory.mkdir()
    only(check(directory, PAIR, {"1": [0, 1]}).warnings, "empty-in-path")


def test_consumer_limits_are_warnings(tmp_path: Path) -> None:
    ranks = {rank: [coll(1, "9999")] for rank in range(2)}
    report = check(tmp_path, ranks, {"9999": [0, 1]})
    assert report.ok()
    assert "exceed 2147" in only(report.warnings, "consumer-limit").message


# ---------------------------------------------------------------- collectives


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([coll(1, "1"), coll(2, "1", 1, size=65)], "collective 2 over group 1"),
        ([coll(1, "1"), coll(2, "1", 1, kind=2)], "found all_gather of 64 bytes (node 2 'coll2')"),
        ([coll(1, "1")], "found no further collective on rank 1"),
        ([coll(1, "1"), coll(2, "1", 1), coll(3, "1", 2)], "collective 3 over group 1"),
        ([comp(1)], "collective 1 over group 1"),
    ],
)
def test_collective_mismatch(tmp_path: Path, other: list[TraceNode], expected: str) -> None:
    ranks = {0: [coll(1, "1"), coll(2, "1", 1)], 1: other}
    finding = only(check(tmp_path, ranks, {"1": [0, 1]}).errors, "collective-mismatch")
    assert expected in finding.message
    assert finding.path.name == "job.1.et"


def test_order_of_collectives_is_that_of_dependencies_not_of_the_file(tmp_path: Path) -> None:
    one = [coll(1, "1", size=8), coll(2, "1", 1, size=16)]
    other = [coll(5, "1", 9, size=16), coll(9, "1", size=8)]
    report = check(tmp_path, {0: one, 1: other}, {"1": [0, 1]})
    assert (report.errors, report.warnings) == ([], [])


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("receiver", "errors", "expected"),
    [
        ([comp(1)], {"unmatched-send"}, "none with that tag"),
        ([recv(1, 0, size=8)], {"unmatched-send", "unmatched-receive"}, "one of 8 bytes"),
        ([recv(1, 0, tag=4)], {"unmatched-send", "unmatched-receive"}, "none with that tag"),
        ([recv(1, 2)], {"unmatched-send", "unmatched-receive"}, "none with that tag"),
        ([recv(1, 0), recv(2, 0, 1)], {"unmatched-receive"}, "none with that tag left"),
    ],
)
def test_unmatched_messages(
    tmp_path: Path, receiver: list[TraceNode], errors: set[str], expected: str
) -> None:
    ranks = {0: [send(1, 1)], 1: receiver, 2: [comp(1)]}
    report = check(tmp_path, ranks, None)
    assert codes(report.errors) == errors
    assert expected in report.errors[0].message


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (
            {0: [send(1, 1)], 1: [send(1, 0)]},
            "message 1 from rank 0 to rank 1 is node 1 'send1', but",
        ),
        ({0: [recv(1, 1)], 1: [send(2, 0), send(3, 0, 2)]}, "is node 3 'send3', but not received"),
        ({0: [send(1, 1)], 1: [recv(2, 0), recv(3, 0, 2)]}, "by node 3 'recv3', but not sent"),
        ({0: [send(1, 1)], 1: [recv(2, 0, tag=4)]}, "with tag 0, but node 2 'recv2' with tag 4"),
    ],
)
def test_messages_in_unlike_numbers_are_in_no_order(
    tmp_path: Path, ranks: Ranks, expected: str
) -> None:
    report = check(tmp_path, ranks, None)
    assert report.errors
    assert expected in str(report.eager_only)


def test_unmatched_send_says_where(tmp_path: Path) -> None:
    finding = only(check(tmp_path, {0: [send(7, 1)], 1: [comp(1)]}, None).errors, "unmatched-send")
    assert (finding.path.name, finding.node) == ("job.0.et", 7)
    assert "rank 0, node 7 'send7', sends 32 bytes with tag 0 to rank 1" in finding.message
    assert "write the receive on rank 1" in finding.remedy


def test_self_message(tmp_path: Path) -> None:
    report = check(tmp_path, {0: [send(1, 0), recv(2, 0, 1)]}, None)
    only(report.errors, "self-message")


@pytest.mark.parametrize("peer", [5, -1])
def test_unknown_peer(tmp_path: Path, peer: int) -> None:
    assert "unknown-peer" in codes(check(tmp_path, {0: [send(1, peer)]}, None).errors)


# ---------------------------------------------------------------- deadlock


def test_deadlock_of_collectives(tmp_path: Path) -> None:
    ranks = {0: [coll(1, "1"), coll(2, "2", 1)], 1: [coll(1, "2"), coll(2, "1", 1)]}
    finding = only(check(tmp_path, ranks, {"1": [0, 1], "2": [0, 1]}).errors, "deadlock")
    assert "rank 0 node 1 'coll1' before rank 0 node 2 'coll2'" in finding.message
    assert "rank 1 node 1 'coll1' before rank 1 node 2 'coll2'" in finding.message
    assert "one collective with" in finding.message


def test_deadlock_of_messages(tmp_path: Path) -> None:
    ranks = {0: [recv(1, 1), send(2, 1, 1)], 1: [recv(1, 0), send(2, 0, 1)]}
    finding = only(check(tmp_path, ranks, None).errors, "deadlock")
    assert "rank 0 node 2 'send2' before rank 1 node 1 'recv1'" in finding.message


def test_deadlock_of_a_message_and_a_collective(tmp_path: Path) -> None:
    ranks = {0: [coll(1, "1"), send(2, 1, 1)], 1: [recv(1, 0), coll(2, "1", 1)]}
    only(check(tmp_path, ranks, {"1": [0, 1]}).errors, "deadlock")


def test_deadlock_around_a_square_of_groups(tmp_path: Path) -> None:
    """No two groups share more than one rank, and still all four ranks wait in a circle."""
    groups = {"1": [0, 1], "2": [1, 2], "3": [2, 3], "4": [3, 0]}
    order = {0: ("4", "1"), 1: ("1", "2"), 2: ("2", "3"), 3: ("3", "4")}
    ranks = {rank: [coll(1, a), coll(2, b, 1)] for rank, (a, b) in order.items()}
    only(check(tmp_path, ranks, groups).errors, "deadlock")


def test_crossed_messages_are_fine_when_sent_first(tmp_path: Path) -> None:
    ranks = {0: [send(1, 1), recv(2, 1, 1)], 1: [send(1, 0), recv(2, 0, 1)]}
    report = check(tmp_path, ranks, None)
    assert (report.errors, report.warnings) == ([], [])


def test_cycle_of_classes_need_not_be_one_of_ranks(tmp_path: Path) -> None:
    """A chain of ranks with one program: each receives from the last and sends to the next."""
    ranks: Ranks = {0: [send(2, 1)], 5: [recv(1, 4)]}
    for rank in range(1, 5):
        ranks[rank] = [recv(1, rank - 1), send(2, rank + 1, 1)]
    report = check(tmp_path, dict(sorted(ranks.items())), None)
    assert (report.errors, report.warnings) == ([], [])


def test_ring_of_one_class_that_deadlocks(tmp_path: Path) -> None:
    ranks = {r: [recv(1, (r - 1) % 20), send(2, (r + 1) % 20, 1)] for r in range(20)}
    finding = only(check(tmp_path, ranks, None).errors, "deadlock")
    assert "more)" in finding.message


def test_proof_that_is_too_large_is_given_up(tmp_path: Path) -> None:
    ranks = {r: [recv(1, (r - 1) % 4), send(2, (r + 1) % 4, 1)] for r in range(4)}
    write(tmp_path, ranks, None)
    reader = RankReader()
    traces = {rank: reader.read(tmp_path / f"job.{rank}.et", rank) for rank in ranks}
    report = CheckReport()
    job = CheckedJob(tmp_path, traces, frozenset(ranks), read_groups(tmp_path, "job", report))
    check_deadlock(job, report, expanded_nodes=7)
    only(report.errors, "unproven")
    check_deadlock(job, report, expanded_nodes=8)
    assert codes(report.errors) == {"unproven", "deadlock"}


@pytest.mark.parametrize("pipelines", [1, 50])
def test_stages_with_one_program_are_told_apart(tmp_path: Path, pipelines: int) -> None:
    """As where there are fewer microbatches than stages: the proof is about stages, not ranks."""
    stages, last = 8, 7
    ranks: Ranks = {}
    for first in range(0, stages * pipelines, stages):
        ranks[first] = [send(1, first + 1)]
        for rank in range(first + 1, first + last):
            ranks[rank] = [recv(1, rank - 1), send(2, rank + 1, 1)]
        ranks[first + last] = [recv(1, first + last - 1)]
    write(tmp_path, ranks, None)
    reader = RankReader()
    traces = {rank: reader.read(tmp_path / f"job.{rank}.et", rank) for rank in ranks}
    assert len({trace.class_id for trace in traces.values()}) == 3
    report = CheckReport()
    job = CheckedJob(tmp_path, traces, frozenset(ranks), read_groups(tmp_path, "job", report))
    nodes_of_a_pipeline = 2 * (stages - 2) + 2
    check_deadlock(job, report, expanded_nodes=nodes_of_a_pipeline)
    assert report.ok()


def test_messages_match_first_in_first_out(tmp_path: Path) -> None:
    ranks = {
        0: [send(1, 1), recv(2, 1, 1, tag=5), send(3, 1, 2)],
        1: [recv(1, 0), send(2, 0, 1, tag=5), recv(3, 0, 1)],
    }
    assert check(tmp_path, ranks, None).ok()


def random_job(seed: int) -> tuple[Ranks, Groups]:
    """Chains of a few collectives and messages on each of four ranks, in orders made up."""
    draw = random.Random(seed)
    groups: Groups = {"1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3], "5": [0, 1, 2, 3]}
    steps: dict[int, list[Callable[[int], TraceNode]]] = {rank: [] for rank in range(4)}
    for _ in range(draw.randint(2, 5)):
        if draw.random() < 0.5:
            group = draw.choice([*groups])
            for rank in groups[group]:
                steps[rank].append(partial(coll, group=group))
        else:
            src, dst = draw.sample(range(4), 2)
            steps[src].append(partial(send, peer=dst))
            steps[dst].append(partial(recv, peer=src))
    ranks: Ranks = {}
    for rank, made in steps.items():
        for _ in range(draw.randint(0, 1)):
            draw.shuffle(made)
        nodes = [comp(0), *(step(number) for number, step in enumerate(made, start=1))]
        ranks[rank] = [replace(n, ctrl_deps=(n.id - 1,)) if n.id else n for n in nodes]
    return ranks, groups


def runs_to_the_end(ranks: Ranks, groups: Groups) -> bool:
    """Play the chains: an independent, naive answer to whether they deadlock."""
    left = {rank: [*nodes] for rank, nodes in ranks.items()}
    sent: Counter[tuple[int, int]] = Counter()

    def group_ready(name: str) -> bool:
        heads = [left[rank][0] if left[rank] else comp(0) for rank in groups[name]]
        return all(head.attrs.get("pg_name") == name for head in heads)

    def step(rank: int) -> bool:
        node = left[rank][0]
        movers = [rank]
        if node.kind == NodeKind.COLL:
            name = str(node.attrs["pg_name"])
            if not group_ready(name):
                return False
            movers = groups[name]
        elif node.kind == NodeKind.SEND:
            sent[rank, int(str(node.attrs["comm_dst"]))] += 1
        elif node.kind == NodeKind.RECV:
            channel = int(str(node.attrs["comm_src"])), rank
            if not sent[channel]:
                return False
            sent[channel] -= 1
        for mover in movers:
            left[mover].pop(0)
        return True

    while any(left[rank] and step(rank) for rank in left):
        pass
    return not any(left.values())


@pytest.mark.parametrize("seed", range(150))
def test_verdict_equals_that_of_playing_the_job(tmp_path: Path, seed: int) -> None:
    ranks, groups = random_job(seed)
    report = check(tmp_path, ranks, groups)
    assert codes(report.errors) == (set() if runs_to_the_end(ranks, groups) else {"deadlock"})


def test_random_jobs_are_of_both_sorts() -> None:
    sound_ones = sum(runs_to_the_end(*random_job(seed)) for seed in range(150))
    assert 40 < sound_ones < 110


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


# ---------------------------------------------------------------- cost


def random_program(seed: int) -> TraceProgram:
    draw = random.Random(seed)
    nodes = [
        coll(i, "1", *sorted(draw.sample(range(i), draw.randint(0, min(i, 2)))), size=1)
        if draw.random() < 0.5
        else comp(i, *sorted(draw.sample(range(i), draw.randint(0, min(i, 2)))))
        for i in range(10)
    ]
    slots = {i: 0 for i, node in enumerate(nodes) if node.kind == NodeKind.COLL}
    return TraceProgram(tuple(nodes), slots, {})


@pytest.mark.parametrize("seed", range(100))
def test_total_order_against_reachability(seed: int) -> None:
    program = random_program(seed)
    reach: dict[int, set[int]] = defaultdict(set)
    for node in program.nodes:
        for dep in (*node.data_deps, *node.ctrl_deps):
            reach[node.id] |= {dep} | reach[dep]
    chosen = sorted(program.group_slots)
    total = all(a in reach[b] for a in chosen for b in chosen if a < b)
    warned = "unordered-in-group" in {problem.code for problem in analyse(program).problems}
    assert warned == (not total)


def test_cost_of_a_class_does_not_grow_with_its_ranks(tmp_path: Path) -> None:
    layers, ranks = 400, 64
    for rank in range(ranks):
        group = str(1 + rank // 2)
        nodes = [comp(0)]
        for layer in range(layers):
            last = 5 * layer
            nodes += [comp(last + k, last + k - 1) for k in range(1, 5)]
            nodes.append(coll(last + 5, group, last + 4))
        write(tmp_path, {rank: nodes}, None)
    groups = {str(1 + i): [2 * i, 2 * i + 1] for i in range(ranks // 2)}
    (tmp_path / "job.json").write_text(json.dumps(groups))
    start = time.process_time()
    report = check_directory(tmp_path)
    assert time.process_time() - start < 48  # one by one takes far longer
    assert (report.ok(), report.nodes) == (True, ranks * (5 * layers + 1))
