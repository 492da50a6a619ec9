"""Ops that move or name data and compute nothing: reshape, permute, stack, place, gradient."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ZERO, Expr, const, fraction
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, EagerForm, Grads, OpDef
from stagec.ir.param import Param
from stagec.ir.recompute_window import replays
from stagec.ir.rule import Rule, letters, make_rule, parse_rule
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import (
    CopiesMemory,
    FinalGradient,
    Free,
    Fusible,
    PartOfBuffer,
    Recalls,
    Stays,
    Trait,
    View,
)
from stagec.ir.types import WHOLE, Type
from stagec.ir_spec.ops.base import backwards, gradients, present
from stagec.support.limits import MAX_RESULTS

#: For a view: backward takes the view again, so it is not kept.
AGAIN = Param("again", "flag", "backward takes the view again, it is not kept")


class Reshape(OpDef):
    """Splits and joins dimensions as named factors, "bs(gr)k->bsgrk"; a view."""

    name = "stg.reshape"
    operands = ("x",)
    traits = (View(),)
    params = (
        Param("spec", "str", "the rule", required=True, positional=True),
        Param(
            "factors", "names", "factors whose sizes are given: all but one of a split dimension"
        ),
        Param("sizes", "sizes", "their sizes"),
        AGAIN,
    )
    example = (
        '%y = stg.reshape["bs(gr)k->bsgrk", factors = g, sizes = G](%x) : bf16[B, S, G, H/G, K]'
    )

    def rule(self, op: Operation) -> Rule:
        sizes = dict(zip(op.names("factors"), op.exprs("sizes"), strict=False))
        return make_rule(op.text("spec"), linear=[0], sizes=sizes)

    def fold(self, op: Operation) -> Value | None:
        """The operand, if no dimension is split or joined."""
        left, _, right = op.text("spec").partition("->")
        return op.operands[0] if left.strip() == right.strip() else None

    def verify(self, op: Operation) -> Iterator[str]:
        if len(op.names("factors")) != len(op.exprs("sizes")):
            yield "expects one size for each of 'factors'"
        (left,), (right,) = parse_rule(op.text("spec"))
        if [f for g in left for f in g] != [f for g in right for f in g]:
            yield f"expects the factors in the same order, found '{op.text('spec')}'"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        _, (right,) = parse_rule(op.text("spec"))
        sizes = factor_sizes(op, self.rule(op))
        inner = [f for g in right for f in g[:-1]]
        attrs: dict[str, RawAttr] = {"spec": backwards(op)}
        if inner:
            attrs |= {"factors": tuple(inner), "sizes": tuple(sizes[f] for f in inner)}
        hint = op.operands[0].prefixed("d_")
        return [b.value("stg.reshape", [present(grads[0])], attrs, hint=hint)]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0].reshape(ctx.shape(op.result))]


class Permute(OpDef):
    """Reorders dimensions, "bshk->bhsk": a copy in memory, no FLOPs.

    An einsum does not need it: its rule can have the dimensions of operands in any order.
    """

    name = "stg.permute"
    traits = (Fusible(),)
    operands = ("x",)
    params = (Param("spec", "str", "the rule", required=True, positional=True),)
    example = '%y = stg.permute["bshk->bhsk"](%q) : bf16[B, H, S, K]'

    def rule(self, op: Operation) -> Rule:
        return make_rule(op.text("spec"), linear=[0])

    def verify(self, op: Operation) -> Iterator[str]:
        yield from whole_dimensions(op)
        rule = self.rule(op)
        if rule.contracted(0):
            yield f"expects all dimensions kept, found '{op.text('spec')}'; see stg.sum and stg.max"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, grads, {"spec": backwards(op)}, by="stg.permute")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        (left,), (right,) = parse_rule(op.text("spec"))
        return [np.transpose(args[0], [left.index(g) for g in right])]


def whole_dimensions(op: Operation) -> Iterator[str]:
    """A message for a rule that joins dimensions."""
    _, (joined, *_) = parse_rule(op.text("spec"))
    if any(len(group) > 1 for group in joined):
        yield f"expects one letter for each dimension, found '{op.text('spec')}'; stg.reshape joins"


class PartOf(OpDef):
    """Its operands, which the code of a model computes as views of one product. The whole product
    is kept as long as any of them; `expand-kernels` removes the op if software computes each
    separately, or in its own kernels."""

    name = "stg.part_of"
    operands = ("x*",)
    results = ("x*",)
    traits = (PartOfBuffer(),)
    example = "%k1, %v1 = stg.part_of(%k, %v) : (bf16[B, S, G, K], bf16[B, S, G, K])"

    def rule(self, op: Operation) -> Rule:
        """Dimensions of equal size are one factor, so that they are split equally."""
        known: dict[tuple[Expr, int], str] = {}
        free = iter(letters(sum(v.tensor.rank for v in op.operands)))
        sides: list[str] = []
        for value in op.operands:
            shape = value.tensor.shape
            keys = [(size, shape[:i].count(size)) for i, size in enumerate(shape)]
            sides.append("".join(known.setdefault(key, next(free)) for key in keys))
        text = ",".join(sides)
        return make_rule(f"{text}->{text}", linear=range(len(sides)))

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [v.tensor.dtype for v in op.operands]

    def eager_forms(self) -> Mapping[str, EagerForm]:
        return {"part_of": lambda b, op, on_rank: None}

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Nothing is kept for backward."""
        return op.operands

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return grads

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return args


