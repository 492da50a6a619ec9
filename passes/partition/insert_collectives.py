"""insert-collectives: makes every change of placement an op.

The rule of an op and the placement of its results determine the placement of its operands. Where a
value has another placement, the pass inserts the steps of `Resharding.plan` before the first user.
Later users share them.
"""

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial

from stagec.api import (
    Builder,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Rule,
    TensorType,
    Value,
    factor_sizes,
    is_parameter,
    place_from_operands,
    read_strategy,
)
from stagec.ir.builder import RawAttr
from stagec.ir.module import uncast
from stagec.ir.rewrite import carried
from stagec.ir.traits import FinalGradient, Free, Recalls, Recasts, Repeats
from stagec.ir_spec.ops.comm import AllGather, Collective
from stagec.ir_spec.ops.moe import Dispatch, DispatchWeights
from stagec.ir_spec.strategy.moe import MoeRule
from stagec.ir_spec.strategy.saved_tensors import SavedTensorsRule
from stagec.sharding.assignment import (
    MAKE_PARTS,
    accepted_splits,
    handed_on,
    passing_partial,
    read_assignment,
    untrue_parts,
)
from stagec.sharding.reshard import Axes, CollectiveStep, NoPlanError, Resharding


class InsertCollectives(Pass):
    """Insert the collectives that bring each operand to the placement that its op needs.

    A value that several ops need in the same placement is moved once.

    Before:
        stg.func @f(%x: bf16[B, S, F@tp], %w: bf16[F@tp, D]) {
          %y = stg.einsum["bsf,fd->bsd"](%x, %w) : bf16[B, S, D | sum(tp)]
          %z = stg.gelu(%y) : bf16[B, S, D | rep]
          stg.return(%z)
        }
    After:
        stg.func @f(%x: bf16[B, S, F@tp], %w: bf16[F@tp, D]) {
          %y = stg.einsum["bsf,fd->bsd"](%x, %w) : bf16[B, S, D | sum(tp)]
          %y_r = stg.all_reduce[over = tp](%y) : bf16[B, S, D | rep]
          %z = stg.gelu(%y_r) : bf16[B, S, D | rep]
          stg.return(%z)
        }
    """

    needs = Phase.SHARDED
    gives = Phase.PARTITIONED

    save_gathered: bool = field(
        default=False,
        metadata={"help": "keep for backward what forward gathered, instead of gathering it again"},
    )

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        save = self.save_gathered or strategy.save_gathered
        rows = strategy.one(MoeRule).inputs == "save_gathered"
        insert_collectives(module, save_gathered=save, save_rows=rows)


_Key = tuple[Value, CollectiveStep, str, Region]


def insert_collectives(
    module: Module, *, save_gathered: bool = False, save_rows: bool = False
) -> None:
    """Make placements explicit in all functions, in place.

    With `save_gathered`, backward uses the operand that forward gathered for a split matmul; else
    it gathers it again, but with `save_rows` rows of experts. Values that forward exchanged or
    reduced are always reused. Raises `DiagnosticError` where a placement cannot be reached.
    """
    until = read_strategy(module).one(SavedTensorsRule).until
    again = partial(_gathers_again, save_gathered=save_gathered, save_rows=save_rows)
    for func in module.functions:
        _Inserter(module, save_gathered, save_rows).region(func.body)
        _keep_moved(func.body, again)
        if until == "node":
            _gather_first(func.body)


def _gather_first(region: Region) -> None:
    """Gather the gradients that the backward of a block takes before it computes the block again,
    in place: in PyTorch these gathers are nodes of the graph, before the first that unpacks a saved
    tensor."""
    for op in region.ops:
        if op.region is not None:
            _gather_first(op.region)
    again = (op for op in region.ops if op.phase == "recompute" and not op.has(Free))
    first = next(again, None)
    if first is None:
        return
    taken = {*region.args[: carried(region.owner)]}
    for op in [op for op in region.ops if isinstance(op.definition, AllGather)]:
        if op.position() > first.position() and taken.issuperset(op.operands):
            region.ops.remove(op)
            region.insert(first.position(), op)


