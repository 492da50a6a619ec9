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

    `rest`: only between blocks. `weak`: everywhere, but computations that use the axes otherwise
    come first. `only_with`: only in values that have one of these dimensions too. `of`: only in the
    values named.
    """

    dims: tuple[str, ...]
    over: Axes
    rest: bool = False
    loc: Loc = UNKNOWN
    of: tuple[str, ...] = ()
    weak: bool = False
    only_with: tuple[str, ...] = ()

    @property
    def soft(self) -> bool:
        """Whether it gives way where a computation uses the axes otherwise."""
        return self.rest or self.weak


@dataclass(frozen=True, slots=True)
class WholeRule:
    """The values named are whole in the dimensions of these names."""

    dims: tuple[str, ...]
    of: tuple[str, ...]
    loc: Loc = UNKNOWN


@dataclass(frozen=True, slots=True)
class RingRule:
    """Attention along a dimension passes its parts round the ranks, in this order of positions."""

    dim: str
    order: str
    loc: Loc = UNKNOWN


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Element types of parameters and activations, gradients, reductions on the wire and the master
    copy; `fp8` is the recipe of 8-bit products, if there are any."""

    param: str = "bf16"
    grad: str = "f32"
    reduce: str = "f32"
    master: str = "f32"
    fp8: str = ""
    loc: Loc = UNKNOWN


@dataclass(frozen=True, slots=True)
class PipelineRule:
    """The repeated layers are cut into stages over an axis; no `layers`: evenly. Ranks along the
    `scatter` axes send a part each of what all of them hold."""

    over: str
    schedule: str = "1f1b"
    chunks: int = 0
    layers: tuple[int, ...] = ()
    scatter: Axes = ()
    loc: Loc = UNKNOWN


@dataclass(frozen=True, slots=True)
class LoadRule:
    """Relative loads of the experts, in one layer with experts or in all others."""

    loads: tuple[int, ...]
    layer: int | None = None
    loc: Loc = UNKNOWN


@dataclass(frozen=True, slots=True)
class Recompute:
    """What backward computes again: by policy, or the results of these ops; in all blocks, in the
    first `layers`, or in every `every`-th."""

    policy: str = "none"
    ops: tuple[str, ...] = ()
    layers: int = 0
    every: int = 0
    loc: Loc = UNKNOWN


@dataclass(frozen=True, slots=True)
class Strategy:
    """What a strategy says; the defaults are those of one device."""

    splits: tuple[SplitRule, ...] = ()
    whole: tuple[WholeRule, ...] = ()
    gathered: tuple[str, ...] = ()
    deferred: Axes = ()
    exchanged: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rings: tuple[RingRule, ...] = ()
    zero: int = 0
    zero_axes: Axes = ()
    reshard: str = "always"
    prefetch: int = 1
    microbatches: int = 1
    batch: str = "B"
    pipeline: PipelineRule | None = None
    dtypes: Dtypes = field(default_factory=Dtypes)
    save_gathered: bool = False
    blocking: Axes = ()
    recompute: Recompute = field(default_factory=Recompute)
    offload: tuple[str, ...] = ()
    copy_nodes: bool = False
    bucket: int = 0
    optimizer: str = "adamw"
    capacity: Expr | None = None
    loads: tuple[LoadRule, ...] = ()
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
    fields: dict[str, Any] = {"loc": found[0].loc}
    for op in found[0].region.ops:
        _statement(op, fields)
    return Strategy(**fields)


def _statement(op: Operation, fields: dict[str, Any]) -> None:
    """Add what one statement says: to the lists, or once."""
    if op.name not in _STATEMENTS:
        raise error(
            f"'{op.name}' is not a statement of a strategy",
            op.loc,
            remedy="'stagec ops' lists those that are: stg.split, stg.shard_params, ...",
        )
    for name, value in _STATEMENTS[op.name](op).items():
        if name in fields and name not in _LISTS:
            raise error(
                f"the strategy has a second {op.name}, expected one",
                op.loc,
                remedy="remove one of them",
            )
        fields[name] = (*fields.get(name, ()), *value) if name in _LISTS else value


def _split(op: Operation) -> dict[str, Any]:
    rule = SplitRule(
        op.names("dims"),
        op.names("over"),
        rest=op.text("at") == "rest",
        loc=op.loc,
        of=op.names("of"),
        weak=op.flag("weak"),
        only_with=op.names("only_with"),
    )
    return {"splits": (rule,)}


def _gather(op: Operation) -> dict[str, Any]:
    if op.names("of"):
        return {"whole": (WholeRule(op.names("dims"), op.names("of"), op.loc),)}
    return {"gathered": op.names("dims")}


def _load(op: Operation) -> dict[str, Any]:
    layer = op.integer("layer") if "layer" in op.attrs else None
    return {"loads": (LoadRule(op.integers("loads"), layer, op.loc),)}


def _optimizer(op: Operation) -> dict[str, Any]:
    clip = {"clip": op.expr("clip")} if "clip" in op.attrs else {}
    return {"optimizer": op.text("kind"), **clip}


def _dtypes(op: Operation) -> dict[str, Any]:
    names = ("param", "grad", "reduce", "master", "fp8")
    return {"dtypes": Dtypes(**{n: op.text(n) for n in names if n in op.attrs}, loc=op.loc)}


def _pipeline(op: Operation) -> dict[str, Any]:
    rule = PipelineRule(
        op.text("over"),
        op.text("schedule", "1f1b"),
        op.integer("chunks", 0),
        op.integers("layers"),
        op.names("scatter"),
        op.loc,
    )
    return {"pipeline": rule}


#: The fields of a `Strategy` that statements add to.
_LISTS = {"splits", "whole", "gathered", "deferred", "exchanged", "rings", "blocking", "loads"}
#: What each statement sets of a `Strategy`.
_STATEMENTS: Mapping[str, Callable[[Operation], dict[str, Any]]] = {
    "stg.split": _split,
    "stg.gather": _gather,
    "stg.expert_load": _load,
    "stg.defer": lambda op: {"deferred": op.names("over")},
    "stg.exchange": lambda op: {"exchanged": ((op.text("dim"), op.names("into")),)},
    "stg.ring": lambda op: {
        "rings": (RingRule(op.text("dim"), op.text("order", "zigzag"), op.loc),)
    },
    "stg.shard_params": lambda op: {
        "zero": op.integer("zero"),
        "zero_axes": op.names("over"),
        "reshard": op.text("reshard", "always"),
        "prefetch": op.integer("prefetch", 1),
    },
    "stg.microbatches": lambda op: {
        "microbatches": op.integer("count"),
        "batch": op.text("split", "B"),
    },
    "stg.pipeline": _pipeline,
    "stg.dtypes": _dtypes,
    "stg.tp_inputs": lambda op: {"save_gathered": op.text("policy") == "save_gathered"},
    "stg.blocking": lambda op: {"blocking": op.names("over")},
    "stg.capacity": lambda op: {"capacity": op.expr("factor")},
    "stg.recompute": lambda op: {
        "recompute": Recompute(
            op.text("policy", "none"),
            op.names("ops"),
            op.integer("layers", 0),
            op.integer("every", 0),
            op.loc,
        )
    },
    "stg.offload": lambda op: {"offload": op.names("what"), "copy_nodes": op.flag("nodes")},
    "stg.bucket": lambda op: {"bucket": op.integer("bytes")},
    "stg.optimizer": _optimizer,
}
