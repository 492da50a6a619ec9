"""The moments of memory plans as rows of counts, of which any sizes make bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from stagec.analysis.count import copied
from stagec.analysis.memory import work_of
from stagec.ir.core import Operation
from stagec.ir.expr import Env, Expr, evaluate
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir.queries import Queries, TrackedValues, plain
from stagec.memory.buffers import Buffer
from stagec.memory.lifetimes import lifetimes
from stagec.memory.step import (
    ActionInState,
    MemoryRun,
    MicrobatchState,
    Planner,
    after_work,
    first_runs,
)
from stagec.memory.worst import on_device

Ints = npt.NDArray[np.int64]


class MemoryMoments:
    """The moments of the memory plans of a module, taken when its memory is planned."""

    def __init__(self, module: Module, decisions: Queries | None = None) -> None:
        values = plain(planned_env(module))
        watched = TrackedValues(values, decisions or Queries())
        works = module.ops("stg.working")
        self.loads = {n: v for n, v in values.items() if n not in module.env}
        self.of: dict[object, FunctionMoments] = {}
        self.copied: list[Expr] = []
        for func in module.functions:
            planner = module.notes.get(func.body)  # of the pass that has just planned
            if not isinstance(planner, Planner):
                planner = Planner(lifetimes(func.body, watched))
            mine = [op for op in works if op.attrs["stages"] == func.attrs.get("stages")]
            self.of[func.attrs.get("stages")] = FunctionMoments(planner, mine)
            self.copied.append(copied(module, func))


class FunctionMoments:
    """The moments of a function. A row counts the live buffers of each kind: of a size, there for
    one of `categories`."""

    def __init__(self, planner: Planner, works: Sequence[Operation]) -> None:
        kinds = {b: (b.size, b.category) for b in planner.buffers if on_device(b)}
        numbers = {kind: i for i, kind in enumerate(dict.fromkeys(kinds.values()))}
        slots = {b: numbers[kind] for b, kind in kinds.items()}
        self._sizes = [size for size, _ in numbers]
        self.categories = [category for _, category in numbers]
        count = _Counts(slots, len(numbers))
        self.outside = count.moments(planner.run(None))
        self.around = count.of(planner.around())
        runs = {work: planner.run(work) for work in map(work_of, works)}
        self.works: Mapping[ActionInState, Ints] = {w: count.moments(r) for w, r in runs.items()}
        states = {MicrobatchState(), *(s for w in runs for s in (after_work(w), *first_runs(w)))}
        self.kept = {state: count.of(planner.kept(state)) for state in states}

    def bytes_of(self, values: Env) -> list[int]:
        """The bytes of a buffer of each kind."""
        sizes = {size: evaluate(size, values) for size in dict.fromkeys(self._sizes)}
        return [sizes[size] for size in self._sizes]


class _Counts:
    """Counts buffers by the number of their kind, of which there are so many."""

    def __init__(self, slots: Mapping[Buffer, int], kinds: int) -> None:
        self._slots, self._kinds = slots, kinds

    def of(self, buffers: Iterable[Buffer]) -> Ints:
        counts = [0] * self._kinds
        self._add(counts, buffers, 1)
        return np.array(counts, dtype=np.int64)

    def _add(self, counts: list[int], buffers: Iterable[Buffer], sign: int) -> None:
        for buffer in buffers:
            slot = self._slots.get(buffer)
            if slot is not None:
                counts[slot] += sign

    def moments(self, run: MemoryRun) -> Ints:
        """How many buffers of each kind live at each moment of a run that may be the worst, beside
        what was there at its start, in order."""
        live = [0] * self._kinds
        rows: dict[tuple[int, ...], None] = {}
        for step, ends in run:
            self._add(live, step.made, 1)
            if step.counts:
                rows[tuple(live)] = None
            self._add(live, ends, -1)
        return np.array([*rows], dtype=np.int64).reshape(-1, len(live))


def worst(rows: Ints, sizes: Sequence[int]) -> tuple[int, int]:
    """The largest sum of a row's counts times the sizes, and the first row that has it; 0
    without rows."""
    if not rows.size:
        return 0, 0
    bound = int(np.abs(rows).sum(axis=1).max()) * max(map(abs, sizes), default=0)
    kind = np.int64 if bound < 1 << 62 else object
    sums = rows.astype(kind) @ np.array(sizes, dtype=kind)
    first = int(sums.argmax())
    return int(sums[first]), first


def most(rows: Ints, sizes: Sequence[int]) -> int:
    """The largest sum of a row's counts times the sizes; 0 if there are none."""
    return worst(rows, sizes)[0]


def by_category(counts: Ints, categories: Sequence[str], sizes: Sequence[int]) -> Mapping[str, int]:
    """The bytes of buffers that are counted by kind."""
    totals: Counter[str] = Counter()
    for number, category, size in zip(counts.tolist(), categories, sizes, strict=True):
        totals[category] += number * size
    return totals
