"""State-space models, linear attention, and hybrids of them with attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.blocks import RMS, Attention, Block, FeedForward, Norm, joined
from stagec.importers.common import begin, read_size
from stagec.importers.config import Config
from stagec.importers.family import ModelFamily
from stagec.importers.kin import Kin, Sizes
from stagec.importers.stack import ONE, Decoder, Layer, Part, scaled
from stagec.importers.state_space import (
    PLAIN,
    PREFIXED,
    GatedDelta,
    Lightning,
    Mamba2Keys,
    read_mamba1,
    read_mamba2,
    skip_steps,
)
from stagec.importers.text import Body, ModelText

#: A part of a layer: what tells it from others, what its norms are called, the block.
Place = tuple[str, str, Block]


def stacked(
    text: ModelText,
    layers: Sequence[Sequence[Place]],
    decoder: Decoder,
    *,
    scale: Fraction = ONE,
    norm: Norm = RMS,
) -> ModelText:
    """The text of layers with these parts, each behind a norm and multiplied by `scale`."""
    kinds: dict[str, Layer] = {}
    order: list[str] = []
    for places in layers:
        kind = "_".join(filter(None, (name for name, _, _ in places))) or "layers"
        order.append(kind)
        if kind not in kinds:
            parts = [Part(block.write(text), part, norm, None, scale) for _, part, block in places]
            kinds[kind] = Layer(parts)
    return decoder.write(text, kinds, order)


def _begin(
    config: Config, title: str, width: int, layers: int, vocab: int
) -> tuple[ModelText, int]:
    """The text of a model without attention, and how many layers it has."""
    text, _ = begin(config, title, 4096)
    read_size(config, text, "D", "hidden_size", "d_model", default=width)
    read_size(config, text, "V", "vocab_size", default=vocab)
    config.only("hidden_act", "silu")
    return text, config.layers("num_hidden_layers", "n_layer", default=layers)


def read_mamba(config: Config) -> ModelText:
    """Mamba-1 (arXiv 2312.00752)."""
    text, count = _begin(config, "Mamba", 768, 32, 50280)
    block = read_mamba1(config, text)
    skip_steps(config, text)
    decoder = Decoder(tied=config.flag("tie_word_embeddings", default=True))
    return stacked(text, [[("", "ssm", block)]] * count, decoder)


def read_falcon_mamba(config: Config) -> ModelText:
    """Falcon Mamba (arXiv 2410.05355): step sizes, B and C are normed, without scales."""
    text, count = _begin(config, "Falcon Mamba", 768, 32, 50280)
    block = replace(read_mamba1(config, text), norms="none")
    skip_steps(config, text)
    config.skip("mixer_rms_eps")
    decoder = Decoder(tied=config.flag("tie_word_embeddings", default=True))
    return stacked(text, [[("", "ssm", block)]] * count, decoder)


def read_mamba_2(config: Config) -> ModelText:
    """Mamba-2 (arXiv 2405.21060)."""
    text, count = _begin(config, "Mamba-2", 4096, 64, 32768)
    block = read_mamba2(config, text, PLAIN, heads=128, groups=8)
    config.only("rms_norm", True)
    decoder = Decoder(tied=config.flag("tie_word_embeddings", default=False))
    return stacked(text, [[("", "ssm", block)]] * count, decoder)


def read_jamba(config: Config) -> ModelText:
    """Jamba (arXiv 2403.19887): Mamba-1 with norms, attention without positions in one layer of a
    period, experts in every other layer."""
    kin = Kin(config, "Jamba", Sizes(4096, 14336, 32, 32, 65536, 262144, groups=8))
    mamba = replace(read_mamba1(config, kin.text, "mamba_"), norms="full")
    config.skip("use_mamba_kernels", "num_logits_to_keep", "mamba_inner_layernorms")
    attention = Attention(rope=None)
    at, period = _period(config, "attn", 8, 4)
    is_sparse, every = _period(config, "expert", 2, 1)
    mixture = kin.experts(count=16, top=2, inner="F", normalize=False)
    plain = FeedForward(kin.activation())
    single = (kin.text.symbols["E"].value or 1) == 1
    layers: list[list[Place]] = []
    for i in range(kin.count):
        attends = i % at == period
        sparse = i % is_sparse == every and not single
        layers.append(
            [
                ("attention", "attn", attention) if attends else ("mamba", "ssm", mamba),
                ("sparse", "ffn", mixture) if sparse else ("dense", "ffn", plain),
            ]
        )
    return stacked(kin.text, layers, Decoder(tied=kin.tied()))


def _period(config: Config, name: str, period: int, offset: int) -> tuple[int, int]:
    """Which layers are special: those with this remainder of their number."""
    every = config.size(f"{name}_layer_period", default=period)
    at = config.count(f"{name}_layer_offset", default=offset)
    if at >= every:
        raise config.refuse(f"{name}_layer_offset", f"is {at}, not below the period {every}")
    return every, at


def read_bamba(config: Config) -> ModelText:
    """Bamba: Mamba-2, attention in a few layers, half of each head rotated."""
    kin = Kin(config, "Bamba", Sizes(4096, 14336, 32, 32, 128000, 262144, groups=8))
    mamba = read_mamba2(config, kin.text, PREFIXED, heads=128, state=256)
    config.skip("num_logits_to_keep")
    biased = kin.flag("attention_bias")
    if config.has("attn_rotary_emb"):
        size = kin.text.symbols["K"].value or 1
        share = Fraction(config.size("attn_rotary_emb"), size)
    else:
        share = Fraction(1, 2)
    rope = kin.rope(partial=share)
    attention = Attention(qkv_bias=biased, out_bias=biased, rope=rope)
    plain = FeedForward(kin.activation(), bias=kin.flag("mlp_bias"))
    attends = config.sizes("attn_layer_indices", most=kin.count - 1)
    layers = [
        [
            ("attention", "attn", attention) if i in attends else ("mamba", "ssm", mamba),
            ("", "ffn", plain),
        ]
        for i in range(kin.count)
    ]
    return stacked(kin.text, layers, Decoder(tied=kin.tied()))


def read_granite_hybrid(config: Config) -> ModelText:
    """Granite 4: Mamba-2 and attention, experts with a shared block, multipliers."""
    kin = Kin(config, "Granite 4", Sizes(4096, 11008, 32, 32, 32000, 2048))
    mamba = read_mamba2(config, kin.text, PREFIXED, heads=128, state=256)
    config.skip("num_logits_to_keep", "normalization_function")
    biased = kin.flag("attention_bias")
    positions = ("nope", "rope", "rotary")
    rotary = config.word("position_embedding_type", among=positions, default="nope") != "nope"
    factor = config.ratio("attention_multiplier", default=1)
    if factor <= 0:
        raise config.wrong("attention_multiplier", "a positive number")
    rope = kin.rope()
    attention = Attention(
        qkv_bias=biased,
        out_bias=biased,
        rope=rope if rotary else None,
        mask=f"causal, rsqrt = {1 / factor**2}",
    )
    kin.size("F_shared", "shared_intermediate_size", default=1024)
    shared = FeedForward(kin.activation())
    feed: Block = _Called(f"{shared.write(kin.text)}[F = F_shared]")
    if config.count("num_local_experts", default=8):
        feed = replace(kin.experts(count=8, top=2, inner="F"), shared=shared)
    else:
        config.skip("num_experts_per_tok")
    types = config.words(
        "layer_types", "layers_block_type", among=("mamba", "attention"), length=kin.count
    )
    layers = [
        [
            ("attention", "attn", attention) if t == "attention" else ("mamba", "ssm", mamba),
            ("", "ffn", feed),
        ]
        for t in types or ["mamba"] * kin.count
    ]
    logits = config.ratio("logits_scaling", default=1)
    if logits <= 0:
        raise config.wrong("logits_scaling", "a positive number")
    decoder = Decoder(
        tied=kin.tied(True),
        embed_scale=config.ratio("embedding_multiplier", default=1),
        logit_scale=1 / logits,
    )
    scale = config.ratio("residual_multiplier", default=1)
    return stacked(kin.text, layers, decoder, scale=scale)


@dataclass(frozen=True, slots=True)
class _Called:
    """A block that is in the text already, with the sizes of its call."""

    name: str

    def write(self, text: ModelText, kind: str = "") -> str:
        """Its name."""
        return self.name


_NEMOTRON_KEYS = Mamba2Keys(
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "chunk_size",
    "use_bias",
    "use_conv_bias",
)


def read_nemotron_h(config: Config) -> ModelText:
    """Nemotron-H (arXiv 2504.03624): one block a layer, by a word: M for Mamba-2, * for attention
    without positions, - for a feed-forward block, E for experts."""
    sizes = Sizes(4096, 21504, 52, 32, 131072, 8192, groups=8, dim=128)
    kin = Kin(config, "Nemotron-H", sizes, dim_keys=("head_dim", "attention_head_dim"))
    mamba = read_mamba2(config, kin.text, _NEMOTRON_KEYS, heads=128, groups=8, norm="groups")
    mamba = replace(mamba, bias=mamba.bias or kin.flag("mamba_proj_bias"))
    config.only("mamba_hidden_act", "silu")
    config.skip("num_logits_to_keep", "mamba_dt_init_floor", "rope_theta", "partial_rotary_factor")
    config.skip("mamba_ssm_cache_dtype", "sliding_window", "attn_layer_indices")
    act = config.word("mlp_hidden_act", among=("relu2", "silu", "gelu"), default="relu2")
    plain = FeedForward(act, gated=False, bias=kin.flag("mlp_bias"))
    biased = kin.flag("attention_bias")
    blocks: dict[str, Place] = {
        "M": ("mamba", "ssm", mamba),
        "*": ("attention", "attn", Attention(qkv_bias=biased, out_bias=biased, rope=None)),
        "-": ("mlp", "ffn", plain),
    }
    word = _pattern(config, kin.count)
    if "E" in word:
        blocks["E"] = ("moe", "ffn", _nemotron_experts(kin, act))
    else:
        config.skip(*_NEMOTRON_EXPERTS)
    return stacked(kin.text, [[blocks[c]] for c in word], Decoder(tied=kin.tied()))


_NEMOTRON_EXPERTS = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "moe_shared_expert_intermediate_size",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
)


def _nemotron_experts(kin: Kin, act: str) -> Block:
    """Experts without a gate, chosen as DeepSeek-V3 does; one shared block with its own width."""
    config = kin.config
    mixture = kin.experts(count=8, top=2, inner=7688, activation=act)
    normalize = ["normalize"] if kin.flag("norm_topk_prob", True) else []
    route = ("scores = sigmoid", *normalize, *kin.weights(), *kin.groups())
    shared = None
    if config.count("n_shared_experts", default=1):
        kin.size("F_shared", "moe_shared_expert_intermediate_size", default=7688)
        shared = FeedForward(act, gated=False)
    return replace(mixture, route=route, choice_bias=True, gated=False, shared=shared)


def _pattern(config: Config, count: int) -> str:
    """The layers, one letter each."""
    word = config.text("hybrid_override_pattern")
    if len(word) != count:
        raise config.refuse(
            "hybrid_override_pattern", f"has {len(word)} letters, expected {count}: one a layer"
        )
    wrong = sorted(set(word) - set("M*-E"))
    if wrong:
        raise config.wrong("hybrid_override_pattern", "a word of the letters M, *, - and E")
    return word


# -- Falcon-H1 -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _KeyScaled(Attention):
    """Attention whose keys are multiplied by a number."""

    key_scale: Fraction = ONE

    def _projected(self, body: Body, out: str, heads: str, letter: str) -> str:
        if out != "k" or self.key_scale == 1:
            return Attention._projected(self, body, out, heads, letter)
        k = Attention._projected(self, body, out, heads, letter)
        return body.steps("ks", k, scaled(self.key_scale))


@dataclass(frozen=True, slots=True)
class _ScaledMlp:
    """A gated feed-forward block whose gate and whose result are multiplied by numbers."""

    gate: Fraction
    down: Fraction
    activation: str
    bias: bool

    def write(self, text: ModelText, kind: str = "") -> str:
        """Add the block; its name."""
        body = Body()
        g = body.steps("g", "%x", [*self._up(body, "gate"), *scaled(self.gate), "stg.silu({})"])
        u = body.steps("u", "%x", self._up(body, "up"))
        steps = [f'stg.einsum["bsf,fd->bsd"]({{}}, {body.param("w_down", "F, D")})']
        if self.bias:
            steps.append(f'stg.add["bsd,d->bsd"]({{}}, {body.param("b_down", "D")})')
        m = body.let("m", f"stg.mul({g}, {u})")
        body.do(f"stg.return({body.steps('y', m, [*steps, *scaled(self.down)])})")
        return text.function(joined(kind, "mlp"), "%x", body)

    def _up(self, body: Body, name: str) -> list[str]:
        steps = [f'stg.einsum["bsd,df->bsf"]({{}}, {body.param(f"w_{name}", "D, F")})']
        if self.bias:
            steps.append(f'stg.add["bsf,f->bsf"]({{}}, {body.param(f"b_{name}", "F")})')
        return steps


@dataclass(frozen=True, slots=True)
class _Branches(Layer):
    """A layer whose branches read one norm, each times a number before and behind; then a
    feed-forward block. `parts` is that block alone."""

    branches: tuple[tuple[str, str, Fraction, Fraction], ...] = ()

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`; the result's name."""
        n = RMS.write(body, "n", x, "norm")
        made = [x]
        for name, block, before, behind in self.branches:
            steps = [*scaled(before), f"stg.call @{block}({{}})", *scaled(behind)]
            made.append(body.steps(name, n, steps))
        r = body.let("r1", f"stg.add({', '.join(made)})")
        return body.let("r2", f"stg.add({r}, {self.parts[0].write(body, r, 2)})")


