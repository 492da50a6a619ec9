"""Decoders with experts chosen by sigmoids, as in DeepSeek-V3, and other attention."""

from dataclasses import replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Named, PerLayer, Sizes
from stagec.importers.common.positions import read_bases, shares_of_kinds
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, WIDE_RMS, Attention, FeedForward
from stagec.importers.writing.stack import Decoder, root
from stagec.importers.writing.text import ModelText


@reads("K-EXAONE", "exaone_moe", features="windows 3:1, sigmoid routing")
def read_exaone_moe(config: Config) -> ModelText:
    """K-EXAONE (arXiv 2601.01739): windows 3:1, the others without positions; experts as in
    DeepSeek-V3."""
    model = DecoderModel(config, Sizes(4096, 16384, 32, 32, 102400, 2048))
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


@reads("Kolibri", "kolibri1", features="K-EXAONE's attention, norms before and behind")
def read_kolibri(config: Config) -> ModelText:
    """Kolibri (Aleph Alpha): windows 4:1, the others without positions; experts by sigmoids beside
    a shared one in every layer, norms before and after the blocks."""
    model = DecoderModel(config, Sizes(2560, -1, 50, 48, 128000, 262144, groups=4, dim=128))
    local = model.windows([(i + 1) % 5 != 0 for i in range(model.count)])
    rotary = Attention(qk_norm=RMS, rope=model.rope())
    windowed = model.local(rotary, 513)
    still = replace(rotary, rope=None)
    mixers: list[Named] = [("local", windowed) if each else ("global", still) for each in local]
    mixture = model.experts(count=384, top=6, inner=512)
    normalize = ["normalize"] if model.flag("norm_topk_prob") else []
    model.size("F_shared", "shared_expert_intermediate_size", default=512)
    shared = FeedForward(mixture.activation)
    route = ("scores = sigmoid", *normalize, "wide_logits")
    mixture = replace(mixture, route=route, choice_bias="state", shared=shared)
    return model.stack(mixers, mixture, post=RMS)


@reads("Solar Open", "solar_open", features="sigmoid routing, shared")
def read_solar_open(config: Config) -> ModelText:
    """Solar Open (arXiv 2601.07022): GLM-4.5's experts in every layer, all of a head rotated."""
    sizes = Sizes(4096, 10240, 48, 64, 196608, 131072, groups=8, dim=128, base=1000000)
    model = DecoderModel(config, sizes)
    config.only("use_qk_norm", False)
    config.skip("partial_rotary_factor", "intermediate_size")
    biased = model.flag("attention_bias")
    mixer = Attention(qkv_bias=biased, rope=model.rope())
    return _sparse(model, mixer, count=128, top=8, inner=1280, dense=0)


@reads("Hunyuan 3", "hy_v3", features="sigmoid routing, q and k normed")
def read_hy_v3(config: Config) -> ModelText:
    """Hunyuan 3: experts by sigmoids, a shared one, queries and keys normed per head."""
    sizes = Sizes(4096, 13312, 80, 64, 120832, 131072, groups=8, dim=128, base=11158840)
    model = DecoderModel(config, sizes)
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
    norms before and after; experts by sigmoids."""
    model = DecoderModel(config, Sizes(2048, 6144, 32, 16, 200192, 16384, dim=128))
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


@reads("Flint", "flint", features="sinks, windows 3:1 with positions, sigmoid routing")
def read_flint(config: Config) -> ModelText:
    """Flint: Qwen3-MoE with a sink in each head, positions in layers with a window only, and
    experts by sigmoids beside a shared one; the first two layers are dense."""
    sizes = Sizes(2048, 6144, 49, 32, 150144, 262144, groups=4, dim=128)
    model = DecoderModel(config, sizes)
    last = model.count - 1
    local = model.windows([i > 1 and i % 4 != 1 and i != last for i in range(model.count)])
    full = model.biased(Attention(qk_norm=RMS, rope=None, sinks=True))
    windowed = model.in_window(replace(full, rope=model.rope()), model.window(513))
    mixers: list[Named] = [("local", windowed) if each else ("global", full) for each in local]
    mixture = model.experts(count=256, top=6, inner=512)
    normalize = ["normalize"] if model.flag("norm_topk_prob", True) else []
    model.size("F_shared", "shared_expert_intermediate_size", default=1024)
    route = ("scores = sigmoid", *normalize, "wide_logits")
    mixture = replace(mixture, route=route, shared=FeedForward(mixture.activation))
    dense = config.sizes("mlp_only_layers", most=last) if config.has("mlp_only_layers") else (0, 1)
    plain = FeedForward(mixture.activation)
    blocks: list[Named] = [
        ("dense", plain) if i in dense else ("sparse", mixture) for i in range(model.count)
    ]
    config.only("decoder_sparse_step", 1)
    return model.stack(mixers, blocks)


@reads("Sarvam", "sarvam_moe", features="GLM-4.5's experts, all of a head rotated")
def read_sarvam_moe(config: Config) -> ModelText:
    """Sarvam 30B: GLM-4.5 with norms of heads, all of which are rotated."""
    sizes = Sizes(4096, 8192, 19, 64, 262144, 131072, groups=4, dim=64, base=8000000)
    model = DecoderModel(config, sizes)
    normed = RMS if model.flag("use_qk_norm", True) else None
    biased = config.flag("use_qkv_bias", "attention_bias", default=False)
    rope = model.rope()
    config.fixed(score_function="sigmoid", moe_router_enable_expert_bias=True, use_bias=False)
    mixer = Attention(qkv_bias=biased, qk_norm=normed, rope=rope)
    scale = Fraction("2.5")
    return _sparse(model, mixer, count=128, top=6, inner=1024, dense=1, scale=scale)


@reads("MiMo-V2", "mimo_v2_flash", features="windows 5:1 with sinks, smaller values")
def read_mimo_v2(config: Config) -> ModelText:
    """MiMo-V2-Flash (arXiv 2601.02780): windows 5:1 with sinks and twice as many heads of keys;
    smaller heads of values; experts by sigmoids."""
    sizes = Sizes(4096, 16384, 48, 64, 152576, 131072, groups=4, dim=192, base=5000000)
    model = DecoderModel(config, sizes)
    text = model.text
    model.size("W_v", "v_head_dim", default=128)
    twice = config.size("swa_num_key_value_heads", default=2 * model.groups_of_heads)
    config.divides("swa_num_key_value_heads", twice, model.heads, "heads")
    text.symbol("G_local", twice, "heads of keys of layers with a window")
    for key, value in (("head_dim", model.dim), ("num_attention_heads", model.heads)):
        config.only(f"swa_{key}", value)
    config.fixed(swa_v_head_dim=text.symbols["W_v"].value, add_swa_attention_sink_bias=True)
    config.only("add_full_attention_sink_bias", False)
    config.skip("attention_chunk_size", "hybrid_block_size")
    kinds = {"full_attention": ("theta", 5000000), "sliding_attention": ("theta_local", 10000)}
    third = Fraction("0.334")
    ropes = read_bases(config, text, kinds, local_key="swa_rope_theta")
    shares = shares_of_kinds(config, dict.fromkeys(kinds, third))
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
    # the key does not count the token itself
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
