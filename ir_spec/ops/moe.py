"""Mixture of experts: the router's choice, and the transfer of tokens to expert buffers and back.

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
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import Chooses
from stagec.ir.types import Load, Routed
from stagec.ir_spec.ops.base import Elementwise, gradients, present, stated
from stagec.ir_spec.ops.cache_rows import PAST, past_of
from stagec.ir_spec.ops.contraction import Add, Einsum, cast_to
from stagec.ir_spec.ops.curves import sigmoid
from stagec.ir_spec.ops.softmax import softmax
from stagec.ir_spec.ops.structure import ratio

_CURVES = ("softmax", "sigmoid", "sqrtsoftplus")
_SCORES = (
    Param("k", "size", "experts of each token", required=True),
    Param("scores", "name", "softmax (default), sigmoid or sqrtsoftplus", choices=_CURVES),
    Param("normalize", "flag", "divide the weights of a token by their sum"),
    Param("scale", "ratio", "multiply the weights by this (default 1)"),
)
_SHARED = tuple(p.name for p in _SCORES)
_WIDE_LOGITS = Param("wide_logits", "flag", "model code makes the logits in fp32")
_WIDE_WEIGHTS = Param("wide_weights", "flag", "code leaves weights in fp32, as with wide logits")
_WIDE = Param("wide", "flag", "rows are multiplied by their weights in fp32")
_STEPS = Param("steps", "flag", "backward runs operation by operation, as that of eager PyTorch")
_LOCAL = Param("local", "flag", "a rank has all tokens, and takes those of its own experts")


class Route(OpDef):
    """The experts of each token and their weights, from the router's logits [B, S, E], in fp32.

    Scores are a softmax of the logits, or of each one the sigmoid or the square root of the
    softplus; a token uses the k best experts, from the best `top_groups` of `groups` groups if
    those are stated (arXiv 2405.04434, section 2.2; 2412.19437).
    The optional second operand is a bias [E] that affects only the choice. The load is balanced:
    token s of a sequence uses experts (s k + j) mod E for j < k, like TorchTitan's forced load
    balancing for debugging; the weights are the scores of those experts, so the router has a
    gradient. With `copies` of experts, the load is even over all of them, and expert E + i is a
    copy of i. FLOPs per logit: 5 for a softmax, 3 for a sigmoid or 4 for the root, 1 for the bias,
    1 comparison for the choice and 1 more with groups; 2 per weight.
    """

    name = "stg.route"
    traits = (Chooses(),)
    operands = ("logits", "bias*")
    results = ("weights", "experts")
    params = (
        *_SCORES,
        Param("groups", "size", "groups of experts"),
        Param("top_groups", "size", "groups that a token may take experts of"),
        Param("copies", "size", "experts beside these: copies of the first of them"),
        _WIDE_LOGITS,
        _WIDE_WEIGHTS,
        PAST,
    )
    element_types = ("f32", "i32")
    example = (
        "%weights, %experts = stg.route[k = T, normalize](%logits) : (f32[B, S, T], i32[B, S, T])"
    )

    def eager_forms(self) -> Mapping[str, EagerForm]:
        return {"route": self._with_wide_logits}

    def _with_wide_logits(self, b: Builder, op: Operation, is_one: IsOneOnRank) -> None:
        """Compute the logits from operands in fp32, as `DeepseekV3TopkRouter` of transformers
        does."""
        product = op.operands[0].producer
        of_product = product is not None and isinstance(product.definition, Einsum)
        if product is not None and of_product and op.flag(_WIDE_LOGITS.name):
            wide = [cast_to(b, v, "f32") for v in product.operands]
            logits = b.value(product.name, wide, dict(product.attrs), hint=product.result.name)
            op.set_operand(0, logits)
            if not product.result.uses:
                product.erase()

    def rule(self, op: Operation) -> Rule:
        bias = ",e" * (len(op.operands) - 1)
        return make_rule(f"bse{bias}->bst,bst", whole="et", sizes={"t": op.expr("k")})

    def verify(self, op: Operation) -> Iterator[str]:
        if len(op.operands) > 2:
            yield "expects logits, or logits and a bias"
        if ("groups" in op.attrs) != ("top_groups" in op.attrs):
            yield "expects 'groups' and 'top_groups' together"

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        op.attrs |= step.past_attr()
        return op.results

    def flops(self, op: Operation, n: Sizes) -> Expr:
        per_logit = _score_flops(op) + len(op.operands) + ("groups" in op.attrs)
        return n["b"] * n["s"] * (n["e"] * per_logit + n["t"] * 2)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [grads[0], op.operands[0], op.results[1]])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        logits, k = args[0], ctx.size(op.expr("k"))
        length: int = logits.shape[1]
        count: int = logits.shape[2]
        slots = count + (ctx.size(op.expr("copies")) if "copies" in op.attrs else 0)
        tokens = np.arange(length) + ctx.start(op.operands[0].tensor.dims[1])
        tokens += ctx.size(past_of(op))
        chosen = (tokens[:, None] * k + np.arange(k)) % slots
        experts = np.broadcast_to(chosen, (*logits.shape[:2], k))
        picked = np.take_along_axis(_scores(op, logits), experts % count, -1)
        if op.flag("normalize"):
            picked = picked / picked.sum(-1, keepdims=True)
        return [picked * ratio(op, "scale", 1.0), experts]


class RouteGrad(OpDef):
    """Gradient of `stg.route` with respect to the logits, from which the scores are recomputed.

    FLOPs per logit: 5 and 5 for a softmax, 3 and 3 for a sigmoid, 4 and 4 for the root of a
    softplus; 6 per weight.
    """

    name = "stg.route_grad"
    operands = ("dweights", "logits", "experts")
    params = _SCORES
    index = IndexRule("bst,bse,bst->bse", whole="et")
    element_types = ("logits",)
    example = "%dl = stg.route_grad[k = T, normalize](%dw, %logits, %experts) : f32[B, S, E]"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return n["b"] * n["s"] * (n["e"] * (2 * _score_flops(op)) + n["t"] * 6)

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[1].tensor.shape[-1] if operand == 2 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dw, logits, experts = args
        scores = _scores(op, logits)
        dw = dw * ratio(op, "scale", 1.0)
        if op.flag("normalize"):
            picked = np.take_along_axis(scores, experts, -1)
            total = picked.sum(-1, keepdims=True)
            dw = dw / total - (dw * picked).sum(-1, keepdims=True) / total**2
        ds = np.zeros_like(scores)
        np.put_along_axis(ds, experts, dw, -1)
        if op.text("scores") == "sigmoid":
            return [ds * scores * (1 - scores)]
        if op.text("scores") == "sqrtsoftplus":
            return [ds * sigmoid(logits) / (2 * scores)]
        return [scores * (ds - (ds * scores).sum(-1, keepdims=True))]


def _score_flops(op: Operation) -> int:
    return {"sigmoid": 3, "sqrtsoftplus": 4}.get(op.text("scores"), 5)


def _scores(op: Operation, logits: Array) -> Array:
    if op.text("scores") == "sigmoid":
        return sigmoid(logits)
    if op.text("scores") == "sqrtsoftplus":
        return np.sqrt(np.logaddexp(logits, 0))
    return softmax(logits, None)


class Dispatch(OpDef):
    """Copies each token to the buffers of its experts, on each rank: [B, S, D] to [E, B, C, D].

    There are C = S k capacity / E rows per sequence and expert, with `slots` in place of E if a
    token may also choose experts without weights, which have the numbers from E on. The buffers are
    filled in the order of the tokens; with a capacity factor above 1, the remaining rows are zero,
    and rows beyond C would be dropped (there are none under balanced load). A split of the tokens
    splits B and C equally, so each rank fills its own part, and ops that read rows from the buffers
    need the same split of the tokens; an all_to_all moves rows to the ranks of the experts. With
    weights, each copy is multiplied by its own: the gradient of `stg.combine`.

    Without a capacity, the type states that a router distributes the rows, `routed(E=2, T)`:
    products read only the weights of experts that receive tokens. With a capacity, buffers are
    padded and the weights of all experts are read. With `local`, experts are split without an
    all_to_all: a rank that has all tokens fills the buffers of its own experts.
    """

    name = "stg.dispatch"
    operands = ("x", "experts", "weights*")
    params = (
        Param("count", "size", "the number of experts", required=True),
        Param("slots", "size", "a token chooses among so many (default count); others get no rows"),
        Param("capacity", "ratio", "the capacity factor (default 1)"),
        Param("load_from", "int", "experts have loads, those of the layers from this one on"),
        Param("spread", "flag", "tokens choose some experts more often, so few reach fewer"),
        _LOCAL,
    )
    example = "%xs = stg.dispatch[count = E](%x, %experts) : bf16[E, B, S*T/E, D]"

    def rule(self, op: Operation) -> Rule:
        count = op.expr("count")
        k = op.operands[1].tensor.shape[-1] * count / op.expr("slots", count)
        capacity = op.expr("capacity", ONE)
        return make_rule(
            ",".join(("bsd", "bst", "bst")[: len(op.operands)]) + "->eb(sc)d",
            whole=_whole(op),
            linear=[0],
            numbered="s",
            sizes={"e": count, "c": k * capacity / count},
            loads={"c": load} if (load := _load(op)) else {},
            routed={} if "capacity" in op.attrs else {"c": Routed(count, k, op.flag("spread"))},
        )

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
        wide = (_WIDE_LOGITS.name, _WIDE_WEIGHTS.name)
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


class ZeroWeights(OpDef):
    """The sum of the weights of a token's experts from number `first` on, [B, S]: experts without
    weights return their input, and the sum times it is what a token gets of them all
    (LongCat-Flash, arXiv 2509.01322). One FLOP per weight."""

    name = "stg.zero_weights"
    operands = ("weights", "experts")
    params = (Param("first", "size", "the number of the first of them", required=True),)
    index = IndexRule("bst,bst->bs", whole="t", linear=(0,))
    flops_per_point = 1
    example = "%w0 = stg.zero_weights[first = E](%weights, %experts) : f32[B, S]"

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.expr("first") * 2 if operand == 1 else None

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        return gradients(b, op, [grads[0], op.operands[1]])

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        weights, experts = args
        return [(weights * (experts >= ctx.size(op.expr("first")))).sum(-1)]


class ZeroWeightsGrad(OpDef):
    """Gradient of `stg.zero_weights` with respect to the weights: a selection, no FLOPs."""

    name = "stg.zero_weights_grad"
    operands = ("dy", "experts")
    params = ZeroWeights.params
    index = IndexRule("bs,bst->bst", whole="t", linear=(0,))
    example = "%dw = stg.zero_weights_grad[first = E](%dw0, %experts) : f32[B, S, T]"

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.expr("first") * 2 if operand == 1 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        dy, experts = args
        return [dy[..., None] * (experts >= ctx.size(op.expr("first")))]


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
