"""The phases of a module: a row per phase that says which ops and types are legal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """The properties of a phase. `typed`: every value has a type; `arguments`: the arguments of
    functions have a placement; `placed`: every value has one; `explicit`: every operand has the
    placement that its op needs; `lowered`: the program is one et.graph."""

    order: int
    typed: bool = False
    arguments: bool = False
    placed: bool = False
    explicit: bool = False
    lowered: bool = False


class Phase(Enum):
    """How far a module is compiled."""

    PARSED = PhaseRow(0)
    SHAPED = PhaseRow(1, typed=True)
    PLACED = PhaseRow(2, typed=True, arguments=True)
    DIFFERENTIATED = PhaseRow(3, typed=True)
    SHARDED = PhaseRow(4, typed=True, placed=True)
    PARTITIONED = PhaseRow(5, typed=True, placed=True, explicit=True)
    PLANNED = PhaseRow(6, typed=True, placed=True, explicit=True)
    LOWERED = PhaseRow(7, lowered=True)

    @property
    def label(self) -> str:
        """Its name in the text."""
        return self.name.lower()

    @property
    def row(self) -> PhaseRow:
        """Its row of the table."""
        return self.value

    def __le__(self, other: Phase) -> bool:
        return self.row.order <= other.row.order


def phase_named(label: str) -> Phase | None:
    """The phase with a label, or None."""
    return next((p for p in Phase if p.label == label), None)
