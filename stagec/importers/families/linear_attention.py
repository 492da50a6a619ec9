"""Hybrids of linear and softmax attention: Qwen3-Next with delta nets, Kimi Linear with delta nets
that have a gate for each element of keys, MiniMax with lightning attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from stagec.importers.common.decoder_model import DecoderModel, Named, PerLayer, Sizes
from stagec.importers.common.sizes import read_size
from stagec.importers.common.state_space import GatedDelta, Lightning
from stagec.importers.families.deepseek import Latent, LatentSizes, latent_of
from stagec.importers.families.depth import write_depth
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, Attention, Experts, FeedForward
from stagec.importers.writing.stack import Decoder, Layer, Place, Sublayer, scaled, stacked
from stagec.importers.writing.text import Body, Callee, ModelText

# -- Qwen3-Next ------------------------------------------------------------------------------------


@reads("Qwen3-Next", "qwen3_next", features="delta nets, gated attention")
def read_qwen3_next(config: Config) -> ModelText:
    """Qwen3-Next: gated delta nets, and gated attention in every fourth layer; experts with a gated
    shared block."""
    sizes = Sizes(2048, 5632, 48, 16, 151936, 32768, groups=2, dim=256)
    model = DecoderModel(config, sizes)
    mixture = _shared_mixture(
        model, count=512, top=10, normalize=model.flag("norm_topk_prob", True)
    )
    plain = FeedForward(mixture.activation)
    step = config.size("decoder_sparse_step", default=1)
    dense = config.sizes("mlp_only_layers", most=model.count - 1)
    sparse = [(i + 1) % step == 0 and i not in dense for i in range(model.count)]
    named: list[Named] = [("sparse", mixture) if each else ("dense", plain) for each in sparse]
    return _with_delta_nets(model, named)


@reads("Qwen3.5", "qwen3_5_text", features="delta nets, gated attention")
def read_qwen3_5(config: Config) -> ModelText:
    """Qwen3.5, the text model: Qwen3-Next with a dense block."""
    sizes = Sizes(4096, 12288, 32, 16, 248320, 32768, groups=4, dim=256)
    model = DecoderModel(config, sizes)
    _skip_predictions(config)
    return _with_delta_nets(model, FeedForward(model.activation()))


@reads("Qwen3.5-MoE", "qwen3_5_moe_text", features="delta nets, experts, shared")
def read_qwen3_5_moe(config: Config) -> ModelText:
    """Qwen3.5 with experts, the text model."""
    sizes = Sizes(2048, 5632, 40, 16, 248320, 32768, groups=2, dim=256)
    model = DecoderModel(config, sizes)
    _skip_predictions(config)
    return _with_delta_nets(model, _shared_mixture(model, count=256, top=8, normalize=True))


def _skip_predictions(config: Config) -> None:
    config.only("attn_output_gate", True)
    config.skip("mamba_ssm_dtype")


def _shared_mixture(model: DecoderModel, *, count: int, top: int, normalize: bool) -> Experts:
    """Experts with a gated shared block."""
    mixture = model.experts(count=count, top=top, inner=512, normalize=normalize)
    return model.beside(mixture, "shared_expert_intermediate_size", default=512)


def _with_delta_nets(model: DecoderModel, block: PerLayer) -> ModelText:
    """The text, with delta nets in three layers of four and gated attention in the fourth."""
    config, text = model.config, model.text
    config.only("output_gate_type", "swish", "silu")
    values = model.size("H_m", "linear_num_value_heads", default=32)
    keys = model.size("G_m", "linear_num_key_heads", default=16)
    config.divides("linear_num_key_heads", keys, values)
    model.size("K_m", "linear_key_head_dim", default=128)
    model.size("P", "linear_value_head_dim", default=128)
    model.size("W", "linear_conv_kernel_dim", default=4)
    text.symbol("Q", 64, "tokens of a chunk, by the kernels")
    centered = replace(RMS, zero_centered=True)
    config.only("attention_bias", False)
    rope = model.rope(partial=Fraction(1, 4))
    attention = Attention(qk_norm=centered, rope=rope, gated=True)
    every = config.size("full_attention_interval", default=4)
    types = config.words(
        "layer_types", among=("linear_attention", "full_attention"), length=model.count
    ) or ["linear_attention" if (i + 1) % every else "full_attention" for i in range(model.count)]
    blocks = model.in_layers(block)
    mixed = len(set(blocks)) > 1
    layers: list[list[Place]] = []
    for kind, (name, block) in zip(types, blocks, strict=True):
        full = kind == "full_attention"
        mixer = ("attention", "attn", attention) if full else ("delta", "attn", GatedDelta())
        layers.append([mixer, (name if mixed else "", "ffn", block)])
    decoder = Decoder(norm=centered, tied=model.tied())
    return stacked(text, layers, decoder, norm=centered)


# -- OLMo Hybrid -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DoubleDelta:
    """The gated delta net of the library with one group per head, whose beta may be `double`."""

    double: bool

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        if not self.double:
            return GatedDelta().write(text)
        text.assume("H_m % G_m == 0")
        return text.use("double_delta", "D H_m G_m K_m P Q W")


@reads("OLMo Hybrid", "olmo_hybrid", features="delta nets, attention with post-norms")
def read_olmo_hybrid(config: Config) -> ModelText:
    """OLMo Hybrid: three delta nets after norms, then attention with norms after the blocks."""
    model = DecoderModel(config, Sizes(3840, 11008, 32, 30, 100352, 65536))
    text, heads = model.text, model.text.value("H")
    config.skip(*(f"linear_{n}" for n in ("a_log_min", "a_log_max", "dt_min", "dt_max")))
    config.skip("linear_dt_init_floor")
    width = text.value("D")
    keys = model.size("G_m", "linear_num_key_heads", default=heads)
    values = model.size("H_m", "linear_num_value_heads", default=heads)
    config.divides("linear_num_key_heads", keys, values)
    dim = model.size("K_m", "linear_key_head_dim", default=max(1, width * 3 // (4 * keys)))
    model.size("P", "linear_value_head_dim", default=2 * dim)
    model.size("W", "linear_conv_kernel_dim", default=4)
    text.symbol("Q", 64, "tokens of a chunk, by the kernels")
    among = ("linear_attention", "full_attention")
    types = config.words("layer_types", among=among, length=model.count) or [
        among[(i + 1) % 4 == 0] for i in range(model.count)
    ]
    parameters = config.section("rope_parameters")
    turned = config.has("rope_theta") or (parameters is not None and parameters.has("rope_theta"))
    rope = model.rope() if turned else None
    config.skip("rope_parameters", "rope_theta")
    mixer = model.biased(Attention(qk_norm=RMS, norm_dims="together", rope=rope))
    block = FeedForward(model.activation()).write(text)
    kinds: dict[str, Layer] = {}
    if "linear_attention" in types:
        double = model.flag("linear_allow_neg_eigval", True)
        delta = Sublayer(_DoubleDelta(double).write(text), "attn")
        kinds["linear_attention"] = Layer([delta, Sublayer(block, "ffn")])
    if "full_attention" in types:
        full = Sublayer(mixer.write(text), "attn", None, RMS)
        kinds["full_attention"] = Layer([full, Sublayer(block, "ffn", None, RMS)])
    return Decoder(tied=model.tied()).write(text, kinds, types)


# -- MiniMax ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FromNormed(Layer):
    """A layer whose residual is the result of the norm, or the input; for each part, the residual
    and the result of the block are multiplied by two numbers."""

    weights: tuple[tuple[Fraction, Fraction], ...] = ()
    post_norm: bool = True

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`, and return the name of the result."""
        for number, (part, (alpha, beta)) in enumerate(
            zip(self.parts, self.weights, strict=True), 1
        ):
            n = RMS.write(body, f"n{number}", x, f"{part.name}_norm")
            kept = body.steps(f"k{number}", n if self.post_norm else x, scaled(alpha))
            steps = [f"stg.call @{part.block}({{}})", *scaled(beta)]
            made = body.steps(part.name[0], n, steps)
            x = body.let(f"r{number}", f"stg.add({kept}, {made})")
        return x


