"""Dense decoders similar to Llama, with other norms, activations or scales."""

from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.positions import growing_temperature
from stagec.importers.common.sizes import is_bare
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, RMS, Attention, FeedForward, Norm, Rope
from stagec.importers.writing.stack import Decoder, root
from stagec.importers.writing.text import Callee, ModelText

_PLAIN = Norm(affine="none")


@reads("Ministral 3", "ministral3", features="queries grow with the position")
def read_ministral3(config: Config) -> ModelText:
    """Ministral 3: Mistral with queries that grow with the position, as in Llama 4."""
    model = DecoderModel(config, Sizes(4096, 14336, 34, 32, 131072, 262144, 8, 128, 1000000))
    mixer = Attention(rope=model.rope(), temperature=growing_temperature(config))
    return model.stack(model.windowed(mixer))


@reads("Jais 2", "jais2", features="LayerNorm, biases, squared ReLU")
def read_jais2(config: Config) -> ModelText:
    """Jais 2: LayerNorm, biases everywhere, a squared ReLU."""
    model = DecoderModel(config, Sizes(3328, 26624, 32, 26, 150272, 8192, base=500000))
    mixer = model.biased(Attention(rope=model.rope()), True)
    block = FeedForward(model.activation("relu2"), gated=False, bias=model.flag("mlp_bias", True))
    return model.stack(mixer, block, norm=LAYER)


@reads("nanochat", "nanochat", features="norms without scales, bounded logits")
def read_nanochat(config: Config) -> ModelText:
    """nanochat: norms without scales, one of the embeddings too; a squared ReLU, bounded logits."""
    model = DecoderModel(config, Sizes(768, 8192, 12, 6, 50304, 2048))
    config.only("attention_bias", False)
    rope = replace(model.rope(), inverse=True)
    mixer = Attention(qk_norm=_PLAIN, after_rope=True, rope=rope)
    block = FeedForward(model.activation("relu2"), gated=False)
    cap = config.ratio("final_logit_softcapping", default=15)
    decoder = Decoder(_PLAIN, tied=model.tied(), embed_norm=_PLAIN, logit_cap=cap or None)
    return model.stack(mixer, block, decoder, norm=_PLAIN)


@dataclass(frozen=True, slots=True)
class _XIELU:
    """A feed-forward block with xIELU (arXiv 2411.13010): a square above zero and exp(x) - 1 - x
    below it, each times a trained number, plus x times beta, a buffer."""

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        return text.use("xielu", "D F")


@reads("Apertus", "apertus", "apertus1p5_text", features="xIELU, q and k normed per head")
def read_apertus(config: Config) -> ModelText:
    """Apertus (arXiv 2509.14233): xIELU without a gate, queries and keys normed per head. The
    table of 1.5 may have more rows than logits."""
    new = config.text("model_type") == "apertus1p5_text"
    sizes = Sizes(4096, 14336, 32, 32, 266752 if new else 131072, 65536, base=12000000)
    model = DecoderModel(config, sizes)
    config.fixed(hidden_act="xielu", qk_norm=True, post_norm=False)
    mixer = model.biased(Attention(qk_norm=RMS, rope=model.rope()))
    rows = model.text.value("V")
    logits = config.size("output_vocab_size", default=rows, most=rows) if new else rows
    decoder = Decoder(tied=model.tied(), more="N_new" if logits < rows else "")
    if decoder.more:
        model.text.replace("V", logits, "output_vocab_size")
        model.text.symbol("N_new", rows - logits, "vocab_size - output_vocab_size")
    return model.stack(mixer, _XIELU(), decoder)


@reads("EuroBERT", "eurobert", features="Llama that sees both directions")
def read_eurobert(config: Config) -> ModelText:
    """EuroBERT (arXiv 2503.05500): Llama whose tokens see all others, with the head of a masked
    language model."""
    model = DecoderModel(config, Sizes(768, 3072, 12, 12, 128256, 8192), masked=True)
    if is_bare(config):
        message = "has no head, which is not modeled: expected MaskedLM"
        raise config.refuse("architectures", message)
    config.only("pretraining_tp", 1)
    config.skip("mask_token_id", "classifier_pooling", "clf_pooling")
    bias = model.flag("mlp_bias")
    mixer = model.biased(Attention(mask="", rope=model.rope()))
    decoder = Decoder(tied=model.tied(), head_bias=bias)
    return model.stack(mixer, FeedForward(model.activation(), bias=bias), decoder)


