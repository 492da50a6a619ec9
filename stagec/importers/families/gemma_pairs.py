"""T5Gemma: an encoder and a decoder of layers of Gemma 2, which may differ in size."""

from dataclasses import dataclass

from stagec.importers.common.positions import read_scaling
from stagec.importers.common.sizes import begin, expect_head
from stagec.importers.families.encoders import PAIRS, translate
from stagec.importers.families.windows import GEMMA_NORM, read_softcap
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import ACTIVATIONS, Attention, FeedForward, Rope
from stagec.importers.writing.stack import Layer, Sublayer, root, scaled, times, write_stack
from stagec.importers.writing.text import Body, Callee, ModelText

_SIZES = {
    "D": ("hidden_size", 2304),
    "H": ("num_attention_heads", 8),
    "G": ("num_key_value_heads", 4),
    "K": ("head_dim", 256),
    "F": ("intermediate_size", 9216),
    "V": ("vocab_size", 256000),
}
_GATE = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class _Side:
    """The encoder or the decoder: its name, keys and symbols by those of the encoder; `causal` are
    the static parameters of a causal mask, and `scores` those of all scores."""

    name: str
    config: Config
    symbols: dict[str, str]
    kinds: list[str]
    rope: Rope
    causal: str
    scores: str
    window: str

    @property
    def given(self) -> list[str]:
        """The sizes of a call."""
        return [f"{n} = {own}" for n, own in self.symbols.items() if n != own and n in "DK"]

    def attention(self, text: ModelText, mask: str) -> Callee:
        """Attention with this mask; without one to the encoder."""
        options = ", ".join(filter(None, [mask, self.scores]))
        crossed = not mask and bool(self.causal)
        symbols = self.symbols
        block = Attention(
            groups=symbols["G"],
            heads=symbols["H"],
            rope=None if crossed else self.rope,
            mask=options,
            crossed=crossed,
        )
        text.used.update(symbols.values())
        wide = crossed and symbols["D"] != "D"
        return block.write(text).with_(*self.given, *["keys_width = D_source"] * wide)

    def write(self, text: ModelText, body: Body, x: str, e: str = "") -> str:
        """Append the layers and the last norm; `e` is the result of the encoder."""
        symbols, width = self.symbols, self.symbols["D"]
        act = self.config.word("hidden_activation", "hidden_act", among=ACTIVATIONS, default=_GATE)
        network = FeedForward(act, width=symbols["F"]).write(text)
        network = network.with_(*[f"D = {width}"] * (width != "D"))
        layers: dict[str, Layer] = {}
        for kind in dict.fromkeys(self.kinds):
            masks = [self.causal, f"window = {self.window}" if kind == "local" else ""]
            own = self.attention(text, ", ".join(filter(None, masks)))
            blocks: list[tuple[str, Callee, tuple[str, ...]]] = [("attn", own, ())]
            if e:
                source = ["D_source = D"] if width != "D" else []
                cross = self.attention(text, "").with_(*source, "as = cross_attention")
                blocks.append(("cross", cross, (e,)))
            blocks.append(("ffn", network, ()))
            parts = [
                Sublayer(block, part, GEMMA_NORM, GEMMA_NORM, width=width, operands=more)
                for part, block, more in blocks
            ]
            layers[f"{self.name}_{kind}" if kind else self.name] = Layer(parts)
        order = [f"{self.name}_{kind}" if kind else self.name for kind in self.kinds]
        y = write_stack(text, body, x, layers, order, name=self.name, out=f"{self.name}_y")
        return GEMMA_NORM.write(body, f"{self.name}_n", y, f"{self.name}_norm", width)


