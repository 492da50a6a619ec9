"""Decoders with mixtures of experts over grouped-query attention."""

from dataclasses import replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Named, PerLayer, Sizes
from stagec.importers.common.positions import read_bases
from stagec.importers.families.llama import skip_hunyuan
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.reading.json_text import Json
from stagec.importers.writing.blocks import (
    LAYER,
    LAYER_SCALE,
    RMS,
    WIDE_RMS,
    Attention,
    Experts,
    FeedForward,
    Norm,
)
from stagec.importers.writing.stack import Decoder
from stagec.importers.writing.text import ModelText


@reads("Mixtral", "mixtral", features="renormalised experts, windows")
def read_mixtral(config: Config) -> ModelText:
    """Mixtral (arXiv 2401.04088)."""
    model = DecoderModel(config, Sizes(4096, 14336, 32, 32, 32000, 131072, groups=8, base=1000000))
    mixture = model.experts(count=8, top=2, inner="F")
    mixture = replace(mixture, route=(*mixture.route, "wide_weights"))
    mixers = model.windowed(Attention(rope=model.rope()))
    return model.stack(mixers, mixture)


@reads("Phi-3.5-MoE", "phimoe", features="experts, LayerNorm, biases")
def read_phimoe(config: Config) -> ModelText:
    """Phi-3.5-MoE (arXiv 2404.14219): LayerNorm; the weights of the two experts are not divided by
    their sum. The router of the reference masks logits for each choice (arXiv 2310.00811), which
    costs no product."""
    model = DecoderModel(config, Sizes(4096, 6400, 32, 32, 32064, 131072, groups=8, base=1000000))
    mixture = model.experts(count=16, top=2, inner="F", normalize=False)
    mixer = model.biased(Attention(rope=model.rope()))
    mixers = model.windowed(mixer)
    config.skip("original_max_position_embeddings")
    decoder = Decoder(LAYER, tied=model.tied(), head_bias=model.flag("lm_head_bias"))
    return model.stack(mixers, mixture, decoder, norm=LAYER)


@reads("Aria's language model", "aria_text", features="shared experts")
def read_aria_text(config: Config) -> ModelText:
    """The language model of Aria (arXiv 2410.05993): a softmax over the chosen experts, which have
    the width of a dense block, and shared ones."""
    model = DecoderModel(config, Sizes(4096, 4096, 32, 32, 32000, 2048))
    mixture = model.experts(count=8, top=2, inner="F", keys=("moe_num_experts", "moe_topk"))
    biased = model.flag("mlp_bias")
    shared = config.size("moe_num_shared_experts", default=2)
    block = replace(model.shared(shared, "moe_num_shared_experts"), bias=biased)
    config.only("moe_intermediate_size", model.text.value("F"))
    config.skip("moe_aux_loss_coeff", "moe_z_loss_coeff")
    mixer = model.biased(Attention(rope=model.rope()))
    return model.stack(mixer, replace(mixture, shared=block))


@reads("Qwen2-MoE", "qwen2_moe", features="gated shared expert")
def read_qwen2_moe(config: Config) -> ModelText:
    """Qwen1.5-MoE and Qwen2-MoE: experts with a gated shared block."""
    model = DecoderModel(config, Sizes(2048, 5632, 24, 16, 151936, 32768))
    normalize = model.flag("norm_topk_prob")
    mixture = model.experts(count=60, top=4, inner=1408, normalize=normalize)
    mixture = model.beside(mixture, "shared_expert_intermediate_size", default=5632)
    mixer = Attention(qkv_bias=model.flag("qkv_bias", True), rope=model.rope())
    blocks = _sparse(model, mixture)
    return model.stack(model.late_windows(mixer), blocks)


@reads("Qwen3-MoE", "qwen3_moe", features="q and k normed, sparse steps")
def read_qwen3_moe(config: Config) -> ModelText:
    """Qwen3-MoE (arXiv 2505.09388): queries and keys are normed per head."""
    model = DecoderModel(config, Sizes(2048, 6144, 24, 32, 151936, 32768, groups=4))
    mixture = model.experts(count=128, top=8, inner=768, normalize=model.flag("norm_topk_prob"))
    mixer = model.biased(Attention(qk_norm=RMS, rope=model.rope()))
    blocks = _sparse(model, mixture)
    return model.stack(model.late_windows(mixer), blocks)


