"""Llama and its kin: RMSNorm, rotary positions, grouped queries, SwiGLU."""

from __future__ import annotations

from stagec.importers.blocks import RMS, Attention, FeedForward
from stagec.importers.common import begin, read_heads, read_rope
from stagec.importers.config import Config
from stagec.importers.family import ModelFamily
from stagec.importers.stack import Decoder, Layer, attention, feed_forward
from stagec.importers.text import ModelText


def read_llama(config: Config) -> ModelText:
    """Llama 1 to 3 (arXiv 2302.13971, 2407.21783)."""
    text = begin(config, "Llama", length=2048)
    layers = config.layers(default=32)
    read_heads(config, text, width=4096, heads=32)
    text.symbol("F", config.size("intermediate_size", default=11008), "intermediate_size")
    text.symbol("V", config.size("vocab_size", default=32000), "vocab_size")
    rope = read_rope(config, text)
    biased = config.flag("attention_bias", default=False)
    mixer = Attention(rope=rope, qkv_bias=biased, out_bias=biased)
    mlp = FeedForward(
        config.word("hidden_act", among=("silu",), default="silu"),
        bias=config.flag("mlp_bias", default=False),
    )
    layer = Layer([attention(mixer.write(text)), feed_forward(mlp.write(text))])
    tied = config.flag("tie_word_embeddings", default=False)
    return Decoder(RMS, tied).write(text, {"layers": layer}, ["layers"] * layers)


FAMILIES = (ModelFamily("Llama", ("llama",), read_llama, "RMSNorm, RoPE, grouped queries, SwiGLU"),)