def read_falcon_h1(config: Config) -> ModelText:
    """Falcon-H1 (arXiv 2507.22448): Mamba-2 and attention side by side in each layer, multipliers
    everywhere."""
    sizes = Sizes(4096, 14336, 32, 32, 128000, 8192, groups=8)
    kin = Kin(config, "Falcon-H1", sizes)
    text = kin.text
    inner = config.size("mamba_d_ssm", default=1024)
    normed = kin.flag("mamba_rms_norm", False)
    mamba = read_mamba2(
        config,
        text,
        PREFIXED,
        heads=128,
        state=256,
        norm="groups" if normed else "none",
        inner=inner,
    )
    if (text.symbols["H_m"].value or 1) * (text.symbols["P"].value or 1) != inner:
        raise config.refuse("mamba_d_ssm", f"is {inner}, not mamba_n_heads * mamba_d_head")
    config.only("mamba_norm_before_gate", False)
    config.only("mamba_use_mlp", True)
    config.only("attn_layer_indices")
    config.skip("num_logits_to_keep")
    mamba = replace(mamba, scales=_multipliers(config, "ssm_multipliers", 5))
    biased = kin.flag("attention_bias")
    attention = _KeyScaled(
        qkv_bias=biased,
        out_bias=biased,
        rope=kin.rope(),
        key_scale=config.ratio("key_multiplier", default=1),
    )
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    mlp = _ScaledMlp(gate, down, kin.activation(), kin.flag("mlp_bias"))
    config.only("hidden_act", "silu")
    config.only("projectors_bias", config.flag("mamba_proj_bias", default=False))
    branches = (
        ("m", mamba.write(text), *_around(config, "ssm")),
        ("a", attention.write(text), *_around(config, "attention")),
    )
    layer = _Branches([Part(mlp.write(text), "ffn")], branches=branches)
    decoder = Decoder(
        tied=kin.tied(),
        embed_scale=config.ratio("embedding_multiplier", default=1),
        logit_scale=config.ratio("lm_head_multiplier", default=1),
    )
    return decoder.write(text, {"layers": layer}, ["layers"] * kin.count)


