"""copy-gradients: reduces the gradients of a ZeRO-3 unit in a buffer of their own."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stagec.api import Builder, Module, Operation, Pass, Phase, Region, Value, read_strategy
from stagec.ir.builder import RawAttr
from stagec.ir.rewrite import enclosing, repeats_in, stacked_outside
from stagec.ir.traits import Accumulates, FinalGradient, Recasts, Repeats, Terminates
from stagec.ir_spec.ops.comm import (
    AllReduce,
    AllSlice,
    AllToAll,
    CopyIn,
    ReduceScatter,
    operand_dim,
)
from stagec.ir_spec.ops.layout import Reshard
from stagec.ir_spec.ops.moe import SortRows
from stagec.ir_spec.ops.selection import Pad
from stagec.ir_spec.strategy.dtypes import computed_in
from stagec.ir_spec.strategy.shard_units import ShardUnitsRule
from stagec.sharding.gathers import gathers_of
from stagec.sharding.stages import accumulation


class CopyGradients(Pass):
    """Copy the gradients of a unit into the buffer of the call that reduces them, as
    `stg.shard_units[copies]` states. Casts for the reduction become part of the copy, so gradients
    wait for it in their own type.

    The buffer that replicas reduce stays until backward ends if it is not the gradient itself, but
    is cast to its type or added to the sum over microbatches (FSDPParamGroup._all_reduce_state of
    PyTorch). Cast gradients are added to that sum after all casts of their unit. Reductions and
    slices of a gradient over other axes come before its unit is dropped, and the part that a rank
    keeps is a copy. Parameters that a pipeline stage has gathered once are dropped unit by unit,
    each before its gradients are reduced. A unit within a block, such as experts with axes of their
    own, is dropped and reduced where the backward of its module ends.

    Before:
        stg.mesh @pod[dp]
        stg.assume[D % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3]
          stg.shard_units[copies]
        }
        stg.func @f(%v: bf16[D, F | sum(dp)], %w: bf16[D | sum(dp)]) {
          %v_f32 = stg.cast[f32](%v) : f32[D, F | sum(dp)]
          %w_f32 = stg.cast[f32](%w) : f32[D | sum(dp)]
          %v_s, %w_s = stg.reduce_scatter[dim = (0, 0), over = dp, phase = gradient](%v_f32, %w_f32)
              : (f32[D@dp, F], f32[D@dp])
          stg.return(%v_s, %w_s)
        }
    After:
        stg.mesh @pod[dp]
        stg.assume[D % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3]
          stg.shard_units[copies]
        }
        stg.func @f(%v: bf16[D, F | sum(dp)], %w: bf16[D | sum(dp)]) {
          %v_c, %w_c = stg.copy_in[to = f32, phase = gradient](%v, %w)
              : (f32[D, F | sum(dp)], f32[D | sum(dp)])
          %v_s, %w_s = stg.reduce_scatter[dim = (0, 0), over = dp, phase = gradient](%v_c, %w_c)
              : (f32[D@dp, F], f32[D@dp])
          stg.return(%v_s, %w_s)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        return strategy.zero >= 3 and strategy.one(ShardUnitsRule).copies

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        zero, dtypes = set(strategy.zero_axes), strategy.dtypes
        made_in = computed_in(dtypes, strategy.zero, dtypes.param)
        for func in module.functions:
            for op in list(func.body.walk()):
                if op.phase != "gradient":
                    continue
                if isinstance(op.definition, ReduceScatter) and zero & set(op.names("over")):
                    copy_operands(module, op, made_in)
                elif isinstance(op.definition, ReduceScatter | AllSlice):
                    reduce_before_casts(op, made_in)
                    drop_behind(op)
                    copy_part(module, op)
                elif isinstance(op.definition, AllReduce):
                    keep_reduced(module, op)
            drop_with_reductions(module, func)
            for op in func.body.walk():
                if op.has(Repeats) and op.phase == "backward":
                    reduce_inner_units(module, op.body)
            if func.flag("consumed"):
                update_behind_reductions(func.body)


def reduce_before_casts(reduction: Operation, made_in: str) -> None:
    """Let a reduction or a slice over axes other than those of ZeRO use the type of gradients, in
    place: the later copy for the call of the unit casts (FSDPParam._get_grad_inner_tensor of
    PyTorch)."""
    for value, result in zip(list(reduction.operands), reduction.results, strict=True):
        source = _source(value, None, made_in)
        if source.tensor.shape == value.tensor.shape and source is not value:
            reduction.set_operand(result.index, source)
            result.type = replace(result.tensor, dtype=source.tensor.dtype)
            _erase_unused(value, made_in)


def drop_behind(reduction: Operation) -> None:
    """Drop gathered parameters of the unit after the reductions and slices of its gradients over
    axes other than those of ZeRO, in place: `FSDPParamGroup.post_backward` takes the gradients
    first."""
    region, made = reduction.home, reduction.operands[0].producer
    if made is None or made.parent is not region:
        return
    between = region.ops[made.position() : reduction.position()]
    for op in [op for op in between if isinstance(op.definition, Reshard)]:
        region.ops.remove(op)
        region.insert(reduction.position() + 1, op)


def copy_part(module: Module, part: Operation) -> None:
    """Copy the part that a rank keeps of a replicated gradient, in place: DTensor clones it
    (`Shard._replicate_to_shard`), so that the whole gradient can be freed."""
    if isinstance(part.definition, AllSlice):
        b = module.after(part, phase="gradient")
        copy = b.value("stg.reorder", [part.result], hint=f"{part.result.name}_o")
        part.result.replace_with(copy)


def copy_operands(module: Module, reduction: Operation, made_in: str) -> None:
    """Copy the operands of a reduction directly before it, in its element type, in place. `made_in`
    is the element type in which gradients of gathered parameters are computed."""
    before, dtype = reduction.operands, reduction.results[0].tensor.dtype
    dims = [operand_dim(reduction, i) for i in range(len(before))]
    made = [_source(value, dim, made_in) for value, dim in zip(before, dims, strict=True)]
    attrs: dict[str, RawAttr] = {}
    if any(v.tensor.dtype != dtype for v in made):
        attrs["to"] = dtype
    if any(v.tensor.shape != old.tensor.shape for v, old in zip(made, before, strict=True)):
        sizes = [v.tensor.shape[d] for v, d in zip(before, dims, strict=True)]
        attrs |= {"dim": tuple(dims), "sizes": tuple(sizes)}
    b = module.before(reduction, phase="gradient")
    copies = b.op("stg.copy_in", made, attrs, names=[f"{v.name}_c" for v in made])
    reduction.set_operands(copies.results)
    keep_last(module, reduction, made)
    for value in before:
        _erase_unused(value, made_in)


def keep_last(module: Module, reduction: Operation, made: Sequence[Value]) -> None:
    """Keep values until the unit has been reduced (also over replicas) and cast, in place: the
    results of the reduction, because one call casts them, and for a unit outside of the blocks the
    gradient of its last parameter, to which a local name of `foreach_reduce` refers. In blocks this
    is a norm, which is small."""
    rest = [op for op in _reducing(reduction) if not op.has(FinalGradient)]
    kept = list(reduction.results) if any(op.has(Recasts) for op in rest) else []
    if reduction.parent_op is None or not reduction.parent_op.has(Repeats):
        kept += _last_of(reduction, made)
    if kept:
        end = max(rest, key=Operation.position)
        after = module.after(end, loc=reduction.loc, phase="gradient")
        if outside_repeats(reduction).owner.has(Accumulates):
            for cast in [op for op in rest if op.has(Recasts)]:
                _add_up(after, cast.result)
        after.op("stg.discard", kept, types=())


def _last_of(reduction: Operation, made: Sequence[Value]) -> list[Value]:
    """The gradient of the last parameter of a unit, if it is made beside its reduction. The
    parameter that forward uses last has the first gradient."""
    beside = [
        (v.producer.position(), v) for v in made if v.producer and v.region is reduction.parent
    ]
    return [min(beside, key=lambda each: each[0])[1]] if beside else []


def _add_up(b: Builder, cast: Value) -> None:
    """Add a cast gradient to the sum over microbatches, which is another tensor."""
    attrs, hint = {"to": cast.tensor.dtype}, f"{cast.name}_sum"
    cast.replace_with(b.value("stg.accumulate_grad", [cast], attrs, type=cast.tensor, hint=hint))


def _reducing(op: Operation) -> Iterator[Operation]:
    """A reduction, and the ops after it in its call: the reduction over replicas, and casts."""
    yield op
    for user in dict.fromkeys(user for value in op.results for user, _ in value.uses):
        if user.phase == "gradient" and user.results and user.parent is op.parent:
            yield from _reducing(user)


def _erase_unused(value: Value, made_in: str) -> None:
    """Erase casts and padding that the copy does."""
    op = value.producer
    if not value.uses and op is not None and _is_of_copy(op, made_in):
        source = op.operands[0]
        op.erase()
        _erase_unused(source, made_in)


def _source(value: Value, dim: int | None, made_in: str) -> Value:
    """The value before casts and padding along dimension `dim` that serve only the reduction."""
    while (op := value.producer) is not None and _is_of_copy(op, made_in) and len(value.uses) == 1:
        if isinstance(op.definition, Pad) and dim is not None and op.integer("dim") != dim:
            break
        value = op.operands[0]
    return value


def _is_of_copy(op: Operation, made_in: str) -> bool:
    """Whether the copy into the buffer of a call does the op: padding, or a cast from the type
    `made_in`. Where a product casts a parameter that is gathered in fp32, as under autocast,
    backward of that cast makes the gradient."""
    filled = isinstance(op.definition, Pad) and "start" not in op.attrs
    return filled or (op.has(Recasts) and op.operands[0].tensor.dtype == made_in)


def _is_cast(reduction: Operation) -> bool:
    """Whether the result of a reduction over replicas is cast."""
    marked = [user for result in reduction.results for user, _ in result.uses]
    users = [u for mark in marked for result in mark.results for u, _ in result.uses]
    return any(u.has(Recasts) and u.phase == "gradient" for u in (*marked, *users))


def keep_reduced(module: Module, reduction: Operation) -> None:
    """Keep the values that replicas reduce until backward ends, in place, in a repeat as stacks:
    the result if it is cast, the operand if the result is added to a sum."""
    cast, region = _is_cast(reduction), outside_repeats(reduction)
    if cast or region.owner.has(Accumulates):
        kept = stacked_outside(reduction.results if cast else reduction.operands)
        last = next((op for op in region.ops if op.phase == "optimizer"), region.terminator)
        module.before(last, loc=reduction.loc, phase="backward").op("stg.discard", kept, types=())


def update_behind_reductions(region: Region) -> None:
    """Move updates in backward behind the reduction of their gradients and the last other use of
    their parameters, in place: `foreach_reduce` runs the hooks of parameters."""
    for op in [op for op in region.ops[:-1] if op.phase == "optimizer"]:
        users = (u for v in op.operands if v.producer is None for u, _ in v.uses)
        read = [enclosing(u, region) for u in users if u is not region.terminator and u is not op]
        made = [v.producer for v in op.operands if v.producer is not None]
        if made:
            region.ops.remove(op)
            region.insert(1 + max(map(Operation.position, (*read, *made))), op)


def outside_repeats(op: Operation) -> Region:
    """The region of an operation, or that of the repeats around it."""
    owner = op.home.owner
    return outside_repeats(owner) if owner.has(Repeats) else op.home


def drop_with_reductions(module: Module, func: Operation) -> None:
    """Drop each unit that was gathered before the microbatches of a stage right before its
    gradients are reduced, in place (`perform_reduce_grad` of PyTorch calls
    `FSDPParamGroup.post_backward` of one unit after the other)."""
    steps = accumulation(func)
    if steps is None or "schedule" not in steps.attrs:
        return
    before, behind = func.body.ops[: steps.position()], func.body.ops[steps.position() + 1 :]
    gathering = [op for op in repeats_in(func.body) if op in before and gathers_of(op.body)]
    reducing = [op for op in repeats_in(func.body, "gradient") if op in behind]
    for kept, reduced in zip(gathering, reducing, strict=False):
        if kept.expr("count") == reduced.expr("count"):
            slices = list[Value]()
            for made, inside in zip(kept.results, kept.body.terminator.operands, strict=True):
                reduced.add_operand(made)
                slices.append(reduced.body.add_arg(made.name, inside.tensor, made.loc))
            module.before(reduced.body.ops[0], loc=reduced.loc).op("stg.reshard", slices, types=())
    for drop in [op for op in behind if isinstance(op.definition, Reshard)]:
        places = [op.position() for v in drop.operands for op in _reductions_of(v)]
        if places:
            func.body.ops.remove(drop)
            func.body.insert(min(places) - 1, drop)


def reduce_inner_units(module: Module, body: Region) -> None:
    """Drop the units of a block that other axes gather than its last one, and reduce their
    gradients, where the gradients of the inputs of their modules exist, in place
    (`FSDPParamGroup.post_backward`)."""
    gathers = [(drop, _gather_of(drop.operands[0])) for drop in body.ops if _is_drop(drop)]
    drops = {
        op.names("over"): drop for drop, op in gathers if op is not None and "over" in op.attrs
    }
    ends: dict[Operation, Operation] = {}
    for op in body.ops:
        drop = drops.get(op.names("over")) if isinstance(op.definition, ReduceScatter) else None
        if drop is not None:
            ends[op] = _end_of_unit(drop, op)
    block = max((end.position() for end in ends.values()), default=0)
    for reduction, end in ends.items():
        if end.position() < block:
            drop = drops[reduction.names("over")]
            copies = dict.fromkeys(v.producer for v in reduction.operands)
            moved = [drop, *(op for op in copies if op), *dict.fromkeys(_reducing(reduction))]
            made = {value for op in moved for value in op.results}
            moved += [op for op in body.ops if not op.results and made & {*op.operands}]
            moved = [op for op in dict.fromkeys(moved) if not op.has(Terminates)]
            body.ops[:] = [op for op in body.ops if op not in moved]
            at = end.position() + 1
            body.ops[at:at] = moved
            last = _last_of(reduction, [v for copy in copies if copy for v in copy.operands])
            if last:
                module.after(moved[-1], phase="gradient").op("stg.discard", last, types=())


def _is_drop(op: Operation) -> bool:
    return isinstance(op.definition, Reshard) and bool(op.operands)


def _gather_of(gathered: Value) -> Operation | None:
    """The gather of a parameter, in a repeat of forward if backward has kept its result."""
    if gathered.producer is not None or not gathered.region.owner.has(Repeats):
        return gathered.producer
    kept = gathered.region.owner.operands[gathered.index]
    forward = kept.producer
    if forward is None or not forward.has(Repeats):
        return None
    return forward.body.terminator.operands[kept.index].producer


def _end_of_unit(drop: Operation, reduction: Operation) -> Operation:
    """The last op of the backward of a module: the one that makes the gradient of a parameter or of
    the input, or that orders and sends the latter."""
    copied = [v.producer for v in reduction.operands]
    made = [v.producer for copy in copied if copy for v in copy.operands]
    users = [user for value in drop.operands for user, _ in value.uses if user.results]
    end = max([*users, *(op for op in made if op)], key=Operation.position)
    sent = [user for op in users for value in op.results for user, _ in value.uses]
    for op in sent:
        if isinstance(op.definition, AllToAll | SortRows) and op.phase == "backward":
            sent += [user for user, _ in op.result.uses]
            end = max(end, op, key=Operation.position)
    return end


def _reductions_of(gathered: Value) -> Iterator[Operation]:
    """The copy for the reduction of the gradient of a parameter that has been gathered."""
    source = gathered.producer.operands[gathered.index] if gathered.producer else gathered
    for update, _ in source.uses:
        for value in update.operands if update.phase == "optimizer" else ():
            yield from _copies_of(value)


def _copies_of(gradient: Value) -> Iterator[Operation]:
    made = gradient.producer
    if made is not None and isinstance(made.definition, CopyIn):
        yield made
    elif made is not None and made.phase == "gradient":
        yield from _copies_of(made.operands[gradient.index])
