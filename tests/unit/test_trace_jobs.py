"""The trace checker: what can be wrong between the nodes of a rank, and between ranks, is found by
its code.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stagec.check.traces import check_directory
from stagec.formats.chakra.nodes import AttrValue, NodeKind, TraceNode
from tests.small_traces import PAIR, Ranks, check, codes, coll, comp, only, recv, send, write

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
    actual = [finding for finding in report.errors if finding.code == "bad-groups-file"]
    assert len(actual) == 1
    assert actual[0].path.name == "job.json"


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
