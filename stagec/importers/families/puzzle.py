"""Decoders whose layers a search made different: parts left out, feed-forward blocks of many
widths."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import Attention, FeedForward
from stagec.importers.writing.stack import Decoder, Place, stacked
from stagec.importers.writing.text import ModelText

#: Feed-forward widths are rounded up to a multiple of this, as in the code of the releases.
_MULTIPLE = 256


@reads("Llama-Nemotron", "nemotron-nas", features="layers without a part, widths by layer")
def read_nemotron_nas(config: Config) -> ModelText:
    """Llama-Nemotron Super and Ultra (arXiv 2505.00949): Llama whose layers may lack attention or a
    feed-forward block (`no_op`), with a number of key heads and a width by layer
    (`block_configs`)."""
    model = DecoderModel(config, Sizes(8192, -1, 80, 64, 128256, 131072))
    mixer = model.biased(Attention(rope=model.rope()))
    plain = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    layers: list[list[Place]] = []
    for each in config.sections("block_configs", length=model.count):
        places: list[Place] = []
        heads, width = _key_heads(model, each), _width(model, each)
        if heads:
            symbol = model.text.symbol(
                f"G_{heads}", heads, "num_attention_heads / n_heads_in_group"
            )
            places.append((f"g{heads}", "attn", replace(mixer, groups=symbol)))
        if width:
            symbol = model.text.symbol(f"F_{width}", width, "ffn_mult * 2/3 * hidden_size")
            places.append((f"f{width}", "ffn", replace(plain, width=symbol)))
        each.finish()
        layers += [places] if places else []
    if not layers:
        raise config.refuse("block_configs", "has no layer that computes something")
    return stacked(model.text, _short(layers), Decoder(tied=model.tied()))


def _key_heads(model: DecoderModel, layer: Config) -> int:
    """The heads of keys of a layer; 0 without attention."""
    attention = layer.section("attention")
    if attention is None or attention.flag("no_op", default=False):
        return 0
    attention.fixed(replace_with_linear=False, unshifted_sink=False)
    attention.fixed(use_prefill_window_in_sink_attention=False)
    for key in ("num_sink_tokens", "sparsify", "window_length"):
        attention.only(key)
    group = attention.size("n_heads_in_group", default=1)
    attention.divides("n_heads_in_group", group, model.heads)
    attention.finish()
    return model.heads // group


def _width(model: DecoderModel, layer: Config) -> int:
    """The width of the feed-forward block of a layer; 0 without one."""
    block = layer.section("ffn")
    if block is None or block.flag("no_op", default=False):
        return 0
    block.fixed(replace_with_linear=False)
    block.only("sparsify")
    wide = int(block.positive("ffn_mult") * Fraction(2, 3) * model.width)
    block.finish()
    return -(-wide // _MULTIPLE) * _MULTIPLE


def _short(layers: Sequence[Sequence[Place]]) -> list[list[Place]]:
    """The layers, with names only for what differs among them."""
    names = {name for places in layers for name, _, _ in places if name[0] == "g"}
    groups = dict.fromkeys(names, "attention") if len(names) == 1 else {}
    return [[(groups.get(name, name), at, block) for name, at, block in p] for p in layers]
