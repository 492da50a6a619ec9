"""overlap-batches: splits a step of serving into two half batches; one computes while tokens of the
other are sent to experts."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from string import ascii_lowercase

from stagec.api import (
    Loc,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    TensorType,
    Type,
    Value,
    const,
    error,
    made_by,
    read_strategy,
    symbol,
)
from stagec.ir.clone import Copier, sized
from stagec.ir.rewrite import carried
from stagec.ir.rule import Shape
from stagec.ir.traits import Recasts, Repeats
from stagec.ir.types import CACHED
from stagec.ir_spec.ops.parts import Arrive, Depart
from stagec.ir_spec.strategy.moe import MoeRule

PASS = "overlap-batches"


class OverlapBatches(Pass):
    """Split a step of serving into two half batches, as `stg.moe[two_batches]` states, or into the
    `batches` of a `stg.part[feed_forward]`.

    Values with a batch dimension, including caches, exist twice with half the size; weights exist
    once. In a layer the halves alternate: up to the dispatch of tokens to experts, up to their
    combination, and up to its end. Collectives of one half overlap with the computation of the
    other. With feed-forward apart they alternate where values arrive from the other pod.

    Before:
        stg.strategy @s {
          stg.moe[two_batches]
        }
        stg.func @f(%x: bf16[B, D], %w: bf16[D, F | frozen], %c: bf16[B, F | cache]) -> bf16[B, F] {
          %y = stg.einsum["bd,df->bf"](%x, %w) : bf16[B, F]
          %z = stg.add(%y, %c) : bf16[B, F]
          stg.return(%z)
        }
    After:
        stg.strategy @s {
          stg.moe[two_batches]
        }
        stg.func @f(%x_a: bf16[B/2, D], %x_b: bf16[B/2, D], %w: bf16[D, F | frozen],
            %c_a: bf16[B/2, F | cache], %c_b: bf16[B/2, F | cache])
            -> (bf16[B/2, F], bf16[B/2, F]) {
          %y_a = stg.einsum["bd,df->bf"](%x_a, %w) : bf16[B/2, F]
          %z_a = stg.add(%y_a, %c_a) : bf16[B/2, F]
          %y_b = stg.einsum["bd,df->bf"](%x_b, %w) : bf16[B/2, F]
          %z_b = stg.add(%y_b, %c_b) : bf16[B/2, F]
          stg.return(%z_a, %z_b)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).in_turn > 1

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        loc = strategy.one(MoeRule).loc
        overlap_batches(module, strategy.batch, loc, strategy.in_turn)


def overlap_batches(module: Module, batch: str, loc: Loc, count: int = 2) -> None:
    """Replace the main function by one of `count` parts of the batch, of equal size.

    Raises `DiagnosticError` for a step of training, and for a function without the batch dimension.
    """
    func = module.main
    ends = any(isinstance(op.definition, Arrive) for op in func.body.walk())
    if not ends and not any(a.tensor.role in CACHED for a in func.body.args):
        raise error(
            "two half batches need a step of serving, but this step has no caches",
            loc,
            remedy="add --serve, or leave stg.moe[two_batches] out (--two-batch-overlap)",
        )
    if not ends and not any(_has(a, batch) for a in func.body.args):
        raise error(
            f"no argument has the dimension {batch}, so the batch cannot be halved",
            loc,
            remedy="leave stg.moe[two_batches] out (--two-batch-overlap)",
        )
    halves = _Halves(batch, count)
    new = Operation(func.definition, (), func.attrs, symbol=func.symbol, loc=func.loc)
    region = new.make_region()
    for arg in func.body.args:
        halves.argument(arg, region)
    halves.body(func.body, region)
    region.returns = tuple(t for each in func.body.returns for t in halves.types(each))
    root = module.root.body
    root.insert(func.position(), new)
    root.ops.remove(func)


class _EndCopier(Copier):
    """A copier after which a value that crosses between pods has the name of the part."""

    def copy(self, op: Operation) -> Operation:
        """A copy of an operation, in no region yet."""
        made = super().copy(op)
        if isinstance(made.definition, Arrive | Depart):
            made.attrs["value"] = self.named(made.text("value"))
        return made