def _sparse(model: DecoderModel, mixture: Experts) -> list[Named]:
    """Experts in every layer, or in every `decoder_sparse_step`-th; not in `mlp_only_layers`."""
    step = model.config.size("decoder_sparse_step", default=1)
    dense = model.config.sizes("mlp_only_layers", most=model.count - 1)
    plain = FeedForward(model.activation())
    return [
        ("sparse", mixture) if (i + 1) % step == 0 and i not in dense else ("dense", plain)
        for i in range(model.count)
    ]


@reads("Mellum 2", "mellum", features="Qwen3-MoE with windows")
def read_mellum(config: Config) -> ModelText:
    """Mellum 2: Qwen3-MoE whose layers with a window have their base of positions."""
    sizes = Sizes(2304, 7168, 28, 32, 98304, 131072, groups=4, dim=128)
    model = DecoderModel(config, sizes)
    full, sliding = "full_attention", "sliding_attention"
    kinds = {full: ("theta", 500000), sliding: ("theta_local", 10000)}
    ropes = read_bases(config, model.text, kinds)
    mixture = model.experts(count=64, top=8, inner=896, normalize=model.flag("norm_topk_prob"))
    mixer = model.biased(Attention(qk_norm=RMS, rope=ropes[full]))
    local = replace(model.local(mixer, 1024), rope=ropes[sliding])
    types = model.windows([False] * model.count)
    mixers = [("local", local) if each else ("global", mixer) for each in types]
    config.skip("use_sliding_window")
    config.skip("decoder_sparse_step", "mlp_only_layers", "max_window_layers")
    return model.stack(mixers, model.dense_first(0, mixture, FeedForward(model.activation())))


@reads("OLMoE", "olmoe", features="q and k normed over all heads")
def read_olmoe(config: Config) -> ModelText:
    """OLMoE (arXiv 2409.02060): queries and keys are normed over all heads."""
    model = DecoderModel(config, Sizes(2048, 2048, 16, 16, 50304, 4096))
    normalize = model.flag("norm_topk_prob")
    mixture = model.experts(count=64, top=8, inner="F", normalize=normalize)
    model.clip()
    mixer = model.biased(Attention(qk_norm=RMS, norm_dims="together", rope=model.rope()))
    return model.stack(mixer, mixture)


@reads("DBRX", "dbrx", features="LayerNorm without bias, sections of keys")
def read_dbrx(config: Config) -> ModelText:
    """DBRX: LayerNorm without a bias; sections of keys for attention and for experts."""
    config.merge("attn_config", "ffn_config")
    model = DecoderModel(config, Sizes(2048, 3584, 24, 16, 32000, 2048, groups=1))
    config.skip("moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment")
    config.only("moe_normalize_expert_weights", 1)
    model.clip()
    keys, activation = ("moe_num_experts", "moe_top_k"), _activation_of(config)
    mixture = model.experts(count=4, top=1, inner="F", keys=keys, activation=activation)
    decoder = Decoder(LAYER_SCALE, tied=model.tied())
    mixer = Attention(rope=model.rope())
    return model.stack(mixer, mixture, decoder, norm=LAYER_SCALE)


def _activation_of(config: Config) -> str:
    inner = config.section("ffn_act_fn")
    if inner is None:
        return "silu"
    word = inner.word("name", among=("silu", "gelu"), default="silu")
    inner.finish()
    return word


@reads("Granite", "granite", features="multipliers")
def read_granite(config: Config) -> ModelText:
    """Granite 3: Llama with multipliers."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 32000, 2048))
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return _granite(model, block)


@reads("Granite-MoE", "granitemoe", "granitemoeshared", features="multipliers, shared")
def read_granitemoe(config: Config) -> ModelText:
    """Granite 3 MoE: a softmax over the chosen experts; optionally a shared block."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 32000, 2048))
    return _granite(model, _granite_experts(model))


