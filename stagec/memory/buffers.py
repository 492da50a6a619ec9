"""Buffers of a step: the memory of one value, its lifetime, and its category."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias, TypeGuard

from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, ZERO, Expr, expand
from stagec.ir.types import DEVICE, TensorType
from stagec.ir_spec.ops.comm import Collective
from stagec.ir_spec.ops.pipeline import RecvOp
from stagec.memory.liveness import is_gathered, is_sum

LATER = frozenset({"backward", "gradient", "recompute", "optimizer"})
STASH = "stash"
GRADIENTS = "gradients"
GATHERED = "gathered weights"
_OF_PHASE: Mapping[str, str] = {
    "backward": "activation gradients",
    "recompute": "recompute",
    "gradient": "unreduced gradients",
    "optimizer": "update",
}
#: The categories of buffers that are not static, in the order in which reports show them.
CATEGORIES = (
    STASH,
    GATHERED,
    "communication",
    "activations",
    "recompute",
    *(c for c in _OF_PHASE.values() if c != "recompute"),
)


@dataclass(eq=False, slots=True)
class Buffer:
    """The memory of one value in `space`. With `copies` > 1 it stands for the buffers of iterations
    that do not run one by one. A value that is partly in host memory has one buffer in each memory.
    A value that is `added` to a sum while it is computed takes no memory.

    `last` maps each part (action) of the step that uses the buffer to the step of its last use
    there; `split` does so for parts that run by themselves, not directly after another part. A
    static buffer exists before the step and after it.
    """

    value: Value
    copies: Expr = ONE
    static: bool = False
    part: Operation | None = None
    first: int = -1
    last: dict[Operation | None, int] = field(default_factory=dict["Operation | None", int])
    split: dict[Operation | None, int] = field(default_factory=dict["Operation | None", int])
    phases: set[str] = field(default_factory=set[str])
    space: str = DEVICE
    added: bool = False
    kinds: dict[Value, str] = field(default_factory=dict[Value, str])
    _size: Expr | None = None

    @property
    def users(self) -> set[Operation | None]:
        """The parts that use the buffer."""
        return {*self.last, *self.split}

    @property
    def size(self) -> Expr:
        """Bytes on one rank."""
        if self._size is None:
            type_, copies = self.value.tensor, self.copies
            self._size = ZERO if self.added else _bytes_of(type_, self.space, copies)
        return self._size

    @property
    def category(self) -> str:
        """One of `CATEGORIES`, or `GRADIENTS`. `kinds` is shared by all buffers of a step; it maps
        a value to `GATHERED` or to the phase that made it."""
        op = self.value.producer
        if op is None:
            return "activations"
        made = self.kinds.get(self.value)
        if made is None:
            made = "gradient" if is_sum(self.value) else op.phase
            made = self.kinds[self.value] = GATHERED if is_gathered(self.value) else made
        if made == GATHERED:
            return GATHERED
        elsewhere = len(self.last) > 1 or (self.last and self.part not in self.last)
        updates = "optimizer" in self.phases  # forward makes gradients of a fused head
        if elsewhere or (made == "forward" and self.phases & LATER and not updates):
            return STASH
        if made != "optimizer" and updates:
            return GRADIENTS
        if isinstance(op.definition, (Collective, RecvOp)):
            return "communication"
        phase = "gradient" if "gradient" in self.phases else made
        return _OF_PHASE.get(phase, "activations")


@lru_cache(1 << 12)
def _bytes_of(type_: TensorType, space: str, copies: Expr) -> Expr:
    return expand(type_.bytes_in(space) * copies)


#: Where a value is stored: in a buffer, or in one buffer per slice of a stack; None if it does not
#: exist.
Ref: TypeAlias = "Buffer | tuple[Ref, ...] | None"


@dataclass(slots=True)
class RunOp:
    """One execution of an operation: `part` is the action that it belongs to, `made` are the
    buffers that it allocates.

    Without `counts` nothing runs: the step stands for iterations that are left out.
    """

    op: Operation
    part: Operation | None
    made: list[Buffer]
    counts: bool = True


@dataclass(slots=True)
class Lifetimes:
    """The steps of a function in execution order, and all buffers that are not static."""

    steps: list[RunOp] = field(default_factory=list[RunOp])
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    scheduled: int | None = None  # the step at which the actions of a schedule run
    #: Maps each buffer of gradients of a microbatch to the sum that the first microbatch allocates
    #: in its place.
    sums: dict[Buffer, Buffer] = field(default_factory=dict[Buffer, Buffer])


class Shares(tuple["Buffer", ...]):
    """The buffers of a value that is partly in one memory and partly in another."""

    __slots__ = ()


class Together(tuple["Ref", ...]):
    """Slices of several iterations that are not distinguished: first that of the iteration that
    runs, then those of the others."""

    __slots__ = ()


def buffers_of(ref: Ref) -> Sequence[Buffer]:
    """All buffers of a value that are not static."""
    if isinstance(ref, Buffer):
        return () if ref.static else (ref,)
    return () if ref is None else [b for inner in ref for b in buffers_of(inner)]


def each_buffer(ref: Ref, change: Callable[[Buffer], Buffer]) -> Ref:
    """A value in which each buffer that is not static is replaced by `change(buffer)`."""
    if isinstance(ref, Shares):
        return Shares(map(change, ref))
    if isinstance(ref, Together):
        return Together(each_buffer(r, change) for r in ref)
    if isinstance(ref, tuple):
        return tuple(each_buffer(r, change) for r in ref)
    return ref if ref is None or ref.static else change(ref)


def together(ref: Ref) -> Ref:
    """The value as one whose slices, if it has any, are not distinguished."""
    return ref if ref is None or isinstance(ref, (Buffer, Shares)) else Together(ref)


def is_stack(ref: Ref, count: int) -> TypeGuard[tuple[Ref, ...]]:
    """Whether a value has one slot for each of `count` iterations."""
    return isinstance(ref, tuple) and not isinstance(ref, (Together, Shares)) and len(ref) == count


def slice_of(ref: Ref, position: int, count: int) -> Ref:
    """The part of a bound value that an iteration uses: its slice, or the whole value where slices
    are not distinguished."""
    if not is_stack(ref, count):
        return together(ref)
    slot = ref[position]
    return slot[0] if isinstance(slot, Together) else slot
