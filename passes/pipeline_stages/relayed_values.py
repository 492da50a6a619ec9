"""Values that are used beyond the layers that a pipeline cuts, such as the output of an encoder.

They are sent from piece to piece with the values that the repeats carry: in forward towards the
last piece, in backward towards the first one. If the layers of a repeat are on several pieces, a
sum over these layers, such as the gradient of such a value, is accumulated on the way: each piece
adds its part.

    encoder | encoder, decoder | decoder | decoder, loss
              %enc  ---------->  ------>               forward: sent on
              %d_enc  <--------  <------  (from here)  backward: added up
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stagec.api import Operation, Value
from stagec.ir.rewrite import carried
from stagec.passes.pipeline_stages.layers import runs_layers
from stagec.passes.pipeline_stages.sections import ActionKind, Sections, is_linear, too_far
from stagec.sharding.stages import ModelPiece


@dataclass
class RelayedValues:
    """The relayed values that enter each piece from the previous one, by direction."""

    enters: dict[ActionKind, list[tuple[Value, ...]]]
    numbers: dict[tuple[ActionKind, Value], int] = field(
        default_factory=dict[tuple[ActionKind, Value], int]
    )

    def entering(self, part: ActionKind, depth: int) -> tuple[Value, ...]:
        """The values that a piece receives, in order."""
        return self.enters[part][depth] if part in self.enters else ()

    def leaving(self, part: ActionKind, depth: int) -> tuple[Value, ...]:
        """The values that a piece sends: those that enter the next one."""
        rows = self.enters.get(part, [])
        after = depth + (1 if part is ActionKind.FORWARD else -1)
        return rows[after] if 0 <= after < len(rows) else ()


def relayed_values(sections: Sections, pieces: Sequence[ModelPiece]) -> RelayedValues:
    """Find the relayed values. Raises `DiagnosticError` for a value that cannot arrive in time."""
    ways: dict[tuple[ActionKind, Value], tuple[int, int]] = {}
    order: dict[Value, int] = {}
    for op in sections.body.ops[:-1]:
        for value, position in uses(op, sections):
            for part, first, last in _ways(op, value, position, sections, pieces):
                one, other = ways.get((part, value), (first, last))
                ways[part, value] = min(one, first), max(other, last)
                order.setdefault(value, len(order))
    enters: dict[ActionKind, list[tuple[Value, ...]]] = {}
    for part in (ActionKind.FORWARD, ActionKind.BACKWARD):
        mine = [(v, *way) for (p, v), way in ways.items() if p is part]
        later = 1 if part is ActionKind.FORWARD else 0  # the first piece that a value enters
        enters[part] = [
            tuple(v for v, low, high in mine if low + later <= depth < high + later)
            for depth in range(len(pieces))
        ]
    return RelayedValues(enters, {key: number for number, key in enumerate(ways)})


def uses(op: Operation, sections: Sections) -> Iterator[tuple[Value, int]]:
    """The values that an operation takes from other sections of the step, and the positions at
    which it needs them."""
    slots = sections.slots[op]
    for slot in slots:
        for index, value in enumerate(op.operands):
            made = {s.position for s in sections.slots_of(value)}
            if len(slots) > 1 and made & {s.position for s in slots}:
                continue  # each section adds its own
            enters = runs_layers(op) and index < carried(op)
            back = -1 if slot.part is ActionKind.FORWARD else 1
            yield value, slot.position + (back if enters else 0)
        for inner in op.region.walk() if op.region is not None else ():
            for value in inner.operands:
                if value.producer is not None and value.producer.parent is sections.body:
                    yield value, slot.position


def critical_ops(sections: Sections) -> set[Operation]:
    """The operations outside of layers on which values depend that backward carries or sends."""
    ops: set[Operation] = set()
    for op in sections.body.ops[:-1]:
        if runs_layers(op) and op.phase != "forward":
            ops |= sections.body.ancestors(op.operands[: carried(op)])
        for value, position in uses(op, sections):
            slots = sections.slots_of(value)
            if slots and all(s.position != position for s in slots):
                ops |= sections.body.ancestors([value])
    return ops


def _ways(
    op: Operation, value: Value, position: int, sections: Sections, pieces: Sequence[ModelPiece]
) -> Iterator[tuple[ActionKind, int, int]]:
    """The directions in which a value is sent for a use, each with the lower and the upper piece.
    Raises `DiagnosticError` if it cannot be sent."""
    slots = sections.slots_of(value)
    if not slots or any(s.position == position for s in slots):
        return
    (made, part), *others = slots
    if others:
        raise too_far(op, value)
    makers, users = _holders(made, pieces), _holders(position, pieces)
    if value in sections.layers:
        raise too_far(op, value)
    if len(makers) > 1 and not _adds_up(value, made, sections):
        raise too_far(op, value)
    forward = sections.slots[op][0].part is ActionKind.FORWARD
    for user in users:
        if part is ActionKind.FORWARD and user >= makers[-1]:
            if user > makers[0]:
                yield ActionKind.FORWARD, makers[0], user
        elif not forward and part is not ActionKind.WEIGHTS and user <= makers[0]:
            if user < makers[-1]:
                yield ActionKind.BACKWARD, user, makers[-1]
        else:
            raise too_far(op, value)


def _holders(position: int, pieces: Sequence[ModelPiece]) -> list[int]:
    return [depth for depth, piece in enumerate(pieces) if position in piece.positions]


def _adds_up(value: Value, position: int, sections: Sections) -> bool:
    """Whether the value over all layers is the sum of those over the layers of each piece."""
    op = value.producer
    if op is None or runs_layers(op):
        return True
    if not is_linear(op):
        return False
    mine = (v for v in op.operands if any(s.position == position for s in sections.slots_of(v)))
    return all(_adds_up(v, position, sections) for v in mine)
