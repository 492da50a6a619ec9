"""Which iterations of a repeat run by themselves, and which stand for others.

With `edge` = 2, of 10 iterations 0, 1 and 8, 9 run by themselves, and 2 runs for 2 to 7. Where
every third one is another kind, three of them stand for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from stagec.ir.core import Operation, Region
from stagec.ir.expr import ONE, Env, Expr, const, evaluate
from stagec.ir.layers import LayerStack
from stagec.ir.queries import note, plain
from stagec.ir.recompute_window import EVERY, FIRST
from stagec.ir.traits import EndsLifetime, Repeats
from stagec.memory.buffers import Ref
from stagec.memory.liveness import is_gathered
from stagec.sharding.gathers import ahead_of


@dataclass(frozen=True, slots=True)
class IterationRun:
    """An iteration of a repeat, or `copies` alike ones: `index` is the number of (the first)."""

    index: int
    copies: Expr = ONE


@dataclass(frozen=True, slots=True)
class Pattern:
    """From iteration `first` on all are alike but for a pattern of `every`, as they are before
    it."""

    first: int = 0
    every: int = 1


def slices(count: Expr, env: Env, edge: int, pattern: Pattern) -> Iterator[IterationRun]:
    """The iterations of a repeat that run by themselves, `edge` periods at either end, and between
    them one period for all others. An open number is taken to be large."""
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
    """Of how many iterations the slices of a count are the same."""

    count: Expr
    edge: int
    pattern: Pattern

    def __call__(self, values: Env) -> tuple[int, ...]:
        return _kinds(evaluate(self.count, values), self.edge, self.pattern)


def _kinds(number: int, edge: int, pattern: Pattern) -> tuple[int, ...]:
    """The number itself, or of many iterations what is left of the last period."""
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
        others = length - (end - start - 1)  # of value 1, so that expressions hold for any length
        yield from (IterationRun(i, others if i == middle else ONE) for i in range(start, end))
        return
    begin = start + (-start) % every + edge * every
    rest = begin + periods * every
    left = length - (begin - start) - max(end - rest, 0)
    yield from (IterationRun(i) for i in range(start, begin))
    yield from (IterationRun(i, left / every) for i in range(begin, begin + every))
    yield from (IterationRun(i) for i in range(rest, end))


def patterns(body: Region) -> Mapping[Expr, Pattern]:
    """The pattern of all repeats of a count: they hand stacks to each other."""
    patterns: dict[Expr, Pattern] = {}
    for op in body.walk():
        if op.has(Repeats):
            count = op.expr("count")
            known = patterns.get(count, Pattern())
            first, every = op.integer(FIRST, 0), op.integer(EVERY, 1)
            patterns[count] = Pattern(max(known.first, first), max(known.every, every))
    return patterns


@dataclass(frozen=True, slots=True)
class SharedIteration:
    """An iteration that stands for `others` as well: where it began, what it takes, and what all of
    its repeat have made."""

    made: dict[int, list[Ref]]
    position: int
    start: int
    others: Expr
    slots: Sequence[Ref]


def turns_of(
    stack: LayerStack, orders: Sequence[Sequence[IterationRun]]
) -> Sequence[tuple[int, int]]:
    """The member and the number of its run of each layer, in the order in which they run."""
    return [(turn.member, turn.number) for turn in stack.turns(len(orders[0]))]


def stacked(op: Operation) -> range:
    """Numbers of the results that are stacks, without what is carried."""
    return range(len(op.results) - op.integer("carry", 1))


def is_ahead(op: Operation) -> bool:
    """Whether a repeat issues the op iterations ahead: a gather of parameters."""
    return op.region is None and any(map(is_gathered, op.results))


def most_ahead(ops: Iterable[Operation]) -> int:
    """How many iterations early the first of the gathers among these is there."""
    gathers = [op for op in ops if is_ahead(op)]
    return max((0 if op.flag("copied_out") else ahead_of(op) for op in gathers), default=1)


def gathers_behind(steps: Iterable[Operation | LayerStack]) -> Sequence[Operation]:
    """The gathers that are issued early among the steps before the next layers."""
    alone = takewhile(lambda step: isinstance(step, Operation), steps)
    ops = (op for op in alone if isinstance(op, Operation))
    return [op for op in ops if is_ahead(op) and ahead_of(op) > 0]


def saved_first(op: Operation, refs: Sequence[Ref]) -> list[Ref]:
    """What the first iteration leaves on the stacks: nothing that backward takes for the gradient
    of its input alone, where nobody takes that."""
    left = list(refs)
    for k, result in enumerate(op.results[op.integer("carry", 1) :]):
        users = [(user, index) for user, index in result.uses if not user.has(EndsLifetime)]
        if users and all(user.flag("first_idle") and not _trains(user, i) for user, i in users):
            left[k] = None
    return left


def _trains(back: Operation, index: int) -> bool:
    """Whether what a loop of backward is given at `index` takes part in gradients of parameters."""
    body, arg = back.body, back.body.args[index]
    ends = body.terminator.operands[back.integer("carry", 1) :]
    return arg in ends or any(arg in op.reads() for op in body.ancestors(ends))


def is_backward(step: Operation | LayerStack) -> bool:
    """Whether an operation, or the layers of a stack, are of backward."""
    op = step.members[0] if isinstance(step, LayerStack) else step
    return op.phase == "backward"


def is_beside_loss(step: Operation | LayerStack) -> bool:
    """Whether the loss is computed beside the blocks of a stack."""
    stack = step.members if isinstance(step, LayerStack) else ()
    return any(gather.flag("beside_loss") for op in stack for gather in op.body.ops)
