"""The work of an operation on one rank, and of operations that run as one kernel."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, const, same, total
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.kernel import KernelShape
from stagec.ir.traits import CopiesMemory, EndsLifetime, Free, Recalls, View
from stagec.ir_spec.ops.comm import Collective
from stagec.ir_spec.ops.pipeline import RecvOp, SendOp


class ComputeWork(NamedTuple):
    """The work of a computation on one rank: its FLOPs, those of matrix products, the bytes that it
    touches, and its kernel if that is a matrix product or attention."""

    flops: Expr
    matmul: Expr
    bytes: Expr
    kernel: KernelShape | None


def work_of(op: Operation) -> ComputeWork:
    """The work of a computation with local sizes."""
    definition, rule = op.definition, op.definition.rule(op)
    sizes = factor_sizes(op, rule, local=True) if rule is not None else {}
    flops = _counted("flops", definition.flops(op, sizes))
    matmul = _counted("matmul_flops", definition.matmul_flops(op, sizes))
    kernel = definition.kernel(op, sizes)
    return ComputeWork(flops, matmul, definition.bytes_touched(op), kernel)


def _counted(method: str, given: object) -> Expr:
    """The count that an op returns. Raises `TypeError` for another type, naming the method."""
    if isinstance(given, Expr):
        return given
    if isinstance(given, int):
        return const(given)
    raise TypeError(f"{method} gives {given!r}, expected an Expr such as product(n.values()) * 2")


def part_of_kernel(
    along: Mapping[Operation, str], part: Callable[[Expr], Expr]
) -> KernelShape | None:
    """The kernel of operations that compute a part of one factor each, with local sizes; None
    without one."""
    kernels: list[KernelShape] = []
    for op, factor in along.items():
        rule = op.definition.rule(op)
        sizes = {} if rule is None else factor_sizes(op, rule, local=True)
        if sizes and (kernel := op.definition.kernel(op, {**sizes, factor: part(sizes[factor])})):
            kernels.append(kernel)
    return _together(kernels) if kernels else None


def fused_work(ops: Sequence[Operation]) -> ComputeWork:
    """The work of operations that run as one kernel, in order.

    The kernel executes the FLOPs of all operations. It reads each operand once, and does not write
    or read values that only its own operations use. If one of them is a matrix product, its kernel
    is the result; the kernel of several products has the columns of all.
    """
    works = [work_of(op) for op in ops]
    seen = {result for op in ops for result in op.results}
    saved = [r.tensor.local_bytes for op in ops for r in op.results if not is_left(r, ops)]
    for value in (v for op in ops for v in op.operands):
        if viewed(value) in seen or data_of(value) in seen:
            saved.append(value.tensor.local_bytes)
        seen.add(data_of(value))
    flops, matmul = total(w.flops for w in works), total(w.matmul for w in works)
    kernels = [w.kernel for w in works if w.kernel is not None]
    size = total(w.bytes for w in works) - total(saved)
    return ComputeWork(flops, matmul, size, _together(kernels) if kernels else None)


def _together(kernels: Sequence[KernelShape]) -> KernelShape:
    """Products that differ in their columns as one product."""
    first = kernels[0]
    if len(kernels) == 1:
        return first
    batch, m, _, k = first.extents
    return replace(first, extents=(batch, m, total(kernel.extents[2] for kernel in kernels), k))


def is_left(value: Value, ops: Sequence[Operation]) -> bool:
    """Whether a result of one of these operations is needed after them: another operation uses it,
    or none does."""
    users = [user for user in _users(value) if not user.has(EndsLifetime)]
    return not users or any(user not in ops for user in users)


def _users(value: Value) -> Iterator[Operation]:
    """The operations that use a value, or a view of it."""
    for user, _ in value.uses:
        if user.has(View):
            yield from (u for result in user.results for u in _users(result))
        else:
            yield user


def viewed(value: Value) -> Value:
    """The value of which this one is a view, or itself."""
    op = value.producer
    if op is None or not op.has(View) or op.has(Recalls):
        return value
    return viewed(op.operands[min(value.index, len(op.operands) - 1)])


def data_of(value: Value) -> Value:
    """The value of which this one is a view of full size, or itself."""
    op = value.producer
    if op is None or not op.has(View) or len(op.operands) != 1 or len(op.results) != 1:
        return value
    (inner,) = op.operands
    same_size = same(inner.tensor.local_bytes, value.tensor.local_bytes)
    return data_of(inner) if same_size else value


def is_computation(op: Operation) -> bool:
    """Whether an operation becomes a computation node: it is not a view, a copy to or from the
    host, an op with a region, a collective or a message."""
    definition = op.definition
    if op.region is not None or op.has(Free) or op.has(CopiesMemory):
        return False
    return bool(op.results) and not isinstance(definition, (Collective, SendOp, RecvOp))


def is_product(op: Operation) -> bool:
    """Whether an operation becomes a kernel of a matrix product."""
    kernel = work_of(op).kernel if is_computation(op) else None
    return kernel is not None and kernel.kind == "matmul"
