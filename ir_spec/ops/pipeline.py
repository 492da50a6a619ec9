"""Pipeline stages: what a stage does for one microbatch at a time, and the messages between stages.

`split-stages` makes them. A stage's function holds an accumulation whose region is a list of
actions; the schedule says in which order a rank runs them, for which microbatch.
"""

from __future__ import annotations

from stagec.ir.core import Operation
from stagec.ir.opdef import OpDef
from stagec.ir.param import Param
from stagec.ir.traits import Runs, Stays
from stagec.ir.types import Type

_OVER = Param("over", "axis", "the mesh axis of the stages", required=True)
_BY = Param("by", "int", "coordinate of the receiver minus that of the sender", required=True)
_CHANNEL = Param("channel", "int", "which of several streams of messages (default 0)")


#: Kinds of actions, in the order in which they run for a chunk.
ACTIONS = ("forward", "backward", "weights")


class ActionOp(OpDef):
    """The work of a rank for one microbatch: forward or backward of a chunk of the model.

    `weights` are the gradients of parameters, where a schedule separates them from the rest of
    backward. The region uses values from around it; what it yields is there for later actions of
    the same microbatch.
    """

    name = "stg.action"
    results = ("yielded*",)
    traits = (Runs(),)
    params = (
        Param(
            "kind",
            "name",
            "forward, backward or weights",
            required=True,
            positional=True,
            choices=ACTIONS,
        ),
        Param("chunk", "int", "the chunk of the model", required=True),
    )
    example = "%y = stg.action[forward, chunk = 0] () {\n  stg.yield(%h)\n}"

    def infer(self, op: Operation) -> list[Type]:
        return [v.tensor for v in op.body.terminator.operands]


class SendOp(OpDef):
    """Sends the part that each rank holds to the stage `by` further along the axis `over`. With
    `stays` it is there until what the next microbatch sends is there."""

    name = "stg.send"
    operands = ("x",)
    results = ()
    params = (_OVER, _BY, _CHANNEL, Param("stays", "flag", "it stays until the next one is sent"))
    traits = (Stays(),)
    example = "stg.send[over = pp, by = 1](%y)"


class RecvOp(OpDef):
    """Receives what the stage `by` before sends; the type says what it is. With `into`, a buffer of
    the stage that has a part for each microbatch."""

    name = "stg.recv"
    operands = ("into?",)
    params = (_OVER, _BY, _CHANNEL)
    traits = (Stays(),)
    example = "%h = stg.recv[over = pp, by = 1] : bf16[B@dp, S, D]"

    def infer(self, op: Operation) -> list[Type]:
        return [r.type for r in op.results if r.type is not None]

    def reuses(self, op: Operation, result: int) -> int | None:
        return 0 if op.operands else None
