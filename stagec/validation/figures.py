"""The comparison of published figures with those of compiled models. Ours are counted on the
compiled program; formulas of papers are only used for the published side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from stagec.analysis.count import CollectiveCount, Counts, count_graph, lowered_graphs
from stagec.analysis.memory import staged_memory
from stagec.importers.library import model_sizes
from stagec.ir.expr import Expr, function, total
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.option import text_of, values_of
from stagec.jobs.request.options import JOB, JobOptions
from stagec.models import LibraryModel, library
from stagec.schedule.registry import find_schedule
from stagec.schedule.report import run_schedule
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean
from stagec.validation.formula import sizes_of, value_of
from stagec.validation.sources import JobRow, SourceRow, at, filled, validation_sources


@dataclass(frozen=True, slots=True)
class FigureRow(JobRow):
    """A row of a source in the form of its files.

    `row` is the title, with `$name` of sizes, flags and notes; `ours` is a formula; `published` is
    the figure, a range `A to B`, or a formula of sizes. A figure is correct if it is equal after
    rounding to `digits` decimals, or within the relative tolerance `within`, and if the formula
    `balance` is 0. `format` is that of the printed figure. `flags` are those of the job of the
    library's `model`; its mesh may have open axes, whose sizes are in `sizes`.
    """

    source: str
    row: str
    ours: str
    published: str
    model: str = ""
    format: str = ","
    digits: str = ""
    within: str = "0"
    balance: str = "0"


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A published figure and ours, and whether they agree."""

    source: str
    row: str
    published: str
    ours: str
    ok: bool


def published_rows() -> list[PublishedRow]:
    """All figures of all sources, compared with ours. Raises `DiagnosticError`."""
    counts = LibraryCounts()
    rows = [row for source in validation_sources(kind="figures") for row in source.rows()]
    return [_compared(row, counts) for row in rows]


def _compared(given: SourceRow, counts: LibraryCounts) -> PublishedRow:
    with at(given.place):
        return FigureJob(given.read(FigureRow), counts).compared()


class LibraryCounts:
    """Counts of library models; a model is compiled once for each strategy, with open sizes."""

    def __init__(self) -> None:
        self._counts: dict[tuple[object, ...], Counts] = {}

    def __call__(self, model: LibraryModel, flags: Mapping[str, Any]) -> Counts:
        """The counts of the first pipeline stage. Raises `DiagnosticError`."""
        key = (model.text_name, *sorted((name, text_of(flag)) for name, flag in flags.items()))
        if key not in self._counts:
            values, _ = values_of(JOB, flags)
            options = JobOptions(model.name, **{name: values[name] for name in flags})
            module = JobBuilder(options, symbolic=True).lower(verify=False)  # tests verify these
            graph = lowered_graphs(module)[0]
            counts = self._counts[key] = count_graph(module, graph)
            counts.memory = dict(staged_memory(module, graph, counts.memory, 0))
        return self._counts[key]


