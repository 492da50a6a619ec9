"""Encoders with decoders of the same structure: BART and its variants, Whisper."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stagec.importers.common.sizes import begin, begin_text, expect_head, read_size
from stagec.importers.families.encoders import PAIRS, read_activation, read_heads_of, translate
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import ACTIVATIONS, LAYER, FeedForward
from stagec.importers.writing.stack import repeated
from stagec.importers.writing.text import Body, ModelText
from stagec.importers.writing.towers import MultiHead, decoder, encoder, with_positions


@dataclass(frozen=True, slots=True)
class Sides:
    """How a family differs from BART. With `pre` norms stand before the parts of a layer and after
    all layers; embeddings are normed if `embed_norm`. Positions are learned, a `fixed` sinusoid of
    each side, which is no weight that trains, or `constant`: no parameter. The first `before` of
    them are not used. `sizes` are the defaults of the layers of a side, D, F, H, V and the
    positions; a decoder may have other `decoder_layers`."""

    pre: bool = False
    embed_norm: bool = True
    positions: Literal["learned", "fixed", "constant"] = "learned"
    before: int = 2
    activation: str = "gelu"
    scaled: bool = False
    sizes: Sequence[int] = (12, 1024, 4096, 16, 50265, 1024)
    decoder_layers: int | None = None


def _read_bart(config: Config, kind: Sides) -> ModelText:
    expect_head(config, "ConditionalGeneration", "MTModel")
    layers, width, inner, heads, vocab, length = kind.sizes
    text, longest = begin(config, length)
    text.symbol("T", min(longest, 4096), "tokens of a target")
    text.sequences = ("S", "T")
    both = layers, kind.decoder_layers or layers
    _read_sides(config, text, layers=both, inner=inner, heads=heads, width=width)
    read_size(config, text, "V", "vocab_size", default=vocab)
    text.symbol("P", longest + kind.before, "positions")
    for size in text.sequences:
        text.assume(f"P >= {size} + {kind.before}" if kind.before else f"P >= {size}")
    config.fixed(normalize_before=kind.pre, add_final_layer_norm=kind.pre)
    config.only("normalize_embedding", kind.embed_norm)
    config.fixed(static_position_embeddings=kind.positions != "learned", add_bias_logits=False)
    config.fixed(tie_word_embeddings=True, is_encoder_decoder=True)
    config.fixed(share_encoder_decoder_embeddings=True, decoder_vocab_size=text.symbols["V"].value)
    config.fixed(use_prompt=False, layernorm_variant="prelayernorm")
    config.skip("classif_dropout", "extra_pos_embeddings", "num_hidden_layers", "extra_layer_norm")
    config.skip("force_bos_token_to_be_generated", "do_blenderbot_90_layernorm", "prompt_length")
    config.skip("prompt_mid_dim")
    act = config.word("activation_function", among=ACTIVATIONS, default=kind.activation)
    scaled = config.flag("scale_embedding", default=kind.scaled)
    mlp = FeedForward(act, gated=False, bias=True)
    body = Body()
    table = body.param("embed", "V, D")
    post = not kind.pre
    x = _side(body, kind, table, ("%tokens", "encoder", "S"), scaled)
    layer = encoder(text, MultiHead(), mlp, post=post)
    e = repeated(body, x, layer, "e" if post else "e0", "encoder")
    e = e if post else LAYER.write(body, "e", e, "encoder_norm")
    x = _side(body, kind, table, ("%targets", "decoder", "T"), scaled)
    causal = MultiHead(statics="causal", name="causal_attention")
    cross = MultiHead(cross=True, name="cross_attention")
    layer = decoder(text, causal, cross, mlp, e, post=post)
    y = repeated(body, x, layer, "y", "decoder", "L_dec")
    y = y if post else LAYER.write(body, "n", y, "norm")
    translate(body, y, [f'stg.einsum["bsd,vd->bsv"]({{}}, {table})'])
    return text.train(PAIRS, body)


@reads("BART", "bart", features="encoder and decoder, norm behind each sum")
def read_bart(config: Config) -> ModelText:
    """BART (arXiv 1910.13461): a norm after each sum, learned positions, all tables tied."""
    return _read_bart(config, Sides())


@reads("Blenderbot small", "blenderbot-small", features="BART")
def read_blenderbot_small(config: Config) -> ModelText:
    """The small Blenderbot (arXiv 2004.13637): BART without unused positions."""
    return _read_bart(config, Sides(before=0, sizes=(8, 512, 2048, 16, 50265, 512)))


@reads("mBART", "mbart", features="BART with norms before the parts")
def read_mbart(config: Config) -> ModelText:
    """mBART (arXiv 2001.08210): norms before the parts."""
    return _read_bart(config, Sides(pre=True))


@reads("PLBART", "plbart", features="BART, scaled embeddings")
def read_plbart(config: Config) -> ModelText:
    """PLBART (arXiv 2103.06333): BART with scaled embeddings."""
    return _read_bart(config, Sides(scaled=True, sizes=(6, 768, 3072, 12, 50005, 1024)))


@reads("MVP", "mvp", features="BART")
def read_mvp(config: Config) -> ModelText:
    """MVP (arXiv 2206.12131): BART; its prompts are not modeled."""
    return _read_bart(config, Sides(sizes=(12, 1024, 4096, 16, 50267, 1024)))


@reads("Blenderbot", "blenderbot", features="norms before the parts")
def read_blenderbot(config: Config) -> ModelText:
    """Blenderbot (arXiv 2004.13637): norms before the parts, none of the embeddings."""
    sizes = (2, 2560, 10240, 32, 8008, 128)
    kind = Sides(pre=True, embed_norm=False, before=0, sizes=sizes, decoder_layers=24)
    return _read_bart(config, kind)


@reads("Pegasus", "pegasus", features="fixed positions")
def read_pegasus(config: Config) -> ModelText:
    """Pegasus (arXiv 1912.08777): norms before the parts, positions that are not trained."""
    return _read_bart(config, Sides(True, False, "fixed", 0))


@reads("Marian", "marian", features="fixed positions")
def read_marian(config: Config) -> ModelText:
    """Marian (arXiv 1804.00344): norms after the sums, positions that are not trained."""
    sizes = (12, 1024, 4096, 16, 58101, 1024)
    return _read_bart(config, Sides(False, False, "fixed", 0, sizes=sizes))


@reads("M2M-100", "m2m_100", features="fixed positions")
def read_m2m_100(config: Config) -> ModelText:
    """M2M-100 (arXiv 2010.11125) and NLLB (arXiv 2207.04672): norms before the parts, a sinusoid
    for positions."""
    sizes = (12, 1024, 4096, 16, 128112, 1024)
    return _read_bart(config, Sides(True, False, "constant", 2, "relu", True, sizes))


def _side(body: Body, kind: Sides, table: str, names: tuple[str, str, str], scaled: bool) -> str:
    """Append embedding, positions and norm of a side; `names` are its tokens, name and length."""
    tokens, side, size = names
    s = side[0]
    steps = [f"stg.embedding({table}, {tokens})", *(["stg.scale[sqrt = D]({})"] if scaled else [])]
    x = body.steps(f"x{s}", "", steps)
    role = {"learned": "", "fixed": "frozen", "constant": "state"}[kind.positions]
    p = body.param(f"{side}_positions", "P, D", role=role)
    start = f"start = {kind.before}, " if kind.before else ""
    p = body.let(f"p{s}", f"stg.slice[dim = 0, {start}size = {size}]({p})")
    x = body.let(f"xp{s}", f'stg.add["bsd,sd->bsd"]({x}, {p})')
    return LAYER.write(body, side, x, f"{side}_embed_norm") if kind.embed_norm else x


def _read_sides(
    config: Config, text: ModelText, *, layers: tuple[int, int], inner: int, heads: int, width: int
) -> None:
    """Declare the sizes of an encoder and a decoder with equal heads and inner widths."""
    read_size(config, text, "D", "d_model", default=width)
    read_heads_of(config, text, "", "encoder_attention_heads", heads)
    config.only("decoder_attention_heads", text.value("H"), why="differs")
    read_size(config, text, "F", "encoder_ffn_dim", default=inner)
    config.only("decoder_ffn_dim", text.value("F"), why="differs")
    text.symbol("L", config.layers("encoder_layers", default=layers[0]), "encoder_layers")
    text.symbol("L_dec", config.layers("decoder_layers", default=layers[1]), "decoder_layers")
    config.skip("encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers")


@reads("Whisper", "whisper", features="convolutions, encoder and decoder, tied head")
def read_whisper(config: Config) -> ModelText:
    """Whisper (arXiv 2212.04356): two convolutions, a sinusoid that is not trained, keys without a
    bias."""
    text = begin_text(config, "ConditionalGeneration")
    sounds = config.size("max_source_positions", default=1500)
    text.symbol("S", sounds, "half of the frames of a sound")
    text.symbol("P_enc", sounds, "max_source_positions")
    words = config.size("max_target_positions", default=448)
    text.symbol("T", words, "tokens of a target")
    text.sequences = ("S", "T")
    text.symbol("P", words, "max_target_positions")
    text.assume("P >= T")
    text.assume("P_enc >= S")
    read_size(config, text, "M", "num_mel_bins", default=80)
    _read_sides(config, text, layers=(6, 6), inner=1536, heads=6, width=384)
    read_size(config, text, "V", "vocab_size", default=51865)
    config.fixed(scale_embedding=False, tie_word_embeddings=True, is_encoder_decoder=True)
    for key in ("apply_spec_augment", "use_weighted_layer_sum"):
        config.only(key, False)
    masks = ("prob", "length", "min_masks")
    config.skip(*(f"mask_{what}_{mask}" for what in ("time", "feature") for mask in masks))
    config.skip("classifier_proj_size", "median_filter_width")
    mlp = FeedForward(read_activation(config, "activation_function"), gated=False, bias=True)
    body = Body()
    x = "%mel"
    for out, size, stride in (("conv_a", "M", ""), ("conv_b", "D", "stride = 2, ")):
        steps = [
            f"stg.conv1d[{stride}pad = 1]({{}}, {body.param(f'w_{out}', f'3, {size}, D')})",
            f'stg.add["bsd,d->bsd"]({{}}, {body.param(f"b_{out}", "D")})',
            "stg.gelu[form = erf]({})",
        ]
        x = body.steps(out, x, steps)
    sinusoid = body.param("encoder_positions", "P_enc, D", role="frozen")
    sinusoid = body.let("pe", f"stg.slice[dim = 0, size = S]({sinusoid})")
    x = body.let("x", f'stg.add["bsd,sd->bsd"]({x}, {sinusoid})')
    y = repeated(body, x, encoder(text, MultiHead("qvo", "by_head"), mlp), "y0", "encoder")
    e = LAYER.write(body, "e", y, "encoder_norm")
    table = body.param("embed", "V, D")
    x = body.let("t", f"stg.embedding({table}, %targets)")
    x = with_positions(body, "tp", x, "P, D", size="T")
    causal = MultiHead("qvo", "causal, by_head", name="causal_attention")
    cross = MultiHead("qvo", "by_head", cross=True, name="cross_attention")
    y = repeated(body, x, decoder(text, causal, cross, mlp, e), "y", "decoder", "L_dec")
    n = LAYER.write(body, "n", y, "norm")
    translate(body, n, [f'stg.einsum["bsd,vd->bsv"]({{}}, {table})'])
    return text.train("%mel: bf16[B, 2*S, M], %targets: i32[B, T], %labels: i32[B, T]", body)