def _around(config: Config, name: str) -> tuple[Fraction, Fraction]:
    """The multipliers before and behind a branch."""
    before = config.ratio(f"{name}_in_multiplier", default=1)
    return before, config.ratio(f"{name}_out_multiplier", default=1)


def _multipliers(config: Config, key: str, count: int) -> tuple[Fraction, ...]:
    """A list of numbers, 1 each where the key is left out."""
    return config.ratios(key, length=count) or (ONE,) * count


# -- Qwen3-Next ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _GatedAttention(Attention):
    """Attention times a sigmoid of its input, for each element of each head."""

    def write(self, text: ModelText, kind: str = "") -> str:
        """Add the block; its name."""
        body = Body()
        q, k, v = (
            self._projected(body, *p) for p in (("q", "H", "h"), ("k", "G", "g"), ("v", "G", "g"))
        )
        a = body.let("a", f"stg.attention[{self.mask}]({q}, {k}, {v})")
        weight = body.param("wg", "D, H, K")
        g = body.steps(
            "g", "%x", [f'stg.einsum["bsd,dhk->bshk"]({{}}, {weight})', "stg.sigmoid({})"]
        )
        m = body.let("m", f"stg.mul({a}, {g})")
        o = body.let("o", f'stg.einsum["bshk,hkd->bsd"]({m}, {body.param("wo", "H, K, D")})')
        body.do(f"stg.return({o})")
        return text.function(joined(kind, "attention"), "%x", body)


