"""Decoders with latent attention that are not from DeepSeek."""

from __future__ import annotations

from fractions import Fraction

from stagec.importers.common.decoder_model import Sizes
from stagec.importers.families.deepseek import (
    LatentSizes,
    latent_of,
    read_deepseek_v32,
    sigmoid_stack,
)
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import FeedForward
from stagec.importers.writing.stack import Decoder, root
from stagec.importers.writing.text import ModelText


@reads("MiniCPM 3", "minicpm3", features="latent attention, scaled residuals")
def read_minicpm3(config: Config) -> ModelText:
    """MiniCPM 3 (arXiv 2404.06395): latent attention; scaled embeddings, residuals and logits."""
    sizes, latent = Sizes(2560, 6400, 62, 40, 73448, 32768), LatentSizes(64, 32, 0, 256, 768)
    model, mixer = latent_of(config, sizes, latent)
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
    model, mixer = latent_of(config, Sizes(2048, 6144, 32, 16, 128256, 131072))
    block = FeedForward(model.activation())
    return model.stack(mixer, block, Decoder(tied=model.tied(True)))


@reads("GLM-4.7-Flash", "glm4_moe_lite", features="latent attention")
def read_glm4_moe_lite(config: Config) -> ModelText:
    """GLM-4.7-Flash: GLM-4.5's experts over latent attention."""
    sizes = Sizes(2048, 10240, 47, 20, 154880, 202752)
    model, mixer = latent_of(config, sizes)
    scale = Fraction("1.8")
    return sigmoid_stack(model, mixer, count=64, top=4, inner=1536, dense=1, scale=scale)


@reads("GLM-5", "glm_moe_dsa", features="latent attention with an indexer")
def read_glm5(config: Config) -> ModelText:
    """GLM-5: DeepSeek-V3.2 by its keys."""
    return read_deepseek_v32(config)