@reads("MiniMax", "minimax", "minimax_text_01", "minimax_m1", features="lightning attention")
def read_minimax(config: Config) -> ModelText:
    """MiniMax-01 and -M1 (arXiv 2501.08313, 2506.13585): lightning attention, and softmax attention
    in every eighth layer; experts; the residual is the normed stream times a number."""
    sizes = Sizes(4096, 14336, 32, 32, 32000, 131072, groups=8, base=1000000)
    model = DecoderModel(config, sizes)
    rope = model.rope()
    if config.has("rotary_dim"):
        rope = model.partly(rope, config.size("rotary_dim"), "rotary_dim")
    attention = Attention(rope=rope)
    model.text.symbol("Q", config.size("block_size", default=256), "block_size")
    model.text.notes.append("The decays of lightning attention are constants, no parameters.")
    mixture = model.experts(count=8, top=2, inner="F")
    mixture = replace(mixture, route=(*mixture.route, "wide_weights"))
    config.only("shared_intermediate_size", 0)
    config.only("shared_moe_mode", "sigmoid", "softmax")
    full = _alpha_beta(config, "full_attention", "full_attn")
    linear = _alpha_beta(config, "linear_attention", "linear_attn")
    mlp = _alpha_beta(config, "mlp", "mlp")
    post_norm = model.flag("postnorm", True)
    block = mixture.write(model.text)
    kinds: dict[str, _FromNormed] = {}
    mixers = ("lightning", Lightning(), linear), ("attention", attention, full)
    for name, mixer, weights in mixers:
        parts = [Sublayer(mixer.write(model.text), "attn"), Sublayer(block, "ffn")]
        kinds[name] = _FromNormed(parts, weights=(weights, mlp), post_norm=post_norm)
    return Decoder(tied=model.tied()).write(model.text, kinds, _minimax_order(config, model.count))


