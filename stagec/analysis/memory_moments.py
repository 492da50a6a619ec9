"""The moments of memory plans as rows of buffer counts, which can be evaluated for any sizes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from stagec.analysis.count import copied
from stagec.ir.core import Operation
from stagec.ir.expr import ZERO, Env, Expr, evaluate
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir.queries import plain
from stagec.memory.buffers import Buffer
from stagec.memory.plan import FunctionPlan
from stagec.memory.step import MemoryRun, MicrobatchState, after_work, first_runs, is_first_run
from stagec.memory.worst import on_device, on_host, total_of

Ints = npt.NDArray[np.int64]


class MemoryMoments:
    """The moments of the memory plans of these functions, by default those of the module. Plans
    that a pass just made are reused. Raises `DiagnosticError`."""

    def __init__(self, module: Module, functions: Sequence[Operation] = ()) -> None:
        values = plain(planned_env(module))
        self.loads = {n: v for n, v in values.items() if n not in module.env}
        self.of: dict[object, FunctionMoments] = {}
        self.copied: list[Expr] = []
        for func in functions or module.functions:
            plan = module.notes.get(func.body)
            if not isinstance(plan, FunctionPlan):
                plan = FunctionPlan(module, func)
            self.of[func.attrs.get("stages")] = FunctionMoments(plan)
            self.copied.append(copied(module, func))


class FunctionMoments:
    """The moments of a function, and the bytes of the whole step as expressions: `parts` on the
    device, and `host`. A row counts the live buffers of each kind, which is a size and one of
    `categories`. `works` has the rows of each work, `held` the row of a microbatch in each state,
    `hosted` its bytes on the host, and `around` the row of the buffers around all actions, None
    without actions."""

    def __init__(self, plan: FunctionPlan) -> None:
        planner = plan.planner
        kinds = {b: (b.size, b.category) for b in planner.buffers if on_device(b)}
        numbers = {kind: i for i, kind in enumerate(dict.fromkeys(kinds.values()))}
        slots = {b: numbers[kind] for b, kind in kinds.items()}
        self._sizes = [size for size, _ in numbers]
        self.categories = [category for _, category in numbers]
        count = _Counts(slots, len(numbers))
        self.parts, self.host = plan.parts(), plan.host()
        self.outside = count.moments(planner.run(None))
        self.around = count.of(planner.around()) if plan.staged else None
        self.works = {work: count.moments(planner.run(work)) for work in plan.works()}
        after = (s for w in self.works for s in (after_work(w), *first_runs(w)))
        states = dict.fromkeys([MicrobatchState(), *after])
        self.held = {state: count.of(planner.kept(state)) for state in states}
        self.hosted = {state: total_of(planner.kept(state), on_host) for state in states}

    def residency(self, *, hosted: bool = False) -> Mapping[MicrobatchState, bool]:
        """Whether a microbatch holds bytes in each state, on the device or on the host, for which
        states after first runs always count."""
        if hosted:
            return {s: any(map(is_first_run, s)) or size != ZERO for s, size in self.hosted.items()}
        some = np.array([size != ZERO for size in self._sizes], dtype=bool)
        return {state: bool((counts * some).any()) for state, counts in self.held.items()}

    def bytes_of(self, values: Env) -> list[int]:
        """The bytes of a buffer of each kind."""
        sizes = {size: evaluate(size, values) for size in dict.fromkeys(self._sizes)}
        return [sizes[size] for size in self._sizes]


class _Counts:
    """Counts buffers by the number of their kind."""

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
        """The live buffers of each kind at each moment of a run that may be the peak, without those
        from before the run, in order."""
        live, is_new = [0] * self._kinds, True
        rows: dict[tuple[int, ...], None] = {}
        for step, ends in run:
            self._add(live, step.made, 1)
            is_new = is_new or bool(step.made)
            if step.counts and is_new:
                rows[tuple(live)] = None
            self._add(live, ends, -1)
            is_new = bool(ends) or (is_new and not step.counts)
        return np.array([*rows], dtype=np.int64).reshape(-1, len(live))


def sums_of(rows: Ints, sizes: Sequence[int]) -> Ints:
    """The bytes of each row, its counts times the sizes; as Python integers if they are large."""
    bound = int(np.abs(rows).sum(axis=1).max()) * max(map(abs, sizes), default=0)
    kind = np.int64 if bound < 1 << 62 else object
    sums: Ints = rows.astype(kind) @ np.array(sizes, dtype=kind)
    return sums


def worst(rows: Ints, sizes: Sequence[int]) -> tuple[int, int]:
    """The largest bytes of a row, and the first row with them; 0 without rows."""
    if not rows.size:
        return 0, 0
    sums = sums_of(rows, sizes)
    first = int(sums.argmax())
    return int(sums[first]), first


def most(rows: Ints, sizes: Sequence[int]) -> int:
    """The largest bytes of a row; 0 without rows."""
    return worst(rows, sizes)[0]


def by_category(counts: Ints, categories: Sequence[str], sizes: Sequence[int]) -> Mapping[str, int]:
    """The bytes of each category, from the counts of each kind of buffer."""
    totals: Counter[str] = Counter()
    for number, category, size in zip(counts.tolist(), categories, sizes, strict=True):
        totals[category] += number * size
    return totals
