"""hold-stand-ins: gives blocks a tensor for each gradient that a kernel adds to a sum by itself."""

from collections.abc import Iterator
from dataclasses import replace

from stagec.api import Module, Operation, Pass, Phase, TensorType, Value, read_strategy
from stagec.ir.rule import parse_rule
from stagec.ir.traits import AddsToSum, Recasts, Repeats
from stagec.ir_spec.strategy.fusion import FusionRule
from stagec.ir_spec.strategy.gradients import GradientsRule
from stagec.sharding.work import is_product


class HoldStandIns(Pass):
    """Give a function a buffer for each weight of a block whose gradient a product adds to the sum
    over microbatches (`stg.fusion[gradients]`), as `stg.gradients[stand_ins = kept]` states:
    autograd takes a tensor of the shape of a gradient, and nobody reads it. Weights of one shape
    share a buffer, where those of one activation are one weight, and experts have that of a single
    one. The products are marked `into_sum`: their results need no memory.

    Before:
        stg.symbols[B, D, L]
        stg.strategy @s {
          stg.fusion[none, gradients]
          stg.gradients[stand_ins = kept]
        }
        stg.func @f(%x: bf16[B, D | rep], %y: bf16[L, B, D | rep]) {
          %d, %g = stg.repeat[reverse, count = L, carry = 1, phase = backward] (
              %h: bf16[B, D | rep] = %x, %a: bf16[B, D | rep] = %y) {
            %d_w = stg.einsum["bd,be->de"](%a, %h) : bf16[D, D | rep]
            %d_w_f32 = stg.cast[f32](%d_w) : f32[D, D | rep]
            stg.yield(%h, %d_w_f32)
          } : (bf16[B, D | rep], f32[L, D, D | rep])
          stg.return(%g)
        }
    After:
        stg.symbols[B, D, L]
        stg.strategy @s {
          stg.fusion[none, gradients]
          stg.gradients[stand_ins = kept]
        }
        stg.func @f (
            %x: bf16[B, D | rep], %y: bf16[L, B, D | rep], %stand_in_d_w: bf16[D, D | rep bucket]) {
          %d, %g = stg.repeat[reverse, count = L, carry = 1, phase = backward] (
              %h: bf16[B, D | rep] = %x, %a: bf16[B, D | rep] = %y) {
            %d_w = stg.einsum["bd,be->de", into_sum](%a, %h) : bf16[D, D | rep]
            %d_w_f32 = stg.cast[f32](%d_w) : f32[D, D | rep]
            stg.yield(%h, %d_w_f32)
          } : (bf16[B, D | rep], f32[L, D, D | rep])
          stg.return(%g)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        kept = strategy.one(GradientsRule).stand_ins == "kept"
        return kept and strategy.one(FusionRule).gradients

    def run(self, module: Module) -> None:
        for func in module.functions:
            known = set[tuple[TensorType, ...]]()
            for repeat in (op for op in func.body.walk() if op.has(Repeats)):
                weights: dict[Value, list[Operation]] = {}
                for op in _added(repeat):
                    op.attrs["into_sum"] = True
                    weights.setdefault(op.operands[0], []).append(op)
                for ops in weights.values():
                    types = tuple(map(_of_expert, ops))
                    for op, type_ in zip(ops, types, strict=True) if types not in known else ():
                        func.body.add_arg(f"stand_in_{op.result.name}", type_, op.loc)
                    known.add(types)


def _added(repeat: Operation) -> Iterator[Operation]:
    """The products of a block whose results are gradients that are added to sums in a wider
    type."""
    for op in repeat.body.ops:
        users = [user for user, _ in op.results[0].uses] if len(op.results) == 1 else []
        sums = [u for u in users if u.has(Recasts) or u.has(AddsToSum)]
        if op.phase == "backward" and is_product(op) and len(users) == len(sums) == 1:
            result = sums[0].result
            ends = [user for user, _ in result.uses]
            if sums[0].has(AddsToSum) or ends == [repeat.body.terminator]:
                yield op


def _of_expert(op: Operation) -> TensorType:
    """The type of a buffer for the gradient that an operation computes, without the dimensions of
    several products, such as experts."""
    type_, (sides, (result,)) = op.result.tensor, parse_rule(op.text("spec"))
    alone = [d for d, g in zip(type_.dims, result, strict=True) if not all(g in s for s in sides)]
    return replace(type_, dims=tuple(alone), partial=None, role="bucket")
