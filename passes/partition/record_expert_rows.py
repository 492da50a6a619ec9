"""record-expert-rows: states the number of rows to which loads of experts are relative."""

from collections.abc import Iterator

from stagec.api import (
    Builder,
    Expr,
    Load,
    Module,
    Pass,
    Phase,
    TensorType,
    Value,
    const,
    made_by,
    read_strategy,
)
from stagec.ir.builder import RawAttr
from stagec.ir.traits import Repeats

PASS = "record-expert-rows"


class RecordExpertRows(Pass):
    """Add a `stg.rows` for each load of experts, and number the repeats by layers.

    It states the rows of the experts of a rank under even load, to which a load is relative.
    Without a `stg.expert_load` nothing happens.

    Before:
        stg.symbols[B, S, D, E = 4, T]
        stg.mesh @pod[ep]
        stg.assume[E % ep == 0]
        stg.strategy @s[mesh = @pod] {
          stg.expert_load[loads = (5, 1, 1, 1)]
        }
        stg.func @f(%x: bf16[E, B, S*T/E, D | rep load(E=2)]) {
          %y = stg.all_slice[dim = 0, over = ep](%x) : bf16[E@ep, B, S*T/E, D | load(E=2)]
          stg.return(%y)
        }
    After:
        stg.symbols[B, S, D, E = 4, T]
        stg.mesh @pod[ep]
        stg.assume[E % ep == 0]
        stg.strategy @s[mesh = @pod] {
          stg.expert_load[loads = (5, 1, 1, 1)]
        }
        stg.rows[of = E, over = ep, even = B*S*T/ep]
        stg.func @f (%x: bf16[E, B, S*T/E, D | rep load(E=2)]) {
          %y = stg.all_slice[dim = 0, over = ep](%x) : bf16[E@ep, B, S*T/E, D | load(E=2)]
          stg.return(%y)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        return bool(read_strategy(module).loads)

    def run(self, module: Module) -> None:
        record_expert_rows(module)


def record_expert_rows(module: Module) -> None:
    """Add a `stg.rows` for each load in a partitioned module, and number the repeats by layers.

    If all ranks have all experts, loads only determine the number of experts that are read; a
    remark reports this.
    """
    strategy = read_strategy(module)
    rows: dict[Load, dict[str, RawAttr]] = {}
    for value, load in _loaded(module):
        axes = next(d.axes for d in value.tensor.dims if d.size.symbol_name == load.of)
        if load not in rows or (axes and not rows[load]["over"]):
            rows[load] = {"over": axes, "even": _even_rows(value.tensor)}
        repeat = value.region.owner
        if repeat.has(Repeats):
            repeat.attrs.setdefault("first", (const(0),))
    if not any(attrs["over"] for attrs in rows.values()):
        module.diagnostics.remark(
            "every rank holds all experts, so loads only give the number of experts that it reads",
            strategy.loads[0].loc,
        )
    place = module.main.position()
    b = Builder(module.registry, module.root.body, place, loc=made_by(PASS, strategy.loc))
    for load, attrs in rows.items():
        first = {"first": load.first} if load.first else {}
        b.op("stg.rows", (), {"of": load.of, **first, **attrs}, types=())


def _even_rows(type_: TensorType) -> Expr:
    """The rows of the experts of a rank under even load. A row has all features, the last
    dimension."""
    return type_.even.local_elements / type_.local_shape[-1]


def _loaded(module: Module) -> Iterator[tuple[Value, Load]]:
    """Values of one layer whose rows are those of experts with a load, each with that load."""
    for op in module.main.body.walk():
        for value in op.results if op.region is None else ():
            dims = value.type.dims if isinstance(value.type, TensorType) else ()
            names = {d.size.symbol_name for d in dims}
            yield from ((value, d.load) for d in dims if d.load and d.load.of in names)
