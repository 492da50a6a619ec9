"""Products that work in steps beside a collective: what each step does, and which collective it
is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from stagec.api import Expr, Facts, Operation, call, error, is_parameter
from stagec.ir.builder import RawAttr
from stagec.ir.own_gathers import OwnGather
from stagec.ir.traits import EndsLifetime
from stagec.ir_spec.ops.comm import AllGather, AllReduce, ReduceScatter
from stagec.passes.lower.kernels import kernel_attributes
from stagec.sharding.work import is_computation, part_of_kernel, work_of


def shared_out(
    op: Operation, attrs: Mapping[str, RawAttr], factor: str, steps: Expr, facts: Facts
) -> tuple[dict[str, RawAttr], dict[str, RawAttr]]:
    """The attributes of one of so many steps along a factor, and those of all others together. What
    does not divide is rounded up in the first."""

    def part(whole: Expr) -> Expr:
        return whole / steps if facts.divides(steps, whole) else call("ceildiv", [whole, steps])

    one, rest = dict(attrs), dict(attrs)
    for cost in ("flops", "matmul", "bytes"):
        whole = attrs.get(cost)
        if isinstance(whole, Expr):
            one[cost], rest[cost] = part(whole), whole - part(whole)
    one |= kernel_attributes(part_of_kernel(op, factor, part))
    rest |= kernel_attributes(part_of_kernel(op, factor, lambda n: n - part(n)))
    return one, rest


def reduces(op: Operation) -> bool:
    """Whether an op adds up parts that ranks have."""
    return isinstance(op.definition, AllReduce | ReduceScatter)


def sum_of(op: Operation) -> Operation | None:
    """What adds up the result of a product over ranks, if nothing else uses it."""
    users = [user for result in op.results for user, _ in result.uses]
    users = [user for user in users if not user.has(EndsLifetime)]
    if len(users) != 1 or not reduces(users[0]) or len(users[0].operands) != 1:
        return None
    return users[0] if _is_product(op) else None


def gathered_for(op: Operation, kinds: Collection[str]) -> tuple[int, Operation] | None:
    """Which operand of a product, and by which op, is gathered over ranks in one of these phases,
    if no product before it takes what is gathered."""
    for slot, value in enumerate(op.operands):
        gather = value.producer
        if gather is None or not isinstance(gather.definition, AllGather) or not _is_product(op):
            continue
        alone = len(gather.operands) == 1 and gather.parent is op.parent
        if alone and gather.phase in kinds and not is_parameter(gather.operands[0]):
            users = [user for user, _ in value.uses if user.parent is op.parent]
            if op is min(filter(_is_product, users), key=Operation.position):
                return slot, gather
    return None


def _is_product(op: Operation) -> bool:
    if not is_computation(op):
        return False
    kernel = work_of(op).kernel
    return kernel is not None and kernel.kind == "matmul"


def common_axes(op: Operation, gathers: Sequence[OwnGather]) -> tuple[str, ...]:
    """The axes over which an op gathers itself. Raises `DiagnosticError` for several."""
    axes = gathers[0].over
    if any(g.over != axes for g in gathers):
        over = (f"%{op.operands[g.operand].name} over {', '.join(g.over)}" for g in gathers)
        raise error(
            f"'{op.name}' gathers {' and '.join(over)} itself, expected the same axes",
            op.loc,
            remedy="gather one of them before, with stg.sharding_constraint",
        )
    return axes


def dealt(op: Operation) -> dict[str, RawAttr]:
    """Of how many experts, of at most how many groups of them, the tokens are that an op moves;
    nothing if no router deals them."""
    dims = (d for v in (*op.operands, *op.results) for d in v.tensor.dims)
    routed = next((d.routed for d in dims if d.routed is not None), None)
    if routed is None:
        return {}
    root = op
    while root.parent_op is not None and root.parent_op.parent is not None:
        root = root.parent_op
    routes = root.parent.walk() if root.parent is not None else ()
    limits = (each.expr("top_groups") for each in routes if "top_groups" in each.attrs)
    groups = next(limits, None)
    copies: dict[str, RawAttr] = {"copies": routed.k}
    return copies if groups is None else {**copies, "groups": groups}
