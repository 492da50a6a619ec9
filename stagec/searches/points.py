"""The jobs of a space as a table: a row for each job, a column for each flag that may differ."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagec.jobs.request.options import JobOptions

Ints: TypeAlias = NDArray[np.int64]


class Jobs:
    """The jobs of a space by number: `base` has the options that they share, `rows` has for each
    job the values of the flags `names`."""

    def __init__(self, base: JobOptions, names: Sequence[str]) -> None:
        self.base, self.names = base, tuple(names)
        self.rows: list[tuple[Any, ...]] = []
        self._options: dict[int, JobOptions] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> JobOptions:
        """The options of a job."""
        options = self._options.get(number)
        if options is None:
            given: Mapping[str, Any] = dict(zip(self.names, self.rows[number], strict=True))
            options = self._options[number] = self.base.changed(**given)
        return options

    def has(self, options: JobOptions) -> bool:
        """Whether these are the options of one of the jobs."""
        row = tuple(getattr(options, name) for name in self.names)
        given: Mapping[str, Any] = dict(zip(self.names, row, strict=True))
        return row in self.rows and self.base.changed(**given) == options

    @cached_property
    def codes(self) -> Ints:
        """A row for each job and a column for each name; equal numbers stand for equal values."""
        columns = [self._coded([row[i] for row in self.rows]) for i in range(len(self.names))]
        return np.array(columns, dtype=np.int64).reshape(len(self.names), -1).T

    @staticmethod
    def _coded(values: Sequence[Any]) -> list[int]:
        numbers: dict[Any, int] = {}
        return [numbers.setdefault(value, len(numbers)) for value in values]

    def values(self, name: str) -> list[Any]:
        """The values of a flag, by job."""
        if name not in self.names:
            return [getattr(self.base, name)] * len(self)
        at = self.names.index(name)
        return [row[at] for row in self.rows]

    def numbers(self, name: str) -> Ints:
        """The values of an integer flag, by job."""
        return np.array(self.values(name), dtype=np.int64)

    def differing(self) -> list[str]:
        """The flags that differ among the jobs."""
        return [n for n, column in zip(self.names, self.codes.T, strict=True) if np.ptp(column)]

    def neighbours(self, number: int, ignored: Iterable[str], most: int) -> list[int]:
        """The jobs that differ from one in at most `most` flags, `ignored` ones not counted."""
        counted = [n not in {*ignored} for n in self.names]
        differ = (self.codes != self.codes[number])[:, counted].sum(axis=1)
        return [int(n) for n in np.flatnonzero(differ <= most)]

    def groups(self, names: Iterable[str], more: Iterable[Ints] = ()) -> tuple[Ints, list[int]]:
        """Groups of jobs with equal values of these flags and in these arrays: the group of each
        job, and the first job of each group."""
        wanted = {*names}
        columns = [c for n, c in zip(self.names, self.codes.T, strict=True) if n in wanted]
        key = np.zeros(len(self), dtype=np.int64)
        for column in (*columns, *more):
            _, key = np.unique(key * (int(column.max(initial=0)) + 1) + column, return_inverse=True)
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        return group.astype(np.int64), [int(n) for n in first]
