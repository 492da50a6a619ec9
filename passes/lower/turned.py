"""Copies of operands that a collective sent in 8 or 4 bits, for products that sum up their rows."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from stagec.api import Builder, Operation, Region, Value
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ZERO
from stagec.ir.kernel import TURNS
from stagec.ir.traits import Recasts
from stagec.ir.types import EIGHT_BITS, FOUR_BITS
from stagec.ir_spec.ops.comm import Collective
from stagec.ir_spec.ops.contraction import Einsum
from stagec.sharding.work import viewed, work_of

_Deps: TypeAlias = Callable[[Sequence[Value]], list[Value]]


class TurnedOperands:
    """The kernels that copy operands, one for each value, as nodes.

    Tensor cores take operands of few bits along the contracted dimension. A cast writes a copy for
    each of the products, but what a collective sends in 8 bits is copied by a kernel behind it
    (NVIDIA/TransformerEngine, pytorch/module/linear.py: `inputmat_total.update_usage(
    columnwise_usage=True)`; pytorch/ao, float8_ops.py: `b_data.t().contiguous().t()`). Those of 4
    bits are copied on each device, as their second copy arrives in parts (NVIDIA/TransformerEngine,
    pytorch/distributed.py: `_post_process_nvfp4_gather`).
    """

    def __init__(self) -> None:
        self._nodes: dict[Value, Value] = {}

    def before(self, ops: Sequence[Operation], b: Builder, deps: _Deps) -> list[Value]:
        """The nodes for which the kernel of these operations waits in addition to its operands.
        `deps` gives the nodes of values."""
        values = dict.fromkeys(v for op in ops for v in _turned(op))
        for value in values:
            if value not in self._nodes:
                name = f"{value.name}_t"
                self._nodes[value] = b.value("et.comp", deps([value]), _copying(value), hint=name)
        return [self._nodes[value] for value in values]


def _copying(value: Value) -> dict[str, RawAttr]:
    size = value.tensor.local_bytes
    attrs: dict[str, RawAttr] = {"kind": "transpose", "flops": ZERO, "bytes": size * 2, "out": size}
    return attrs if value.tensor.dtype in FOUR_BITS else {**attrs, "form": TURNS}


def _turned(op: Operation) -> Iterator[Value]:
    """The operands of a product that are copied before it."""
    few = [v for v in op.operands if v.tensor.dtype in EIGHT_BITS | FOUR_BITS]
    kernel = work_of(op).kernel if few and isinstance(op.definition, Einsum) else None
    if kernel is not None and kernel.transposed:
        yield from (viewed(v) for v in few if _is_sent(v))


def _is_sent(value: Value) -> bool:
    """Whether a collective made a value, also if forward keeps it for backward."""
    owner = value.owner
    if isinstance(owner, Region):
        outer = owner.owner
        return value.index < len(outer.operands) and _is_sent(outer.operands[value.index])
    if owner.region is not None:
        return _is_sent(owner.region.terminator.operands[value.index])
    same = (v for v in owner.operands if v.tensor.dtype == value.tensor.dtype)
    moves = not owner.has(Recasts)  # other ops copy elements of few bits
    return isinstance(owner.definition, Collective) or (moves and any(map(_is_sent, same)))
