"""Puts a model on a mesh: turns the statements of a strategy into pinned placements and
assumptions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from math import gcd

from stagec.ir.builder import Builder
from stagec.ir.core import Attr, Operation, Region, Value
from stagec.ir.expr import Expr, evaluate, total
from stagec.ir.facts import Facts, Relation, divisible
from stagec.ir.infer import infer_op
from stagec.ir.module import Module
from stagec.ir.opdef import factor_sizes
from stagec.ir.types import AxisUse, Dim, TensorType, axis_size
from stagec.sharding.shard import common_dimensions, shard_at_rest
from stagec.sharding.strategy import SplitRule, Strategy, read_strategy
from stagec.support.diagnostics import DiagnosticList, did_you_mean, error
from stagec.support.source import Loc, NameLoc, made_by
from stagec.transform.naming import check_recompute, check_values, pin

PASS = "apply-strategy"


def apply_strategy(module: Module) -> None:
    """Place arguments and carried values as the strategy says, in place.

    Raises `DiagnosticError` for unknown axes or dimensions and for sizes that do not divide.
    """
    _drop_unit_axes(module)
    strategy = read_strategy(module)
    _check_names(module, strategy)
    _Applier(module, strategy).run()


def _drop_unit_axes(module: Module) -> None:
    """Axes of size 1 vanish: from the mesh and from every statement."""
    mesh = module.mesh
    gone = {a for a, n in mesh.sizes.items() if n == 1} if mesh else set[str]()
    if not gone:
        return
    for op in module.ops("stg.mesh"):
        for axis in gone:
            op.attrs.pop(axis, None)
    for strategy in module.ops("stg.strategy"):
        for op in list(strategy.body.ops):
            over = op.names("over")
            kept = tuple(a for a in over if a not in gone)
            if over and not kept:
                op.erase()
            elif over:
                op.attrs["over"] = kept


def _check_names(module: Module, strategy: Strategy) -> None:
    """Refuse names of meshes, dimensions and axes that there are not; tell of axes without use."""
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
    named = (strategy.zero_axes, strategy.deferred, strategy.blocking)
    axes_only = (SplitRule((), over, True, strategy.loc) for over in named)
    for rule in (*strategy.splits, *whole, *axes_only):
        _check_rule(rule, axes, module.symbols, problems)
        check_values(rule, module.main.body, problems)
    problems.check()
    check_recompute(module, strategy)
    used = {a for rule in strategy.splits for a in rule.over} | set(strategy.zero_axes)
    used |= {a for arg in module.main.body.args for a in arg.tensor.axes}
    for axis in (a for a in axes if a not in used):
        module.diagnostics.remark(
            f"no statement uses the axis '{axis}': its ranks all do the same", strategy.loc
        )


def _check_rule(
    rule: SplitRule, axes: tuple[str, ...], symbols: Iterable[str], problems: DiagnosticList
) -> None:
    known = list(symbols)
    for name in rule.dims:
        if name not in known:
            problems.error(
                f"the model has no dimension '{name}'",
                rule.loc,
                remedy=did_you_mean(name, known) or f"its symbols are: {', '.join(known)}",
            )
    if len(set(rule.over)) < len(rule.over):
        problems.error(
            f"an axis is named twice: {', '.join(rule.over)}", rule.loc, remedy="name it once"
        )
    for axis in rule.over:
        if axis not in axes:
            problems.error(
                f"the mesh has no axis '{axis}'",
                rule.loc,
                remedy=did_you_mean(axis, axes) or f"its axes are: {', '.join(axes) or 'none'}",
            )


class _Applier:
    def __init__(self, module: Module, strategy: Strategy) -> None:
        self._module, self._strategy = module, strategy
        self._assumptions = Assumptions(module, strategy.loc)
        self._body = module.main.body

    def run(self) -> None:
        self._set_dtype(self._strategy.dtypes.param)
        if self._strategy.microbatches > 1:
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
        self._assumptions.check()

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
        self._forget_types(region)
        for value in outputs:
            result = op.add_result(value.name + "_sum", None, value.loc)
            end.set_operand(end.operands.index(value), result)
        problems = DiagnosticList()
        infer_op(op, problems)
        problems.check()

    @staticmethod
    def _forget_types(region: Region) -> None:
        """Sizes change inside: all types that are not pinned are inferred again."""
        for inner in _regions(region):
            for value in _values(inner):
                if isinstance(value.type, TensorType) and not value.type.placed:
                    value.type = None

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
            for i, d in enumerate(dims):
                if not _concerns(rule, d) or used & set(rule.over) or d.size.symbols & whole:
                    continue
                batch = self._strategy.batch == d.size.symbol_name
                parts = self._strategy.microbatches if batch else 1
                over = (*d.axes, *rule.over)
                self._assumptions.divides(d.size, axis_size(over) * parts, rule.loc)
                new = tuple(AxisUse(a, int(rule.rest)) for a in rule.over)
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
            if op.definition.carries:
                for arg in op.body.args[: op.integer("carry", 1)]:
                    arg.type = self._place(arg.tensor, rest=True, name=arg.name)
            self._place_carried(op.body)

    def _place_named(self) -> None:
        """Pin the values inside the function that statements name; gradients find their own place.

        Carried values get a type, all others a `stg.place`.
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

    # -- ops for which a split is special ----------------------------------------------------------

    def _special(self, region: Region, name: str) -> list[tuple[Operation, list[int]]]:
        """Ops with a special factor of this size, and the operands that have it."""
        found: list[tuple[Operation, list[int]]] = []
        for op in region.ops:
            if op.region is not None:
                found += self._special(op.region, name)
                continue
            rule = op.definition.rule(op)
            if rule is None or not rule.special:
                continue
            sizes = factor_sizes(op, rule)
            operands = [
                i
                for f in sorted(rule.special)
                if sizes[f].symbol_name == name
                for i, _ in rule.occurrences(f)
            ]
            if operands:
                found.append((op, operands))
        return found

    def _gather(self, name: str) -> None:
        """Pin the operands concerned whole in dimension `name`."""
        for op, operands in self._special(self._body, name):
            b = Builder.before(self._module.registry, op, loc=made_by(PASS, op.loc))
            for index in operands:
                value = op.operands[index]
                whole = self._moved(value.tensor, name, ())
                op.set_operand(index, b.value("stg.place", [value], type=whole, hint=value.name))

    def _exchange(self, name: str, into: tuple[str, ...]) -> None:
        """Move the split of `name` to the dimensions `into` around the ops concerned."""
        found = self._special(self._body, name)
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
                here = b.value("stg.place", [value], {"both": True}, type=home, hint=value.name)
                op.set_operand(index, b.value("stg.place", [here], type=moved, hint=value.name))
            after = Builder.after(self._module.registry, op, loc=made_by(PASS, op.loc))
            result, users = op.results[0], list(op.results[0].uses)
            home = self._place(result.tensor.unplaced(), rest=False)
            moved = self._moved(result.tensor, name, into)
            here = after.value("stg.place", [result], {"both": True}, type=moved, hint=result.name)
            back = after.value("stg.place", [here], type=home, hint=result.name)
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
    return owner.definition.carries and arg.index < owner.integer("carry", 1)


