"""Collectives in global view: they change the placement of values, never the shape. Each defines
its result and its exchange.

Every collective takes any number of operands (a coalesced call over one buffer); `dim` has a
dimension for each. The numeric exchange works on the local arrays of one group, in the order of the
group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TypeAlias

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, Expr, evaluate, total
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef
from stagec.ir.param import Param
from stagec.ir.traits import KeepsPart, StaysUntilNext, View
from stagec.ir.types import FLOATS, AxisUse, Dim, Partial, TensorType, Type

#: Computes the local results of one group from its local operands.
Exchange: TypeAlias = Callable[[Sequence[Array]], Sequence[Array]]
_OVER = Param("over", "axes", "the mesh axes of the group, major first", required=True)
#: The parameters that are equal for a movement and its inverse.
_ALONG: Mapping[str, str] = {"dim": "dim", "over": "over"}
_DIM = Param("dim", "ints", "the dimension, one for each operand", required=True)


def ring_rounds(collective: str) -> int:
    """How many times a rank in a ring of n sends (n-1)/n of the full buffer: twice for an
    `all_reduce`, which is a `reduce_scatter` and an `all_gather`, once for any other collective."""
    return 2 if collective == "all_reduce" else 1


class Movement(OpDef):
    """Base class of ops that change the placement of each operand independently."""

    operands = ("x*",)
    results = ("result*",)

    def move(self, op: Operation, index: int, type_: TensorType) -> TensorType:
        """The type of result `index` from that of its operand. Raises ValueError for an invalid
        placement."""
        raise NotImplementedError

    def infer(self, op: Operation) -> list[Type]:
        try:
            return [self.move(op, i, v.tensor) for i, v in enumerate(op.operands)]
        except ValueError as e:
            raise op.error(
                f"'{op.name}' {e}", remedy="give it an operand with this placement"
            ) from None

    def verify(self, op: Operation) -> Iterator[str]:
        if len(op.results) != len(op.operands):
            yield f"expects one result for each of its {len(op.operands)} values"
            return
        for i, (value, result) in enumerate(zip(op.operands, op.results, strict=True)):
            try:
                expected = self.move(op, i, value.tensor)
            except ValueError as e:
                yield str(e)
                continue
            written = result.tensor
            if (expected.dims, expected.partial) != (written.dims, written.partial):
                yield f"gives {expected}, but %{result.name} is written as {written}"


class Collective(Movement):
    """Base class of collectives."""

    def exchange(self, op: Operation, index: int, parts: Sequence[Array]) -> Sequence[Array]:
        """The local results of one group from its local operands."""
        raise NotImplementedError

    def stages(
        self, op: Operation, index: int, env: Mapping[str, int]
    ) -> Sequence[tuple[tuple[str, ...], Exchange]]:
        """The exchange of operand `index` as successive exchanges, each with the axes of its
        groups, for these values of symbols."""
        return [(op.names("over"), lambda parts: self.exchange(op, index, parts))]

    def buffer(self, op: Operation) -> Expr:
        """The bytes of the full buffer of one rank, all operands together."""
        return total(v.tensor.local_bytes for v in op.operands)

    def bytes_touched(self, op: Operation) -> Expr:
        return self.buffer(op)


def _undone(
    op: Operation, inverse: type[Movement], names: Mapping[str, str] = _ALONG
) -> Value | None:
    """The operand of the op's inverse, if that is the producer of the op's only operand. `names`
    maps parameters of the op to those of the inverse that must be equal."""
    inner = op.operands[0].producer if len(op.operands) == 1 else None
    if inner is None or not isinstance(inner.definition, inverse) or len(inner.operands) != 1:
        return None
    fits = all(inner.attrs.get(theirs) == op.attrs.get(own) for own, theirs in names.items())
    return inner.operands[0] if fits else None


def operand_dim(op: Operation, index: int) -> int:
    """The dimension for operand `index`. Raises ValueError if it has no such dimension."""
    dims = op.integers("dim")
    if len(dims) not in (1, len(op.operands)):
        raise ValueError(f"moves {len(op.operands)} values, but 'dim' has {len(dims)} dimensions")
    return _in_range(op, index, dims[index if len(dims) > 1 else 0])


def _in_range(op: Operation, index: int, dim: int) -> int:
    value = op.operands[index]
    if not 0 <= dim < value.tensor.rank:
        raise ValueError(f"moves dimension {dim}, but %{value.name} is {value.type}")
    return dim


def _unsplit(dim: Dim, over: tuple[str, ...]) -> Dim:
    keep = len(dim.split) - len(over)
    if keep < 0 or dim.axes[keep:] != over:
        raise ValueError(f"expects a dimension split last over {', '.join(over)}, found {dim}")
    return replace(dim, split=dim.split[:keep])


def _split(dim: Dim, over: tuple[str, ...]) -> Dim:
    return replace(dim, split=dim.split + tuple(AxisUse(a) for a in over))


def _sliced(op: Operation, index: int, type_: TensorType) -> TensorType:
    """The local part of a replicated value."""
    over, d = op.names("over"), operand_dim(op, index)
    if set(over) & set(type_.axes):
        raise ValueError(f"expects a value replicated over {', '.join(over)}, found {type_}")
    return _with_dim(type_, d, _split(type_.dims[d], over))


def _with_dim(type_: TensorType, d: int, dim: Dim) -> TensorType:
    return replace(type_.inner.with_dim(d, dim), placed=True)


def _reduced(type_: TensorType, over: tuple[str, ...], kind: str) -> TensorType:
    if (
        type_.partial is None
        or type_.partial.kind != kind
        or not set(over) <= set(type_.partial.axes)
    ):
        raise ValueError(f"expects a {kind} unreduced over {', '.join(over)}, found {type_}")
    rest = tuple(a for a in type_.partial.axes if a not in over)
    return replace(type_.inner, partial=Partial(kind, rest) if rest else None, placed=True)


class CopyIn(OpDef):
    """Copies gradients into the buffer that one call reduces; with `to`, casts them to that element
    type; with `sizes`, pads them with zeros along `dim`. The buffer is kept until the next one
    exists, or until backward ends.

    FSDP2 reduces the gradients of a unit in this way (`foreach_reduce`): it keeps the input of a
    reduce-scatter until that of the next unit begins (`FSDPCommContext.reduce_scatter_states`).
    """

    name = "stg.copy_in"
    traits = (StaysUntilNext(),)
    operands = ("x*",)
    results = ("copy*",)
    params = (
        Param("to", "name", "the element type of the copies", choices=tuple(sorted(FLOATS))),
        Param("dim", "ints", "the dimension that is filled up, one for each operand"),
        Param("sizes", "sizes", "its elements then, for each operand"),
    )
    example = "%y = stg.copy_in[to = f32](%x) : f32[B, S, D]"

    def infer(self, op: Operation) -> list[Type]:
        return [self._copied(op, i, v.tensor.inner) for i, v in enumerate(op.operands)]

    def verify(self, op: Operation) -> Iterator[str]:
        if ("sizes" in op.attrs) != ("dim" in op.attrs):
            yield "expects 'dim' and 'sizes' together, for dimensions that are padded"
        elif "sizes" in op.attrs and len(op.exprs("sizes")) != len(op.operands):
            yield f"expects one of 'sizes' for each of its {len(op.operands)} values"

    def _copied(self, op: Operation, index: int, whole: TensorType) -> TensorType:
        if "sizes" in op.attrs:
            d = operand_dim(op, index)
            whole = _with_dim(whole, d, replace(whole.dims[d], size=op.exprs("sizes")[index]))
        return replace(whole, dtype=op.text("to")) if "to" in op.attrs else whole

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        made = [np.zeros(ctx.shape(v)) for v in op.results]
        for copy, x in zip(made, args, strict=True):
            copy[tuple(slice(n) for n in x.shape)] = x
        return made


class KeepPart(Movement):
    """Copies the part of gathered parameters that a rank keeps for backward, along dimension `dim`;
    no FLOPs, only bytes (FSDP2: `FSDPParam.to_sharded_post_forward`)."""

    name = "stg.keep_part"
    traits = (KeepsPart(),)
    params = (_DIM, _OVER)
    example = "%y = stg.keep_part[dim = 1, over = tp](%x) : bf16[B@dp, S@tp, D]"

    def move(self, op: Operation, index: int, type_: TensorType) -> TensorType:
        return _sliced(op, index, type_)

    def bytes_touched(self, op: Operation) -> Expr:
        return total(v.tensor.local_bytes for v in op.results) * 2


class Reorder(OpDef):
    """A copy between the order of ranks, in which libraries gather and reduce, and the order of a
    dimension; no FLOPs, only bytes.

    PyTorch's functional collectives need it along dimensions other than the first
    (`all_gather_tensor` concatenates the gathered parts, `reduce_scatter_tensor` its input). The
    merged result of eager attention over the parts of a sequence is in the order of heads, and
    copied for the following product. DTensor copies the part of a gradient that a rank keeps.
    """

    name = "stg.reorder"
    operands = ("x",)
    index = IndexRule("...->...", linear=(0,))
    example = "%y = stg.reorder(%x) : bf16[B, S, D]"

    def infer(self, op: Operation) -> list[Type]:
        return [op.operands[0].tensor.inner]

    def bytes_touched(self, op: Operation) -> Expr:
        return total(v.tensor.local_bytes for v in (*op.operands, *op.results))

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return [grads[0]]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0]]


class AllReduce(Collective):
    """The sum (or maximum) of a partial value over a group, on all ranks. With `bucket` it is
    several calls, see `stg.bucket`."""

    name = "stg.all_reduce"

    def reuses(self, op: Operation, result: int) -> int | None:
        return result  # in place, as in communication libraries

    params = (
        _OVER,
        Param("kind", "name", "sum or max (default sum)", choices=("sum", "max")),
        Param("bucket", "int", "bytes with which a call is full (default: one call)"),
        Param(
            "stages", "flag", "the operand is the part of this pipeline stage in a sum over them"
        ),
        Param("pairs", "name", "mirrored: coordinates i and n-1-i only", choices=("mirrored",)),
    )
    example = "%y = stg.all_reduce[over = tp](%x) : bf16[B@dp, S, D]"

    def move(self, op: Operation, index: int, type_: TensorType) -> TensorType:
        if op.flag("stages"):
            return replace(type_.inner, placed=True)
        return _reduced(type_, op.names("over"), op.text("kind", "sum"))

    def exchange(self, op: Operation, index: int, parts: Sequence[Array]) -> Sequence[Array]:
        whole = np.max(parts, axis=0) if op.text("kind", "sum") == "max" else np.sum(parts, axis=0)
        return [whole] * len(parts)


class ReduceScatter(Collective):
    """The sum of a partial value over a group; each rank receives a part along dimension `dim`.

    With `whole`, the result is a part of the operand's buffer, which is kept, as in the gradient
    buffers of ZeRO-1.
    """

    name = "stg.reduce_scatter"
    params = (
        _DIM,
        _OVER,
        Param("bucket", "int", "bytes with which a call is full (default: one call)"),
        Param("whole", "flag", "the result stays in the buffer of the operand"),
    )
    example = "%y = stg.reduce_scatter[dim = 1, over = tp](%x) : bf16[B@dp, S@tp, D]"

    def reuses(self, op: Operation, result: int) -> int | None:
        return result if op.flag("whole") else None

    def move(self, op: Operation, index: int, type_: TensorType) -> TensorType:
        over, d = op.names("over"), operand_dim(op, index)
        reduced = _reduced(type_, over, "sum")
        return _with_dim(reduced, d, _split(reduced.dims[d], over))

    def exchange(self, op: Operation, index: int, parts: Sequence[Array]) -> Sequence[Array]:
        return np.split(np.sum(parts, axis=0), len(parts), axis=operand_dim(op, index))


class AllGather(Collective):
    """Concatenates the parts of all ranks of a group along dimension `dim`, on all ranks.

    In a repeat, the results of the last `keep` iterations are kept for the first `kept` iterations
    of the backward repeat, which then do not gather them again. A repeat issues its gathers of
    parameters `ahead` iterations early (FSDP prefetch). With `once`, a pipeline stage gathers
    before its microbatches, and with `stays` it keeps the result until its action ends. With
    `copied_out`, the results are copies of the receive buffer, which is kept until the next such
    call, or until forward ends, and nothing is gathered early. With `held` an argument of the
    function is the buffer of the result. With `beside_loss`, forward ends with the loss, and
    backward first gathers the parameters of its first iteration. With `to`, each rank casts its
    part to that element type before it sends it; the results have this type.
    """

    name = "stg.all_gather"
    params = (
        _DIM,
        _OVER,
        Param("keep", "int", "results of this many last iterations stay for backward"),
        Param("kept", "int", "this many first iterations find it there: nothing is sent"),
        Param("ahead", "int", "iterations that a repeat gathers parameters early (default 1)"),
        Param("once", "flag", "a pipeline stage gathers it once, before its microbatches"),
        Param("stays", "flag", "a pipeline stage has it until its action ends"),
        Param("unit", "int", "distinguishes calls that are not merged into one"),
        Param("copied_out", "flag", "the results are copies of what is received"),
        Param("held", "flag", "the result is in a buffer that the function has as an argument"),
        Param(
            "beside_loss", "flag", "of a repeat: the loss is computed beside the blocks next to it"
        ),
        Param("to", "name", "the element type of the results", choices=tuple(sorted(FLOATS))),
    )
    example = "%y = stg.all_gather[dim = 1, over = tp](%x) : bf16[B@dp, S, D]"

    def move(self, op: Operation, index: int, type_: TensorType) -> TensorType:
        d = operand_dim(op, index)
        whole = _with_dim(type_, d, _unsplit(type_.dims[d], op.names("over")))
        return replace(whole, dtype=op.text("to")) if "to" in op.attrs else whole

    def fold(self, op: Operation) -> Value | None:
        return None if "to" in op.attrs else _undone(op, AllSlice)

    def buffer(self, op: Operation) -> Expr:
        return total(v.tensor.local_bytes for v in op.results)

    def exchange(self, op: Operation, index: int, parts: Sequence[Array]) -> Sequence[Array]:
        return [np.concatenate(parts, axis=operand_dim(op, index))] * len(parts)


class AllToAll(Collective):
    """Moves a split from dimension `from` to dimension `dim`.

    If `from` and `dim` have an entry for each axis, the axes of one operand move between different
    dimensions in one call; with several operands, they may have an entry for each operand.
    """

    name = "stg.all_to_all"
    params = (
        Param("from", "ints", "the dimension that is split before", required=True),
        Param("dim", "ints", "the dimension that is split after", required=True),
        _OVER,
    )
    example = "%y = stg.all_to_all[from = 1, dim = 2, over = cp](%x) : bf16[B, S, H@cp, K]"

    def fold(self, op: Operation) -> Value | None:
        """The value before the previous exchange, if this one is its inverse."""
        return _undone(op, AllToAll, {"dim": "from", "from": "dim", "over": "over"})

    def buffer(self, op: Operation) -> Expr:
        """The bytes that each rank sends. If loads differ, they are those that the rank with the
        highest load sends or receives."""
        sides = ([v.tensor for v in op.operands], [v.tensor for v in op.results])
        loaded = (types for types in sides if any(t.loads for t in types))
        return total(t.fullest_bytes for t in next(loaded, sides[0]))

    def move(self, op: Operation, index: int, type_: TensorType) -> TensorType:
        for over, source, d in _moves(op, index):
            opened = _with_dim(type_, source, _unsplit(type_.dims[source], over))
            type_ = _with_dim(opened, d, _split(opened.dims[d], over))
        return type_

    def exchange(self, op: Operation, index: int, parts: Sequence[Array]) -> Sequence[Array]:
        ((_, source, d),) = _moves(op, index)
        return _exchanged(parts, source, d)

    def stages(
        self, op: Operation, index: int, env: Mapping[str, int]
    ) -> Sequence[tuple[tuple[str, ...], Exchange]]:
        return [
            (over, partial(_exchanged, source=source, dim=d))
            for over, source, d in _moves(op, index)
        ]


def _exchanged(parts: Sequence[Array], source: int, dim: int) -> Sequence[Array]:
    pieces = [np.split(p, len(parts), axis=dim) for p in parts]
    return [np.concatenate([p[i] for p in pieces], axis=source) for i in range(len(parts))]


def _moves(op: Operation, index: int) -> list[tuple[tuple[str, ...], int, int]]:
    """The moves of an all_to_all, in a possible order: axes, the dimension that they leave, and the
    dimension that they move to.

    Axes that leave the same dimension do so in reverse order, last one first.
    """
    over, sources, dims = op.names("over"), op.integers("from"), op.integers("dim")
    if len(sources) == len(dims) == len(op.operands) > 1:
        sources, dims = (sources[index],), (dims[index],)
    if len(sources) == len(dims) == 1:
        return [(over, _in_range(op, index, sources[0]), _in_range(op, index, dims[0]))]
    if len(op.operands) > 1 or not len(sources) == len(dims) == len(over):
        raise ValueError(
            "has 'from' and 'dim' of another length, expected one for each operand, or for each "
            "axis of one operand"
        )
    moves = [
        (tuple(axis for axis, _, _ in axes), _in_range(op, index, s), _in_range(op, index, d))
        for (s, d), axes in groupby(zip(over, sources, dims, strict=True), key=lambda m: m[1:])
    ]
    return moves[::-1] if len(set(sources)) == 1 else moves


class CollectivePermute(Collective):
    """Every rank sends its part to the rank `by` places further along the axes, in a ring.

    The placement does not change. In global view, the parts of the split dimension are rotated. It
    is one send and one receive on each rank, not a collective call.
    """

    name = "stg.collective_permute"
    params = (_OVER, Param("by", "size", "places, round the ring (default 1)"))
    example = "%k2 = stg.collective_permute[over = cp](%k) : bf16[B, S@cp, G, K]"

    def move(self, op: Operation, index: int, type_: TensorType) -> TensorType:
        over = op.names("over")
        if not any(set(over) <= set(d.axes) for d in type_.dims):
            raise ValueError(f"expects a value split over {', '.join(over)}, found {type_}")
        return type_.inner

    def stages(
        self, op: Operation, index: int, env: Mapping[str, int]
    ) -> Sequence[tuple[tuple[str, ...], Exchange]]:
        def rotated(parts: Sequence[Array]) -> Sequence[Array]:
            first = -evaluate(op.expr("by", ONE), env) % len(parts)
            return [*parts[first:], *parts[:first]]

        return [(op.names("over"), rotated)]


class AllSlice(Movement):
    """Takes the local part of a replicated value along dimension `dim`; a view, nothing is sent."""

    name = "stg.all_slice"
    traits = (View(),)
    params = (_DIM, _OVER)
    example = "%y = stg.all_slice[dim = 1, over = tp](%x) : bf16[B@dp, S@tp, D]"

    def move(self, op: Operation, index: int, type_: TensorType) -> TensorType:
        return _sliced(op, index, type_)

    def fold(self, op: Operation) -> Value | None:
        return _undone(op, AllGather)
