"""Notes what the loads of experts are relative to, once placements are explicit."""

from __future__ import annotations

from collections.abc import Iterator

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Value
from stagec.ir.expr import Expr, const
from stagec.ir.module import Module
from stagec.ir.traits import Repeats
from stagec.ir.types import Load, TensorType
from stagec.sharding.strategy import read_strategy
from stagec.support.source import made_by


def note_rows(module: Module) -> None:
    """Add a `stg.rows` for each load in a partitioned module, and number the repeats by layers.

    A remark says so if all ranks hold all experts.
    """
    strategy = read_strategy(module)
    if not strategy.loads:
        return
    rows: dict[Load, dict[str, RawAttr]] = {}
    for value, load in _loaded(module):
        axes = next(d.axes for d in value.tensor.dims if d.size.symbol_name == load.of)
        rows.setdefault(load, {"over": axes, "even": _even_rows(value.tensor)})
        repeat = value.region.owner
        if repeat.has(Repeats):
            repeat.attrs.setdefault("first", (const(0),))
    if not rows:
        module.diagnostics.remark(
            "every rank holds all experts, so their loads change nothing", strategy.loads[0].loc
        )
    place = module.main.position()
    b = Builder(module.registry, module.root.body, place, loc=made_by("loads", strategy.loc))
    for load, attrs in rows.items():
        first = {"first": load.first} if load.first else {}
        b.op("stg.rows", (), {"of": load.of, **first, **attrs}, types=())


def _even_rows(type_: TensorType) -> Expr:
    """The rows of a rank's experts under even load: those that come to them, each of all features,
    the last dimension."""
    return type_.even.local_elements / type_.local_shape[-1]


def _loaded(module: Module) -> Iterator[tuple[Value, Load]]:
    """Values of one layer whose local sizes depend on a load."""
    for op in module.main.body.walk():
        for value in op.results if op.region is None else ():
            if isinstance(value.type, TensorType):
                yield from ((value, load) for load in value.type.loads)
