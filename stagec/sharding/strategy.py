"""Strategies as data: reads a `stg.strategy` op into a frozen record that passes ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, const
from stagec.ir.module import Module
from stagec.support.diagnostics import error
from stagec.support.source import UNKNOWN, Loc

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Dimensions of these names are split over the axes.

    `rest`: only between blocks. `yields`: everywhere, but computations that use the axes otherwise
    come first. `beside`: only in values that have one of these dimensions too.
    """

    dims: tuple[str, ...]
    over: Axes
    rest: bool = False
    loc: Loc = UNKNOWN
    yields: bool = False
    beside: tuple[str, ...] = ()

    @property
    def soft(self) -> bool:
        """Whether it gives way where a computation uses the axes otherwise."""
        return self.rest or self.yields


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Element types of parameters and activations, gradients, reductions on the wire and the master
    copy."""

    param: str = "bf16"
    grad: str = "f32"
    reduce: str = "f32"
    master: str = "f32"


@dataclass(frozen=True, slots=True)
class Strategy:
    """What a strategy says; the defaults are those of one device."""

    splits: tuple[SplitRule, ...] = ()
    gathered: tuple[str, ...] = ()
    exchanged: tuple[tuple[str, tuple[str, ...]], ...] = ()
    zero: int = 0
    zero_axes: Axes = ()
    microbatches: int = 1
    batch: str = "B"
    dtypes: Dtypes = field(default_factory=Dtypes)
    save_gathered: bool = False
    recompute: str = "none"
    bucket: int = 0
    optimizer: str = "adamw"
    capacity: Expr | None = None
    clip: Expr = field(default_factory=lambda: const(1))
    loc: Loc = UNKNOWN


def read_strategy(module: Module) -> Strategy:
    """The module's strategy; the default one if it has none. Raises `DiagnosticError` if there are
    two."""
    found = module.ops("stg.strategy")
    if len(found) > 1:
        raise error(
            "the module has two strategies, expected one", found[1].loc, remedy="remove one of them"
        )
    if not found or found[0].region is None:
        return Strategy()
    fields: dict[str, Any] = {"loc": found[0].loc, "splits": ()}
    for op in found[0].region.ops:
        _statement(op, fields)
    return Strategy(**fields)


def _statement(op: Operation, fields: dict[str, Any]) -> None:
    """Add what one statement says."""
    if op.name == "stg.split":
        rule = SplitRule(
            op.names("dims"),
            op.names("over"),
            rest=op.text("at") == "rest",
            loc=op.loc,
            yields=op.flag("yields"),
            beside=op.names("beside"),
        )
        known = fields["splits"]
        fields["splits"] = (*known, rule) if isinstance(known, tuple) else (rule,)
    elif op.name in _STATEMENTS:
        fields.update(_STATEMENTS[op.name](op))
    else:
        raise error(
            f"'{op.name}' is not a statement of a strategy",
            op.loc,
            remedy="'stagec ops' lists those that are: stg.split, stg.shard_params, ...",
        )


def _optimizer(op: Operation) -> dict[str, Any]:
    clip = {"clip": op.expr("clip")} if "clip" in op.attrs else {}
    return {"optimizer": op.text("kind"), **clip}


def _dtypes(op: Operation) -> dict[str, Any]:
    names = ("param", "grad", "reduce", "master")
    return {"dtypes": Dtypes(**{n: op.text(n) for n in names if n in op.attrs})}


#: what each statement sets of a `Strategy`
_STATEMENTS: Mapping[str, Callable[[Operation], dict[str, Any]]] = {
    "stg.gather": lambda op: {"gathered": op.names("dims")},
    "stg.exchange": lambda op: {"exchanged": ((op.text("dim"), op.names("into")),)},
    "stg.shard_params": lambda op: {"zero": op.integer("zero"), "zero_axes": op.names("over")},
    "stg.microbatches": lambda op: {
        "microbatches": op.integer("count"),
        "batch": op.text("split", "B"),
    },
    "stg.dtypes": _dtypes,
    "stg.tp_inputs": lambda op: {"save_gathered": op.text("policy") == "save_gathered"},
    "stg.capacity": lambda op: {"capacity": op.expr("factor")},
    "stg.recompute": lambda op: {"recompute": op.text("policy")},
    "stg.bucket": lambda op: {"bucket": op.integer("bytes")},
    "stg.optimizer": _optimizer,
}
