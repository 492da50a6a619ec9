"""Statements of a strategy about ops that treat the split of a dimension in a way of their own, as
attention treats that of the sequence: the split moves elsewhere, stays, or is gathered first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagec.ir.core import Operation
from stagec.ir_spec.ops.axes import HEADS
from stagec.ir_spec.ops.statement import Flag, FlagValues, Record, Statement, parameter

ORDERS = ("zigzag", "plain")


@dataclass(frozen=True)
class ExchangeRule(Record):
    """The split of a dimension moves to other ones, around attention."""

    dim: str = parameter("dim", "the dimension", required=True, positional=True)
    into: tuple[str, ...] = parameter(
        "dims", "the dimensions that are split instead", required=True
    )


class ExchangeOp(Statement):
    """Moves the split of a dimension to other ones around an op that would treat it specially.

    `stg.exchange[S, into = (H, G)]` is Ulysses: an all_to_all of queries, keys and values before
    attention, and of its result after.
    """

    name, record, repeats = "stg.exchange", ExchangeRule, True
    example = "stg.exchange[S, into = (H, G)]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if "cp" in request.axes and request.cp_mode == "ulysses":
            into = tuple(n for n in HEADS if n in request.sizes)
            yield from ({"dim": name, "into": into} for name in request.context)


@dataclass(frozen=True)
class RingRule(Record):
    """Attention along a dimension passes its parts round the ranks, in this order of positions."""

    dim: str = parameter("dim", "the dimension", required=True, positional=True)
    order: str = parameter(
        "name",
        "how positions lie on ranks",
        default="zigzag",
        choices=ORDERS,
        flag=Flag(
            "cp_order",
            "How the sequence lies on the ranks of a ring; zigzag balances the causal mask.",
            needs=("cp",),
        ),
    )


class RingOp(Statement):
    """Leaves attention split along a dimension: keys and values go round the ranks (ring attention,
    arXiv 2310.01889).

    `order = zigzag`, the default, gives rank i of n the chunks i and 2n-1-i of 2n, so that a causal
    mask leaves the same work to all. `order = plain` gives it one piece: the last rank computes
    2n-1 times what the first one does.
    """

    name, record, repeats = "stg.ring", RingRule, True
    flags = (
        Flag(
            "cp_mode",
            "How attention sees the whole sequence.",
            "choice",
            "ring",
            choices=("ring", "ulysses", "all-gather"),
            needs=("cp",),
        ),
    )
    example = "stg.ring[S, order = zigzag]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if "cp" in request.axes and request.cp_mode == "ring":
            order = request["cp_order"]
            yield from ({"dim": name, "order": order} for name in request.context)

    def problems(self, request: FlagValues) -> Iterator[tuple[str, str]]:
        mode, order = request["cp_mode"], request["cp_order"]
        if mode != "ring" and order != "zigzag":
            message = (
                f"--cp-order {order} is for --cp-mode ring: --cp-mode {mode} leaves the sequence "
                "in its order"
            )
            yield message, "leave --cp-order out"


@dataclass(frozen=True)
class GatherRule(Record):
    """Activations split over these dimensions are gathered, or the values named are whole."""

    dims: tuple[str, ...] = parameter("dims", "dimension names", required=True, positional=True)
    of: tuple[str, ...] = parameter("values", "only values of these names")
    regather: bool = parameter("flag", "backward gathers them again and does not keep them")


class GatherOp(Statement):
    """Activations split over these dimensions are gathered before an op that would treat the split
    specially.

    `stg.gather[V]` gives a loss over gathered logits instead of a vocabulary-parallel one. With
    `regather`, backward keeps the rank's own part and gathers it again, as Transformer Engine and
    PyTorch do with keys and values under context parallelism. With `of`, the values of these names
    are whole in the dimensions instead, whoever uses them.
    """

    name, record, repeats = "stg.gather", GatherRule, True
    flags = (
        Flag(
            "no_vocab_parallel",
            "Gather the logits instead of a vocabulary-parallel loss.",
            "switch",
            False,
            needs=("tp",),
            tries=(True, False),
        ),
        Flag(
            "cp_inputs",
            "--cp-mode all-gather: gather keys and values again in backward, or keep them.",
            "choice",
            "regather",
            choices=("regather", "save-gathered"),
            needs=("cp",),
            tries=("save-gathered", "regather"),
        ),
    )
    example = "stg.gather[V]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if op.flag("regather") and "of" in op.attrs:
            yield "'regather' is about operands of ops, but 'of' names values"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if "cp" in request.axes and request.cp_mode == "all-gather":
            again = {"regather": True} if request["cp_inputs"] == "regather" else {}
            yield {"dims": request.context, **again}
        if "tp" in request.axes and request["no_vocab_parallel"]:
            yield {"dims": "V"}

    def problems(self, request: FlagValues) -> Iterator[tuple[str, str]]:
        inputs, mode = request["cp_inputs"], request["cp_mode"]
        if inputs != "regather" and mode != "all-gather":
            message = f"--cp-inputs {inputs} is for --cp-mode all-gather, found --cp-mode {mode}"
            yield message, "choose --cp-mode all-gather, or leave --cp-inputs out"
