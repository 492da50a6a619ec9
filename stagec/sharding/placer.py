"""Placement of the type of one value by the statements of a strategy."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from stagec.ir.core import Value
from stagec.ir.module import Module
from stagec.ir.types import AxisUse, Dim, TensorType, axis_size
from stagec.ir_spec.strategy.gather import GatherRule
from stagec.ir_spec.strategy.split import SplitRule
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.special_factors import is_part
from stagec.sharding.stages import accumulation
from stagec.sharding.strategy import Strategy


class Placer:
    """Places types by `stg.split` and `stg.gather[of = ...]` of a strategy, and assumes that sizes
    divide.

    With `stg.split[B, over = dp]` and `stg.split[S, over = tp, at = rest]`:

    | type           | `rest` | placed                   |
    |----------------|--------|--------------------------|
    | `[B, S, D]`    | no     | `[B@dp, S, D]`           |
    | `[B, S, D]`    | yes    | `[B@dp, S@tp!1, D]`      |
    | `[B, S@dp, D]` | no     | `[B, S@dp, D]` (pinned)  |
    """

    def __init__(self, module: Module, strategy: Strategy, assumptions: Assumptions) -> None:
        self._strategy, self._assumptions = strategy, assumptions
        self._microbatches = accumulation(module.main)

    def place(self, type_: TensorType, *, rest: bool, value: Value | None = None) -> TensorType:
        """Split dimensions by name, with `rest` also by statements for values between blocks. A
        placement that the model pins takes precedence, then statements that name the value. Each
        axis is used once."""
        used = set(type_.axes)
        dims = list(type_.dims)
        whole = {n for rule in self._strategy.whole if _names(rule, value) for n in rule.dims}
        for rule in sorted(self._strategy.splits, key=lambda r: not _names(r, value)):
            if not _names(rule, value) and (rule.of or (rule.rest and not rest)):
                continue
            if not _limited(rule, dims):
                continue
            for i, d in enumerate(dims):
                if not _concerns(rule, d) or used & set(rule.over) or d.size.symbols & whole:
                    continue
                dims[i] = self._split(d, rule)
                used |= set(rule.over)
        return replace(type_, dims=tuple(dims), placed=True)

    def moved(self, type_: TensorType, names: tuple[str, ...], into: Sequence[str]) -> TensorType:
        """The placed type, where the axes of dimensions that contain one of these names are moved
        to the dimensions `into`."""
        placed = self.place(type_.unplaced(), rest=False)
        from_ = [d for d in placed.dims if any(is_part(name, d.size) for name in names)]
        axes = tuple(use for d in from_ for use in d.split)
        dims: list[Dim] = []
        for d in placed.dims:
            if d in from_:
                dims.append(replace(d, split=()))
            elif d.size.symbol_name in into:
                dims.append(replace(d, split=d.split + axes))
                over = axis_size((*d.axes, *(u.axis for u in axes)))
                self._assumptions.divides(d.size, over, self._strategy.loc)
            else:
                dims.append(d)
        return replace(placed, dims=tuple(dims))

    def gathered(self, type_: TensorType, axes: Collection[str]) -> TensorType:
        """The placed type, without splits over these axes."""
        placed = self.place(type_.unplaced(), rest=False)
        return replace(placed, dims=tuple(d.without(axes) for d in placed.dims))

    def _split(self, d: Dim, rule: SplitRule) -> Dim:
        """A dimension split by a rule; each microbatch has to divide as well."""
        divisor = axis_size((*d.axes, *rule.over))
        op = self._microbatches
        if op is not None and d.size.symbol_name == op.text("split"):
            divisor = divisor * op.expr("count")
        self._assumptions.divides(d.size, divisor, rule.loc)
        return replace(d, split=d.split + tuple(AxisUse(a, int(rule.soft)) for a in rule.over))


def _names(rule: SplitRule | GatherRule, value: Value | None) -> bool:
    """Whether a rule names the value."""
    return value is not None and any(map(value.is_called, rule.of))


def _concerns(rule: SplitRule, d: Dim) -> bool:
    """Whether a rule splits a dimension. A soft rule adds to the axes that split it already."""
    named = d.size.value is None and bool(d.size.symbols & set(rule.dims))
    return named and (rule.soft or not d.split)


def _limited(rule: SplitRule, dims: Iterable[Dim]) -> bool:
    """Whether the rule applies to values with these dimensions (`only_with`)."""
    return not rule.only_with or any(d.size.symbols & set(rule.only_with) for d in dims)
