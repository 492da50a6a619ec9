"""Where the layers of a step of serving are cut into attention and feed-forward."""

from stagec.ir.core import Operation, Region, Value
from stagec.ir.rewrite import carried
from stagec.ir.traits import AppendsRows
from stagec.ir_spec.ops.attention_base import AttentionWork
from stagec.ir_spec.ops.contraction import Einsum
from stagec.ir_spec.ops.quantized import ScaledEinsum
from stagec.ir_spec.ops.scan_base import ScanOp
from stagec.support.diagnostics import error, note
from stagec.support.source import Loc

#: Products of feed-forward, of which the second half needs one.
_PRODUCTS = (Einsum, ScaledEinsum)


def behind_attention(op: Operation, loc: Loc, remedy: str) -> tuple[int, Value]:
    """Where the layer of a repeat is cut: the index of the first operation after the cut, and the
    value that crosses it. It is the first place after attention with a single live value of the
    width of the layer: the sum of the input of the layer and attention.

    Raises `DiagnosticError` at `loc` if there is no such place.
    """
    ops = op.body.ops[:-1]
    attends = [n for n, each in enumerate(ops) if _mixes(each)]
    first = attends[-1] + 1 if attends and carried(op) == 1 else len(ops)
    for place in range(first, len(ops)):
        live = _live(op.body, place)
        multiplies = any(isinstance(each.definition, _PRODUCTS) for each in ops[place:])
        if len(live) == 1 and multiplies and live[0].type == op.body.args[0].type:
            return place, live[0]
    raise error(
        f"the layers of %{op.results[0].name} have no place behind attention where one value of "
        "their own width goes on, expected the sum of attention and its input",
        loc,
        remedy=remedy,
        notes=[note("these layers", op.loc)],
    )


def _mixes(op: Operation) -> bool:
    """Whether an operation is attention or a scan, or uses the rows of a cache."""
    makers = [op, *(v.producer for v in op.operands if v.producer is not None)]
    cached = any(each.has(AppendsRows) for each in makers)
    return cached or isinstance(op.definition, (AttentionWork, ScanOp))


def _live(body: Region, place: int) -> list[Value]:
    """The values that operations from a place on, or the next layer, take from earlier ones."""
    known = {body.args[0], *(v for op in body.ops[:place] for v in op.results)}
    tail = [inner for op in body.ops[place:-1] for inner in op.walk()]
    taken = [v for op in tail for v in op.operands] + [body.terminator.operands[0]]
    return list(dict.fromkeys(v for v in taken if v in known))
