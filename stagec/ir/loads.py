"""Loads that differ between ranks and layers: the number of rows of the experts of each rank.

A strategy states relative loads of experts (`stg.expert_load`); `stg.rows` states the rows of a
rank under even load, and the axes that distinguish the ranks. Both determine the value of `E_load`.
"""

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from math import prod

from stagec.ir.core import Operation
from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.ir.queries import plain
from stagec.ir.types import Load
from stagec.support.memo import memo_method


def planned_env(module: Module) -> dict[str, int | Fraction]:
    """The values for memory plans: loads are those of the fullest rank in its fullest layer, an
    upper bound for all others."""
    loads = Loads(module)
    return {**plain(module.env), **(loads.most() if loads else {})}


class Loads:
    """The loads of a module. Sizes need values when loads are evaluated."""

    def __init__(self, module: Module) -> None:
        self._env = module.env
        self._rows = module.loads
        statements = (op for strategy in module.declaring("strategy") for op in strategy.body.ops)
        self._loads: dict[int | None, tuple[int, ...]] = {
            op.integer("layer") if "layer" in op.attrs else None: op.integers("loads")
            for op in statements
            if op.definition.declares == "expert_loads"
        }

    def __bool__(self) -> bool:
        """Whether ranks differ."""
        return bool(self._rows)

    @cached_property
    def symbols(self) -> frozenset[str]:
        """All symbols to which loads give values."""
        return frozenset(name for load in self._rows for name in load.names)

    def axes(self, symbols: Collection[str]) -> tuple[str, ...]:
        """The axes on whose coordinates the values of these symbols depend."""
        used = [op.names("over") for load, op in self._rows.items() if {*load.names} & {*symbols}]
        return tuple(dict.fromkeys(a for axes in used for a in axes))

    def at(self, coords: Mapping[str, int], layer: int) -> dict[str, Fraction]:
        """The values for ranks at these coordinates in layer `layer` of each repeat, for symbols
        that the coordinates determine."""
        values: dict[str, Fraction] = {}
        for load, op in self._rows.items():
            if not coords.keys() >= set(op.names("over")):
                continue
            index = 0
            for axis in op.names("over"):
                index = index * self._env[axis] + coords[axis]
            here, used = self._parts(load, layer)[index], self._used(load, layer)[index]
            values |= zip(load.names, (here, self._fullest(load, layer), used), strict=True)
        return values

    def most(self) -> dict[str, Fraction]:
        """The values on the fullest rank in its fullest layer; empty if sizes have no value."""
        if any(_symbols(op) - self._env.keys() for op in self._rows.values()):
            return {}
        layers = {layer or 0 for layer in self._loads}
        values: dict[str, Fraction] = {}
        for load in self._rows:
            inside = {max(0, n - load.first) for n in layers} | {max(layers, default=0) + 1}
            most = max(self._fullest(load, n) for n in inside)
            values |= zip(load.names, (most, most, Fraction(1)), strict=True)
        return values

    @memo_method
    def _parts(self, load: Load, layer: int) -> tuple[Fraction, ...]:
        """The load of each part of the experts relative to the mean, from whole rows."""
        dealt = self._dealt(load, layer)
        if dealt is None:
            return (Fraction(1),) * self._count(load)
        total = self._total(load)
        return tuple(Fraction(rows * self._count(load), total) for _, rows in dealt)

    @memo_method
    def _used(self, load: Load, layer: int) -> tuple[Fraction, ...]:
        """The share of the experts of each part that get rows: by their loads, or evenly in a layer
        without loads."""
        dealt, parts = self._dealt(load, layer), self._count(load)
        if dealt is None:
            return (min(Fraction(1), Fraction(self._total(load), self._env[load.of])),) * parts
        taken = (_apportioned(rows, each) if rows else [0] for each, rows in dealt)
        return tuple(Fraction(sum(n > 0 for n in rows), len(rows)) for rows in taken)

    def _dealt(self, load: Load, layer: int) -> list[tuple[Sequence[int], int]] | None:
        """The loads of the experts of each part, and its rows; None in a layer without loads."""
        loads = self._loads.get(load.first + layer, self._loads.get(None))
        if loads is None:
            return None
        each = len(loads) // self._count(load)
        parts = [loads[i : i + each] for i in range(0, len(loads), each)]
        rows = _apportioned(self._total(load), [sum(part) for part in parts])
        return list(zip(parts, rows, strict=True))

    def _count(self, load: Load) -> int:
        return prod(self._env[a] for a in self._rows[load].names("over"))

    def _total(self, load: Load) -> int:
        """The rows of all parts."""
        return evaluate(self._rows[load].expr("even") * self._count(load), self._env)

    @memo_method
    def _fullest(self, load: Load, layer: int) -> Fraction:
        return max(self._parts(load, layer))


def _symbols(op: Operation) -> frozenset[str]:
    return op.expr("even").symbols | frozenset(op.names("over"))


def _apportioned(total: int, shares: Sequence[int]) -> list[int]:
    """Integers proportional to the shares that add up to the total (largest remainder method)."""
    exact = [Fraction(total * share, sum(shares)) for share in shares]
    counts = [int(n) for n in exact]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts
