"""Collective insertion: makes every change of placement an op.

Each op says, through its rule and the placement of its results, how it needs its operands; where a
value is placed otherwise, the steps of `reshard.plan` are inserted before its first user and shared
by all later ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Region, Value
from stagec.ir.module import Module, is_parameter
from stagec.ir.opdef import factor_sizes
from stagec.ir.rule import Rule
from stagec.ir.types import TensorType
from stagec.ir_spec.ops.comm import AllGather, AllReduce, Collective, ReduceScatter
from stagec.sharding.assignment import handed_on, read_assignment, required_splits
from stagec.sharding.local import place_from_operands
from stagec.sharding.reshard import Axes, NoPlanError, Step, plan
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import error
from stagec.support.source import made_by

PASS = "insert-collectives"
#: What is kept for backward in any case: the parts of a sum are no smaller than the sum.
_REDUCTIONS = (AllReduce, ReduceScatter)
_Key = tuple[Value, tuple[Axes, ...], Axes, str, Region]


def insert_collectives(module: Module, *, save_gathered: bool = False) -> None:
    """Make placements explicit in all functions, in place.

    With `save_gathered`, what forward gathered for a split matmul is kept for backward, else
    backward gathers again. Raises `DiagnosticError` where a placement cannot be reached.
    """
    for func in module.functions:
        _Inserter(module, save_gathered).region(func.body)
        _keep_moved(func.body, (*_REDUCTIONS, *((AllGather,) if save_gathered else ())))


class _Inserter:
    def __init__(self, module: Module, save_gathered: bool) -> None:
        self._module = module
        self._facts = module.facts
        self._deferred = read_strategy(module).deferred
        self._save_gathered = save_gathered
        self._cache: dict[_Key, Value] = {}

    def region(self, region: Region) -> None:
        for op in list(region.ops):
            rule = op.definition.rule(op)
            if rule is not None and rule.operands:
                self._rule_op(op, rule)
            elif op.region is not None:
                self._region_op(op)
        self._terminator(region)

    # -- what each user needs ----------------------------------------------------------------------

    def _rule_op(self, op: Operation, rule: Rule) -> None:
        sizes = factor_sizes(op, rule)
        assignment = read_assignment(op, rule, sizes, self._facts, self._deferred)
        alone = handed_on(op, rule, self._deferred)
        passing = tuple(a for a in _passed(op, rule))
        if len(rule.linear) > 2 and not any(rule.operands):
            self._reduce_in_groups(op, passing)
        for i, (value, shape) in enumerate(zip(op.operands, rule.operands, strict=False)):
            partial = passing if i in rule.linear else alone.get(i, ())
            self._require(op, i, value, required_splits(shape, assignment), partial)
        if op.definition.collective_phase:
            return  # placed as its type says; the steps above bring its operand there
        special = {f: assignment[f] for f in sorted(rule.special) if assignment.get(f)}
        if special:
            self._partition(op, special)

    def _partition(self, op: Operation, special: dict[str, Axes]) -> None:
        """An op that must be rewritten where a special factor is split."""
        if op.parent is None:
            return
        builder = Builder.before(self._module.registry, op, loc=made_by(PASS, op.loc))
        builder.finish = lambda new: place_from_operands(new, self._facts)
        new = op.definition.partition(builder, op, special)
        for old, value in zip(op.results, new, strict=False):
            old.replace_with(value)
            value.name = old.name
        op.erase()

    def _region_op(self, op: Operation) -> None:
        region = op.body
        carried = op.integer("carry", 1) if op.definition.carries else len(op.operands)
        for i, value in enumerate(op.operands[:carried]):
            target = region.args[i].tensor
            self._require(op, i, value, [d.axes for d in target.dims], target.partial_axes)
        self.region(region)
        for result, type_ in zip(op.results, op.definition.infer(op), strict=True):
            result.type = type_

    def _terminator(self, region: Region) -> None:
        owner, end = region.owner, region.terminator
        if owner.definition.carries:
            targets = [a.tensor for a in region.args[: owner.integer("carry", 1)]]
        else:
            targets = [t for t in region.returns if isinstance(t, TensorType)]
        for i, target in enumerate(targets):
            self._require(
                end, i, end.operands[i], [d.axes for d in target.dims], target.partial_axes
            )

    # -- making it so ------------------------------------------------------------------------------

    def _require(
        self, op: Operation, index: int, value: Value, splits: Sequence[Axes], partial: Axes
    ) -> None:
        have = value.tensor
        keep = tuple(a for a in have.partial_axes if a in partial)
        if [d.axes for d in have.dims] == list(splits) and keep == have.partial_axes:
            return
        phase = op.definition.collective_phase or op.phase
        anyone = self._save_gathered or is_parameter(value) or have.partial is not None
        shared = "" if anyone else phase
        home = value.region if op.parent is None else op.parent
        region: Region | None = home
        while region is not None:  # an earlier user in this region or around it has it already
            found = self._cache.get((value, tuple(splits), keep, shared, region))
            if found is not None:
                op.set_operand(index, found)
                return
            owner = region.owner.parent
            region = owner
        try:
            steps = plan(have, splits, keep)
        except NoPlanError as e:
            raise error(f"'{op.name}' needs %{value.name} placed otherwise: {e}", op.loc) from None
        builder = Builder.before(self._module.registry, op, loc=made_by(PASS, op.loc), phase=phase)
        new = self._emit(builder, value, steps)
        self._cache[(value, tuple(splits), keep, shared, home)] = new
        op.set_operand(index, new)

    def _emit(self, b: Builder, value: Value, steps: Sequence[Step]) -> Value:
        for step in steps:
            attrs: dict[str, RawAttr] = {"over": step.over}
            if step.op != "stg.all_reduce":
                attrs["dim"] = (step.dim,)
            if step.op == "stg.all_to_all":
                attrs["from"] = step.source
            if step.kind == "max":
                attrs["kind"] = "max"
            suffix = {"stg.all_gather": "g", "stg.reduce_scatter": "s", "stg.all_reduce": "r"}.get(
                step.op, "m"
            )
            value = b.value(step.op, [value], attrs, hint=f"{value.name}_{suffix}")
        return value

    def _reduce_in_groups(self, op: Operation, passing: Axes) -> None:
        """A sum of scalars with different unreduced axes: add those that are alike first, reduce
        each sum once."""
        groups: dict[Axes, list[Value]] = {}
        for value in op.operands:
            groups.setdefault(
                tuple(a for a in value.tensor.partial_axes if a not in passing), []
            ).append(value)
        if len(groups) < 2 and not any(groups):
            return
        builder = Builder.before(self._module.registry, op, loc=made_by(PASS, op.loc))
        sums: list[Value] = []
        for values in groups.values():
            one = (
                values[0]
                if len(values) == 1
                else builder.value(
                    op.name, values, hint=f"{op.results[0].name}_part", type=values[0].tensor
                )
            )
            sums.append(one)
        op.set_operands(sums)


def _passed(op: Operation, rule: Rule) -> Axes:
    """Partial axes that the op hands from operands to results."""
    if not rule.linear or not op.results:
        return ()
    result = op.results[0].tensor.partial_axes
    return tuple(
        a for a in result if all(a in op.operands[i].tensor.partial_axes for i in rule.linear)
    )


def _keep_moved(region: Region, kinds: tuple[type[Collective], ...]) -> None:
    """Stash what a collective of these kinds gave in forward where backward would ask for the same
    again."""
    for op in region.ops:
        if op.region is None:
            continue
        if not op.definition.carries:
            _keep_moved(op.region, kinds)
            continue
        for index in range(op.integer("carry", 1), len(op.results)):
            _keep_one(op, index, kinds)


def _keep_one(op: Operation, index: int, kinds: tuple[type[Collective], ...]) -> None:
    end = op.body.terminator
    moves = [
        u
        for u, _ in end.operands[index].uses
        if isinstance(u.definition, kinds) and len(u.operands) == 1
    ]
    for user, slot in list(op.results[index].uses):
        if user.region is None:
            continue
        arg = user.body.args[slot]
        again = [u for u, _ in arg.uses]
        for move in moves:
            if again and all(_same_move(u, move) for u in again):
                end.set_operand(index, move.result)
                op.results[index].type = move.result.tensor.stacked(op.expr("count"))
                arg.type = move.result.tensor
                for u in again:
                    u.result.replace_with(arg)
                    u.erase()
                break


def _same_move(a: Operation, b: Operation) -> bool:
    return a.name == b.name and all(a.attrs.get(n) == b.attrs.get(n) for n in ("dim", "over"))
