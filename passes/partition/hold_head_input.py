"""hold-head-input: gives the gathered input of the head a buffer that stays across steps."""

from dataclasses import replace

from stagec.api import Module, Operation, Pass, Phase, Region, Value, read_strategy
from stagec.ir.rewrite import repeats_in
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.comm import AllGather
from stagec.ir_spec.strategy.tp_inputs import TpInputsRule
from stagec.sharding.gathers import is_of_parameter
from stagec.sharding.work import is_product


class HoldHeadInput(Pass):
    """Give a function a buffer for what the head, the last product behind the layers, gathers from
    the ranks of a sequence, as `stg.tp_inputs[head = buffer]` states. The gathers are marked
    `held`: their results need no memory. The head of Megatron-Core gathers its input in forward and
    again in backward into the same tensor (core/utils.py, `GlobalMemoryBuffer`).

    Before:
        stg.mesh @pod[tp]
        stg.assume[S % tp == 0, V % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.tp_inputs[regather, head = buffer]
        }
        stg.func @f(%x: bf16[B, S@tp, D], %w: bf16[D, V@tp | param]) {
          %x_g = stg.all_gather[dim = 1, over = tp](%x) : bf16[B, S, D | rep]
          %z = stg.einsum["bsd,dv->bsv"](%x_g, %w) : bf16[B, S, V@tp]
          stg.return(%z)
        }
    After:
        stg.mesh @pod[tp]
        stg.assume[S % tp == 0, V % tp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.tp_inputs[regather, head = buffer]
        }
        stg.func @f (
            %x: bf16[B, S@tp, D], %w: bf16[D, V@tp | param],
            %held_x_g: bf16[B, S, D | rep bucket]) {
          %x_g = stg.all_gather[held, dim = 1, over = tp](%x) : bf16[B, S, D | rep]
          %z = stg.einsum["bsd,dv->bsv"](%x_g, %w) : bf16[B, S, V@tp]
          stg.return(%z)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).one(TpInputsRule).head == "buffer"

    def run(self, module: Module) -> None:
        for func in module.functions:
            gathers = _of_head(func.body)
            for op in gathers:
                op.attrs["held"] = True
            for type_ in dict.fromkeys(op.result.tensor for op in gathers):
                op = next(op for op in gathers if op.result.tensor == type_)
                bucket = replace(type_, role="bucket", placed=True)
                func.body.add_arg(f"held_{op.result.name}", bucket, op.loc)


def _of_head(body: Region) -> list[Operation]:
    """The gathers of what the head takes: the last forward product behind the layers that takes
    something gathered, the others with its parameter (of other tokens to predict), and the gathers
    of the same values in backward, which in a stage are results of its forward."""
    ops = [op for op in body.walk() if isinstance(op.definition, AllGather)]
    gathers = [op for op in ops if _feeds_product(op) and not _is_in_layer(op)]
    heads = {
        gather: {v for user, _ in gather.result.uses for v in user.operands if is_of_parameter(v)}
        for gather in gathers
        if gather.phase == "forward" and _is_at_end(gather)
    }
    last = next((head for head in reversed(heads.values()) if head), set[Value]())
    taken = {g.operands[0]: g.result.tensor for g, head in heads.items() if head & last}

    def is_same(gather: Operation) -> bool:
        source = gather.operands[0]
        outside = source.producer is None or source.producer.parent is not gather.parent
        if source in taken or not outside or gather.phase != "backward":
            return source in taken
        return _is_at_end(gather) and gather.result.tensor in taken.values()

    return [gather for gather in gathers if is_same(gather)]


def _is_at_end(op: Operation) -> bool:
    """Whether an operation is behind the layers in forward, or before them in backward."""
    layers = repeats_in(op.parent, op.phase) if op.parent is not None else []
    places = [layer.position() for layer in layers]
    if op.phase == "forward":
        return op.position() > max(places, default=-1)
    return op.position() < min(places, default=op.position() + 1)


def _feeds_product(op: Operation) -> bool:
    """Whether an operation gathers a value for products, which is no parameter."""
    if len(op.results) > 1 or is_of_parameter(op.operands[0]):
        return False
    users = [user for user, _ in op.result.uses]
    return bool(users) and all(map(is_product, users))


def _is_in_layer(op: Operation) -> bool:
    around = op.parent_op
    while around is not None and not around.has(Repeats):
        around = around.parent_op
    return around is not None
