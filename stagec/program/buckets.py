"""Buckets: the reduction of gradients in several calls, each issued as soon as its gradients are
complete.

Gradients are added to a bucket in the order in which backward completes them, until the bucket
reaches its size. No gradient is cut, so a bucket may be larger than that; the last one may be
smaller. This is the rule of PyTorch's DDP (`_compute_bucket_assignment_by_size`) and of
Megatron-LM, whose buckets hold gradients of one chunk of the model only, as here.

With layers of (%a: 10, %b: 30 bytes), completed in this order, and buckets of 25 bytes:

    repeat of 2 layers, reversed: L1/%a L1/%b L0/%a L0/%b    then %e: 5 bytes
    buckets:                      [40       ][40       ]     [5]
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

import numpy as np

from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, Env, Expr, buckets, const, evaluate, total
from stagec.ir.layers import LayerStack, LayerTurn, stack_of
from stagec.ir.rewrite import carried
from stagec.ir.traits import Repeats
from stagec.program.nodes import Ints, Node, Ref, Stack, last_node


@dataclass(frozen=True, slots=True)
class GradientRun:
    """Consecutive gradients: those of the operands `parts`, or, inside a `repeat`, the layer's part
    of each of them in every iteration. For a repeat that is in a stack with others, `turns` are the
    iterations."""

    parts: tuple[int, ...]
    repeat: Operation | None = None
    turns: Sequence[LayerTurn] | None = None

    @property
    def times(self) -> Expr:
        """How many times each part occurs."""
        return self.count if self.turns is None else const(len(self.turns))

    @property
    def count(self) -> Expr:
        """The number of layers in each operand."""
        return ONE if self.repeat is None else self.repeat.expr("count")

    def layers(self, times: int) -> Iterator[tuple[int, int]]:
        """For each layer, in the order of execution: its index in the stack and its index in the
        repeat."""
        alone = LayerStack((self.repeat,)) if self.repeat is not None else None
        turns = self.turns if alone is None or self.turns is not None else alone.turns(times)
        yield from ((turn.place, turn.number) for turn in turns or ())


@dataclass(frozen=True, slots=True)
class _Place:
    """The place in the program text where a value is complete: the chunk of the model, the
    positions in nested regions (`path`), and, for a value that a `repeat` yields, the position in
    its body (`inside`)."""

    chunk: int
    path: tuple[int, ...]
    stack: LayerStack | None = None
    repeat: Operation | None = None
    inside: int = -1

    @property
    def run(self) -> tuple[int, tuple[int, ...], bool]:
        """The sort key of runs: values with equal keys belong to one run."""
        return self.chunk, self.path, self.repeat is None


def readiness(op: Operation) -> list[list[GradientRun]]:
    """The operands of a reduction in the order in which they are completed, one list per chunk of
    the model."""
    places = [_place(value) for value in op.operands]
    order = sorted(range(len(places)), key=lambda i: (*places[i].run, places[i].inside))
    runs = [list(mine) for _, mine in groupby(order, key=lambda i: places[i].run)]
    by_chunk = groupby(runs, key=lambda mine: places[mine[0]].chunk)
    return [[run for r in mine for run in _runs(r, places)] for _, mine in by_chunk]


def _runs(numbers: Sequence[int], places: Sequence[_Place]) -> Iterator[GradientRun]:
    """The runs of the operands `numbers`, which are all completed at one place. In a stack of
    several repeats, consecutive layers of one repeat are one run."""
    stack = places[numbers[0]].stack
    if stack is None or stack.order is None:
        yield GradientRun(tuple(numbers), places[numbers[0]].repeat)
        return
    kinds = [tuple(i for i in numbers if places[i].repeat is op) for op in stack.members]
    for member, turns in groupby(stack.turns(0), key=lambda turn: turn.member):
        if kinds[member]:
            yield GradientRun(kinds[member], stack.members[member], tuple(turns))


def _place(value: Value) -> _Place:
    chunk, path = 0, list[int]()
    while (op := value.producer) is not None:
        path.append(op.position())
        if op.region is None or value.index < carried(op):
            break
        inner = op.body.terminator.operands[value.index]
        if op.has(Repeats):
            made, stack = inner.producer, stack_of(op)
            path[-1] = stack.members[0].position()
            inside = -1 if made is None else made.position()
            return _Place(chunk, tuple(path), stack, op, inside)
        chunk = op.integer("chunk", chunk)
        value = inner
    return _Place(chunk, tuple(path))


# -- the order of issue ----------------------------------------------------------------------------


@dataclass(slots=True)
class Bucketed:
    """The calls of a reduction in buckets. `ready[i]` is the node that completes the gradients of
    `nodes[i]`, which is issued right after it."""

    nodes: list[Node]
    ready: list[Node | None]


def with_buckets(order: Ints, buckets: Sequence[tuple[int, int | None]]) -> Ints:
    """Insert each bucket into the order of nodes, right after the node that completes it.

    Nodes are integers; `buckets` are pairs of a bucket and the node that completes it, or None.
    """
    place = np.zeros(int(order.max(initial=0)) + 1, dtype=np.int64)
    place[order] = np.arange(1, len(order) + 1)
    where: list[int] = []
    what: list[int] = []
    for ready, following in completed_by(buckets).items():
        where += [0 if ready is None else int(place[ready])] * len(following)
        what += following
    return np.insert(order, where, what) if what else order


def completed_by(buckets: Sequence[tuple[int, int | None]]) -> dict[int | None, list[int]]:
    """The buckets that follow each node, in order. Those under None are issued first."""
    waiting: dict[int | None, list[int]] = {}
    for bucket, ready in buckets:
        waiting.setdefault(ready, []).append(bucket)
    cut = {bucket for bucket, _ in buckets}
    return {ready: [*_following(ready, waiting)] for ready in waiting if ready not in cut}


def _following(root: int | None, waiting: Mapping[int | None, Sequence[int]]) -> Iterator[int]:
    """The buckets that a node completes, directly or through another bucket."""
    pending = [*reversed(waiting.get(root, ()))]
    while pending:
        bucket = pending.pop()
        yield bucket
        pending += reversed(waiting.get(bucket, ()))


# -- the calls -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """A gradient: the node that completes it, its layer (-1 outside of layers) and its name."""

    node: Node | None
    layer: int
    name: str


def pieces(
    run: GradientRun, refs: Sequence[Ref], names: Sequence[str], times: int
) -> Iterator[BucketPiece]:
    """The gradients of a run in order. `refs` and `names` belong to the operands of the reduction,
    `times` is the value of `run.times`."""
    if run.repeat is None:
        for i in run.parts:
            yield BucketPiece(last_node(refs[i]), -1, names[i])
        return
    for place, layer in run.layers(times):
        for i in run.parts:
            ref = refs[i]
            node = last_node(ref.items[layer]) if isinstance(ref, Stack) else None
            yield BucketPiece(node, place, names[i])


def filled(sizes: Sequence[int], bucket: int) -> Iterator[Sequence[int]]:
    """The sizes of the gradients in each bucket of `bucket` bytes."""
    start = pending = 0
    for end, size in enumerate(sizes, 1):
        pending += size
        if pending >= bucket:
            yield sizes[start:end]
            start, pending = end, 0
    if pending:
        yield sizes[start:]


def bucket_sizes(
    op: Operation, ready: Sequence[Sequence[GradientRun]], env: Env
) -> Iterator[list[Sequence[int]]]:
    """The sizes of the gradients in each bucket of a reduction, in bytes, chunk by chunk of the
    model. `ready` is the result of `readiness`, which does not depend on `env`."""
    sizes = [evaluate(part, env) for part in op.exprs("parts")]
    full = evaluate(op.expr("bucket"), env)
    for runs in ready:
        given: list[int] = []
        for run in runs:
            times, layers = evaluate(run.times, env), evaluate(run.count, env)
            given += [sizes[i] // layers for i in run.parts] * times
        yield list(filled(given, full))


def contents(
    op: Operation, ready: Sequence[Sequence[GradientRun]], env: Env
) -> list[tuple[tuple[Expr, Expr], ...]]:
    """For each bucket of a reduction its gradients: the bytes of each in all layers, and the number
    of layers. Buckets with equal contents have equal sizes, as long as `Filled` is the same."""
    parts = op.exprs("parts")
    buckets: list[tuple[tuple[Expr, Expr], ...]] = []
    for runs, counts in zip(ready, Filled(op, ready)(env), strict=True):
        given: list[tuple[Expr, Expr]] = []
        for run in runs:
            given += [(parts[i], run.count) for i in run.parts] * evaluate(run.times, env)
        gradients = iter(given)
        buckets += [tuple(islice(gradients, count)) for count in counts]
    return buckets


@dataclass(frozen=True, slots=True)
class Filled:
    """A query: how many gradients each bucket of a reduction contains, chunk by chunk of the
    model."""

    op: Operation
    ready: Sequence[Sequence[GradientRun]] = field(compare=False)

    def __call__(self, values: Env) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(len, chunk)) for chunk in bucket_sizes(self.op, self.ready, values))


def label(inside: Sequence[BucketPiece]) -> tuple[str, str]:
    """The scope and the name of a bucket, from its first and last gradient: `L1` and `g_wq.reduce`,
    or `L1..L0` and `g_wk..g_wq.reduce`."""
    first, last = inside[0], inside[-1]
    layers = "..".join(dict.fromkeys(f"L{p.layer}" for p in (first, last) if p.layer >= 0))
    names = first.name if len(inside) == 1 else f"{first.name}..{last.name}"
    return layers, f"{names}.reduce"


def calls(op: Operation) -> Expr:
    """The number of calls of a reduction in buckets."""
    sizes = op.exprs("parts")
    return total(
        buckets(op.expr("bucket"), [(r.times, [sizes[i] / r.count for i in r.parts]) for r in runs])
        for runs in readiness(op)
    )