class Unbind(OpDef):
    """Views of the slices along dimension `dim`, whose size is the number of results."""

    name = "stg.unbind"
    operands = ("x",)
    results = ("part*",)
    traits = (View(),)
    params = (
        Param("dim", "int", "the dimension", required=True),
        Param("count", "int", "the number of slices", required=True),
        Param("joined", "flag", "model code computes the slices by one product"),
    )
    example = (
        "%q, %k, %v = stg.unbind[dim = 1, count = 3](%qkv) : "
        "(bf16[B, S, H, K], bf16[B, S, H, K], bf16[B, S, H, K])"
    )

    def rule(self, op: Operation) -> Rule:
        d, text = op.integer("dim"), letters(op.operands[0].tensor.rank - 1)
        packed, count = text[:d] + "z" + text[d:], op.integer("count")
        if not 0 < count <= MAX_RESULTS:
            raise op.error(
                f"'{op.name}' has 1 to {MAX_RESULTS:,} parts, found count = {count}",
                remedy="give the size of the dimension as count",
            )
        return make_rule(f"{packed}->" + ",".join([text] * count), whole="z", linear=[0])

    def verify(self, op: Operation) -> Iterator[str]:
        if op.operands[0].tensor.shape[op.integer("dim")] != op.integer("count"):
            actual = op.operands[0].type
            yield f"expects {op.integer('count')} as dimension {op.integer('dim')}, found {actual}"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, all_present(op, grads), by="stg.pack")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return list(np.moveaxis(args[0], op.integer("dim"), 0))


class PackOp(OpDef):
    """Packs its operands along a new dimension `dim`, as `stack` of NumPy; copies, no FLOPs."""

    name = "stg.pack"
    traits = (Fusible(),)
    operands = ("x*",)
    params = (Param("dim", "int", "the new dimension", required=True),)
    example = "%qkv = stg.pack[dim = 1](%q, %k, %v) : bf16[B, 3, S, H, K]"

    def rule(self, op: Operation) -> Rule:
        d, text, count = op.integer("dim"), letters(op.operands[0].tensor.rank), len(op.operands)
        packed = text[:d] + "z" + text[d:]
        spec = ",".join([text] * count) + f"->{packed}"
        return make_rule(spec, whole="z", linear=range(count), sizes={"z": const(count)})

    def fold(self, op: Operation) -> Value | None:
        """The operand of an unbind along the same dimension, if all its slices are packed again."""
        inner = op.operands[0].producer if op.operands else None
        if inner is None or not isinstance(inner.definition, Unbind):
            return None
        same_order = op.operands == tuple(inner.results)
        return inner.operands[0] if same_order and op.expr("dim") == inner.expr("dim") else None

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        count = {"count": const(len(op.operands))}
        return gradients(b, op, grads, count, by="stg.unbind")

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.stack(args, axis=op.integer("dim"))]


def all_present(op: Operation, grads: Sequence[Value | None]) -> list[Value]:
    """The gradients of all results. Raises `DiagnosticError` if one has none."""
    for result, grad in zip(op.results, grads, strict=True):
        if grad is None:
            raise op.error(
                f"'{op.name}' has no gradient, because %{result.name} does not influence the loss",
                remedy=f"use all results of {op.name}, or remove that part from its operand",
            )
    return [g for g in grads if g is not None]


class Identity(OpDef):
    """Base class of ops that return their operand and only define the placement of their result."""

    operands = ("x",)
    traits: ClassVar[tuple[Trait, ...]] = (View(),)
    index = IndexRule("...->...", linear=(0,))

    def bytes_touched(self, op: Operation) -> Expr:
        return ZERO

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0]]