def _concerns(rule: SplitRule, d: Dim) -> bool:
    """Whether a rule splits a dimension; a rule for rest adds to what splits it already."""
    named = d.size.value is None and bool(d.size.symbols & set(rule.dims))
    return named and (rule.rest or not d.split)


class Sharder:
    """Shards parameters over the ZeRO axes, all along the dimension that most of them share."""

    def __init__(
        self, module: Module, strategy: Strategy, assumptions: Assumptions | None = None
    ) -> None:
        self._module, self._strategy = module, strategy
        self._assumptions = assumptions or Assumptions(module, strategy.loc)
        self._preferred = common_dimensions(p.tensor for p in module.parameters())
        self._counts = _repeat_counts(module)
        self._whole: list[Value] = []

    def shard(self, param: Value) -> TensorType:
        """The parameter's type sharded at rest; left whole where nothing divides."""
        strategy, module = self._strategy, self._module
        axes = tuple(a for a in strategy.zero_axes if a not in param.tensor.axes)
        if not axes:
            return param.tensor
        sharded, done = shard_at_rest(
            param.tensor,
            axes,
            self._preferred,
            self._assumptions.facts,
            module.env,
            self._counts,
        )
        if not done:
            self._whole.append(param)
        for d in sharded.dims:
            if d.split:
                self._assumptions.divides(d.size, axis_size(d.axes), strategy.loc)
        return sharded

    def check(self) -> None:
        """Tell which parameters stay whole.

        Raises `DiagnosticError` if they are more than 1% of all: that would be another strategy.
        """
        if not self._whole:
            return
        module, axes = self._module, ", ".join(self._strategy.zero_axes)
        names = ", ".join(f"%{p.name}" for p in self._whole)
        message = f"over {axes} no dimension of {names} divides: they stay whole"
        share = self._share_left_whole()
        if share > Fraction(1, 100):
            raise error(
                f"{message}, {float(share):.0%} of all parameters",
                self._strategy.loc,
                remedy=f"choose a size of {axes} that divides {self._preferred[0]}, or --zero 0",
            )
        module.diagnostics.remark(message, self._strategy.loc)

    def _share_left_whole(self) -> Fraction:
        """The part of the parameters that is not sharded; 0 while sizes are open."""
        env = self._module.env
        every = total(p.tensor.elements for p in self._module.parameters())
        if not every.symbols <= env.keys():
            return Fraction(0)
        return Fraction(
            sum(evaluate(p.tensor.elements, env) for p in self._whole), evaluate(every, env)
        )