@dataclass(frozen=True, slots=True)
class _NormedGate:
    """A feed-forward block with a squared ReLU as a gate, and a norm before its last product."""

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        return text.use("gated_relu2", "D F")


@reads("BitNet", "bitnet", features="norms before the last products")
def read_bitnet(config: Config) -> ModelText:
    """BitNet b1.58 (arXiv 2504.12285): norms before the last product of each block. Weights have
    the usual type; a strategy may state fewer bits."""
    model = DecoderModel(config, Sizes(2560, 6912, 30, 20, 128256, 2048, groups=5, base=500000))
    config.only("hidden_act", "relu2")
    mixer = model.biased(Attention(rope=model.rope(), out_norm=RMS))
    return model.stack(mixer, _NormedGate())


@reads("MiniCPM", "minicpm", features="scaled embeddings, residuals, logits")
def read_minicpm(config: Config) -> ModelText:
    """MiniCPM (arXiv 2404.06395): Llama with scaled embeddings, residuals and logits."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 32000, 2048))
    mixer = model.biased(Attention(rope=model.rope()))
    base = config.size("dim_model_base", default=1)
    decoder = Decoder(
        tied=model.tied(True),
        embed_scale=config.ratio("scale_emb", default=1),
        logit_scale=Fraction(base, model.width) if config.has("dim_model_base") else Fraction(1),
    )
    depth = config.ratio("scale_depth", default=1)
    config.only("num_experts", 0)
    config.skip("mup_denominator")  # of draft models, whose depth is not theirs
    sparse = config.section("sparse_config")
    if sparse is not None:
        longest = sparse.size("dense_len", default=8192)
        message = f"Left out: attention to selected blocks beyond {longest} tokens of a sequence."
        model.text.notes.append(message)
    block = FeedForward(model.activation())
    return model.stack(mixer, block, decoder, scale=depth / root(model.count))


@reads("ChatGLM", "chatglm", features="partial rotation, biases by keys")
def read_chatglm(config: Config) -> ModelText:
    """ChatGLM2 and later (arXiv 2406.12793): half of each head is rotated."""
    grouped = config.flag("multi_query_attention", default=False)
    if not grouped:
        config.skip("multi_query_group_num")
    sizes = Sizes(4096, 13696, 28, 32, 65024, 2048, dim=128, grouped=grouped)
    model = DecoderModel(config, sizes)
    config.fixed(rmsnorm=True, post_layer_norm=True, interleaved_qkv=False, pre_seq_len=None)
    config.fixed(apply_residual_connection_post_layernorm=False, prefix_projection=False)
    config.skip("bias_dropout_fusion", "original_rope", "quantization_bit")
    base = 10000 * config.ratio("rope_ratio", default=1)
    if base.denominator != 1 or not 0 < base < 1 << 60:
        raise config.wrong("rope_ratio", "a number that makes a whole base of 10000 times it")
    model.text.symbol("theta", int(base), "10000 * rope_ratio")
    biased = model.flag("add_bias_linear")
    rope = model.partly(Rope(interleaved=True), model.dim // 2, "head_dim")
    mixer = Attention(qkv_bias=model.flag("add_qkv_bias") or biased, out_bias=biased, rope=rope)
    block = FeedForward(model.activation(), bias=biased)
    return model.stack(mixer, block)


@reads("Orion", "orion", features="LayerNorm")
def read_orion(config: Config) -> ModelText:
    """Orion (arXiv 2401.12246): Llama with LayerNorm."""
    model = DecoderModel(config, Sizes(4096, 15360, 40, 40, 84608, 4096))
    mixer = model.biased(Attention(rope=model.rope()))
    block = FeedForward(model.activation())
    return model.stack(mixer, block, norm=LAYER)


@reads("CWM", "cwm", features="windows 3:1")
def read_cwm(config: Config) -> ModelText:
    """CWM (arXiv 2510.02387): Llama with windows in three layers of four."""
    model = DecoderModel(config, Sizes(6144, 21504, 64, 48, 128256, 131072, 8, 128, 1000000))
    local = model.windows([i % 4 != 0 for i in range(model.count)])
    mixers = model.masked(Attention(rope=model.rope()), local, model.window(8192))
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return model.stack(mixers, block)
