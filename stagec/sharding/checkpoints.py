"""Modules of a block with checkpoints of their own (`stg.recompute[modules]`).

Modules are ranges of operations between two values, whatever a text calls them. In a block

    %n = norm(%h); %q = einsum(%n, %wq); ...; %o = einsum(%a, %wo); %r = add(%h, %o)

the range of %n is all that is computed of %n alone: up to %o, as the sum also takes %h.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stagec.ir.core import Operation, Region, Value
from stagec.ir.rewrite import carried
from stagec.ir.traits import Terminates
from stagec.ir_spec.ops.attention_base import AttentionOp
from stagec.ir_spec.ops.contraction import Einsum
from stagec.ir_spec.ops.moe import Dispatch, DispatchWeights
from stagec.ir_spec.ops.norm import NormBase


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Operations of a block, in order, that backward computes again at once.

    Their results that others use are kept, as by `tensor_parallel.checkpoint` of Megatron-Core, and
    they are computed again before their backward. With `users` these results are dropped too
    (`CheckpointWithoutOutput`), and computed again before the backward of these operations.
    """

    ops: tuple[Operation, ...]
    users: tuple[Operation, ...] = ()
    #: Values that are kept because what the operations take is a part of the same tensor.
    beside: tuple[Value, ...] = ()

    def results(self) -> list[Value]:
        """The values that other operations of the region use."""
        region, made = self.ops[0].home, (r for op in self.ops for r in op.results)
        users = ((r, u) for r in made for u, _ in r.uses if u.parent is region)
        return list(dict.fromkeys(r for r, user in users if user not in self.ops))

    def inputs(self) -> list[Value]:
        """The values of the same region that the operations take, and those beside them."""
        region = self.ops[0].home
        taken = (v for op in self.ops for v in op.operands if v.region is region)
        return list(dict.fromkeys(v for v in (*taken, *self.beside) if v.producer not in self.ops))


def checkpoints(region: Region, modules: Iterable[str]) -> list[Checkpoint]:
    """The checkpoints of a block for the modules of a list that it has. Modules inside of another
    one of the list belong to that."""
    block = _Block(region)
    found = [c for name in modules for c in _RANGES[name](block) if c.ops]
    every = [set(c.ops) for c in found]
    return [c for c in found if not any(set(c.ops) < ops for ops in every)]


class _Block:
    """The operations of a block by what they depend on."""

    def __init__(self, region: Region) -> None:
        self.region = region
        args = region.args[: carried(region.owner)]
        self.ops = [op for op in region.ops if op.region is None and not op.has(Terminates)]
        #: Values that depend on what the block is given.
        self.activations = {*args, *self._behind(args)}
        width = args[0].tensor.dims[-1].size if args and args[0].tensor.rank else None
        self.norms = [
            op
            for op in self.ops
            if isinstance(op.definition, NormBase) and op.results[0].tensor.dims[-1].size == width
        ]

    def _behind(self, values: Iterable[Value]) -> set[Value]:
        known = set(values)
        for op in self.ops:
            if not known.isdisjoint(op.operands):
                known |= set(op.results)
        return known

    def range_of(self, values: Iterable[Value], ops: Iterable[Operation]) -> list[Operation]:
        """The operations that take no activation but these values and each other's results."""
        known, inside = set(values), list[Operation]()
        for op in ops:
            taken = self.activations.intersection(op.operands)
            if taken and taken <= known:
                known |= set(op.results)
                inside.append(op)
        return inside

    def ranges(self) -> Iterator[tuple[Operation, list[Operation]]]:
        """The norms of a block's width with their ranges."""
        for norm in self.norms:
            if inside := self.range_of(norm.results[:1], self.ops):
                yield norm, inside

    def behind(self, ops: Iterable[Operation]) -> set[Operation]:
        """The operations that depend on one of these."""
        known = self._behind(r for op in ops for r in op.results)
        return {op for op in self.ops if not known.isdisjoint(op.operands)}


def _any(ops: Iterable[Operation], *kinds: type) -> bool:
    return any(isinstance(op.definition, kinds) for op in ops)


