"""fuse-kernels: adjacent computations on the same elements become one kernel, as in a device
compiler.
"""

from collections.abc import Iterator, Sequence
from itertools import count

from stagec.api import Module, Operation, Pass, Phase, Region, Value, const, product, read_strategy
from stagec.ir.expr import same
from stagec.ir.kernel import ALWAYS
from stagec.ir.memo import MemoByType
from stagec.ir.own_gathers import own_gathers
from stagec.ir.rewrite import carried
from stagec.ir.traits import (
    AddsToSum,
    AppendsRows,
    CopiesMemory,
    Free,
    Fusible,
    Recasts,
    Repeats,
    TurnsRows,
)
from stagec.ir.types import DTYPE_BYTES
from stagec.ir_spec.ops.comm import AllReduce
from stagec.ir_spec.ops.moe import Combine, Dispatch
from stagec.ir_spec.ops.served_adapters import AdapterProduct, LoraExpand
from stagec.ir_spec.strategy.collectives import CollectivesRule
from stagec.ir_spec.strategy.fusion import FusionRule
from stagec.ir_spec.strategy.gradients import GradientsRule
from stagec.ir_spec.strategy.kernels import CUTLASS, KernelsRule
from stagec.sharding.work import data_of, is_computation, is_product, viewed, work_of


class FuseKernels(Pass):
    """Number the computations that run as one kernel, as `stg.fusion` says.

    Computations become one kernel if they follow each other in one phase, with no collective,
    message or copy between them, and each uses a result or an operand of an earlier one. All
    operands of the kernel have arrived when its first computation could start, so fusion delays
    nothing. It may contain reductions over rows, such as norms, if all are over the same rows. With
    `pointwise` it contains no reduction. With `epilogue` it may start with a matrix product, and
    then contains no reduction. With `gradients` a matrix product adds its result to the sum over
    microbatches. With `products` adjacent products of the same rows by different weights are one
    kernel, as are those that add results of adapters, and a bias is added in the kernel of its
    product. With `caches` ops that make rows of caches are one kernel with the ops that append them
    and the rotations of queries beside them. With `own_casts` a cast to at most this number of bits
    is a kernel of its own. Without the statement nothing happens.

    A kernel whose work another kernel does is marked `continues`. With `sums` this is the sum at
    the end of a layer if the next layer starts with its norm (fused_add_rms_norm). With `experts`
    these are the ordering of tokens for experts in mxfp4 and nvfp4, their activation and the cast
    of its result, unless their kernel is that of CUTLASS (`stg.kernels[experts = cutlass]`). With
    `stg.collectives[norms]` these are the sum and the norm after an all_reduce, which its kernel
    does, unless the norm is cast to 32 bits there.

    FLOPs do not change. The memory plan knows the computations only: a value that is used inside of
    one kernel only still has a buffer in the plan.

    Before:
        stg.strategy @s {
          stg.fusion[elementwise]
        }
        stg.func @f(%h: bf16[B, D | rep], %o: bf16[B, D | rep], %w: bf16[D | rep]) {
          %r = stg.add(%h, %o) : bf16[B, D | rep]
          %n = stg.rmsnorm(%r, %w) : bf16[B, D | rep]
          stg.return(%r, %n)
        }
    After:
        stg.strategy @s {
          stg.fusion[elementwise]
        }
        stg.func @f (%h: bf16[B, D | rep], %o: bf16[B, D | rep], %w: bf16[D | rep]) {
          %r = stg.add[fused = 1](%h, %o) : bf16[B, D | rep]
          %n = stg.rmsnorm[fused = 1](%r, %w) : bf16[B, D | rep]
          stg.return(%r, %n)
        }
    """

    needs = Phase.PARTITIONED
    until = Phase.PLANNED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        return bool(strategy.all(FusionRule)) or strategy.one(CollectivesRule).norms

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        rule, norms = strategy.one(FusionRule), strategy.one(CollectivesRule).norms
        ordered = rule.experts != "none" and strategy.one(KernelsRule).experts != CUTLASS
        kernels = [kernel for func in module.functions for kernel in fuse_kernels(func, rule)]
        for func in module.functions:
            mark_continued(func, rule, reduced=norms, ordered=ordered)
        kept = strategy.one(GradientsRule).stand_ins == "kept"  # then products take no memory
        added = rule.gradients and not kept and not any(map(_adds_to_sum, kernels))
        joined = rule.products and not any(map(_is_one_product, kernels))
        rows = rule.caches and not any(map(_appends, kernels))
        others = (k for k in kernels if not (_adds_to_sum(k) or _is_one_product(k) or _appends(k)))
        kinds = rule.kind != "none" and not any(others)
        for what, why, missing in (
            (f"stg.fusion[{rule.kind}]", "no two computations can run as one kernel", kinds),
            ("stg.fusion[gradients]", "no product adds to a sum over microbatches", added),
            ("stg.fusion[products]", "no products that follow each other share an operand", joined),
            ("stg.fusion[caches]", "no rows are made and appended to caches", rows),
        ):
            if missing:
                module.diagnostics.remark(f"'{what}' changes nothing: {why}", rule.loc)


