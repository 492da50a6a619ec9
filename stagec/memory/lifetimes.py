"""Lifetimes: one step of a rank in program order, with the buffers that each operation makes and
uses.

A buffer lives from the operation that makes it to the last one that uses it, however it is named in
between: views, slices of a stack and in-place results are the buffer that they are of. Repeats run
abstractly: the first and last iterations by themselves, and one for all between them, which differ
from it by what they leave on the stacks only; so the bytes between grow or fall evenly and are
never above those of the iterations around. Of microbatches one runs, each action of it once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import ONE, Env, Expr, const, evaluate, expand
from stagec.ir.module import is_parameter
from stagec.ir.replay import EVERY, FIRST, replays
from stagec.ir_spec.ops.comm import Collective
from stagec.ir_spec.ops.pipeline import ActionOp, RecvOp
from stagec.memory.liveness import Sets, classify, root

LATER = frozenset({"backward", "gradient", "recompute", "optimizer"})
_FREES = "stg.free"


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory of one value; `copies` > 1 are those of iterations that are not run one by one.

    `last` is the step of the last use in each part (action) of the step that uses it. A static
    buffer is there before the step and after it.
    """

    value: Value
    copies: Expr = ONE
    static: bool = False
    part: Operation | None = None
    first: int = -1
    last: dict[Operation | None, int] = field(default_factory=dict["Operation | None", int])
    phases: set[str] = field(default_factory=set[str])

    @property
    def size(self) -> Expr:
        """Bytes on one rank."""
        return expand(self.value.tensor.local_bytes * self.copies)

    @property
    def space(self) -> str:
        """The memory that it is in."""
        return self.value.tensor.memory

    @property
    def category(self) -> str:
        """What it is there for."""
        op = self.value.producer
        if op is None:
            return "activations"
        collective = isinstance(op.definition, Collective)
        if collective and all(map(is_parameter, op.operands)):
            return "gathered weights"
        if (op.phase == "forward" and self.phases & LATER) or len({*self.last, self.part}) > 1:
            return "stash"
        if collective or isinstance(op.definition, RecvOp):
            return "communication"
        return CATEGORY_OF_PHASE.get(op.phase, "activations")


CATEGORY_OF_PHASE: Mapping[str, str] = {
    "backward": "activation gradients",
    "recompute": "recompute",
    "gradient": "unreduced gradients",
    "optimizer": "update",
}
#: Of all buffers that are not static, in the order in which they are shown.
CATEGORIES = (
    "stash",
    "gathered weights",
    "communication",
    "activations",
    "recompute",
    *(c for c in CATEGORY_OF_PHASE.values() if c != "recompute"),
)

Ref: TypeAlias = "Buffer | tuple[Ref, ...] | None"


@dataclass(slots=True)
class Step:
    """One operation as it runs: `part` is the action that it belongs to.

    In one without `counts` nothing runs: it stands for the iterations that are left out.
    """

    op: Operation
    part: Operation | None
    made: list[Buffer]
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Slice:
    """An iteration of a repeat, or `copies` alike ones: `index` is the number of (the first)."""

    index: int
    copies: Expr = ONE


@dataclass(slots=True)
class Lifetimes:
    """The steps of a function, and every buffer that is not static."""

    steps: list[Step] = field(default_factory=list[Step])
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    scheduled: int | None = None  # the step at which the actions of a schedule run


def lifetimes(body: Region, env: Env, prefetch: int = 1, *, whole: bool = False) -> Lifetimes:
    """Run a function once. Sizes that `env` does not tell stay open: a repeat is then taken to be
    long. `prefetch` is how many iterations ahead parameters are gathered. With `whole` every
    iteration runs by itself; raises `UnboundError` if their number is open."""
    runner = _Runner(body, env, prefetch, whole=whole)
    runner.run(body)
    return runner.found


# -- iterations ------------------------------------------------------------------------------------


