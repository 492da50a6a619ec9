"""Propagation of placements from the given ones to all values.

Sweeps run forward and backward over the rules of the ops, priority by priority, to a fixpoint. They
assign axes to the factors of each op, which determines the types of the results. Propagation knows
rules, not ops. With the arguments `%x: [B@dp, D]`, `%w: [D, F@tp]`, `%z: [B, F]`, `%v: [F, D]`:

    %y = einsum["bd,df->bf"](%x, %w)    b over dp from %x, f over tp from %w: [B@dp, F@tp]
    %s = add["bf,bf->bf"](%y, %z)       b and f as in %y: [B@dp, F@tp]; %z has to move, by a slice
    %u = einsum["bf,fd->bd"](%s, %v)    b and f as in %s; f is contracted: [B@dp, D | sum(tp)]
    return(%u) -> [B@dp, D]             backward: no result is split further; %u is reduced

An axis splits at most one factor of an op. Offers of a lower priority number come first; if two
exclude each other, the order that moves fewer bytes is used (reshard_cost.py).
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from stagec.ir.core import Operation, Region, Value
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.facts import Facts
from stagec.ir.layers import entering
from stagec.ir.module import Module
from stagec.ir.rewrite import carried
from stagec.ir.rule import Group, Shape
from stagec.ir.traits import FinalGradient, HasRegion, Repeats, Terminates, View
from stagec.ir.types import AxisUse, Partial, TensorType, axis_size
from stagec.ir_spec.ops.layout import Identity
from stagec.sharding.assignment import unreduced
from stagec.sharding.plans import operands_agree, plans
from stagec.sharding.reshard_cost import Moved, Offer, ShardedOp, Split, Weighing, axes_of
from stagec.sharding.row_sources import RowSources
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import note


class Propagation:
    """The placements of the values of a function. `constraints` are the sharding constraints with
    the pins of results; their operands prefer these placements."""

    def __init__(self, module: Module, region: Region, constraints: Sequence[Operation]) -> None:
        self._module = module
        self._direct = {op.operands[0]: op for op in constraints}
        self._facts: Facts = module.facts
        self.region = region
        self._order = module.mesh.axes if module.mesh else ()
        self._deferred = read_strategy(module).deferred
        self._weighing = Weighing(module)
        self._rows = RowSources()
        self._nodes: dict[Operation, ShardedOp] = {}
        #: Splits of carried arguments, which get them from the values around them. The kinds of
        #: layers of a stack share one placement.
        self._free: dict[Value, list[Split]] = {}
        self._pinned: dict[Value, TensorType] = {}
        self._moves: dict[Hashable, Moved] = {}  # a cache, since sweeps repeat
        self._collect(region)

    def _collect(self, region: Region) -> None:
        for arg in region.args:
            if region is self.region or arg.tensor.placed:
                self._pinned[arg] = arg.tensor
            elif is_carried(arg):
                self._free[arg] = self._free.get(entering(arg)) or [()] * arg.tensor.rank
        for op in region.ops:
            rule = op.definition.rule(op)
            if rule is not None:
                self._nodes[op] = ShardedOp(op, rule, factor_sizes(op, rule))
            for value in op.results:
                if isinstance(value.type, TensorType) and value.type.placed and op.region is None:
                    self._pinned[value] = value.type
            if op.region is not None:
                self._collect(op.region)

    # -- placements of values ----------------------------------------------------------------------

    def split(self, value: Value) -> list[Split]:
        """The current split of each dimension of a value."""
        if value in self._pinned:
            return [d.split for d in self._pinned[value].dims]
        if value in self._free:
            return self._free[value]
        op = value.producer
        if op is None:
            return self._split_of_arg(value)
        if op in self._nodes:
            node = self._nodes[op]
            return [node.split(g) for g in node.rule.results[value.index]]
        if op.region is not None:
            return self._split_of_region_result(op, value)
        return [d.split for d in value.tensor.dims]

    def _split_of_arg(self, arg: Value) -> list[Split]:
        owner = arg.region.owner
        outer = self.split(owner.operands[arg.index])
        return outer[1:] if owner.has(Repeats) else outer

    def _split_of_region_result(self, op: Operation, value: Value) -> list[Split]:
        if not op.has(Repeats):
            return self.split(op.body.terminator.operands[value.index])
        if value.index < carried(op):
            return self.split(op.body.args[value.index])
        return [(), *self.split(op.body.terminator.operands[value.index])]

    # -- the sweeps --------------------------------------------------------------------------------

    def run(self) -> None:
        """Propagate the given placements to a fixpoint. Raises `DiagnosticError` for contradictory
        pins."""
        self._take_pinned_results()
        for priority in self._priorities():
            while self._sweep(priority) or (not priority and self._exchange()):
                pass

    def _priorities(self) -> list[int]:
        """The priorities of the given splits, which are all that can occur."""
        given = [*self._pinned.values(), *self.region.returns]
        dims = (d for t in given if isinstance(t, TensorType) for d in t.dims)
        return sorted({0, *(use.priority for d in dims for use in d.split)})

    def _take_pinned_results(self) -> None:
        for node in self._nodes.values():
            for value in node.op.results:
                if value in self._direct:
                    self._check_pins(node, value, self._direct[value].result.tensor)
                if value in self._pinned:
                    node.summed |= {*self._pinned[value].partial_axes}
                    self._offer_dims(node, node.rule.results[value.index], self.split(value), 2)
                for user, _ in value.uses if not isinstance(node.op.definition, Identity) else ():
                    if isinstance(user.definition, Identity) and user.result in self._pinned:
                        self._want(node, value, user)

    def _want(self, node: ShardedOp, value: Value, place: Operation) -> None:
        """Note the pin of a result. A constraint by which the strategy moves a value (to reduce a
        gradient, or to exchange a split) is no pin: no op is placed for it."""
        if not place.has(FinalGradient) and not place.flag("both"):
            pin = self._pinned[place.result]
            node.wanted.setdefault(value.index, pin)
            node.summed |= {*pin.partial_axes}
            node.direct |= value in self._direct

    def _check_pins(self, node: ShardedOp, value: Value, pin: TensorType) -> None:
        """Check that a pinned result and a pinned operand do not split one factor over different
        axes. Raises `DiagnosticError`."""
        dims = zip(node.rule.results[value.index], pin.dims, strict=True)
        result = {g[0]: d.axes for g, d in dims if len(g) == 1}
        if node.op.has(View):
            return  # constraints and gradients may change placements
        for operand, shape in zip(node.op.operands, node.rule.operands, strict=True):
            pinned = self._pinned.get(operand)
            for g, d in zip(shape, pinned.dims if pinned else (), strict=False):
                mine, other = result.get(g[0], ()), d.axes
                hard = all(use.priority == 0 for use in d.split)
                if mine and other and hard and mine[: len(other)] != other[: len(mine)]:
                    raise value.error(
                        f"contradictory placements: '{node.op.name}' splits factor '{g[0]}' over "
                        f"{', '.join(mine)} in its result, but over {', '.join(other)} in "
                        f"%{operand.name}",
                        remedy="change one of them, or move it with 'stg.sharding_constraint'",
                        notes=[note(f"%{operand.name} is pinned here: {pinned}", operand.loc)],
                    )

    def _sweep(self, priority: int) -> bool:
        changed = [self._forward(node, priority) for node in self._nodes.values()]
        changed += [self._carry(arg, priority) for arg in self._free]
        opened = [arg for arg in self._pinned if any(d.open for d in arg.tensor.dims)]
        changed += [self._open_up(arg, priority) for arg in opened]
        changed += [self._backward(node, priority) for node in reversed(self._nodes.values())]
        return any(changed)

    def _forward(self, node: ShardedOp, priority: int) -> bool:
        offers: list[Offer] = []
        for i, (value, shape) in enumerate(zip(node.op.operands, node.rule.operands, strict=True)):
            for group, split in zip(shape, self.split(value), strict=True):
                if split:
                    last = node.rule.gathered.issuperset(group)  # the op can gather the rest
                    first, size = min(u.priority for u in split), value.tensor.elements
                    offers.append(Offer(first, group, split, last, size, i))
        offers = self._weighing.in_order(offers)
        return self._take(node, self._best(node, offers, priority), priority)

    def _take(self, node: ShardedOp, offers: Iterable[Offer], priority: int) -> bool:
        changed = [self._offer(node, o.group, o.split, priority) for o in offers]
        return any(changed)

    def _best(self, node: ShardedOp, offers: list[Offer], priority: int) -> list[Offer]:
        """The offers in the order that moves the fewest bytes; in the given order if none excludes
        another.

        An op with a pinned result follows the pin only, unless another placement moves fewer bytes.
        """
        pins = node.pins()
        if (
            not node.wanted
            or node.exact is not None
            or all(node.exactly(o) for o in offers)
            or (not node.direct and self._agrees(node))
        ):
            orders = node.orders(pins + offers if node.direct else offers + pins, priority)
            if len(orders) > 1:
                return self._least(node, orders, priority)
            return orders[0] if node.direct else offers
        return self._planned(node, pins, offers, priority)

    def _agrees(self, node: ShardedOp) -> bool:
        return operands_agree(node.rule, [self.split(v) for v in node.op.operands])

    def _least(self, node: ShardedOp, orders: list[list[Offer]], priority: int) -> list[Offer]:
        """The order that moves the fewest bytes."""
        moved = [self._moved(node, order, priority) for order in orders]
        self._weighing.note_order(orders[0])
        return orders[self._weighing.least(moved)]

    def _planned(
        self, node: ShardedOp, pins: list[Offer], offers: list[Offer], priority: int
    ) -> list[Offer]:
        """The placement that moves the fewest bytes: that of the pins, that of the operands, or any
        plan that divides the work over as many axes, since moving less must not cost more
        computation. Of equal ones, the one that divides the work over the most axes."""
        direct = node.orders(pins + offers, priority) if node.direct else []
        free = node.orders(offers + pins, priority)
        open_ = [o for o in pins + offers if o.priority <= priority]
        tried: list[tuple[Moved, list[Offer], bool | None]] = []
        for exact, orders in ((True, direct), (False, free)):
            node.exact = exact
            tried += [(self._moved(node, order, priority), order, exact) for order in orders]
        shared = tried[self._weighing.least([moved for moved, *_ in tried])][0].axes
        node.exact = None
        planned = ((self._moved(node, o, priority), o) for o in plans(node, open_, self._facts))
        tried += [(moved, order, None) for moved, order in planned if moved.axes >= shared]
        self._weighing.note_order(free[0])
        tried.sort(key=lambda t: -t[0].axes)
        _, best, node.exact = tried[self._weighing.least([moved for moved, *_ in tried])]
        if node.exact is None:
            node.decide(open_, best)
        return best

    def _moved(self, node: ShardedOp, offers: list[Offer], priority: int) -> Moved:
        """The bytes that move if these offers are taken in order."""
        before = dict(node.axes)
        self._take(node, offers, priority)
        operands = node.op.operands
        splits = tuple([tuple([axes_of(s) for s in self.split(v)]) for v in operands])
        parts, passing = tuple(map(self._unreduced, operands)), self._passing(node)
        key = node, splits, parts, passing, tuple(node.assignment.items())
        if key not in self._moves:
            have = [
                v.tensor.with_splits(s, Partial("sum", tuple(sorted(p))) if p else None)
                for v, s, p in zip(operands, splits, parts, strict=True)
            ]
            self._moves[key] = self._weighing.moved(node, have, passing)
        node.axes = before
        return self._moves[key]

    def _exchange(self) -> bool:
        """Let an op take the split of an exchanged dimension along another dimension, so that its
        operands are not gathered and the ranks share its work. Soft splits are left out. Returns
        whether there was such an op."""
        return any(
            self._move_split(node, value, shape, [u for u in split if not u.priority])
            for node in self._nodes.values()
            if node.rule.exchanged
            for value, shape in zip(node.op.operands, node.rule.operands, strict=True)
            for group, split in zip(shape, self.split(value), strict=True)
            if node.rule.exchanged.issuperset(group)
        )

    def _move_split(
        self, node: ShardedOp, value: Value, shape: Shape, split: Sequence[AxisUse]
    ) -> bool:
        """Split a factor that all results have, preferably an unsplit one. Returns whether it is
        split."""
        rule = node.rule
        places = [
            (g[0], d)
            for g, d in zip(shape, value.tensor.dims, strict=True)
            if all(g in result for result in rule.results) and not rule.special.issuperset(g)
        ]
        for factor, d in sorted(places, key=lambda place: place[0] in node.axes):
            uses = [*node.axes.get(factor, ()), *split]
            may = self._weighing.may_split(tuple(u.axis for u in uses), d)
            if may and self._extend(node, factor, uses):
                return True
        return False

    def _backward(self, node: ShardedOp, priority: int) -> bool:
        changed = False
        for value, shape in zip(node.op.results, node.rule.results, strict=False):
            for op, index in value.uses:
                wanted = self._wanted(op, index)
                for group, split in zip(shape, wanted or (), strict=False):
                    if not node.rule.special.issuperset(group):  # slicing the result is free
                        changed |= self._offer(node, group, split, priority)
        return changed

    def _wanted(self, op: Operation, index: int) -> list[Split] | None:
        """The splits in which a user of a value needs it, if they are known."""
        if op in self._nodes:
            node = self._nodes[op]
            return [node.split(g) for g in node.rule.operands[index]]
        if op.region is not None:
            arg = op.body.args[index]
            return self.split(arg) if arg in self._free or arg in self._pinned else None
        owner = op.parent_op
        if owner is None or not owner.has(HasRegion) or not op.has(Terminates):
            return None
        if op.parent is not self.region:
            return self._wanted_by_region(owner, index)
        returns = owner.body.returns
        declared = returns[index] if index < len(returns) else None
        if isinstance(declared, TensorType) and declared.placed:
            return [d.split for d in declared.dims]
        return None

    def _wanted_by_region(self, owner: Operation, index: int) -> list[Split] | None:
        """The splits for a value that a region yields: those of the carried argument, or those that
        the users of the result need."""
        repeats = owner.has(Repeats)
        if index < carried(owner):
            return self.split(owner.body.args[index])
        for user, slot in owner.results[index].uses:
            wanted = self._wanted(user, slot)
            if wanted is not None:
                return wanted[1:] if repeats else wanted
        return None

    def _carry(self, arg: Value, priority: int) -> bool:
        """Extend the splits of a carried argument by those of its initial value, of the yielded
        value, and of its users."""
        owner = arg.region.owner
        ends = owner.operands[arg.index], owner.body.terminator.operands[arg.index]
        sources = [self.split(value) for value in ends]
        sources += [w for op, i in arg.uses if (w := self._wanted(op, i)) is not None]
        now = self._free[arg]
        before = list(now)
        for source in sources:
            for d, split in enumerate(source):
                for use in split[len(now[d]) :]:
                    taken = {u.axis for s in now for u in s}
                    free = use.priority <= priority and use.axis not in taken
                    if free and split[: len(now[d])] == now[d]:
                        now[d] = (*now[d], use)
        return now != before

    def _open_up(self, arg: Value, priority: int) -> bool:
        """Give open dimensions of a pinned value (`S?`) the splits that its users need."""
        before = self._pinned[arg]
        dims = list(before.dims)
        for op, index in arg.uses:
            for d, split in enumerate(self._wanted(op, index) or ()):
                taken = {u.axis for other in dims for u in other.split}
                new = [u for u in split if u.priority <= priority and u.axis not in taken]
                if dims[d].open and not dims[d].split and new == list(split) and new:
                    dims[d] = replace(dims[d], split=tuple(new))
        self._pinned[arg] = replace(before, dims=tuple(dims))
        return self._pinned[arg] != before

    def _offer_dims(
        self, node: ShardedOp, shape: tuple[Group, ...], splits: list[Split], priority: int
    ) -> bool:
        dims = zip(shape, splits, strict=True)
        changed = [self._offer(node, group, split, priority) for group, split in dims]
        return any(changed)

    def _offer(self, node: ShardedOp, group: Group, split: Split, priority: int) -> bool:
        """Split the factors of a dimension as offered, as far as priority, rule and other factors
        allow. Returns whether anything changed."""
        if len(group) == 1 and len(split) <= len(node.axes.get(group[0], ())):
            return False
        split = tuple([u for u in split if u.priority <= priority])
        if not split:
            return False
        by_axis = {u.axis: u for u in split}
        shares = node.shares(group, tuple(by_axis), self._facts)
        changed = [self._extend(node, f, [by_axis[a] for a in axes]) for f, axes in shares.items()]
        return any(changed)

    def _extend(self, node: ShardedOp, factor: str, offered: list[AxisUse]) -> bool:
        now = node.axes.get(factor, ())
        if (
            len(offered) <= len(now)
            or factor in node.rule.whole
            or [u.axis for u in now] != [u.axis for u in offered[: len(now)]]
            or self._scattered(node, factor)
        ):
            return False
        changed = False
        for use in offered[len(now) :]:
            taken = {u.axis: f for f, uses in node.axes.items() for u in uses}
            axes = (*(u.axis for u in now), use.axis)
            if (
                use.axis in taken
                or not node.takes(factor, use.axis)
                or (use.axis in self._passing(node) and not self._reduces_first(node, factor, use))
                or not self._facts.divides(axis_size(axes), node.sizes[factor])
            ):
                break
            now = (*now, use)
            node.axes[factor] = now
            changed = True
        return changed

    def _scattered(self, node: ShardedOp, factor: str) -> bool:
        """Whether a split of a factor would give a rank a scattered part of a joined dimension,
        because an earlier factor of it is not split completely."""
        for before in node.before(factor):
            parts = axis_size(u.axis for u in node.axes.get(before, ()))
            if not self._facts.divides(node.sizes[before], parts):
                return True
        return False

    def _passing(self, node: ShardedOp) -> frozenset[str]:
        """Axes over which all linear operands are unreduced: the op passes the partial sums on and
        is not split over these axes."""
        if node.rule.each and self._deferred:
            parts = [self._unreduced(node.op.operands[i]) for i in node.rule.each]
            alone = [a for axes in parts if axes.issubset(self._deferred) for a in axes]
            return frozenset(a for a in alone if alone.count(a) == 1)
        if not node.rule.linear:
            return frozenset()
        parts = [self._unreduced(node.op.operands[i]) for i in node.rule.linear]
        return parts[0].intersection(*parts[1:])

    def _reduces_first(self, node: ShardedOp, factor: str, use: AxisUse) -> bool:
        """Whether a split reduces partial sums before this op: if rows are numbered by it, or, for
        a soft split, if a linear operand has another placement than the op needs. That operand
        moves in any case, and fewer bytes after its reduction."""
        if factor in node.rule.numbered:
            fillers = [self._nodes[f] for f in self._rows.taken(node.op, factor)]
            splits = [f.assignment.get(g, ()) for f in fillers for g in f.rule.numbered]
            return any(use.axis in split for split in splits)
        return use.priority > 0 and any(
            split and node.rule.whole.issuperset(group)
            for i in node.rule.linear
            for group, split in zip(
                node.rule.operands[i], self.split(node.op.operands[i]), strict=True
            )
        )

    def _unreduced(self, value: Value) -> frozenset[str]:
        if value in self._pinned:
            partial = self._pinned[value].partial
            return frozenset(partial.axes if partial and partial.kind == "sum" else ())
        op = value.producer
        if op is None:
            return frozenset()
        if op.region is not None:
            return self._unreduced(op.body.terminator.operands[value.index])
        if op not in self._nodes:
            return frozenset()
        node = self._nodes[op]
        contracted = node.rule.reduced(value.index)
        split = {u.axis for uses in node.axes.values() for u in uses}
        reduced = {u.axis for f in contracted for u in node.axes.get(f, ())}
        return (self._passing(node) - split) | reduced

    # -- results -----------------------------------------------------------------------------------

    def result(self, op: Operation, index: int) -> tuple[TensorType, list[Split], Partial | None]:
        """The written type of a result of an op, its splits, and its partial axes: those of
        contracted split factors, and of partial sums that operands pass on."""
        value = op.results[index]
        if value in self._pinned:
            pin = self._pinned[value]
            return pin, self.split(value), pin.partial
        node = self._nodes[op]
        splits = [node.split(g) for g in node.rule.results[index]]
        axes = unreduced(op, node.rule, index, node.assignment, self._deferred)
        by_order = tuple(sorted(axes, key=self._order.index))
        return value.tensor, splits, Partial(node.rule.reduction, by_order) if axes else None

    def has_rule(self, op: Operation) -> bool:
        """Whether a rule determines the placements of the results of an op."""
        return op in self._nodes


def is_carried(arg: Value) -> bool:
    """Whether an argument of a repeat is carried from iteration to iteration."""
    return arg.index < carried(arg.region.owner)