class FigureJob:
    """A row with its job."""

    def __init__(self, row: FigureRow, counts: LibraryCounts) -> None:
        self._row, self._counts = row, counts
        self._model = _model(row.model) if row.model else None
        self._sizes = dict(model_sizes(self._model)) if self._model else {}
        mesh: Mapping[str, int | None] = values_of(JOB, row.flags)[0]["mesh"] or {}
        self._sizes |= {axis: size for axis, size in mesh.items() if size is not None}
        self._sizes |= sizes_of(row.sizes)

    def compared(self) -> PublishedRow:
        """Our figure compared with the published one. Raises `DiagnosticError`, `ValueError`."""
        row = self._row
        ours, missing = self._value(row.ours), self._value(row.balance)
        published, bounds = row.published, _numbers(row.published)
        if not bounds:
            bounds = [self._value(published)]
            published = _shown(bounds[0], row.format)
        low, high = (_rounded(bound, row.digits) for bound in (bounds[0], bounds[-1]))
        within = Fraction(row.within)
        text = _shown(ours, row.format)
        if within:  # no negative zero
            text += f" ({round(100 * float(ours / high - 1), 2) + 0.0:+.2f}%)"
        if missing:
            text += f", with {row.balance} = {_shown(missing, row.format)}"
        within_bounds = low * (1 - within) <= _rounded(ours, row.digits) <= high * (1 + within)
        ok = within_bounds and not missing
        names = {**self._sizes, **row.flags, "model": row.model, "kind": row.kind, **row.notes}
        return PublishedRow(row.source, filled(row.row, names), published, text, ok)

    def _value(self, formula: str) -> Fraction:
        return value_of(formula, self._sizes, self._quantity)

    def _quantity(self, name: tuple[str, ...], sizes: Mapping[str, int]) -> Fraction:
        if name == ("bubble",):
            return self._bubble()
        if self._model is None:
            raise ValueError(f"'{'.'.join(name)}' needs a model, but the row has none")
        counted = quantity(self._counts(self._model, self._row.flags), name)
        try:
            return Fraction(function(counted)(sizes))
        except KeyError as missing:
            raise ValueError(f"'{'.'.join(name)}' needs a value for {missing}") from None

    def _bubble(self) -> Fraction:
        """The idle time of a schedule in units with F = 1, B = 2 and W = 1."""
        flags, _ = values_of(JOB, self._row.flags)
        stages, microbatches = flags["pp"], flags["microbatches"]
        if not (stages and microbatches):
            raise ValueError("a bubble needs the flags pp and microbatches")
        run = run_schedule(find_schedule(flags["schedule"]), stages, microbatches, flags["chunks"])
        return Fraction(run.bubble)


def quantity(counts: Counts, name: tuple[str, ...]) -> Expr:
    """The count of a name: `parameters`; an entry of the tables of matrix products or memory, as in
    `memory.stash`; or calls or bytes of collectives over an axis and of messages, of one element
    type or of all. Raises `ValueError`."""
    match name:
        case ("parameters",):
            return counts.parameters
        case (table, part) if part in (parts := _table(counts, table)):
            return parts[part]
        case ("bytes" | "calls" as what, kind, axis, *dtypes):
            chosen = [
                count
                for where, dtype, count in _communication(counts)
                if where == (kind, axis) and (not dtypes or dtype in dtypes)
            ]
            if chosen:
                return total(c.bytes if what == "bytes" else c.count for c in chosen)
        case _:
            pass
    raise ValueError(f"unknown quantity '{' '.join(name)}'")


def _table(counts: Counts, name: str) -> Mapping[str, Expr]:
    return {
        "memory": counts.memory,
        "matmul": counts.matmul,
        "matmul_executed": counts.matmul_executed,
    }.get(name, {})


def _communication(counts: Counts) -> Iterator[tuple[tuple[str, ...], str, CollectiveCount]]:
    """Each counted collective and message: its kind and axes, its element type, and the count."""
    for key, count in counts.collectives.items():
        yield (key.op, *key.over.words), key.dtype, count
    for way, count in counts.messages.items():
        yield (way.dir, way.over), way.dtype, count


def _model(name: str) -> LibraryModel:
    if name not in library():
        remedy = did_you_mean(name, library()) or "'stagec models' lists the models"
        raise error(f"no model '{name}' in the library", remedy=remedy)
    return library()[name]


def _numbers(published: str) -> list[Fraction]:
    """The figure, or both ends of a range; empty for a formula."""
    try:
        return [Fraction(part.replace(",", "")) for part in published.split(" to ")]
    except ValueError:
        return []


def _rounded(value: Fraction, digits: str) -> Fraction:
    return round(value, int(digits)) if digits else value


def _shown(value: Fraction, format_: str) -> str:
    if format_ != ",":
        return f"{float(value):{format_}}"
    return f"{int(value):,}" if value.denominator == 1 else str(value)
