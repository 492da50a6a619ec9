"""Ops of pipeline stages: the actions of a stage for one microbatch, and messages between stages.

The pass `split-stages` creates them. The function of a stage has an accumulation whose region is a
list of actions. The schedule states in which order a rank runs them and for which microbatch.
"""

from stagec.ir.core import Operation
from stagec.ir.opdef import OpDef
from stagec.ir.param import Param
from stagec.ir.traits import Runs, Stays
from stagec.ir.types import Type

_OVER = Param("over", "axis", "the mesh axis of the stages", required=True)
_BY = Param("by", "int", "coordinate of the receiver minus that of the sender", required=True)
_CHANNEL = Param("channel", "int", "the stream of messages, if there are several (default 0)")


#: The kinds of actions, in the order in which a chunk runs them.
ACTIONS = ("forward", "backward", "weights")


class ActionOp(OpDef):
    """The work of a rank for one microbatch: the forward or backward pass of a chunk of the model.

    `weights` computes the gradients of parameters, in schedules that separate them from the rest of
    backward. The region may use values that are defined outside of it. Later actions of the same
    microbatch may use the values that it yields.
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
    """Sends each rank's part of x to the stage `by` places further along the axis `over`. With
    `stays`, x stays in memory until the next microbatch has computed the value that it sends."""

    name = "stg.send"
    operands = ("x",)
    results = ()
    params = (_OVER, _BY, _CHANNEL, Param("stays", "flag", "x stays until the next value exists"))
    traits = (Stays(),)
    example = "stg.send[over = pp, by = 1](%y)"


class RecvOp(OpDef):
    """Receives a value from the stage `by` places before along the axis `over`; the text states the
    type of the result. The optional operand `into` is a buffer of the stage with a slot for each
    microbatch."""

    name = "stg.recv"
    operands = ("into?",)
    params = (_OVER, _BY, _CHANNEL)
    traits = (Stays(),)
    example = "%h = stg.recv[over = pp, by = 1] : bf16[B@dp, S, D]"

    def infer(self, op: Operation) -> list[Type]:
        return [r.type for r in op.results if r.type is not None]

    def reuses(self, op: Operation, result: int) -> int | None:
        return 0 if op.operands else None
