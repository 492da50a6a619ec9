"""Further encoders of text: ELECTRA, ALBERT, ModernBERT, Nomic BERT, ESM."""

from functools import partial

from stagec.importers.common.idle import Idle
from stagec.importers.common.positions import read_bases, read_rope
from stagec.importers.common.sizes import begin, expect_head, is_bare, read_size
from stagec.importers.families.encoders import (
    predict_words,
    read_activation,
    read_heads_of,
    train_vectors,
)
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import (
    LAYER,
    LAYER_SCALE,
    FeedForward,
    Rope,
    activated,
    activation_options,
)
from stagec.importers.writing.stack import Layer, Sublayer, repeated, write_stack
from stagec.importers.writing.text import Body, ModelText
from stagec.importers.writing.towers import MultiHead, encoder, projected, with_positions

_ARGS = "%tokens: i32[B, S], %types: i32[B, S], %labels: i32[B, S]"


def _begin(config: Config, longest: int, *, width: int, vocab: int) -> ModelText:
    """The text, with the sizes of all of these families."""
    text, longest = begin(config, longest)
    text.symbol("P", longest, "learned positions")
    text.assume("P >= S")
    read_size(config, text, "D", "hidden_size", "n_embd", default=width)
    heads = "n_head" if config.has("n_head") else "num_attention_heads"
    read_heads_of(config, text, "", heads, 12)
    read_size(config, text, "F", "intermediate_size", "n_inner", default=4 * width)
    text.symbol("L", config.layers("num_hidden_layers", "n_layer", default=12), "layers")
    read_size(config, text, "V", "vocab_size", default=vocab)
    config.only("tie_word_embeddings", True)
    return text


def _narrow_words(config: Config, text: ModelText, body: Body) -> tuple[str, str]:
    """Append normalized embeddings, and return their name and the symbol of their width."""
    e = config.size("embedding_size", default=128)
    e_is_d = e == text.symbols["D"].value
    width = "D" if e_is_d else text.symbol("E", e, "embedding_size")
    read_size(config, text, "Y", "type_vocab_size", default=2)
    words = body.let("e", f"stg.embedding({body.param('embed', f'V, {width}')}, %tokens)")
    types = body.let("t", f"stg.embedding({body.param('type_embed', f'Y, {width}')}, %types)")
    x = body.let("et", f"stg.add({words}, {types})")
    x = with_positions(body, "ep", x, f"P, {width}", size="S")
    return LAYER.write(body, "xe", x, "embed_norm", width), width


@reads("ELECTRA", "electra", features="narrow embeddings, a discriminator")
def read_electra(config: Config) -> ModelText:
    """ELECTRA (arXiv 2003.10555): BERT with narrower embeddings; its head predicts for each token
    whether it was replaced, or predicts tokens."""
    expect_head(config, "PreTraining", "MaskedLM")
    text = _begin(config, 512, width=256, vocab=30522)
    config.only("position_embedding_type", "absolute")
    config.skip(*(f"summary_{n}" for n in ("type", "use_proj", "activation", "last_dropout")))
    act = read_activation(config, "hidden_act")
    body = Body()
    x, width = _narrow_words(config, text, body)
    x = x if width == "D" else projected(text, body, "x", x, "embed_in", "E, D")
    mlp = FeedForward(act, gated=False, bias=True)
    y = repeated(body, x, encoder(text, MultiHead(), mlp, post=True), "y")
    if is_bare(config):
        return train_vectors(text, body, y, _ARGS)
    if any(name.endswith("ForPreTraining") for name in config.strings("architectures")):
        x = body.let("r", activated(act).format(projected(text, body, "r0", y, "dense", "D, D")))
        head = text.use("word_heads", "D", function="replaced_words")
        body.do(f"stg.return({body.call('loss', head, x, '%signs')})")
        text.notes.append("%signs are -1 for the tokens that were replaced, and 1 for all others.")
        return text.train(_ARGS.replace("%labels: i32", "%signs: f32"), body)
    predict_words(text, body, y, "gelu", width=width)
    return text.train(_ARGS, body)


# -- ALBERT ----------------------------------------------------------------------------------------