def _minimax_order(config: Config, count: int) -> list[str]:
    """The kind of each layer: by `layer_types`, or `attn_type_list` of 0 and 1."""
    among = ("linear_attention", "full_attention")
    types = config.words("layer_types", among=among, length=count)
    if types:
        return ["attention" if t == "full_attention" else "lightning" for t in types]
    numbers = config.sizes("attn_type_list", length=count, most=1)
    if numbers:
        return ["attention" if n else "lightning" for n in numbers]
    return ["lightning" if (i + 1) % 2 else "attention" for i in range(count)]


def _alpha_beta(config: Config, name: str, short: str) -> tuple[Fraction, Fraction]:
    """The factors of the residual and of the result of the block."""
    keys = ("alpha", "beta")
    alpha, beta = (
        config.ratio(f"layernorm_{name}_{k}", f"{short}_{k}_factor", default=1) for k in keys
    )
    return alpha, beta


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """Kimi Delta Attention (arXiv 2510.26692): H_m heads of P, convolutions of W_m tokens, a norm
    of each head times a gate; rank P have all `gates`, only those of decays, or none (`full`)."""

    gates: Literal["low", "decays", "full"] = "low"

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        gates = [] if self.gates == "low" else [f"gates = {self.gates}"]
        return text.use("kimi_delta", "D H_m P W_m Q_m", *gates)


@reads("Kimi Linear", "kimi_linear", features="delta nets with gates by key")
def read_kimi_linear(config: Config) -> ModelText:
    """Kimi Linear (arXiv 2510.26692): three layers of delta nets, one of latent attention without
    positions; experts chosen by sigmoids. In Kimi K3 (2607.24653) parts of layers read averages of
    the residual streams before, and experts work on a projection."""
    sizes = Sizes(2304, 9216, 27, 32, 163840, 1 << 20)
    model, latent = latent_of(config, sizes, LatentSizes(queries=0))
    if config.flag("mla_use_nope", default=True):
        latent = replace(latent, rope=None)
    types, delta = _layer_types(model)
    gated = model.flag("mla_use_output_gate")
    latent = replace(latent, gated="elements" if gated else "")
    model.text.symbol("Q_m", 64, "tokens of a chunk, by the kernels")
    config.fixed(moe_router_activation_func="sigmoid", moe_layer_freq=1)
    config.skip("use_grouped_topk")
    scale = Fraction("2.446")
    plain = _soft_gate(config) or FeedForward(model.activation())
    mixture = model.sigmoid_experts(count=256, top=8, inner=1024, shared=1, scale=scale)
    shared = replace(mixture.shared, bounds=plain.bounds) if mixture.shared else None
    mixture = replace(mixture, statics=plain.bounds, shared=shared)
    if config.has("routed_expert_hidden_size"):
        model.size("U", "routed_expert_hidden_size")
        normed = model.flag("latent_moe_use_norm")
        mixture = replace(mixture, narrow=True, narrow_norm=normed)
    dense = config.count("first_k_dense_replace", default=1)
    blocks = model.dense_first(dense, mixture, plain)
    size = config.count("attn_res_block_size", default=0)
    if not size:
        return _with_latents(model, types, latent, delta, blocks)
    layers: list[tuple[str, Callee, Callee]] = []
    for full, (name, block) in zip(types, blocks, strict=True):
        mixer = latent.write(model.text) if full else delta.write(model.text)
        kind = f"{'attention' if full else 'delta'}_{name}"
        layers.append((kind, mixer, block.write(model.text)))
    return write_depth(model.text, layers, size, Decoder(tied=model.tied()))


