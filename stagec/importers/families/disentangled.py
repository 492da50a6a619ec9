"""DeBERTa: encoders whose scores have terms of contents with distances."""

from collections.abc import Sequence

from stagec.importers.common.sizes import begin, expect_head, heads_of, is_bare, read_size
from stagec.importers.families.encoders import (
    classify,
    classify_each,
    predict_words,
    read_activation,
    read_heads_of,
    train_vectors,
)
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import (
    ACTIVATIONS,
    LAYER,
    FeedForward,
    activated,
    activation_options,
)
from stagec.importers.writing.stack import LayerKind, NormedSums, Sublayer, repeated
from stagec.importers.writing.text import Body, ModelText
from stagec.importers.writing.towers import linear, with_positions

_TERMS = ("c2p", "p2c")


@reads("DeBERTa", "deberta", features="scores by contents and distances")
def read_deberta(config: Config) -> ModelText:
    """DeBERTa (arXiv 2006.03654): each layer has separate products of distance vectors."""
    text, body, terms = _begin(config, (768, 12, 3072, 50265))
    config.only("talking_head", False)
    table = body.param("distances", "2*R, D")
    distances = body.let("near", f"stg.slice[dim = 0, start = R - S, size = 2*S]({table})")
    text.assume("R >= S")
    return _finish(config, text, body, distances, [*terms, "key_bias = no"])


@reads("DeBERTa-v2", "deberta-v2", features="DeBERTa with logarithmic distances (v3)")
def read_deberta_v2(config: Config) -> ModelText:
    """DeBERTa-v2 and -v3 (arXiv 2111.09543): rows of distances grow logarithmically, and may go
    through the projections of tokens."""
    text, body, terms = _begin(config, (1536, 24, 6144, 128100))
    options = [*terms, *["shared"] * config.flag("share_att_key", default=False)]
    most = False
    if config.count("position_buckets", default=-1, least=-1) > 0:
        text.symbol("N", config.size("position_buckets"), "position_buckets")
        most = True
        options.append("most = (most = R)")
    distances = body.param("distances", "2*N, D" if most else "2*R, D")
    if config.word("norm_rel_ebd", among=("none", "layer_norm"), default="none") == "layer_norm":
        distances = LAYER.write(body, "near", distances, "distance_norm")
    return _finish(config, text, body, distances, options)


def _begin(
    config: Config, sizes: tuple[int, int, int, int]
) -> tuple[ModelText, Body, Sequence[str]]:
    """The text with embeddings `%x`, and the terms of scores in addition to that of the contents.
    `sizes` are D, L, F and V of missing keys."""
    expect_head(config, "MaskedLM", "SequenceClassification", "TokenClassification")
    text, longest = begin(config, 512)
    d, layers, f, v = sizes
    read_size(config, text, "D", "hidden_size", default=d)
    read_heads_of(config, text, "", "num_attention_heads", d // 64)
    config.only("attention_head_size", text.value("K"))
    read_size(config, text, "F", "intermediate_size", default=f)
    read_size(config, text, "V", "vocab_size", default=v)
    text.symbol("L", config.layers(default=layers), "num_hidden_layers")
    if not config.flag("relative_attention", default=False):
        raise config.refuse(
            "relative_attention", "is false, but only scores by distance are modeled"
        )
    config.fixed(embedding_size=text.value("D"), tie_word_embeddings=True, legacy=True)
    config.skip("pooler_hidden_size", "pooler_dropout", "pooler_hidden_act")
    least = config.count("max_relative_positions", default=-1, least=-1)
    text.symbol("R", least if least > 0 else longest, "max_relative_positions")
    body = Body()
    x = body.let("e", f"stg.embedding({body.param('embed', 'V, D')}, %tokens)")
    if config.count("type_vocab_size", default=0):
        read_size(config, text, "Y", "type_vocab_size")
        t = body.let("t", f"stg.embedding({body.param('type_embed', 'Y, D')}, %types)")
        x = body.let("et", f"stg.add({x}, {t})")
    if config.flag("position_biased_input", default=True):
        text.symbol("P", longest, "learned positions")
        text.assume("P >= S")
        x = with_positions(body, "ep", x, "P, D", size="S")
    LAYER.write(body, "x", x, "embed_norm")
    return text, body, _terms(config)


def _terms(config: Config) -> Sequence[str]:
    given = config.text("pos_att_type", default="") if config.is_text("pos_att_type") else ""
    terms = given.lower().split("|") if given else list(config.strings("pos_att_type"))
    terms = [term.strip() for term in terms]
    if not terms or not set(terms) <= set(_TERMS):
        raise config.wrong("pos_att_type", "some of c2p and p2c, such as 'c2p|p2c'")
    return [term for term in _TERMS if term in terms]


def _finish(
    config: Config, text: ModelText, body: Body, distances: str, options: Sequence[str]
) -> ModelText:
    """Append the layers on `%x`, whose attention has these options, and the head."""
    act = read_activation(config, "hidden_act")
    scores = 1 + len({*options} & {*_TERMS})
    given = [*options, f"scores = (rsqrt = {scores}*K)", "as = attention"]
    attention = text.use("disentangled", "D H K", *given)
    mlp = FeedForward(act, gated=False, bias=True).write(text)
    mixer = Sublayer(attention, "attn", None, operands=[distances])
    layer = NormedSums([mixer, Sublayer(mlp, "mlp", None)])
    y = _layers(config, text, body, layer)
    types = "%types: i32[B, S], " if "Y" in text.symbols else ""
    args = f"%tokens: i32[B, S], {types}%labels: i32[B, S]"
    heads = heads_of(config)
    if "SequenceClassification" in heads:
        text.symbol("N_c", config.labels(), "num_labels")
        c = body.let("c", f"stg.take[at = 0]({y})")
        pooled = body.let(
            "g", activated("gelu").format(linear(text, body, "g0", c, "pooler", "D, D"))
        )
        classify(body, linear(text, body, "z", pooled, "classifier", "D, N_c"))
        return text.train(args.replace("%labels: i32[B, S]", "%labels: i32[B]"), body)
    if "TokenClassification" in heads:
        text.symbol("N_c", config.labels(), "num_labels")
        classify_each(text, body, y, "N_c", "classifier")
        return text.train(args, body)
    if is_bare(config):
        return train_vectors(text, body, y, args)
    predict_words(text, body, y, act)
    return text.train(args, body)


def _layers(config: Config, text: ModelText, body: Body, layer: LayerKind) -> str:
    """Append the layers; a convolution of the embeddings may be added after the first one."""
    width = config.count("conv_kernel_size", default=0)
    if not width:
        return repeated(body, "%x", layer, "y")
    if width % 2 == 0:
        raise config.wrong("conv_kernel_size", "an odd number")
    config.only("conv_groups", 1)
    act = config.word("conv_act", among=("tanh", *ACTIVATIONS), default="tanh")
    first = repeated(body, "%x", layer, "y0", "first", "1")
    given = [f"W = {width}", f"pad = (pad = {width // 2})"]
    given += [] if act == "tanh" else activation_options(act, default="tanh")
    y = body.call("y1", text.use("disentangled", "", *given, function="convolved"), "%x", first)
    return repeated(body, y, layer, "y", count="L - 1")