def read_qwen3_next(config: Config) -> ModelText:
    """Qwen3-Next: gated delta nets, and every fourth layer gated attention; experts with a shared
    block that has a gate."""
    sizes = Sizes(2048, 5632, 48, 16, 151936, 32768, groups=2, dim=256)
    kin = Kin(config, "Qwen3-Next", sizes)
    text = kin.text
    values = kin.size("H_m", "linear_num_value_heads", default=32)
    keys = kin.size("G_m", "linear_num_key_heads", default=16)
    if values % keys:
        raise config.refuse("linear_num_key_heads", f"is {keys}, which does not divide {values}")
    kin.size("K_m", "linear_key_head_dim", default=128)
    kin.size("P", "linear_value_head_dim", default=128)
    kin.size("W", "linear_conv_kernel_dim", default=4)
    text.symbol("Q", 64, "tokens of a chunk, by the kernels")
    centered = replace(RMS, zero_centered=True)
    config.only("attention_bias", False)
    attention = _GatedAttention(qk_norm=centered, rope=kin.rope(partial=Fraction(1, 4)))
    normalize = kin.flag("norm_topk_prob", True)
    mixture = kin.experts(count=512, top=10, inner=512, normalize=normalize)
    kin.size("F_shared", "shared_expert_intermediate_size", default=512)
    mixture = replace(mixture, shared=FeedForward(mixture.activation), shared_gate=True)
    plain = FeedForward(mixture.activation)
    every = config.size("full_attention_interval", default=4)
    types = config.words(
        "layer_types", among=("linear_attention", "full_attention"), length=kin.count
    ) or ["linear_attention" if (i + 1) % every else "full_attention" for i in range(kin.count)]
    step = config.size("decoder_sparse_step", default=1)
    dense = config.sizes("mlp_only_layers", most=kin.count - 1)
    sparse = [(i + 1) % step == 0 and i not in dense for i in range(kin.count)]
    mixed = len(set(sparse)) > 1
    layers: list[list[Place]] = []
    for kind, is_sparse in zip(types, sparse, strict=True):
        full = kind == "full_attention"
        layers.append(
            [
                ("attention", "attn", attention) if full else ("delta", "attn", GatedDelta()),
                (
                    ("sparse" if is_sparse else "dense") if mixed else "",
                    "ffn",
                    mixture if is_sparse else plain,
                ),
            ]
        )
    decoder = Decoder(norm=centered, tied=kin.tied())
    return stacked(text, layers, decoder, norm=centered)


