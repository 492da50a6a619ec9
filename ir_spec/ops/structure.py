"""Ops for the structure of a module: declarations, functions, repetition, accumulation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation
from stagec.ir.expr import Expr, fraction, substitute, symbol
from stagec.ir.facts import Relation
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule
from stagec.ir.serving_step import MODES
from stagec.ir.traits import (
    Accumulates,
    Declares,
    Free,
    HasRegion,
    Holds,
    Named,
    OpenParams,
    Repeats,
    Terminates,
    Trait,
)
from stagec.ir.types import TensorType, Type
from stagec.support.diagnostics import NotAnIntegerError
from stagec.support.limits import MAX_RANKS


class Declaration(OpDef):
    """Base class of declarations, which compute nothing."""

    results = ()
    traits: ClassVar[tuple[Trait, ...]] = (Declares(),)


class ModuleOp(Declaration):
    """The unit of compilation: declarations, functions and strategies."""

    name = "stg.module"
    traits = (Declares("module"), Holds("declarations, functions and strategies"))
    parents = ()
    params = (
        Param("phase", "name", "how far the module is compiled"),
        Param("positions", "int", "positions that the model was trained for; serving more warns"),
        Param("serving", "name", "which step of serving the module is", choices=MODES),
        Param("sequences", "dims", "dimensions of tokens, the longest first (default S)"),
        Param("hidden_dropout", "ratio", "the rate with which what layers add is dropped"),
        Param("embedding_dropout", "ratio", "that of what the first layer takes"),
        Param("attention_dropout", "ratio", "that of the shares of attention"),
    )
    example = "stg.module @m[phase = parsed] {\n}"

    def verify(self, op: Operation) -> Iterator[str]:
        named = op.names("sequences")
        if len(set(named)) < len(named):
            yield "'sequences' has a dimension twice"


class SizesDeclaration(Declaration):
    """Base class of ops that declare names, optionally with positive sizes."""

    parents = ("stg.module",)
    noun: ClassVar[str] = "name"

    def verify(self, op: Operation) -> Iterator[str]:
        for name, value in op.attrs.items():
            number = value.value if isinstance(value, Expr) else None
            if value is not True and (number is None or number < 1):
                yield f"{self.noun} {name} expects a positive integer, found {value}"


class SymbolsOp(SizesDeclaration):
    """Declares symbolic sizes, which are positive integers, optionally with default values."""

    name = "stg.symbols"
    traits = (Declares("symbols"), OpenParams())
    noun = "symbol"
    example = "stg.symbols[B, S = 8192]"


class AssumeOp(Declaration):
    """States relations between sizes that every binding must satisfy; they make divisions exact."""

    name = "stg.assume"
    traits = (Declares("relations"),)
    parents = ("stg.module",)
    params = (Param("relations", "relations", "the relations", required=True, positional=True),)
    example = "stg.assume[S % tp == 0, B >= 1]"

    def verify(self, op: Operation) -> Iterator[str]:
        relations = op.attrs.get("relations")
        for relation in relations if isinstance(relations, tuple) else ():
            if isinstance(relation, Relation) and not relation.symbols and not _holds(relation):
                yield f"{relation} can never hold"


def _holds(relation: Relation) -> bool:
    """Whether a relation of constants holds; it does not for fractions."""
    try:
        return relation.holds({})
    except NotAnIntegerError:
        return False


class MeshOp(SizesDeclaration):
    """Declares the device mesh: named axes, slowest first, optionally with sizes."""

    name = "stg.mesh"
    traits = (Declares("axes"), OpenParams(), Named())
    noun = "mesh axis"
    example = "stg.mesh @pod[pp = 2, dp, tp]"

    def verify(self, op: Operation) -> Iterator[str]:
        """Check that sizes are positive, and the number of ranks is not too large."""
        yield from super().verify(op)
        ranks = prod(v.value or 1 for v in op.attrs.values() if isinstance(v, Expr))
        if ranks > MAX_RANKS:
            yield f"has {ranks:,} ranks, expected at most {MAX_RANKS:,}"


class ZigzagOp(Declaration):
    """Declares the order of positions on ranks: a dimension of this name is divided into 2n chunks,
    and rank i of the n ranks of `over` has chunks i and 2n-1-i.

    With this order, every rank does the same work under a causal mask. The statement `stg.ring`
    adds it.
    """

    name = "stg.zigzag"
    traits = (Declares("order"),)
    params = (
        Param("dims", "dims", "dimension names", required=True, positional=True),
        Param("over", "axes", "mesh axes, major first", required=True),
    )
    example = "stg.zigzag[S, over = cp]"


class RowsOp(Declaration):
    """The number of rows of a rank's part of an unevenly loaded dimension if all loads were equal.

    `of` is the dimension whose parts have loads, such as E, `over` the axes that split it, major
    first. Rank i of these has `even` rows times the load of part i in the current iteration, which
    is the symbol `E_load` in lowered sizes; `E_load_most` is the largest load of all parts,
    `E_load_used` the share of the experts of part i that receive rows. With `first` = 58, it
    applies to repeats whose layers are counted from 58, and the symbols are `E_load58`,
    `E_load58_most` and `E_load58_used`. Without axes in `over`, all ranks have all parts.
    Collective insertion adds it if a strategy has `stg.expert_load`.
    """

    name = "stg.rows"
    traits = (Declares("loads"),)
    params = (
        Param("of", "dim", "the dimension whose parts have loads", required=True),
        Param("first", "int", "the layer that its repeat begins with (default 0)"),
        Param("over", "axes", "mesh axes, major first", required=True),
        Param("even", "size", "rows under even load", required=True),
    )
    example = "stg.rows[of = E, over = ep, even = B*S*T/ep]"


class OrderOp(Declaration):
    """Declares the order in which layers of several kinds run; kinds are the names of repeats.

    Repeats with this `order` that pass carried values to each other are one stack: the carried
    values pass through its layers in this order. Each kind runs its own iterations first to last. A
    chain of repeats without it runs all layers of one kind, then all of the next.
    """

    name = "stg.order"
    traits = (Declares("layers"), Named())
    parents = ("stg.module",)
    params = (Param("layers", "order", "kinds of layers in order", required=True, positional=True),)
    example = "stg.order @layers[(5*local, global)*10, 2*local]"


class FuncOp(Declaration):
    """A function. Arguments with the clause `param` are trained; those with `frozen` are parameters
    without gradient and optimizer state; those with `state` are updated in place. Those with
    `cache` (rows of tokens) or `recurrent` (state of fixed size) are kept between serving steps:
    the function returns their new values.

    A `private` function is a block that others call. It may leave out the types of all arguments. A
    call may leave out the last `optional` arguments and `optional_results` results. With `stages`,
    the ranks at these coordinates along the axis `over` run the function; `parameters` is then the
    number of parameters of the whole model, `trainable` the number of trained ones if others are
    frozen. With `part`, the function is a part of the model; `peers` are the other parts that train
    parameters. The part `main` has the loss. With `freed`, gradients do not exist before backward,
    with `spent` besides, nor behind the update that uses them last; with `consumed`, updates run
    beside backward and free them.
    """

    name = "stg.func"
    traits = (Declares("function"), HasRegion(), Named())
    parents = ("stg.module",)
    params = (
        Param("private", "flag", "a block, which others call"),
        Param("optional", "int", "how many of its last arguments a call may leave out"),
        Param("optional_results", "int", "how many of its last results a call may leave out"),
        Param("over", "axis", "the axis of pipeline stages"),
        Param("stages", "ints", "the stages that run it"),
        Param("parameters", "size", "parameters of the whole model"),
        Param("trainable", "size", "those that are trained, if others are frozen"),
        Param("part", "name", "the part of the model that it is"),
        Param("peers", "names", "the other parts that train parameters"),
        Param("freed", "flag", "gradients are freed between steps"),
        Param("copied", "flag", "sums of gradients end when they are copied into buckets"),
        Param("spent", "flag", "with freed: gradients end with the updates that use them"),
        Param("consumed", "flag", "gradients are freed by their updates"),
        Param("guest", "name", "the pod that runs here too; its values have its name in front"),
    )
    example = "stg.func @f(%x: f32[B]) -> f32[B] {\n  stg.return(%x)\n}"


class Terminator(OpDef):
    """Base class of ops that end a region."""

    operands = ("value*",)
    results = ()
    traits: ClassVar[tuple[Trait, ...]] = (Terminates(),)


class ReturnOp(Terminator):
    """Ends a function with its results."""

    name = "stg.return"
    example = "stg.return(%x)"


class YieldOp(Terminator):
    """Ends the region of a repeat or an accumulate with the values that it yields."""

    name = "stg.yield"
    example = "stg.yield(%x)"


class RegionOp(OpDef):
    """Base class of ops whose region runs several times; its arguments are bound to the
    operands."""

    operands = ("init*",)
    results = ("yielded*",)


#: For repeats whose layers have different loads.
FIRST = Param("first", "sizes", "where loads differ: the number of the first layer, by stage")
#: For repeats that are kinds of layers in a stack.
ORDER = Param("order", "symbol", "the stg.order of the stack that its layers belong to")
#: For repeats in which only some iterations recompute.
REPLAY = (
    Param("replay_first", "int", "slices in which ops of phase recompute run, from the first"),
    Param("replay_every", "int", "they run in every n-th slice, beginning with slice n - 1"),
)
#: For repeats before differentiation: 'choose-recompute' writes them, 'differentiate' reads them.
RECOMPUTE = (
    Param(
        "recompute",
        "name",
        "what backward computes again (default none)",
        choices=("none", "selective", "full", "full_replay"),
    ),
    Param("recompute_ops", "names", "or: results of these ops"),
    Param("recompute_keep", "names", "results of these ops are kept all the same"),
    Param("recompute_products", "int", "every n-th matrix product is computed again nevertheless"),
    Param("recompute_modules", "names", "modules with checkpoints of their own"),
    Param("recompute_first", "int", "only in the first iterations, so many"),
    Param("recompute_every", "int", "only in every n-th iteration"),
)
#: For accumulations before the cut into stages: 'split-microbatches' writes them, 'split-stages'
#: reads them.
PIPELINE = (
    Param("pipeline", "axis", "the mesh axis of the pipeline stages into which it is to be cut"),
    Param("pipeline_schedule", "str", 'the schedule of these stages (default "1f1b")'),
    Param("pipeline_chunks", "int", "parts of the model per rank (default: the schedule's own)"),
    Param("pipeline_layers", "ints", "layers of each part of the model"),
    Param("pipeline_scatter", "axes", "mesh axes over which ranks send a part of a message each"),
)


class RepeatOp(RegionOp):
    """Runs its region `count` times, like a scan.

    The first `carry` bindings are carried from one iteration to the next; the others are sliced
    along their first dimension. Further yielded values are stacked along a new first dimension.
    `reverse` runs from the last slice to the first. With `replay_first` or `replay_every`, ops of
    phase recompute run only in the first slices, or in every n-th slice. With an `order`, the name
    of the repeat is a kind of layers, which run among those of other kinds. Parameters that begin
    with `recompute` are for differentiation, which removes them.
    """

    name = "stg.repeat"
    traits = (Repeats(),)
    params = (
        Param("count", "size", "the number of iterations", required=True),
        Param("carry", "int", "how many values are carried (default 1)"),
        Param("reverse", "flag", "run from the last slice to the first"),
        Param("first_idle", "flag", "backward of layers below which nothing is trained"),
        ORDER,
        FIRST,
        *REPLAY,
        *RECOMPUTE,
    )
    example = "%y = stg.repeat[count = L, carry = 1] (%h = %x, %w = %W) {\n  stg.yield(%h)\n}"

    def region_args(self, op: Operation) -> Sequence[Type]:
        carry = op.integer("carry", 1)
        types = [v.tensor for v in op.operands]
        return [*(t.inner for t in types[:carry]), *(t.sliced() for t in types[carry:])]

    def infer(self, op: Operation) -> list[Type]:
        carry, count = op.integer("carry", 1), op.expr("count")
        yielded = op.body.terminator.operands
        carried: list[Type] = [a.tensor for a in op.body.args[:carry]]
        return carried + [v.tensor.stacked(count) for v in yielded[carry:]]

    def verify(self, op: Operation) -> Iterator[str]:
        carry, count = op.integer("carry", 1), op.expr("count")
        if len(op.operands) < carry or len(op.body.terminator.operands) < carry:
            yield f"carries {carry} values, so it must bind and yield at least {carry}"
            return
        for value in op.operands[carry:]:
            dims = value.tensor.dims
            if dims and dims[0].split:
                yield (
                    f"%{value.name} is sliced along {count}, but that dimension is split: "
                    f"{value.type}; each rank needs the slice of an iteration"
                )
            if not dims or dims[0].size != count:
                yield f"%{value.name} is sliced, expected {count} as first dimension: {value.type}"
        for arg, value in zip(op.body.args[:carry], op.body.terminator.operands, strict=False):
            if arg.tensor.shape != value.tensor.shape or arg.tensor.dtype != value.tensor.dtype:
                yield f"%{arg.name} is carried as {arg.type}, but %{value.name} is {value.type}"


class AccumulateOp(RegionOp):
    """Gradient accumulation: splits the symbol `split` (the batch) into `count` microbatches.

    Bound values are sliced along the dimensions that contain the symbol; others are the same for
    every microbatch. Yielded values that have the symbol in a dimension, such as logits, are
    concatenated along it. Others are summed over the microbatches, into buffers that exist during
    all of them. The cost of adding a gradient is an op in the region, `stg.accumulate_grad`; a
    gradient that is reduced in the region is added next to its reduction. With a `schedule`, the
    region is a list of actions, which the schedule orders; a schedule with two copies of the model
    gives each half of the microbatches. Parameters that begin with `pipeline` are for the cut into
    pipeline stages, which removes them.
    """

    name = "stg.accumulate"
    traits = (Accumulates(),)
    params = (
        Param("count", "size", "the number of microbatches", required=True),
        Param("split", "dim", "the symbol that is split (default B)", default="B"),
        Param("schedule", "str", "the pipeline schedule that orders its actions"),
        Param("chunks", "int", "chunks of the model per rank under that schedule"),
        *PIPELINE,
    )
    example = "%l = stg.accumulate[count = 4] (%t = %tokens) {\n  stg.yield(%t)\n}"

    def region_args(self, op: Operation) -> Sequence[Type]:
        return [microbatch(op, v.tensor) for v in op.operands]

    def infer(self, op: Operation) -> list[Type]:
        return [joined(op, v.tensor) for v in op.body.terminator.operands]


def joined_dim(op: Operation, type_: TensorType) -> int | None:
    """The dimension along which values of this type are concatenated over microbatches; None for a
    type without the split symbol, whose values are summed."""
    name = op.text("split")
    return next((d for d, dim in enumerate(type_.dims) if name in dim.size.symbols), None)


def joined(op: Operation, type_: TensorType) -> TensorType:
    """The type of a value of all microbatches together: the inverse of `microbatch`."""
    d, name = joined_dim(op, type_), op.text("split")
    if d is None:
        return type_
    whole = substitute(type_.dims[d].size, {name: symbol(name) * op.expr("count")})
    return type_.with_dim(d, replace(type_.dims[d], size=whole))


def microbatch(op: Operation, type_: TensorType) -> TensorType:
    """The type of one microbatch of a value. Raises `DiagnosticError` if the number of microbatches
    is less than 1."""
    name, count = op.text("split"), op.expr("count")
    if count.value is not None and count.value < 1:
        raise op.error(
            f"'{op.name}' expects at least one microbatch, found {count}",
            remedy="count is the number of microbatches, 1 for a single one",
        )
    part = {name: symbol(name) / count}
    parts = [substitute(d.size, part) if name in d.size.symbols else d.size for d in type_.dims]
    dims = tuple(replace(d, size=size) for d, size in zip(type_.dims, parts, strict=True))
    return replace(type_.inner, dims=dims)


class ConstantOp(OpDef):
    """A scalar constant, f32."""

    name = "stg.constant"
    params = (Param("value", "ratio", "the number", required=True),)
    traits = (Free(),)
    example = "%one = stg.constant[value = 1] : f32[]"

    def rule(self, op: Operation) -> Rule:
        return Rule((), ((),))

    def infer(self, op: Operation) -> list[Type]:
        return [TensorType("f32")]

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return []

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.float64(ratio(op, "value"))]


def ratio(op: Operation, name: str, default: float = 0.0) -> float:
    """A `ratio` parameter as a float, for numeric references."""
    value = op.attrs.get(name)
    return float(fraction(value)) if isinstance(value, Expr) else default
