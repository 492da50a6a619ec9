"""Decoders whose heads of attention have gates, with other numbers of query heads in layers with a
window; experts chosen by sigmoids."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Named, Sizes
from stagec.importers.common.positions import read_bases, read_scaling, shares_of_kinds
from stagec.importers.common.sizes import read_size
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, Attention, Experts, FeedForward, Norm, Rope
from stagec.importers.writing.stack import Decoder
from stagec.importers.writing.text import ModelText

_FULL, _SLIDING = "full_attention", "sliding_attention"
_STEP_NORM = Norm(zero_centered=True)


@reads("Laguna", "laguna", features="gates of heads, windows, heads by kind of layers")
def read_laguna(config: Config) -> ModelText:
    """Laguna: windows with their number of query heads and their positions, a softplus of the input
    as a gate of each head, experts by sigmoids."""
    model = DecoderModel(config, Sizes(2048, 8192, 40, 48, 100352, 131072, groups=8, dim=128))
    ropes = read_bases(config, model.text, {_FULL: ("theta", 500000), _SLIDING: ("theta_l", 10000)})
    parts = shares_of_kinds(config, {_FULL: Fraction(1, 2), _SLIDING: Fraction(1)})
    local = model.windows([False] * model.count)
    key = "num_attention_heads_per_layer"
    listed = config.sizes(key, length=model.count, least=1) or (model.heads,) * model.count
    heads = {_SLIDING if w else _FULL: h for w, h in zip(local, listed, strict=True)}
    if any(h != heads[_SLIDING if w else _FULL] for w, h in zip(local, listed, strict=True)):
        raise config.refuse(key, "differs between layers of one kind")
    config.only("gating", True, "per-head")
    config.skip("gating_types", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
    config.fixed(moe_router_logit_softcapping=0, moe_apply_router_weight_on_input=False)
    mixer = model.biased(Attention(qk_norm=RMS, head_gate="softplus"))
    mixers = _by_kind(model, mixer, local, heads, ropes, parts, 512)
    mixture = model.experts(count=256, top=8, inner=512)
    model.size("F_shared", "shared_expert_intermediate_size", default=512)
    scale = config.ratio("moe_routed_scaling_factor", default=1)
    mixture = replace(_by_sigmoids(mixture, scale), choice_bias="frozen")
    blocks = model.dense_first(1, mixture, FeedForward(mixture.activation))
    return model.stack(mixers, blocks)


def _by_sigmoids(mixture: Experts, scale: Fraction) -> Experts:
    """Experts by normalized sigmoids, with a bias for the choice, and a shared block."""
    scaled = [f"scale = {scale}"] if scale != 1 else []
    route = ("scores = sigmoid", "normalize", *scaled, "wide_logits")
    shared = FeedForward(mixture.activation)
    return replace(mixture, route=route, choice_bias="state", shared=shared)


def _by_kind(
    model: DecoderModel,
    mixer: Attention,
    local: Sequence[bool],
    heads: Mapping[str, int],
    ropes: Mapping[str, Rope],
    parts: Mapping[str, Fraction],
    window: int,
) -> list[Named]:
    """The attention of each layer, of which the `local` ones have a window, with the numbers of
    query heads, the positions, and the rotated shares of heads of the kinds."""
    text, made = model.text, dict[str, Attention]()
    for kind, suffix in ((_FULL, ""), (_SLIDING, "_l")):
        number, rotated = heads.get(kind, model.heads), int(parts[kind] * model.dim)
        model.config.divides("num_key_value_heads", model.groups_of_heads, number, "heads")
        of_kind = f"of layers of {kind}"
        part = ""
        if rotated < model.dim:
            part = text.symbol(f"R{suffix}", rotated, f"rotated elements of a head {of_kind}")
        same = number == model.heads
        symbol = "H" if same else text.symbol(f"H{suffix or '_g'}", number, f"heads {of_kind}")
        rope = replace(ropes[kind], part=part or None)
        made[kind] = replace(mixer, heads=symbol, rope=rope)
    windowed = model.local(made[_SLIDING], window)
    return [("local", windowed) if each else ("global", made[_FULL]) for each in local]


@reads("Step 3.5", "step3p5", features="gates of heads, windows, heads by kind of layers")
def read_step3p5(config: Config) -> ModelText:
    """Step 3.5 and the language model of Step 3.7: windows with their number of query heads and
    their positions, a sigmoid of the input as a gate of each head, experts by sigmoids. Lists of
    layers go on with those for multi-token prediction."""
    sizes = Sizes(4096, 11264, 45, 64, 128815, 128000, groups=8, dim=128)
    model = DecoderModel(config, sizes)
    config.shorten(model.count, *_STEP_LISTS.split())
    types = config.words("layer_types", among=(_FULL, _SLIDING), length=model.count)
    local = [t == _SLIDING for t in types] or [False] * model.count
    heads = {_FULL: model.heads, _SLIDING: _sliding_heads(model)}
    ropes, parts = _step_positions(model, local)
    gated = config.flag("use_head_wise_attn_gate", "gating", default=True)
    scalar = config.positive("query_pre_attn_scalar", default=model.dim)
    mask = "causal" if scalar == model.dim else f"causal, rsqrt = {scalar}"
    mixer = Attention(qk_norm=_STEP_NORM, head_gate="sigmoid" if gated else "", mask=mask)
    mixers = _by_kind(model, model.biased(mixer), local, heads, ropes, parts, 512)
    _check_step(config)
    if config.has("swiglu_limits"):
        model.text.notes.append("Left out: gates are clamped to swiglu_limits.")
    keys = ("moe_num_experts", "moe_top_k")
    mixture = model.experts(count=288, top=8, inner=1280, keys=keys)
    read_size(config, model.text, "F_shared", "share_expert_dim", "share_expert_dims", default=1280)
    mixture = _by_sigmoids(mixture, config.ratio("moe_router_scaling_factor", default=1))
    plain = FeedForward(mixture.activation)
    dense = config.count("first_k_dense_replace", default=3)
    blocks = model.dense_first(dense, mixture, plain)
    sparse = _numbers(config, "moe_layers_enum")
    if sparse and not config.has("mlp_layer_types"):
        blocks = [
            ("sparse", mixture) if i in sparse else ("dense", plain) for i in range(model.count)
        ]
    decoder = Decoder(_STEP_NORM, tied=model.tied())
    return model.stack(mixers, blocks, decoder, norm=_STEP_NORM)


_STEP_LISTS = (
    "layer_types mlp_layer_types swiglu_limits swiglu_limits_shared rope_theta "
    "partial_rotary_factors"
)


def _numbers(config: Config, key: str) -> set[int]:
    """The numbers of a list, or of a text with commas between them."""
    if not config.is_text(key):
        return set(config.sizes(key))
    words = config.text(key).split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise config.wrong(key, "numbers of layers with commas between them")
    return {int(word) for word in words}


def _sliding_heads(model: DecoderModel) -> int:
    """The query heads of layers with a window."""
    config = model.config
    other = config.section("attention_other_setting")
    if other is None:
        return config.size("num_sliding_attention_heads", default=model.heads)
    number = other.size("num_attention_heads", default=model.heads)
    other.only("num_attention_groups", model.groups_of_heads)
    other.only("attention_type", _SLIDING)
    for key in ("head_dim", "true_head_dim"):
        other.only(key, model.dim)
    other.finish()
    return number


def _step_positions(
    model: DecoderModel, local: Sequence[bool]
) -> tuple[dict[str, Rope], dict[str, Fraction]]:
    """Positions and rotated shares of the kinds of layers, by `rope_parameters`, or by lists of the
    layers, of which the first of a kind counts; only full attention is scaled."""
    config, text = model.config, model.text
    bases = {_FULL: ("theta", 10000), _SLIDING: ("theta_l", 10000)}
    config.skip("yarn_only_types")
    shares = config.ratios("partial_rotary_factors")
    if not config.is_list("rope_theta"):
        whole = dict.fromkeys(bases, Fraction(1))
        return read_bases(config, text, bases), shares_of_kinds(config, whole)
    thetas = config.ratios("rope_theta", length=model.count)
    scaling = config.section("rope_scaling")
    ropes, parts = dict[str, Rope](), dict[str, Fraction]()
    for kind, (symbol, _) in bases.items():
        layer = next((i for i, w in enumerate(local) if w == (kind == _SLIDING)), 0)
        text.symbol(symbol, int(thetas[layer]), f"rope_theta of {kind}")
        parts[kind] = shares[layer] if shares else Fraction(1)
        ropes[kind] = Rope(symbol)
    if scaling is not None:
        ropes[_FULL] = replace(ropes[_FULL], scaling=read_scaling(scaling, config, text))
    return ropes, parts


def _check_step(config: Config) -> None:
    """Check the keys of the releases for what the model always does."""
    config.fixed(use_qk_norm=True, moe_router_activation="sigmoid", norm_expert_weight=True)
    config.fixed(use_moe=True, use_moe_router_bias=True, zero_centered=True, sink=False)
    config.fixed(use_mfa=False, att_impl_type="GQA", use_rope_layers=[], mlp_bias=False)
    config.fixed(use_bidirectional_attention=False, moe_every_n_layer=1, moe_layer_offset=0)
    config.fixed(scoring_func="sigmoid", n_shared_experts=1)
    config.skip("need_fp32_gate")
    config.skip("projector_bias", "image_token_len", "im_end_token")
    config.skip("swiglu_limits", "swiglu_limits_shared")
