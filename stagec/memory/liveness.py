"""Liveness: which buffers exist at each moment of a step, per rank, with symbolic sizes.

A buffer lives from the op that makes it to its last user. Views share the buffer of what they view,
in-place results take that of their operand. A repeat is looked at in its worst iteration only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import ZERO, Expr, call, expand, total
from stagec.ir.module import is_parameter
from stagec.ir.replay import FIRST, is_partial, stashed
from stagec.ir_spec.ops.pipeline import ActionOp


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in a step: the op that runs and the buffers that are live while it does."""

    op: Operation
    live: frozenset[Value]
    stash: tuple[Value, ...] = ()
    partly: tuple[Value, ...] = ()  # stacked values of which all but one slice exist

    def bytes(self) -> Expr:
        """Bytes of the buffers."""
        live = [device_bytes(v) for v in self.live]
        held = [held_bytes(v) for v in self.stash]
        return total([*live, *held, *(_all_but_one(v) for v in self.partly)])


def device_bytes(value: Value) -> Expr:
    """Bytes of a buffer in device memory."""
    return value.tensor.local_bytes if value.tensor.memory == "device" else ZERO


def held_bytes(value: Value) -> Expr:
    """Bytes of a stashed value: of all slices, or of those that some iteration takes."""
    kept = _slices_kept(value)
    size = device_bytes(value)
    return size if kept is None else expand(size / value.tensor.dims[0].size * kept)


def _all_but_one(value: Value) -> Expr:
    count = value.tensor.dims[0].size
    kept = _slices_kept(value)
    slices = count - 1 if kept is None else call("max", [kept - 1, ZERO])
    return expand(device_bytes(value) / count * slices)


def _slices_kept(value: Value) -> Expr | None:
    """How many slices of a stack are stashed if not all: it is only recalled where others
    recompute."""
    users = [(op, i) for op, i in value.uses if not op.definition.ends_lifetime]
    if not users or not all(is_partial(op) and _is_recalled(op, i) for op, i in users):
        return None
    return stashed(users[0][0])


def _is_recalled(op: Operation, index: int) -> bool:
    """Whether what is bound at `index` is used as the stashed side of recalls only."""
    return all(u.definition.recalls and i == 1 for u, i in op.body.args[index].uses)


def root(value: Value) -> Value:
    """The value whose buffer this one uses.

    Views and in-place results are followed to their source, what an accumulation yields to the
    buffer that it is added to, what an action yields to its result.
    """
    while True:
        source = _source(value)
        if source is None:
            return value
        value = source


def _source(value: Value) -> Value | None:
    for user, index in value.uses:
        owner = user.parent_op
        if user.definition.ends_region and owner is not None and _hands_on(owner):
            return owner.results[index]
    op = value.producer
    if op is None or op.region is not None or not op.operands:
        return None
    if op.definition.aliases:
        return op.operands[min(value.index, len(op.operands) - 1)]
    slot = op.definition.reuses(op, value.index)
    if slot is None:
        return None
    return op.operands[slot]


def _hands_on(op: Operation) -> bool:
    """Whether what the op's region yields is the buffer of its result."""
    return _accumulates(op) or isinstance(op.definition, ActionOp)


def _accumulates(op: Operation) -> bool:
    """Whether the op has a region that adds up what it yields."""
    return op.definition.sums_yields


@dataclass(slots=True)
class Sets:
    """Buffers that are not transient: what a step starts with, its gradients, its stash."""

    static: set[Value] = field(default_factory=set[Value])
    gradients: set[Value] = field(default_factory=set[Value])
    stash: set[Value] = field(default_factory=set[Value])


def classify(body: Region) -> Sets:
    """Sort the values of a function: arguments; what the optimizer takes from backward; forward to
    backward."""
    sets = Sets(static=set(body.args))
    for region in step_regions(body):
        for op in region.ops:
            if _accumulates(op):
                sets.gradients |= {root(r) for r in op.results if r.tensor.rank}
                continue
            for value in op.results:
                users = {u.phase for u, _ in value.uses if u is not body.terminator}
                gathered = "over" in op.attrs and all(map(is_parameter, op.operands))
                if (
                    op.phase == "forward"
                    and not gathered
                    and users & {"backward", "gradient", "recompute"}
                ):
                    sets.stash.add(root(value))
                elif op.phase != "optimizer" and "optimizer" in users:
                    sets.gradients.add(root(value))
    for value in body.terminator.operands:  # updates end where what they replace is
        if value.producer is not None and value.producer.phase == "optimizer":
            sets.static.add(root(value))
    sets.stash -= sets.static
    return sets


