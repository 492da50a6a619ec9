"""Where an operation of a step stores its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stagec.ir.core import Operation, Value
from stagec.ir.traits import AddsToSum, StaysUntilNext
from stagec.ir_spec.ops.comm import AllGather, Reorder
from stagec.memory.liveness import is_gathered
from stagec.memory.sums import MicrobatchSums


@dataclass(slots=True, eq=False)
class OpStorage:
    """The results of an operation by their storage: newly `made`, written to a static `home`, or in
    the buffer of an operand (`reused`); and the facts that its definition, attributes and operands
    state."""

    op: Operation
    operands: Sequence[Value]
    phase: str
    stays: bool
    copied_out: bool
    alone: bool
    reads_gathered: bool  # or is what a module of gathered parameters returns, in forward
    made: list[Value] = field(default_factory=list[Value])
    added: list[Value] = field(default_factory=list[Value])  # to a sum, as they are made
    homes: list[tuple[Value, Value]] = field(default_factory=list[tuple[Value, Value]])
    reused: list[tuple[Value, Value]] = field(default_factory=list[tuple[Value, Value]])

    @classmethod
    def of(cls, op: Operation, sums: MicrobatchSums) -> OpStorage:
        """The storage of the results of an operation that is no view."""
        phase, operands = op.phase, op.operands
        in_module = isinstance(op.definition, AllGather | Reorder)  # of what a module returns
        gathered = phase == "forward" and (in_module or any(map(is_gathered, operands)))
        about = op.has(StaysUntilNext), op.flag("copied_out"), op.flag("alone"), gathered
        storage = cls(op, operands, phase, *about)
        for value in op.results if not op.flag("held") else ():
            aim = value.uses[0][0].result if op.flag("into_sum") else value
            home, slot = sums.home(aim), op.definition.reuses(op, value.index)
            summed = home in sums.late or (home is None and op.has(AddsToSum))
            if summed and op.has(AddsToSum) and value.tensor.dtype == operands[0].tensor.dtype:
                storage.reused.append((value, operands[0]))  # the first one becomes the sum
            elif summed:
                storage.added.append(value)
            elif home is not None:
                storage.homes.append((value, home))
            elif slot is not None:
                storage.reused.append((value, operands[slot]))
            else:
                storage.made.append(value)
        return storage
