"""Products of several kernels: steps that overlap with a collective, the work of each step and the
collective; and the decoding of a weight of few bits before its product."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from stagec.api import Expr, Facts, Operation, Value, call, is_parameter, total
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ZERO
from stagec.ir.own_gathers import OwnGather
from stagec.ir.traits import EndsLifetime, Repeats
from stagec.ir_spec.ops.comm import AllGather, AllReduce, ReduceScatter, operand_dim
from stagec.passes.lower.kernels import fused_operations, kernel_attributes
from stagec.sharding.work import is_product, part_of_kernel, viewed

#: Phases whose collectives move activations and their gradients.
ACTIVATIONS = ("forward", "backward", "recompute")


def shared_out(
    attrs: Mapping[str, RawAttr], along: Mapping[Operation, str], steps: Expr, facts: Facts
) -> tuple[dict[str, RawAttr], dict[str, RawAttr]]:
    """The attributes of one of `steps` steps of a kernel along a factor of each of its products,
    and those of all others together. A share that does not divide is rounded up in the first."""

    def part(whole: Expr) -> Expr:
        return whole / steps if facts.divides(steps, whole) else call("ceildiv", [whole, steps])

    one, rest = dict(attrs), dict(attrs)
    for cost in ("flops", "matmul", "bytes"):
        whole = attrs.get(cost)
        if isinstance(whole, Expr):
            one[cost], rest[cost] = part(whole), whole - part(whole)
    one |= kernel_attributes(part_of_kernel(along, part))
    rest |= kernel_attributes(part_of_kernel(along, lambda n: n - part(n)))
    return one, rest


def decoding(
    op: Operation, attrs: Mapping[str, RawAttr]
) -> tuple[dict[str, RawAttr], dict[str, RawAttr]]:
    """The attributes of the kernel that decodes the weight of a product, and those of the product
    without it; `attrs` are those of both together."""
    made = op.results[1].tensor.local_bytes
    moved = total(v.tensor.local_bytes for v in op.operands[1:]) + made
    own: dict[str, RawAttr] = {"kind": "decode", "flops": ZERO, "bytes": moved, "out": made}
    both, out = attrs["bytes"], op.results[0].tensor.local_bytes
    assert isinstance(both, Expr)
    return own, {**attrs, "bytes": both - moved, "out": out}


def reduces(op: Operation) -> bool:
    """Whether an op adds up partial values over ranks."""
    return isinstance(op.definition, AllReduce | ReduceScatter)


def sum_of(op: Operation) -> Operation | None:
    """The op that adds up the result of a product over ranks, if it is the only user."""
    users = [user for result in op.results for user, _ in result.uses]
    users = [user for user in users if not user.has(EndsLifetime)]
    if len(users) != 1 or not reduces(users[0]) or len(users[0].operands) != 1:
        return None
    return users[0] if is_product(op) else None


class Gathered(NamedTuple):
    """A gathered operand of the products of a kernel, its all_gather, and the factor of each
    product along which it is gathered."""

    value: Value
    gather: Operation
    along: Mapping[Operation, str]


def gathered_for(ops: Sequence[Operation], kinds: Collection[str]) -> Gathered | None:
    """The operand of the products of a kernel that is gathered in one of the phases `kinds`."""
    products = [op for op in ops if is_product(op)]
    for value in products[0].operands if products else ():
        gather = value.producer
        if gather is None or not isinstance(gather.definition, AllGather):
            continue
        alone = len(gather.operands) == 1 and gather.parent is products[0].parent
        if alone and gather.phase in kinds and not is_parameter(gather.operands[0]):
            along = {op: _along(op, value, operand_dim(gather, 0)) for op in products}
            factors = {op: factor for op, factor in along.items() if factor}
            return Gathered(value, gather, factors) if len(factors) == len(products) else None
    return None


def _along(op: Operation, value: Value, dim: int) -> str:
    """The factor of an op along a dimension of its operand; empty if `value` is no operand."""
    rule = op.definition.rule(op)
    if rule is None or value not in op.operands:
        return ""
    (factor, *_) = rule.operands[op.operands.index(value)][dim]
    return factor


def kernels_beside(ops: Sequence[Operation], value: Value) -> Iterator[list[Operation]]:
    """The other kernels in the region of a kernel that start with a product of `value` and take no
    operand that is made after that kernel."""
    region, place = ops[0].parent, ops[0].position()
    fused = {} if region is None else fused_operations(region)
    users = {user for user, _ in value.uses if user.parent is region} - {*ops}
    for user in sorted(users, key=Operation.position):
        kernel = fused.get(user, [user])
        makers = {viewed(v).producer for op in kernel for v in op.operands} - {*kernel}
        inside = [m for m in makers if m is not None and m.parent is region]
        if user is kernel[0] and is_product(user) and all(m.position() < place for m in inside):
            yield kernel


def common_axes(op: Operation, gathers: Sequence[OwnGather]) -> tuple[str, ...]:
    """The axes over which an op gathers operands itself. Raises `DiagnosticError` if they
    differ."""
    axes = gathers[0].over
    if any(g.over != axes for g in gathers):
        over = (f"%{op.operands[g.operand].name} over {', '.join(g.over)}" for g in gathers)
        raise op.error(
            f"'{op.name}' gathers {' and '.join(over)} itself, expected the same axes",
            remedy="gather one of them before, with stg.sharding_constraint",
        )
    return axes


def dealt(op: Operation, *, each: bool) -> dict[str, RawAttr]:
    """The attributes of an all_to_all of routed tokens: `copies`, the experts per token (1 if
    `each` expert is sent a copy), and `groups`, the most groups of experts per token. Empty if the
    tokens are not routed."""
    dims = (d for v in (*op.operands, *op.results) for d in v.tensor.dims)
    routed = next((d.routed for d in dims if d.routed is not None), None)
    if routed is None:
        return {}
    if each:
        return {"copies": 1}
    root = op
    while root.parent_op is not None and root.parent_op.parent is not None:
        root = root.parent_op
    routes = root.parent.walk() if root.parent is not None else ()
    limits = (each.expr("top_groups") for each in routes if "top_groups" in each.attrs)
    groups = next(limits, None)
    copies: dict[str, RawAttr] = {"copies": routed.k}
    return copies if groups is None else {**copies, "groups": groups}


def one_axis(op: Operation) -> str:
    """The axis of the mesh along which an op sends. Raises `DiagnosticError` for several."""
    axis, *more = op.names("over")
    if more:
        raise op.error(
            f"'{op.name}' goes round the axes {', '.join((axis, *more))}, expected one axis",
            remedy="split the sequence over one axis of the mesh, or lay it out with --mesh",
        )
    return axis


def is_repeated(op: Operation) -> bool:
    """Whether the op is directly in the region of a repeat."""
    owner = op.parent_op
    return owner is not None and owner.has(Repeats)
