"""Gathered parameters in a step: where calls receive them, and those that forward keeps for
backward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stagec.ir.core import Operation, Value
from stagec.ir.types import Type
from stagec.memory.buffers import Buffer, Ref

#: The buffers of a sharded parameter, and the type of the gathered one.
_Key = tuple[int, Type | None]


@dataclass(slots=True, eq=False)
class ReceivedUnits:
    """The buffers that the last call received a unit in, which is copied out of them, and those of
    the call before it."""

    last: Sequence[Buffer] = ()
    before: Sequence[Buffer] = ()
    number: int = -1  # the step of the last gather

    def call(self, new: Sequence[Buffer], number: int) -> Sequence[Buffer]:
        """Receive a unit in `new` buffers in step `number`, and return the buffers of the call
        before it, which live until then. Gathers in a row, of several types, are one call, in bytes
        (`foreach_all_gather` of FSDP2)."""
        if new and number == self.number + 1:
            self.last = [*self.last, *new]
        else:
            self.last, self.before = new, self.last
        self.number = number
        return self.before


@dataclass(slots=True, eq=False)
class KeptGathers:
    """The results of gathers that forward keeps, by layer."""

    _kept: dict[_Key, list[Ref]] = field(default_factory=dict[_Key, list[Ref]])

    def keep(self, gathers: Sequence[Operation], left: int, refs: Mapping[Value, Ref]) -> None:
        """Keep the results of the gathers whose last `keep` layers include this one, which is the
        last but `left - 1`."""
        for op in gathers:
            if left <= op.integer("keep", 0):
                for operand, result in zip(op.operands, op.results, strict=True):
                    self._kept.setdefault(_key(refs, operand, result), []).append(refs[result])

    def of(self, op: Operation, before: int, refs: Mapping[Value, Ref]) -> Mapping[Value, Ref]:
        """The kept results that a gather of backward has in place of its own, `before` layers from
        the last one."""
        pairs = zip(op.operands, op.results, strict=True)
        return {r: self._kept[_key(refs, operand, r)][-1 - before] for operand, r in pairs}


def _key(refs: Mapping[Value, Ref], operand: Value, result: Value) -> _Key:
    return id(refs[operand]), result.type
