"""The iterations of a repeat that run by themselves, and those that stand for others.

With `edge` = 2, of 10 iterations 0, 1 and 8, 9 run by themselves, and 2 runs for 2 to 7. Where
every third iteration is of another kind, three iterations stand for the rest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from stagec.ir.core import Operation, Region
from stagec.ir.expr import ONE, Env, Expr, const, evaluate
from stagec.ir.layers import LayerStack, order_of
from stagec.ir.queries import note, plain
from stagec.ir.recompute_window import EVERY, FIRST
from stagec.ir.traits import EndsLifetime, Repeats
from stagec.memory.buffers import Ref
from stagec.memory.liveness import is_gathered
from stagec.sharding.gathers import ahead_of
from stagec.support.limits import Budget


@dataclass(frozen=True, slots=True)
class IterationRun:
    """An iteration of a repeat, or `copies` equal ones: `index` is the number of the (first)
    iteration."""

    index: int
    copies: Expr = ONE


@dataclass(frozen=True, slots=True)
class Pattern:
    """Iterations before `first` are equal up to a period of `every`, and so are those from `first`
    on."""

    first: int = 0
    every: int = 1


def slices(count: Expr, env: Env, edge: int, pattern: Pattern) -> Iterator[IterationRun]:
    """The iterations of a repeat that run by themselves: `edge` periods at either end, and between
    them one period that stands for all others. A count without a value is assumed to be large."""
    first, every = pattern.first, pattern.every
    number = first + every * (2 * edge + 2)
    if count.symbols <= env.keys():
        number = evaluate(count, plain(env))
        note(Kinds(count, edge, pattern), _kinds(number, edge, pattern), env)
    cut = min(first, number)
    yield from _segment(0, cut, const(cut), edge, every)
    yield from _segment(cut, number, count - cut, edge, every)


@dataclass(frozen=True, slots=True)
class Kinds:
    """A query whose answer is equal for all counts with the same `slices`."""

    count: Expr
    edge: int
    pattern: Pattern

    def __call__(self, values: Env) -> tuple[int, ...]:
        return _kinds(evaluate(self.count, values), self.edge, self.pattern)


def _kinds(number: int, edge: int, pattern: Pattern) -> tuple[int, ...]:
    """For the iterations before and after `first` each: their number, or if they are many, a
    negative number that states the remainder of the last period."""
    cut = min(pattern.first, number)
    lengths = cut, number - cut
    long = [n // pattern.every - 2 * edge >= 2 for n in lengths]
    return tuple(
        -(n % pattern.every) - 1 if more else n for n, more in zip(lengths, long, strict=True)
    )


def _segment(start: int, end: int, length: Expr, edge: int, every: int) -> Iterator[IterationRun]:
    periods = (end - start) // every - 2 * edge
    if periods < 2:
        middle = (start + end) // 2 if length.value is None else -1
        others = length - (end - start - 1)  # its value is 1; the expression holds for any length
        yield from (IterationRun(i, others if i == middle else ONE) for i in range(start, end))
        return
    begin = start + (-start) % every + edge * every
    rest = begin + periods * every
    left = length - (begin - start) - max(end - rest, 0)
    yield from (IterationRun(i) for i in range(start, begin))
    yield from (IterationRun(i, left / every) for i in range(begin, begin + every))
    yield from (IterationRun(i) for i in range(rest, end))


def patterns(body: Region) -> Mapping[Expr, Pattern]:
    """The pattern that all repeats of a count share, because they pass stacks to each other."""
    patterns: dict[Expr, Pattern] = {}
    for op in body.walk():
        if op.has(Repeats):
            count = op.expr("count")
            known = patterns.get(count, Pattern())
            first, every = op.integer(FIRST, 0), op.integer(EVERY, 1)
            patterns[count] = Pattern(max(known.first, first), max(known.every, every))
    return patterns


class RepeatOrders:
    """The iterations of the repeats of a function that run, with `whole` every one. Repeats of one
    count, or of one kind of layers, share them, because they pass stacks to each other."""

    def __init__(self, body: Region, env: Env, whole: bool, budget: Budget) -> None:
        self._env, self._whole, self._budget = env, whole, budget
        self._patterns, self._edge = patterns(body), 2 + most_ahead(body.walk())
        self._known: dict[Expr, Sequence[IterationRun]] = {}

    def of(self, op: Operation) -> Sequence[IterationRun]:
        """The iterations of a repeat. Raises `DiagnosticError` if there are too many."""
        order, count = order_of(op), op.expr("count")
        if order is not None:
            return [IterationRun(i) for i in range(order.counts[op.symbol or ""])]
        if count not in self._known:
            number = evaluate(count, self._env) if self._whole else 0
            runs = slices(count, self._env, self._edge, self._patterns[count])
            every = map(IterationRun, range(number)) if self._whole else runs
            self._known[count] = tuple(self._budget.counted(every))
        return self._known[count]


@dataclass(frozen=True, slots=True)
class SharedIteration:
    """An iteration that also stands for `others` more: the step at which it starts, the slots that
    it takes, and the stacked values of all iterations of its repeat by position."""

    made: dict[int, list[Ref]]
    position: int
    start: int
    others: Expr
    slots: Sequence[Ref]


def turns_of(
    stack: LayerStack, orders: Sequence[Sequence[IterationRun]]
) -> Sequence[tuple[int, int]]:
    """For each layer in execution order: the member of the stack, and the number of its run."""
    return [(turn.member, turn.number) for turn in stack.turns(len(orders[0]))]


def stacked(op: Operation) -> range:
    """The indices of the results that are stacks, counted from the first one after the carried
    values."""
    return range(len(op.results) - op.integer("carry", 1))


def is_ahead(op: Operation) -> bool:
    """Whether a repeat may issue the op some iterations early: it gathers parameters."""
    return op.region is None and any(map(is_gathered, op.results))


def most_ahead(ops: Iterable[Operation]) -> int:
    """The most iterations by which a gather among these operations is early; 1 if there is none."""
    gathers = [op for op in ops if is_ahead(op)]
    return max((0 if op.flag("copied_out") else ahead_of(op) for op in gathers), default=1)


def gathers_behind(steps: Iterable[Operation | LayerStack]) -> Sequence[Operation]:
    """The gathers with a prefetch distance among the steps before the next stack of layers."""
    alone = takewhile(lambda step: isinstance(step, Operation), steps)
    ops = (op for op in alone if isinstance(op, Operation))
    return [op for op in ops if is_ahead(op) and ahead_of(op) > 0]


def saved_first(op: Operation, refs: Sequence[Ref]) -> list[Ref]:
    """The values that the first iteration leaves on the stacks. A value that backward uses only for
    the gradient of the input of that iteration is left out (None) where that gradient is not
    used. Gathered parameters are always there."""
    left, carry = list(refs), op.integer("carry", 1)
    for k, result in enumerate(op.results[carry:]):
        if is_gathered(op.body.terminator.operands[carry + k]):
            continue
        users = [(user, index) for user, index in result.uses if not user.has(EndsLifetime)]
        if users and all(user.flag("first_idle") and not _trains(user, i) for user, i in users):
            left[k] = None
    return left


def _trains(back: Operation, index: int) -> bool:
    """Whether the operand at `index` of a repeat of backward contributes to gradients of
    parameters."""
    body, arg = back.body, back.body.args[index]
    ends = body.terminator.operands[back.integer("carry", 1) :]
    return arg in ends or any(arg in op.reads() for op in body.ancestors(ends))


def is_backward(step: Operation | LayerStack) -> bool:
    """Whether an operation, or a stack of layers, belongs to backward."""
    op = step.members[0] if isinstance(step, LayerStack) else step
    return op.phase == "backward"


def is_beside_loss(step: Operation | LayerStack) -> bool:
    """Whether a gather in a stack states that it overlaps with the loss (`beside_loss`)."""
    stack = step.members if isinstance(step, LayerStack) else ()
    return any(gather.flag("beside_loss") for op in stack for gather in op.body.ops)
