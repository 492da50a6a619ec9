"""Decoders of Liquid AI: short convolutions between two gates, and attention in some layers."""

from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Named, Sizes
from stagec.importers.common.positions import read_bases
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, Attention, Block, FeedForward
from stagec.importers.writing.stack import Decoder
from stagec.importers.writing.text import Callee, ModelText


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
    model = _liquid(config, Sizes(2560, 12288, 32, 32, 65536, 128000, 8, base=1000000))
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
    model = _liquid(config, Sizes(2048, 7168, 32, 32, 65536, 128000, 8, base=1000000))
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


@reads("LFM3", "lfm3", features="LFM2 with windows, gates of heads, norms behind")
def read_lfm3(config: Config) -> ModelText:
    """LFM3: LFM2 with windows in some layers of attention, whose heads have gates; norms after the
    blocks."""
    model = _liquid(config, Sizes(2048, 7680, 24, 16, 128000, 128000, 4, 128), tokens=7)
    full, sliding = "full_attention", "sliding_attention"
    kinds = {full: ("theta", 1000000), sliding: ("theta_local", 10000)}
    ropes = read_bases(config, model.text, kinds, share=Fraction(1, 2))
    if not config.has("rope_parameters"):
        ropes[full] = replace(ropes[full], scaling="scaling = proportional, share = 1/2")
    mixer = model.biased(Attention(qk_norm=RMS, rope=ropes[full]))
    if model.flag("use_attention_gate", True):
        mixer = replace(mixer, head_gate="sigmoid")
    model.size("W_local", "sliding_window", default=256)
    local = replace(mixer, rope=ropes[sliding], mask="causal, window = W_local")
    conv = _ShortConv(model.flag("conv_bias"))
    blocks: dict[str, Block] = {"conv": conv, full: mixer, sliding: local}
    every = ("full_attention", "conv", "sliding_attention", "conv")  # from the third layer on
    types = config.words("layer_types", among=blocks, length=model.count)
    default = ("conv", "conv", *(every[i % 4] for i in range(model.count)))[: model.count]
    mixers = [(kind, blocks[kind]) for kind in types or default]
    post = RMS if model.flag("use_sandwich_norm", True) else None
    return model.stack(mixers, FeedForward(), Decoder(tied=_tied(model)), post=post)


def _liquid(config: Config, sizes: Sizes, *, tokens: int = 3) -> DecoderModel:
    model = DecoderModel(config, sizes)
    model.size("W", "conv_L_cache", default=tokens)
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