class _Halves:
    """Copies ops and values with the batch once for each half, or each of `count` parts, all others
    once for all."""

    def __init__(self, batch: str, count: int) -> None:
        self._batch = batch
        self._sizes = {batch: symbol(batch) / const(count)}
        self._copiers = tuple(
            _EndCopier({}, self._sizes, f"{{}}_{part}".format, partial(made_by, PASS))
            for part in islice(ascii_lowercase, count)
        )

    def argument(self, arg: Value, region: Region) -> None:
        """Add an argument for each half, or one for both."""
        if not _has(arg, self._batch):
            self._keep(arg, region.add_arg(arg.name, arg.type, arg.loc))
            return
        for copier in self._copiers:
            type_ = sized(arg.type, self._sizes)
            copier.values[arg] = region.add_arg(copier.named(arg.name), type_, arg.loc)

    def types(self, type_: Type) -> list[Type]:
        """The types of the copies of a value of a type."""
        if not isinstance(type_, TensorType) or not _mentions(type_, self._batch):
            return [type_]
        return [type_.substitute(self._sizes)] * len(self._copiers)

    def body(self, old: Region, new: Region) -> None:
        """Copy the operations of a region; segments of both halves alternate."""
        *ops, end = old.ops
        for segment in _segments(ops):
            for half, copier in enumerate(self._copiers):
                for op in segment:
                    if op.has(Repeats):
                        if not half:
                            self._repeat(op, new)
                    elif any(_has(v, self._batch) for v in (*op.operands, *op.results)):
                        new.append(copier.copy(op))
                    elif not half:
                        self._once(op, new)
        operands = [v for value in end.operands for v in self._values(value)]
        new.append(Operation(end.definition, operands, end.attrs, loc=end.loc))

    def _once(self, op: Operation, new: Region) -> None:
        copier = Copier(dict(self._copiers[0].values), {}, str, lambda loc: loc)
        new.append(copier.copy(op))
        for result in op.results:
            self._keep(result, copier.values[result])

    def _repeat(self, op: Operation, new: Region) -> None:
        operands = [v for value in op.operands for v in self._values(value)]
        count = sum(len(self._values(value)) for value in op.operands[: carried(op)])
        attrs = {**op.attrs, "carry": const(count)}
        made = Operation(op.definition, operands, attrs, symbol=op.symbol, loc=op.loc)
        region = made.make_region()
        for arg in op.body.args:
            self.argument(arg, region)
        self.body(op.body, region)
        for result in op.results:
            if not _has(result, self._batch):
                self._keep(result, made.add_result(result.name, result.type, result.loc))
                continue
            for copier in self._copiers:
                name, type_ = copier.named(result.name), sized(result.type, self._sizes)
                copier.values[result] = made.add_result(name, type_, result.loc)
        new.append(made)

    def _values(self, value: Value) -> list[Value]:
        """The copies of a value: one for each half, or one for both."""
        return list(dict.fromkeys(copier.values[value] for copier in self._copiers))

    def _keep(self, old: Value, new: Value) -> None:
        for copier in self._copiers:
            copier.values[old] = new


def _segments(ops: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Segments of operations. A segment ends after ops that dispatch rows to experts and casts of
    these rows, and before ops that combine rows; operations that do not need the combined rows,
    such as shared experts, come before the cut. If values arrive from another pod, segments end
    before these arrivals instead. Each repeat is a segment."""
    segment: list[Operation] = []
    waiting, dealt = list(ops), set[Value]()
    ends = any(isinstance(op.definition, Arrive) for op in ops)
    while waiting:
        op = waiting.pop(0)
        deals, takes = (False, isinstance(op.definition, Arrive)) if ends else _of_rows(op)
        if takes or op.has(Repeats) or (dealt and not _casts(op, dealt)):
            yield segment
            segment, dealt = [], set[Value]()
        if takes:
            later = _users(op, waiting)
            yield [other for other in waiting if other not in later]
            waiting = later
        segment.append(op)
        if deals or dealt:
            dealt.update(op.results)
        if op.has(Repeats):
            yield segment
            segment = []
    yield segment


def _casts(op: Operation, values: set[Value]) -> bool:
    return op.has(Recasts) and op.operands[0] in values


def _users(first: Operation, ops: Sequence[Operation]) -> list[Operation]:
    """Those of the operations that depend on the results of the first one."""
    made, users = set(first.results), list[Operation]()
    for op in ops:
        if not made.isdisjoint(op.reads()):
            made.update(op.results)
            users.append(op)
    return users


def _of_rows(op: Operation) -> tuple[bool, bool]:
    """Whether an op dispatches rows (numbers rows of a result by tokens), and whether it combines
    them (numbers rows of an operand by tokens)."""
    rule = op.definition.rule(op) if op.region is None else None
    if rule is None or not rule.numbered:
        return False, False

    def joins(side: Sequence[Shape]) -> bool:
        groups = (group for shape in side for group in shape if len(group) > 1)
        return any(not rule.numbered.isdisjoint(group) for group in groups)

    return joins(rule.results), joins(rule.operands)


def _has(value: Value, batch: str) -> bool:
    return isinstance(value.type, TensorType) and _mentions(value.type, batch)


def _mentions(type_: TensorType, batch: str) -> bool:
    return any(batch in d.size.symbols for d in type_.dims)
