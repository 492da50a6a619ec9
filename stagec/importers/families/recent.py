"""Recent decoders near Llama: gates and norms of their own, short convolutions, experts beside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Named, PerLayer, Sizes
from stagec.importers.common.positions import growing_temperature, read_bases
from stagec.importers.families.deepseek import LatentSizes, latent_of, sigmoid_stack
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, RMS, WIDE_RMS, Attention, FeedForward, Norm
from stagec.importers.writing.stack import Decoder, root
from stagec.importers.writing.text import Callee, ModelText

_PLAIN = Norm(affine="none")


@reads("CWM", "cwm", features="windows 3:1")
def read_cwm(config: Config) -> ModelText:
    """CWM (arXiv 2510.02387): Llama with windows in three layers of four."""
    model = DecoderModel(config, "CWM", Sizes(6144, 21504, 64, 48, 128256, 131072, 8, 128, 1000000))
    local = model.windows([i % 4 != 0 for i in range(model.count)])
    mixers = model.masked(Attention(rope=model.rope()), local, model.window(8192))
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return model.stack(mixers, block)


@reads("Ministral 3", "ministral3", features="queries grow with the position")
def read_ministral3(config: Config) -> ModelText:
    """Ministral 3: Mistral whose queries grow with the position, as those of Llama 4."""
    model = DecoderModel(
        config, "Ministral 3", Sizes(4096, 14336, 34, 32, 131072, 262144, 8, 128, 1000000)
    )
    mixer = Attention(rope=model.rope(), temperature=growing_temperature(config))
    return model.stack(model.windowed(mixer))


@reads("Jais 2", "jais2", features="LayerNorm, biases, squared ReLU")
def read_jais2(config: Config) -> ModelText:
    """Jais 2: LayerNorm, biases everywhere, a squared ReLU."""
    model = DecoderModel(config, "Jais 2", Sizes(3328, 26624, 32, 26, 150272, 8192, base=500000))
    mixer = model.biased(Attention(rope=model.rope()), True)
    block = FeedForward(model.activation("relu2"), gated=False, bias=model.flag("mlp_bias", True))
    return model.stack(mixer, block, norm=LAYER)


@reads("nanochat", "nanochat", features="norms without scales, bounded logits")
def read_nanochat(config: Config) -> ModelText:
    """nanochat: norms without scales, one of the embeddings too; a squared ReLU, bounded logits."""
    model = DecoderModel(config, "nanochat", Sizes(768, 8192, 12, 6, 50304, 2048))
    config.only("attention_bias", False)
    rope = replace(model.rope(), inverse=True)
    mixer = Attention(qk_norm=_PLAIN, after_rope=True, rope=rope)
    block = FeedForward(model.activation("relu2"), gated=False)
    cap = config.ratio("final_logit_softcapping", default=15)
    decoder = Decoder(_PLAIN, tied=model.tied(), embed_norm=_PLAIN, logit_cap=cap or None)
    return model.stack(mixer, block, decoder, norm=_PLAIN)


# -- activations of their own ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _XIELU:
    """A feed-forward block with xIELU (arXiv 2411.13010): a square above zero, exp(x) - 1 - x below
    it, each times a trained number, and x times beta, a buffer."""

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        return text.use("xielu", "D F")


@reads("Apertus", "apertus", features="xIELU, q and k normed per head")
def read_apertus(config: Config) -> ModelText:
    """Apertus (arXiv 2509.14233): xIELU without a gate, queries and keys normed per head."""
    model = DecoderModel(
        config, "Apertus", Sizes(4096, 14336, 32, 32, 131072, 65536, base=12000000)
    )
    config.fixed(hidden_act="xielu", qk_norm=True, post_norm=False)
    mixer = model.biased(Attention(qk_norm=RMS, rope=model.rope()))
    return model.stack(mixer, _XIELU())


@dataclass(frozen=True, slots=True)
class _NormedGate:
    """A feed-forward block with a squared ReLU as a gate, and a norm before its last product."""

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        return text.use("gated_relu2", "D F")


@reads("BitNet", "bitnet", features="norms before the last products")
def read_bitnet(config: Config) -> ModelText:
    """BitNet b1.58 (arXiv 2504.12285): norms before the last product of each block. Weights of 1.58
    bits are what a strategy may say; here they are as others."""
    model = DecoderModel(
        config, "BitNet", Sizes(2560, 6912, 30, 20, 128256, 2048, groups=5, base=500000)
    )
    config.only("hidden_act", "relu2")
    mixer = model.biased(Attention(rope=model.rope(), out_norm=RMS))
    return model.stack(mixer, _NormedGate())


# -- latent attention ------------------------------------------------------------------------------


@reads("MiniCPM 3", "minicpm3", features="latent attention, scaled residuals")
def read_minicpm3(config: Config) -> ModelText:
    """MiniCPM 3 (arXiv 2404.06395): latent attention; scaled embeddings, residuals and logits."""
    sizes, latent = Sizes(2560, 6400, 62, 40, 73448, 32768), LatentSizes(64, 32, 0, 256, 768)
    model, mixer = latent_of(config, "MiniCPM 3", sizes, latent)
    base = config.size("dim_model_base", default=256)
    decoder = Decoder(
        tied=model.tied(True),
        embed_scale=config.ratio("scale_emb", default=12),
        logit_scale=Fraction(base, model.width),
    )
    depth = config.ratio("scale_depth", default=Fraction("1.4"))
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return model.stack(mixer, block, decoder, scale=depth / root(model.count))


@reads("Youtu", "youtu", features="latent attention, dense")
def read_youtu(config: Config) -> ModelText:
    """Youtu-LLM: latent attention, dense blocks."""
    model, mixer = latent_of(config, "Youtu", Sizes(2048, 6144, 32, 16, 128256, 131072))
    block = FeedForward(model.activation())
    return model.stack(mixer, block, Decoder(tied=model.tied(True)))


@reads("GLM-4.7-Flash", "glm4_moe_lite", features="latent attention")
def read_glm4_moe_lite(config: Config) -> ModelText:
    """GLM-4.7-Flash: GLM-4.5's experts over latent attention."""
    sizes = Sizes(2048, 10240, 47, 20, 154880, 202752)
    model, mixer = latent_of(config, "GLM-4.7-Flash", sizes)
    scale = Fraction("1.8")
    return sigmoid_stack(model, mixer, count=64, top=4, inner=1536, dense=1, scale=scale)


