"""The traces of many ranks as arrays: the program of each rank class, and the groups and peers of
its ranks by slot. The checks use these arrays; the `RankTrace` of a single rank is derived from
them if it has a problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stagec.check.program import Analysis
from stagec.check.ranks import RankTrace
from stagec.check.trace_files import ALL_RANKS, ALL_RANKS_ID, group_id
from stagec.program.nodes import Ints

_LARGEST = (1 << 63) - 1
#: The largest key for which `distinct` uses a lookup table; for larger keys it sorts.
_TABLE = 1 << 20


@dataclass(frozen=True)
class ProgramRanks:
    """Ranks with the same program. `groups[slot]` and `peers[slot]` have an entry for each of
    `ranks`: the id of the group (negative for a text that is not an id), and the rank of the
    peer."""

    number: int
    analysis: Analysis
    ranks: Ints
    groups: Sequence[Ints]
    peers: Sequence[Ints]


class RankTable(Mapping[int, RankTrace]):
    """The traces of ranks, in ascending order. The index of a rank in this order is its place:
    `ranks` has the rank of each place, `class_of` the index of its class in `classes`.

    The group id -1-i represents text i.
    """

    def __init__(
        self,
        parts: Iterable[ProgramRanks],
        path_of: Callable[[int], Path],
        texts: Mapping[str, int],
    ) -> None:
        self.classes = _merged(parts)
        self._path_of, self._texts = path_of, [*texts]
        sizes = [len(each.ranks) for each in self.classes]
        ranks = joined([each.ranks for each in self.classes])
        order = np.argsort(ranks, kind="stable")
        self.ranks: Ints = ranks[order]
        self.class_of: Ints = np.repeat(np.arange(len(sizes)), sizes)[order]
        self._rows: Ints = joined([np.arange(size) for size in sizes])[order]

    @classmethod
    def of(cls, traces: Iterable[RankTrace], texts: dict[str, int] | None = None) -> RankTable:
        """The table of traces that were read one by one. `texts` numbers the group names that are
        not ids; new ones are added to it."""
        paths: dict[int, Path] = {}
        texts = {} if texts is None else texts
        by_class: dict[int, list[RankTrace]] = {}
        for trace in traces:
            paths[trace.rank] = trace.path
            by_class.setdefault(trace.class_id, []).append(trace)
        parts = [
            ProgramRanks(
                number,
                alike[0].analysis,
                np.array([t.rank for t in alike], dtype=np.int64),
                [_ids(column, texts) for column in zip(*(t.groups for t in alike), strict=True)],
                [_limited(column) for column in zip(*(t.peers for t in alike), strict=True)],
            )
            for number, alike in by_class.items()
        ]
        return cls(parts, paths.__getitem__, texts)

    def __getitem__(self, rank: int) -> RankTrace:
        place = int(self.places(np.array([rank], dtype=np.int64))[0])
        if place < 0:
            raise KeyError(rank)
        return self.at(place)

    def at(self, place: int) -> RankTrace:
        """The trace of the rank at a place."""
        rank = int(self.ranks[place])
        each, row = self.classes[int(self.class_of[place])], int(self._rows[place])
        groups = tuple(self._text(int(column[row])) for column in each.groups)
        peers = tuple(int(column[row]) for column in each.peers)
        return RankTrace(rank, self._path_of(rank), each.number, each.analysis, groups, peers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks.tolist())

    def __len__(self) -> int:
        return len(self.ranks)

    def _text(self, number: int) -> str:
        if number == ALL_RANKS_ID:
            return ALL_RANKS
        return str(number) if number > 0 else self._texts[-1 - number]

    def places(self, ranks: Ints) -> Ints:
        """The places of ranks, -1 for those without a trace."""
        return positions(self.ranks, ranks)

    def entries(self, columns_of: Callable[[ProgramRanks], Sequence[Ints]]) -> tuple[Ints, Ints]:
        """The columns of all classes as one array, ordered by place and slot; and for each place
        the index of its first entry, followed by the total number."""
        counts = np.array([len(columns_of(each)) for each in self.classes], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(counts[self.class_of])]).astype(np.int64)
        values = np.empty(int(starts[-1]), dtype=np.int64)
        for each in self.classes:
            begins = starts[self.places(each.ranks)]
            for slot, column in enumerate(columns_of(each)):
                values[begins + slot] = column
        return values, starts


def _merged(parts: Iterable[ProgramRanks]) -> list[ProgramRanks]:
    """Merge the parts of each class; classes are ordered by their first ranks."""
    by_number: dict[int, list[ProgramRanks]] = {}
    for part in parts:
        if len(part.ranks):
            by_number.setdefault(part.number, []).append(part)
    merged = [
        ProgramRanks(
            number,
            alike[0].analysis,
            joined([p.ranks for p in alike]),
            [joined([*columns]) for columns in zip(*(p.groups for p in alike), strict=True)],
            [joined([*columns]) for columns in zip(*(p.peers for p in alike), strict=True)],
        )
        for number, alike in by_number.items()
    ]
    return sorted(merged, key=lambda each: int(each.ranks.min()))


def joined(arrays: Sequence[Ints]) -> Ints:
    """The concatenation of any number of arrays."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


def _ids(texts: Sequence[str], others: dict[str, int]) -> Ints:
    numbers: list[int] = []
    for text in texts:
        number = group_id(text)
        numbers.append(-1 - others.setdefault(text, len(others)) if number is None else number)
    return np.array(numbers, dtype=np.int64)


def _limited(peers: Sequence[int]) -> Ints:
    """Peers as 64-bit integers, at most `_LARGEST`: larger ones are not ranks of a job."""
    return np.array([min(peer, _LARGEST) for peer in peers], dtype=np.int64)


def positions(ascending: Ints, values: Ints) -> Ints:
    """The index of each value in an ascending array, the last one among equals; -1 if it is not
    there."""
    at = np.searchsorted(ascending, values, side="right") - 1
    if len(ascending):
        at[ascending[at] != values] = -1
    return at


def lookup(values: Ints, at: Ints) -> Ints:
    """The values at positions, -1 for those that `positions` did not find."""
    return np.where(at < 0, -1, values[at]) if len(values) else at


def distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """The index of the first occurrence of each distinct row, ascending, and for every row the
    number of its distinct row. The columns contain numbers >= 0."""
    key = columns[0]
    for column in columns[1:]:
        width = int(column.max(initial=0)) + 1
        if int(key.max(initial=0)) >= _LARGEST // width:
            key = np.unique(key, return_inverse=True)[1].reshape(-1)
        key = key * width + column
    if int(key.max(initial=0)) >= _TABLE:
        key = np.unique(key, return_inverse=True)[1].reshape(-1)
    first = np.full(int(key.max(initial=0)) + 1, len(key))
    first[key[::-1]] = np.arange(len(key))[::-1]  # the last write to an index remains
    order = np.argsort(first, kind="stable")[: int((first < len(key)).sum())]
    renamed = np.empty_like(first)
    renamed[order] = np.arange(len(order))
    return first[order], renamed[key]


def of_each(
    holds: Callable[[int, int, int, int], bool], one: Ints, a: Ints, other: Ints, b: Ints
) -> npt.NDArray[np.bool_]:
    """The result of `holds` for each row of four columns, called once per distinct row. `a` and `b`
    are slots, or -1."""
    first, alike = distinct(one, a + 1, other, b + 1)
    rows = np.stack([one[first], a[first], other[first], b[first]], axis=1).tolist()
    answers = [holds(*row) for row in rows]
    return np.array(answers, dtype=bool)[alike]
