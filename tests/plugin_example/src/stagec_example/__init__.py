"""An example plug-in: the op `ex.relu6`, a pass that replaces other activations by it, and a
pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import ClassVar

from stagec.api import (
    Action,
    Expr,
    Module,
    OpDef,
    Operation,
    Param,
    Pass,
    Phase,
    Plugin,
    Rule,
    Schedule,
    Sizes,
    as_expr,
    letters,
    made_by,
    make_rule,
    product,
)


class Relu6(OpDef):
    """min(max(x, 0), limit), 2 FLOPs per element."""

    name = "ex.relu6"
    operands = ("x",)
    params = (Param("limit", "int", "the upper limit (default 6)"),)
    example = "%y = ex.relu6[limit = 6](%x) : bf16[B]"

    def rule(self, op: Operation) -> Rule:
        row = letters(op.operands[0].tensor.rank)
        return make_rule(f"{row}->{row}")

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.operands[0].tensor.dtype]

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(n.values()) * 2


class UseRelu6(Pass):
    """Replace activations by `ex.relu6`.

    Before:
        stg.func @f(%x: bf16[B, S, D]) {
          %y = stg.gelu(%x) : bf16[B, S, D]
          stg.return(%y)
        }
    After (use-relu6{limit=4}):
        stg.func @f(%x: bf16[B, S, D]) {
          %y = ex.relu6[limit = 4](%x) : bf16[B, S, D]
          stg.return(%y)
        }
    """

    name: ClassVar[str] = "use-relu6"
    needs: ClassVar[Phase] = Phase.PARSED
    until: ClassVar[Phase | None] = Phase.DIFFERENTIATED

    ops: tuple[str, ...] = field(
        default=("stg.gelu", "stg.silu"), metadata={"help": "the ops to replace"}
    )
    limit: int = 6

    def run(self, module: Module) -> None:
        for op in list(module.walk()):
            if op.name in self.ops:
                replace_activation(module, op, self.limit)


def replace_activation(module: Module, op: Operation, limit: int) -> None:
    """Put an `ex.relu6` in the place of an activation."""
    if op.parent is None:
        return
    attrs = {"limit": as_expr(limit)}
    new = Operation(
        module.registry["ex.relu6"], op.operands, attrs, loc=made_by("use-relu6", op.loc)
    )
    op.parent.insert(op.position(), new)
    op.result.replace_with(new.add_result(op.result.name, op.result.type))
    op.erase()


class Depths(Schedule):
    """All forwards, then all backwards, the last microbatch first."""

    name = "depth-first-back"
    summary = "all forwards, then all backwards from the last microbatch to the first"

    def rank_actions(
        self, rank: int, stages: int, microbatches: int, chunks: int
    ) -> Iterable[Action]:
        yield from (Action("F", 0, i) for i in range(microbatches))
        yield from (Action("B", 0, i) for i in reversed(range(microbatches)))


PLUGIN = Plugin(
    name="example",
    schedules=(Depths(),),
    passes=(UseRelu6,),
    ops=(Relu6(),),
    pipelines={"relu6-placed": "infer-shapes,use-relu6,propagate-sharding"},
)
