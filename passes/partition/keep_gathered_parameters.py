"""keep-gathered-parameters: determines when parameters are gathered, and how long they are kept.

Backward of a repeat gathers the slices of its parameters again, as FSDP does with
reshard_after_forward, unless the strategy states `reshard = never` or `last`. Only this pass reads
`reshard` and `prefetch`; later passes read the attributes that it puts on the gathers.
"""

from collections.abc import Iterator

from stagec.api import (
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Strategy,
    Value,
    const,
    evaluate,
    read_strategy,
    total,
)
from stagec.ir.builder import RawAttr
from stagec.ir.rewrite import bind, enclosing, repeats_in, replace_op, stacked
from stagec.ir.traits import Repeats
from stagec.ir_spec.strategy.flag_values import Axes
from stagec.ir_spec.strategy.shard_units import ShardUnitsRule
from stagec.passes.partition.reshards import reshard_behind
from stagec.sharding.gathers import gathers_of, is_sliced, single_gathers_of, source_of
from stagec.sharding.stages import accumulation, pipeline_rule


class KeepGatheredParameters(Pass):
    """Keep the parameters that forward has gathered for backward, as `stg.shard_params` states.

    With `reshard = never` backward uses all of them, layer by layer, and drops each when its layer
    has run. With `last` it uses those of the last layer, with which it begins; with `reuse` of
    `stg.shard_units` those of the layers that it comes to soon. In a pipeline
    `never` marks the gathers `once`, for `gather-parameters-once`; with `always`, and `copies` of
    `stg.shard_units`, gathers behind the blocks are marked `once`, and gathers before the blocks or
    in their backward `stays`, since FSDP2 keeps both (`PipelineStage.backward_maybe_with_nosync`
    calls `set_reshard_after_backward(False)`). A `prefetch` other than 1 becomes the attribute
    `ahead` of the gathers in repeats. With axes `within`, forward of a repeat keeps the part of a
    gathered parameter that is split over these axes, and backward gathers that part. Otherwise
    nothing happens.

    Before:
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3, reshard = last]
        }
        stg.func @f(%x: bf16[B@dp, D], %W: bf16[L, D@dp, D | param]) {
          %y = stg.repeat[count = L, carry = 1] (%h: bf16[B@dp, D] = %x, %w: bf16[D@dp, D] = %W) {
            %w_g = stg.all_gather[dim = 0, over = dp](%w) : bf16[D, D | rep]
            %a = stg.einsum["bd,de->be"](%h, %w_g) : bf16[B@dp, D]
            stg.yield(%a)
          } : bf16[B@dp, D]
          %d_x = stg.repeat[reverse, count = L, carry = 1, phase = backward] (
              %d: bf16[B@dp, D] = %y, %w: bf16[D@dp, D] = %W) {
            %w_g = stg.all_gather[dim = 0, over = dp](%w) : bf16[D, D | rep]
            %d_h = stg.einsum["be,de->bd"](%d, %w_g) : bf16[B@dp, D]
            stg.yield(%d_h)
          } : bf16[B@dp, D]
          stg.return(%d_x)
        }
    After:
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3, reshard = last]
        }
        stg.func @f (%x: bf16[B@dp, D], %W: bf16[L, D@dp, D | param]) {
          %y = stg.repeat[count = L, carry = 1] (%h: bf16[B@dp, D] = %x, %w: bf16[D@dp, D] = %W) {
            %w_g = stg.all_gather[dim = 0, over = dp, keep = 1](%w) : bf16[D, D | rep]
            %a = stg.einsum["bd,de->be"](%h, %w_g) : bf16[B@dp, D]
            stg.yield(%a)
          } : bf16[B@dp, D]
          %d_x = stg.repeat[reverse, count = L, carry = 1, phase = backward] (
              %d: bf16[B@dp, D] = %y, %w: bf16[D@dp, D] = %W) {
            %w_g = stg.all_gather[dim = 0, over = dp, kept = 1](%w) : bf16[D, D | rep]
            %d_h = stg.einsum["be,de->bd"](%d, %w_g) : bf16[B@dp, D]
            stg.yield(%d_h)
          } : bf16[B@dp, D]
          stg.return(%d_x)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        never = strategy.gathers_first or strategy.reshard != "always"
        copies = strategy.zero >= 3 and strategy.one(ShardUnitsRule).copies
        reuse = strategy.zero >= 3 and strategy.one(ShardUnitsRule).reuse > 0
        return never or strategy.prefetch != 1 or bool(strategy.within) or copies or reuse

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        steps = accumulation(module.main)
        if strategy.prefetch != 1:
            _prefetch(module, strategy.prefetch)
        policy = "never" if strategy.gathers_first else strategy.reshard
        piped = steps is not None and pipeline_rule(steps) is not None
        units = strategy.one(ShardUnitsRule)
        if units.reuse and not piped and (why := _without_reuse(module, strategy)):
            idle = f"'reuse' of 'stg.shard_units' changes nothing: {why}"
            module.diagnostics.remark(idle, units.loc)
        if steps is not None and (strategy.gathers_first or (piped and policy == "never")):
            _gather_once(steps)
        elif steps is not None and piped and policy == "always":
            if units.copies:
                _keep_in_pipeline(steps.body)
        elif strategy.within:
            keep_parts(module, strategy.within)
        else:
            keep_parameters(module, policy, units.reuse)


def _without_reuse(module: Module, strategy: Strategy) -> str:
    """Why `reuse` keeps no parameters; empty if it may keep some."""
    if strategy.reshard != "always":
        return f"'reshard = {strategy.reshard}' of 'stg.shard_params' determines what stays"
    if strategy.within:
        return "'within' of 'stg.shard_params' keeps a part of all blocks"
    repeats = {forward for forward, *_ in _pairs(module.main.body)}
    known = all(n.symbols <= module.env.keys() for each in repeats for n in _elements(each))
    return "" if known else "sizes are open"


def _prefetch(module: Module, ahead: int) -> None:
    """Issue the gathers of repeats `ahead` iterations early."""
    for op in module.walk():
        if op.has(Repeats):
            for gather in gathers_of(op.body):
                gather.attrs["ahead"] = const(ahead)


def _gather_once(steps: Operation) -> None:
    """Mark the gathers of an accumulation to run once, before all microbatches."""
    regions = [op.body for op in steps.body.walk() if op.region is not None]
    for region in (steps.body, *regions):
        for gather in gathers_of(region):
            gather.attrs["once"] = True


def _keep_in_pipeline(body: Region) -> None:
    """Mark the gathered parameters that pipeline stages keep for longer than one use, in place."""
    first = next((op.position() for op in repeats_in(body, "forward")), 0)
    for gather in gathers_of(body):
        users = (enclosing(user, body).position() for user, _ in gather.result.uses)
        gather.attrs["once" if min(users, default=first) > first else "stays"] = True
    for back in repeats_in(body, "backward"):
        for gather in gathers_of(back.body):
            gather.attrs["stays"] = True


def keep_parameters(module: Module, policy: str, reuse: int = 0) -> None:
    """Keep the gathered parameters of no iteration (policy `always`: always reshard), of all
    (`never`), or of the last one, with which backward begins (`last`), in place. With `always` and
    `reuse`, keep those of the last iterations that backward uses before it and forward have used as
    many elements of other parameters."""
    if policy == "always" and not reuse:
        return
    for func in module.functions:
        kept: dict[tuple[Region, Axes], list[Value]] = {}
        for forward, back, mine, again in list(_pairs(func.body)):
            count = 1 if policy == "last" else _used_soon(module, forward, reuse) if reuse else None
            if policy != "never" and count is not None:
                if count:
                    mine.attrs["keep"] = again.attrs["kept"] = const(count)
                continue
            if again.parent is None:
                continue  # several repeats share the parameter
            if is_sliced(mine):
                value, user = _handed_over(forward, back, mine.result), back.body.terminator
            else:
                value, user = _before(forward, mine), back
            unit = kept.setdefault((user.parent or back.body, mine.names("over")), [])
            if value not in unit:
                unit.append(value)
            again.result.replace_with(value)
            again.erase()
        for (region, _), values in kept.items():
            reshard_behind(module, region, values)


def _used_soon(module: Module, forward: Operation, reuse: int) -> int | None:
    """The number of last layers whose parameters backward uses before `reuse` elements of others
    have been used, those of the repeats behind among them; None for all layers."""
    sizes = _elements(forward)
    if any(not n.symbols <= module.env.keys() for n in sizes):
        return 0
    size, layers, more = (evaluate(n, module.env) for n in sizes)
    soon = max(0, -(-(reuse - 2 * more) // (2 * size))) if size else layers
    return soon if soon < layers else None


def _elements(forward: Operation) -> tuple[Expr, Expr, Expr]:
    """The elements that a layer gathers, the number of layers, and the elements of the repeats
    behind."""
    repeats = repeats_in(forward.parent, "forward") if forward.parent is not None else [forward]
    behind = repeats[repeats.index(forward) + 1 :] if forward in repeats else []
    others = total(_gathered(each) * each.expr("count") for each in behind)
    return _gathered(forward), forward.expr("count"), others


def _gathered(repeat: Operation) -> Expr:
    """The elements that an iteration gathers."""
    return total(g.result.tensor.local_elements for g in gathers_of(repeat.body))


def keep_parts(module: Module, within: Axes) -> None:
    """In each iteration of forward keep the part of a gathered parameter that is split over these
    axes, and gather that part in backward, in place."""
    kept: dict[Operation, Value] = {}
    for forward, back, mine, again in list(_pairs(module.main.body)):
        if not is_sliced(mine) or not {*within} < {*mine.names("over")}:
            continue
        over: dict[str, RawAttr] = {"dim": mine.attrs["dim"], "over": within}
        if mine not in kept:
            end = forward.body.terminator
            b = module.before(end, loc=mine.loc, phase="forward")
            part = b.value("stg.keep_part", [mine.result], over, hint=f"{mine.result.name}_part")
            kept[mine] = _handed_over(forward, back, part)
            b = module.before(back.body.ops[0], loc=again.loc, phase="backward")
            b.op("stg.discard", [kept[mine]], types=())
        b = module.before(again)
        attrs = {n: a for n, a in again.attrs.items() if n != "to"} | over
        replace_op(again, b.op(again.name, [kept[mine]], attrs, names=[again.result.name]).results)


def _pairs(region: Region) -> Iterator[tuple[Operation, Operation, Operation, Operation]]:
    """The gathers of one parameter in a forward repeat and in its backward repeat: both repeats,
    both gathers."""
    for op in region.ops:
        if op.region is not None:
            yield from _pairs(op.region)
    for back in repeats_in(region, "backward"):
        for forward in repeats_in(region, "forward"):
            for mine in single_gathers_of(forward.body):
                for again in single_gathers_of(back.body):
                    if source_of(mine) is source_of(again) and _alike(mine, again):
                        yield forward, back, mine, again


def _before(forward: Operation, gather: Operation) -> Value:
    """Move a gather that all layers share before their repeat; returns its result."""
    if gather.parent is forward.body:
        forward.body.ops.remove(gather)
        forward.home.insert(forward.position(), gather)
    return gather.result


def _alike(a: Operation, b: Operation) -> bool:
    return all(a.attrs.get(n) == b.attrs.get(n) for n in ("dim", "over"))


def _handed_over(forward: Operation, back: Operation, value: Value) -> Value:
    """Stack a value of `forward` and bind it in `back`; returns the argument of `back`."""
    return bind(back, stacked(forward, value, value.prefixed("kept_")), value)
