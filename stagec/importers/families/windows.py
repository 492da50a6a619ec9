"""Families whose layers differ in their attention: windows, blocks, sinks, bounds."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Named, PerLayer, Sizes
from stagec.importers.common.positions import read_bases
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import (
    COHERE_NORM,
    RMS,
    WIDE_RMS,
    Attention,
    Experts,
    FeedForward,
    Norm,
    Rope,
)
from stagec.importers.writing.stack import Decoder, root
from stagec.importers.writing.text import ModelText, Symbol

#: RMSNorm whose scale is 1 + w.
GEMMA_NORM = Norm("rms", zero_centered=True)
_GEMMA_GATE = "gelu_pytorch_tanh"


def _alternating(model: DecoderModel, every: int) -> list[bool]:
    """Windows by `layer_types`, else in all layers but every n-th."""
    return model.windows([(i + 1) % every != 0 for i in range(model.count)])


# -- Gemma -----------------------------------------------------------------------------------------


@reads("Gemma", "gemma", features="norms of 1 + w, GeGLU, scaled embeddings")
def read_gemma(config: Config) -> ModelText:
    """Gemma (arXiv 2403.08295): heads of 256, a GeLU gate, norms of 1 + w, scaled embeddings."""
    model = DecoderModel(config, Sizes(3072, 24576, 28, 16, 256000, 8192, dim=256))
    mixer = model.biased(Attention(rope=model.rope()))
    # `hidden_act` is gelu in files with the tanh form, as in the reference
    config.skip("hidden_act")
    activation = config.word("hidden_activation", among=(_GEMMA_GATE, "gelu"), default=_GEMMA_GATE)
    decoder = _gemma_decoder(model)
    return model.stack(mixer, FeedForward(activation), decoder, norm=GEMMA_NORM)


@reads("Gemma 2", "gemma2", features="windows 1:1, bounded scores and logits")
def read_gemma2(config: Config) -> ModelText:
    """Gemma 2 (arXiv 2408.00118): every other layer has a window; bounded scores and logits."""
    return _gemma2(config, GEMMA_NORM)


@reads("VaultGemma", "vaultgemma", features="Gemma 2 without post-norms")
def read_vaultgemma(config: Config) -> ModelText:
    """VaultGemma (arXiv 2510.15001): Gemma 2 without norms after the blocks."""
    return _gemma2(config, None)


def _gemma2(config: Config, post: Norm | None) -> ModelText:
    model = DecoderModel(config, Sizes(2304, 9216, 26, 8, 256000, 8192, groups=4, dim=256))
    cap, final = read_softcap(config, "attn", 50), read_softcap(config, "final", 30)
    config.fixed(use_bidirectional_attention=False, attention_bias=False)
    config.skip("sliding_window_size")
    mixer = Attention(rope=model.rope(), mask=_scores(model, cap))
    mixers = model.masked(mixer, _alternating(model, 2), model.window(4096))
    return _gemma_stack(model, mixers, final, post)


@reads("Gemma 3", "gemma3_text", features="windows 5:1, two bases, q and k normed")
def read_gemma3(config: Config) -> ModelText:
    """Gemma 3 (arXiv 2503.19786): five layers with a window for one without, with different bases;
    queries and keys are normed per head."""
    return gemma3(config)


def gemma3(config: Config, *, seen: bool = False) -> ModelText:
    """Gemma 3; with `seen` model code makes masks of all layers, because tokens of an image see
    each other (`create_causal_mask_mapping` of transformers)."""
    model = DecoderModel(config, Sizes(2304, 9216, 26, 8, 262208, 131072, groups=4, dim=256))
    sliding, full = "sliding_attention", "full_attention"
    kinds = {full: ("theta", 1000000), sliding: ("theta_local", 10000)}
    ropes = read_bases(config, model.text, kinds, nested=sliding)
    cap = config.ratio("attn_logit_softcapping", default=0)
    final = config.ratio("final_logit_softcapping", default=0)
    config.only("use_bidirectional_attention", False)
    mask = _scores(model, cap) + ", made_mask" * seen
    mixer = model.biased(Attention(qk_norm=GEMMA_NORM, rope=ropes[full], mask=mask))
    every = config.every("sliding_window_pattern", "_sliding_window_pattern", default=6)
    # each kind of layers has its base, even if the window exceeds the positions
    local = replace(model.local(mixer, 4096), rope=ropes[sliding])
    mixers = [("local", local) if w else ("global", mixer) for w in _alternating(model, every)]
    return _gemma_stack(model, mixers, final)


def read_softcap(config: Config, what: str, default: int) -> Fraction:
    """A bound of logits in Gemma 2, which null turns off."""
    key = f"{what}_logit_softcapping"
    off = config.names(key) and not config.has(key)
    return Fraction(0) if off else config.ratio(key, default=default)


def _scores(model: DecoderModel, cap: Fraction) -> str:
    """The static parameters of attention by `query_pre_attn_scalar` and a bound of the scores."""
    scalar = model.config.positive("query_pre_attn_scalar", default=256)
    words = ["causal"]
    if scalar != model.text.value("K"):
        words.append(f"rsqrt = {scalar}")
    if cap:
        words.append(f"softcap = {cap}")
    return ", ".join(words)


def _gemma_stack(
    model: DecoderModel, mixers: Sequence[Named], final: Fraction, post: Norm | None = GEMMA_NORM
) -> ModelText:
    block = FeedForward(model.activation(_GEMMA_GATE))
    decoder = replace(_gemma_decoder(model), logit_cap=final or None)
    return model.stack(mixers, block, decoder, norm=GEMMA_NORM, post=post)


def _gemma_decoder(model: DecoderModel) -> Decoder:
    scale = root(model.width)
    return Decoder(GEMMA_NORM, tied=model.tied(True), embed_scale=scale)


# -- OLMo, Command R -------------------------------------------------------------------------------


@reads("OLMo 2", "olmo2", features="norms behind the blocks, of all q and all k")
def read_olmo2(config: Config) -> ModelText:
    """OLMo 2 (arXiv 2501.00656): norms after the blocks only, of all queries and all keys too."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 50304, 2048))
    return _olmo(model, _olmo_mixer(model, model.rope()))


