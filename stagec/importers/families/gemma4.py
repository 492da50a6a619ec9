"""Gemma 4: local and global layers with different sizes of heads, experts parallel to a dense
block, tables of tokens for each layer, and layers that reuse keys and values of earlier ones.

Gemma 3n: several streams that are predicted and corrected around each layer, a low-rank path
parallel to attention, tables of tokens for each layer, and layers that reuse keys of earlier ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import NormalDist

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.idle import gemma4_towers
from stagec.importers.common.positions import read_bases
from stagec.importers.common.sizes import read_size
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import Rope, activation_options
from stagec.importers.writing.stack import Decoder, root, write_stack
from stagec.importers.writing.text import Body, Callee, ModelText

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def read_gemma3n(config: Config) -> ModelText:
    """Gemma 3n, the text model."""
    sizes = Sizes(2048, 16384, 35, 8, 262400, 32768, groups=2, dim=256)
    model = DecoderModel(config, sizes)
    text = model.text
    config.fixed(attention_bias=False, altup_active_idx=0, altup_correct_scale=True)
    config.skip("altup_coef_clip")
    if read_size(config, text, "A", "altup_num_inputs", default=4) < 2:
        raise config.wrong("altup_num_inputs", "at least two streams")
    read_size(config, text, "R_low", "laurel_rank", default=64)
    read_size(config, text, "J", "hidden_size_per_layer_input", default=256)
    read_size(config, text, "V_own", "vocab_size_per_layer_input", default=262144)
    read_size(config, text, "W", "sliding_window", default=512)
    kinds = config.words("layer_types", among=(_LOCAL, _GLOBAL), length=model.count)
    kinds = kinds or tuple(_LOCAL if (i + 1) % 5 else _GLOBAL for i in range(model.count))
    ropes = read_bases(
        config, text, {_GLOBAL: ("theta", 1000000), _LOCAL: ("theta_local", 10000)}, nested=_LOCAL
    )
    gate = [*activation_options(model.activation("gelu_pytorch_tanh"), gated=True)]
    shares = config.ratios("activation_sparsity_pattern", length=model.count)
    few = 10 if model.count > 10 else 0
    shares = shares or (Fraction(19, 20),) * few + (Fraction(0),) * (model.count - few)
    nonzero = {share for share in shares if share}
    if len(nonzero) > 1 or not all(0 < share < 1 for share in nonzero):
        raise config.refuse(
            "activation_sparsity_pattern", "must contain 0 and at most one other share, below 1"
        )
    # the gate passes values above this quantile of a normal distribution
    above = Fraction(NormalDist().inv_cdf(float(min(nonzero)))) if nonzero else Fraction(0)
    sparse = f"above = (by = {-above.limit_denominator(10**6)})"
    layers: dict[str, SharingLayer] = {}
    order: list[str] = []
    symbols = "D F A R_low J V_own"
    for kind, share in zip(kinds, shares, strict=True):
        local = kind == _LOCAL
        mask = "causal, window = W" if local else "causal"
        heads = SharingHeads("local" if local else "global", "", ropes[kind], mask)
        options = [*heads.options(), *gate, *([sparse] if share else [])]
        used = f"{symbols} {heads.symbols}{' W' * local}"
        block = text.use("gemma3n", used, *options, function="gemma3n_layer")
        order.append(f"{heads.kind}_sparse" if share else heads.kind)
        layers[order[-1]] = SharingLayer(heads, block, ("%tokens", "%x0", "%words_norm"))
    shared = config.count("num_kv_shared_layers", default=15, most=model.count - 1)
    if shared and set(kinds[-shared - 2 : -shared]) != set(kinds):
        raise config.refuse(
            "num_kv_shared_layers", "needs a layer of each kind before the layers that share"
        )
    cap = config.ratio("final_logit_softcapping", default=30)
    decoder = Decoder(tied=model.tied(True), embed_scale=root(model.width), logit_cap=cap or None)
    body = Body()
    x, table = decoder.embed(body, "x0")
    body.param("words_norm", "J")
    x = body.let("streams", f"stg.call @gemma3n_streams({x})")
    y = write_layers(text, body, x, layers, order, shared)
    y = body.let("mean", f"stg.call @gemma3n_mean({y})")
    return decoder.end(text, body, y, table)


@reads(
    "Gemma 3n",
    "gemma3n_text",
    "gemma3n",
    features="streams that are predicted and corrected, shared keys; without towers",
)
def read_gemma3n_towers(config: Config) -> ModelText:
    """Gemma 3n whose towers, a MobileNet and a Conformer, are left out."""
    config.merge("text_config")
    config.skip("vision_config", "audio_config", "vision_soft_tokens_per_image")
    config.skip("audio_soft_tokens_per_image")
    text = read_gemma3n(config)
    text.notes.append("Left out: the towers of images and of sounds, with their parameters.")
    return replace(text, name=config.text("model_type"))


@dataclass(frozen=True, slots=True)
class SharingHeads:
    """Attention of a kind of layers; `suffix` is that of its symbols G and K. If `equal`, keys are
    also values."""

    kind: str
    suffix: str
    rope: Rope
    mask: str
    equal: bool = False

    @property
    def symbols(self) -> str:
        """The symbols that the block uses."""
        return f"H G{self.suffix} K{self.suffix} {self.rope.base}"

    def options(self) -> Iterator[str]:
        """The options of a call of the block."""
        yield from [f"{n} = {n}{self.suffix}" for n in "GK"] if self.suffix else []
        yield f"rope = ({self.rope.statics()})"
        yield f"mask = ({self.mask})"


@dataclass(frozen=True, slots=True)
class SharingLayer:
    """A layer: `mixer` maps the stream and `operands` to the stream, keys and values, and is
    followed by `network`, if there is one. If `given`, it reuses keys and values of the last layer
    of its kind that computes them."""

    heads: SharingHeads
    mixer: Callee
    operands: tuple[str, ...] = ()
    network: Callee | None = None
    beside: tuple[str, ...] = ()
    given: bool = False

    def write(self, body: Body, x: str, suffix: str = "") -> str:
        """Append the layer on `x`, and return the name of the result. Keys and values are `%k` and
        `%v` with this suffix."""
        kind, r, mixer = self.heads.kind, f"%r{suffix}", self.mixer
        operands = [x, *self.operands]
        if self.given:
            mixer, operands = mixer.with_("keys = given"), [*operands, f"%k_{kind}", f"%v_{kind}"]
        elif self.heads.equal:
            mixer = mixer.with_("keys = equal")
        results = f"{r}, %k{suffix}, %v{suffix}"
        body.do(f"{results} = stg.call @{mixer}({', '.join(operands)})")
        if self.network is None:
            return r
        operands = [r, *self.beside]
        return body.let(f"x{suffix}", f"stg.call @{self.network}({', '.join(operands)})")


@reads(
    "Gemma 4",
    "gemma4_text",
    features="heads by kind of layers, experts beside dense, shared keys and values",
)
def read_gemma4(config: Config) -> ModelText:
    """Gemma 4, the text model."""
    sizes = Sizes(2304, 9216, 30, 8, 262144, 131072, groups=4, dim=256)
    model = DecoderModel(config, sizes)
    text = model.text
    config.fixed(use_bidirectional_attention="vision", attention_bias=False)
    local, whole = _read_heads(model)
    every: tuple[str, ...] = tuple(
        _GLOBAL if (i + 1) % 6 == 0 else _LOCAL for i in range(model.count)
    )
    kinds = config.words("layer_types", among=(_LOCAL, _GLOBAL), length=model.count) or every
    kinds = (*kinds[:-1], _GLOBAL)  # as in the reference
    options = [*activation_options(model.activation("gelu_pytorch_tanh"), gated=True)]
    tables = bool(config.count("hidden_size_per_layer_input", default=256))
    if tables:
        read_size(config, text, "J", "hidden_size_per_layer_input", default=256)
        read_size(config, text, "V_own", "vocab_size_per_layer_input", default=262144)
        options.append("words")
    if model.flag("enable_moe_block"):
        _read_experts(model)
        options.append("experts")
    config.skip(
        "num_experts", "top_k_experts", "moe_intermediate_size", "vocab_size_per_layer_input"
    )
    network = text.use("gemma4", "D F M E T J V_own", *options, function="gemma4_network")
    beside = ("%tokens", "%x0", "%words_norm") if tables else ()
    cap = config.ratio("final_logit_softcapping", default=0)
    decoder = Decoder(tied=model.tied(True), embed_scale=root(model.width), logit_cap=cap or None)
    body = Body()
    x, table = decoder.embed(body, "x0")
    if tables:
        body.param("words_norm", "J")
    named = [("global" if k == _GLOBAL else "local") for k in kinds]
    layers: dict[str, SharingLayer] = {}
    for heads in (local, whole):
        mixer = text.use("gemma4", heads.symbols, *heads.options(), function="gemma4_mixer")
        layers[heads.kind] = SharingLayer(heads, mixer, network=network, beside=beside)
    shared = config.count("num_kv_shared_layers", default=0, most=model.count - 1)
    wide = model.flag("use_double_wide_mlp")
    if shared and not set(named[-shared - 2 : -shared]) == set(named):
        raise config.refuse(
            "num_kv_shared_layers", "needs a layer of each kind before the layers that share"
        )
    x = write_layers(text, body, x, layers, named, shared, wide=wide)
    return decoder.end(text, body, x, table)


def write_layers(
    text: ModelText,
    body: Body,
    x: str,
    layers: Mapping[str, SharingLayer],
    order: Sequence[str],
    shared: int,
    *,
    wide: bool = False,
) -> str:
    """Append layers of these kinds in this order, and return the name of the result. The last
    `shared` layers reuse the keys and values of the last layers of each kind before them, which
    are then written separately."""
    own = order[: len(order) - shared]
    heads = [layers[name].heads.kind for name in order]
    if shared and set(heads[-shared - 2 : -shared]) != set(heads):
        message = f"{shared} layers share keys and values, but not all kinds of layers precede them"
        raise ValueError(message)
    last = [len(own) - 1 - heads[: len(own)][::-1].index(k) for k in set(heads)] if shared else []
    kept = min(last, default=len(own))
    if kept:
        kinds = {name: layers[name] for name in dict.fromkeys(own[:kept])}
        x = write_stack(text, body, x, kinds, own[:kept], out="x1" if shared else "y")
    if not shared:
        return x
    for name in own[kept:]:
        x = layers[name].write(body, x, f"_{layers[name].heads.kind}")
    rest = order[len(own) :]
    takers: dict[str, SharingLayer] = {}
    for name in dict.fromkeys(rest):
        layer = replace(layers[name], given=True)
        if wide and layer.network:
            layer = replace(layer, network=layer.network.with_("F = 2*F"))
        takers[f"shared_{name}"] = layer
    return write_stack(text, body, x, takers, [f"shared_{k}" for k in rest], name="shared")


def _read_heads(model: DecoderModel) -> tuple[SharingHeads, SharingHeads]:
    """Attention of local and of global layers."""
    config, text = model.config, model.text
    kinds = {_LOCAL: ("theta_local", 10000), _GLOBAL: ("theta", 1000000)}
    ropes = read_bases(config, text, kinds, share=Fraction(1, 4))
    size = config.size("sliding_window", default=512, most=1 << 30)
    text.symbol("W", size, "sliding_window")
    equal = model.flag("attention_k_eq_v")
    wide, groups = config.size("global_head_dim", default=512), 0
    number = config.size("num_global_key_value_heads", default=model.groups_of_heads)
    groups = number if equal else model.groups_of_heads
    each = config.section("per_layer_config")
    if each is not None:
        sections = [each.section(name) for name in each.members]
        pairs = {
            (
                inner.size("head_dim", default=wide),
                inner.size("num_key_value_heads", default=model.groups_of_heads),
            )
            for inner in sections
            if inner is not None
        }
        if len(pairs) > 1:
            raise config.refuse("per_layer_config", "differs between layers of one kind")
        for pair in pairs:
            wide, groups = pair
    config.divides("num_global_key_value_heads", groups, model.heads, "heads")
    text.symbol("K_global", wide, "global_head_dim")
    text.symbol("G_global", groups, "heads of keys and values of global layers")
    return (
        SharingHeads("local", "", ropes[_LOCAL], "causal, window = W"),
        SharingHeads("global", "_global", ropes[_GLOBAL], "causal", equal),
    )


def _read_experts(model: DecoderModel) -> None:
    """Declare the sizes of experts."""
    read_size(model.config, model.text, "E", "num_experts")
    top = read_size(model.config, model.text, "T", "top_k_experts")
    if top > model.text.value("E"):
        raise model.config.refuse(
            "top_k_experts", f"is {top}, but there are only {model.text.value('E')} experts"
        )
    read_size(model.config, model.text, "M", "moe_intermediate_size")


@reads("Gemma 4 with images", "gemma4", features="towers of images and of sounds")
def read_gemma4_towers(config: Config) -> ModelText:
    """Gemma 4 with its towers, which a step of texts does not use."""
    config.merge("text_config")
    return gemma4_towers(config, read_gemma4(config))
