"""Prediction intervals of a stack: the ratios of measured to predicted seconds.

`errors.csv` beside the stacks has, by stack, device family and kind of seconds, the range of ratios
that covers 8 of 10 measurements. `python -m tools.gen_errors` writes it from the rows of
`stagec validate`: from those that were not used in a fit if there are ten of them, else from all.
Steps of a stack without measurements have the wider range of rows that are predicted without their
own: without a stack, with what other software sustains on the family; without a family too, on a
device of which nothing but the data sheet is known.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from stagec.ir.serving_step import PREFILL
from stagec.jobs.request.options import IDEAL
from stagec.models import library_text, stack_release

if TYPE_CHECKING:
    from stagec.machines import Machine

#: The kinds of seconds: a training step, the time to a first token, and the time between tokens.
STEP, TTFT, TPOT = "step", "ttft", "tpot"
#: The measured objects, by kind.
_ROWS: Final = {STEP: "steps", TTFT: "servers", TPOT: "servers"}


@dataclass(frozen=True, slots=True)
class Interval:
    """The range of ratios of measured to predicted seconds that covers 8 of 10 measurements, and
    the number of measurements."""

    low: float
    high: float
    measured: int

    def of(self, seconds: float) -> dict[str, Any]:
        """The interval around predicted seconds."""
        low, high = self.low * seconds, self.high * seconds
        return {"low_seconds": low, "high_seconds": high, "measured": self.measured}


@dataclass(frozen=True, slots=True)
class StackErrors:
    """The prediction intervals of a stack on a family of devices, by kind; `others` says whose
    measurements are behind those of other software or devices."""

    stack: str
    devices: str
    intervals: Mapping[str, Interval | None]
    others: Mapping[str, str] = field(default_factory=dict[str, str])

    def rows_text(self, kind: str) -> str:
        """The measurements of an interval, in words."""
        interval = self.intervals[kind]
        count = "no" if interval is None else f"{interval.measured:,}"
        of = self.others.get(kind, f"of {self.stack} on {self.devices}")
        return f"{count} measured {_ROWS[kind]} {of}"

    def of(self, kind: str, seconds: float) -> dict[str, Any] | None:
        """The interval around predicted seconds; None without measurements."""
        interval = self.intervals[kind]
        return None if interval is None else interval.of(seconds)

    def as_json(self) -> dict[str, Any]:
        """The ratios by kind; null without measurements."""
        return {k: v and asdict(v) for k, v in self.intervals.items()}


def kind_of(serve: str | None) -> str:
    """The kind of seconds of a step of training (None), or of serving."""
    if serve is None:
        return STEP
    return TTFT if serve == PREFILL else TPOT


def stack_errors(stack: str, machine: Machine) -> StackErrors | None:
    """The intervals of a stack, given with or without a version, on a machine. Of what was not
    measured with it, such as an earlier release, they are those of other software on such devices,
    or else those of other devices. None for `ideal`, which cannot be measured."""
    name = stack_release(stack)
    if name == IDEAL:
        return None
    known, family = _measured(), machine.family
    whose = {
        (name, family): "",
        ("", family): f"of other software on {family}",
        ("", ""): "on other devices",
    }
    intervals: dict[str, Interval | None] = {}
    others: dict[str, str] = {}
    for kind in _ROWS:
        key = next((key for key in whose if (*key, kind) in known), None)
        intervals[kind] = None if key is None else known[*key, kind]
        if key is not None and whose[key]:
            others[kind] = whose[key]
    return StackErrors(name, family or machine.name, intervals, others)


@cache
def _measured() -> Mapping[tuple[str, str, str], Interval]:
    rows = csv.DictReader(library_text("stacks/errors.csv").splitlines())
    return {
        (row["stack"], row["family"], row["kind"]): Interval(
            float(row["low"]), float(row["high"]), int(row["rows"])
        )
        for row in rows
    }


def interval_row(stack: str, machine: Machine, serve: str | None, seconds: float) -> dict[str, Any]:
    """The entry `interval` of a row with seconds; empty for the ideal stack."""
    errors = stack_errors(stack, machine)
    return {} if errors is None else {"interval": errors.of(kind_of(serve), seconds)}
