"""apply-strategy: turns the statements of a strategy into pinned placements and assumptions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stagec.api import (
    AxisUse,
    Builder,
    DiagnosticList,
    Dim,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    TensorType,
    Value,
    axis_size,
    const,
    error,
    made_by,
    symbol,
)
from stagec.ir.bind import drop_axes
from stagec.ir.expr import numerator_and_denominator
from stagec.ir.infer import forget_types, infer_op
from stagec.ir.traits import Repeats
from stagec.passes.strategy.eight_bits import use_eight_bits
from stagec.passes.strategy.expert_sizes import size_experts
from stagec.passes.strategy.naming import check_recompute, check_values, pin
from stagec.passes.strategy.pass_round import pass_round, special_ops
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.stages import cut, read_pipeline
from stagec.sharding.strategy import PipelineRule, SplitRule, Strategy, read_strategy
from stagec.sharding.zero import Sharder


@dataclass(frozen=True)
class ApplyStrategy(Pass):
    """Turn the statements of the module's `stg.strategy` into placements, assumptions and
    microbatches.

    Axes of size 1 vanish. A placement that the model pins wins over the strategy.

    Before:
        stg.mesh @pod[dp = 2]
        stg.strategy @s[mesh = @pod] {
          stg.split[B, over = dp]
        }
        stg.func @f(%x: bf16[B, D]) -> bf16[B, D] {
          stg.return(%x)
        }
    After:
        stg.mesh @pod[dp = 2]
        stg.assume[B % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.split[B, over = dp]
        }
        stg.func @f(%x: bf16[B@dp, D]) -> bf16[B, D] {
          stg.return(%x)
        }
    """

    name = "apply-strategy"
    needs = Phase.SHAPED
    gives = Phase.PLACED

    def run(self, module: Module) -> None:
        apply_strategy(module)


PASS = "apply-strategy"
PIN = "stg.sharding_constraint"


def apply_strategy(module: Module) -> None:
    """Place arguments and carried values as the strategy says, in place.

    Raises `DiagnosticError` for unknown values and for sizes that do not divide.
    """
    _drop_unit_axes(module)
    strategy = read_strategy(module)
    _check_names(module, strategy)
    _Applier(module, strategy).run()


def _drop_unit_axes(module: Module) -> None:
    """Axes of size 1 vanish: from the mesh and from every statement."""
    mesh = module.mesh
    gone = mesh.unit_axes if mesh else frozenset[str]()
    if not gone:
        return
    for op in module.ops("stg.mesh"):
        for axis in gone:
            op.attrs.pop(axis, None)
    for strategy in module.ops("stg.strategy"):
        for op in list(strategy.body.ops):
            drop_axes(op, gone)


def _check_names(module: Module, strategy: Strategy) -> None:
    """Refuse names of meshes and values that there are not; tell of axes without use."""
    problems = DiagnosticList()
    mesh = module.mesh
    axes = mesh.axes if mesh else ()
    for op in module.ops("stg.strategy"):
        wanted = op.text("mesh").lstrip("@")
        if mesh and wanted and wanted != mesh.name:
            problems.error(
                f"the strategy is for mesh @{wanted}, but the mesh is @{mesh.name}",
                op.loc,
                remedy=f"write 'mesh = @{mesh.name}', or give the mesh that name",
            )
    whole = (SplitRule(r.dims, (), False, r.loc, r.of) for r in strategy.whole)
    pipeline = (strategy.pipeline.over,) if strategy.pipeline is not None else ()
    named = (strategy.zero_axes, strategy.deferred, strategy.blocking, pipeline)
    axes_only = (SplitRule((), over, True, strategy.loc) for over in named)
    for rule in (*strategy.splits, *whole, *axes_only):
        _check_rule(rule, problems)
        check_values(rule, module.main.body, problems)
    if strategy.pipeline is not None:
        _check_alone(module, strategy, strategy.pipeline, problems)
    problems.check()
    check_recompute(module, strategy)
    used = {a for rule in strategy.splits for a in rule.over} | set(strategy.zero_axes)
    used |= {a for arg in module.main.body.args for a in arg.tensor.axes}
    used |= {strategy.pipeline.over} if strategy.pipeline is not None else set()
    for axis in (a for a in axes if a not in used):
        module.diagnostics.remark(
            f"no statement uses the axis '{axis}': its ranks all do the same", strategy.loc
        )


def _check_alone(
    module: Module, strategy: Strategy, rule: PipelineRule, problems: DiagnosticList
) -> None:
    """The axis of pipeline stages is used for nothing else."""
    others = [(s.over, s.loc) for s in strategy.splits]
    others += [(strategy.zero_axes, strategy.loc), (strategy.deferred, strategy.loc)]
    others += [(arg.tensor.axes, arg.loc) for arg in module.main.body.args]
    for axes, loc in others:
        if rule.over in axes:
            problems.error(
                f"the axis '{rule.over}' is that of the pipeline stages",
                loc,
                remedy="split over another axis: a stage has its layers whole along this one",
            )


def _check_rule(rule: SplitRule, problems: DiagnosticList) -> None:
    if len(set(rule.over)) < len(rule.over):
        problems.error(
            f"an axis is named twice: {', '.join(rule.over)}", rule.loc, remedy="name it once"
        )


class _Applier:
    def __init__(self, module: Module, strategy: Strategy) -> None:
        self._module, self._strategy = module, strategy
        self._assumptions = Assumptions(module, strategy.loc)
        self._body = module.main.body

    def run(self) -> None:
        dtypes = self._strategy.dtypes
        self._set_dtype(dtypes.param)
        if dtypes.fp8:
            use_eight_bits(self._module, dtypes.fp8, dtypes.loc)
        size_experts(self._module, self._strategy)
        if self._strategy.pipeline is not None:
            self._check_pipeline(self._strategy.pipeline)
        if self._strategy.microbatches > 1 or self._strategy.pipeline is not None:
            self._accumulate()
        for arg in self._body.args:
            arg.type = self._place(arg.tensor, rest=arg.tensor.role == "param", name=arg.name)
        self._shard_parameters()
        if any(rule.rest for rule in self._strategy.splits):
            self._place_carried(self._body)
        self._place_named()
        for name in self._strategy.gathered:
            self._gather(name)
        for name, into in self._strategy.exchanged:
            self._exchange(name, into)
        for ring in self._strategy.rings:
            over = pass_round(self._module, self._strategy, ring)
            if over:  # every rank has two chunks
                self._assumptions.divides(symbol(ring.dim), axis_size(over) * 2, ring.loc)
        self._divide_shares()
        self._assumptions.check()

    def _check_pipeline(self, rule: PipelineRule) -> None:
        """Refuse stages that cannot be before any work; assume that layers of open number
        divide."""
        pipeline = read_pipeline(self._module, rule, self._strategy.microbatches)
        repeats = [op for op in self._body.ops if op.has(Repeats)]
        cut(self._module, pipeline, repeats)
        counts = [op.expr("count") for op in repeats]
        if len(counts) == 1 and not rule.layers and counts[0].symbols - self._module.env.keys():
            self._assumptions.divides(counts[0], const(pipeline.parts), rule.loc)
        if self._strategy.microbatches == 1 and pipeline.stages > 1:
            self._module.diagnostics.remark(
                f"with one microbatch the {pipeline.stages} stages work one after another; a "
                f"pipeline needs several: stg.microbatches[count = {2 * pipeline.stages}]",
                rule.loc,
            )

    def _set_dtype(self, dtype: str) -> None:
        """The model's 16-bit type becomes the strategy's parameter type."""
        if dtype == "bf16":
            return
        for region in _regions(self._body):
            for value in _values(region):
                if isinstance(value.type, TensorType) and value.type.dtype == "bf16":
                    value.type = replace(value.type, dtype=dtype)
            for op in region.ops:
                if op.attrs.get("to") == "bf16":
                    op.attrs["to"] = dtype

    # -- microbatches ------------------------------------------------------------------------------

    def _accumulate(self) -> None:
        """Wrap the body into stg.accumulate; data arguments become those of one microbatch."""
        strategy, body, registry = self._strategy, self._body, self._module.registry
        split = any(strategy.batch in rule.dims for rule in strategy.splits)
        if strategy.batch in self._module.symbols and not split:  # else it is part of that
            parts = const(strategy.microbatches)
            self._assumptions.divides(symbol(strategy.batch), parts, strategy.loc)
        end = body.terminator
        inner = [op for op in body.ops if op is not end]
        data = [a for a in body.args if not a.tensor.role and strategy.batch in _symbols(a.tensor)]
        if not data:
            raise error(
                f"no argument has the dimension {strategy.batch} to be split into microbatches",
                strategy.loc,
                remedy="name the batch symbol: stg.microbatches[count = 2, split = N]",
            )
        builder = Builder(registry, body, 0, loc=made_by(PASS, strategy.loc))
        op = builder.op(
            "stg.accumulate",
            data,
            {"count": strategy.microbatches, "split": strategy.batch},
            types=(),
        )
        region = op.make_region()
        for arg in data:
            inside = region.add_arg(f"{arg.name}_mb", None, arg.loc)
            for user, index in list(arg.uses):
                if user is not op:
                    user.set_operand(index, inside)
        for child in inner:
            body.ops.remove(child)
            region.append(child)
        outputs = end.operands
        region.append(Operation(registry["stg.yield"], outputs, loc=end.loc))
        forget_types(op)
        for value in outputs:
            result = op.add_result(value.name + "_sum", None, value.loc)
            end.set_operand(end.operands.index(value), result)
        problems = DiagnosticList()
        infer_op(op, problems)
        problems.check()

    # -- placements --------------------------------------------------------------------------------

    def _place(self, type_: TensorType, *, rest: bool, name: str = "") -> TensorType:
        """Split dimensions by name. A placement that the model pins wins, then statements that name
        the value; an axis is used once."""
        used = set(type_.axes)
        dims = list(type_.dims)
        whole = {n for rule in self._strategy.whole if name in rule.of for n in rule.dims}
        for rule in sorted(self._strategy.splits, key=lambda r: name not in r.of):
            if name not in rule.of and (rule.of or (rule.rest and not rest)):
                continue
            if not _limited(rule, dims):
                continue
            for i, d in enumerate(dims):
                if not _concerns(rule, d) or used & set(rule.over) or d.size.symbols & whole:
                    continue
                batch = self._strategy.batch == d.size.symbol_name
                parts = self._strategy.microbatches if batch else 1
                over = (*d.axes, *rule.over)
                self._assumptions.divides(d.size, axis_size(over) * parts, rule.loc)
                new = tuple(AxisUse(a, int(rule.soft)) for a in rule.over)
                dims[i] = replace(d, split=d.split + new)
                used |= set(rule.over)
        return replace(type_, dims=tuple(dims), placed=True)

    def _shard_parameters(self) -> None:
        """Shard parameters (ZeRO-3); for the lower stages only assume what their state needs."""
        if not self._strategy.zero:
            return
        sharder = Sharder(self._module, self._strategy, self._assumptions)
        sharded = [(p, sharder.shard(p)) for p in self._module.parameters()]
        sharder.check()
        if self._strategy.zero >= 3:
            for param, type_ in sharded:
                param.type = type_

    def _place_carried(self, region: Region) -> None:
        for op in region.ops:
            if op.region is None:
                continue
            if op.has(Repeats):
                for arg in op.body.args[: op.integer("carry", 1)]:
                    arg.type = self._place(arg.tensor, rest=True, name=arg.name)
            self._place_carried(op.body)

    def _place_named(self) -> None:
        """Pin the values inside the function that statements name; gradients find their own place.

        Carried values get a type, all others a `stg.sharding_constraint`.
        """
        named = {name: rule.loc for rule in self._strategy.whole for name in rule.of}
        named |= {name: rule.loc for rule in self._strategy.splits for name in rule.of}
        inside = [v for region in _regions(self._body) for v in _values(region)]
        for value in inside:
            if value.name not in named or value.owner is self._body:
                continue
            rest = isinstance(value.owner, Region)
            type_ = self._place(value.tensor.unplaced(), rest=rest, name=value.name)
            if isinstance(value.owner, Region) and _is_carried(value):
                value.type = type_
            else:
                pin(self._module.registry, value, type_, made_by(PASS, named[value.name]))

    def _divide_shares(self) -> None:
        """Assume that dimensions divide which are a share of a split one: S*T/E rows of S."""
        values = [v for region in _regions(self._body) for v in _values(region) if v.producer]
        for size in dict.fromkeys(s for v in values for s in v.tensor.shape):
            above, below = numerator_and_denominator(size)
            rules = [r for r in self._strategy.splits if above.symbols & set(r.dims)]
            over = dict.fromkeys(a for r in rules for a in r.over)
            if below.symbols and over:
                self._assumptions.divides(size, axis_size(over), rules[0].loc)

    # -- ops for which a split is special ----------------------------------------------------------

    def _gather(self, name: str) -> None:
        """Pin the operands concerned whole in dimension `name`."""
        found = special_ops(self._body, name)
        if not found:
            self._module.diagnostics.remark(
                f"no op treats a split of {name} in its own way, so there is nothing to gather; "
                f"a value is whole by its name: stg.gather[{name}, of = ...]",
                self._strategy.loc,
            )
        for op, operands in found:
            b = Builder.before(self._module.registry, op, loc=made_by(PASS, op.loc))
            for index in operands:
                value = op.operands[index]
                whole = self._moved(value.tensor, name, ())
                op.set_operand(index, b.value(PIN, [value], type=whole, hint=value.name))

    def _exchange(self, name: str, into: tuple[str, ...]) -> None:
        """Move the split of `name` to the dimensions `into` around the ops concerned."""
        if name in self._strategy.gathered:
            raise error(
                f"{name} is gathered and exchanged, expected one of them",
                self._strategy.loc,
                remedy="keep one of stg.gather and stg.exchange",
            )
        found = special_ops(self._body, name)
        if not found:
            raise error(
                f"no op treats a split of {name} in its own way, so there is nothing to exchange",
                self._strategy.loc,
                remedy="exchange around fused attention; for other models gather: "
                "--cp-mode all-gather",
            )
        for op, operands in found:
            b = Builder.before(self._module.registry, op, loc=made_by(PASS, op.loc))
            everyone = [i for i, v in enumerate(op.operands) if v.tensor.rank > 1]
            for index in everyone if operands else []:
                value = op.operands[index]
                home, moved = self._place(value.tensor.unplaced(), rest=False), value.tensor
                moved = self._moved(moved, name, into)
                here = b.value(PIN, [value], {"both": True}, type=home, hint=value.name)
                op.set_operand(index, b.value(PIN, [here], type=moved, hint=value.name))
            after = Builder.after(self._module.registry, op, loc=made_by(PASS, op.loc))
            result, users = op.results[0], list(op.results[0].uses)
            home = self._place(result.tensor.unplaced(), rest=False)
            moved = self._moved(result.tensor, name, into)
            here = after.value(PIN, [result], {"both": True}, type=moved, hint=result.name)
            back = after.value(PIN, [here], type=home, hint=result.name)
            for user, slot in users:
                user.set_operand(slot, back)

    def _moved(self, type_: TensorType, name: str, into: tuple[str, ...]) -> TensorType:
        """The type as the strategy places it, but with the axes of `name` moved to `into`."""
        placed = self._place(type_.unplaced(), rest=False)
        axes = tuple(use for d in placed.dims if d.size.symbol_name == name for use in d.split)
        dims: list[Dim] = []
        for d in placed.dims:
            if d.size.symbol_name == name:
                dims.append(replace(d, split=()))
            elif d.size.symbol_name in into:
                dims.append(replace(d, split=d.split + axes))
                over = axis_size((*d.axes, *(u.axis for u in axes)))
                self._assumptions.divides(d.size, over, self._strategy.loc)
            else:
                dims.append(d)
        return replace(placed, dims=tuple(dims))


def _is_carried(arg: Value) -> bool:
    owner = arg.region.owner
    return owner.has(Repeats) and arg.index < owner.integer("carry", 1)


def _concerns(rule: SplitRule, d: Dim) -> bool:
    """Whether a rule splits a dimension; one that gives way adds to what splits it already."""
    named = d.size.value is None and bool(d.size.symbols & set(rule.dims))
    return named and (rule.soft or not d.split)


def _limited(rule: SplitRule, dims: Iterable[Dim]) -> bool:
    """Whether a value with these dimensions is one that the rule is limited to."""
    return not rule.only_with or any(d.size.symbols & set(rule.only_with) for d in dims)


def _symbols(type_: TensorType) -> frozenset[str]:
    return frozenset(s for d in type_.dims for s in d.size.symbols)


def _regions(region: Region) -> list[Region]:
    return [region, *(r for op in region.ops if op.region is not None for r in _regions(op.region))]


def _values(region: Region) -> list[Value]:
    return [*region.args, *(r for op in region.ops for r in op.results)]
