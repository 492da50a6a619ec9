"""gather-parameters-once: gathers the parameters of a stage once, before the microbatches."""

from collections.abc import Iterable, Iterator, Sequence

from stagec.api import Attr, Builder, Module, Operation, Pass, Phase, Region, Value, read_strategy
from stagec.ir.expr import ZERO
from stagec.ir.layers import kind_of
from stagec.ir.rewrite import enclosing, repeats_in, stacked_outside
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.pipeline import ActionOp
from stagec.sharding.gathers import gathers_of, is_sliced, single_gathers_of, source_of
from stagec.sharding.stages import accumulation, stage_functions


class GatherParametersOnce(Pass):
    """Gather parameters before the microbatches where the gathers of actions have the flag `once`.

    They are gathered block by block, and kept to the end of the last microbatch. With `reshard =
    never` in a pipeline, `keep-gathered-parameters` sets the flag. What has
    the flag `stays` is dropped where its action ends.

    Before:
        stg.symbols[B, D, L]
        stg.mesh @pod[pp = 1, dp]
        stg.assume[B % (4*dp) == 0, D % dp == 0]
        stg.func @f[over = pp, stages = 0](%x: bf16[B@dp, D], %W: bf16[L, D@dp, D | param]) {
          %z = stg.accumulate[count = 4, split = B, schedule = "1f1b"] (
              %x_mb: bf16[(B/4)@dp, D] = %x) {
            %y = stg.action[forward, chunk = 0] {
              %y = stg.repeat[count = L, carry = 1] (
                  %h: bf16[(B/4)@dp, D] = %x_mb, %w: bf16[D@dp, D] = %W) {
                %w_g = stg.all_gather[dim = 0, over = dp, once](%w) : bf16[D, D | rep]
                %a = stg.einsum["bd,de->be"](%h, %w_g) : bf16[(B/4)@dp, D]
                stg.yield(%a)
              } : bf16[(B/4)@dp, D]
              stg.yield(%y)
            } : bf16[(B/4)@dp, D]
            stg.yield(%y)
          } : bf16[B@dp, D]
          stg.return(%z)
        }
    After:
        stg.symbols[B, D, L]
        stg.mesh @pod[pp = 1, dp]
        stg.assume[B % (4*dp) == 0, D % dp == 0]
        stg.func @f[over = pp, stages = 0] (%x: bf16[B@dp, D], %W: bf16[L, D@dp, D | param]) {
          %kept_w_g = stg.repeat[count = L, carry = 0] (%w: bf16[D@dp, D] = %W) {
            %w_g = stg.all_gather[dim = 0, over = dp](%w) : bf16[D, D | rep]
            stg.yield(%w_g)
          } : bf16[L, D, D | rep]
          %z = stg.accumulate[count = 4, split = B, schedule = "1f1b"] (
              %x_mb: bf16[(B/4)@dp, D] = %x) {
            %y = stg.action[forward, chunk = 0] {
              %y = stg.repeat[count = L, carry = 1] (
                  %h: bf16[(B/4)@dp, D] = %x_mb, %w: bf16[D@dp, D] = %W,
                  %w_g: bf16[D, D | rep] = %kept_w_g) {
                %a = stg.einsum["bd,de->be"](%h, %w_g) : bf16[(B/4)@dp, D]
                stg.yield(%a)
              } : bf16[(B/4)@dp, D]
              stg.yield(%y)
            } : bf16[(B/4)@dp, D]
            stg.yield(%y)
          } : bf16[B@dp, D]
          stg.return(%z)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        return bool(stage_functions(module)) or read_strategy(module).gathers_first

    def run(self, module: Module) -> None:
        gather_once(module)


#: A parameter, and the dimension and axes of its gather.
_Gathered = tuple[Value, Attr, Attr]


def gather_once(module: Module) -> None:
    """Move the gathers with the flag `once` before the microbatches, block by block, in place.
    Their results are kept to the end of the last microbatch."""
    for func in module.functions:
        accumulate = accumulation(func)
        if accumulate is not None:
            before = module.before(accumulate)
            known: dict[_Gathered, Value] = {}
            inside = [o.body for o in accumulate.body.walk() if o.region is not None]
            for region in [accumulate.body, *inside]:
                _take_out(region, before, known)
            actions = [op for op in accumulate.body.ops if isinstance(op.definition, ActionOp)]
            for action in actions:
                _gather_again(module, action, actions)
            for action in actions:
                _keep_to_end(module, action.body)


def _gather_again(module: Module, action: Operation, actions: Sequence[Operation]) -> None:
    """Drop what stays, and forward of a chunk gathers before its blocks, behind its last use there,
    and gather it in backward of the chunk behind that of the blocks, in place."""
    later = [a for a in actions if a.text("kind") == "backward" and _chunk(a) == _chunk(action)]
    for gather in gathers_of(action.body) if action.text("kind") == "forward" else ():
        if later and _is_marked(gather):
            users = [enclosing(user, action.body) for user, _ in gather.result.uses]
            module.after(max(users, key=Operation.position)).op("stg.reshard", gather.results)
            end = later[0].body.terminator
            b = module.before(end, loc=gather.loc, phase="backward")
            attrs = {n: a for n, a in gather.attrs.items() if n != "phase"} | {"stays": True}
            b.op(gather.name, gather.operands, attrs, names=[gather.result.name])


def _is_marked(gather: Operation) -> bool:
    """Whether a gather has said that it stays, which it no longer does."""
    return "stays" in gather.attrs and bool(gather.attrs.pop("stays"))


def _chunk(action: Operation) -> int:
    return action.integer("chunk")


def _keep_to_end(module: Module, action: Region) -> None:
    """Keep what gathers of an action say until it ends, in place."""
    regions = [*(op.body for op in repeats_in(action)), action]
    gathers = [g for region in regions for g in gathers_of(region)]
    kept = [r for g in gathers if _is_marked(g) for r in stacked_outside(g.results)]
    if kept:
        end = module.before(action.terminator, loc=kept[0].loc, phase="backward")
        end.op("stg.reshard", kept, types=())


def _take_out(region: Region, before: Builder, known: dict[_Gathered, Value]) -> None:
    """Replace the gathers of a region by values that are gathered before the microbatches."""
    repeat = region.owner if region.owner.has(Repeats) else None
    gathers = [op for op in single_gathers_of(region) if op.flag("once")]
    keys = {op: (source_of(op), op.attrs["dim"], op.attrs["over"]) for op in gathers}
    new = [op for op in gathers if keys[op] not in known]
    whole = [op for op in new if not is_sliced(op)]
    known.update((keys[op], value) for op, value in zip(whole, _copied(whole, before), strict=True))
    if repeat is not None and (slices := [op for op in new if is_sliced(op)]):
        made = _in_turn(slices, repeat, before)
        known.update((keys[op], value) for op, value in zip(slices, made, strict=True))
    for op in gathers:
        value = known[keys[op]]
        if repeat is not None and is_sliced(op):
            repeat.add_operand(value)
            value = region.add_arg(op.result.name, op.result.tensor, op.loc)
        op.result.replace_with(value)
        op.erase()


def _attrs(gather: Operation) -> dict[str, Attr]:
    return {name: value for name, value in gather.attrs.items() if name != "once"}


def _copied(gathers: Sequence[Operation], before: Builder) -> Iterator[Value]:
    for op in gathers:
        before.loc = op.loc
        made = before.op("stg.all_gather", op.operands, _attrs(op), types=(), names=())
        yield made.add_result(op.result.name, op.result.type, op.result.loc)


def _in_turn(gathers: Sequence[Operation], repeat: Operation, before: Builder) -> Iterable[Value]:
    """Gather slices in one repeat, in the order in which forward uses them."""
    count = repeat.expr("count")
    operands = [source_of(op) for op in gathers]
    order = {"order": repeat.attrs["order"]} if "order" in repeat.attrs else {}
    attrs = {"count": count, "carry": ZERO, **order}
    outer = before.op("stg.repeat", operands, attrs, types=(), symbol=kind_of(repeat))
    inner = Builder(before.registry, outer.make_region(), loc=outer.loc)
    for op in gathers:
        arg = inner.region.add_arg(op.operands[0].name, op.operands[0].type, op.loc)
        inner.loc = op.loc
        inner.value("stg.all_gather", [arg], _attrs(op), type=op.result.type, hint=op.result.name)
    results = [op.result for op in inner.region.ops]
    inner.op("stg.yield", results, types=())
    return [outer.add_result(r.prefixed("kept_"), r.tensor.stacked(count), r.loc) for r in results]