def _granite_experts(model: DecoderModel) -> Experts:
    """Experts of Granite, with a shared block if it has a width."""
    mixture = model.experts(count=8, top=2, inner="F")
    if model.config.count("shared_intermediate_size", default=0):
        model.size("F_shared", "shared_intermediate_size")
        mixture = replace(mixture, shared=FeedForward(mixture.activation))
    return mixture


def _granite(model: DecoderModel, blocks: PerLayer) -> ModelText:
    mixer = _granite_heads(model)
    position = model.config.word("position_embedding_type", among=("rope", "nope"), default="rope")
    if position == "nope":
        mixer = replace(mixer, rope=None)
    return _multiplied(model, mixer, blocks)


def _granite_heads(model: DecoderModel) -> Attention:
    """Attention whose scores are times `attention_multiplier`."""
    scale = model.config.positive("attention_multiplier", default=1)
    mask = f"causal, rsqrt = {(1 / scale**2).limit_denominator(10**6)}"
    return model.biased(Attention(rope=model.rope(), mask=mask))


def _multiplied(
    model: DecoderModel,
    mixers: PerLayer,
    blocks: PerLayer,
    *,
    tied: bool = False,
    divided: bool = True,
    post: Norm | None = None,
) -> ModelText:
    """The stack with the multipliers of Granite; logits are `divided` by theirs, or times it."""
    config = model.config
    logits = config.positive("logits_scaling", default=1)
    decoder = Decoder(
        tied=model.tied(tied),
        embed_scale=config.ratio("embedding_multiplier", default=1),
        logit_scale=1 / logits if divided else logits,
    )
    residual = config.ratio("residual_multiplier", default=1)
    return model.stack(mixers, blocks, decoder, scale=residual, post=post)


@reads("Granite with windows", "granite_swa", features="Granite, windows 3:1, sinks")
def read_granite_swa(config: Config) -> ModelText:
    """Granite with a sink in each head, windows in three layers of four, and a base of positions
    for each layer, of which 0 means none."""
    model = DecoderModel(config, Sizes(2560, 8192, 24, 20, 100352, 8192, groups=4))
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return _granite_windows(model, block, tied=True)


@reads("Granite-MoE with windows", "granitemoe_swa", features="Granite-MoE, windows 3:1, sinks")
def read_granitemoe_swa(config: Config) -> ModelText:
    """Granite with windows and experts."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 32000, 2048))
    return _granite_windows(model, _granite_experts(model), tied=False)


def _granite_windows(model: DecoderModel, blocks: PerLayer, *, tied: bool) -> ModelText:
    config = model.config
    mixer = replace(_granite_heads(model), sinks=True)
    bases = config.sizes("layer_rope_theta", length=model.count, least=0, most=1 << 48)
    local = model.windows([i % 4 != 0 for i in range(model.count)])
    windowed = model.in_window(mixer, model.window(128))
    symbols = {theta: f"theta_{n}" for n, theta in enumerate(sorted(set(bases) - {0}))}
    mixers: list[Named] = []
    for layer, is_local in enumerate(local):
        name, block = ("local", windowed) if is_local else ("global", mixer)
        if bases:
            base, rope = bases[layer], mixer.rope
            symbol = symbols.get(base, "")
            name += f"_{symbol.removeprefix('theta_') or 'still'}"
            if symbol:
                model.text.symbol(symbol, base, "layer_rope_theta")
            assert isinstance(block, Attention)
            block = replace(block, rope=replace(rope, base=symbol) if symbol and rope else None)
        mixers.append((name, block))
    return _multiplied(model, mixers, blocks, tied=tied)


@reads("HyperCLOVA X", "hyperclovax", features="Granite's multipliers, norms behind the blocks")
def read_hyperclovax(config: Config) -> ModelText:
    """HyperCLOVA X: Granite with norms after the blocks, logits times their multiplier."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 32000, 2048))
    own = config.has("attention_multiplier")
    mixer = _granite_heads(model) if own else model.biased(Attention(rope=model.rope()))
    post = RMS if model.flag("use_post_norm", True) else None
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return _multiplied(model, mixer, block, divided=False, post=post)