def slices(count: Expr, env: Env, edge: int, first: int = 0, every: int = 1) -> tuple[Slice, ...]:
    """The iterations of a repeat that run by themselves, `edge` periods at either end, and between
    them one period for all others. From iteration `first` on all are alike but for a pattern of
    `every`, as they are before it."""
    known = count.symbols <= env.keys()
    number = evaluate(count, env) if known else first + every * (2 * edge + 2)
    cut = min(first, number)
    head = _segment(0, cut, const(cut), edge, every)
    return (*head, *_segment(cut, number, count - cut, edge, every))


def _segment(start: int, end: int, length: Expr, edge: int, every: int) -> Iterator[Slice]:
    periods = (end - start) // every - 2 * edge
    if periods < 2:
        middle = (start + end) // 2 if length.value is None else -1
        others = length - (end - start - 1)  # of value 1, so that expressions hold for any length
        yield from (Slice(i, others if i == middle else ONE) for i in range(start, end))
        return
    begin = start + (-start) % every + edge * every
    rest = begin + periods * every
    left = length - (begin - start) - max(end - rest, 0)
    yield from (Slice(i) for i in range(start, begin))
    yield from (Slice(i, left / every) for i in range(begin, begin + every))
    yield from (Slice(i) for i in range(rest, end))


def _patterns(body: Region) -> dict[Expr, tuple[int, int]]:
    """For the count of each repeat: from where on iterations are alike, and in which pattern."""
    found: dict[Expr, tuple[int, int]] = {}
    for op in body.walk():
        if op.definition.carries:
            count = op.expr("count")
            first, every = found.get(count, (0, 1))
            found[count] = (
                max(first, op.integer(FIRST, 0)),
                max(every, op.integer(EVERY, 1)),
            )
    return found


# -- running ---------------------------------------------------------------------------------------


