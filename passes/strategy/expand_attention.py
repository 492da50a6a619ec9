"""expand-attention: replaces fused attention by its products and the softmax between them."""

from functools import partial

from stagec.api import (
    Builder,
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Relation,
    Strategy,
    Value,
    read_strategy,
)
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ONE
from stagec.ir.rewrite import replace_op
from stagec.ir_spec.ops.attention import NO_KERNEL, FlashAttention
from stagec.ir_spec.ops.contraction import cast_to
from stagec.ir_spec.ops.layout import PartOf
from stagec.ir_spec.strategy.dropout import ATTENTION, CONFIGURED, DropoutRule
from stagec.ir_spec.strategy.kernels import DEVICE, EAGER, SDPA, UNFUSED, KernelsRule
from stagec.passes.strategy.local_sizes import is_on_rank

#: Attributes of attention that the unfused ops can express.
_OF_SCORES = {"sinks", "causal", "window", "rsqrt", "softcap", "alibi", "bias", "wide_scores"}
_PLAIN = {*_OF_SCORES, "by_head", "given_type", "made_mask", "phase"}


class ExpandAttention(Pass):
    """Replace each fused attention by the ops of which it consists, as `stg.kernels` states.

    The scores of all pairs are in memory, including those that a causal mask hides. With `math` the
    softmax is one kernel. With `eager` shared keys and values are copied for each head, and the
    softmax is computed in fp32 and cast back, so that backward keeps it in both types
    (`eager_attention_forward` of transformers, models/llama/modeling_llama.py). With `wide_scores`
    queries and keys are cast too (models/gptj/modeling_gptj.py). A bias is added to the scores.
    Attention stays fused if it has masks other than causal ones and windows, a bias with `math`,
    and if its sequence, or heads that share keys, are split. Without fused attention, forms and
    names of kernels change nothing.

    If `eager` names `alibi`, `sinks` or `softcap`, attention with a bias by distance, with sinks or
    with bounded scores is `eager` whatever the kernel of other attention is
    (`BloomAttention.forward` and `MptAttention.forward` of transformers call no kernel,
    `_supports_sdpa = False` of gpt-oss and Gemma 2). The softmax with sinks has the type of the
    scores.

    With `sdpa` a window, a block or a prefix that hides keys, and any mask of attention with
    `made_mask`, is a mask in the type of the queries,
    which backward keeps (`convert_boolean_attn_mask` of ATen/native/transformers/attention.cpp),
    and shared keys and values are copied for each head (`use_gqa_in_sdpa` of transformers,
    integrations/sdpa_attention.py). A kernel takes its own copy of a bias
    (`create_position_bias_mask`, `contiguous` or `where`).

    Before:
        stg.strategy @s {
          stg.kernels[attention = math]
        }
        stg.func @f(%q: bf16[B, S, H, K], %k: bf16[B, S, H, K], %v: bf16[B, S, H, K]) {
          %a = stg.attention[causal](%q, %k, %v) : bf16[B, S, H, K]
          stg.return(%a)
        }
    After:
        stg.strategy @s {
          stg.kernels[attention = math]
        }
        stg.func @f(%q: bf16[B, S, H, K], %k: bf16[B, S, H, K], %v: bf16[B, S, H, K]) {
          %a_scores = stg.einsum["bsgk,btgk->bgst"](%q, %k) : bf16[B, H, S, S]
          %a_p = stg.softmax[causal, rsqrt = K](%a_scores) : bf16[B, H, S, S]
          %a = stg.einsum["bgst,btgv->bsgv"](%a_p, %v) : bf16[B, S, H, K]
          stg.return(%a)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        rule = read_strategy(module).one(KernelsRule)
        return rule.attention != DEVICE or any(name in rule.eager for name in NO_KERNEL)

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        rule = strategy.one(KernelsRule)
        fused = [op for op in module.main.body.walk() if isinstance(op.definition, FlashAttention)]
        named = [name for name in NO_KERNEL if name in rule.eager]
        code = [op for op in fused if any(name in op.attrs for name in named)]
        unfused = fused if rule.attention in UNFUSED else code
        forms = {op: rule.attention == EAGER or op in code for op in unfused}
        plain = [op for op, eager in forms.items() if _is_plain(op, eager=eager)]
        plain = [op for op in plain if not _is_split(module, strategy, op)]
        for op in plain:
            view = _is_view(module, strategy, op)
            expand_attention(module, op, eager=forms[op], view=view, drops=_drops(module, strategy))
        kernels = [op for op in fused if op not in plain] if rule.attention == SDPA else []
        for op in kernels:
            if op.flag("bias"):
                _copy_bias(module, op)
            if _hides(module, op) and not _is_split(module, strategy, op, heads=False):
                _add_mask(module, strategy, op)
        if not plain and (idle := _idle(rule, fused, code)):
            module.diagnostics.remark(f"{idle[0]} changes nothing: {idle[1]}", rule.loc)


def _idle(
    rule: KernelsRule, fused: list[Operation], code: list[Operation]
) -> tuple[str, str] | None:
    """The clause of the statement without effect where no attention is replaced, and the reason.
    `expand-kernels` reports a model without attention for `eager`."""
    form = f"'stg.kernels[attention = {rule.attention}]'"
    stays = "it has masks, or its sequence or heads that share keys are split"
    if rule.attention != DEVICE and not fused:
        return form, "there is no fused attention"
    if rule.attention in UNFUSED:
        return form, stays
    if fused and rule.eager and {*rule.eager} <= {*NO_KERNEL}:
        names = " or ".join(rule.eager)
        return "'eager' of 'stg.kernels'", stays if code else f"no attention has {names}"
    return None


def _drops(module: Module, strategy: Strategy) -> Expr | None:
    """The dropout rate of attention shares; None without dropout."""
    if strategy.one(DropoutRule).rates != CONFIGURED or ATTENTION not in module.root.attrs:
        return None
    return module.root.expr(ATTENTION)


def expand_attention(
    module: Module, op: Operation, *, eager: bool, view: bool = False, drops: Expr | None = None
) -> None:
    """Replace one attention, in place. Queries that share keys are a dimension `r`; with `eager`
    keys are copied for them instead, unless the copies are a `view`. Packed keys and values are
    unpacked. `drops` is the dropout rate of the shares, which applies in the type of their
    product."""
    b = module.before(op, by=ExpandAttention.name)
    q, k, *values = op.operands
    bias = [values.pop()] if op.flag("bias") else []
    sinks = [values.pop()] if op.flag("sinks") else []
    if not values:
        k, *values = b.op("stg.unbind", [k], {"dim": 1, "count": 2}, names=["k", "v"]).results
    name, (size, groups) = op.results[0].name, (v.tensor.dims[-2].size for v in (q, k))
    scale = op.expr("rsqrt", q.tensor.dims[-1].size)
    shared = size != groups
    if shared and eager and not view:
        heads = {"heads": size}
        k, *values = (b.value("stg.repeat_heads", [v], heads, hint=v.name) for v in (k, *values))
        shared = False
    if eager:
        q, k, *values = (_copied(b, v) for v in (q, k, *values))
    if eager and op.flag("wide_scores"):
        q, k = (cast_to(b, v, "f32") for v in (q, k))
    head = "gr" if shared else "g"
    if shared:
        split: dict[str, RawAttr] = {"factors": ("g",), "sizes": (groups,)}
        q = b.value("stg.reshape", [q], {"spec": "bs(gr)k->bsgrk", **split}, hint=q.name)
    spec = f"bs{head}k,btgk->b{head}st"
    scores = b.value("stg.einsum", [q, k], {"spec": spec}, hint=f"{name}_scores")
    masks = ("causal", "window", "alibi")
    given: dict[str, RawAttr] = {n: v for n, v in op.attrs.items() if n in masks}
    if "softcap" in op.attrs:
        bound = op.expr("softcap")
        capped: dict[str, RawAttr] = {"by": ONE / bound, "rsqrt": scale}
        scores = b.value("stg.scale", [scores], capped, hint=scores.name)
        scores = b.value("stg.tanh", [scores], hint=f"{name}_capped")
        scores = b.value("stg.scale", [scores], {"by": bound}, hint=f"{name}_scores")
    elif bias:
        scores = b.value("stg.scale", [scores], {"rsqrt": scale}, hint=scores.name)
        alike = {"spec": "bgst,gst->bgst"}  # a bias that all sequences have in common
        scores = b.value("stg.add", [scores, *bias], alike, hint=f"{scores.name}_biased")
    else:
        given["rsqrt"] = scale
    given_type = sinks or not eager or op.flag("given_type")
    wide = scores if given_type else cast_to(b, scores, "f32")
    shares = _softmax(b, [wide, *sinks], given, f"{name}_p", groups if shared else None)
    shares = cast_to(b, shares, values[0].tensor.dtype)
    if drops is not None:
        names = [f"{shares.name}_left", f"{shares.name}_mask"]
        shares = b.op("stg.dropout", [shares], {"p": drops}, names=names).results[0]
    spec = f"b{head}st,btgv->bs{head}v"
    new = b.value("stg.einsum", [shares, *values], {"spec": spec}, hint=name)
    if shared:
        new = b.value("stg.reshape", [new], {"spec": "bsgrv->bs(gr)v"}, hint=name)
    replace_op(op, [new])


def _softmax(
    b: Builder, operands: list[Value], attrs: dict[str, RawAttr], name: str, groups: Expr | None
) -> Value:
    """The softmax of scores, with sinks if there are two operands. Each head has a sink of its own,
    also where `groups` of heads share keys."""
    scores, *sinks = operands
    if not sinks:
        return b.value("stg.softmax", [scores], attrs, hint=name)
    if groups is None:
        return b.value("stg.sink_softmax", operands, attrs, hint=name)
    heads = b.value("stg.reshape", [scores], {"spec": "bgrst->b(gr)st"}, hint=scores.name)
    shares = b.value("stg.sink_softmax", [heads, *sinks], attrs, hint=name)
    split: dict[str, RawAttr] = {"factors": ("g",), "sizes": (groups,)}
    return b.value("stg.reshape", [shares], {"spec": "b(gr)st->bgrst", **split}, hint=name)


def _hides(module: Module, op: Operation) -> bool:
    """Whether a kernel of PyTorch needs a mask for the spans of an attention: its only own mask is
    causal. Transformers makes none for a window or a block with more keys than there are, and one
    for each attention of Falcon (`allow_is_causal_skip = False`)."""
    if len(op.results) != 1 or op.flag("mask") or len(op.operands) != 3:
        return False
    if op.flag("made_mask"):
        return True
    span = next((op.expr(name) for name in ("window", "chunk") if name in op.attrs), None)
    if span is None:
        return "prefix" in op.attrs
    keys = op.operands[1].tensor.dims[-3].size
    known = (span.symbols | keys.symbols) <= module.env.keys()
    return not known or Relation(span, "<=", keys).holds(module.env)


def _add_mask(module: Module, strategy: Strategy, op: Operation) -> None:
    """Give an attention a mask, and keys and values for each head, in place."""
    by = ExpandAttention.name
    by_head = op.definition.eager_forms()["attention"]
    is_one = partial(is_on_rank, module, strategy)
    if made := by_head(module.before(op, by=by), op, is_one):
        replace_op(op, made)
        op = made[0].producer or op
    b, (q, k, *_) = module.before(op, by=by), op.operands
    zero = b.value("stg.constant", attrs={"value": 0}, hint=f"{op.result.name}_zero")
    zero = cast_to(b, zero, q.tensor.dtype)
    sizes = (q.tensor.dims[0].size, q.tensor.dims[1].size, k.tensor.dims[1].size)
    attrs: dict[str, RawAttr] = {"spec": "->bst", "sizes": sizes}
    op.add_operand(b.value("stg.broadcast", [zero], attrs, hint=f"{op.result.name}_mask"))
    op.attrs["mask"] = True


def _copy_bias(module: Module, op: Operation) -> None:
    """Give an attention its own copy of a bias that it has in common with others, in place."""
    index = len(op.operands) - 1
    b, bias = module.before(op, by=ExpandAttention.name), op.operands[index]
    op.set_operand(index, b.value("stg.reorder", [bias], hint=f"{op.result.name}_bias"))


def _copied(b: Builder, value: Value) -> Value:
    """A copy of a value that is a part of a larger product: `torch.matmul` needs contiguous
    matrices (`reshape` of ATen/native/LinearAlgebra.cpp). Other values are returned unchanged."""
    made = value.producer
    part = made is not None and isinstance(made.definition, PartOf)
    return b.value("stg.reorder", [value], hint=value.name) if part else value


def _is_plain(op: Operation, *, eager: bool) -> bool:
    """Whether attention is only a softmax of products, which has sinks only if heads have keys of
    their own."""
    if not {*op.attrs} <= _PLAIN or len(op.results) != 1:
        return False
    rows, columns = (v.tensor.dims[-3].size for v in op.operands[:2])
    masked = op.flag("causal") or "window" in op.attrs
    if op.flag("alibi") and (not masked or "softcap" in op.attrs or _shares_keys(op)):
        return False
    if op.flag("sinks") and (not eager or len(op.operands) < 4):
        return False
    if op.flag("bias") and (not eager or len(op.operands) < 4 or _shares_keys(op)):
        return False
    return rows == columns or not masked


def _is_view(module: Module, strategy: Strategy, op: Operation) -> bool:
    """Whether copies of keys are a view, because all heads of one sequence share them (`expand` and
    `reshape` of `repeat_kv`; `torch.matmul` copies values that are expanded in the second
    dimension)."""
    batch, *_ = (d.size for d in op.operands[0].tensor.dims)
    parts = strategy.microbatches if strategy.batch in batch.symbols else 1
    heads = op.operands[1].tensor.dims[-2].size
    one = is_on_rank(module, strategy, heads)
    return one and is_on_rank(module, strategy, batch, parts)


def _shares_keys(op: Operation) -> bool:
    """Whether heads of queries share keys."""
    q, k = (v.tensor.dims[-2].size for v in op.operands[:2])
    return q != k


def _is_split(module: Module, strategy: Strategy, op: Operation, *, heads: bool = True) -> bool:
    """Whether the strategy splits the sequence of an attention, or `heads` that share keys."""
    _, sequence, *_, each, _ = (d.size for d in op.operands[0].tensor.dims)
    names = {*sequence.symbols, *(each.symbols if heads and _shares_keys(op) else ())}
    mesh = module.mesh
    rules = (rule for rule in strategy.splits if names & {*rule.dims} and not rule.soft)
    return mesh is not None and any(mesh.sizes.get(a) != 1 for rule in rules for a in rule.over)
