"""The arrays of the checker, against dictionaries of the same ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.check import table
from stagec.check.links import GroupUses, PeerLinks
from stagec.check.members import GroupMembers
from stagec.check.program import TraceProgram, analyse
from stagec.check.ranks import RankTrace
from stagec.check.table import RankTable, distinct
from stagec.check.trace_files import group_id
from tests.support import examples

NOTHING = analyse(TraceProgram((), {}, {}))
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1 << 61)))


@given(ROWS)
@examples(60)
def test_rows_that_are_alike_have_one_number(rows: list[tuple[int, ...]]) -> None:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    numbers: dict[tuple[int, ...], int] = {}
    alike = [numbers.setdefault(row, len(numbers)) for row in rows]
    first, actual = distinct(*columns)
    assert actual.tolist() == alike
    assert [rows[i] for i in first.tolist()] == [*numbers]


def test_rows_of_small_numbers_and_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    column = np.arange(40, dtype=np.int64)[::-1] // 3
    plain = [each.tolist() for each in distinct(column, column)]
    monkeypatch.setattr(table, "_TABLE", 5)
    assert [each.tolist() for each in distinct(column, column)] == plain


TRACES = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["1", "2", "30", "01", "x", "\0"]), max_size=3, unique=True),
        st.lists(st.sampled_from([-1, 0, 1, 2, 3, 7, 1 << 62]), max_size=3, unique=True),
    ),
    min_size=1,
    max_size=7,
)


@given(TRACES)
@examples(60)
def test_links_and_uses_of_ranks(drawn: list[tuple[list[str], list[int]]]) -> None:
    """Who talks to whom in arrays is who talks to whom rank by rank."""
    traces = {
        2 * i: RankTrace(
            2 * i,
            Path(f"job.{2 * i}.et"),
            10 * len(groups) + len(peers),
            NOTHING,
            tuple(groups),
            tuple(peers),
        )
        for i, (groups, peers) in enumerate(drawn)
    }
    made = RankTable.of(traces.values())
    assert dict(made) == traces
    links, uses = PeerLinks.of(made), GroupUses.of(made)
    expected = [
        (rank, slot, peer if peer in traces else -1, _back(traces, rank, peer))
        for rank, trace in traces.items()
        for slot, peer in enumerate(trace.peers)
    ]
    there = np.where(links.there < 0, -1, made.ranks[links.there])
    columns = made.ranks[links.here], links.slot, there, links.back
    assert [*zip(*(c.tolist() for c in columns), strict=True)] == expected
    named = [
        (number, rank, slot)
        for rank, trace in traces.items()
        for slot, text in enumerate(trace.groups)
        if (number := group_id(text)) is not None
    ]
    actual = uses.number, made.ranks[uses.place], uses.slot
    assert [*zip(*(c.tolist() for c in actual), strict=True)] == sorted(named)


def _back(traces: dict[int, RankTrace], rank: int, peer: int) -> int:
    there = traces[peer].peers if peer in traces else ()
    return there.index(rank) if rank in there else -1


@given(st.dictionaries(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=4).map(tuple)))
@examples(30)
def test_members_of_groups(groups: dict[int, tuple[int, ...]]) -> None:
    made = GroupMembers.of(groups)
    assert ([*made], dict(made)) == ([*groups], groups)
    assert {n: n in made for n in range(11)} == {n: n in groups for n in range(11)}
    more = made.with_group(0, np.arange(3))
    assert dict(more) == {**groups, 0: (0, 1, 2)}