# -- experts ---------------------------------------------------------------------------------------


@reads("FlexOlmo", "flex_olmo", features="experts, norms behind the blocks")
def read_flex_olmo(config: Config) -> ModelText:
    """FlexOlmo (arXiv 2507.07024): OLMoE with OLMo 2's norms behind the blocks."""
    model = DecoderModel(config, "FlexOlmo", Sizes(4096, 11008, 32, 32, 100352, 4096, base=500000))
    mixture = model.experts(count=7, top=5, inner="F", normalize=model.flag("norm_topk_prob"))
    mixer = model.biased(Attention(qk_norm=WIDE_RMS, norm_dims="together", rope=model.rope()))
    decoder = Decoder(WIDE_RMS, tied=model.tied())
    return model.stack(mixer, mixture, decoder, norm=None, post=WIDE_RMS)


@reads("K-EXAONE", "exaone_moe", features="windows 3:1, sigmoid routing")
def read_exaone_moe(config: Config) -> ModelText:
    """K-EXAONE (arXiv 2601.01739): windows 3:1, the others without positions; experts as
    DeepSeek-V3 has them."""
    model = DecoderModel(config, "K-EXAONE", Sizes(4096, 16384, 32, 32, 102400, 2048))
    local = model.windows([])
    if not local:
        every = config.every("sliding_window_pattern", default=4)
        local = [(i + 1) % every != 0 for i in range(model.count)]
    config.skip("sliding_window_pattern")
    rotary = Attention(qk_norm=RMS, rope=model.rope())
    windowed = model.in_window(rotary, model.window(4096))
    still = replace(rotary, rope=None) if any(local) else rotary
    mixers: list[Named] = [("local", windowed) if each else ("global", still) for each in local]
    return _sparse(model, mixers, count=64, top=8, inner=1024, dense=1, scale=Fraction("2.5"))


@reads("Solar Open", "solar_open", features="sigmoid routing, shared")
def read_solar_open(config: Config) -> ModelText:
    """Solar Open (arXiv 2601.07022): GLM-4.5's experts in every layer, all of a head rotated."""
    sizes = Sizes(4096, 10240, 48, 64, 196608, 131072, groups=8, dim=128, base=1000000)
    model = DecoderModel(config, "Solar Open", sizes)
    config.only("use_qk_norm", False)
    config.skip("partial_rotary_factor", "intermediate_size")
    biased = model.flag("attention_bias")
    mixer = Attention(qkv_bias=biased, rope=model.rope())
    return _sparse(model, mixer, count=128, top=8, inner=1280, dense=0)


