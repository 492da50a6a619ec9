"""Kimi Linear: delta nets with a gate for each element of keys, and latent attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.sizes import read_size
from stagec.importers.families.deepseek import latent_of
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import FeedForward
from stagec.importers.writing.stack import Decoder, Place, stacked
from stagec.importers.writing.text import Callee, ModelText


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """Kimi Delta Attention (arXiv 2510.26692): H_m heads of P, gates of rank P, convolutions of W_m
    tokens, a norm of each head times a gate."""

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        return text.use("kimi_delta", "D H_m P W_m Q_m")


@reads("Kimi Linear", "kimi_linear", features="delta nets with gates by key")
def read_kimi_linear(config: Config) -> ModelText:
    """Kimi Linear (arXiv 2510.26692): three layers of delta nets, one of latent attention without
    positions; experts chosen by sigmoids."""
    model, latent = latent_of(config, Sizes(2304, 9216, 27, 32, 163840, 1 << 20))
    if config.flag("mla_use_nope", default=True):
        latent = replace(latent, rope=None)
    types = _layer_types(model)
    model.text.symbol("Q_m", 64, "tokens of a chunk, by the kernels")
    config.fixed(moe_router_activation_func="sigmoid", moe_layer_freq=1)
    config.skip("use_grouped_topk")
    scale = Fraction("2.446")
    mixture = model.sigmoid_experts(count=256, top=8, inner=1024, shared=1, scale=scale)
    dense = config.count("first_k_dense_replace", default=1)
    blocks = model.dense_first(dense, mixture, FeedForward(model.activation()))
    layers: list[list[Place]] = []
    for full, (name, block) in zip(types, blocks, strict=True):
        mixer = ("attention", "attn", latent) if full else ("delta", "attn", KimiDelta())
        layers.append([mixer, (name, "ffn", block)])
    return stacked(model.text, layers, Decoder(tied=model.tied()))


def _layer_types(model: DecoderModel) -> list[bool]:
    """For each layer, whether it has latent attention; declares H_m, P and W of the others."""
    config, text = model.config, model.text
    among = ("linear_attention", "full_attention")
    types = config.words("layer_types", among=among, length=model.count)
    full = [t == "full_attention" for t in types] or [
        i > 0 and i % 4 == 0 for i in range(model.count)
    ]
    inner = config.section("linear_attn_config")
    if inner is None:
        names, source = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"), config
    else:
        names, source = ("num_heads", "head_dim", "short_conv_kernel_size"), inner
        attends = inner.sizes("full_attn_layers", least=1, most=model.count)
        deltas = inner.sizes("kda_layers", least=1, most=model.count)
        if sorted((*attends, *deltas)) != list(range(1, model.count + 1)):
            message = f"and 'kda_layers' do not name each of {model.count} layers once"
            raise inner.refuse("full_attn_layers", message)
        full = [i + 1 in attends for i in range(model.count)]
    for symbol, name, default in zip(("H_m", "P", "W_m"), names, (32, 128, 4), strict=True):
        read_size(source, text, symbol, name, default=default)
    if inner is not None:
        inner.finish()
        config.skip("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    return full
