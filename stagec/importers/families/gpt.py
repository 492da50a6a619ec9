"""Decoders with LayerNorm: GPT-2 and its successors."""

from dataclasses import replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import (
    ACTIVATIONS,
    COHERE_NORM,
    LAYER,
    LAYER_SCALE,
    Attention,
    FeedForward,
    Norm,
    Rope,
)
from stagec.importers.writing.stack import Decoder, NormedSums, Sublayer
from stagec.importers.writing.text import ModelText

#: The default inner width of four times the width.
_FOURFOLD = -4


@reads("GPT-2", "gpt2", "gpt-sw3", features="learned positions, biases, tied head")
def read_gpt2(config: Config) -> ModelText:
    """GPT-2: learned positions, biases everywhere, a tied head."""
    model = DecoderModel(config, Sizes(768, _FOURFOLD, 12, 12, 50257, 1024, grouped=False))
    config.fixed(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    config.skip("n_ctx")
    _skip_summary(config)
    return _biased(model, "gelu_new", "H", mask="causal, given_type")


@reads("GPT", "openai-gpt", features="norms behind the sums")
def read_gpt(config: Config) -> ModelText:
    """GPT (Radford et al. 2018): GPT-2 whose norms stand after the sums."""
    model = DecoderModel(config, Sizes(768, _FOURFOLD, 12, 12, 40478, 512, grouped=False))
    act = config.word("afn", among=ACTIVATIONS, default="gelu_new")
    act = "gelu_new" if act == "gelu" else act  # as in its class
    config.only("n_special", 0)
    config.skip("n_ctx", "predict_special_tokens")
    _skip_summary(config)
    mixer = Attention(
        "H", qkv_bias=True, out_bias=True, rope=None, mask="causal, given_type", packed=True
    )
    block = FeedForward(act, gated=False, bias=True)
    decoder = Decoder(None, tied=model.tied(True), positions=model.positions())
    return normed_sums(model, mixer, block, decoder)


@reads("StarCoder", "gpt_bigcode", features="GPT-2 with multi-query")
def read_gpt_bigcode(config: Config) -> ModelText:
    """StarCoder (arXiv 2305.06161): GPT-2 with one head of keys and values."""
    one = config.flag("multi_query", default=True)
    sizes = Sizes(768, _FOURFOLD, 12, 12, 50257, 1024, groups=1 if one else None, grouped=False)
    model = DecoderModel(config, sizes)
    config.only("scale_attn_weights", True)
    config.skip("n_ctx", "inference_runner", "max_batch_size", "pad_key_length")
    config.skip("pre_allocate_kv_cache", "validate_runner_input")
    _skip_summary(config)
    config.only("num_key_value_heads", 1 if one else model.heads)
    return _biased(model, "gelu_pytorch_tanh", "G" if one else "H")


def _skip_summary(config: Config) -> None:
    """Ignore the keys of a head that summarizes a sequence, which language models do not have."""
    names = ("type", "use_proj", "activation", "proj_to_labels")
    config.skip(*(f"summary_{name}" for name in names))


def _biased(model: DecoderModel, activation: str, groups: str, mask: str = "causal") -> ModelText:
    mixer = Attention(groups, qkv_bias=True, out_bias=True, rope=None, mask=mask, packed=True)
    block = FeedForward(model.activation(activation), gated=False, bias=True)
    decoder = Decoder(LAYER, tied=model.tied(True), positions=model.positions())
    return model.stack(mixer, block, decoder, norm=LAYER)


@reads("GPT-Neo", "gpt_neo", features="windows in every other layer")
def read_gpt_neo(config: Config) -> ModelText:
    """GPT-Neo: every other layer has a window; scores are not scaled."""
    model = DecoderModel(config, Sizes(2048, _FOURFOLD, 24, 16, 50257, 2048, grouped=False))
    config.skip("attention_types")
    model.text.symbol("W", config.size("window_size", default=256), "window_size")
    types = config.words("attention_layers", among=("global", "local"), length=model.count)
    types = types or tuple(("global", "local")[i % 2] for i in range(model.count))
    full = Attention("H", out_bias=True, rope=None, mask="causal, rsqrt = 1, wide_scores")
    local = replace(full, mask="causal, window = W, rsqrt = 1, wide_scores")
    mixers = [(t, local if t == "local" else full) for t in types]
    block = FeedForward(model.activation("gelu_new"), gated=False, bias=True)
    _skip_summary(config)
    decoder = Decoder(LAYER, tied=model.tied(True), positions=model.positions())
    return model.stack(mixers, block, decoder, norm=LAYER)


@reads("OPT", "opt", features="learned positions, ReLU, biases")
def read_opt(config: Config) -> ModelText:
    """OPT (arXiv 2205.01068): learned positions, of which the first two are unused."""
    model = DecoderModel(config, Sizes(768, 3072, 12, 12, 50272, 2048, grouped=False))
    config.fixed(layer_norm_elementwise_affine=True, _remove_final_layer_norm=False)
    narrow = config.size("word_embed_proj_dim", default=model.width) != model.width
    if narrow:
        model.size("D_embed", "word_embed_proj_dim")
    biased = model.flag("enable_bias", True)
    mixer = Attention("H", qkv_bias=biased, out_bias=biased, rope=None)
    block = FeedForward(model.activation("relu"), gated=False, bias=biased)
    decoder = Decoder(LAYER, tied=model.tied(True), positions=model.positions(before=2))
    decoder = replace(decoder, narrow="D_embed" if narrow else "")
    if model.flag("do_layer_norm_before", True):
        return model.stack(mixer, block, decoder, norm=LAYER)
    return normed_sums(model, mixer, block, replace(decoder, norm=None))


def normed_sums(
    model: DecoderModel, mixer: Attention, block: FeedForward, decoder: Decoder
) -> ModelText:
    """The text of layers whose norms stand after the sums."""
    parts = [
        Sublayer(each.write(model.text), name, None)
        for each, name in ((mixer, "attn"), (block, "ffn"))
    ]
    return decoder.write(model.text, {"layers": NormedSums(parts)}, ["layers"] * model.count)


@reads("BLOOM", "bloom", features="ALiBi, normed embeddings, biases")
def read_bloom(config: Config) -> ModelText:
    """BLOOM (arXiv 2211.05100): a bias by distance, a norm of the embeddings."""
    model = DecoderModel(config, Sizes(64, _FOURFOLD, 2, 8, 250880, 2048, grouped=False))
    config.only("apply_residual_connection_post_layernorm", False)
    config.only("n_inner", 4 * model.width)
    config.skip("offset_alibi", "slow_but_exact", "skip_bias_add", "skip_bias_add_qkv")
    config.skip("bias_dropout_fusion")
    mixer = Attention(
        "H", qkv_bias=True, out_bias=True, rope=None, mask="causal, alibi", packed=True
    )
    # GeLUFunction of modeling_bloom.py, which only saves its input
    block = FeedForward("gelu_tanh", gated=False, bias=True)
    decoder = Decoder(LAYER, tied=model.tied(True), embed_norm=LAYER)
    return model.stack(mixer, block, decoder, norm=LAYER)


@reads("MPT", "mpt", features="ALiBi, LayerNorm without bias")
def read_mpt(config: Config) -> ModelText:
    """MPT: a bias by distance, or learned positions."""
    ratio = config.size("expansion_ratio", default=4)
    model = DecoderModel(config, Sizes(2048, -ratio, 24, 16, 50368, 2048, grouped=False))
    norm = LAYER_SCALE if model.flag("no_bias", True) else LAYER
    biased = norm == LAYER
    config.merge("attn_config")
    alibi = model.flag("alibi", True)
    config.only("attn_type", "multihead_attention")
    for key in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        config.only(key, False)
    config.only("softmax_scale")
    config.only("alibi_bias_max", 8)
    config.skip("attn_impl")
    model.clip()
    mask = "causal, alibi" if alibi else "causal"
    config.skip("init_config", "init_device", "verbose", "ffn_config", "embedding_fraction")
    config.skip("norm_type")
    config.only("logit_scale")
    config.only("use_pad_tok_in_ffn", True)
    learned = model.flag("learned_pos_emb", True) and not alibi
    mixer = Attention("H", qkv_bias=biased, out_bias=biased, rope=None, mask=mask, packed=True)
    block = FeedForward("gelu", gated=False, bias=biased)
    decoder = Decoder(norm, tied=model.tied(True), positions=model.positions() if learned else None)
    return model.stack(mixer, block, decoder, norm=norm)


@reads("GPT-NeoX", "gpt_neox", features="parallel blocks, partial rotation")
def read_gpt_neox(config: Config) -> ModelText:
    """GPT-NeoX (arXiv 2204.06745): both blocks of a layer read its input, each by its own norm."""
    model = DecoderModel(config, Sizes(6144, 24576, 44, 64, 50432, 2048, grouped=False))
    rope = model.rope(partial=Fraction(1, 4))
    mixer = model.biased(Attention("H", rope=rope, packed=True), True)
    block = FeedForward(model.activation("gelu"), gated=False, bias=True)
    parallel = model.flag("use_parallel_residual", True)
    decoder = Decoder(LAYER, tied=model.tied())
    return model.stack(mixer, block, decoder, norm=LAYER, parallel=parallel)


@reads("GPT-J", "gptj", "codegen", features="parallel blocks under one norm")
def read_gptj(config: Config) -> ModelText:
    """GPT-J and CodeGen (arXiv 2203.13474): both blocks read one norm; the head has a bias."""
    model = DecoderModel(config, Sizes(4096, _FOURFOLD, 28, 16, 50400, 2048, grouped=False))
    config.skip("n_ctx", "scale_attn_weights", "rotary")
    _skip_summary(config)
    rotated = config.size("rotary_dim", default=64)
    model.text.symbol("theta", 10000, "the base of the frequencies")
    rope = Rope(interleaved=True, by_token=True)
    rope = model.partly(rope, rotated, "rotary_dim")
    mixer = Attention("H", rope=rope, mask="causal, wide_scores")
    block = FeedForward(model.activation("gelu_new"), gated=False, bias=True)
    decoder = Decoder(LAYER, tied=model.tied(), head_bias=True)
    return _parallel(model, mixer, block, decoder)


@reads("Phi", "phi", features="parallel blocks under one norm, biases")
def read_phi(config: Config) -> ModelText:
    """Phi-1 and Phi-2 (arXiv 2309.05463): both blocks read one norm; biases everywhere."""
    config.only("qk_layernorm", False)
    model = DecoderModel(config, Sizes(2048, 8192, 24, 32, 51200, 2048))
    return _phi(model, model.rope(partial=Fraction(1, 2)))


@reads("Phi of releases", "phi-msft", features="Phi by keys of GPT-2")
def read_phi_msft(config: Config) -> ModelText:
    """Phi by the keys of the first releases of Phi-1.5 and Phi-2; the rows of the token table are
    rounded up to a multiple."""
    config.family = "Phi"
    model = DecoderModel(config, Sizes(1024, _FOURFOLD, 20, 16, 50304, 2048))
    config.skip("flash_attn", "flash_rotary", "fused_dense", "img_processor")
    words, times = (model.text.value("V"), config.size("pad_vocab_size_multiple", default=64))
    model.text.replace("V", -(-words // times) * times, "vocab_size")
    rotated = min(config.size("rotary_dim", default=32), model.dim)
    return _phi(model, model.partly(model.rope(), rotated, "rotary_dim"))


def _phi(model: DecoderModel, rope: Rope) -> ModelText:
    mixer = Attention(qkv_bias=True, out_bias=True, rope=rope)
    block = FeedForward(model.activation("gelu_new"), gated=False, bias=True)
    return _parallel(model, mixer, block, Decoder(LAYER, tied=model.tied(), head_bias=True))


def _parallel(
    model: DecoderModel, mixer: Attention, block: FeedForward, decoder: Decoder, norm: Norm = LAYER
) -> ModelText:
    """A model whose blocks read one norm and add to the stream together."""
    return model.stack(mixer, block, decoder, norm=None, parallel=True, common_norm=norm)


@reads("Falcon", "falcon", "RefinedWeb", "RefinedWebModel", features="multi-query, parallel blocks")
def read_falcon(config: Config) -> ModelText:
    """Falcon (arXiv 2311.16867): one head of keys and values, or some in the newer layers."""
    newer = config.flag("new_decoder_architecture", default=False)
    one = config.flag("multi_query", default=True) and not newer
    if not newer:
        config.skip("num_kv_heads", "n_head_kv")
    sizes = Sizes(4544, _FOURFOLD, 32, 71, 65024, 2048, groups=1 if one else None, grouped=newer)
    model = DecoderModel(config, sizes)
    config.skip("ff_factor")
    biased = model.flag("bias")
    alibi = model.flag("alibi")
    if alibi:  # rotary positions are stated, but not used
        config.skip("rope_theta", "rope_scaling", "rope_parameters")
    mask = "causal, alibi" if alibi else "causal, given_type, made_mask"
    rope, groups = None if alibi else model.rope(), "G" if one or newer else "H"
    mixer = Attention(groups, qkv_bias=biased, out_bias=biased, rope=rope, mask=mask)
    # code copies parts out of the product that do not have a head for each other
    mixer = replace(mixer, packed=groups == "H")
    activation = config.word("activation", among=ACTIVATIONS, default=model.activation("gelu"))
    block = FeedForward(activation, gated=False, bias=biased)
    decoder = Decoder(LAYER, tied=model.tied(True))
    norms = config.size("num_ln_in_parallel_attn", default=2 if newer else 1, most=2)
    parallel = model.flag("parallel_attn", True) or newer
    if parallel and norms == 1:
        return _parallel(model, mixer, block, decoder)
    return model.stack(mixer, block, decoder, norm=LAYER, parallel=parallel)


@reads("StarCoder2", "starcoder2", features="biases by a key, windows")
def read_starcoder2(config: Config) -> ModelText:
    """StarCoder2 (arXiv 2402.19173): grouped queries, biases by a key, a window."""
    model = DecoderModel(config, Sizes(3072, 12288, 30, 24, 49152, 4096, groups=2))
    biased = model.flag("use_bias", True)
    config.fixed(mlp_type="default", norm_type="layer_norm")
    config.skip("activation_function")
    mixer = Attention(qkv_bias=biased, out_bias=biased, rope=model.rope())
    mixers = model.windowed(mixer)
    block = FeedForward(model.activation("gelu_pytorch_tanh"), gated=False, bias=biased)
    return model.stack(mixers, block, Decoder(LAYER, tied=model.tied(True)), norm=LAYER)


@reads("StableLM", "stablelm", features="LayerNorm, partial rotation")
def read_stablelm(config: Config) -> ModelText:
    """StableLM 2 (arXiv 2402.17834): a quarter of each head is rotated."""
    model = DecoderModel(config, Sizes(2560, 6912, 32, 32, 50304, 4096))
    normed = LAYER_SCALE if model.flag("qk_layernorm") else None
    biased, rope = model.flag("use_qkv_bias"), model.rope(partial=Fraction(1, 4))
    mixer = Attention(qkv_bias=biased, qk_norm=normed, norm_dims="heads", rope=rope)
    block = FeedForward(model.activation())
    decoder = Decoder(LAYER, tied=model.tied())
    if model.flag("use_parallel_residual"):
        return _parallel(model, mixer, block, decoder)
    return model.stack(mixer, block, decoder, norm=LAYER)


@reads("Command R", "cohere", features="parallel blocks, scaled logits")
def read_cohere(config: Config) -> ModelText:
    """Command R: both blocks read one LayerNorm without a bias; logits are scaled."""
    model = DecoderModel(config, Sizes(8192, 22528, 40, 64, 256000, 8192))
    normed = COHERE_NORM if model.flag("use_qk_norm") else None
    mixer = model.biased(
        Attention(qk_norm=normed, norm_dims="heads", rope=model.rope(interleaved=True))
    )
    scale = config.ratio("logit_scale", default=Fraction(1, 16))
    decoder = Decoder(COHERE_NORM, tied=model.tied(True), logit_scale=scale)
    return _parallel(model, mixer, FeedForward(model.activation()), decoder, COHERE_NORM)


@reads("OLMo", "olmo", features="LayerNorm without parameters")
def read_olmo(config: Config) -> ModelText:
    """OLMo (arXiv 2402.00838): LayerNorm without parameters."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 50304, 2048))
    model.clip()
    mixer = model.biased(Attention(rope=model.rope()))
    plain = Norm("layer", "none", code="wide")
    block = FeedForward(model.activation())
    return model.stack(mixer, block, norm=plain)


@reads("Nemotron", "nemotron", features="squared ReLU, LayerNorm of 1 + w")
def read_nemotron(config: Config) -> ModelText:
    """Nemotron-4 (arXiv 2402.16819): a squared ReLU, norms with a scale of 1 + w."""
    model = DecoderModel(config, Sizes(6144, 24576, 32, 48, 256000, 4096))
    norm = Norm("layer", zero_centered=True, code="narrow")
    mixer = model.biased(Attention(rope=model.rope(partial=Fraction(1, 2))))
    block = FeedForward(model.activation("relu2"), gated=False, bias=model.flag("mlp_bias"))
    return model.stack(mixer, block, norm=norm)


@reads("Persimmon", "persimmon", features="squared ReLU, q and k normed")
def read_persimmon(config: Config) -> ModelText:
    """Persimmon: a squared ReLU, queries and keys normed per head, half of each head rotated."""
    model = DecoderModel(
        config, Sizes(4096, 16384, 36, 64, 262144, 16384, base=25000, grouped=False)
    )
    normed = LAYER if model.flag("qk_layernorm", True) else None
    rope = model.rope(partial=Fraction(1, 2))
    mixer = Attention("H", qkv_bias=True, out_bias=True, qk_norm=normed, rope=rope, packed=True)
    block = FeedForward(model.activation("relu2"), gated=False, bias=True)
    return model.stack(mixer, block, norm=LAYER)
