"""coalesce-collectives: merges collectives that a framework issues as one call.

The gathers of the parameters that one region uses become one call: an FSDP unit, which is a block
or the root. Its parameters are resharded together. The reductions of parameter gradients in one
region become one call for each group of axes, or buckets of a given size. Sums of several norms
become one call where a strategy asks for it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from stagec.api import (
    Attr,
    Dim,
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    TensorType,
    Value,
    const,
    is_parameter,
    read_strategy,
    total,
)
from stagec.ir.param import attr_text
from stagec.ir.traits import Repeats, Terminates
from stagec.ir_spec.ops.comm import Collective
from stagec.ir_spec.ops.norm import NormBase
from stagec.ir_spec.strategy.bucket import BucketRule
from stagec.ir_spec.strategy.collectives import CollectivesRule
from stagec.ir_spec.strategy.gradients import GradientsRule
from stagec.ir_spec.strategy.shard_units import ShardUnitsRule


class CoalesceCollectives(Pass):
    """Merge the gathers of the parameters of a block, and the reductions of their gradients, into
    one call each. With `stg.bucket[copies]` the function gets flat buffers for the gradients, with
    `views` complete gradients are copied (`stg.reorder`) into buffers that stay. With
    `stg.collectives[statistics]` the sums of norms that do not wait for each other are one call.

    Before:
        stg.func @f(%x: bf16[B@dp, S, D], %v: bf16[D@dp, F | param], %w: bf16[F, D@dp | param]) {
          %v_g = stg.all_gather[dim = 0, over = dp](%v) : bf16[D, F | rep]
          %y = stg.einsum["bsd,df->bsf"](%x, %v_g) : bf16[B@dp, S, F]
          %w_g = stg.all_gather[dim = 1, over = dp](%w) : bf16[F, D | rep]
          %z = stg.einsum["bsf,fd->bsd"](%y, %w_g) : bf16[B@dp, S, D]
          stg.return(%z)
        }
    After:
        stg.func @f (%x: bf16[B@dp, S, D], %v: bf16[D@dp, F | param], %w: bf16[F, D@dp | param]) {
          %v_g, %w_g = stg.all_gather[dim = (0, 1), over = dp](%v, %w) :
              (bf16[D, F | rep], bf16[F, D | rep])
          %y = stg.einsum["bsd,df->bsf"](%x, %v_g) : bf16[B@dp, S, F]
          %z = stg.einsum["bsf,fd->bsd"](%y, %w_g) : bf16[B@dp, S, D]
          stg.return(%z)
        }
    """

    needs = Phase.PARTITIONED

    def run(self, module: Module) -> None:
        coalesce(module)


_Key = tuple[str, ...]


#: Attributes with one value per operand of a call.
_EACH = frozenset(("dim", "from"))


def coalesce(module: Module) -> None:
    """Merge the collectives of parameters and of their gradients, in place."""
    strategy = read_strategy(module)
    bucket = strategy.bucket if strategy.zero < 2 else 0  # else reduced by unit
    flat = strategy.one(GradientsRule).flat
    ends = strategy.zero >= 3 and strategy.one(ShardUnitsRule).outer == "ends"
    for func in module.functions:
        for region in _regions(func.body):
            _merge_gathers(region)
            if strategy.one(CollectivesRule).statistics:
                _merge_statistics(region)
            outside = ends and not region.owner.has(Repeats)  # a block may have loops of its own
            blocks = next(filter(_is_backward_blocks, region.ops), None) if outside else None
            if waves := _waves(region):
                _merge_reductions(region, waves, bucket, blocks, whole=strategy.zero == 1)
            _merge_updates(region)
        if bucket and strategy.one(BucketRule).views:
            _copy_into_buckets(module, func)
        elif bucket and strategy.one(BucketRule).copies and not (strategy.zero and flat):
            _add_buckets(func)


def _copy_into_buckets(module: Module, func: Operation) -> None:
    """Copy the gradients of a function that are reduced in buckets, those of blocks in the blocks,
    where they are complete, in place."""
    for op in list(func.body.walk()):
        for index in range(len(op.operands) if "bucket" in op.attrs else 0):
            user, place = op, index
            while (made := (value := user.operands[place]).producer) is not None:
                if not made.has(Repeats):
                    b = module.after(made, loc=made.loc, phase="gradient")
                    hint = f"{value.name}_view"
                    copy = b.value("stg.reorder", [value], type=value.type, hint=hint)
                    user.set_operand(place, copy)
                    func.attrs["copied"] = True
                    break
                user, place = made.body.terminator, value.index


def _add_buckets(func: Operation) -> None:
    """Give a function one buffer per element type for the copies of the gradients that it reduces
    in buckets. A gradient that is reduced only over axes that split parameters has no copy."""
    elements: dict[str, list[Expr]] = {}
    args = [a.tensor for a in func.body.args if a.tensor.role == "param"]
    split = {axis for type_ in args for axis in type_.axes}
    for op in func.body.walk():
        copied = "bucket" in op.attrs and not set(op.names("over")) <= split
        for value in op.operands if copied else ():
            elements.setdefault(value.tensor.dtype, []).append(value.tensor.local_elements)
    for dtype, sizes in elements.items():
        type_ = TensorType(dtype, (Dim(total(sizes)),), role="bucket", placed=True)
        func.body.add_arg(f"buckets_{dtype}", type_, func.loc)


def _regions(region: Region) -> Iterable[Region]:
    yield region
    for op in region.ops:
        if op.region is not None:
            yield from _regions(op.region)


def _is_movement(op: Operation) -> bool:
    """Whether the op moves data between ranks, operand by operand."""
    return isinstance(op.definition, Collective)


def _key(op: Operation) -> _Key:
    """The key of a movement; those with equal keys may be one call."""
    dtype = op.operands[0].tensor.dtype
    attrs = (f"{n}={attr_text(v)}" for n, v in sorted(op.attrs.items()) if n not in _EACH)
    return (op.name, op.phase, dtype, *attrs)


def _groups(ops: Iterable[Operation], wanted: Callable[[Operation], bool]) -> list[list[Operation]]:
    groups: dict[_Key, list[Operation]] = {}
    for op in ops:
        if _is_movement(op) and wanted(op) and not _goes_several_ways(op):
            groups.setdefault(_key(op), []).append(op)
    return list(groups.values())


def _goes_several_ways(op: Operation) -> bool:
    """Whether an op is an exchange of axes between several pairs of dimensions."""
    moved = op.attrs.get("from")
    return isinstance(moved, tuple) and len(moved) > 1 and len(op.operands) == 1


def _merge_gathers(region: Region) -> None:
    """Merge gathers of parameters at the place of the first one. Their operands are arguments, so
    they are available there.

    One call serves recomputation and backward, so it belongs to the phase of the region, and a
    parameter that both need is gathered once.
    """
    ops = [op for op in region.ops if _is_movement(op) and all(map(is_parameter, op.operands))]
    for op in ops:
        if op.phase == "recompute":
            del op.attrs["phase"]
    for group in _groups(ops, lambda op: True):
        known: dict[tuple[Value, ...], Operation] = {}
        for op in group:
            first = known.setdefault((*op.operands,), op)
            if first is not op:
                for old, new in zip(op.results, first.results, strict=True):
                    old.replace_with(new)
                op.erase()
        merged = list(known.values())
        _merge(merged, merged[0].position())


def _merge_updates(region: Region) -> None:
    """Merge gathers of updated parameters at the end of the step (ZeRO-1 and 2), at the place of
    the last one."""
    for group in _groups(region.ops, lambda op: "dim" in op.attrs and _is_final(op)):
        _merge(group, group[-1].position())


def _merge_statistics(region: Region) -> None:
    """Merge the reductions of norm statistics with earlier ones on which they do not depend. The
    ops that compute their operands move before the first one."""
    for group in _groups(region.ops, _is_statistics):
        first = group[0]
        for op in group[1:]:
            makers = _makers(op, first)
            if first in makers:
                first = op
                continue
            for maker in makers:
                region.ops.remove(maker)
                region.insert(first.position(), maker)
            first = _merge([first, op], first.position())


def _is_statistics(op: Operation) -> bool:
    """Whether all users of a reduction are norms that take it as statistics, not as rows."""
    uses = [use for value in op.results for use in value.uses]
    return bool(uses) and all(isinstance(u.definition, NormBase) and index for u, index in uses)


def _makers(op: Operation, first: Operation) -> Sequence[Operation]:
    """The ops from `first` on, in program order, on which an op depends."""
    region, makers = first.parent, set[Operation]()
    waiting = [op]
    while waiting:
        for value in waiting.pop().operands:
            maker = value.producer
            if maker is None or maker in makers or maker.parent is not region:
                continue
            if maker.position() >= first.position():
                makers.add(maker)
                waiting.append(maker)
    return sorted(makers, key=Operation.position)


def _is_final(op: Operation) -> bool:
    """Whether an op moves an updated parameter that no computation uses afterwards."""
    users = {user for value in op.results for user, _ in value.uses}
    return op.phase == "optimizer" and all(
        user.has(Terminates) or (_is_movement(user) and _is_final(user)) for user in users
    )


def _is_backward_blocks(op: Operation) -> bool:
    return op.has(Repeats) and op.phase in ("backward", "gradient")


def _merge_reductions(
    region: Region,
    waves: Mapping[Operation, int],
    bucket: int,
    blocks: Operation | None,
    *,
    whole: bool,
) -> None:
    """Move the reductions of gradients, and the ops after them, to the end of backward, wave by
    wave. With `blocks` (a repeat), reductions of gradients that are made before it move to its
    front; if `blocks` reduces the sums of all microbatches itself, this holds for reductions before
    it.

    The wave of a collective is the number of earlier collectives on its gradient. The collectives
    of one wave are merged.
    """
    end = _end_of_backward(region, waves)
    ends = dict.fromkeys(waves, end)
    for op in waves:
        made = [p for v in op.operands if (p := v.producer) is not None]
        early = blocks is not None and all(
            ends.get(p, end) is blocks or (p not in waves and p.position() < blocks.position())
            for p in made
        )
        if blocks is not None and blocks.phase == "gradient":
            early = op.position() < blocks.position()
        if blocks is not None and early:
            ends[op] = blocks
    before: dict[Operation, list[Operation]] = {}
    for op in sorted(waves, key=lambda op: (waves[op], _is_movement(op))):
        before.setdefault(ends[op], []).append(op)
    stays = [op for op in region.ops if op not in waves]
    region.ops[:] = [each for op in stays for each in (*before.get(op, ()), op)]
    for group in _groups(region.ops, lambda op: op in waves):
        by_wave: dict[tuple[int, Operation], list[Operation]] = {}
        for op in group:
            by_wave.setdefault((waves[op], ends[op]), []).append(op)
        for same in by_wave.values():
            merged = _merge(same, same[-1].position())
            known = merged.definition.params_by_name
            if bucket and "bucket" in known:
                merged.attrs["bucket"] = const(bucket)
            if whole and "whole" in known:
                merged.attrs["whole"] = True


def _end_of_backward(region: Region, waves: Mapping[Operation, int]) -> Operation:
    """The first op of the optimizer behind all that the waves take: the gradient of a whole table
    is a part of its update, wherever it is made."""
    taken = {v.producer for op in waves for v in op.operands} - waves.keys()
    start = max((place for place, op in enumerate(region.ops) if op in taken), default=-1) + 1
    behind = (op for op in region.ops[start:] if op.phase == "optimizer")
    return next(behind, region.terminator)


def _waves(region: Region) -> dict[Operation, int]:
    """The reductions of phase `gradient` and the ops of that phase that depend on them, each with
    its wave."""
    waves: dict[Operation, int] = {}
    for op in region.ops:
        if op.phase != "gradient" or op.region is not None or op.has(Terminates):
            continue
        before = [p for v in op.operands if (p := v.producer) is not None and p in waves]
        if before or _is_movement(op):
            waves[op] = max((waves[p] + _is_movement(p) for p in before), default=0)
    return waves


def _merge(ops: list[Operation], position: int) -> Operation:
    """Replace several ops by one, at a place where all operands exist and no result is used yet."""
    if len(ops) == 1:
        return ops[0]
    first, region = ops[0], ops[0].parent
    if region is None:
        return first
    merged = Operation(
        first.definition, [v for op in ops for v in op.operands], first.attrs, loc=first.loc
    )
    for name in _EACH & first.attrs.keys():
        merged.attrs[name] = tuple(d for op in ops for d in _dims(op.attrs[name], len(op.operands)))
    region.insert(position, merged)
    for op in ops:
        for old in op.results:
            old.replace_with(merged.add_result(old.name, old.type, old.loc))
        op.erase()
    return merged


def _dims(value: Attr, count: int) -> tuple[Attr, ...]:
    dims = value if isinstance(value, tuple) else (value,)
    return dims if len(dims) == count else dims * count