def fuse_kernels(func: Operation, rule: FusionRule) -> list[list[Operation]]:
    """Number the kernels of several computations in a function, from 1. Returns these kernels."""
    fused = list[list[Operation]]()
    numbers, products = count(1), MemoByType(_is_product)
    for region in [func.body, *(op.region for op in func.body.walk() if op.region is not None)]:
        if any(op.definition.active(op) is not None for op in region.ops):
            continue  # some of its iterations leave some of its computations out
        for kernel in list(_Fuser(region, rule, products).kernels()):
            number = next(numbers)
            fused.append(kernel)
            for op in kernel:
                op.attrs["fused"] = const(number)
    return fused


def mark_continued(func: Operation, rule: FusionRule, *, reduced: bool, ordered: bool) -> None:
    """Mark the kernels on elements and rows whose work other kernels do (`continues`): with `sums`
    the sum at the end of a layer, if the next one starts with its norm; with `ordered` the ordering
    of tokens for experts in 4 bits and their activations; with `reduced` the sum and the norm after
    an all_reduce."""
    for region in [func.body, *(op.region for op in func.body.walk() if op.region is not None)]:
        for kernel in _kernels_of(region):
            where = ""
            if ordered and (_hands_out(kernel) or _activates(kernel)):
                where = rule.experts
            elif (rule.sums and _ends_layer(kernel)) or (reduced and _follows_all_reduce(kernel)):
                where = ALWAYS
            for op in kernel if where else ():
                op.attrs["continues"] = where


def _kernels_of(region: Region) -> list[list[Operation]]:
    """The kernels of a region, each as its computations."""
    kernels: dict[object, list[Operation]] = {}
    for op in region.ops:
        if is_computation(op):
            kernels.setdefault(op.integer("fused", 0) or op, []).append(op)
    return list(kernels.values())


def _ends_layer(kernel: Sequence[Operation]) -> bool:
    """Whether a kernel is only the sum that a layer passes to the norm of the next one."""
    op = kernel[0]
    return len(kernel) == 1 and any(map(_by_rows, _first_users(op)))


def _activates(kernel: Sequence[Operation]) -> bool:
    """Whether a kernel is elementwise on results of experts in 4 bits before their last product:
    the activation, or the cast of its result."""
    if any(map(_by_rows, kernel)) or not all(op.has(Fusible) for op in kernel):
        return False
    makers = [viewed(v).producer for v in kernel[0].operands]
    while makers and makers[0] is not None and not _is_product(makers[0]):
        if not makers[0].has(Fusible):
            return False
        makers = [viewed(v).producer for v in makers[0].operands]
    product = makers[0] if makers else None
    users = (user for v in kernel[-1].results for user, _ in v.uses)
    routed = product is not None and any(d.routed or d.load for d in product.result.tensor.dims)
    four = routed and product is not None and _is_in_4_bits(product)
    return four and not any(isinstance(user.definition, Combine) for user in users)


