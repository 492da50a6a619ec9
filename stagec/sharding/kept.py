"""What becomes of gathered parameters (FSDP's reshard_after_forward).

What one call gathers is a unit: it is resharded at once, when all forward and backward of the
region that gathers it has run. Backward of a repeat gathers the slices of its parameters again
unless the policy keeps them. In a pipeline what is kept serves all microbatches: it is gathered
once, before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stagec.ir.builder import Builder
from stagec.ir.core import Attr, Operation, Region, Value
from stagec.ir.expr import const
from stagec.ir.module import Module, is_parameter
from stagec.ir.traits import Accumulates, Recasts, Repeats, Terminates
from stagec.ir_spec.ops.comm import AllGather


def keep_parameters(module: Module, policy: str) -> None:
    """Keep what forward gathered: of no iteration (`always` reshard), of all (`never`), or of the
    last one, with which backward begins (`last`). In place."""
    if policy == "always":
        return
    for func in module.functions:
        kept: dict[Region, list[Value]] = {}
        for forward, back, mine, again in list(_pairs(func.body)):
            if policy == "last":
                mine.attrs["keep"] = again.attrs["kept"] = const(1)
            else:
                value = _handed_over(forward, back, mine.result)
                kept.setdefault(back.body, []).append(value)
                again.result.replace_with(value)
                again.erase()
        for region, values in kept.items():
            _reshard(module, region, values)


def reshard_units(module: Module, region: Region) -> None:
    """Drop what the gathers of parameters in a region give, unit by unit. In place."""
    for op in _gathers(region):
        _reshard(module, region, [r for r in op.results if not _is_handed_on(r)])


def _reshard(module: Module, region: Region, values: Sequence[Value]) -> None:
    """Drop values when the last forward or backward of their region has run."""
    ran = [op for op in region.ops[:-1] if not _is_of_reduction(op)]
    if values and ran:
        after = Builder.after(module.registry, ran[-1], loc=values[0].loc)
        after.op("stg.reshard", values, types=())


def _is_of_reduction(op: Operation) -> bool:
    """Whether an op reduces gradients, casts them for that, or uses them."""
    late = ("gradient", "optimizer")
    users = {user.phase for result in op.results for user, _ in result.uses}
    return op.phase in late or (op.has(Recasts) and bool(users) and users <= {*late})


def _is_handed_on(value: Value) -> bool:
    return any(user.has(Terminates) for user, _ in value.uses)


def _pairs(region: Region) -> Iterator[tuple[Operation, Operation, Operation, Operation]]:
    """Gathers of one parameter in a repeat and in the repeat that runs back over it: both repeats,
    both gathers."""
    for op in region.ops:
        if op.region is not None:
            yield from _pairs(op.region)
    repeats = [op for op in region.ops if op.has(Repeats)]
    for back in (op for op in repeats if op.phase == "backward"):
        for forward in (op for op in repeats if op.phase == "forward"):
            for mine in _gathers(forward.body):
                for again in _gathers(back.body):
                    if _source(mine) is _source(again) and _alike(mine, again):
                        yield forward, back, mine, again


def _gathers(region: Region) -> list[Operation]:
    return [
        op
        for op in region.ops
        if isinstance(op.definition, AllGather) and is_parameter(op.operands[0])
    ]


def _source(gather: Operation) -> Value:
    """The stacked parameter that a gather's operand is a slice of."""
    slice_ = gather.operands[0]
    return slice_.region.owner.operands[slice_.index]


def _alike(a: Operation, b: Operation) -> bool:
    return all(a.attrs.get(n) == b.attrs.get(n) for n in ("dim", "over"))


def _handed_over(forward: Operation, back: Operation, value: Value) -> Value:
    """The argument of `back` that brings a value of `forward`, iteration by iteration."""
    forward.body.terminator.add_operand(value)
    stacked = value.tensor.stacked(forward.expr("count"))
    back.add_operand(forward.add_result(f"kept_{value.name}", stacked, value.loc))
    return back.body.add_arg(value.name, value.tensor, value.loc)


# -- pipelines -------------------------------------------------------------------------------------

#: A parameter, and how it is gathered.
_Gathered = tuple[Value, Attr, Attr]


def gather_once(module: Module) -> None:
    """Gather the parameters that the actions of stages use before the microbatches, block by block,
    and keep them to the end of the last one. In place."""
    for func in module.functions:
        accumulate = next((op for op in func.body.ops if op.has(Accumulates)), None)
        if accumulate is not None:
            before = Builder.before(module.registry, accumulate)
            known: dict[_Gathered, Value] = {}
            for region in [o.body for o in accumulate.body.walk() if o.region is not None]:
                _take_out(region, before, known)


def _take_out(region: Region, before: Builder, known: dict[_Gathered, Value]) -> None:
    """Replace the gathers of a region, of an action or a repeat, by values made outside."""
    repeat = region.owner if region.owner.has(Repeats) else None
    gathers = _gathers(region)
    keys = {op: (_whole(op), op.attrs["dim"], op.attrs["over"]) for op in gathers}
    if new := [op for op in gathers if keys[op] not in known]:
        made = _in_turn(new, repeat, before) if repeat is not None else _copied(new, before)
        known.update((keys[op], value) for op, value in zip(new, made, strict=True))
    for op in gathers:
        value = known[keys[op]]
        if repeat is not None:
            repeat.add_operand(value)
            value = region.add_arg(op.result.name, op.result.tensor, op.loc)
        op.result.replace_with(value)
        op.erase()


def _whole(gather: Operation) -> Value:
    """The parameter that is gathered, with all its slices."""
    value = gather.operands[0]
    return _source(gather) if value.region.owner.has(Repeats) else value


def _copied(gathers: Sequence[Operation], before: Builder) -> Iterator[Value]:
    for op in gathers:
        before.loc = op.loc
        made = before.op("stg.all_gather", op.operands, op.attrs, types=(), names=())
        yield made.add_result(op.result.name, op.result.type, op.result.loc)


def _in_turn(gathers: Sequence[Operation], repeat: Operation, before: Builder) -> Iterable[Value]:
    """One repeat that gathers slice by slice, in the order in which forward uses them."""
    count = repeat.expr("count")
    operands = [_source(op) for op in gathers]
    outer = before.op("stg.repeat", operands, {"count": count, "carry": 0}, types=())
    inner = Builder(before.registry, outer.make_region(), loc=outer.loc)
    for op in gathers:
        arg = inner.region.add_arg(op.operands[0].name, op.operands[0].type, op.loc)
        inner.loc = op.loc
        inner.value("stg.all_gather", [arg], op.attrs, type=op.result.type, hint=op.result.name)
    results = [op.result for op in inner.region.ops]
    inner.op("stg.yield", results, types=())
    return [outer.add_result(f"kept_{r.name}", r.tensor.stacked(count), r.loc) for r in results]