def _read_side(config: Config, text: ModelText, name: str, more: str) -> _Side:
    """Declare the sizes of a side, with the suffix `more` where they differ from those before."""
    symbols: dict[str, str] = {}
    for symbol, (key, default) in _SIZES.items():
        value = config.size(key, default=default)
        symbols[symbol] = _own(text, symbol, value, more, f"{key} of the {name}")
    config.divides(
        "num_key_value_heads", text.value(symbols["G"]), text.value(symbols["H"]), "heads"
    )
    count = config.layers("num_hidden_layers", default=26)
    longest = config.size("max_position_embeddings", default=8192)
    config.fixed(attention_bias=False)
    config.skip("cross_attention_hidden_size", "tie_word_embeddings", "is_decoder")
    config.skip("sliding_window_size")
    base = config.size("rope_theta", default=10000, most=1 << 60)
    scaling = ""
    parameters = config.section("rope_parameters")
    if parameters is not None:
        base = parameters.size("rope_theta", default=base, most=1 << 60)
        scaling = read_scaling(parameters, config, text)
    theta = _own(text, "theta", base, more, "rope_theta")
    window = config.count("sliding_window", default=4096, most=1 << 30)
    names = {"full_attention": "global", "sliding_attention": "local"}
    kinds = [*config.kinds("layer_types", names=names, length=count)]
    kinds = kinds or ["global" if i % 2 else "local" for i in range(count)]
    if window >= longest or "local" not in kinds:
        kinds = [""] * count
    own = _own(text, "W", window, more, "sliding_window") if "local" in kinds else ""
    scalar = config.positive("query_pre_attn_scalar", default=256)
    cap = read_softcap(config, "attn", 50)
    scores = [f"rsqrt = {scalar}"] if scalar != text.value(symbols["K"]) else []
    scores += [f"softcap = {cap}"] if cap else []
    causal = "causal" if name == "decoder" else ""
    rope = Rope(theta, scaling=scaling)
    return _Side(name, config, symbols, kinds, rope, causal, ", ".join(scores), own)


def _own(text: ModelText, symbol: str, value: int, more: str, about: str) -> str:
    """Declare a size of a side, with the suffix `more` if the other side has another one."""
    known = text.symbols.get(symbol)
    own = symbol if known is None or known.value == value else f"{symbol}{more}"
    return text.symbol(own, value, about)


@reads("T5Gemma", "t5gemma", features="encoder and decoder of Gemma 2")
def read_t5gemma(config: Config) -> ModelText:
    """T5Gemma (arXiv 2504.06225): layers of Gemma 2 that see both sides, and a decoder with cross
    attention; each has a table of its own, and the head may use that of the decoder."""
    expect_head(config, "ConditionalGeneration")
    config.fixed(is_encoder_decoder=True)
    config.skip("vocab_size", "classifier_dropout_rate", "dropout_rate")
    sections = {name: config.needed(name) for name in ("encoder", "decoder")}
    length = "max_position_embeddings"
    longest = [s.size(length, default=8192, most=1 << 30) for s in sections.values()]
    text, _ = begin(config, longest[0])
    text.symbol("T", min(longest[-1], 4096), "tokens of a target")
    text.sequences = ("S", "T")
    sides = [
        _read_side(section, text, name, more)
        for (name, section), more in zip(sections.items(), ("", "_2"), strict=True)
    ]
    body, e = Body(), ""
    table = ""
    for side, tokens in zip(sides, ("%tokens", "%targets"), strict=True):
        width = side.symbols["D"]
        table = body.param(f"{side.name}_embed", f"{side.symbols['V']}, {width}")
        steps = [f"stg.embedding({table}, {{}})", *scaled(root(text.value(width)))]
        x = body.steps(f"{side.name}_x", tokens, steps)
        e = side.write(text, body, x, e)
    last = sides[-1]
    tied = config.flag("tie_word_embeddings", default=True)
    head = table if tied else body.param("head", f"{last.symbols['V']}, {last.symbols['D']}")
    cap = read_softcap(last.config, "final", 30)
    read_softcap(sides[0].config, "final", 30)
    steps = [f'stg.einsum["bsd,vd->bsv"]({{}}, {head})']
    if cap:
        steps += [f"stg.scale[{times(1 / cap)}]({{}})", "stg.tanh({})"]
        steps += [f"stg.scale[{times(cap)}]({{}})"]
    translate(body, e, steps)
    for section in sections.values():
        section.finish()
    return text.train(PAIRS, body)