@reads("OLMo 3", "olmo3", features="OLMo 2 with windows 3:1")
def read_olmo3(config: Config) -> ModelText:
    """OLMo 3: OLMo 2 with windows in three layers of four."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 50304, 2048))
    parameters = config.section("rope_parameters")
    windows, window = _alternating(model, 4), model.window(4096)
    if parameters is not None and parameters.has("sliding_attention"):
        bases = {"full_attention": ("theta", 10000), "sliding_attention": ("theta_local", 10000)}
        ropes = read_bases(config, model.text, bases)
        full = _olmo_mixer(model, ropes["full_attention"])
        local = replace(full, rope=ropes["sliding_attention"])
    else:
        full = _olmo_mixer(model, model.rope())
        # a window is not longer than before, so its positions are not scaled
        local = _olmo_mixer(model, replace(full.rope or Rope(), scaling=""))
    if window is not None:
        model.text.symbol("W", window, "sliding_window")
        local = replace(local, mask="causal, window = W")
    mixers = [("local", local) if each else ("global", full) for each in windows]
    return _olmo(model, mixers)


def _olmo_mixer(model: DecoderModel, rope: Rope) -> Attention:
    return model.biased(Attention(qk_norm=WIDE_RMS, norm_dims="together", rope=rope))


def _olmo(model: DecoderModel, mixers: PerLayer) -> ModelText:
    decoder = Decoder(WIDE_RMS, tied=model.tied())
    return model.stack(mixers, decoder=decoder, norm=None, post=WIDE_RMS)


@reads("Command R7B", "cohere2", features="parallel blocks, windows 3:1")
def read_cohere2(config: Config) -> ModelText:
    """Command R7B and Command A: parallel blocks after one LayerNorm; three layers of four have a
    window, and the others have no positions."""
    model = DecoderModel(config, Sizes(8192, 22528, 40, 64, 256000, 8192))
    rope = replace(model.rope(), interleaved=True)
    rotary = model.biased(Attention(rope=rope))
    config.skip("rotary_pct", "order_of_interleaved_layers", "use_embedding_sharing")
    config.fixed(position_embedding_type="rope_gptj", use_gated_activation=True)
    config.only("use_parallel_block", True)
    config.only("use_parallel_embedding", False, True)
    every = config.every("sliding_window_pattern", "_sliding_window_pattern", default=4)
    local = model.local(rotary, 4096)
    still = replace(rotary, rope=None)
    mixers = [("local", local) if w else ("global", still) for w in _alternating(model, every)]
    scale = config.ratio("logit_scale", default=Fraction(1, 16))
    decoder = Decoder(COHERE_NORM, tied=model.tied(True), logit_scale=scale)
    block = FeedForward(model.activation())
    return model.stack(mixers, block, decoder, norm=None, parallel=True, common_norm=COHERE_NORM)


# -- experts ---------------------------------------------------------------------------------------


@reads("Command A+", "cohere2_moe", features="Command A with experts")
def read_cohere2_moe(config: Config) -> ModelText:
    """Command A+: parallel blocks after one norm; windows as in Command R7B, which dense layers at
    the beginning may not have; experts, whose sum with a shared one may be halved."""
    model = DecoderModel(config, Sizes(8192, 22528, 40, 64, 256000, 8192, dim=128))
    rope = replace(model.rope(), interleaved=True)
    rotary = model.biased(Attention(rope=rope))
    dense = config.count("first_k_dense_replace", default=0, most=model.count)
    first = config.size("prefix_dense_sliding_window_pattern", default=1)
    every = config.size("sliding_window_pattern", default=4)
    default = [(i + 1) % first != 0 for i in range(dense)]
    default += [(i + 1) % every != 0 for i in range(model.count - dense)]
    local = model.local(rotary, 4096)
    mixture = _cohere_experts(model)
    plain = FeedForward(mixture.activation)
    if config.has("prefix_dense_intermediate_size"):
        model.size("F_dense", "prefix_dense_intermediate_size")
        plain = replace(plain, width="F_dense")
    blocks = model.dense_first(dense, mixture, plain)
    forced = replace(rotary, rope=rope) if first == 1 else replace(rotary, rope=None)
    mixers: list[Named] = []
    for windowed, (kind, _) in zip(model.windows(default), blocks, strict=True):
        whole = forced if kind == "dense" else replace(rotary, rope=None)
        mixers.append(("local", local) if windowed else (f"global_{kind}", whole))
    norm = RMS if config.has("rms_norm_eps") else COHERE_NORM
    scale = config.ratio("logit_scale", default=Fraction(1, 16))
    decoder = Decoder(norm, tied=model.tied(True), logit_scale=scale)
    return model.stack(mixers, blocks, decoder, norm=None, parallel=True, common_norm=norm)


def _cohere_experts(model: DecoderModel) -> Experts:
    config = model.config
    mixture = model.experts(count=8, top=2, inner="F")
    function = config.word("expert_selection_fn", among=("softmax", "sigmoid"), default="softmax")
    normalize = model.flag("norm_topk_prob", True)
    if function == "sigmoid":
        route = ("scores = sigmoid", *["normalize"] * normalize)
        mixture = replace(mixture, route=route)
    number = config.count("num_shared_experts", default=0)
    among = ("average", "sum")
    halved = config.word("shared_expert_combination_strategy", among=among, default="average")
    if not number:
        return mixture
    shared = model.shared(number, "num_shared_experts")
    return replace(mixture, shared=shared, halved=halved == "average")


@reads("gpt-oss", "gpt_oss", features="windows 1:1, sinks, bounded gate, biases")
def read_gpt_oss(config: Config) -> ModelText:
    """gpt-oss (arXiv 2508.10925): every other layer has a window; sinks, biases everywhere, a
    bounded gate."""
    sizes = Sizes(2880, 2880, 36, 64, 201088, 131072, groups=8, dim=64, base=150000)
    model = DecoderModel(config, sizes)
    config.skip("experts_per_token", "initial_context_length")
    mixer = model.biased(Attention(rope=model.rope(), sinks=True), True)
    mixers = model.masked(mixer, _alternating(model, 2), model.window(128))
    limit = config.ratio("swiglu_limit", default=7)
    slope = config.ratio("swiglu_alpha", default=Fraction("1.702"))
    statics = (f"slope = {slope}", f"limit = {limit}", "shift = 1")
    mixture = model.experts(count=128, top=4, inner="F")
    mixture = replace(mixture, router_bias=True, bias=True, statics=statics)
    return model.stack(mixers, mixture, norm=WIDE_RMS)


@reads("Llama 4", "llama4_text", features="blocks 3:1, no positions, scaled expert inputs")
def read_llama4(config: Config) -> ModelText:
    """Llama 4, the text model: three layers with attention in blocks, and a fourth with full
    attention without positions; one expert, whose input is multiplied by a sigmoid, and a shared
    one."""
    config.skip("for_llm_compressor", "head_dim_kv")
    sizes = Sizes(5120, 16384, 48, 40, 202048, 131072, groups=8, dim=128, base=500000)
    model = DecoderModel(config, replace(sizes, inner=8192))
    rope = replace(model.rope(), interleaved=True)
    plain = Norm("rms", affine="none")
    normed = plain if model.flag("use_qk_norm", True) else None
    blocks = config.size("attention_chunk_size", default=8192, most=1 << 30)
    model.text.symbol("C_attn", blocks, "attention_chunk_size")
    rotary = model.biased(
        Attention(rope=rope, qk_norm=normed, after_rope=True, mask="causal, chunk = C_attn")
    )
    still = replace(
        rotary, rope=None, qk_norm=None, mask="causal", temperature=_temperature(config)
    )
    mixers = [("local", rotary) if each else ("global", still) for each in _rotated(model)]
    return model.stack(mixers, _llama4_blocks(model))


def _temperature(config: Config) -> str:
    floor = config.size("floor_scale", default=8192)
    scale = config.ratio("attn_scale", default=Fraction(1, 10))
    if not config.flag("attn_temperature_tuning", default=True):
        return ""
    return f"floor = {floor}, scale = {scale}"


def _rotated(model: DecoderModel) -> list[bool]:
    """For each layer, whether it has rotary positions and attention in blocks."""
    config = model.config
    every = config.size("no_rope_layer_interval", default=4)
    flags = config.sizes("no_rope_layers", most=1)
    if flags and len(flags) != model.count:
        raise config.refuse("no_rope_layers", f"has {len(flags)} elements, expected {model.count}")
    among = ("full_attention", "chunked_attention")
    types = config.words("layer_types", among=among, length=model.count)
    rotated = [bool(f) for f in flags] or [(i + 1) % every != 0 for i in range(model.count)]
    if types and [t == "chunked_attention" for t in types] != rotated:
        raise config.refuse("layer_types", "differs from 'no_rope_layers', which is not modeled")
    return rotated


def _llama4_blocks(model: DecoderModel) -> list[Named]:
    """Experts in every layer, or every n-th, and dense blocks of their own width."""
    config = model.config
    step = config.size("interleave_moe_layer_step", default=1)
    sparse = config.sizes("moe_layers", most=model.count - 1) or range(step - 1, model.count, step)
    mixture = model.experts(count=16, top=1, inner="F")
    if model.text.symbols["T"].value != 1:
        raise config.refuse("num_experts_per_tok", "is not 1: only one expert per token is modeled")
    shared = FeedForward(model.activation())
    model.text.symbol("F_shared", model.inner, "intermediate_size")
    mixture = replace(mixture, route=("scores = sigmoid",), scaled_inputs=True, shared=shared)
    width = config.size("intermediate_size_mlp", default=16384)
    model.text.symbols["F"] = Symbol("F", width, "intermediate_size_mlp")
    dense = FeedForward(model.activation())
    return [("sparse", mixture) if i in sparse else ("dense", dense) for i in range(model.count)]
