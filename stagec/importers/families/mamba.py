"""Models of Mamba-1 and Mamba-2, and hybrids of these with attention."""

from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.state_space import (
    PLAIN,
    PREFIXED,
    Mamba2Keys,
    begin_scans,
    read_mamba1,
    read_mamba2,
    skip_steps,
)
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import Attention, Block, FeedForward
from stagec.importers.writing.stack import Decoder, Place, stacked
from stagec.importers.writing.text import Callee, ModelText


@reads("Mamba", "mamba", features="selective scan")
def read_mamba(config: Config) -> ModelText:
    """Mamba-1 (arXiv 2312.00752)."""
    text, count = begin_scans(config, 768, 32, 50280)
    block = read_mamba1(config, text)
    skip_steps(config, text)
    config.fixed(rms_norm=True, d_inner=text.symbols["I"].value)
    config.skip("ssm_cfg")
    decoder = Decoder(tied=config.flag("tie_word_embeddings", default=True))
    return stacked(text, [[("", "ssm", block)]] * count, decoder)


@reads("Falcon Mamba", "falcon_mamba", features="normed step sizes, B, C")
def read_falcon_mamba(config: Config) -> ModelText:
    """Falcon Mamba (arXiv 2410.05355): step sizes, B and C have norms without scales."""
    text, count = begin_scans(config, 768, 32, 50280)
    block = replace(read_mamba1(config, text), norms="plain")
    skip_steps(config, text)
    config.skip("mixer_rms_eps")
    decoder = Decoder(tied=config.flag("tie_word_embeddings", default=True))
    return stacked(text, [[("", "ssm", block)]] * count, decoder)


@reads("Mamba-2", "mamba2", features="SSD, groups")
def read_mamba_2(config: Config) -> ModelText:
    """Mamba-2 (arXiv 2405.21060)."""
    text, count = begin_scans(config, 4096, 64, 32768)
    block = read_mamba2(config, text, PLAIN, heads=128, groups=8)
    config.only("rms_norm", True)
    inner = config.size("expand", default=2) * text.value("D")
    config.only("intermediate_size", inner, why="is not expand * hidden_size")
    config.skip("d_inner", "ssm_cfg")
    decoder = Decoder(tied=config.flag("tie_word_embeddings", default=False))
    return stacked(text, [[("", "ssm", block)]] * count, decoder)


@reads("Jamba", "jamba", features="Mamba-1, attention, experts by periods")
def read_jamba(config: Config) -> ModelText:
    """Jamba (arXiv 2403.19887): Mamba-1 with norms, attention without positions in one layer of a
    period, experts in every other layer."""
    model = DecoderModel(config, Sizes(4096, 14336, 32, 32, 65536, 262144, groups=8))
    mamba = replace(read_mamba1(config, model.text, "mamba_"), norms="scale")
    config.skip("mamba_inner_layernorms")
    attention = Attention(rope=None)
    at, period = _period(config, "attn", 8, 4)
    is_sparse, every = _period(config, "expert", 2, 1)
    mixture = model.experts(count=16, top=2, inner="F", normalize=False)
    plain = FeedForward(model.activation())
    single = model.text.value("E") == 1
    layers: list[list[Place]] = []
    for i in range(model.count):
        attends = i % at == period
        sparse = i % is_sparse == every and not single
        layers.append(
            [
                ("attention", "attn", attention) if attends else ("mamba", "ssm", mamba),
                ("sparse", "ffn", mixture) if sparse else ("dense", "ffn", plain),
            ]
        )
    return stacked(model.text, layers, Decoder(tied=model.tied()))


def _period(config: Config, name: str, period: int, offset: int) -> tuple[int, int]:
    """The period and offset of special layers."""
    every = config.size(f"{name}_layer_period", default=period)
    at = config.count(f"{name}_layer_offset", default=offset)
    if at >= every:
        raise config.refuse(
            f"{name}_layer_offset", f"is {at}: expected less than the period {every}"
        )
    return every, at


@reads("Bamba", "bamba", features="Mamba-2, attention by a list")
def read_bamba(config: Config) -> ModelText:
    """Bamba: Mamba-2, attention in a few layers, half of each head rotated."""
    model = DecoderModel(config, Sizes(4096, 14336, 32, 32, 128000, 262144, groups=8))
    mamba = read_mamba2(config, model.text, PREFIXED, heads=128, state=256)
    if config.has("attn_rotary_emb"):
        size = model.text.value("K")
        share = Fraction(config.size("attn_rotary_emb"), size)
    else:
        share = Fraction(1, 2)
    rope = model.rope(partial=share)
    attention = model.biased(Attention(rope=rope))
    plain = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    attends = config.sizes("attn_layer_indices", most=model.count - 1)
    layers = [
        [
            ("attention", "attn", attention) if i in attends else ("mamba", "ssm", mamba),
            ("", "ffn", plain),
        ]
        for i in range(model.count)
    ]
    return stacked(model.text, layers, Decoder(tied=model.tied()))