@reads("Hunyuan 3", "hy_v3", features="sigmoid routing, q and k normed")
def read_hy_v3(config: Config) -> ModelText:
    """Hunyuan 3: experts by sigmoids, a shared one, queries and keys normed per head."""
    sizes = Sizes(4096, 13312, 80, 64, 120832, 131072, groups=8, dim=128, base=11158840)
    model = DecoderModel(config, "Hunyuan 3", sizes)
    config.only("mlp_bias", False)
    config.skip("enable_moe_fp32_combine")
    mixer = model.biased(Attention(qk_norm=RMS, rope=model.rope()))
    scale = Fraction("2.826")
    return _sparse(model, mixer, count=192, top=8, inner=1536, dense=1, scale=scale)


def _sparse(
    model: DecoderModel,
    mixers: PerLayer,
    *,
    count: int,
    top: int,
    inner: int,
    dense: int,
    scale: Fraction | int = 1,
) -> ModelText:
    """Dense layers first, then experts of DeepSeek-V3."""
    mixture = model.sigmoid_experts(count=count, top=top, inner=inner, shared=1, scale=scale)
    dense = model.config.count("first_k_dense_replace", default=dense)
    blocks = model.dense_first(dense, mixture, FeedForward(mixture.activation))
    return model.stack(mixers, blocks)


@reads("Trinity", "afmoe", features="gated attention, windows 3:1, experts")
def read_afmoe(config: Config) -> ModelText:
    """Trinity (Arcee): gated attention, windows 3:1 with positions and the others without them;
    norms before and behind; experts by sigmoids."""
    model = DecoderModel(config, "Trinity", Sizes(2048, 6144, 32, 16, 200192, 16384, dim=128))
    every = config.size("global_attn_every_n_layers", default=4)
    local = model.windows([(i + 1) % every != 0 for i in range(model.count)])
    full = model.biased(Attention(qk_norm=WIDE_RMS, rope=None, gated=True))
    rotary = replace(full, rope=model.rope())
    windowed = model.in_window(rotary, model.window(1024))
    mixers: list[Named] = [("local", windowed) if each else ("global", full) for each in local]
    config.fixed(score_func="sigmoid", route_norm=True)
    config.skip("load_balance_coeff", "use_grouped_mm", "num_expert_groups", "num_limited_groups")
    config.skip("n_group", "topk_group", "rope_type")
    mixture = model.sigmoid_experts(count=64, top=6, inner=1408, shared=2, wide=False)
    mixture = replace(mixture, choice_bias="frozen")
    dense = config.count("num_dense_layers", default=1)
    blocks = model.dense_first(dense, mixture, FeedForward(mixture.activation))
    scale = root(model.width) if model.flag("mup_enabled") else Fraction(1)
    decoder = Decoder(WIDE_RMS, tied=model.tied(), embed_scale=scale)
    return model.stack(mixers, blocks, decoder, norm=WIDE_RMS, post=WIDE_RMS)


@reads("MiMo-V2", "mimo_v2_flash", features="windows 5:1 with sinks, smaller values")
def read_mimo_v2(config: Config) -> ModelText:
    """MiMo-V2-Flash (arXiv 2601.02780): windows 5:1 with sinks and twice as many heads of keys;
    smaller heads of values; experts by sigmoids."""
    sizes = Sizes(4096, 16384, 48, 64, 152576, 131072, groups=4, dim=192, base=5000000)
    model = DecoderModel(config, "MiMo-V2", sizes)
    text = model.text
    model.size("W_v", "v_head_dim", default=128)
    twice = config.size("swa_num_key_value_heads", default=2 * model.groups_of_heads)
    if model.heads % twice:
        raise config.refuse(
            "swa_num_key_value_heads", f"is {twice}, which does not divide {model.heads} heads"
        )
    text.symbol("G_local", twice, "heads of keys of layers with a window")
    for key, value in (("head_dim", model.dim), ("num_attention_heads", model.heads)):
        config.only(f"swa_{key}", value)
    config.fixed(swa_v_head_dim=text.symbols["W_v"].value, add_swa_attention_sink_bias=True)
    config.only("add_full_attention_sink_bias", False)
    config.skip("attention_chunk_size", "hybrid_block_size")
    kinds = {"full_attention": ("theta", 5000000), "sliding_attention": ("theta_local", 10000)}
    third = Fraction("0.334")
    ropes = read_bases(config, text, kinds, nested="", local_key="swa_rope_theta")
    shares = dict.fromkeys(kinds, third)
    parameters = config.section("rope_parameters")
    for kind in kinds:
        inner = parameters.section(kind) if parameters is not None else None
        share = config.ratio("partial_rotary_factor", default=third)
        shares[kind] = inner.ratio("partial_rotary_factor", default=share) if inner else share
    if len(set(shares.values())) > 1:
        message = "rotates different shares of a head in different kinds of layers"
        raise config.refuse("rope_parameters", message)
    rotated = int(shares["full_attention"] * model.dim) // 2 * 2
    scale = config.ratio("attention_value_scale", default=Fraction("0.707"))
    full = Attention(
        rope=model.partly(ropes["full_attention"], rotated, "partial_rotary_factor"),
        value_dim="W_v",
        value_scale=f"by = {scale}" if scale != 1 else "",
    )
    rope = replace(ropes["sliding_attention"], part="R" if rotated < model.dim else None)
    local = replace(full, groups="G_local", rope=rope, sinks=True)
    flags = config.sizes("hybrid_layer_pattern", length=model.count, most=1)
    default = [bool(f) for f in flags] or [i > 0 and (i + 1) % 6 != 0 for i in range(model.count)]
    # a token sees so many before itself by this key, and itself
    before = config.count("sliding_window_size", default=0)
    window = before + 1 if before else model.window(129)
    config.skip("sliding_window")
    windowed = model.in_window(local, window)
    mixers: list[Named] = [
        ("local", windowed) if each else ("global", full) for each in model.windows(default)
    ]
    config.only("n_shared_experts", 0)
    mixture = model.sigmoid_experts(count=256, top=8, inner=2048, shared=0, wide=False)
    plain = FeedForward(mixture.activation)
    sparse = config.sizes("moe_layer_freq", length=model.count, most=1)
    blocks = model.dense_first(config.count("first_k_dense_replace", default=1), mixture, plain)
    if sparse:
        blocks = [("sparse", mixture) if each else ("dense", plain) for each in sparse]
    return model.stack(mixers, blocks)


