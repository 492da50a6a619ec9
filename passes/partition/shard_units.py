"""shard-units: gathers parameters outside of blocks in the units that the strategy states."""

from stagec.api import Module, Operation, Pass, Phase, Region, Value, const, read_strategy
from stagec.ir.rewrite import bind, enclosing, repeats_in
from stagec.ir_spec.strategy.flag_values import Axes
from stagec.ir_spec.strategy.shard_units import ShardUnitsRule
from stagec.sharding.gathers import gathers_of
from stagec.sharding.stages import accumulation, pipeline_rule


class ShardUnits(Pass):
    """Drop and gather parameters outside of blocks as `stg.shard_units` states.

    With `outer = ends` parameters that are gathered before the blocks are dropped after their last
    use there and gathered again in backward, after the blocks; those that are gathered after the
    blocks are dropped before backward of the blocks. For the memory plan, the gathers of the blocks
    are marked `beside_loss` with `loss = inside`, with `ends` those of forward alone, and those of
    forward `copied_out` with `copies`. Backward of a block gathers all parameters that its forward
    gathers, even if no operation reads them. In a pipeline nothing happens.

    Before:
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3]
          stg.shard_units[loss = inside]
        }
        stg.func @f(%x: bf16[B@dp, D], %W: bf16[L, D@dp, D | param]) {
          %y = stg.repeat[count = L, carry = 1] (%h: bf16[B@dp, D] = %x, %w: bf16[D@dp, D] = %W) {
            %w_g = stg.all_gather[dim = 0, over = dp](%w) : bf16[D, D | rep]
            %a = stg.einsum["bd,de->be"](%h, %w_g) : bf16[B@dp, D]
            stg.yield(%a)
          } : bf16[B@dp, D]
          stg.return(%y)
        }
    After:
        stg.strategy @s[mesh = @pod] {
          stg.shard_params[over = dp, zero = 3]
          stg.shard_units[loss = inside]
        }
        stg.func @f(%x: bf16[B@dp, D], %W: bf16[L, D@dp, D | param]) {
          %y = stg.repeat[count = L, carry = 1] (%h: bf16[B@dp, D] = %x, %w: bf16[D@dp, D] = %W) {
            %w_g = stg.all_gather[beside_loss, dim = 0, over = dp](%w) : bf16[D, D | rep]
            %a = stg.einsum["bd,de->be"](%h, %w_g) : bf16[B@dp, D]
            stg.yield(%a)
          } : bf16[B@dp, D]
          stg.return(%y)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        return strategy.zero >= 3 and bool(strategy.all(ShardUnitsRule))

    def run(self, module: Module) -> None:
        rule, steps = read_strategy(module).one(ShardUnitsRule), accumulation(module.main)
        if steps is not None and pipeline_rule(steps) is not None:
            if not rule.copies or rule.reuse:
                what = "'reuse' of 'stg.shard_units'" if rule.copies else "'stg.shard_units'"
                module.diagnostics.remark(
                    f"{what} changes nothing in stages of a pipeline", rule.loc
                )
            return
        body = module.main.body if steps is None else steps.body
        gather_whole_units(module, body)
        if rule.copies and read_strategy(module).prefetch <= 1:
            copy_out(body)
        if rule.loss == "inside":
            mark_gathers(body, head=rule.outer == "ends")
        if rule.outer == "ends":
            again = read_strategy(module).reshard != "never"
            unite_before_blocks(module, body, again=again, within=read_strategy(module).within)
            drop_behind_blocks(module, body)


def gather_whole_units(module: Module, body: Region) -> None:
    """Gather in backward of blocks the parameters that only their forward gathers, such as biases,
    or weights of which autocast keeps copies, in place. `FSDPParamGroup.pre_backward` of FSDP2
    gathers the whole unit."""
    for back in repeats_in(body, "backward"):
        known = {_gathered(op)[0] for op in gathers_of(back.body)}
        place = back.body.ops[0]
        before = (op for op in repeats_in(body, "forward") if {*op.results} & {*back.operands})
        for forward in before:
            for gather in gathers_of(forward.body):
                source, chain = _gathered(gather)
                if source not in known:
                    known.add(source)
                    _gather_again(module, place, source, chain)


def _gathered(gather: Operation) -> tuple[Value, list[Operation]]:
    """The stack or parameter that a gather in a repeat reads, and the chain of operations in the
    repeat from it to the gather, which is last."""
    value, chain = gather.operands[0], [gather]
    while (op := value.producer) is not None and op.parent is gather.parent:
        value, chain = op.operands[0], [op, *chain]
    inside = gather.parent is not None and value.region is gather.parent
    return (value.region.owner.operands[value.index] if inside else value), chain


def _gather_again(module: Module, place: Operation, source: Value, chain: list[Operation]) -> None:
    """Gather a parameter that no operation in a backward repeat reads, before an operation."""
    value, back = chain[0].operands[0], place.parent_op
    if value is not source and back is not None:
        value = bind(back, source, value)
    b = module.before(place, loc=chain[-1].loc, phase="backward")
    for op in chain:
        attrs = {n: a for n, a in op.attrs.items() if n != "phase"}
        value = b.op(op.name, [value], attrs, names=[op.result.name]).result


def copy_out(body: Region) -> None:
    """Mark the gathers of forward `copied_out`, in place: a unit is copied out of the buffer of its
    call."""
    for region in (body, *(op.body for op in repeats_in(body))):
        for gather in gathers_of(region):
            if gather.phase == "forward":
                gather.attrs["copied_out"] = True


def mark_gathers(body: Region, *, head: bool) -> None:
    """Mark the gathers of the last blocks of forward `beside_loss`, in place, and those of the
    first blocks of backward, unless the `head` is a unit, whose backward is behind the loss."""
    backward = [] if head else repeats_in(body, "backward")
    for op in (*repeats_in(body, "forward")[-1:], *backward[:1]):
        for gather in gathers_of(op.body):
            gather.attrs["beside_loss"] = True


def unite_before_blocks(module: Module, body: Region, *, again: bool, within: Axes = ()) -> None:
    """Gather the parameters that are used before the blocks in a call of their own, in place. With
    `again` drop them after their use, and gather them again after the backward of the blocks, from
    parts that ranks keep over the axes `within`."""
    forward, backward = repeats_in(body, "forward"), repeats_in(body, "backward")
    if not forward or not backward:
        return
    first, last = forward[0], backward[-1]
    for gather in gathers_of(body):
        users = [enclosing(user, body) for user, _ in gather.result.uses]
        behind = max(users, key=Operation.position, default=None)
        if behind is None or behind.position() > first.position():
            continue
        gather.attrs["unit"] = const(1)
        if not again:
            continue
        operands, attrs = list(gather.operands), {**gather.attrs}
        drop = module.after(behind)
        if within:
            attrs["over"] = within
            along = {n: attrs[n] for n in ("dim", "over")}
            hint = f"{gather.result.name}_part"
            operands = [drop.value("stg.keep_part", [gather.result], along, hint=hint)]
        drop.op("stg.reshard", gather.results, types=())
        b = module.after(last, loc=gather.loc, phase="backward")
        left = ("phase", "copied_out", *(["to"] if within else []))
        attrs = {n: a for n, a in attrs.items() if n not in left}
        b.op(gather.name, operands, attrs, names=[gather.result.name])


def drop_behind_blocks(module: Module, body: Region) -> None:
    """Drop the parameters that are gathered and used after the blocks of forward, before the
    backward of the blocks, in place."""
    forward, backward = repeats_in(body, "forward"), repeats_in(body, "backward")
    if not forward or not backward:
        return
    first, back = forward[0], backward[0]
    values: list[Value] = []
    for gather in gathers_of(body):
        users = [enclosing(user, body).position() for user, _ in gather.result.uses]
        if users and min(users) > first.position() and max(users) < back.position():
            values += gather.results
    if values:
        module.before(back, loc=values[0].loc, phase="backward").op("stg.reshard", values, types=())