class _Inserter:
    def __init__(self, module: Module, save_gathered: bool, save_rows: bool) -> None:
        self._module = module
        self._facts = module.facts
        self._resharding = Resharding.of(module)
        self._deferred = read_strategy(module).deferred
        self._save_gathered, self._save_rows = save_gathered, save_rows
        self._cache: dict[_Key, Value] = {}

    def region(self, region: Region) -> None:
        for op in list(region.ops):
            rule = op.definition.rule(op)
            if rule is not None and rule.operands:
                self._rule_op(op, rule)
            elif op.region is not None:
                self._region_op(op)
        self._terminator(region)

    def _before(self, op: Operation) -> Builder:
        return self._module.before(op, by=InsertCollectives.name)

    # -- required placements -----------------------------------------------------------------------

    def _rule_op(self, op: Operation, rule: Rule) -> None:
        sizes = factor_sizes(op, rule)
        assignment = read_assignment(op, rule, sizes, self._facts, self._deferred)
        alone = handed_on(op, rule, self._deferred)
        for message in untrue_parts(op, rule, assignment, self._deferred):
            raise op.error(f"'{op.name}' {message}", remedy=MAKE_PARTS)
        passing = _passed(op, rule)
        if len(rule.linear) > 2 and not any(rule.operands):
            self._reduce_in_groups(op, passing)
        for i, (value, shape) in enumerate(zip(op.operands, rule.operands, strict=False)):
            handed = passing if i in rule.linear else alone.get(i, ())
            partial = tuple(a for a in value.tensor.partial_axes if a in handed)
            splits = accepted_splits(value.tensor, shape, rule, assignment)
            self._require(op, i, value, splits, partial)
        if op.has(FinalGradient):
            return  # the steps above bring its operand to the placement of its type
        special = {f: assignment[f] for f in sorted(rule.special) if assignment.get(f)}
        if special:
            self._partition(op, special)

    def _partition(self, op: Operation, special: dict[str, Axes]) -> None:
        """Replace an op with a split special factor by the ops of its `partition`."""
        builder = self._before(op)
        builder.finish = lambda new: place_from_operands(new, self._facts)
        new = op.definition.partition(builder, op, special)
        for old, value in zip(op.results, new, strict=False):
            old.replace_with(value)
            value.name = old.name
        op.erase()

    def _region_op(self, op: Operation) -> None:
        region = op.body
        count = carried(op) if op.has(Repeats) else len(op.operands)
        for i, value in enumerate(op.operands[:count]):
            target = region.args[i].tensor
            self._require(op, i, value, [d.axes for d in target.dims], target.partial_axes)
        self.region(region)
        op.infer()

    def _terminator(self, region: Region) -> None:
        owner, end = region.owner, region.terminator
        if owner.has(Repeats):
            targets = [a.tensor for a in region.args[: carried(owner)]]
        else:
            targets = [t for t in region.returns if isinstance(t, TensorType)]
        for i, target in enumerate(targets):
            splits = [d.axes for d in target.dims]
            self._require(end, i, end.operands[i], splits, target.partial_axes)

    # -- moving values -----------------------------------------------------------------------------

    def _require(
        self, op: Operation, index: int, value: Value, splits: Sequence[Axes], partial: Axes
    ) -> None:
        have = value.tensor
        if [d.axes for d in have.dims] == list(splits) and partial == have.partial_axes:
            return
        try:
            steps = self._resharding.plan(have, splits, partial)
        except NoPlanError as e:
            message = f"'{op.name}' needs %{value.name} placed otherwise: {e}"
            raise op.error(message, remedy=MAKE_PARTS) from None
        builder = self._before(op)
        home = value.region if op.parent is None else op.parent
        saves = self._save_gathered or (self._save_rows and _is_dispatched(value))
        keeps = (saves and not op.flag("again")) or is_parameter(uncast(value))
        for step in steps:
            shared = op.phase if step.op == "stg.all_gather" and not keeps else ""
            known = self._existing(value, step, shared, home)
            if known is None:
                known = self._cache[(value, step, shared, home)] = _emit(builder, value, step)
            value = known
        op.set_operand(index, value)

    def _existing(
        self, value: Value, step: CollectiveStep, shared: str, home: Region
    ) -> Value | None:
        """The moved value, if an earlier user in this region or in one around it needed it."""
        region: Region | None = home
        while region is not None:
            known = self._cache.get((value, step, shared, region))
            if known is not None:
                return known
            region = region.owner.parent
        return None

    def _reduce_in_groups(self, op: Operation, passing: Axes) -> None:
        """In a sum of scalars with different unreduced axes, add those with equal axes first, so
        that each such sum is reduced once."""
        groups: dict[Axes, list[Value]] = {}
        for value in op.operands:
            axes = tuple(a for a in value.tensor.partial_axes if a not in passing)
            groups.setdefault(axes, []).append(value)
        if len(groups) < 2 and not any(groups):
            return
        b, hint = self._before(op), f"{op.results[0].name}_part"
        op.set_operands(
            values[0]
            if len(values) == 1
            else b.value(op.name, values, hint=hint, type=values[0].tensor)
            for values in groups.values()
        )


