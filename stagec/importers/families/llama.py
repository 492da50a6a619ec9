"""Llama and its variants: RMSNorm, rotary positions, grouped queries, a SiLU gate."""

from dataclasses import replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, PerLayer, Sizes
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, WIDE_RMS, Attention, FeedForward
from stagec.importers.writing.stack import Decoder
from stagec.importers.writing.text import ModelText

HALF = Fraction(1, 2)


@reads("Llama", "llama", "Yi", "aquila", "xverse", features="biases by keys")
def read_llama(config: Config) -> ModelText:
    """Llama 1 to 3 (arXiv 2302.13971, 2307.09288, 2407.21783)."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 32000, 2048))
    mixer = model.biased(Attention(rope=model.rope()))
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return model.stack(mixer, block)


@reads("IQuest-Coder", "iquestcoder", features="Llama's computation")
def read_iquestcoder(config: Config) -> ModelText:
    """IQuest-Coder: Llama."""
    model = DecoderModel(config, Sizes(5120, 27648, 80, 40, 76800, 131072, groups=8, dim=128))
    config.only("clip_qkv")
    config.only("use_sliding_window", False)
    config.skip("sliding_window", "max_window_layers")
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return model.stack(model.biased(Attention(rope=model.rope())), block)


@reads("Mistral", "mistral", "ministral", features="windows")
def read_mistral(config: Config) -> ModelText:
    """Mistral (arXiv 2310.06825): a window in every layer, or in those of `layer_types`."""
    model = DecoderModel(config, Sizes(4096, 14336, 32, 32, 32000, 131072, groups=8))
    return model.stack(model.windowed(Attention(rope=model.rope()), 4096))


@reads("Qwen", "qwen", features="biases of q, k, v")
def read_qwen(config: Config) -> ModelText:
    """Qwen (arXiv 2309.16609): biases of queries, keys and values; `intermediate_size` is that of
    gate and up together."""
    model = DecoderModel(config, Sizes(4096, 22016, 32, 32, 151936, 8192, grouped=False))
    if model.inner % 2:
        raise config.wrong("intermediate_size", "an even number")
    model.text.replace("F", model.inner // 2, "half of intermediate_size")
    config.only("no_bias", True)
    config.fixed(activation="swiglu", pos_emb="rotary")
    config.skip("bias_dropout_fusion", "params_dtype", "tokenizer_type")
    config.skip("fp16", "bf16", "fp32", "onnx_safe", "use_cache_quantization", "use_cache_kernel")
    config.skip("use_dynamic_ntk", "use_logn_attn", "softmax_in_fp32", "seq_length")
    mixer = Attention("H", qkv_bias=True, rope=model.rope())
    return model.stack(mixer)


@reads("Qwen2", "qwen2", "mimo", features="biases of q, k, v; windows")
def read_qwen2(config: Config) -> ModelText:
    """Qwen2 (arXiv 2407.10671): biases of queries, keys and values."""
    model = DecoderModel(config, Sizes(4096, 22016, 32, 32, 151936, 32768))
    return _qwen(model, Attention(qkv_bias=model.flag("attention_bias", True), rope=model.rope()))


@reads("Qwen3", "qwen3", features="q and k normed per head; windows")
def read_qwen3(config: Config) -> ModelText:
    """Qwen3 (arXiv 2505.09388): queries and keys are normed per head."""
    model = DecoderModel(config, Sizes(4096, 22016, 32, 32, 151936, 32768, dim=128))
    return _qwen(model, model.biased(Attention(qk_norm=RMS, rope=model.rope())))


def _qwen(model: DecoderModel, mixer: Attention) -> ModelText:
    return model.stack(model.late_windows(mixer))


@reads("Phi-3", "phi3", features="windows, partial rotation")
def read_phi3(config: Config) -> ModelText:
    """Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama's computation in fused products."""
    return phi3_words(config, Sizes(3072, 8192, 32, 32, 32064, 4096))


def phi3_words(config: Config, sizes: Sizes) -> ModelText:
    """The language model of Phi-3 with these defaults."""
    model = DecoderModel(config, sizes)
    config.skip("original_max_position_embeddings", "full_attn_mod", "interpolate_factor")
    config.only("attention_bias", False, why="the family does not have")
    rope = model.rope()  # model code always joins the rotated part with the rest of a head
    rope = replace(rope, part=rope.part or "K")
    block = FeedForward(model.activation(), packed=True)
    return model.stack(model.windowed(Attention(rope=rope, packed=True)), block)