def step_regions(body: Region) -> list[Region]:
    """The region of a function and that of its accumulation, if there is one."""
    inner = [op.body for op in body.ops if op.region is not None and not op.definition.carries]
    return [body, *(r for region in inner for r in step_regions(region))]


def moments(
    region: Region,
    sets: Sets,
    around: frozenset[Value] = frozenset(),
    stash: tuple[Value, ...] = (),
    *,
    replay: bool = True,
) -> Iterator[Moment]:
    """Every moment of a region, given what is live around it; without what is recomputed unless
    the iteration replays."""
    ops = [op for op in region.ops if replay or op.phase != "recompute"]
    last = last_users(region, ops)
    live: set[Value] = set(around)
    held: list[Value] = list(stash)
    live |= {a for a in region.args if _owned(a)}
    staying = _staying(region)
    for op in ops:
        if op.region is not None and any("kept" in inner.attrs for inner in op.region.ops):
            live -= _left_by(region)
        made = {root(r) for r in op.results} - live - sets.static
        kept = {v for v in made if v in sets.stash}
        dying = {v for v, user in last.items() if user is op} - staying
        if op.region is not None:
            growing = tuple(v for v in kept if v.owner is op and v.index >= _carried(op))
            outer = frozenset(live - {root(v) for v in op.operands if root(v) in dying})
            if _accumulates(op):  # what is summed up is there from the second time on
                outer |= made - sets.gradients
            for again, there in _variants(op, tuple(held)):
                for moment in moments(op.region, sets, outer, there, replay=again):
                    yield Moment(moment.op, moment.live, moment.stash, moment.partly + growing)
        held += [v for v in kept if v not in held]
        live |= made - kept - sets.gradients
        if op.region is None:
            yield Moment(op, frozenset(live), tuple(held))
        live -= dying
        live |= _staying(op.region) if op.region is not None else set[Value]()
        held = [v for v in held if v not in dying]


def _variants(op: Operation, held: tuple[Value, ...]) -> list[tuple[bool, tuple[Value, ...]]]:
    """The kinds of iterations of a repeat: whether they recompute, and what is stashed by then.

    Backward runs from the last slice, so when the first slices replay, what the others took from
    the stash is gone.
    """
    if not is_partial(op):
        return [(True, held)]
    gone = (
        {v for i, v in enumerate(op.operands) if _is_recalled(op, i)} if FIRST in op.attrs else ()
    )
    return [(False, held), (True, tuple(v for v in held if v not in gone))]


def _staying(region: Region) -> set[Value]:
    """What the last iteration of a repeat gathers and leaves for the repeat that runs back."""
    return {root(r) for op in region.ops if "keep" in op.attrs for r in op.results}


def _left_by(region: Region) -> set[Value]:
    """What the repeats of a region leave so."""
    return {v for op in region.ops if op.region is not None for v in _staying(op.region)}


def _carried(op: Operation) -> int:
    return op.integer("carry", 1) if op.definition.carries else len(op.results)


def _owned(arg: Value) -> bool:
    """Whether a region's argument is a buffer of its own: carried values are, slices are views."""
    owner = arg.region.owner
    return owner.definition.carries and arg.index < owner.integer("carry", 1)


def last_users(region: Region, ops: Sequence[Operation] | None = None) -> dict[Value, Operation]:
    """For each buffer made in (or carried into) a region: the last op of the region that uses
    it, of all or of these."""
    found: dict[Value, Operation] = {}
    for op in region.ops if ops is None else ops:
        for value in op.results:
            found[root(value)] = op
        for value in _uses(op):
            if value.region is region or root(value).region is region:
                found[root(value)] = op
    return found


def _uses(op: Operation) -> Iterator[Value]:
    yield from op.operands
    if op.region is not None:
        for inner in op.region.walk():
            yield from inner.operands