@reads("GLM-4.5", "glm4_moe", features="dense first, sigmoid routing, shared")
def read_glm4_moe(config: Config) -> ModelText:
    """GLM-4.5 (arXiv 2508.06471): dense layers first, then experts as in DeepSeek-V3."""
    # its class has no size of a head, and rounds down if heads do not divide the width
    dim = config.size("hidden_size", default=4096) // config.size("num_attention_heads", default=96)
    sizes = Sizes(4096, 10944, 46, 96, 151552, 131072, groups=8, dim=dim)
    model = DecoderModel(config, sizes)
    mixture = model.sigmoid_experts(count=128, top=8, inner=1408, shared=1)
    dense = config.count("first_k_dense_replace", default=1)
    blocks = model.dense_first(dense, mixture, FeedForward(model.activation()))
    mixer = Attention(
        qkv_bias=model.flag("attention_bias"),
        qk_norm=RMS if model.flag("use_qk_norm") else None,
        rope=model.rope(partial=Fraction(1, 2)),
    )
    return model.stack(mixer, blocks)


@reads("dots.llm1", "dots1", features="dense first, sigmoid routing, shared")
def read_dots1(config: Config) -> ModelText:
    """dots.llm1 (arXiv 2506.05767): experts as in DeepSeek-V3, attention with norms of heads."""
    model = DecoderModel(config, Sizes(4608, 10944, 62, 32, 152064, 2048))
    mixture = model.sigmoid_experts(count=128, top=6, inner=1408, shared=2, normalize=False)
    mixer = model.biased(Attention(qk_norm=RMS, rope=model.rope()))
    dense = config.count("first_k_dense_replace", default=0)
    config.only("moe_layer_freq", 1)
    blocks = model.dense_first(dense, mixture, FeedForward(model.activation()))
    return model.stack(model.late_windows(mixer), blocks)


@reads("ERNIE 4.5 MoE", "ernie4_5_moe", features="dense first, shared")
def read_ernie_moe(config: Config) -> ModelText:
    """ERNIE 4.5 MoE: a softmax with a bias for the choice; shared experts; dense layers first."""
    model = DecoderModel(config, Sizes(2560, 12288, 28, 20, 103424, 131072, groups=4, base=500000))
    config.only("use_bias", False)
    keys = ("moe_num_experts", "moe_k", "moe_intermediate_size")
    mixture = model.experts(count=64, top=6, inner=1536, keys=keys)
    if model.flag("moe_use_aux_free", True):
        mixture = replace(mixture, choice_bias="frozen")
    shared = config.count("moe_num_shared_experts", default=2)
    if shared:
        model.shared(shared, "moe_num_shared_experts")
        mixture = replace(mixture, shared=FeedForward(mixture.activation))
    config.skip("moe_norm_min", "moe_capacity", "moe_gate", "moe_layer_interval")
    first = config.count("moe_layer_start_index", default=1)
    last = config.count("moe_layer_end_index", default=model.count - 1, least=-1)
    last = model.count - 1 if last == -1 else last
    every = config.size("moe_layer_interval", default=1)
    plain = FeedForward(model.activation())
    blocks: list[Named] = [
        ("sparse", mixture) if first <= i <= last and (i + 1) % every == 0 else ("dense", plain)
        for i in range(model.count)
    ]
    mixer = Attention(rope=model.rope(interleaved=True))
    return model.stack(mixer, blocks, Decoder(tied=model.tied(True)))


@reads("MiniMax-M2", "minimax_m2", features="sigmoid routing, partial rotation")
def read_minimax_m2(config: Config) -> ModelText:
    """MiniMax-M2: queries and keys normed over all heads, half of each head rotated."""
    model = DecoderModel(
        config, Sizes(3072, 1536, 62, 48, 200064, 196608, groups=8, dim=128, base=5000000)
    )
    every: list[Json] = [1] * model.count
    config.fixed(attn_type_list=every, qk_norm_type="per_layer", shared_intermediate_size=0)
    config.skip("layernorm_full_attention_beta", "layernorm_linear_attention_beta")
    config.skip("layernorm_mlp_beta", "mlp_intermediate_size", "shared_moe_mode")
    mixture = model.experts(count=256, top=8, inner="F")
    scores = config.word("scoring_func", among=("sigmoid", "softmax"), default="sigmoid")
    route = ("scores = sigmoid", "normalize") if scores == "sigmoid" else ("normalize",)
    mixture = replace(
        mixture,
        route=(*route, "wide_weights"),
        choice_bias="state" if model.flag("use_routing_bias", True) else "",
    )
    rope = model.rope(partial=Fraction(config.size("rotary_dim", default=64), model.dim))
    normed = RMS if model.flag("use_qk_norm", True) else None
    mixer = Attention(qk_norm=normed, norm_dims="together", rope=rope)
    return model.stack(mixer, mixture)


