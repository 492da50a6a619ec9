"""Fits the constants of a machine to a user's measurements (`stagec fit`).

    h100.csv        200 products, 40 kernels of attention, 8 of memory, 6 of an all_reduce
    split           of each kind, in order of size, every second row is left out
    products        7 constants need 28 rows: all are fitted, on 100 of them
    memory          2 constants need 8 rows
    all_reduce      9 constants need 36 rows: those of the base stay
    errors          of the base and of the fit, on the rows that were fitted and on the others

Rows that are left out affect nothing but the number of rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from stagec.machines import Machine
from stagec.machines.writing import kernel_section, network_section, rounded, rounded_network
from stagec.support.diagnostics import DiagnosticError
from stagec.time.costs.kernels import peak
from stagec.time.costs.network import ROUNDS, spans
from stagec.time.fit import network as fit_network
from stagec.time.fit.kernels import (
    BOUNDS,
    LONG,
    Bounds,
    Floats,
    Mask,
    Rows,
    attention_rows,
    fit,
    fit_memory,
    memory_rows,
    product_rows,
    with_constants,
)
from stagec.time.fit.network import CollectiveRows, decided, with_level
from stagec.time.measured.tables import Table, consensus

#: Rows that each constant needs: two to fit it, two to judge it.
EACH = 4
#: Called with the number of searches done, and of all searches.
Progress: TypeAlias = Callable[[int, int], None]
_COLLECTIVES = (*ROUNDS, "all_to_all")
_KINDS = {"protocols": tuple(ROUNDS), "multicast": ("all_reduce",), "pairs": ("all_to_all",)}
_MOST_RANKS = 1 << 20
_ROOFLINE = "the base costs kernels by the roofline, which has no constants"
_MESSAGE = "a table does not say over which level its messages go"


@dataclass(frozen=True, slots=True)
class Errors:
    """The median and the 90th percentile of the relative errors of some rows: errors of the
    logarithm, as a share of the measured time."""

    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class FitPart:
    """The rows of one kind and type (of collectives: one kind and level).

    `constants` are those that were fitted on them, `rows` the numbers of rows that were fitted and
    left out. `before` and `after` are the errors of both with the constants of the base and with
    the fitted ones; None without such rows, or without a model. `note` says what was not fitted,
    and why.
    """

    kind: str
    dtype: str
    level: str
    constants: tuple[str, ...]
    rows: tuple[int, int]
    before: tuple[Errors | None, Errors | None]
    after: tuple[Errors | None, Errors | None]
    note: str


@dataclass(frozen=True, slots=True)
class Fit:
    """A machine with fitted constants, their errors, and the fitted tables of its text by title."""

    machine: Machine
    parts: tuple[FitPart, ...]
    sections: Mapping[str, str]


@dataclass
class _Group:
    """Rows that are judged together, and what was fitted on them."""

    kind: str
    dtype: str
    level: str
    count: int
    fitted: Mask
    errors: Callable[[Machine], Floats] | None
    constants: tuple[str, ...] = ()
    note: str = ""
    title: str = ""


@dataclass
class _State:
    """The machine so far, and the constants of each section of its text."""

    machine: Machine
    groups: list[_Group] = field(default_factory=list[_Group])
    values: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    rates: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    levels: list[str] = field(default_factory=list[str])

    def take(self, kind: str, constants: Mapping[str, float], dtype: str = "bf16") -> None:
        """Set constants of a kind, rounded as in the text of the machine."""
        new = rounded({n: v for n, v in constants.items() if n != "rate"})
        self.values.setdefault(kind, {}).update(new)
        if "rate" in constants:
            self.rates.setdefault(kind, {})[dtype] = new["rate"] = constants["rate"]
        self.machine = with_constants(self.machine, kind, new, dtype)


def fit_tables(
    tables: Sequence[Table], base: Machine, origin: str, progress: Progress | None = None
) -> Fit:
    """The base with the constants that measured tables determine; `origin` names the tables in the
    text of the machine.

    Constants of a kind with fewer than `EACH` rows for each constant stay as they are; of products
    and attention the rate alone is fitted then, if there are rows for that. All constants are
    fitted on the type with most rows, and the rates on the other types. A collective of n ranks
    counts as one of n consecutive ranks.
    """
    state = _State(base)
    steps = list(_steps(consensus(tables)))
    for done, step in enumerate(steps):
        if progress is not None:
            progress(done, len(steps))
        step(state)
    parts = tuple(_part(group, base, state.machine) for group in state.groups)
    return Fit(state.machine, parts, dict(_sections(state, parts, base.name, origin)))


def _steps(tables: Sequence[Table]) -> Iterator[Callable[[_State], None]]:
    """The searches in order: products before attention, which has their bandwidth."""
    by_kind: dict[str, list[Table]] = {}
    for table in tables:
        by_kind.setdefault(table.kind, []).append(table)
    for kind in ("matmul", "attention"):
        for number, some in enumerate(_by_type(by_kind.get(kind, []))):
            yield partial(_fit_rates, tables=some, first=number == 0)
    for number, some in enumerate(_by_type(by_kind.get("attention_backward", []))):
        yield partial(_fit_backward, tables=some, first=number == 0)
    if memory := by_kind.get("memory"):
        yield partial(_fit_memory, tables=memory)
    if collectives := [t for kind in _COLLECTIVES for t in by_kind.get(kind, [])]:
        yield partial(_fit_levels, tables=collectives)
    if messages := by_kind.get("message"):
        count = sum(len(t.seconds) for t in messages)
        group = _Group("message", "", "", count, np.zeros(count, bool), None, note=_MESSAGE)
        yield lambda state: state.groups.append(group)


def _by_type(tables: Sequence[Table]) -> list[list[Table]]:
    """Tables of each type, that with most rows first."""
    grouped: dict[str, list[Table]] = {}
    for table in tables:
        grouped.setdefault(table.dtype, []).append(table)
    return sorted(grouped.values(), key=lambda some: (-_count(some), some[0].dtype))


def _count(tables: Sequence[Table]) -> int:
    return sum(len(t.seconds) for t in tables)


# -- kernels ---------------------------------------------------------------------------------------


def _fit_rates(state: _State, tables: Sequence[Table], first: bool) -> None:
    """Fit products or attention of one type: for the first type all constants, else the rate."""
    kind, dtype = tables[0].kind, tables[0].dtype
    rows = product_rows(tables) if kind == "matmul" else attention_rows(tables)
    group = _kernels(state, tables, rows)
    if group.note:
        return
    bounds = dict(BOUNDS[kind])
    if kind == "attention" and not any(t.causal for t in tables):
        del bounds["uneven"]
    needed = EACH * len(bounds)
    chosen = bounds if first and group.count >= needed else BOUNDS["narrow"]
    if first and chosen is not bounds:
        group.note = f"the rate alone: {group.count} rows, all {len(bounds)} need {needed}"
    if _too_few(group, chosen):
        return
    old = getattr(state.machine.efficiency, kind)
    now = {n: old.of(dtype) if n == "rate" else getattr(old, n) for n in chosen}
    state.take(kind, fit(state.machine, rows.of(group.fitted), chosen, None, now), dtype)


def _fit_backward(state: _State, tables: Sequence[Table], first: bool) -> None:
    rows = attention_rows(tables)
    group = _kernels(state, tables, rows)
    bounds = BOUNDS["attention_backward"]
    if not first and not group.note:
        group.note = "one constant for all types, fitted on the type with most rows"
    if not group.note and not _too_few(group, bounds):
        now = {"backward": state.machine.efficiency.attention.backward}
        state.take("attention", fit(state.machine, rows.of(group.fitted), bounds, None, now))


def _fit_memory(state: _State, tables: Sequence[Table]) -> None:
    """Fit bandwidth and start in turns; the start alone where too few rows are long."""
    rows = memory_rows(tables)
    group = _kernels(state, tables, rows)
    if group.note or _too_few(group, BOUNDS["memory"]):
        return
    some, constants = rows.of(group.fitted), state.machine.efficiency.memory
    fits = {"bandwidth": constants.bandwidth, "start": constants.start}
    if (some.measured > LONG).sum() < EACH / 2:
        group.constants = ("start",)
        group.note = f"the start alone: too few rows last {LONG * 1e6:g} us and more"
        fits = fit(state.machine, some, {"start": BOUNDS["memory"]["start"]}, None, fits)
        state.take("memory", fits)
        return
    for _ in range(5):
        fits = fit_memory(state.machine, some, fits["start"])
    state.take("memory", fits)


def _kernels(state: _State, tables: Sequence[Table], rows: Rows) -> _Group:
    """Add the group of these rows, with a note if the base has no model of them."""
    kind, dtype, fitted = tables[0].kind, tables[0].dtype, _every_second(rows, tables)
    group = _Group(kind, dtype, "", len(fitted), fitted, lambda m: rows.errors(m, {}))
    group.title = "attention" if kind.startswith("attention") else kind
    state.groups.append(group)
    if state.machine.efficiency.kernels == "roofline":
        group.note = _ROOFLINE
    elif kind != "memory":
        try:
            peak(state.machine, dtype)
        except DiagnosticError:
            group.note = f"the base computes no products of {dtype}"
    if group.note:
        group.errors, group.fitted = None, np.zeros(group.count, bool)
    return group


def _every_second(rows: Rows, tables: Sequence[Table]) -> Mask:
    """Every second row in order of size, FLOPs or bytes, in each table by mask and op."""
    e = rows.extents.astype(float)
    size = e.prod(axis=1)
    if tables[0].kind.startswith("attention"):
        size = e[:, [0, 1, 3, 4]].prod(axis=1) * (e[:, 5] + e[:, 6])
    table_of = np.repeat(np.arange(len(tables)), [len(t.seconds) for t in tables])
    return _alternating(np.lexsort((*rows.extents.T[::-1], size, table_of)))


def _alternating(order: Any) -> Mask:
    fitted = np.zeros(len(order), bool)
    fitted[order[::2]] = True
    return fitted


def _too_few(group: _Group, bounds: Bounds) -> bool:
    """Whether a group has too few rows for these constants; notes that, or else the constants."""
    needed = EACH * len(bounds)
    if group.count < needed:
        group.note = f"as in the base: {group.count} rows, {', '.join(bounds)} need {needed}"
        group.fitted = np.zeros(group.count, bool)
        return True
    group.constants = tuple(bounds)
    return False


# -- collectives -----------------------------------------------------------------------------------


def _fit_levels(state: _State, tables: Sequence[Table]) -> None:
    rows_by_level: dict[str, list[CollectiveRows]] = {}
    for table in tables:
        for ranks in map(int, np.unique(table.extents[:, 0])):
            rows = table.extents[:, 0] == ranks
            why = _not_joined(state.machine, ranks)
            if why:
                count = int(rows.sum())
                none = np.zeros(count, bool)
                state.groups.append(_Group(table.kind, "", "", count, none, None, note=why))
                continue
            size = table.extents[rows, 1]
            fitted = _alternating(np.argsort(size, kind="stable"))
            over = spans(state.machine, np.arange(ranks))
            case = CollectiveRows(table.kind, over, size.astype(float), table.seconds[rows], fitted)
            rows_by_level.setdefault(over[-1].level.name, []).append(case)
    for level in state.machine.network:
        if level.name in rows_by_level:
            _fit_level(state, level.name, rows_by_level[level.name])


def _not_joined(machine: Machine, ranks: int) -> str:
    most = machine.network[-1].ranks or _MOST_RANKS
    if 1 < ranks <= min(most, _MOST_RANKS):
        return ""
    return f"{ranks} ranks: the base joins 2 to {min(most, _MOST_RANKS):,}"


def _fit_level(state: _State, level: str, cases: Sequence[CollectiveRows]) -> None:
    count = {kind: sum(len(c.size) for c in cases if c.kind == kind) for kind in _COLLECTIVES}
    determined = decided(state.machine, level, cases)
    enough = {
        group: EACH * int(names.sum()) <= sum(count[kind] for kind in _KINDS[group])
        for group, names in determined.items()
    }
    for kind in (k for k in _COLLECTIVES if count[k]):
        some = [c for c in cases if c.kind == kind]
        use = [g for g in determined if kind in _KINDS[g]]
        names = tuple(g for g in use if enough[g])
        fitted = np.concatenate([c.fitted & bool(names) for c in some])
        group = _Group(kind, "", level, count[kind], fitted, _errors_of(some), names)
        group.title = f"network.{level}"
        group.note = ", ".join(
            f"{g} as in the base: {sum(count[k] for k in _KINDS[g])} rows, they need "
            f"{EACH * int(determined[g].sum())}"
            for g in use
            if not enough[g]
        )
        state.groups.append(group)
    if not any(enough.values()):
        return
    chosen = np.logical_or.reduce([determined[g] for g, many in enough.items() if many])
    kinds = {kind for g, many in enough.items() if many for kind in _KINDS[g]}
    used = [c for c in cases if c.kind in kinds]
    first = state.machine.efficiency.network[level]
    network = rounded_network(fit_network.fit(state.machine, level, used, first, chosen))
    new = {group: getattr(network, group) for group, many in enough.items() if many}
    state.machine = with_level(state.machine, level, first.model_copy(update=new))
    state.levels.append(level)


def _errors_of(cases: Sequence[CollectiveRows]) -> Callable[[Machine], Floats]:
    def errors(machine: Machine) -> Floats:
        errors: list[Floats] = [fit_network.errors_of(machine, c) for c in cases]
        return np.concatenate(errors)

    return errors


# -- errors and records ----------------------------------------------------------------------------


def _part(group: _Group, base: Machine, machine: Machine) -> FitPart:
    before, after = (_judged(group, m) for m in (base, machine))
    rows = int(group.fitted.sum()), int((~group.fitted).sum())
    return FitPart(
        group.kind, group.dtype, group.level, group.constants, rows, before, after, group.note
    )


def _judged(group: _Group, machine: Machine) -> tuple[Errors | None, Errors | None]:
    if group.errors is None:
        return None, None
    error = np.abs(np.expm1(group.errors(machine)))
    return _errors(error[group.fitted]), _errors(error[~group.fitted])


def _errors(errors: Floats) -> Errors | None:
    if not len(errors):
        return None
    return Errors(float(np.median(errors)), float(np.quantile(errors, 0.9)))


def _sections(
    state: _State, parts: Sequence[FitPart], base: str, origin: str
) -> Iterator[tuple[str, str]]:
    """The fitted tables of the text by title, each with a record of its fit."""
    for kind, values in state.values.items():
        record = _record(kind, state, parts, base, origin)
        rates = state.rates.get(kind, {})
        yield f"efficiency.{kind}", kernel_section(kind, values, rates, record)
    for level in state.levels:
        record = _record(f"network.{level}", state, parts, base, origin)
        network = state.machine.efficiency.network[level].model_copy(update={"fitted": record})
        yield f"efficiency.network.{level}", network_section(level, network)


def _record(title: str, state: _State, parts: Sequence[FitPart], base: str, origin: str) -> str:
    errors: list[str] = []
    for group, part in zip(state.groups, parts, strict=True):
        left = part.after[1]
        if group.title == title and part.constants:
            what = " ".join(word for word in (part.kind, part.dtype) if word)
            error = f" {left.median:.1%}, p90 {left.p90:.1%}" if left else ""
            errors.append(f"{what}: median{error} of {part.rows[1]} rows left out")
    return f"{origin}, every second row by size; {'; '.join(errors)}; all else as {base}"
