"""The comparison of measured bytes, from the memory tracker of a framework, with planned ones: by
category, after forward, at the peak and after the update."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagec.analysis.footprint import footprint
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.option import values_of
from stagec.jobs.request.options import JOB, JobOptions
from stagec.jobs.session import Session
from stagec.pipeline.instrument import PLAN
from stagec.validation.formula import sizes_of
from stagec.validation.sources import JobRow, SourceRow, at, filled, validation_sources

#: The names of the moments of a step in rows and answers.
MOMENTS = ("after_forward", "peak", "after_update")
#: The share of all bytes below which a category has no error, such as counters.
SMALLEST = 0.001


@dataclass(frozen=True, slots=True)
class MemoryRow(JobRow):
    """A row of a source in the form of its files: the job, and the bytes of each category at each
    moment. `row` is the title, with `$name` of sizes, flags and notes; `stage` is the recorded
    pipeline stage, by default the one with the highest peak."""

    row: str
    model: str
    stage: str = ""
    after_forward: Mapping[str, Any] = field(default_factory=dict[str, Any])
    peak: Mapping[str, Any] = field(default_factory=dict[str, Any])
    after_update: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class BytesError:
    """The measured and planned bytes of a category, or `total`, at a moment."""

    source: str
    row: str
    moment: str
    category: str
    measured: int
    ours: int
    error: float | None  # None for categories that are too small

    def as_json(self) -> dict[str, Any]:
        """A row of the answer."""
        return {
            "source": self.source,
            "row": self.row,
            "moment": self.moment,
            "category": self.category,
            "measured_bytes": self.measured,
            "bytes": self.ours,
            "error": self.error,
        }


def memory_errors(source: str | None, session: Session) -> list[BytesError]:
    """All measured bytes of a source or of all, compared with ours. Raises `DiagnosticError`."""
    sources = validation_sources(source, kind="memory")
    rows = [(each.name, row) for each in sources for row in each.rows()]
    errors: list[BytesError] = []
    with session.progress("planning", "steps") as counted:
        for done, (name, row) in enumerate(rows, 1):
            errors += _compared(name, row)
            counted(done, len(rows))
    return errors


def _compared(source: str, given: SourceRow) -> Iterator[BytesError]:
    with at(given.place):
        row = given.read(MemoryRow)
        values, _ = values_of(JOB, row.flags)
        sizes = sizes_of(row.sizes)
        flags = {name: values[name] for name in row.flags}
        options = JobOptions(row.model, sizes=sizes, **flags, explicit=frozenset(flags))
        module = JobBuilder(options).lower(until=PLAN)
        classes = footprint(module, row.model)["classes"]
        fullest = max(classes, key=lambda each: each["peak"])
        worst = classes[int(row.stage)] if row.stage else fullest
        title = filled(row.row, {**sizes, **row.flags, **row.notes})
        for moment in MOMENTS:
            measured = {name: int(text) for name, text in getattr(row, moment).items()}
            yield from _of_moment(source, title, moment, measured, worst["moments"][moment])


def _of_moment(
    source: str, title: str, moment: str, measured: Mapping[str, int], ours: Mapping[str, Any]
) -> Iterator[BytesError]:
    every = sum(measured.values())
    known = set(ours["by"])
    for name in measured:
        if name not in known:
            raise ValueError(f"unknown category '{moment}.{name}': choose among {', '.join(known)}")
    pairs = [(name, size, ours["by"][name]) for name, size in measured.items()]
    for category, size, own in [*pairs, ("total", every, ours["total"])]:
        small = max(size, own) < SMALLEST * every or not size
        error = None if small else own / size - 1
        yield BytesError(source, title, moment, category, size, own, error)


def worst_errors(errors: Sequence[BytesError]) -> dict[tuple[str, str], float]:
    """The largest error of each moment and category."""
    worst: dict[tuple[str, str], float] = {}
    for each in errors:
        key = each.moment, each.category
        if each.error is not None and abs(each.error) >= abs(worst.get(key, 0.0)):
            worst[key] = each.error
    return worst
