"""RWKV: models of token shifts and scans."""

from __future__ import annotations

from stagec.importers.common.sizes import read_size
from stagec.importers.common.state_space import begin_scans
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER
from stagec.importers.writing.stack import Decoder, Layer, Sublayer, arguments
from stagec.importers.writing.text import Body, Callee, ModelText


@reads("RWKV-7", "rwkv7", features="token shift, generalised delta rule")
def read_rwkv7(config: Config) -> ModelText:
    """RWKV-7 (arXiv 2503.14456). All layers except the first blend their values with its values."""
    text, count = begin_scans(config, 2048, 24, 65536)
    if count < 2:
        raise config.wrong("num_hidden_layers", "at least two layers")
    d = text.value("D")
    p = read_size(config, text, "P", "head_dim", "head_size", default=64)
    config.divides("head_dim", p, d)
    text.symbol("H_m", d // p, "hidden_size / head_dim")
    read_size(config, text, "F", "intermediate_size", default=4 * d)
    for symbol, name, rank in (
        ("w", "decay", 64),
        ("a", "a", 64),
        ("v", "v", 32),
        ("g", "gate", 128),
    ):
        read_size(config, text, f"R_{symbol}", f"{name}_low_rank_dim", default=rank)
    text.symbol("L", count, "num_hidden_layers")
    layer = text.use("rwkv7", "D H_m P R_w R_a R_v R_g F", function="rwkv7_layer")
    tied = config.flag("tie_word_embeddings", default=False)
    decoder, body = Decoder(LAYER, tied=tied, embed_norm=LAYER), Body()
    x, table = decoder.embed(body, "x")
    body.do(f"%h0, %v0 = stg.call @{layer.with_('values = own', 'as = first')}({x})")
    inner = Body(f"%r, %v = stg.call @{layer}(%h, %v_first)", "stg.yield(%r, %v_first)")
    body.repeat("%y, %v_last", "layers", "L - 1", "%h = %h0, %v_first = %v0", inner)
    decoder.write_head(text, body, "%y", table)
    return text.train(arguments(text), body)


# -- RWKV-6, -5 and -4 ----------------------------------------------------------------------------


@reads("RWKV-6", "rwkv6", features="token shift by data, decays of each element")
def read_rwkv6(config: Config) -> ModelText:
    """RWKV-6, Finch (arXiv 2404.05892), by the keys of RWKV/rwkv-6-world; ranks are those of its
    code, since there is no key for them."""
    text, count = _begin_heads(config)
    wide = text.value("D") >= 4096
    text.symbol("R_m", 64 if wide else 32, "of the mixture: 64 from a width of 4096 on")
    text.symbol("R_w", 128 if wide else 64, "of the decay: 128 from a width of 4096 on")
    text.use("rwkv6", "D H_m P R_m R_w F")
    return _stacked(config, text, count, "rwkv6_time")


@reads("RWKV-5", "rwkv5", features="token shift, decays of each row")
def read_rwkv5(config: Config) -> ModelText:
    """RWKV-5, Eagle (arXiv 2404.05892), by the keys of RWKV/rwkv-5-world: decays are parameters."""
    config.only("model_version", "5_2")
    text, count = _begin_heads(config)
    text.use("rwkv5", "D H_m P")
    text.use("rwkv6", "D F")
    return _stacked(config, text, count, "rwkv5_time")


@reads("RWKV-4", "rwkv", features="token shift, decays of each channel")
def read_rwkv4(config: Config) -> ModelText:
    """RWKV-4, Dove (arXiv 2305.13048): means of values, weighted by keys and decays of channels."""
    text, count = begin_scans(config, 4096, 32, 50277)
    d = text.value("D")
    config.skip("context_length", "rescale_every")
    read_size(config, text, "H_m", "attention_hidden_size", default=d)
    read_size(config, text, "F", "intermediate_size", default=4 * d)
    text.use("rwkv4", "D H_m")
    text.use("rwkv6", "D F")
    return _stacked(config, text, count, "rwkv4_time")


def _begin_heads(config: Config) -> tuple[ModelText, int]:
    """The text with D, H_m, P and F, and the number of layers."""
    text, count = begin_scans(config, 4096, 32, 65536)
    d = text.value("D")
    config.fixed(attention_hidden_size=d, head_size_divisor=8)
    config.skip("num_attention_heads", "context_length", "rescale_every")
    p = read_size(config, text, "P", "head_size", default=64)
    config.divides("head_size", p, d)
    text.symbol("H_m", d // p, "hidden_size / head_size")
    read_size(config, text, "F", "intermediate_size", default=int(d * 3.5) // 32 * 32)
    return text, count


def _stacked(config: Config, text: ModelText, count: int, mixer: str) -> ModelText:
    blocks = {"time": mixer, "channel": "rwkv6_channel"}
    layer = Layer([Sublayer(Callee(block), name, LAYER) for name, block in blocks.items()])
    tied = config.flag("tie_word_embeddings", default=False)
    decoder = Decoder(LAYER, tied=tied, embed_norm=LAYER)
    return decoder.write(text, {"layers": layer}, ["layers"] * count)