def _soft_gate(config: Config) -> FeedForward | None:
    """The dense block of Kimi K3, whose gate and its factor have smooth bounds; None for another
    activation."""
    if not config.is_text("hidden_act") or config.text("hidden_act") != "situ":
        return None
    config.drop("hidden_act")
    gate = config.positive("activation_situ_beta", default=4)
    bounds = [f"soft = {gate}"]
    if config.has("activation_situ_linear_beta"):
        bounds.append(f"soft_up = {config.positive('activation_situ_linear_beta')}")
    return FeedForward(bounds=tuple(bounds))


def _with_latents(
    model: DecoderModel,
    types: Sequence[bool],
    latent: Latent,
    delta: KimiDelta,
    blocks: Sequence[Named],
) -> ModelText:
    """Layers of latent attention where `types` says so, and else of delta nets."""
    layers: list[list[Place]] = []
    for full, (name, block) in zip(types, blocks, strict=True):
        mixer = ("attention", "attn", latent) if full else ("delta", "attn", delta)
        layers.append([mixer, (name, "ffn", block)])
    return stacked(model.text, layers, Decoder(tied=model.tied()))


@reads("Ling 3", "bailing_hybrid", features="Kimi Linear, gates of full rank and of heads")
def read_bailing_hybrid(config: Config) -> ModelText:
    """Ling 3: delta nets with gates of full rank in five layers of six, latent attention with
    gates of heads in the others; experts chosen by sigmoids."""
    sizes = Sizes(2560, 6144, 42, 32, 157184, 262144, base=6000000)
    model, latent = latent_of(config, sizes, LatentSizes(queries=0))
    text = model.text
    every = config.size("layer_group_size", default=6)
    among = ("linear_attention", "full_attention")
    types = config.words("layer_types", among=among, length=model.count)
    full = [t == among[1] for t in types] or [(i + 1) % every == 0 for i in range(model.count)]
    # the class sets head_dim to the rotated elements, and keeps the value in linear_head_dim
    dim = config.size("head_dim", default=128)
    conv = config.size("short_conv_kernel_size", default=4)
    read_size(config, text, "H_m", "linear_num_heads", default=model.heads)
    read_size(config, text, "P", "linear_head_dim", default=dim)
    read_size(config, text, "W_m", "linear_conv_kernel_dim", default=conv)
    text.symbol("Q_m", 64, "tokens of a chunk, by the kernels")
    if config.flag("kda_safe_gate", default=True):
        text.notes.append("Left out: decays are at least kda_lower_bound.")
    config.skip("kda_lower_bound")
    scale = Fraction("2.5")
    mixture = model.sigmoid_experts(count=512, top=8, inner=768, shared=1, scale=scale)
    dense = config.count("first_k_dense_replace", default=2)
    blocks = model.dense_first(dense, mixture, FeedForward(model.activation()))
    latent = replace(latent, gated="heads")
    return _with_latents(model, full, latent, KimiDelta("full"), blocks)


def _layer_types(model: DecoderModel) -> tuple[list[bool], KimiDelta]:
    """For each layer, whether it has latent attention; and the delta nets of the others, whose H_m,
    P and W are declared."""
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
    delta = KimiDelta()
    if inner is not None:
        if inner.flag("use_full_rank_gate", default=False):
            delta = KimiDelta("decays")
        if inner.has("gate_lower_bound"):
            text.notes.append("Left out: decays are at least gate_lower_bound.")
        inner.finish()
        config.skip("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    return full, delta