def _hands_out(kernel: Sequence[Operation]) -> bool:
    """Whether a kernel orders tokens for experts in 4 bits on this rank."""
    if not isinstance(kernel[0].definition, Dispatch):
        return False
    users = [user for user, _ in kernel[0].result.uses]
    while users and users[0].has(Fusible):
        users = [user for v in users[0].results for user, _ in v.uses]
    return any(_is_product(u) and _is_in_4_bits(u) for u in users)


def _is_in_4_bits(product: Operation) -> bool:
    """Whether the weights of a product are floats of 4 bits: Marlin, which multiplies int4, does no
    more than that (vLLM, fused_marlin_moe.py)."""
    return product.operands[1].tensor.dtype == "f4e2m1"


def _first_users(op: Operation) -> Iterator[Operation]:
    """The ops of the next iteration that use the sum which an op yields to it."""
    region = op.parent
    if region is None or not op.has(Fusible) or len(op.operands) != 2:
        return
    ends = region.terminator.operands[: carried(region.owner)]
    for arg, value in zip(region.args, ends, strict=False):
        if viewed(value).producer is op:
            yield from (user for user, _ in arg.uses)


def _follows_all_reduce(kernel: Sequence[Operation]) -> bool:
    """Whether a kernel normalizes a sum over ranks, or another sum with it, in its own type."""
    if not any(map(_by_rows, kernel)) or not all(op.has(Fusible) for op in kernel):
        return False
    if any(op.has(Recasts) and op.text("to") == "f32" for op in kernel):
        return False  # no such kernel writes the norm in 32 bits beside that in 16
    return any(_is_reduced(v) for op in kernel for v in op.operands)


def _is_reduced(value: Value) -> bool:
    """Whether a value comes from an all_reduce, or from a previous layer that ends with one."""
    first = viewed(value)
    if first.producer is not None:
        return _is_all_reduced(first)
    region = first.region
    if not region.owner.has(Repeats) or first.index >= carried(region.owner):
        return False
    last = viewed(region.terminator.operands[first.index]).producer
    return last is not None and last.has(Fusible) and any(map(_is_all_reduced, last.operands))


def _is_all_reduced(value: Value) -> bool:
    """Whether an all_reduce makes a value."""
    op = viewed(value).producer
    return op is not None and isinstance(op.definition, AllReduce)


def _adds_to_sum(kernel: Sequence[Operation]) -> bool:
    """Whether a kernel is just a product that adds to the sum over microbatches."""
    return len(kernel) == 2 and kernel[1].has(AddsToSum)


def _is_one_product(kernel: Sequence[Operation]) -> bool:
    """Whether a kernel is a product of several columns, or with a bias."""
    return len(kernel) > 1 and _is_product(kernel[0]) and not _adds_to_sum(kernel)


def _appends(kernel: Sequence[Operation]) -> bool:
    """Whether a kernel appends rows to a cache."""
    return any(op.has(AppendsRows) for op in kernel)


