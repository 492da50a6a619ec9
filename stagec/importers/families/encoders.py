"""Encoders, and encoders with decoders: BERT and T5, and their variants."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagec.importers.common.sizes import begin, expect_head, read_size
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import (
    ACTIVATIONS,
    LAYER,
    T5_RMS,
    Experts,
    FeedForward,
    Norm,
    activation_options,
)
from stagec.importers.writing.stack import Layer, Sublayer, repeated, write_stack
from stagec.importers.writing.text import Body, ModelText
from stagec.importers.writing.towers import MultiHead, encoder, linear, with_positions

_LABELS = "%tokens: i32[B, S], %labels: i32[B, S]"


def read_activation(config: Config, *keys: str, default: str = "gelu") -> str:
    """The activation of feed-forward blocks."""
    return config.word(*keys, among=ACTIVATIONS, default=default)


def read_heads_of(config: Config, text: ModelText, suffix: str, key: str, heads: int) -> None:
    """Declare H and K by a number of heads that share the width."""
    width = text.value(f"D{suffix}")
    count = read_size(config, text, f"H{suffix}", key, default=heads)
    config.divides(key, count, width)
    text.symbol(f"K{suffix}", width // count, f"the width / {key}")


_CLASSES = ("SequenceClassification", "TokenClassification")

# -- BERT ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Words:
    """The differences of a family from BERT: unused first positions, token types, norms before the
    parts of a layer and after all layers (`pre`), norms of embeddings, a bias by distance that all
    layers share (`relative`), a layer on the vector of the first token (`pooler`)."""

    before: int = 0
    types: int = 2
    pre: bool = False
    embed_norm: bool = True
    relative: bool = False
    pooler: bool = True


@reads("BERT", "bert", features="encoder, norm behind each sum, token types")
def read_bert(config: Config) -> ModelText:
    """BERT (arXiv 1810.04805): a norm after each sum, token types, learned positions."""
    return _bert(config, Words())


@reads(
    "RoBERTa",
    "roberta",
    "xlm-roberta",
    "camembert",
    "data2vec-text",
    features="BERT with shifted positions",
)
def read_roberta(config: Config) -> ModelText:
    """RoBERTa (arXiv 1907.11692): BERT with two unused positions."""
    return _bert(config, Words(before=2, types=1))


@reads("DistilBERT", "distilbert", features="BERT without token types")
def read_distilbert(config: Config) -> ModelText:
    """DistilBERT (arXiv 1910.01108): BERT without token types."""
    config.only("sinusoidal_pos_embds", False)
    config.skip("qa_dropout", "seq_classif_dropout")
    return _bert(config, Words(types=0, pooler=False))


@reads("RoBERTa-PreLayerNorm", "roberta-prelayernorm", features="norms before the parts")
def read_roberta_pre(config: Config) -> ModelText:
    """RoBERTa with norms before the parts of a layer."""
    return _bert(config, Words(before=2, types=2, pre=True))


@reads("XLM-RoBERTa-XL", "xlm-roberta-xl", features="norms before the parts")
def read_xlm_roberta_xl(config: Config) -> ModelText:
    """XLM-RoBERTa-XL (arXiv 2105.00572): norms before the parts, none of the embeddings."""
    return _bert(config, Words(2, 1, pre=True, embed_norm=False))


@reads("Megatron-BERT", "megatron-bert", features="norms before the parts")
def read_megatron_bert(config: Config) -> ModelText:
    """Megatron-BERT (arXiv 1909.08053): norms before the parts, none of the embeddings."""
    return _bert(config, Words(pre=True, embed_norm=False))


@reads("ERNIE 2.0", "ernie", features="BERT")
def read_ernie_words(config: Config) -> ModelText:
    """ERNIE 2.0 (arXiv 1907.12412): BERT; its types of tasks are not modeled."""
    config.only("use_task_id", False)
    config.skip("task_type_vocab_size")
    return _bert(config, Words())


@reads("MPNet", "mpnet", features="BERT with a bias by distance")
def read_mpnet(config: Config) -> ModelText:
    """MPNet (arXiv 2004.09297): BERT with a bias by distance, without token types."""
    return _bert(config, Words(before=2, types=0, relative=True))


def _bert(config: Config, kind: Words) -> ModelText:
    before, types = kind.before, kind.types
    text, longest = begin(config, 512 + before)
    if longest <= before:
        raise config.refuse("max_position_embeddings", f"leaves no position beside {before}")
    text.replace("S", min(longest - before, 4096), "tokens of a sequence")
    read_size(config, text, "D", "hidden_size", "dim", default=768)
    heads = "n_heads" if config.has("n_heads") else "num_attention_heads"
    read_heads_of(config, text, "", heads, 12)
    read_size(config, text, "F", "intermediate_size", "hidden_dim", default=3072)
    text.symbol("L", config.layers("num_hidden_layers", "n_layers", default=12), "layers")
    read_size(config, text, "V", "vocab_size", default=30522)
    text.symbol("P", longest, "learned positions")
    text.assume(f"P >= S + {before}" if before else "P >= S")
    config.fixed(position_embedding_type="absolute", embedding_size=text.value("D"))
    config.skip("tie_word_embeddings")
    if types:
        read_size(config, text, "Y", "type_vocab_size", default=types)
    act = read_activation(config, "hidden_act", "activation")
    body = Body()
    x = _bert_embedding(body, kind)
    operands: list[str] = []
    if kind.relative:
        read_size(config, text, "N", "relative_attention_num_buckets", default=32)
        operands.append(relative(body, "bias", "sizes = (S, S)"))
    mlp = FeedForward(act, gated=False, bias=True)
    mixer = MultiHead(bias=kind.relative)
    layer = encoder(text, mixer, mlp, post=not kind.pre, operands=operands)
    y = repeated(body, x, layer, "y0" if kind.pre else "y")
    y = LAYER.write(body, "y", y, "norm") if kind.pre else y
    args = _LABELS if not types else "%tokens: i32[B, S], %types: i32[B, S], %labels: i32[B, S]"
    return _bert_head(config, text, body, y, act, args, pooler=kind.pooler)


def _bert_embedding(body: Body, kind: Words) -> str:
    x = body.let("e", f"stg.embedding({body.param('embed', 'V, D')}, %tokens)")
    if kind.types:
        t = body.let("t", f"stg.embedding({body.param('type_embed', 'Y, D')}, %types)")
        x = body.let("et", f"stg.add({x}, {t})")
    x = with_positions(body, "ep", x, "P, D", start=kind.before, size="S")
    return LAYER.write(body, "x", x, "embed_norm") if kind.embed_norm else x


def _bert_head(
    config: Config, text: ModelText, body: Body, y: str, act: str, args: str, *, pooler: bool
) -> ModelText:
    """The head of the architecture: all tokens, a class by the first token, or both."""
    names = config.strings("architectures")
    names = tuple("ForCausalLM" if n.endswith("LMHeadModel") else n for n in names)
    heads = {n.rpartition("For")[2] if "For" in n else n[-5:] for n in names} or {"MaskedLM"}
    known = {"MaskedLM", "PreTraining", "Model", "CausalLM", *_CLASSES}
    if not heads & known:
        raise config.refuse("architectures", f"has a head that is not modeled: {', '.join(names)}")
    if "Model" in heads:
        return train_vectors(text, body, y, args, pooler=pooler)
    if heads & {*_CLASSES}:
        text.symbol("N_classes", config.labels(), "num_labels")
    if "TokenClassification" in heads:
        classify_each(text, body, y, "N_classes", "classifier")
        return text.train(args, body)
    if "SequenceClassification" in heads:
        classify(
            body, linear(text, body, "z", _pooled(text, body, y), "classifier", "D, N_classes")
        )
        return text.train(args.replace("%labels: i32[B, S]", "%labels: i32[B]"), body)
    config.only("tie_word_embeddings", True)
    if "PreTraining" not in heads:
        predict_words(text, body, y, act)
        return text.train(args, body)
    text.notes.append("%follows is 1 where the second sentence follows the first one, else 0.")
    loss = word_loss(text, body, y, act, "words")
    z = linear(text, body, "z", _pooled(text, body, y), "follows", "D, 2")
    z = body.let("zf", f"stg.cast[f32]({z})")
    pairs = body.let("pairs", f"stg.cross_entropy[mean = B]({z}, %follows)")
    body.do(f"stg.return({body.let('loss', f'stg.add({loss}, {pairs})')})")
    return text.train(f"{args}, %follows: i32[B]", body)


def _pooled(text: ModelText, body: Body, y: str) -> str:
    """Append a layer on the vector of the first token."""
    c = body.let("c", f"stg.take[at = 0]({y})")
    return body.let("p1", f"stg.tanh({linear(text, body, 'p0', c, 'pooler', 'D, D')})")


def train_vectors(
    text: ModelText, body: Body, y: str, args: str, *, pooler: bool = False
) -> ModelText:
    """The model without a head: vectors of first tokens are trained towards given ones."""
    c = _pooled(text, body, y) if pooler else body.let("c", f"stg.take[at = 0]({y})")
    return text.train(args.replace("%labels: i32[B, S]", vectors(text, body, c)), body)


def predict_words(
    text: ModelText,
    body: Body,
    y: str,
    act: str,
    *,
    width: str = "D",
    norm: Norm = LAYER,
    bias: bool = True,
    wide: bool = False,
) -> None:
    """Append the head of masked tokens on `y`, and return its loss."""
    body.do(f"stg.return({word_loss(text, body, y, act, 'loss', width, norm, bias, wide)})")


def word_loss(
    text: ModelText,
    body: Body,
    y: str,
    act: str,
    name: str,
    width: str = "D",
    norm: Norm = LAYER,
    bias: bool = True,
    wide: bool = False,
) -> str:
    """Append the head of masked tokens on `y`: a product to the width of the table, with a `bias`,
    an activation and a norm; the table `%embed`, and the loss of all positions. Model code computes
    it in the type of the logits unless it is `wide`."""
    given = [f"J = {width}", *activation_options(act), *["bias = no"] * (not bias)]
    given += ["norm_bias = no"] * (norm.affine == "scale") + ["loss = no"] * wide
    head = text.use("word_heads", "D V S", *given, function="masked_words")
    return body.call(name, head, y, "%embed", "%labels")


def vectors(text: ModelText, body: Body, x: str, width: str = "D") -> str:
    """Append the loss of the vectors `x` [B, width] against given ones, and return the argument of
    these."""
    text.notes.append("Its vectors are trained towards given ones.")
    body.ends(f"stg.mse[mean = B*{width}]({x}, %target)")
    return f"%target: bf16[B, {width}]"


def classify(body: Body, z: str) -> None:
    """Append the loss of logits [B, N] against `%labels` [B]."""
    logits = body.let("logits", f"stg.cast[f32]({z})")
    body.ends(f"stg.cross_entropy[mean = B]({logits}, %labels)")


def classify_each(text: ModelText, body: Body, y: str, classes: str, name: str) -> None:
    """Append logits of `classes` for each position of `y` [B, S, D], with parameters of this name,
    and their loss against `%labels` [B, S]."""
    given = (f"J = {classes}", f"as = {name}")
    head = text.use("word_heads", "D S", *given, function="class_of_each")
    body.do(f"stg.return({body.call('loss', head, y, '%labels')})")


# -- encoders with decoders ------------------------------------------------------------------------

PAIRS = "%tokens: i32[B, S], %targets: i32[B, T], %labels: i32[B, T]"


@reads("T5", "t5", "mt5", features="encoder and decoder, bias by distance, ReLU or GeGLU")
def read_t5(config: Config) -> ModelText:
    """T5 (arXiv 1910.10683): a bias by distance that all layers of a side share; scores are not
    scaled."""
    return _t5(config)


@reads("UMT5", "umt5", features="T5 with a bias for each layer")
def read_umt5(config: Config) -> ModelText:
    """UMT5 (arXiv 2304.09151): T5 with a bias by distance for each layer."""
    config.only("scalable_attention", True)
    return _t5(config, own_bias=True)


@reads("Switch Transformers", "switch_transformers", features="T5 with one of many experts")
def read_switch(config: Config) -> ModelText:
    """Switch Transformers (arXiv 2101.03961): T5 with one of many experts in every n-th
    layer."""
    return _t5(config, sparse=True)


def _t5(config: Config, *, own_bias: bool = False, sparse: bool = False) -> ModelText:
    expect_head(config, "ConditionalGeneration")
    text, longest = begin(config, 512)
    text.symbol("T", min(longest, 4096), "tokens of a target")
    text.sequences = ("S", "T")
    read_size(config, text, "D", "d_model", default=512)
    read_size(config, text, "H", "num_heads", default=8)
    read_size(config, text, "K", "d_kv", default=64)
    read_size(config, text, "F", "d_ff", default=2048)
    count = config.layers("num_layers", default=6)
    behind = config.layers("num_decoder_layers", default=count)
    read_size(config, text, "V", "vocab_size", default=32128)
    read_size(config, text, "N", "relative_attention_num_buckets", default=32)
    most = config.size("relative_attention_max_distance", default=128)
    config.only("is_encoder_decoder", True)
    forward = ("relu", "gated-gelu", "gated-silu", "gelu", "silu")
    act = config.word("feed_forward_proj", among=forward, default="relu")
    config.skip("dense_act_fn")
    gated = act.startswith("gated-")
    config.only("is_gated_act", gated, why=f"'feed_forward_proj' contradicts: it is {act!r}")
    kind = act.removeprefix("gated-").replace("gelu", "gelu_new" if gated else "gelu")
    mlp = FeedForward(kind, gated=gated, as_weights=True)
    tied = config.flag("tie_word_embeddings", default=True)
    scaled = config.flag("scale_decoder_outputs", default=tied)
    experts = _read_experts(config, text) if sparse else None
    sides = [
        _T5Side("encoder", count, f"sizes = (S, S), most = {most}"),
        _T5Side("decoder", behind, f"sizes = (T, T), most = {most}, causal"),
    ]
    body = Body()
    table = body.param("embed", "V, D")
    source = ""
    for side, tokens in zip(sides, ("%tokens", "%targets"), strict=True):
        x = body.let(f"x_{side.name}", f"stg.embedding({table}, {tokens})")
        every = config.size(f"{side.name}_sparse_step", default=4) if sparse else 0
        config.skip(f"num_sparse_{side.name}_layers")
        y = side.write(text, body, x, source, mlp, experts, every=every, own_bias=own_bias)
        last = "encoder_norm" if not source else "norm"
        source = T5_RMS.write(body, "e" if not source else "n", y, last)
    steps = ["stg.scale[rsqrt = D]({})"] if scaled else []
    head = table if tied else body.param("head", "V, D")
    translate(body, source, [*steps, f'stg.einsum["bsd,vd->bsv"]({{}}, {head})'])
    return text.train(PAIRS, body)


def _read_experts(config: Config, text: ModelText) -> Experts:
    """One expert for each token, by a softmax; its weight is its probability."""
    read_size(config, text, "E", "num_experts", default=8)
    text.symbol("M", text.symbols["F"].value, "d_ff")
    config.fixed(router_bias=False, router_type="tokens_masked")
    config.skip("expert_capacity", "router_ignore_padding_tokens", "add_router_probs")
    config.skip("batch_prioritized_routing")
    return Experts(route=(), activation="relu", gated=False)


@dataclass(frozen=True, slots=True)
class _T5Side:
    """The layers of a side: `bias` are the static parameters of its bias by distance."""

    name: str
    count: int
    bias: str

    def write(
        self,
        text: ModelText,
        body: Body,
        x: str,
        source: str,
        mlp: FeedForward,
        experts: Experts | None,
        *,
        every: int,
        own_bias: bool,
    ) -> str:
        """Append the layers on `x`, which attend to `source` if there is one, and return the name
        of the result. One of `every` layers has experts, if there are any."""
        causal = "causal, rsqrt = 1, given_type" if source else "rsqrt = 1, given_type"
        name = "causal_attention" if source else "attention"
        own = MultiHead(
            "", causal, bias=not own_bias, relative=self.bias * own_bias, name=name, wide=True
        )
        operands = [] if own_bias else [relative(body, f"{self.name}_bias", self.bias)]
        parts = [Sublayer(own.write(text), "self" if source else "attn", T5_RMS, operands=operands)]
        if source:
            mask = "rsqrt = 1, given_type"
            cross = MultiHead("", mask, cross=True, name="cross_attention", wide=True)
            parts.append(Sublayer(cross.write(text), "cross", T5_RMS, operands=[source]))
        kinds = {self.name: Layer([*parts, Sublayer(mlp.write(text), "mlp", T5_RMS)])}
        order = [self.name] * self.count
        if experts is not None:
            sparse = f"{self.name}_sparse"
            block = experts.write(text).with_("T = 1")  # elsewhere T are the tokens of a target
            text.relations.clear()
            kinds[sparse] = Layer([*parts, Sublayer(block, "mlp", T5_RMS)])
            order = [
                sparse if i % every == 1 or every == 1 else self.name for i in range(self.count)
            ]
        return write_stack(text, body, x, kinds, order, name=self.name, out=f"y_{self.name}")


def relative(body: Body, name: str, statics: str) -> str:
    """Append a bias [H, queries, keys] by distance, of a table [N, H], and return its name."""
    table = body.param(f"{name}_table", "N, H")
    return body.let(name, f"stg.relative_bias[{statics}]({table})")


def translate(body: Body, n: str, steps: Sequence[str]) -> None:
    """Append the head and the loss of `%labels` [B, T]."""
    logits = body.steps("logits", n, [*steps, "stg.cast[f32]({})"])
    body.ends(f"stg.cross_entropy[given_type, mean = B*T]({logits}, %labels)")
