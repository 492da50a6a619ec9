"""How far seconds of a stack may be off: what was measured beside what was predicted.

`errors.csv` beside the stacks has, by stack, family of devices and kind of seconds, between which
parts of the predicted seconds 8 of 10 measured ones are. `python -m tools.gen_errors` writes it
from the rows of `stagec validate`: those on which nothing was fitted if there are ten of them, all
judged ones else.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from stagec.ir.serving_step import PREFILL
from stagec.jobs.request.options import IDEAL
from stagec.models import library_text, stack_release

if TYPE_CHECKING:
    from stagec.machines import Machine

#: The kinds of seconds: a training step, the time to a first token, and that between tokens.
STEP, TTFT, TPOT = "step", "ttft", "tpot"
#: What was measured, by kind.
_ROWS: Final = {STEP: "steps", TTFT: "servers", TPOT: "servers"}


@dataclass(frozen=True, slots=True)
class Interval:
    """Between which parts of the predicted seconds 8 of 10 measured ones are, of so many."""

    low: float
    high: float
    measured: int

    def of(self, seconds: float) -> dict[str, Any]:
        """The same in seconds."""
        low, high = self.low * seconds, self.high * seconds
        return {"low_seconds": low, "high_seconds": high, "measured": self.measured}


@dataclass(frozen=True, slots=True)
class StackErrors:
    """What is known of the seconds of a stack on a machine, by kind."""

    stack: str
    devices: str
    intervals: Mapping[str, Interval | None]

    def said(self, kind: str) -> str:
        """How many measured rows an interval is made of."""
        interval = self.intervals[kind]
        count = "no" if interval is None else f"{interval.measured:,}"
        return f"{count} measured {_ROWS[kind]} of {self.stack} on {self.devices}"

    def of(self, kind: str, seconds: float) -> dict[str, Any] | None:
        """Between which seconds measured ones are; None where nothing was measured."""
        interval = self.intervals[kind]
        return None if interval is None else interval.of(seconds)

    def as_json(self) -> dict[str, Any]:
        """By kind, parts of the predicted seconds; null where nothing was measured."""
        return {k: v and asdict(v) for k, v in self.intervals.items()}


def kind_of(serve: str | None) -> str:
    """The kind of seconds of a step of training, or of this kind of serving."""
    if serve is None:
        return STEP
    return TTFT if serve == PREFILL else TPOT


def stack_errors(stack: str, machine: Machine) -> StackErrors | None:
    """What is known of a stack, by its name with or without a version, on a machine: of an earlier
    release only what was measured of that. None of `ideal`, which nobody runs."""
    name = stack_release(stack)
    if name == IDEAL:
        return None
    known = _measured()
    intervals = {kind: known.get((name, machine.family, kind)) for kind in _ROWS}
    return StackErrors(name, machine.family or machine.name, intervals)


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
    """The entry `interval` of a row with seconds: none without a stack."""
    errors = stack_errors(stack, machine)
    return {} if errors is None else {"interval": errors.of(kind_of(serve), seconds)}