class _Fuser:
    """Groups the computations of a region into kernels, in program order."""

    def __init__(self, region: Region, rule: FusionRule, products: MemoByType[bool]) -> None:
        self._is_product = products
        self._region, self._kind, self._gradients = region, rule.kind, rule.gradients
        self._rows = rule.kind != "pointwise"
        self._products = rule.products
        self._cached = _row_makers(region, rule) if rule.caches else frozenset[Operation]()
        self._own_casts = rule.own_casts
        self._places = {op: i for i, op in enumerate(region.ops)}
        self._kernel: list[Operation] = []
        #: Transfers for which computations so far wait; those of phase recompute are separate
        #: because some iterations skip that phase.
        self._arrived: set[Operation] = set()
        self._replayed: set[Operation] = set()
        self._awaited: set[Operation] = set()  # those of the kernel's first computation

    def kernels(self) -> Iterator[list[Operation]]:
        """The kernels of several computations."""
        for op in self._region.ops[:-1]:
            if op.has(Free) and op.region is None:
                continue
            if self._kernel and self._joins(op):
                self._kernel.append(op)
                continue
            if len(self._kernel) > 1:
                yield self._kernel
            self._kernel = [op] if self._starts(op) else []
            self._awaited = set(_transfers(op.operands))
            if is_computation(op):
                arrived = self._replayed if op.phase == "recompute" else self._arrived
                arrived |= self._awaited
        if len(self._kernel) > 1:
            yield self._kernel

    def _starts(self, op: Operation) -> bool:
        if op in self._cached or (self._products and self._is_product(op)):
            return True
        if self._is_own_cast(op):
            return False
        if op.has(Fusible):
            return self._kind != "none" and (self._rows or not _by_rows(op))
        return (self._kind == "epilogue" or self._gradients) and self._is_product(op)

    def _joins(self, op: Operation) -> bool:
        """Whether an op can run in the current kernel and shares a value with it."""
        first = self._kernel[0]
        if op in self._cached or first in self._cached:
            both = op in self._cached and first in self._cached
            return both and op.phase == first.phase and self._is_ready(op)
        if self._is_product(first) and self._is_product(op):
            one = self._products and op.phase == first.phase and _is_one_launch(first, op)
            return one and self._is_ready(op)
        if self._products and self._is_product(first) and self._is_bias(op):
            return op.phase == first.phase and self._is_ready(op)
        fusible = op.definition.trait(Fusible)
        if fusible is None or op.phase != first.phase or self._is_own_cast(op):
            return False
        if not first.has(Fusible) and not self._joins_product(op):
            return False
        if fusible.rows and not (self._rows and first.has(Fusible) and self._has_its_rows(op)):
            return False
        made = self._made(op)
        linked = bool(made) or (first.has(Fusible) and self._reads_the_same(op))
        return linked and all(self._is_at_hand(v, op) for v in made) and self._is_ready(op)

    def _is_own_cast(self, op: Operation) -> bool:
        """Whether an op is a cast to at most `own_casts` bits, a kernel of its own."""
        if not self._own_casts or (len(op.operands), len(op.results)) != (1, 1):
            return False
        before, after = (_bits(v.tensor.dtype) for v in (op.operands[0], op.results[0]))
        return after <= self._own_casts < before

    def _is_bias(self, op: Operation) -> bool:
        """Whether an op adds a bias to the result of a product of the kernel."""
        product = _biased(op)
        return product is not None and product in self._kernel

    def _made(self, op: Operation) -> list[Value]:
        """The operands that the kernel makes."""
        return [v for v in op.operands if viewed(v).producer in self._kernel]

    def _is_ready(self, op: Operation) -> bool:
        """Whether all operands that the kernel does not make are complete when it starts."""
        made = self._made(op)
        given = [v for v in op.operands if v not in made]
        there = all(map(self._is_there, given))
        return there and all(map(self._has_arrived, _transfers(given)))

    def _joins_product(self, op: Operation) -> bool:
        """Whether an elementwise op runs in the kernel of the product before it."""
        alone = sum(map(self._is_product, self._kernel)) == 1
        return alone and (self._kind == "epilogue" or op.has(AddsToSum))

    def _has_its_rows(self, op: Operation) -> bool:
        """Whether an op reduces the same rows as the reductions of the kernel."""
        others = (o for o in self._kernel if _by_rows(o))
        return all(_same_rows(op.results[0], other.results[0]) for other in others)

    def _reads_the_same(self, op: Operation) -> bool:
        """Whether an op reads an operand of an op of the kernel with as many elements."""
        mine, made = {data_of(v) for v in op.operands}, op.results[0]
        others = [o for o in self._kernel if not mine.isdisjoint(map(data_of, o.operands))]
        return any(_same_elements(made, other.results[0]) for other in others)

    def _is_at_hand(self, value: Value, op: Operation) -> bool:
        """Whether a value of the kernel is available where an op uses it: next to a reduction over
        rows each element has to correspond to one of the result."""
        maker = viewed(value).producer
        by_rows = _by_rows(op) or (maker is not None and _by_rows(maker))
        return not by_rows or _same_elements(value, op.results[0])

    def _is_there(self, value: Value) -> bool:
        """Whether a value is made before the kernel."""
        op = viewed(value).producer
        return self._places.get(op, -1) < self._places[self._kernel[0]] if op else True

    def _has_arrived(self, transfer: Operation) -> bool:
        """Whether a transfer has ended when the kernel's first computation starts."""
        again = self._kernel[0].phase == "recompute" and transfer in self._replayed
        return again or transfer in self._arrived or transfer in self._awaited