# -- short convolutions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ShortConv:
    """A convolution of W tokens between two gates."""

    bias: bool = False

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        return text.use("short_conv", "D W", *["bias"] * self.bias)


@reads("LFM2", "lfm2", features="short convolutions")
def read_lfm2(config: Config) -> ModelText:
    """LFM2 (arXiv 2511.23404): short convolutions, and attention in some layers."""
    model = _liquid(config, "LFM2", Sizes(2560, 12288, 32, 32, 65536, 128000, 8, base=1000000))
    if model.flag("block_auto_adjust_ff_dim", True):
        times = config.ratio("block_ffn_dim_multiplier", default=1)
        unit = config.size("block_multiple_of", default=256)
        inner = int(times * (2 * model.inner // 3))
        model.text.replace("F", -(-inner // unit) * unit, "2/3 of intermediate_size, rounded up")
    config.skip("block_ffn_dim_multiplier", "block_multiple_of")
    return model.stack(_mixers(model), FeedForward(), Decoder(tied=_tied(model)))


@reads("LFM2-MoE", "lfm2_moe", features="short convolutions, experts")
def read_lfm2_moe(config: Config) -> ModelText:
    """LFM2 with experts by sigmoids."""
    model = _liquid(config, "LFM2-MoE", Sizes(2048, 7168, 32, 32, 65536, 128000, 8, base=1000000))
    mixture = model.experts(count=32, top=4, inner=1792, activation="silu")
    normalize = ["normalize"] if model.flag("norm_topk_prob", True) else []
    mixture = replace(
        mixture,
        route=("scores = sigmoid", *normalize, *model.weights()),
        choice_bias="state" if model.flag("use_expert_bias", True) else "",
    )
    dense = config.count("num_dense_layers", default=2)
    blocks = model.dense_first(dense, mixture, FeedForward())
    return model.stack(_mixers(model), blocks, Decoder(tied=_tied(model)))


def _liquid(config: Config, title: str, sizes: Sizes) -> DecoderModel:
    model = DecoderModel(config, title, sizes)
    model.size("W", "conv_L_cache", default=3)
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        config.only(key, model.width)
    config.fixed(num_heads=model.heads, block_use_swiglu=True, use_pos_enc=True)
    config.skip("block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "theta")
    config.skip("block_use_xavier_init", "conv_use_xavier_init")
    return model


def _tied(model: DecoderModel) -> bool:
    return model.config.flag("tie_embedding", "tie_word_embeddings", default=True)


def _mixers(model: DecoderModel) -> list[Named]:
    config = model.config
    kinds = config.words("layer_types", among=("conv", "full_attention"), length=model.count)
    full = config.sizes("full_attn_idxs", most=model.count - 1)
    if not config.has("full_attn_idxs"):
        full = tuple(range(model.count))
    attends = [k == "full_attention" for k in kinds] or [i in full for i in range(model.count)]
    attention = Attention(qk_norm=RMS, rope=model.rope())
    conv = _ShortConv(model.flag("conv_bias"))
    return [("attention", attention) if each else ("conv", conv) for each in attends]