# -- MiniMax ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FromNormed(Layer):
    """A layer whose residual is what the norms give, or what comes in; both it and the block's
    result are multiplied by numbers, two for each part."""

    weights: tuple[tuple[Fraction, Fraction], ...] = ()
    post_norm: bool = True

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`; the result's name."""
        for number, (part, (alpha, beta)) in enumerate(
            zip(self.parts, self.weights, strict=True), 1
        ):
            n = RMS.write(body, f"n{number}", x, f"{part.name}_norm")
            kept = body.steps(f"k{number}", n if self.post_norm else x, scaled(alpha))
            steps = [f"stg.call @{part.block}({{}})", *scaled(beta)]
            made = body.steps(part.name[0], n, steps)
            x = body.let(f"r{number}", f"stg.add({kept}, {made})")
        return x


def read_minimax(config: Config) -> ModelText:
    """MiniMax-01 and -M1 (arXiv 2501.08313, 2506.13585): lightning attention, and softmax attention
    in every eighth layer; experts; the residual is the normed stream times a number."""
    sizes = Sizes(4096, 14336, 32, 32, 32000, 131072, groups=8, base=1000000)
    kin = Kin(config, "MiniMax", sizes)
    rope = kin.rope()
    if config.has("rotary_dim"):
        rope = kin.partly(rope, config.size("rotary_dim"), "rotary_dim")
    attention = Attention(rope=rope)
    kin.text.symbol("Q", config.size("block_size", default=256), "block_size")
    kin.text.notes.append("The decays of lightning attention are constants, no parameters.")
    mixture = kin.experts(count=8, top=2, inner="F")
    config.only("shared_intermediate_size", 0)
    config.only("shared_moe_mode", "sigmoid", "softmax")
    config.skip("num_logits_to_keep")
    full = _alpha_beta(config, "full_attention", "full_attn")
    linear = _alpha_beta(config, "linear_attention", "linear_attn")
    mlp = _alpha_beta(config, "mlp", "mlp")
    post_norm = kin.flag("postnorm", True)
    block = mixture.write(kin.text)
    kinds = {
        "lightning": _FromNormed(
            [Part(Lightning().write(kin.text), "attn"), Part(block, "ffn")],
            weights=(linear, mlp),
            post_norm=post_norm,
        ),
        "attention": _FromNormed(
            [Part(attention.write(kin.text), "attn"), Part(block, "ffn")],
            weights=(full, mlp),
            post_norm=post_norm,
        ),
    }
    return Decoder(tied=kin.tied()).write(kin.text, kinds, _minimax_order(config, kin.count))


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
    """What the residual and the block's result are multiplied by."""
    keys = ("alpha", "beta")
    alpha, beta = (
        config.ratio(f"layernorm_{name}_{k}", f"{short}_{k}_factor", default=1) for k in keys
    )
    return alpha, beta


# -- RWKV-7 ----------------------------------------------------------------------------------------


def read_rwkv7(config: Config) -> ModelText:
    """RWKV-7 (arXiv 2503.14456). All layers but the first blend their values with its values."""
    text, count = _begin(config, "RWKV-7", 2048, 24, 65536)
    if count < 2:
        raise config.wrong("num_hidden_layers", "at least two layers")
    d = text.symbols["D"].value or 1
    p = read_size(config, text, "P", "head_dim", "head_size", default=64)
    if d % p:
        raise config.refuse("head_dim", f"is {p}, which does not divide {d}")
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
    text.use("rwkv7", "D H_m P R_w R_a R_v R_g F")
    for name, value in (
        ("first", "stg.call @rwkv7_values(%x_v)"),
        ("layer", "stg.call @rwkv7_blend(%x_v, %v_first)"),
    ):
        text.function(name, "%h" if name == "first" else "%h, %v_first", _rwkv7_layer(value, name))
    layer = Norm("layer")
    body = Body()
    table = body.param("embed", "V, D")
    e = body.let("e", f"stg.embedding({table}, %tokens)")
    x = layer.write(body, "x", e, "embed_norm")
    body.do(f"%h0, %v0 = stg.call @first({x})")
    inner = Body()
    inner.do("%r = stg.call @layer(%h, %v_first)", "stg.yield(%r, %v_first)")
    head = "%y, %v_last = stg.repeat @layers[count = L - 1, carry = 2] (%h = %h0, %v_first = %v0) {"
    body.nested(head, inner)
    n = layer.write(body, "n", "%y", "norm")
    weight = (
        table if config.flag("tie_word_embeddings", default=False) else body.param("head", "D, V")
    )
    rule = "bsd,vd->bsv" if weight == table else "bsd,dv->bsv"
    z = body.let("z", f'stg.einsum["{rule}"]({n}, {weight})')
    logits = body.let("logits", f"stg.cast[f32]({z})")
    loss = body.let("loss", f"stg.cross_entropy[mean = B*S]({logits}, %labels)")
    body.do(f"stg.return({loss})")
    return text.train("%tokens: i32[B, S], %labels: i32[B, S]", body)


def _rwkv7_layer(value: str, name: str) -> Body:
    body = Body()
    layer = Norm("layer")
    n1 = layer.write(body, "n1", "%h", "time_norm")
    step = body.let("step", f"stg.call @rwkv7_step({n1})")
    body.let("x_v", f"stg.call @rwkv7_mix[as = v]({n1}, {step})")
    v = body.let("v", value)
    t = body.let("t", f"stg.call @rwkv7_time({n1}, {step}, {v})")
    r1 = body.let("r1", f"stg.add(%h, {t})")
    n2 = layer.write(body, "n2", r1, "channel_norm")
    c = body.let("c", f"stg.call @rwkv7_channel({n2})")
    r2 = body.let("r2", f"stg.add({r1}, {c})")
    body.do(f"stg.return({r2}, {v})" if name == "first" else f"stg.return({r2})")
    return body


FAMILIES = (
    ModelFamily("Mamba", ("mamba",), read_mamba, "selective scan"),
    ModelFamily("Falcon Mamba", ("falcon_mamba",), read_falcon_mamba, "normed step sizes, B, C"),
    ModelFamily("Mamba-2", ("mamba2",), read_mamba_2, "SSD, groups"),
    ModelFamily("Jamba", ("jamba",), read_jamba, "Mamba-1, attention, experts by periods"),
    ModelFamily("Bamba", ("bamba",), read_bamba, "Mamba-2, attention by a list"),
    ModelFamily(
        "Granite 4", ("granitemoehybrid",), read_granite_hybrid, "Mamba-2, attention, experts"
    ),
    ModelFamily("Nemotron-H", ("nemotron_h",), read_nemotron_h, "one block a layer, by a word"),
    ModelFamily("Falcon-H1", ("falcon_h1",), read_falcon_h1, "Mamba-2 beside attention"),
    ModelFamily("Qwen3-Next", ("qwen3_next",), read_qwen3_next, "delta nets, gated attention"),
    ModelFamily(
        "MiniMax", ("minimax", "minimax_text_01", "minimax_m1"), read_minimax, "lightning attention"
    ),
    ModelFamily("RWKV-7", ("rwkv7",), read_rwkv7, "token shift, generalised delta rule"),
)