class Assumptions:
    """Relations that a strategy adds to a module; each is checked at once where sizes are known.

    Sizes that do not divide are collected, so that `check` can name all of them.
    """

    def __init__(self, module: Module, loc: Loc) -> None:
        self._module, self._loc = module, loc
        self._wanted: dict[Expr, list[Expr]] = {}
        self._failed: list[tuple[Expr, Expr, Loc]] = []
        self.facts = Facts(r for r, _ in module.relations)  # values of today prove nothing

    def divides(self, size: Expr, divisor: Expr, loc: Loc) -> None:
        """Assume that `divisor` divides `size`."""
        env = self._module.env
        relation = divisible(size, divisor)
        known = relation.symbols <= env.keys()
        sizes = self._wanted.setdefault(divisor, [])
        if known and size not in sizes:
            sizes.append(size)
            if not relation.holds(env):
                self._failed.append((size, divisor, loc))
        if not self.facts.divides(divisor, size):
            self.facts.add(relation)
            self._declare(relation)

    def check(self) -> None:
        """Raise `DiagnosticError` for all sizes that do not divide."""
        problems = DiagnosticList()
        env = self._module.env
        for size, divisor, loc in self._failed:
            have, tried = evaluate(size, env), evaluate(divisor, env)
            common = gcd(*(evaluate(s, env) for s in self._wanted[divisor]))
            problems.error(
                f"{size} = {have} does not divide over {divisor} = {tried}",
                loc,
                remedy=_choices(size, divisor, common, tried),
            )
        problems.check()

    def _declare(self, relation: Relation) -> None:
        """Append to the stg.assume that this pass has made, or make it after the declarations."""
        root, definition = self._module.root.body, self._module.registry["stg.assume"]
        loc = made_by(PASS, self._loc)
        for op in root.ops:
            made_here = isinstance(op.loc, NameLoc) and op.loc.name == PASS
            before = op.attrs.get("relations")
            if op.definition is definition and made_here and isinstance(before, tuple):
                op.attrs["relations"] = (*before, relation)
                return
        declarations = ("stg.symbols", "stg.assume", "stg.mesh")
        places = [i for i, o in enumerate(root.ops) if o.name in declarations]
        attrs: dict[str, Attr] = {"relations": (relation,)}
        root.insert(1 + max(places, default=-1), Operation(definition, (), attrs, loc=loc))


def _choices(size: Expr, divisor: Expr, common: int, tried: int) -> str:
    """The divisors of all sizes concerned that are nearest to what was tried."""
    near = [n for n in range(1, min(common, 4 * tried) + 1) if common % n == 0]
    best = sorted(near, key=lambda n: abs(n - tried))[:3]
    if divisor.symbol_name is None:
        return f"choose {size} as a multiple of {tried}"
    return f"choose {divisor} among {', '.join(map(str, sorted(best)))}, or another {size}"


def _repeat_counts(module: Module) -> frozenset[str]:
    """Sizes that repeats slice along: never sharded, an iteration needs its slice whole."""
    return frozenset(str(op.expr("count")) for op in module.walk() if op.definition.carries)


def _symbols(type_: TensorType) -> frozenset[str]:
    return frozenset(s for d in type_.dims for s in d.size.symbols)


def _regions(region: Region) -> list[Region]:
    return [region, *(r for op in region.ops if op.region is not None for r in _regions(op.region))]


def _values(region: Region) -> list[Value]:
    return [*region.args, *(r for op in region.ops for r in op.results)]