@reads("Seed-OSS", "seed_oss", features="biases of q, k, v")
def read_seed_oss(config: Config) -> ModelText:
    """Seed-OSS: biases of queries, keys and values."""
    model = DecoderModel(config, Sizes(4096, 27648, 64, 80, 155136, 524288, groups=8, dim=128))
    mixer = Attention(
        qkv_bias=model.flag("attention_bias", True),
        out_bias=model.flag("attention_out_bias"),
        rope=model.rope(),
    )
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return model.stack(mixer, block)


@reads("ERNIE 4.5", "ernie4_5", features="biases by a key, tied head")
def read_ernie(config: Config) -> ModelText:
    """ERNIE 4.5: one key for all biases, a tied head."""
    model = DecoderModel(
        config, Sizes(1024, 3072, 18, 16, 103424, 131072, groups=2, dim=128, base=500000)
    )
    biased = model.flag("use_bias")
    mixer = Attention(rope=model.rope(interleaved=True), qkv_bias=biased, out_bias=biased)
    block = FeedForward(model.activation(), bias=biased)
    return model.stack(mixer, block, Decoder(tied=model.tied(True)))


@reads("SmolLM3", "smollm3", features="layers without positions")
def read_smollm3(config: Config) -> ModelText:
    """SmolLM3: every fourth layer has no positions."""
    model = DecoderModel(config, Sizes(2048, 11008, 36, 16, 128256, 32768, groups=4, base=2000000))
    rotary = model.biased(Attention(rope=model.rope()))
    config.only("use_sliding_window", False)
    config.only("sliding_window")
    config.skip("max_window_layers")
    config.words("layer_types", among=("full_attention",), length=model.count)
    interval = config.size("no_rope_layer_interval", default=4)
    rotated = config.sizes("no_rope_layers", length=model.count, most=1)
    rotated = rotated or tuple(int((i + 1) % interval != 0) for i in range(model.count))
    still = replace(rotary, rope=None)
    mixers = [("rotary", rotary) if each else ("still", still) for each in rotated]
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return model.stack(mixers, block, Decoder(tied=model.tied(True)))


@reads("InternLM", "internlm", features="biases by a key")
def read_internlm(config: Config) -> ModelText:
    """InternLM: Llama with biases of attention."""
    rotary = config.section("rotary")
    if rotary is not None:
        rotary.only("type", "dynamic", "origin")
        rotary.only("base", 10000)
        rotary.finish()
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 103168, 2048, grouped=False))
    biased = model.flag("bias", True)
    mixer = Attention("H", rope=model.rope(), qkv_bias=biased, out_bias=biased)
    return model.stack(mixer)


