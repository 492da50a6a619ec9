"""The router of a mixture of experts: the choice of experts, and the weights of those chosen."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ZERO, Expr
from stagec.ir.index_rule import IndexRule
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, EagerForm, Grads, IsOneOnRank, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import Chooses
from stagec.ir_spec.ops.base import gradients
from stagec.ir_spec.ops.cache_rows import PAST, past_of
from stagec.ir_spec.ops.contraction import Einsum, cast_to
from stagec.ir_spec.ops.curves import sigmoid
from stagec.ir_spec.ops.softmax import softmax
from stagec.ir_spec.ops.structure import ratio

#: What model code computes in fp32.
WIDE_LOGITS = Param("wide_logits", "flag", "model code makes the logits in fp32")
WIDE_WEIGHTS = Param("wide_weights", "flag", "code leaves weights in fp32, as with wide logits")

_CURVES = ("softmax", "sigmoid", "sqrtsoftplus")
_SCORES = (
    Param("k", "size", "experts of each token", required=True),
    Param("scores", "name", "softmax (default), sigmoid or sqrtsoftplus", choices=_CURVES),
    Param("normalize", "flag", "divide the weights of a token by their sum"),
    Param("scale", "ratio", "multiply the weights by this (default 1)"),
)


class Route(OpDef):
    """The experts of each token and their weights, from the router's logits [B, S, E], in fp32.

    Scores are a softmax of the logits, or of each one the sigmoid or the square root of the
    softplus; a token uses the k best experts, from the best `top_groups` of `groups` groups if
    those are stated (arXiv 2405.04434, section 2.2; 2412.19437).
    The optional second operand is a bias [E] that affects only the choice. The load is balanced:
    token s of a sequence uses experts (s k + j) mod E for j < k, like TorchTitan's forced load
    balancing for debugging; the weights are the scores of those experts, so the router has a
    gradient. With `copies` of experts, the load is even over all of them, and expert E + i is a
    copy of i; if the last ones are `weightless`, they are numbered after the copies of others.
    FLOPs per logit: 5 for a softmax, 3 for a sigmoid or 4 for the root, 1 for the bias, 1
    comparison for the choice and 1 more with groups; 2 per weight.
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
        Param("weightless", "size", "the last experts have no weights and no copies (default 0)"),
        WIDE_LOGITS,
        WIDE_WEIGHTS,
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
        if product is not None and of_product and op.flag(WIDE_LOGITS.name):
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
        copies, weightless = (ctx.size(op.expr(n, ZERO)) for n in ("copies", "weightless"))
        slots, own = count + copies, count - weightless
        tokens = np.arange(length) + ctx.start(op.operands[0].tensor.dims[1])
        tokens += ctx.size(past_of(op))
        chosen = (tokens[:, None] * k + np.arange(k)) % slots
        experts = np.broadcast_to(chosen, (*logits.shape[:2], k))
        moved = np.where(experts < own + copies, own, copies)
        picked = np.take_along_axis(
            _scores(op, logits), np.where(experts < own, experts, experts - moved), -1
        )
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