def _bits(dtype: str) -> int:
    """The bits of an element, without its share of scales."""
    return int(8 * DTYPE_BYTES[dtype])


def _is_product(op: Operation) -> bool:
    """Whether the op is one matrix product: it does not gather an operand step by step."""
    rule = op.definition.rule(op) if is_product(op) else None
    return rule is not None and not own_gathers(op, rule)


def _is_product_of(value: Value) -> bool:
    """Whether a product makes a value."""
    op = viewed(value).producer
    return op is not None and _is_product(op)


def _biased(op: Operation) -> Operation | None:
    """The product whose result an op combines with a broadcast operand of lower rank, such as a
    bias; None for other ops."""
    if len(op.operands) != 2 or not op.has(Fusible) or _by_rows(op):
        return None
    for value, other in (op.operands, op.operands[::-1]):
        wide = _is_product_of(value) and _same_elements(value, op.results[0])
        if wide and other.tensor.rank < op.results[0].tensor.rank:
            return viewed(value).producer
    return None


def _is_one_launch(first: Operation, op: Operation) -> bool:
    """Whether two products run in one launch: they have the same rows, reduction and type and read
    the same data. Expanding products of adapters need not read the same data."""
    adapters = [isinstance(each.definition, AdapterProduct) for each in (first, op)]
    if any(adapters) and first.definition is not op.definition:
        return False
    expand = isinstance(op.definition, LoraExpand)
    if not expand and data_of(first.operands[0]) is not data_of(op.operands[0]):
        return False
    one, other = work_of(first).kernel, work_of(op).kernel
    if one is None or other is None or one.dtype != other.dtype:
        return False
    (batch, m, _, k), (batch_2, m_2, _, k_2) = one.extents, other.extents
    return same(batch, batch_2) and same(m, m_2) and same(k, k_2)


def _row_makers(region: Region, rule: FusionRule) -> frozenset[Operation]:
    """The ops of a region that append rows to caches, the elementwise ops before them on these
    rows, and rotations of the same kind. A bias that is added in its product is left out."""
    made = {op for op in region.ops if op.has(AppendsRows)}
    waiting = list(made)
    while waiting:
        before = (viewed(v).producer for v in waiting.pop().operands)
        new = {op for op in before if op and op.has(Fusible) and not _by_rows(op)} - made
        inside = {op for op in new if op.parent is region and not (rule.products and _biased(op))}
        made |= inside
        waiting += inside
    kinds = {op.name for op in made if op.has(TurnsRows)}
    return frozenset(made | {op for op in region.ops if op.name in kinds})


def _by_rows(op: Operation) -> bool:
    fusible = op.definition.trait(Fusible)
    return fusible is not None and fusible.rows


def _same_elements(left: Value, right: Value) -> bool:
    return same(left.tensor.local_elements, right.tensor.local_elements)


def _same_rows(left: Value, right: Value) -> bool:
    rows = [product(value.tensor.local_shape[-1:]) for value in (left, right)]
    return _same_elements(left, right) and same(*rows)


def _transfers(values: Sequence[Value]) -> Iterator[Operation]:
    """The collectives, messages and copies that make these values, or the values to which they are
    bound outside of their region."""
    seen, waiting = set[Value](), list(values)
    while waiting:
        value = viewed(waiting.pop())
        if value in seen:
            continue
        seen.add(value)
        op = value.producer
        if op is None:
            waiting += _bound(value)
        elif op.region is not None:
            waiting.append(op.region.terminator.operands[value.index])
        elif op.has(CopiesMemory) or not (op.has(Free) or is_computation(op)):
            yield op


def _bound(arg: Value) -> list[Value]:
    """The values that an argument of an inner region stands for: the operand, and the value that
    the previous iteration yields."""
    region = arg.region
    owner = region.owner
    if arg.index >= len(owner.operands):
        return []
    again = [region.terminator.operands[arg.index]] if arg.index < carried(owner) else []
    return [owner.operands[arg.index], *again]