class ShardingConstraint(Identity):
    """Fixes a placement: the result has the written type, independent of the strategy.

    With `both`, the placement of the gradient is fixed in the same way, and the ops that compute
    the two values are not placed to match: the values are moved, as in Ulysses. With `again`,
    backward moves the operand again where it uses the result, which is not kept.
    """

    name = "stg.sharding_constraint"
    params = (
        Param("both", "flag", "pin the gradient too"),
        Param("again", "flag", "backward moves the value again"),
    )
    example = "%y = stg.sharding_constraint(%x) : bf16[B@dp, S, V]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        if not op.flag("both"):
            return grads
        dy, pin = present(grads[0]), replace(op.result.tensor, partial=None)
        hint = op.operands[0].prefixed("d_")
        return [b.value("stg.sharding_constraint", [dy], {"both": True}, type=pin, hint=hint)]


class Copy(OpDef):
    """Copies a value to host memory (`mem(host)` in its type) or back to the device; no FLOPs.

    With `share`, that share of its bytes goes to the host (`mem(host, 1/2)`), and the rest to
    another buffer on the device; the copy back joins both in a new buffer. Its bytes are those
    between host and device. The trace has a node for it only with the flag `node`.
    """

    name = "stg.copy"
    operands = ("x",)
    traits = (CopiesMemory(),)
    params = (
        Param("to", "name", "host or device", required=True, choices=("host", "device")),
        Param("share", "ratio", "the part that goes to the host (default all)"),
        Param("node", "flag", "it is a node of the trace"),
    )
    index = IndexRule("...->...", linear=(0,))
    example = "%y = stg.copy[to = host](%x) : bf16[B, S, D | mem(host)]"

    def infer(self, op: Operation) -> list[Type]:
        share = fraction(op.expr("share")) if "share" in op.attrs else WHOLE
        return [replace(op.operands[0].tensor.inner, memory=op.text("to"), share=share)]

    def verify(self, op: Operation) -> Iterator[str]:
        if op.operands[0].tensor.memory == op.text("to"):
            yield f"copies to {op.text('to')} memory, but %{op.operands[0].name} is already there"
        part = 0 < fraction(op.expr("share", ZERO)) < 1 and op.text("to") == "host"
        if "share" in op.attrs and not part:
            yield f"expects 'share' between 0 and 1 of a copy to the host, found {op.expr('share')}"

    def bytes_touched(self, op: Operation) -> Expr:
        there = op.result if op.text("to") == "host" else op.operands[0]
        return there.tensor.bytes_in(there.tensor.memory)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0]]


class Recall(OpDef):
    """A forward value in backward: recomputed in the iterations that replay, otherwise stashed.

    The repeat around it defines which iterations replay (`replay_first`, `replay_every`); slices of
    the stash that are never used are not kept.
    """

    name = "stg.recall"
    operands = ("again", "stashed")
    traits = (View(), Recalls())
    index = IndexRule("...,...->...", linear=(0, 1))
    example = "%n = stg.recall(%n_again, %n_stashed) : bf16[B, S, D]"

    def bytes_touched(self, op: Operation) -> Expr:
        return ZERO

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        repeat = op.parent_op
        return [args[0 if repeat is not None and replays(repeat, ctx.iteration) else 1]]


class Discard(OpDef):
    """Uses values without a result, so that their computation is not dead code. With `alone`, it
    applies only if its action runs separately, not directly after another action of the
    microbatch. With `saved` it does not apply where backward computes the value again: a node of
    PyTorch's graph releases what it saved after the casts of its gradients, but what it takes from
    a checkpoint when its function returns. With `graph` the graph of a checkpoint has the values,
    and something has a name for that: 'keep-expert-rows' makes them live longer."""

    name = "stg.discard"
    operands = ("x*",)
    results = ()
    traits = (Free(), Stays())
    params = (
        Param("alone", "flag", "if the action around it runs by itself"),
        Param("saved", "flag", "if the value comes from forward, and is not computed again"),
        Param("graph", "flag", "if the graph of a checkpoint has the values"),
    )
    example = "stg.discard(%y)"


class Workspace(OpDef):
    """Memory that the software uses during the following operations, until a `stg.discard`; nothing
    is computed."""

    name = "stg.workspace"
    traits = (Free(), Stays())
    example = "%m = stg.workspace : f32[2, B, S]"

    def infer(self, op: Operation) -> list[Type]:
        return [r.type for r in op.results if r.type is not None]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.broadcast_to(0.0, ctx.shape(op.result))]  # takes no memory


class Reshard(Discard):
    """Frees gathered parameters: each rank keeps its shard. All results of one call stay in memory
    until here, used or not.

    FSDP ends a unit in this way: a block after its forward and again after its backward; the root
    (parameters outside of blocks) after the backward of the step, before its gradients are reduced.
    """

    name = "stg.reshard"
    example = "stg.reshard(%w, %table)"


class Gradient(Identity):
    """Marks the final gradient of a parameter, reduced and placed as the optimizer needs it."""

    name = "stg.gradient"
    traits = (View(), FinalGradient(), Stays())
    example = "%g = stg.gradient(%dw) : f32[D@dp, F@tp]"