class _Runner:
    def __init__(self, body: Region, env: Env, prefetch: int, *, whole: bool = False) -> None:
        self.found = Lifetimes()
        self._env, self._prefetch, self._whole = env, prefetch, whole
        self._sets: Sets = classify(body)
        self._patterns = _patterns(body)
        self._refs: dict[Value, Ref] = {}
        self._part: Operation | None = None
        self._replays = True
        self._kept: dict[tuple[int, str], list[Ref]] = {}
        self._static: dict[Value, Buffer] = {}
        self._sums: dict[Value, Buffer] = {}
        for arg in body.args:
            self._refs[arg] = self._fixed(arg)

    def run(self, body: Region) -> None:
        for op in body.ops[:-1]:
            self._op(op)
        self._use(body.terminator, self._step(body.terminator, (), counts=False))

    def _fixed(self, value: Value) -> Buffer:
        return self._static.setdefault(value, Buffer(value, static=True))

    # -- steps -------------------------------------------------------------------------------------

    def _step(self, op: Operation, made: Sequence[Value], *, counts: bool = True) -> int:
        """A step that makes the buffers of these values."""
        number = len(self.found.steps)
        step = Step(op, self._part, [], counts)
        self.found.steps.append(step)
        for value in made:
            buffer = Buffer(value, part=self._part, first=number, last={self._part: number})
            self._add(step, buffer)
            self._refs[value] = buffer
        return number

    def _add(self, step: Step, buffer: Buffer) -> None:
        step.made.append(buffer)
        self.found.buffers.append(buffer)

    def _use(self, op: Operation, number: int) -> None:
        for value in op.operands:
            for buffer in buffers_of(self._refs.get(value)):
                buffer.last[self._part] = number
                buffer.phases.add(op.phase)

    def _op(self, op: Operation) -> None:
        if op.definition.recalls:
            self._refs[op.result] = self._refs[op.operands[0 if self._replays else 1]]
        elif op.region is not None:
            run = self._repeat if op.definition.carries else self._accumulate
            run(op, op.region)
        elif op.definition.aliases:
            for r in op.results:
                self._refs[r] = self._refs[op.operands[min(r.index, len(op.operands) - 1)]]
        elif op.name != _FREES:
            self._computation(op)

    def _computation(self, op: Operation) -> None:
        made: list[Value] = []
        for value in op.results:
            home, slot = self._home(value), op.definition.reuses(op, value.index)
            if home is not None:
                self._refs[value] = home
            elif slot is not None:
                self._refs[value] = self._refs[op.operands[slot]]
            else:
                made.append(value)
        self._use(op, self._step(op, made))

    def _home(self, value: Value) -> Buffer | None:
        """The static buffer that a value is written to: a gradient, or what an update replaces."""
        base = root(value)
        if base in self._sums:
            return self._sums[base]
        if base in self._sets.gradients or (base in self._sets.static and base.producer):
            return self._fixed(base)
        for user, index in value.uses:
            owner = user.parent_op
            if owner is not None and _is_stacked(user, owner, index):
                return self._home(owner.results[index])
        return None

    # -- repeats -----------------------------------------------------------------------------------

    def _repeat(self, op: Operation, region: Region) -> None:
        count, carry = op.expr("count"), op.integer("carry", 1)
        order = self._order(count)
        positions = list(range(len(order)))[:: -1 if op.flag("reverse") else 1]
        inputs = [self._refs[v] for v in op.operands]
        carried, outer, made = inputs[:carry], self._replays, dict[int, list[Ref]]()
        gathers = [o for o in region.ops if _is_ahead(o)]
        ready: list[dict[Value, Ref]] = []
        pending: list[_Turn] = []
        for turn, position in enumerate(positions):
            start = len(self.found.steps)
            self._refs.update(zip(region.args, carried, strict=False))
            self._bind(region.args[carry:], inputs[carry:], position)
            while len(ready) < min(turn + self._prefetch + 1, len(positions)):
                ready.append(self._gather(gathers, len(ready)))
            self._refs.update(ready[turn])
            self._replays = replays(op, order[position].index)
            self._region(region, gathers)
            self._keep(gathers, len(positions) - turn)
            yielded = [self._refs[v] for v in region.terminator.operands]
            carried, made[position] = yielded[:carry], yielded[carry:]
            if order[position].copies != 1:
                slots = [r[position] for r in inputs[carry:] if isinstance(r, tuple)]
                pending.append(_Turn(position, start, order[position].copies - 1, slots))
            elif pending:
                self._others(op, pending, made)
                pending = []
        if pending:
            self._others(op, pending, made)
        self._replays = outer
        stacks = (tuple(made[p][k] for p in sorted(made)) for k in range(len(op.results) - carry))
        self._refs.update(zip(op.results, [*carried, *stacks], strict=True))

    def _order(self, count: Expr) -> tuple[Slice, ...]:
        if self._whole:
            return tuple(map(Slice, range(evaluate(count, self._env))))
        return slices(count, self._env, 2 + self._prefetch, *self._patterns[count])

    def _bind(self, args: Sequence[Value], inputs: Sequence[Ref], position: int) -> None:
        for arg, ref in zip(args, inputs, strict=True):
            slot = ref[position] if isinstance(ref, tuple) else ref
            self._refs[arg] = slot[0] if isinstance(slot, _Many) else slot

    def _region(self, region: Region, skip: Sequence[Operation]) -> None:
        for op in region.ops[:-1]:
            if op in skip:
                continue
            if self._replays or op.phase != "recompute":
                self._op(op)
            else:
                self._refs.update(dict.fromkeys(op.results))

    def _gather(self, gathers: Sequence[Operation], turn: int) -> dict[Value, Ref]:
        """Gather the parameters of a later iteration, unless forward has left them."""
        for op in gathers:
            if turn < op.integer("kept", 0):
                for operand, result in zip(op.operands, op.results, strict=True):
                    self._refs[result] = self._kept[self._key(operand, result)][-1 - turn]
            else:
                self._computation(op)
        return {r: self._refs[r] for op in gathers for r in op.results}

    def _keep(self, gathers: Sequence[Operation], left: int) -> None:
        for op in gathers:
            if left <= op.integer("keep", 0):
                for operand, result in zip(op.operands, op.results, strict=True):
                    self._kept.setdefault(self._key(operand, result), []).append(self._refs[result])

    def _key(self, operand: Value, result: Value) -> tuple[int, str]:
        return id(self._refs[operand]), str(result.type)

    def _others(self, op: Operation, turns: Sequence[_Turn], made: dict[int, list[Ref]]) -> None:
        """The iterations that those of `turns` stand for: what they take from the stacks and what
        they leave there."""
        number = self._step(op, (), counts=False)
        for turn in turns:
            twins: dict[Buffer, Buffer] = {}
            for slot in turn.slots:
                if isinstance(slot, _Many):
                    twins.update(zip(buffers_of(slot[0]), buffers_of(slot[1:]), strict=True))
            for buffer, twin in twins.items():
                if buffer.last.get(self._part, -1) >= turn.start:
                    twin.last[self._part] = number
                    twin.phases |= buffer.phases
            made[turn.position] = [
                self._with_twins(r, turn.others, number, twins) for r in made[turn.position]
            ]

    def _with_twins(self, ref: Ref, copies: Expr, number: int, twins: dict[Buffer, Buffer]) -> Ref:
        """A slot that holds, beside what one iteration has left, what the others have left."""
        for buffer in buffers_of(ref):
            if buffer not in twins:
                size = expand(copies * buffer.copies)
                last = {self._part: number}
                twins[buffer] = Buffer(buffer.value, size, False, self._part, number, last)
                self._add(self.found.steps[number], twins[buffer])
        return _Many((ref, *(twins[b] for b in buffers_of(ref))))

    # -- microbatches ------------------------------------------------------------------------------

    def _accumulate(self, op: Operation, region: Region) -> None:
        """One microbatch, or each action of it; the sums are there from the start."""
        number = self._step(op, [r for r in op.results if self._home(r) is None])
        sums = self.found.steps[number].made
        self._sums.update((b.value, b) for b in sums)
        self._refs.update((r, self._home(r)) for r in op.results)
        for arg, value in zip(region.args, op.operands, strict=True):
            self._refs[arg] = self._refs[value]
        outer = list(self.found.buffers)
        if "schedule" in op.attrs:
            self.found.scheduled = number
        for inner in region.ops[:-1]:
            if isinstance(inner.definition, ActionOp):
                self._action(inner)
            else:
                self._op(inner)
        end = self._step(op, (), counts=False)
        for buffer in outer:
            if (
                buffer in sums
                or any(part is not None for part in buffer.last)
                or buffer.last[None] > number
            ):
                buffer.last = {None: end}

    def _action(self, op: Operation) -> None:
        self._part = op
        self._region(op.body, ())
        for result, value in zip(op.results, op.body.terminator.operands, strict=True):
            self._refs[result] = self._refs[value]
        self._part = None


class _Many(tuple["Ref", ...]):
    """A slot of several iterations: what the one that runs sees, then the rest."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Turn:
    """An iteration that stands for `others` as well: where it began, and what it takes."""

    position: int
    start: int
    others: Expr
    slots: Sequence[Ref]


def _is_stacked(user: Operation, repeat: Operation, index: int) -> bool:
    """Whether what is used at `index` is a slice of a stack that a repeat makes."""
    ends = user.definition.ends_region and repeat.definition.carries
    return ends and index >= repeat.integer("carry", 1)


def _is_ahead(op: Operation) -> bool:
    """Whether a repeat issues the op iterations ahead: a gather of parameters."""
    return (
        isinstance(op.definition, Collective)
        and bool(op.operands)
        and all(map(is_parameter, op.operands))
    )


def buffers_of(ref: Ref) -> Iterator[Buffer]:
    """All buffers of a value that are not static."""
    if isinstance(ref, Buffer):
        if not ref.static:
            yield ref
    elif ref is not None:
        for inner in ref:
            yield from buffers_of(inner)