#: The weights that all layers share, with their dimensions.
_SHARED = {
    **{f"w{n}": "D, H, K" for n in "qkv"},
    **{f"b{n}": "H, K" for n in "qkv"},
    "wo": "H, K, D",
    "bo": "D",
    "attn_norm_w": "D",
    "attn_norm_b": "D",
    "w_up": "D, F",
    "b_up": "F",
    "w_down": "F, D",
    "b_down": "D",
    "mlp_norm_w": "D",
    "mlp_norm_b": "D",
}


@reads("ALBERT", "albert", features="layers that share their weights")
def read_albert(config: Config) -> ModelText:
    """ALBERT (arXiv 1909.11942): all layers share their weights; narrow embeddings."""
    expect_head(config, "MaskedLM")
    text = _begin(config, 512, width=4096, vocab=30000)
    config.fixed(position_embedding_type="absolute", num_hidden_groups=1, inner_group_num=1)
    config.skip("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
    act = read_activation(config, "hidden_act", default="gelu_new")
    layer = text.use("albert", "D H K F", *activation_options(act))
    body = Body()
    x, width = _narrow_words(config, text, body)
    x = projected(text, body, "x", x, "embed_in", f"{width}, D")
    shared = [body.param(name, dims) for name, dims in _SHARED.items()]
    inner = Body()
    inner.do(f"stg.yield({inner.call('r', layer, '%h', *shared)})")
    body.repeat("%y", "layers", "L", f"%h = {x}", inner)
    if is_bare(config):
        return train_vectors(text, body, "%y", _ARGS, pooler=True)
    predict_words(text, body, "%y", act, width=width)
    return text.train(_ARGS, body)


# -- rotary positions ------------------------------------------------------------------------------


@reads("ModernBERT", "modernbert", features="windows 2:1, GeGLU, two bases")
def read_modernbert(config: Config) -> ModelText:
    """ModernBERT (arXiv 2412.13663): norms before the parts, GeGLU, two layers of three with a
    window in both directions and a separate base."""
    expect_head(config, "MaskedLM")
    text = _begin(config, 8192, width=768, vocab=50368)
    every = config.size("global_attn_every_n_layers", default=3)
    sliding, full = "sliding_attention", "full_attention"
    count = text.value("L")
    types = config.words("layer_types", among=(sliding, full), length=count) or [
        sliding if i % every else full for i in range(count)
    ]
    local = config.size("local_attention", default=128)
    text.symbol("W", local // 2 + 1, "local_attention / 2, and the token itself")
    ropes = {kind: Rope(symbol) for kind, symbol in ((full, "theta"), (sliding, "theta_local"))}
    keys = {full: ("global_rope_theta", 160000), sliding: ("local_rope_theta", 10000)}
    if config.has("rope_parameters"):
        bases = {full: ("theta", 160000), sliding: ("theta_local", 10000)}
        ropes = read_bases(config, text, bases)
    else:
        for kind, (key, base) in keys.items():
            text.symbol(ropes[kind].base, config.size(key, default=base, most=1 << 40), key)
    config.only("position_embedding_type", "absolute", "rope", "sans_pos")
    config.fixed(classifier_bias=False, decoder_bias=True)
    config.skip("classifier_pooling", "deterministic_flash_attn", "initializer_cutoff_factor")
    config.skip("reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index")
    config.skip("sparse_prediction", "layer_norm_eps", *(key for key, _ in keys.values()))
    norm = LAYER if config.flag("norm_bias", default=False) else LAYER_SCALE
    biases = "qkvo" if config.flag("attention_bias", default=False) else ""
    act = read_activation(config, "hidden_activation")
    biased = config.flag("mlp_bias", default=False)
    mlp = FeedForward(act, bias=biased, packed=True).write(text)
    mixer = partial(MultiHead, biases, wide=True, packed=True)
    blocks = {
        full: mixer(name="global_attention", rope=ropes[full]),
        sliding: mixer("window = W", name="local_attention", rope=ropes[sliding]),
    }
    body = Body()
    e = body.let("e", f"stg.embedding({body.param('embed', 'V, D')}, %tokens)")
    x = norm.write(body, "x", e, "embed_norm")
    names = {full: "global", sliding: "local"}
    order = ["first", *(names[kind] for kind in types[1:])]
    kinds = {
        names[kind]: Layer(
            [Sublayer(blocks[kind].write(text), "attn", norm), Sublayer(mlp, "mlp", norm)]
        )
        for kind in dict.fromkeys(types[1:])
    }
    # the first layer has no norm before its attention, since the embeddings have one
    first = Sublayer(blocks[types[0]].write(text), "attn", None)
    kinds["first"] = Layer([first, Sublayer(mlp, "mlp", norm)])
    y = norm.write(body, "n", write_stack(text, body, x, kinds, order), "norm")
    act = read_activation(config, "classifier_activation")
    args = "%tokens: i32[B, S], %labels: i32[B, S]"
    if is_bare(config):
        return train_vectors(text, body, y, args)
    predict_words(text, body, y, act, norm=norm, bias=False, wide=True)
    return text.train(args, body)


@reads("Nomic BERT", "nomic_bert", features="rotary positions, SiLU gate")
def read_nomic_bert(config: Config) -> ModelText:
    """Nomic BERT (arXiv 2402.01613): rotary positions, a SiLU gate, a norm after each sum."""
    expect_head(config, "MaskedLM")
    for key in ("causal", "prenorm", "parallel_block", "qkv_proj_bias", "use_rms_norm"):
        config.only(key, False)
    config.fixed(rotary_emb_interleaved=False, rotary_emb_scale_base=None)
    config.fixed(rotary_scaling_factor=None, mlp_fc1_bias=False, mlp_fc2_bias=False)
    config.skip("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "use_xentropy")
    config.skip("max_trained_positions", "parallel_block_tied_norm")
    config.skip(*(f"summary_{n}" for n in ("activation", "proj_to_labels", "type", "use_proj")))
    text = _begin(config, 2048, width=768, vocab=30528)
    config.only("head_dim", text.symbols["K"].value)
    read_size(config, text, "Y", "type_vocab_size", default=2)
    rope = read_rope(config, text, base=1000)
    config.only("activation_function", "swiglu")
    act = read_activation(config, "hidden_act", default="silu")
    body = Body()
    e = body.let("e", f"stg.embedding({body.param('embed', 'V, D')}, %tokens)")
    t = body.let("t", f"stg.embedding({body.param('type_embed', 'Y, D')}, %types)")
    x = LAYER.write(body, "x", body.let("et", f"stg.add({e}, {t})"), "embed_norm")
    layer = encoder(text, MultiHead("", rope=rope), FeedForward(act), post=True)
    y = repeated(body, x, layer, "y")
    if is_bare(config):
        return train_vectors(text, body, y, _ARGS)
    predict_words(text, body, y, act)
    return text.train(_ARGS, body)


@reads("ESM-2", "esm", features="rotary positions, norms before the parts")
def read_esm(config: Config) -> ModelText:
    """ESM-2 (Science 379, 1123): proteins as tokens, rotary positions, norms before the parts."""
    expect_head(config, "MaskedLM")
    text = _begin(config, 1026, width=768, vocab=33)
    config.fixed(position_embedding_type="rotary", emb_layer_norm_before=False)
    config.only("is_folding_model", False)
    config.skip("esmfold_config", "vocab_list")
    act = read_activation(config, "hidden_act")
    text.symbol("theta", config.size("rope_theta", default=10000), "rope_theta")
    body = Body()
    x = body.let("x", f"stg.embedding({body.param('embed', 'V, D')}, %tokens)")
    mlp = FeedForward(act, gated=False, bias=True)
    y = repeated(body, x, encoder(text, MultiHead(rope=Rope()), mlp), "y")
    predict_words(text, body, LAYER.write(body, "n", y, "norm"), "gelu")
    text.train("%tokens: i32[B, S], %labels: i32[B, S]", body)
    idle = Idle(text)
    idle.param("w_contacts", "L*H")
    idle.param("b_contacts", "")
    return idle.beside("contacts", "The head of contacts is declared and frozen, not computed.")
