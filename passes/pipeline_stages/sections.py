"""The sections of a training step: its repeats, and the operations before, between and after them.

A model is a chain: straight operations (outside of layers), a repeat, straight operations, and so
on. Straight sections have even positions, repeats odd ones; backward runs over the same positions
in reverse. Pipeline stages are cut along positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from stagec.api import DiagnosticError, Operation, Region, Value
from stagec.ir.layers import stack_of
from stagec.ir.rewrite import carried
from stagec.ir.traits import Recasts, Terminates
from stagec.ir_spec.ops.comm import Movement
from stagec.ir_spec.ops.parts import Arrive, Depart
from stagec.passes.pipeline_stages.layers import LayerDim, layer_dims, runs_layers


class ActionKind(IntEnum):
    """The parts of the work on a microbatch."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHTS = 2

    @property
    def label(self) -> str:
        """`forward`, `backward` or `weights`."""
        return self.name.lower()


class Slot(NamedTuple):
    """A position on the chain, in one part of the work."""

    position: int
    part: ActionKind

    @property
    def time(self) -> tuple[bool, int, ActionKind]:
        """A key that orders slots in execution order."""
        later = self.part is not ActionKind.FORWARD
        return later, -self.position if later else self.position, self.part


@dataclass
class Sections:
    """A region with its sections. `repeats[part][k]` is the k-th repeat of a part. `slots` has the
    slots of each operation: several for a sum of contributions from several sections, none for an
    operation that can run wherever its result is used."""

    body: Region
    repeats: dict[ActionKind, list[Operation | None]] = field(
        default_factory=dict[ActionKind, "list[Operation | None]"]
    )
    slots: dict[Operation, tuple[Slot, ...]] = field(
        default_factory=dict[Operation, tuple[Slot, ...]]
    )

    @property
    def last(self) -> int:
        """The position of the last section."""
        return 2 * len(self.repeats[ActionKind.FORWARD])

    @cached_property
    def layers(self) -> dict[Value, LayerDim]:
        """The values of the step with a dimension of layers, of which each stage has a part."""
        return layer_dims(self.repeats.values())

    def repeat(self, part: ActionKind, position: int) -> Operation | None:
        """The repeat at an odd position."""
        return self.repeats[part][position // 2]

    def slots_of(self, value: Value) -> tuple[Slot, ...]:
        """The slots at which a value is made; none for arguments, for values that can be computed
        anywhere, and for operations without slots yet."""
        op = value.producer
        slots = self.slots.get(op, ()) if op is not None else ()
        if op is None or not slots or not runs_layers(op) or value.index >= carried(op):
            return slots
        ((position, part),) = slots
        return (Slot(position + (1 if part is ActionKind.FORWARD else -1), part),)


def dissect(body: Region) -> Sections:
    """Find the sections of a differentiated step. Raises `DiagnosticError` if it is not a chain."""
    sections = Sections(body)
    forward = [op for op in body.ops if _part(op) is ActionKind.FORWARD and runs_layers(op)]
    if not forward:
        raise body.owner.error(
            "the model has no repeated layers to cut into pipeline stages",
            remedy="write the layers as an stg.repeat, or leave the pipeline out: --pp 1",
        )
    sections.repeats = {part: [None] * len(forward) for part in ActionKind}
    sections.repeats[ActionKind.FORWARD] = [*forward]
    opening = body.ancestors(forward[0].operands[: carried(forward[0])])
    for part in (ActionKind.FORWARD, ActionKind.BACKWARD):
        due = _due(body, forward, sections) if part is ActionKind.BACKWARD else {}
        for op in (o for o in body.ops[:-1] if _part(o) is part):
            if (slot := _slot_of_end(op, sections)) is not None:
                sections.slots[op] = (slot,)
            elif runs_layers(op):
                sections.slots[op] = (_slot_of_repeat(op, forward, sections),)
            elif op in opening and _reads_data(op, body):
                sections.slots[op] = (Slot(0, ActionKind.FORWARD),)
            else:
                sections.slots[op] = _slots_of_straight(op, sections, due.get(op, 0))
    for op in reversed(body.ops[:-1]):
        if not sections.slots[op] and _reads_data(op, body):
            sections.slots[op] = _slots_of_users(op, sections)
    return sections


def _slot_of_end(op: Operation, sections: Sections) -> Slot | None:
    """The slot of the end of a value that crosses to or from another part of the model. A value
    that forward receives, and its gradient, is in the first section; the gradient of a value that
    forward sends is in the last one. None for a value that is sent where it is made."""
    part = _part(op)
    if isinstance(op.definition, Arrive):
        return Slot(0 if part is ActionKind.FORWARD else sections.last, part)
    if not isinstance(op.definition, Depart):
        return None
    made = part is ActionKind.FORWARD and bool(sections.slots_of(op.operands[0]))
    return None if made else Slot(0, part)


def _reads_data(op: Operation, body: Region) -> bool:
    """Whether an operation depends on the microbatch, not on parameters alone."""
    behind = {op, *body.ancestors(op.operands)}
    return any(v.producer is None and v.region is body for o in behind for v in o.operands)


def _slots_of_users(op: Operation, sections: Sections) -> tuple[Slot, ...]:
    """The first slot that needs a value which depends on the data only."""
    slots: set[Slot] = set()
    for user, index in (use for r in op.results for use in r.uses):
        for position, part in sections.slots.get(user, ()):
            back = -1 if part is ActionKind.FORWARD else 1
            enters = runs_layers(user) and index < carried(user)
            slots.add(Slot(position + (back if enters else 0), part))
    return (min(slots, key=lambda s: s.time),) if slots else ()


def _part(op: Operation) -> ActionKind:
    return ActionKind.FORWARD if op.phase == "forward" else ActionKind.BACKWARD


def _slot_of_repeat(op: Operation, forward: list[Operation], sections: Sections) -> Slot:
    if op in forward:
        return Slot(2 * forward.index(op) + 1, ActionKind.FORWARD)
    part = ActionKind.BACKWARD if carried(op) else ActionKind.WEIGHTS
    index = next(_matches(op, forward, sections), None)
    if index is None:
        raise op.error(
            "a backward repeat uses no value of a forward repeat, so no stage can own it",
            remedy="leave the pipeline out: --pp 1",
        )
    sections.repeats[part][index] = op
    return Slot(2 * index + 1, part)


def _matches(op: Operation, forward: list[Operation], sections: Sections) -> Iterator[int]:
    """The indices of forward repeats whose stash or slices a backward repeat takes."""
    for value in op.operands[carried(op) :]:
        for slot in sections.slots_of(value):
            if slot.position % 2:
                yield slot.position // 2
    for index, other in enumerate(forward):
        if set(op.operands[carried(op) :]) & set(other.operands[carried(other) :]):
            yield index


def _due(body: Region, forward: list[Operation], sections: Sections) -> dict[Operation, int]:
    """The lowest position at which an operation of backward can run, because the carried values of
    a repeat depend on it. Other operations are left out."""
    positions: dict[Operation, int] = {}
    for op in body.ops[:-1]:
        if not runs_layers(op) or _part(op) is ActionKind.FORWARD or not carried(op):
            continue
        position = _slot_of_repeat(op, forward, sections).position + 1
        for before in body.ancestors(op.operands[: carried(op)]):
            positions[before] = max(position, positions.get(before, 0))
    return positions


def _slots_of_straight(op: Operation, sections: Sections, due: int) -> tuple[Slot, ...]:
    """The slots of an operation: after its operands. An operand that forward makes before the
    position `due` is sent to where backward needs it."""
    slots = {s for v in op.operands for s in sections.slots_of(v)}
    if _part(op) is ActionKind.BACKWARD:
        slots = {
            s._replace(position=max(s.position, due)) if s.part is ActionKind.FORWARD else s
            for s in slots
        }
    if not slots:
        return ()
    part = max(*(s.part for s in slots), _part(op))
    own = {Slot(s.position, part) for s in slots}
    if len(own) > 1 and _adds_up(op):
        return tuple(sorted(own))
    last = max(own, key=lambda s: s.time)
    return (_beside_stack(op, last, own, sections) if due else last,)


def _beside_stack(op: Operation, slot: Slot, own: set[Slot], sections: Sections) -> Slot:
    """The slot of an operation of backward on sums over the layers of a stack, of which each piece
    has a part. It runs after all layers if it takes sums of several kinds of layers, or is not
    linear."""
    repeat = sections.repeat(ActionKind.FORWARD, slot.position) if slot.position % 2 else None
    if repeat is None:
        return slot
    forward = sections.repeats[ActionKind.FORWARD]
    places = {2 * forward.index(member) + 1 for member in stack_of(repeat).members}
    alone = len(places & {s.position for s in own}) == 1 and is_linear(op)
    return slot if alone else slot._replace(position=min(places) - 1)


def _adds_up(op: Operation) -> bool:
    """Whether the operation and all that depend on it only add up values that the region yields."""
    if op.has(Terminates):
        return True
    return is_linear(op) and all(_adds_up(user) for r in op.results for user, _ in r.uses)


def is_linear(op: Operation) -> bool:
    """Whether the operation is linear: applied to a sum, it gives the sum of its results."""
    if isinstance(op.definition, Movement) or op.has(Recasts):
        return True
    rule = op.definition.rule(op)
    return rule is not None and len(rule.linear) == len(op.operands)


def too_far(op: Operation, value: Value) -> DiagnosticError:
    """The error for a value that pipeline stages cannot pass on."""
    return op.error(
        f"%{value.name} is used after the layers that form pipeline stages, but no message brings "
        "it there in time",
        remedy="carry it through the repeat, so that stages pass it on, or leave the pipeline "
        "out: --pp 1",
    )


def yielded(action: Operation, value: Value) -> Value:
    """The result of an action for a value of its region, which it yields on demand."""
    end = action.body.terminator
    if value in end.operands:
        return action.results[list(end.operands).index(value)]
    end.add_operand(value)
    return action.add_result(value.name, value.tensor, value.loc)