def _emit(b: Builder, value: Value, step: CollectiveStep) -> Value:
    attrs: dict[str, RawAttr] = {"over": step.over}
    if step.op != "stg.all_reduce":
        attrs["dim"] = step.dim if isinstance(step.dim, tuple) else (step.dim,)
    if step.op == "stg.all_to_all":
        attrs["from"] = step.source if isinstance(step.source, tuple) else (step.source,)
    if step.kind == "max":
        attrs["kind"] = "max"
    suffix = {"stg.all_gather": "g", "stg.reduce_scatter": "s", "stg.all_reduce": "r"}
    hint = f"{value.name}_{suffix.get(step.op, 'm')}"
    return b.value(step.op, [value], attrs, hint=hint)


def _passed(op: Operation, rule: Rule) -> Axes:
    """Partial axes that the op passes from operands to results."""
    if not rule.linear or not op.results:
        return ()
    handed = passing_partial(op, rule)
    return tuple(a for a in op.results[0].tensor.partial_axes if a in handed)


def _keep_moved(region: Region, gathers: Callable[[Operation], bool]) -> None:
    """Where backward would move a stashed value again, stash the moved value instead.

    An exchanged or reduced value is not larger, so it is always stashed. A gathered value is
    stashed only if backward does not gather it again.
    """
    for op in region.ops:
        if op.region is not None and op.has(Repeats):
            for index in range(carried(op), len(op.results)):
                while _keep_one(op, index, gathers):
                    pass
        elif op.region is not None:
            _keep_moved(op.region, gathers)


def _keep_one(op: Operation, index: int, gathers: Callable[[Operation], bool]) -> bool:
    """Stash the result of one movement that forward and all users in backward make, including users
    that recall the value because some iterations recompute it. Returns whether a value was
    replaced."""
    end = op.body.terminator
    uses = [(user, slot) for user, slot in op.results[index].uses if user.region is not None]
    args = [user.body.args[slot] for user, slot in uses]
    again = [u for arg in args for u, _ in arg.uses]
    for move, _ in end.operands[index].uses:
        kept = isinstance(move.definition, Collective) and len(move.operands) == 1
        if not again or not kept or gathers(move):
            continue
        if all(_recomputed(u, move) if u.has(Recalls) else _same_move(u, move) for u in again):
            end.set_operand(index, move.result)
            op.results[index].type = move.result.tensor.stacked(op.expr("count"))
            for arg in args:
                arg.type = move.result.tensor
                for u, _ in list(arg.uses):
                    _take_moved(u, move, arg)
            return True
    return False


def _recomputed(recall: Operation, move: Operation) -> Operation | None:
    """The movement of the recomputed operand of a recall, if it precedes all users of the recall
    and these are movements equal to `move`; else None."""
    users = [u for u, _ in recall.result.uses]
    alike = users and all(_same_move(u, move) and u.parent is recall.parent for u in users)
    made = (u for u, _ in recall.operands[0].uses if u.parent is recall.parent)
    moves = [u for u in made if _same_move(u, move)] if alike else []
    first = min((u.position() for u in users), default=0) if moves else 0
    return next((u for u in moves if u.position() < first), None)


def _take_moved(user: Operation, move: Operation, stashed: Value) -> None:
    """Use a stashed value that is moved already instead of a movement, or of a recall with
    movements."""
    moves, value = [user], stashed
    if user.has(Recalls) and (again := _recomputed(user, move)) is not None:
        moves, value = [u for u, _ in user.result.uses], user.result
        value.type = stashed.tensor
        user.set_operand(0, again.result)
        region, first = again.home, min(moves, key=Operation.position)
        region.ops.remove(user)
        region.insert(first.position(), user)
    for each in moves:
        each.result.replace_with(value)
        each.erase()


def _gathers_again(move: Operation, *, save_gathered: bool, save_rows: bool) -> bool:
    """Whether a movement is a gather that backward repeats: for a sharding constraint with `again`,
    or for any split matmul without `save_gathered`, or `save_rows` for one of experts."""
    if not isinstance(move.definition, AllGather):
        return False
    if any(user.flag("again") for user, _ in move.result.uses):
        return True
    return not (save_gathered or (save_rows and _is_dispatched(move.operands[0])))


def _is_dispatched(value: Value) -> bool:
    """Whether a value is what the ranks of experts receive."""
    op = value.producer
    while op is not None and (isinstance(op.definition, Collective) or op.has(Recasts)):
        op = op.operands[0].producer
    return op is not None and isinstance(op.definition, Dispatch | DispatchWeights)


def _same_move(op: Operation, other: Operation) -> bool:
    names = (op.attrs.keys() | other.attrs.keys()) - {"phase"}
    return op.name == other.name and all(op.attrs.get(n) == other.attrs.get(n) for n in names)