@reads("Hunyuan-MoE", "hunyuan_v1_moe", "hunyuan", features="shared expert")
def read_hunyuan_moe(config: Config) -> ModelText:
    """Hunyuan-A13B: experts with a shared block; queries and keys are normed after rotation."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 290943, 2048))
    config.only("use_mixed_mlp_moe", True, False)
    skip_hunyuan(config)
    config.skip("group_limited_greedy", "moe_drop_tokens", "moe_layer_num_skipped")
    config.skip("moe_random_routing_dropped_token", "n_group", "topk_group")
    config.fixed(norm_topk_prob=True)
    config.only("routed_scaling_factor", 1, False)
    inner = model.same_of("moe_intermediate_size", default=model.inner)
    top = model.same_of("moe_topk", default=1)
    model.text.symbol("E", config.size("num_experts", default=1), "num_experts")
    model.text.symbol("T", top, "moe_topk")
    model.text.symbol("M", inner, "moe_intermediate_size")
    mixture = Experts(activation=model.activation())
    shared = model.same_of("num_shared_expert", default=1)
    model.shared(shared, "num_shared_expert")
    mixture = replace(mixture, shared=FeedForward(mixture.activation))
    normed = RMS if model.flag("use_qk_norm", True) else None
    mixer = model.biased(Attention(qk_norm=normed, after_rope=True, rope=model.rope()))
    return model.stack(mixer, mixture)


@reads("Grok-1", "grok-1", "grok1", "grok", features="GeGLU experts, bounded scores")
def read_grok(config: Config) -> ModelText:
    """Grok-1: GELU experts, norms before and after, bounded scores, scaled embeddings."""
    sizes = Sizes(6144, 32768, 64, 48, 131072, 8192, groups=8)
    model = DecoderModel(config, sizes, dim_keys=("head_dim", "key_size"))
    if config.has("widening_factor"):
        wide = config.size("widening_factor") * model.width * 2 // 3
        if -(-wide // 8) * 8 != model.inner:
            raise config.refuse(
                "widening_factor",
                f"gives the width {wide}, but 'intermediate_size' is {model.inner}",
            )
    cap = config.ratio("max_attn_value", "attn_logit_softcapping", default=30)
    scale = config.ratio("attn_output_multiplier", default=0)
    rsqrt = f", rsqrt = {round(1 / scale**2)}" if scale > 0 else ""
    mixture = model.experts(
        count=8, top=2, inner="F", normalize=False, activation=model.activation("gelu")
    )
    mixer = Attention(rope=model.rope(), mask=f"causal, softcap = {cap}{rsqrt}")
    decoder = Decoder(
        tied=model.tied(True),
        embed_scale=config.ratio("embedding_multiplier_scale", default=1),
        logit_scale=config.ratio("output_multiplier_scale", default=1),
    )
    return model.stack(mixer, mixture, decoder, post=RMS)


@reads("FlexOlmo", "flex_olmo", features="experts, norms behind the blocks")
def read_flex_olmo(config: Config) -> ModelText:
    """FlexOlmo (arXiv 2507.07024): OLMoE with OLMo 2's norms after the blocks."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 100352, 4096, base=500000))
    mixture = model.experts(count=7, top=5, inner="F", normalize=model.flag("norm_topk_prob"))
    mixer = model.biased(Attention(qk_norm=WIDE_RMS, norm_dims="together", rope=model.rope()))
    decoder = Decoder(WIDE_RMS, tied=model.tied())
    return model.stack(mixer, mixture, decoder, norm=None, post=WIDE_RMS)


