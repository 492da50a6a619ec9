"""Encoders, and encoders with decoders: BERT and its kin, T5, BART, Whisper."""

from __future__ import annotations

from collections.abc import Sequence

from stagec.importers.blocks import ACTIVATIONS, LAYER, RMS, FeedForward
from stagec.importers.common import begin, read_size
from stagec.importers.config import Config
from stagec.importers.family import ModelFamily
from stagec.importers.heads import expect_head
from stagec.importers.text import Body, ModelText
from stagec.importers.towers import MultiHead, decoder, encoder, linear, with_positions

_LABELS = "%tokens: i32[B, S], %labels: i32[B, S]"


def read_activation(config: Config, *keys: str, default: str = "gelu") -> str:
    """The activation of feed-forward blocks."""
    return config.word(*keys, among=ACTIVATIONS, default=default)


def read_heads_of(config: Config, text: ModelText, suffix: str, key: str, heads: int) -> None:
    """Declare H and K by a number of heads that share the width."""
    width = text.symbols[f"D{suffix}"].value or 1
    count = read_size(config, text, f"H{suffix}", key, default=heads)
    if width % count:
        raise config.refuse(key, f"is {count}, which does not divide {width}")
    text.symbol(f"K{suffix}", width // count, f"the width / {key}")


# -- BERT ------------------------------------------------------------------------------------------


def read_bert(config: Config) -> ModelText:
    """BERT (arXiv 1810.04805): a norm behind each sum, token types, learned positions."""
    return _bert(config, "BERT", before=0, types=2)


def read_roberta(config: Config) -> ModelText:
    """RoBERTa (arXiv 1907.11692): BERT whose first two positions are not used."""
    return _bert(config, "RoBERTa", before=2, types=1)


def read_distilbert(config: Config) -> ModelText:
    """DistilBERT (arXiv 1910.01108): BERT without token types."""
    config.only("sinusoidal_pos_embds", False)
    config.skip("qa_dropout", "seq_classif_dropout")
    return _bert(config, "DistilBERT", before=0, types=0)


def _bert(config: Config, title: str, *, before: int, types: int) -> ModelText:
    text, longest = begin(config, title, 512 + before)
    text.symbols.pop("S")
    text.symbol("S", min(longest - before, 4096), "tokens of a sequence")
    read_size(config, text, "D", "hidden_size", "dim", default=768)
    heads = "n_heads" if config.has("n_heads") else "num_attention_heads"
    read_heads_of(config, text, "", heads, 12)
    read_size(config, text, "F", "intermediate_size", "hidden_dim", default=3072)
    text.symbol("L", config.layers("num_hidden_layers", "n_layers", default=12), "layers")
    read_size(config, text, "V", "vocab_size", default=30522)
    text.symbol("P", longest, "learned positions")
    text.assume(f"P >= S + {before}" if before else "P >= S")
    config.only("position_embedding_type", "absolute")
    config.skip("tie_word_embeddings")
    config.only("embedding_size", text.symbols["D"].value or 1)
    if types:
        read_size(config, text, "Y", "type_vocab_size", default=types)
    act = read_activation(config, "hidden_act", "activation")
    body = Body()
    x = _bert_embedding(body, before, types)
    layers = encoder(text, MultiHead(), FeedForward(act, gated=False, bias=True), post=True)
    y = layers.write(body, x, "y")
    args = _LABELS if not types else "%tokens: i32[B, S], %types: i32[B, S], %labels: i32[B, S]"
    return _bert_head(config, text, body, y, act, args)


def _bert_embedding(body: Body, before: int, types: int) -> str:
    x = body.let("e", f"stg.embedding({body.param('embed', 'V, D')}, %tokens)")
    if types:
        t = body.let("t", f"stg.embedding({body.param('type_embed', 'Y, D')}, %types)")
        x = body.let("et", f"stg.add({x}, {t})")
    x = with_positions(body, "ep", x, "P, D", start=before, size="S")
    return LAYER.write(body, "x", x, "embed_norm")


def _bert_head(
    config: Config, text: ModelText, body: Body, y: str, act: str, args: str
) -> ModelText:
    """The head of the architecture: words of all positions, or a class by the first token."""
    names = config.strings("architectures")
    names = tuple("ForCausalLM" if n.endswith("LMHeadModel") else n for n in names)
    heads = {n.rpartition("For")[2] if "For" in n else n[-5:] for n in names} or {"MaskedLM"}
    known = {"MaskedLM", "PreTraining", "Model", "SequenceClassification", "CausalLM"}
    if not heads & known:
        raise config.refuse("architectures", f"has a head that is not known: {', '.join(names)}")
    if heads & {"Model", "SequenceClassification"}:
        c = body.let("c", f"stg.take[at = 0]({y})")
        pooled = body.let("p1", f"stg.tanh({linear(body, 'p0', c, 'pooler', 'D, D')})")
        if "Model" in heads:
            text.notes.append("Its sentence vectors are trained towards given ones.")
            body.let("loss", f"stg.mse[mean = B*D]({pooled}, %target)")
            body.do("stg.return(%loss)")
            return text.train(args.replace("%labels: i32[B, S]", "%target: bf16[B, D]"), body)
        text.symbol("N", config.labels(2), "num_labels")
        z = linear(body, "z", pooled, "classifier", "D, N")
        classify(body, z, "N")
        return text.train(args.replace("%labels: i32[B, S]", "%labels: i32[B]"), body)
    config.only("tie_word_embeddings", True)
    steps = [
        f'stg.einsum["bsd,de->bse"]({{}}, {body.param("w_transform", "D, D")})',
        f'stg.add["bsd,d->bsd"]({{}}, {body.param("b_transform", "D")})',
        ACTIVATIONS[act],
        LAYER.step(body, "transform_norm", "D"),
        'stg.einsum["bsd,vd->bsv"]({}, %embed)',
        f'stg.add["bsv,v->bsv"]({{}}, {body.param("head_bias", "V")})',
        "stg.cast[f32]({})",
    ]
    logits = body.steps("logits", y, steps)
    body.let("loss", f"stg.cross_entropy[mean = B*S]({logits}, %labels)")
    body.do("stg.return(%loss)")
    return text.train(args, body)


def classify(body: Body, z: str, classes: str) -> None:
    """Append the loss of logits [B, N] against `%labels` [B]."""
    logits = body.let("logits", f"stg.cast[f32]({z})")
    body.let("loss", f"stg.cross_entropy[mean = B]({logits}, %labels)")
    body.do("stg.return(%loss)")


# -- encoders with decoders ------------------------------------------------------------------------

_PAIRS = "%tokens: i32[B, S], %targets: i32[B, T], %labels: i32[B, T]"


def read_t5(config: Config) -> ModelText:
    """T5 (arXiv 1910.10683): a bias by distance that all layers of a side share; scores are not
    scaled."""
    expect_head(config, "ConditionalGeneration")
    text, longest = begin(config, "T5", 512)
    text.symbol("T", min(longest, 4096), "tokens of a target")
    read_size(config, text, "D", "d_model", default=512)
    read_size(config, text, "H", "num_heads", default=8)
    read_size(config, text, "K", "d_kv", default=64)
    read_size(config, text, "F", "d_ff", default=2048)
    count = config.layers("num_layers", default=6)
    text.symbol("L", count, "num_layers")
    text.symbol("L_dec", config.layers("num_decoder_layers", default=count), "num_decoder_layers")
    read_size(config, text, "V", "vocab_size", default=32128)
    read_size(config, text, "N", "relative_attention_num_buckets", default=32)
    most = config.size("relative_attention_max_distance", default=128)
    config.only("is_encoder_decoder", True)
    config.skip("is_gated_act")
    forward = ("relu", "gated-gelu", "gated-silu", "gelu", "silu")
    act = config.word("feed_forward_proj", among=forward, default="relu")
    config.skip("dense_act_fn")
    gated = act.startswith("gated-")
    kind = act.removeprefix("gated-").replace("gelu", "gelu_new" if gated else "gelu")
    mlp = FeedForward(kind, gated=gated)
    tied = config.flag("tie_word_embeddings", default=True)
    scaled = config.flag("scale_decoder_outputs", default=tied)
    body = Body()
    table = body.param("embed", "V, D")
    x = body.let("x", f"stg.embedding({table}, %tokens)")
    bias = _relative(body, "encoder_bias", f"sizes = (S, S), most = {most}")
    own = MultiHead("", "rsqrt = 1", bias=True)
    layers = encoder(text, own, mlp, name="encoder", norm=RMS, operands=(bias,))
    e = RMS.write(body, "e", layers.write(body, x, "y0"), "encoder_norm")
    x = body.let("t", f"stg.embedding({table}, %targets)")
    bias = _relative(body, "decoder_bias", f"sizes = (T, T), most = {most}, causal")
    causal = MultiHead("", "causal, rsqrt = 1", bias=True, name="causal_attention")
    cross = MultiHead("", "rsqrt = 1", cross=True, name="cross_attention")
    layers = decoder(text, causal, cross, mlp, e, norm=RMS, operands=(bias,))
    n = RMS.write(body, "n", layers.write(body, x, "y"), "norm")
    steps = ["stg.scale[rsqrt = D]({})"] if scaled else []
    head = table if tied else body.param("head", "V, D")
    _translate(body, n, [*steps, f'stg.einsum["bsd,vd->bsv"]({{}}, {head})'])
    return text.train(_PAIRS, body)


def _relative(body: Body, name: str, statics: str) -> str:
    """Append a bias [H, queries, keys] by distance; its name."""
    table = body.param(f"{name}_table", "N, H")
    return body.let(name, f"stg.relative_bias[{statics}]({table})")


def _translate(body: Body, n: str, steps: Sequence[str]) -> None:
    """Append the head and the loss of `%labels` [B, T]."""
    logits = body.steps("logits", n, [*steps, "stg.cast[f32]({})"])
    body.let("loss", f"stg.cross_entropy[mean = B*T]({logits}, %labels)")
    body.do("stg.return(%loss)")


def read_bart(config: Config) -> ModelText:
    """BART (arXiv 1910.13461): a norm behind each sum, learned positions, tied everything."""
    expect_head(config, "ConditionalGeneration")
    text, longest = begin(config, "BART", 1024)
    text.symbol("T", min(longest, 4096), "tokens of a target")
    _read_sides(config, text, layers=12, inner=4096, heads=16, width=1024)
    read_size(config, text, "V", "vocab_size", default=50265)
    text.symbol("P", longest + 2, "learned positions")
    config.only("normalize_before", False)
    config.only("add_final_layer_norm", False)
    config.only("normalize_embedding", True)
    config.only("static_position_embeddings", False)
    config.only("add_bias_logits", False)
    config.only("tie_word_embeddings", True)
    config.only("is_encoder_decoder", True)
    config.skip(
        "classif_dropout",
        "extra_pos_embeddings",
        "num_hidden_layers",
        "force_bos_token_to_be_generated",
    )
    act = read_activation(config, "activation_function")
    scaled = config.flag("scale_embedding", default=False)
    mlp = FeedForward(act, gated=False, bias=True)
    body = Body()
    table = body.param("embed", "V, D")
    x = _side(body, table, "%tokens", "encoder", "S", scaled)
    layers = encoder(text, MultiHead(), mlp, name="encoder", post=True)
    e = layers.write(body, x, "e")
    x = _side(body, table, "%targets", "decoder", "T", scaled)
    causal = MultiHead(statics="causal", name="causal_attention")
    cross = MultiHead(cross=True, name="cross_attention")
    y = decoder(text, causal, cross, mlp, e, post=True).write(body, x, "y")
    _translate(body, y, [f'stg.einsum["bsd,vd->bsv"]({{}}, {table})'])
    return text.train(_PAIRS, body)


def _side(body: Body, table: str, tokens: str, side: str, size: str, scaled: bool) -> str:
    """Append embedding, positions and norm of one side."""
    s = side[0]
    steps = [f"stg.embedding({table}, {tokens})", *(["stg.scale[sqrt = D]({})"] if scaled else [])]
    x = body.steps(f"x{s}", "", steps)
    p = body.param(f"{side}_positions", "P, D")
    p = body.let(f"p{s}", f"stg.slice[dim = 0, start = 2, size = {size}]({p})")
    x = body.let(f"xp{s}", f'stg.add["bsd,sd->bsd"]({x}, {p})')
    return LAYER.write(body, side, x, f"{side}_embed_norm")


def _read_sides(
    config: Config, text: ModelText, *, layers: int, inner: int, heads: int, width: int
) -> None:
    """Declare the sizes of an encoder and a decoder, whose heads and inner widths are the same."""
    read_size(config, text, "D", "d_model", default=width)
    read_heads_of(config, text, "", "encoder_attention_heads", heads)
    config.only("decoder_attention_heads", text.symbols["H"].value or 1, why="differs")
    read_size(config, text, "F", "encoder_ffn_dim", default=inner)
    config.only("decoder_ffn_dim", text.symbols["F"].value or 1, why="differs")
    text.symbol("L", config.layers("encoder_layers", default=layers), "encoder_layers")
    text.symbol("L_dec", config.layers("decoder_layers", default=layers), "decoder_layers")
    config.skip("encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers")


def read_whisper(config: Config) -> ModelText:
    """Whisper (arXiv 2212.04356): two convolutions, a sinusoid that is not trained, keys without a
    bias."""
    expect_head(config, "ConditionalGeneration")
    text, _ = begin(config, "Whisper", 1 << 20)
    text.symbols.pop("S")
    sounds = config.size("max_source_positions", default=1500)
    text.symbol("S", sounds, "half of the frames of a sound")
    text.symbol("P_enc", sounds, "max_source_positions")
    words = config.size("max_target_positions", default=448)
    text.symbol("T", words, "tokens of a target")
    text.symbol("P", words, "max_target_positions")
    text.assume("P >= T")
    text.assume("P_enc >= S")
    read_size(config, text, "M", "num_mel_bins", default=80)
    _read_sides(config, text, layers=6, inner=1536, heads=6, width=384)
    read_size(config, text, "V", "vocab_size", default=51865)
    config.only("scale_embedding", False)
    config.only("tie_word_embeddings", True)
    config.only("is_encoder_decoder", True)
    for key in ("apply_spec_augment", "use_weighted_layer_sum"):
        config.only(key, False)
    config.skip(*(f"mask_{n}" for n in _MASKS), "classifier_proj_size", "median_filter_width")
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
    layers = encoder(text, MultiHead("qvo"), mlp, name="encoder")
    e = LAYER.write(body, "e", layers.write(body, x, "y0"), "encoder_norm")
    table = body.param("embed", "V, D")
    x = body.let("t", f"stg.embedding({table}, %targets)")
    x = with_positions(body, "tp", x, "P, D", size="T")
    causal = MultiHead("qvo", "causal", name="causal_attention")
    cross = MultiHead("qvo", cross=True, name="cross_attention")
    n = LAYER.write(body, "n", decoder(text, causal, cross, mlp, e).write(body, x, "y"), "norm")
    _translate(body, n, [f'stg.einsum["bsd,vd->bsv"]({{}}, {table})'])
    return text.train("%mel: bf16[B, 2*S, M], %targets: i32[B, T], %labels: i32[B, T]", body)


_MASKS = (
    "time_prob",
    "time_length",
    "time_min_masks",
    "feature_prob",
    "feature_length",
    "feature_min_masks",
)

FAMILIES: Sequence[ModelFamily] = (
    ModelFamily("BERT", ("bert",), read_bert, "encoder, norm behind each sum, token types"),
    ModelFamily(
        "RoBERTa",
        ("roberta", "xlm-roberta", "camembert"),
        read_roberta,
        "BERT with shifted positions",
    ),
    ModelFamily("DistilBERT", ("distilbert",), read_distilbert, "BERT without token types"),
    ModelFamily(
        "T5", ("t5", "mt5"), read_t5, "encoder and decoder, bias by distance, ReLU or GeGLU"
    ),
    ModelFamily("BART", ("bart",), read_bart, "encoder and decoder, norm behind each sum"),
    ModelFamily(
        "Whisper", ("whisper",), read_whisper, "convolutions, encoder and decoder, tied head"
    ),
)
