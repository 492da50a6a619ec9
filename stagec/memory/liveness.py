"""The buffer in which a value is stored, the buffers that are not transient, and the last user of
each buffer.

Views share the buffer of their operand, and so do in-place results.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import Expr, expand
from stagec.ir.module import is_parameter
from stagec.ir.recompute_window import is_partial, stashed
from stagec.ir.rewrite import carried
from stagec.ir.traits import (
    Accumulates,
    CopiesMemory,
    EndsLifetime,
    InPlace,
    Recalls,
    Repeats,
    Terminates,
    View,
)
from stagec.ir.types import DEVICE
from stagec.ir_spec.ops.comm import Collective
from stagec.ir_spec.ops.pipeline import ActionOp, SendOp
from stagec.ir_spec.ops.structure import joined_dim


def device_bytes(value: Value) -> Expr:
    """Bytes of a buffer in device memory."""
    return value.tensor.bytes_in(DEVICE)


def value_bytes(value: Value) -> Expr:
    """Bytes of a stashed value on the device: of all its slices, or only of those that an iteration
    takes."""
    kept = _slices_kept(value)
    size = device_bytes(value)
    return size if kept is None else expand(size / value.tensor.dims[0].size * kept)


def _slices_kept(value: Value) -> Expr | None:
    """The number of stashed slices of a stack if it is recalled only and other layers recompute;
    None if all slices are stashed."""
    users = [(op, i) for op, i in value.uses if not op.has(EndsLifetime)]
    if not users or not all(is_partial(op) and _is_recalled(op, i) for op, i in users):
        return None
    return stashed(users[0][0])


def _is_recalled(op: Operation, index: int) -> bool:
    """Whether the operand at `index` is used only as the stashed operand of recalls."""
    return all(u.has(Recalls) and i == 1 for u, i in op.body.args[index].uses)


class Roots:
    """Maps a value to the one whose buffer it uses.

    Views and in-place results map to their source, a value that an accumulation yields to the sum
    to which it is added, and a value that an action yields to its result. Each value is resolved
    once.
    """

    def __init__(self) -> None:
        self._known: dict[Value, Value] = {}

    def __call__(self, value: Value) -> Value:
        root = self._known.get(value)
        if root is not None:
            return root
        path: list[Value] = []
        while value not in self._known:
            path.append(value)
            source = _source(value)
            if source is None:
                break
            value = source
        base = self._known.get(value, value)
        self._known.update(dict.fromkeys(path, base))
        return base


def _source(value: Value) -> Value | None:
    for user, index in value.uses:
        if user.has(Terminates):
            owner = user.parent_op
            if owner is not None and _hands_on(owner):
                return owner.results[index]
    op = value.producer
    if op is None:
        return None
    if op.region is not None:
        return updated(value)
    if not op.operands:
        return None
    if op.has(View):
        return op.operands[min(value.index, len(op.operands) - 1)]
    slot = op.definition.reuses(op, value.index)
    return None if slot is None else op.operands[slot]


def updated(value: Value) -> Value | None:
    """The value that a result of an op with a region updates in place, slice by slice or microbatch
    by microbatch: an operand, or a value from outside of the region. None if the result has a
    buffer of its own."""
    op = value.producer
    inner = op.body.terminator.operands[value.index] if op is not None else None
    while op is not None and inner is not None and inner.region is op.region:
        made = inner.producer
        if made is None:
            return op.operands[inner.index] if inner.index >= carried(op) else None
        if made.region is not None:
            inner = updated(inner)
        else:
            place = made.definition.trait(InPlace)
            slots = place.operands if place is not None and made.operands else ()
            inner = made.operands[slots[inner.index]] if slots else None
    return inner


def _hands_on(op: Operation) -> bool:
    """Whether the values that the region of an op yields share the buffers of its results."""
    return op.has(Accumulates) or isinstance(op.definition, ActionOp)


#: Phases after forward that use the stash.
_LATER = frozenset({"backward", "gradient", "recompute"})


@dataclass(slots=True)
class Sets:
    """The roots of buffers that are not transient: `static` ones with which a step starts, its
    `gradients` and its `stash`. Gradients that are `freed` between steps exist from backward on,
    and sums of unreduced ones until these are reduced."""

    static: set[Value] = field(default_factory=set[Value])
    gradients: set[Value] = field(default_factory=set[Value])
    freed: set[Value] = field(default_factory=set[Value])
    stash: set[Value] = field(default_factory=set[Value])


def classify(body: Region, roots: Roots | None = None) -> Sets:
    """Sort the values of a function: arguments are static, values that the optimizer takes from
    backward are gradients, values that backward takes from forward are the stash."""
    root_of = roots or Roots()
    sets = Sets(static=set(body.args))
    made = sets.freed if body.owner.flag("freed") else sets.gradients
    consumed = body.owner.flag("consumed")
    for region in step_regions(body):
        for op in region.ops:
            if op.has(Accumulates):
                sums = [r for r in op.results if joined_dim(op, r.tensor) is None]
                ends = body.owner.flag("freed") or body.owner.flag("copied")
                freed = {r for r in sums if ends and r.tensor.rank}
                whole = {r for r in freed if _users(r, body) <= _LATER}
                if "schedule" in op.attrs:
                    sets.freed |= {root_of(r) for r in freed - whole}
                    whole = freed
                sets.gradients |= {root_of(r) for r in sums if r.tensor.rank and r not in whole}
                joined = (r for r in op.results if r not in sums and _users(r, body) & _LATER)
                sets.stash |= {root_of(r) for r in joined}
                continue
            for value in op.results:
                users = _users(value, body)
                later = users & _LATER
                if op.phase == "forward" and later and not is_gathered(value):
                    sets.stash.add(root_of(value))
                elif op.phase != "optimizer" and "optimizer" in users and not consumed:
                    made.add(root_of(value))
    for value in body.terminator.operands:  # updates are in the buffers of what they replace
        if value.producer is not None and value.producer.phase == "optimizer":
            sets.static.add(root_of(value))
    sets.stash -= sets.static
    sets.freed -= sets.gradients  # sums over microbatches
    return sets


def _users(value: Value, body: Region) -> set[str]:
    """The phases of the users of a value, without the terminator of the function."""
    end = body.terminator
    return {u.phase for u, _ in value.uses if u is not end}


def is_sum(value: Value) -> bool:
    """Whether a value is a gradient that microbatches have added up."""
    op = value.producer
    added = op is not None and op.has(Accumulates) and joined_dim(op, value.tensor) is None
    return added and value.tensor.rank > 0


def is_gathered(value: Value) -> bool:
    """Whether a value consists of parameters that were gathered or copied from the host, or is a
    stack of such values."""
    op = value.producer
    if op is None:
        return False
    if op.region is not None:
        return is_gathered(op.region.terminator.operands[value.index])
    brings = isinstance(op.definition, Collective) or op.has(CopiesMemory)
    return brings and bool(op.operands) and all(map(is_parameter, op.operands))


def step_regions(body: Region) -> list[Region]:
    """The region of a function and that of its accumulation, if there is one."""
    inner = [op.body for op in body.ops if op.region is not None and not op.has(Repeats)]
    return [body, *(r for region in inner for r in step_regions(region))]


def last_users(body: Region, roots: Roots) -> dict[Region, dict[Value, Operation]]:
    """For a region and each region inside it: the last op of the region that uses each buffer which
    was made in it or carried into it."""
    users: dict[Region, dict[Value, Operation]] = {}
    _note_users(body, roots, users)
    return users


def _note_users(
    region: Region, roots: Roots, users: dict[Region, dict[Value, Operation]]
) -> Iterable[Value]:
    """Note the last users in a region and inside it. Returns the values that are read there and
    come from outside, or are in a buffer from outside."""
    last: dict[Value, Operation] = {}
    outer: dict[Value, None] = {}
    for op in region.ops:
        for value in op.results:
            last[roots(value)] = op
        inner = () if op.region is None else _note_users(op.region, roots, users)
        for value in (*op.operands, *inner):
            root = roots(value)
            is_own, in_own = value.region is region, root.region is region
            if is_own or in_own:
                last[root] = op
            if not (is_own and in_own):
                outer[value] = None
    users[region] = last
    return outer


def heirs(value: Value) -> Iterator[Value]:
    """The values that hold all of this one unchanged: stacks of which it is a slice, views of its
    full size, and in-place results."""
    for user, index in value.uses:
        if user.has(Terminates):
            owner = user.parent_op
            # a slice of a stack that a repeat makes
            if owner is not None and owner.has(Repeats) and index >= owner.integer("carry", 1):
                yield owner.results[index]
            continue
        is_view, reuses = user.has(View), user.definition.reuses
        for result in user.results:
            takes = is_view or reuses(user, result.index) == index
            if takes and result.tensor.local_bytes == value.tensor.local_bytes:
                yield result


def kept_when_sent(region: Region) -> Iterator[Value]:
    """The values of the previous microbatch that stay in memory while a stage sends."""
    for op in region.walk():
        if isinstance(op.definition, SendOp) and op.flag("stays"):
            yield from op.operands