@reads("InternLM2", "internlm2", features="biases by a key")
def read_internlm2(config: Config) -> ModelText:
    """InternLM2 (arXiv 2403.17297)."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 103168, 2048))
    biased = model.flag("bias", True)
    mixer = Attention(rope=model.rope(), qkv_bias=biased, out_bias=biased)
    return model.stack(mixer)


@reads("InternLM3", "internlm3", features="biases by keys")
def read_internlm3(config: Config) -> ModelText:
    """InternLM3: biases of queries, keys and values by a separate key."""
    model = DecoderModel(config, Sizes(4096, 10240, 48, 32, 128512, 32768, groups=2, dim=128))
    biased = model.flag("bias")
    mixer = Attention(rope=model.rope(), qkv_bias=model.flag("qkv_bias"), out_bias=biased)
    block = FeedForward(model.activation(), bias=biased)
    return model.stack(mixer, block)


@reads("Baichuan", "baichuan", features="ALiBi in 13B")
def read_baichuan(config: Config) -> ModelText:
    """Baichuan (arXiv 2309.10305): rotary positions in 7B; a bias by distance in 13B, whose
    configuration only has `model_max_length`."""
    alibi = not config.has("max_position_embeddings") and config.has("model_max_length")
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 125696, 4096, grouped=False))
    config.skip("model_max_length", "z_loss_weight")
    rope, mask = (None, "causal, alibi") if alibi else (model.rope(), "causal")
    mixer = Attention("H", rope=rope, mask=mask)
    return model.stack(mixer)


@reads("EXAONE", "exaone", features="grouped queries")
def read_exaone(config: Config) -> ModelText:
    """EXAONE 3 (arXiv 2408.03541)."""
    model = DecoderModel(config, Sizes(4096, 14336, 32, 32, 102400, 4096, groups=8, base=500000))
    return model.stack(Attention(rope=model.rope()))


@reads("EXAONE 4", "exaone4", features="post-norms, windows, no positions")
def read_exaone4(config: Config) -> ModelText:
    """EXAONE 4 (arXiv 2507.11407): norms after the blocks, queries and keys normed per head; where
    some layers see a window, the others have no positions."""
    model = DecoderModel(config, Sizes(4096, 16384, 32, 32, 102400, 2048))
    rotary = Attention(qk_norm=RMS, rope=model.rope())
    hybrid = config.has("sliding_window") or not config.names("sliding_window")
    window = model.window(4096)
    local = model.windows([])
    if local:
        config.skip("sliding_window_pattern")
    else:
        pattern = config.every("sliding_window_pattern", default=4)
        local = [(i + 1) % pattern != 0 for i in range(model.count)]
    mixers: PerLayer = rotary
    if hybrid:
        windowed = model.in_window(rotary, window)
        still = replace(rotary, rope=None)
        mixers = [("local", windowed) if each else ("global", still) for each in local]
    return model.stack(mixers, norm=None, post=RMS)


@reads("GLM", "glm", features="partial rotation, biases of q, k, v")
def read_glm(config: Config) -> ModelText:
    """GLM-4 (arXiv 2406.12793): half of each head is rotated; biases of queries, keys, values."""
    return _glm(config, dim=128, sandwich=False)


@reads("GLM-4", "glm4", features="as GLM, with norms before and behind")
def read_glm4(config: Config) -> ModelText:
    """GLM-4-0414: GLM with norms after the blocks too."""
    return _glm(config, dim=128, sandwich=True)


def read_glm4v_text(config: Config) -> ModelText:
    """The text model of GLM-4.1V: GLM-4-0414, whose heads share the width."""
    config.family = "GLM-4.1V"
    return _glm(config, dim=None, sandwich=True)


def _glm(config: Config, *, dim: int | None, sandwich: bool) -> ModelText:
    sizes = Sizes(4096, 13696, 40, 32, 151552, 131072, groups=2, dim=dim)
    model = DecoderModel(config, sizes)
    mixer = Attention(
        qkv_bias=model.flag("attention_bias", True), rope=model.rope(partial=HALF, interleaved=True)
    )
    block = FeedForward(model.activation(), packed=True)
    return model.stack(mixer, block, post=RMS if sandwich else None)


@reads("Hunyuan", "hunyuan_v1_dense", features="q and k normed after rotation")
def read_hunyuan(config: Config) -> ModelText:
    """Hunyuan dense: queries and keys are normed after the rotation."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 290943, 2048))
    normed = RMS if model.flag("use_qk_norm", True) else None
    mixer = model.biased(Attention(qk_norm=normed, after_rope=True, rope=model.rope()))
    skip_hunyuan(config)
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return model.stack(mixer, block)


def skip_hunyuan(config: Config) -> None:
    """Check the keys of the releases for features that are turned off, and ignore those of images
    that releases of texts have."""
    config.fixed(position_embedding_xdrope=False, use_rotary_pos_emb=True)
    config.skip("cla_share_factor", "class_num", "dense_list", "pool_type", "org_vocab_size")
    config.skip("im_start_id", "im_end_id", "im_newline_id", "mask_init_id", "text_start_id")
    config.skip("text_end_id", "num_media_embeds", "attention_head_dim", "head_dim")
    config.skip("skip_cls_token", "video_start_id", "video_end_id", "xdrope_section")
    config.skip(*(key for key in config.members if key.startswith(("vit_", "anyres_"))))


@reads("Helium", "helium", features="biases by keys")
def read_helium(config: Config) -> ModelText:
    """Helium-1."""
    model = DecoderModel(config, Sizes(2560, 7040, 24, 20, 48000, 4096, groups=20, dim=128))
    rope = model.rope(interleaved=True)
    mixer = Attention(qkv_bias=model.flag("attention_bias"), rope=rope)
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return model.stack(mixer, block, norm=WIDE_RMS)


@reads("Arcee", "arcee", features="squared ReLU")
def read_arcee(config: Config) -> ModelText:
    """Arcee AFM: Llama with a squared ReLU and no gate."""
    model = DecoderModel(config, Sizes(2560, 18432, 32, 32, 32000, 4096))
    mixer = model.biased(Attention(rope=model.rope()))
    block = FeedForward(model.activation("relu2"), gated=False, bias=model.flag("mlp_bias"))
    return model.stack(mixer, block)