@reads("Ling", "bailing_moe", features="shared experts, dense first")
def read_bailing(config: Config) -> ModelText:
    """Ling (arXiv 2503.05139): experts by a softmax, and shared ones."""
    model = DecoderModel(config, Sizes(2048, 5632, 28, 16, 126464, 16384, groups=4))
    _refuse_of_ling(config)
    normalize = model.flag("norm_topk_prob", True)
    mixture = model.experts(count=64, top=6, inner=1408, normalize=normalize)
    number = config.count("num_shared_experts", default=0)
    shared = model.shared(number, "num_shared_experts") if number else None
    mixer = Attention(
        qkv_bias=model.flag("use_qkv_bias"), out_bias=model.flag("use_bias"), rope=model.rope()
    )
    dense = config.count("first_k_dense_replace", default=0)
    blocks = model.dense_first(
        dense, replace(mixture, shared=shared), FeedForward(mixture.activation)
    )
    return model.stack(mixer, blocks)


@reads("Ling 2.0", "bailing_moe_v2", features="sigmoid routing, q and k normed")
def read_bailing_v2(config: Config) -> ModelText:
    """Ling 2.0: experts as in DeepSeek-V3, attention with norms of heads, half of each rotated."""
    sizes = Sizes(2048, 5120, 20, 16, 157184, 32768, groups=4, base=600000)
    model = DecoderModel(config, sizes)
    _refuse_of_ling(config)
    config.fixed(score_function="sigmoid", moe_router_enable_expert_bias=True)
    config.skip("router_dtype", "moe_router_topk_scaling_factor")
    mixture = model.sigmoid_experts(count=256, top=8, inner=512, shared=1, wide=False)
    if config.has("moe_shared_expert_intermediate_size"):
        inner = model.text.symbols["M"].value
        config.only("moe_shared_expert_intermediate_size", inner)
    biased, norm = model.flag("use_bias"), RMS if model.flag("use_qk_norm", True) else None
    mixer = Attention(
        "G", model.flag("use_qkv_bias"), biased, norm, rope=model.rope(partial=Fraction(1, 2))
    )
    dense = config.count("first_k_dense_replace", default=0)
    blocks = model.dense_first(dense, mixture, FeedForward(mixture.activation))
    return model.stack(mixer, blocks)


def _refuse_of_ling(config: Config) -> None:
    for key in ("multi_gate", "norm_head", "use_sliding_window"):
        config.only(key, False)
    config.fixed(use_rmsnorm=True)
    config.skip("max_window_layers", "norm_softmax", "sliding_window", "rotary_dim")


@reads("Grok-2", "grok-2", "grok2", "git", features="dense block beside experts")
def read_grok2(config: Config) -> ModelText:
    """Grok-2: a dense block parallel to the experts, norms before and after, bounded scores. The
    division of both by the root of 2 is left out, since a norm cancels it."""
    sizes = Sizes(8192, 32768, 64, 64, 131072, 131072, groups=8, dim=128)
    model = DecoderModel(config, sizes)
    cap = config.ratio("attn_logit_softcapping", default=30)
    config.fixed(sliding_window_size=-1, global_attn_every_n=1, residual_moe=True)
    config.skip("router_logit_softcapping", "attn_temperature_len", "rope_type", "scaling_factor")
    config.skip("original_max_position_embeddings", "extrapolation_factor", "attn_factor")
    config.skip("beta_fast", "beta_slow")
    gelu = model.activation("gelu_pytorch_tanh")
    mixture = model.experts(count=8, top=2, inner=16384, normalize=False, activation=gelu)
    model.text.symbol("F_shared", model.inner, "intermediate_size")
    mixture = replace(mixture, shared=FeedForward(gelu))
    decoder = Decoder(
        tied=model.tied(),
        embed_scale=config.ratio("embedding_multiplier_scale", default=1),
        logit_scale=config.ratio("output_multiplier_scale", default=1),
        logit_cap=config.ratio("final_logit_softcapping", default=50),
    )
    mixer = Attention(rope=model.rope(), mask=f"causal, softcap = {cap}")
    return model.stack(mixer, mixture, decoder, post=RMS)