@reads("Granite 4", "granitemoehybrid", features="Mamba-2, attention, experts")
def read_granite_hybrid(config: Config) -> ModelText:
    """Granite 4: Mamba-2 and attention, experts with a shared block, multipliers."""
    model = DecoderModel(config, Sizes(4096, 11008, 32, 32, 32000, 2048))
    mamba = read_mamba2(config, model.text, PREFIXED, heads=128, state=256)
    config.skip("normalization_function")
    positions = ("nope", "rope", "rotary")
    rotary = config.word("position_embedding_type", among=positions, default="nope") != "nope"
    factor = config.positive("attention_multiplier", default=1)
    rope = model.rope()
    attention = model.biased(
        Attention(rope=rope if rotary else None, mask=f"causal, rsqrt = {1 / factor**2}")
    )
    model.size("F_shared", "shared_intermediate_size", default=1024)
    shared = FeedForward(model.activation())
    feed: Block = _Called(shared.write(model.text).with_("F = F_shared"))
    if config.count("num_local_experts", default=8):
        feed = replace(model.experts(count=8, top=2, inner="F"), shared=shared)
    else:
        config.skip("num_experts_per_tok")
    types = config.kinds("layer_types", "layers_block_type", names=_KINDS, length=model.count)
    layers = [
        [
            ("attention", "attn", attention) if t == "attention" else ("mamba", "ssm", mamba),
            ("", "ffn", feed),
        ]
        for t in types or ["mamba"] * model.count
    ]
    logits = config.positive("logits_scaling", default=1)
    decoder = Decoder(
        tied=model.tied(),
        embed_scale=config.ratio("embedding_multiplier", default=1),
        logit_scale=1 / logits,
    )
    scale = config.ratio("residual_multiplier", default=1)
    return stacked(model.text, layers, decoder, scale=scale)


#: The names of the kinds of layers of hybrids.
_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


@dataclass(frozen=True, slots=True)
class _Called:
    """A block that is already in the text."""

    callee: Callee

    def write(self, text: ModelText) -> Callee:
        """The block."""
        return self.callee


_NEMOTRON_KEYS = Mamba2Keys.of(
    "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel chunk_size use_bias "
    "use_conv_bias"
)


@reads("Nemotron-H", "nemotron_h", features="one block a layer, by a word")
def read_nemotron_h(config: Config) -> ModelText:
    """Nemotron-H (arXiv 2504.03624): one block per layer, by a word of letters: M for Mamba-2, *
    for attention without positions, - for a feed-forward block, E for experts."""
    sizes = Sizes(4096, 21504, 52, 32, 131072, 8192, groups=8, dim=128)
    sizes = replace(sizes, layers=config.length("layers_block_type", default=sizes.layers))
    model = DecoderModel(config, sizes, dim_keys=("head_dim", "attention_head_dim"))
    mamba = read_mamba2(config, model.text, _NEMOTRON_KEYS, heads=128, groups=8, norm="groups")
    mamba = replace(mamba, bias=mamba.bias or model.flag("mamba_proj_bias"))
    config.only("mamba_hidden_act", "silu")
    config.skip("moe_shared_expert_overlap", "mamba_dt_init_floor", "moe_latent_size")
    config.skip("rope_theta", "partial_rotary_factor")
    config.skip("mamba_ssm_cache_dtype", "sliding_window", "attn_layer_indices")
    act = config.word("mlp_hidden_act", among=("relu2", "silu", "gelu"), default="relu2")
    plain = FeedForward(act, gated=False, bias=model.flag("mlp_bias"))
    blocks: dict[str, Place] = {
        "M": ("mamba", "ssm", mamba),
        "*": ("attention", "attn", model.biased(Attention(rope=None))),
        "-": ("mlp", "ffn", plain),
    }
    word = _pattern(config, model.count)
    if "E" in word:
        blocks["E"] = ("moe", "ffn", _nemotron_experts(model, act))
    else:
        config.skip(*_NEMOTRON_EXPERTS.split())
    return stacked(model.text, [[blocks[c]] for c in word], Decoder(tied=model.tied()))


_NEMOTRON_EXPERTS = (
    "n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size n_group "
    "moe_shared_expert_intermediate_size topk_group norm_topk_prob routed_scaling_factor"
)


def _nemotron_experts(model: DecoderModel, act: str) -> Block:
    """Experts without a gate, chosen as in DeepSeek-V3; a shared block with a separate width."""
    config = model.config
    mixture = model.experts(count=8, top=2, inner=7688, activation=act)
    normalize = ["normalize"] if model.flag("norm_topk_prob", True) else []
    route = ("scores = sigmoid", *normalize, *model.weights(), *model.groups(1, "N_groups"))
    shared = None
    if config.count("n_shared_experts", default=1):
        model.size("F_shared", "moe_shared_expert_intermediate_size", default=7688)
        shared = FeedForward(act, gated=False)
    narrow = config.has("moe_latent_size")
    if narrow:
        model.size("U", "moe_latent_size")
        config.only("mlp_bias", False)
    mixture = replace(mixture, choice_bias="state", gated=False, shared=shared)
    return replace(mixture, route=route, narrow=narrow)


def _pattern(config: Config, count: int) -> str:
    """The kinds of layers, one letter each."""
    names = {
        name: {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}[kind]
        for name, kind in _KINDS.items()
    }
    word = "".join(config.kinds("layers_block_type", "layer_types", names=names, length=count))
    if word:
        config.skip("hybrid_override_pattern")
        return word
    word = config.text("hybrid_override_pattern")
    if len(word) != count:
        raise config.refuse(
            "hybrid_override_pattern",
            f"has {len(word)} letters, expected one for each of {count} layers",
        )
    wrong = sorted(set(word) - set("M*-E"))
    if wrong:
        raise config.wrong("hybrid_override_pattern", "a word of the letters M, *, - and E")
    return word