def _core_attention(block: _Block) -> Iterator[Checkpoint]:
    """Kernels. Values, which nothing rotates or normalizes, are a view of the product of queries,
    keys and values: core/transformer/attention.py, SelfAttention.get_query_key_value_tensors."""
    for op in block.ops:
        if isinstance(op.definition, AttentionOp):
            yield Checkpoint((op,), beside=tuple(_beside(block, op)))


def _beside(block: _Block, kernel: Operation) -> Iterator[Value]:
    """The products of the same norm as one that a kernel takes."""
    normed = {norm.result for norm in block.norms}
    products = [v.producer for v in kernel.operands if _of(v.producer, normed)]
    for norm in dict.fromkeys(v for op in products if op for v in op.operands if v in normed):
        users = (u for u, _ in norm.uses if u.parent is block.region)
        yield from (user.results[0] for user in users if isinstance(user.definition, Einsum))


def _of(op: Operation | None, values: set[Value]) -> bool:
    """Whether an operation is a product of one of these values."""
    return (
        op is not None and isinstance(op.definition, Einsum) and not values.isdisjoint(op.operands)
    )


def _norms(block: _Block) -> Iterator[Checkpoint]:
    yield from (Checkpoint((norm,), tuple(inside)) for norm, inside in block.ranges())


def _expert_activations(block: _Block) -> Iterator[Checkpoint]:
    """What lies between two products of experts."""
    products = [op for op in block.ops if _routed(op) and isinstance(op.definition, Einsum)]
    for first in products:
        region = block.region
        later = block.behind([first])
        ends = [op for op in products if op in later]
        if ends:
            before = region.ancestors(ends[0].operands)
            yield Checkpoint(tuple(op for op in block.ops if op in later & set(before)), (ends[0],))


def _routed(op: Operation) -> bool:
    return any(dim.routed for r in op.results for dim in r.tensor.dims)


def _latent_products(block: _Block) -> Iterator[Checkpoint]:
    """What computes heads of latent vectors: all between the products that reduce what attention
    is given and its kernel."""
    for norm, inside in block.ranges():
        kernel = next((op for op in inside if isinstance(op.definition, AttentionOp)), None)
        if kernel is None:
            continue
        reduced = {
            r
            for op in inside
            if isinstance(op.definition, Einsum) and norm.result in op.operands
            for r in op.results
            if r.tensor.rank <= norm.result.tensor.rank
        }
        before = set(block.region.ancestors(kernel.operands))
        ops = [op for op in inside if op in before and reduced.isdisjoint(op.results)]
        if reduced and _any(ops, Einsum):
            yield Checkpoint(tuple(ops), (kernel,))


def _feed_forward(block: _Block) -> Iterator[Checkpoint]:
    for _, inside in block.ranges():
        if _any(inside, Einsum) and not _any(inside, AttentionOp, Dispatch):
            yield Checkpoint(tuple(inside))


def _experts(block: _Block) -> Iterator[Checkpoint]:
    for _, inside in block.ranges():
        if _any(inside, Dispatch) and not _any(inside, AttentionOp):
            yield Checkpoint(tuple(inside))


def _shared_experts(block: _Block) -> Iterator[Checkpoint]:
    """What tokens pass beside the routed experts."""
    for norm, inside in block.ranges():
        sent = [op for op in inside if isinstance(op.definition, Dispatch | DispatchWeights)]
        if not sent or _any(inside, AttentionOp):
            continue
        before = block.region.ancestors(v for op in sent for v in op.operands)
        routed = {*before, *sent, *block.behind([*(set(before) & set(inside)), *sent])}
        shared = block.range_of(norm.results[:1], [op for op in inside if op not in routed])
        if _any(shared, Einsum):
            yield Checkpoint(tuple(shared))


#: The checkpoints of each of the modules of `stg.recompute`.
_RANGES: dict[str, Callable[[_Block], Iterator[Checkpoint]]] = {
    "moe": _experts,
    "mlp": _feed_forward,
    "shared_experts": _shared_experts,
    "core_attn": _core_attention,
    "layernorm": _norms,
    "moe_act": _expert_activations,
    "mla_up_proj": _latent_products,
}
