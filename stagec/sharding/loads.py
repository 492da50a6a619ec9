"""Notes what the loads of experts are relative to, once placements are explicit."""

from __future__ import annotations

from collections.abc import Iterator

from stagec.ir.builder import Builder
from stagec.ir.core import Value
from stagec.ir.expr import const
from stagec.ir.module import Module
from stagec.ir.types import TensorType, loads_of
from stagec.sharding.strategy import read_strategy
from stagec.support.source import made_by


def note_rows(module: Module) -> None:
    """Add a `stg.rows` for each load in a partitioned module, and number the repeats by layers.

    A remark says so if all ranks hold all experts.
    """
    strategy = read_strategy(module)
    if not strategy.loads:
        return
    rows: dict[str, Value] = {}
    over: dict[str, tuple[str, ...]] = {}
    for value, symbol, name in _loaded(module):
        axes = next((d.axes for d in value.tensor.dims if d.size.symbol_name == name), ())
        if axes:
            over.setdefault(symbol, axes)
            repeat = value.region.owner
            if repeat.definition.carries:
                repeat.attrs.setdefault("first", (const(0),))
        elif value.producer is not None and "capacity" in value.producer.attrs:
            rows.setdefault(symbol, value)
    if not over:
        module.diagnostics.remark(
            "every rank holds all experts, so their loads change nothing", strategy.loads[0].loc
        )
    place = module.main.position()
    b = Builder(module.registry, module.root.body, place, loc=made_by("loads", strategy.loc))
    for symbol, axes in over.items():
        type_ = rows[symbol].tensor
        even = type_.local_elements / type_.local_shape[-1]
        b.op("stg.rows", (), {"of": symbol, "over": axes, "even": even}, types=())


def _loaded(module: Module) -> Iterator[tuple[Value, str, str]]:
    """Values whose sizes depend on a load: with its symbol and its dimension."""
    for op in module.main.body.walk():
        for value in op.results:
            if isinstance(value.type, TensorType):
                for size in value.type.shape:
                    yield from ((value, *load) for load in loads_of(size).items())
