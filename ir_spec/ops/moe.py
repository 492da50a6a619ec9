"""Mixture of experts: the transfer of tokens to expert buffers and back.

The products of experts are plain einsums with an expert factor. The load is balanced:
docs/decisions/experts.md#015 explains why, and the effect on numbers.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, Expr, const, product
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, EagerForm, Grads, IsOneOnRank, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir.types import Load, Routed
from stagec.ir_spec.ops.base import Elementwise, gradients, present, stated
from stagec.ir_spec.ops.contraction import Add
from stagec.ir_spec.ops.route import WIDE_LOGITS, WIDE_WEIGHTS

_WIDE = Param("wide", "flag", "rows are multiplied by their weights in fp32")
_STEPS = Param("steps", "flag", "backward runs operation by operation, as that of eager PyTorch")
_LOCAL = Param("local", "flag", "a rank has all tokens, and takes those of its own experts")


class Dispatch(OpDef):
    """Copies each token to the buffers of its experts, on each rank: [B, S, D] to [E, B, C, D].

    There are C = S k capacity / E rows per sequence and expert, with `slots` in place of E if a
    token may also choose experts without weights: they are numbered from E and get no rows. The
    buffers are filled in the order of the tokens; with a capacity factor above 1, the remaining
    rows are zero. More than C rows would be dropped, which does not occur under balanced load. A
    split of the tokens splits B and C equally, so each rank fills its own part, and ops that read
    rows from the buffers need the same split of the tokens; an all_to_all moves rows to the ranks
    of the experts. With weights, each copy is multiplied by its own: the gradient of `stg.combine`.

    Without a capacity, the type states that a router distributes the rows, `routed(E=2, T)`:
    products read only the weights of experts that receive tokens. With a capacity, buffers are
    padded and the weights of all experts are read. With `local`, experts are split without an
    all_to_all: a rank that has all tokens fills the buffers of its own experts.
    """

    name = "stg.dispatch"
    operands = ("x", "experts", "weights*")
    params = (
        Param("count", "size", "the number of experts", required=True, least=1),
        Param("slots", "size", "number of choices of a token (default count)", least=1),
        Param("capacity", "ratio", "the capacity factor (default 1)"),
        Param("load_from", "int", "experts have loads, those of the layers from this one on"),
        Param("spread", "flag", "tokens choose some experts more often, so few reach fewer"),
        _LOCAL,
    )
    example = "%xs = stg.dispatch[count = E](%x, %experts) : bf16[E, B, S*T/E, D]"

    def rule(self, op: Operation) -> Rule:
        return _rows_rule(op, ",".join(("bsd", "bst", "bst")[: len(op.operands)]) + "->eb(sc)d")

    def verify(self, op: Operation) -> Iterator[str]:
        count = op.expr("count")
        if "load_from" in op.attrs and count.symbol_name is None:
            yield f"expects a symbol for the number of experts with loads, found {count}"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(n[f] for f in "bstd") if len(op.operands) == 3 else const(0)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        if len(op.operands) == 3:
            return super().grad(b, op, grads)
        return gradients(b, op, [*grads, op.operands[1]], by="stg.combine")

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.expr("slots", op.expr("count")) if operand == 1 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x, experts = args[:2]
        buffers = op.result.tensor.dims
        out = np.zeros([ctx.size(d.local) for d in buffers])
        place, kept = _rows(experts, out, ctx.start(buffers[0]))
        copies = np.broadcast_to(x[:, :, None], (*experts.shape, x.shape[-1]))
        if len(args) == 3:
            copies = copies * args[2][..., None]
        out[tuple(i[kept] for i in place)] = copies[kept]
        return [out]


class DispatchWeights(OpDef):
    """Copies the weight of each choice of a token to its row in the buffers of experts, on each
    rank: [B, S, T] to [E, B, C], as `stg.dispatch` with the same parameters copies the token.
    Rows without a token have weight 0."""

    name = "stg.dispatch_weights"
    operands = ("weights", "experts")
    params = Dispatch.params
    example = "%ws = stg.dispatch_weights[count = E](%weights, %experts) : f32[E, B, S*T/E]"

    def rule(self, op: Operation) -> Rule:
        return _rows_rule(op, "bst,bst->eb(sc)")

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [*grads, op.operands[1]])

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.expr("slots", op.expr("count")) if operand == 1 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        weights, experts = args
        buffers = op.result.tensor.dims
        out = np.zeros([ctx.size(d.local) for d in buffers])
        place, kept = _rows(experts, out, ctx.start(buffers[0]))
        out[tuple(i[kept] for i in place)] = weights[kept]
        return [out]


class DispatchWeightsGrad(OpDef):
    """Gradient of `stg.dispatch_weights`: copies that of each row back to its choice of a token,
    [E, B, C] to [B, S, T]."""

    name = "stg.dispatch_weights_grad"
    operands = ("dws", "experts")
    params = (_LOCAL,)
    example = "%dw = stg.dispatch_weights_grad(%dws, %experts) : f32[B, S, T]"

    def rule(self, op: Operation) -> Rule:
        return make_rule("eb(sc),bst->bst", whole=_whole(op), linear=[0], numbered="s")

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[0].tensor.shape[0] if operand == 1 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dws, experts = args
        return [_copies(dws[..., None], experts, ctx.start(op.operands[0].tensor.dims[0]))[..., 0]]


class Combine(OpDef):
    """The weighted sum of the outputs of each token's experts: [E, B, C, D] to [B, S, D].

    Without weights it is the plain sum, the gradient of `stg.dispatch`. FLOPs per element of the k
    copies: 2 with weights, 1 without. With `local`, a rank adds up the outputs of its own experts,
    and the result is a partial sum. With `steps`, backward runs op by op, with `wide` in fp32.
    """

    name = "stg.combine"
    operands = ("y", "experts", "weights*")
    params = (_LOCAL, _STEPS, _WIDE)
    example = "%o = stg.combine(%ys, %experts, %weights) : bf16[B, S, D]"

    def rule(self, op: Operation) -> Rule:
        operands = ("eb(sc)d", "bst", "bst")[: len(op.operands)]
        return make_rule(",".join(operands) + "->bsd", whole=_whole(op), linear=[0], numbered="s")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(n[f] for f in "bstd") * (len(op.operands) - 1)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        dy, (y, experts, *weights) = present(grads[0]), op.operands
        how = _capacity(y, experts) | stated(op, [_LOCAL])
        attrs, given, name = stated(op, self.params), [dy, experts, *weights], y.prefixed("d_")
        dys = None if op.flag(_WIDE.name) else b.value("stg.dispatch", given, how, hint=name)
        of_weights, dws = "stg.combine_weights_grad", [w.prefixed("d_") for w in weights]
        made = [b.op(of_weights, [dy, y, experts], attrs, names=[dw]).results for dw in dws]
        if dys is None:  # cast when the node has returned, before it releases what it saved
            dys = b.value("stg.dispatch", given, how, hint=name)
            b.op("stg.discard", [each for dw in made for each in dw[1:]], types=())
            b.op("stg.discard", [y], {"saved": True}, types=())
        return [dys, None, *(dw[0] for dw in made)]

    def eager_forms(self) -> Mapping[str, EagerForm]:
        return {
            "expert_bias": self._biased_in_steps,
            "expert_weights": self._weighted_in_f32,
            "expert_rows": self._restored_in_steps,
        }

    def _restored_in_steps(
        self, b: Builder, op: Operation, is_one: IsOneOnRank
    ) -> Sequence[Value] | None:
        """Rows are put back into the order of tokens, which backward undoes in copies
        (huggingface/transformers, integrations/moe.py, `grouped_mm_experts_forward`). They are
        multiplied in fp32 by weights that the router leaves so, as `MixtralTopKRouter` does."""
        if _STEPS.name in op.attrs or len(op.operands) < 3:
            return None
        attrs: dict[str, RawAttr] = {**op.attrs, _STEPS.name: True}
        route = op.operands[2].producer
        wide = (WIDE_LOGITS.name, WIDE_WEIGHTS.name)
        if op.result.tensor.dtype != "f32" and route and any(n in route.attrs for n in wide):
            attrs[_WIDE.name] = True
        return [b.value(self.name, op.operands, attrs, hint=op.result.name)]

    def _weighted_in_f32(
        self, b: Builder, op: Operation, is_one: IsOneOnRank
    ) -> Sequence[Value] | None:
        """The outputs of experts are multiplied by their weights in fp32, which backward keeps:
        pytorch/torchtitan, torchtitan/models/moe/moe.py, `MoE.forward`,
        `routed_output.to(torch.float32)`."""
        y, *others = op.operands
        dtype, name = y.tensor.dtype, op.result.name
        if len(others) == 1 or dtype == "f32":
            return None
        wide = b.value("stg.cast", [y], {"to": "f32"}, hint=f"{y.name}_f32")
        attrs: dict[str, RawAttr] = {**op.attrs, _STEPS.name: True}
        total = b.value(self.name, [wide, *others], attrs, hint=f"{name}_f32")
        return [b.value("stg.cast", [total], {"to": dtype}, hint=name)]

    def _biased_in_steps(
        self, b: Builder, op: Operation, is_one: IsOneOnRank
    ) -> Sequence[Value] | None:
        """The bias is added to the outputs of experts operation by operation, in fp32."""
        y, *others = op.operands
        add = y.producer
        if add is None or not isinstance(add.definition, Add) or "spec" not in add.attrs:
            return None
        names = [f"{y.name}_biased", f"{y.name}_sums"]
        biased = b.op(ExpertBias.name, add.operands, names=names).results[0]
        return [b.value(self.name, [biased, *others], hint=op.result.name)]

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[0].tensor.shape[0] if operand == 1 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        copies = _copies(args[0], args[1], ctx.start(op.operands[0].tensor.dims[0]))
        if len(args) == 3:
            copies = copies * args[2][..., None]
        return [copies.sum(2)]


class ExpertBias(OpDef):
    """The outputs of experts plus their biases, as PyTorch adds them without a fused kernel
    (NVIDIA/Megatron-LM, megatron/core/transformer/moe/experts.py, `TEGroupedMLP._apply_bias`): for
    each expert, its bias times the weights of its rows, in fp32; the sum with the rows; then the
    concatenated sums of all experts, cast back. The second result is the sums, a temporary buffer.

    2 FLOPs per element. For a 16-bit element, the product writes 4 bytes, the sum moves 10, the
    concatenation 8 and the cast 6. The weights count in `stg.combine`.
    """

    name = "stg.expert_bias"
    operands = ("y", "bias")
    results = ("biased", "sums")
    element_types = ("y", "f32")
    example = "%zs, %sums = stg.expert_bias(%ys, %b) : (bf16[E, B, S*T/E, D], f32[E, B, S*T/E, D])"
    index = IndexRule("ebcd,ed->ebcd,ebcd")
    flops_per_point = 2

    def bytes_touched(self, op: Operation) -> Expr:
        own, wide = (v.tensor.local_bytes for v in op.results)
        return wide * 6 + own * 2

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, grads[:1])[:2]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        y, bias = args
        total = y + bias[:, None, None]
        return [total, total]


class ExpertBiasGrad(OpDef):
    """Gradient of `stg.expert_bias`, operation by operation: dy in fp32; the gradient of the rows,
    cast back and concatenated for all experts; dy times the weights, and its sum, for the bias; dy
    times the bias, and its sum, for the weights. 3 FLOPs per element. The last result is a
    temporary buffer.

    For a 16-bit element, each of two casts moves 6 bytes, the concatenation 4, and each of two
    products with their sums 12.
    """

    name = "stg.expert_bias_grad"
    operands = ("dy",)
    results = ("drows", "dbias", "products")
    element_types = ("dy", "dy", "f32")
    example = (
        "%drows, %db, %p = stg.expert_bias_grad(%dys) : "
        "(bf16[E, B, S*T/E, D], bf16[E, D], f32[E, B, S*T/E, D])"
    )
    index = IndexRule("ebcd->ebcd,ed,ebcd", linear=(0,))
    flops_per_point = 3

    def bytes_touched(self, op: Operation) -> Expr:
        own, _, wide = (v.tensor.local_bytes for v in op.results)
        return wide * 8 + own * 4

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        (dy,) = args
        return [dy, dy.sum((1, 2)), dy]


class SortRows(Elementwise):
    """Copies rows from several ranks into the order of their experts, or back into the order of
    their destination ranks; no FLOPs.

    The dimensions of buffers identify each row, so values do not change; in memory, the rows of one
    rank are contiguous before, and the rows of one expert after.
    """

    name = "stg.sort_rows"
    traits = ()
    flops_per_point = 0
    linear = True
    example = "%zs = stg.sort_rows(%ys) : bf16[E, B, S*T/E, D]"

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, grads, by=self.name)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0]]


class CombineWeightsGrad(OpDef):
    """Gradient of `stg.combine` with respect to the weights: <dy, y> for each copy, 2 FLOPs per
    element, in fp32.

    With `steps`, the last results are two temporary buffers of the size of y: dy of each row, and
    its product with y. With `wide` there are three in fp32: dy of each row, and its products with y
    and with the weights, which autograd casts when both exist.
    """

    name = "stg.combine_weights_grad"
    operands = ("dy", "y", "experts")
    results = ("dw", "buffers*")
    params = (_LOCAL, _STEPS, _WIDE)
    example = "%dw = stg.combine_weights_grad(%do, %ys, %experts) : f32[B, S, T]"

    def dtypes(self, op: Operation) -> Sequence[str]:
        dtype = "f32" if op.flag(_WIDE.name) else op.operands[1].tensor.dtype
        return ["f32"] + [dtype] * self._buffers(op)

    def _buffers(self, op: Operation) -> int:
        return (3 if op.flag(_WIDE.name) else 2) if op.flag(_STEPS.name) else 0

    def rule(self, op: Operation) -> Rule:
        text = "bsd,eb(sc)d,bst->bst" + ",eb(sc)d" * self._buffers(op)
        routed = op.operands[1].tensor.dims[2].routed
        kept = {"c": routed} if routed is not None and self._buffers(op) else {}
        return make_rule(text, whole=_whole(op), linear=[1], numbered="s", routed=kept)

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(n[f] for f in "bstd") * 2

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[1].tensor.shape[0] if operand == 2 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, y, experts = args
        first = ctx.start(op.operands[1].tensor.dims[0])
        dw = (_copies(y, experts, first) * dy[:, :, None]).sum(-1)
        return [dw, *[np.zeros_like(y)] * self._buffers(op)]


def _capacity(y: Value, experts: Value) -> dict[str, RawAttr]:
    """The parameters of the dispatch whose result has the shape of `y`."""
    count, _, rows, _ = y.tensor.shape
    _, tokens, k = experts.tensor.shape
    factor, routed = rows * count / (tokens * k), y.tensor.dims[2].routed
    attrs: dict[str, RawAttr] = {"count": count}
    if routed is not None and routed.k != k:
        attrs["slots"], factor = count * k / routed.k, factor * k / routed.k
    if factor != 1 or routed is None:
        attrs["capacity"] = factor
    load = y.tensor.dims[2].load
    return attrs | ({"load_from": load.first} if load is not None else {})


def _rows_rule(op: Operation, text: str) -> Rule:
    """The rule of an op that fills the rows of experts."""
    count = op.expr("count")
    k = op.operands[1].tensor.shape[-1] * count / op.expr("slots", count)
    return make_rule(
        text,
        whole=_whole(op),
        linear=[0],
        numbered="s",
        sizes={"e": count, "c": k * op.expr("capacity", ONE) / count},
        loads={"c": load} if (load := _load(op)) else {},
        routed={} if "capacity" in op.attrs else {"c": Routed(count, k, op.flag("spread"))},
    )


def _whole(op: Operation) -> str:
    """The factors that cannot be split; with `local`, experts can."""
    return "tc" if op.flag("local") else "etc"


def _load(op: Operation) -> Load | None:
    """The load of the rows of each expert."""
    name = op.expr("count").symbol_name
    return Load(name, op.integer("load_from")) if name and "load_from" in op.attrs else None


def _rows(experts: Array, buffers: Array, first: int) -> tuple[tuple[Array, Array, Array], Array]:
    """The indices of the copies [B, S, T] in the buffers [E, B, C, D] of the experts from number
    `first` on, and whether each copy is stored here: its expert is on this rank and has room."""
    count: int = buffers.shape[0]
    mine = experts - first
    here = (mine >= 0) & (mine < count)
    mine = np.clip(mine, 0, count - 1)
    flat = np.where(here, mine, -1).reshape(experts.shape[0], -1, 1)
    before: Array = np.cumsum(np.equal(flat, np.arange(count)), axis=1)
    shape: tuple[int, ...] = experts.shape
    places = mine.reshape(shape[0], -1, 1)
    row: Array = np.take_along_axis(before, places, -1).reshape(shape) - 1
    batch = np.indices(shape)[0]
    return (mine, batch, row), here & (row < buffers.shape[2])


def _copies(y: Array, experts: Array, first: int) -> Array:
    """The k rows of each token, [B, S, T, D]; zero if a copy was dropped, or its expert is on
    another rank."""
    place, kept = _rows(experts, y, first)
    copies = np.zeros((*experts.shape, y.shape[-1]))
    copies[kept] = y[tuple(i[kept] for i in place)]
    return copies
