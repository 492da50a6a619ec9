"""DeepSeek-V4: attention to keys that are compressed from several tokens, and residual streams that
layers mix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.positions import read_scaling
from stagec.importers.common.sizes import read_size
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, Experts
from stagec.importers.writing.stack import Decoder, write_stack
from stagec.importers.writing.text import Body, Callee, ModelText

#: Kinds of layers by the names of transformers, and by the tokens of a row.
_KINDS = {
    "sliding_attention": "local",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
}
_ROWS = {"local": "no", "sparse": "sparse", "heavy": "heavy"}
_RATES = {"sparse": ("compress_rate_csa", 4), "heavy": ("compress_rate_hca", 128)}


@dataclass(frozen=True, slots=True)
class StreamLayer:
    """A layer on N streams: each part reads one value of them, and writes its result to all.
    `weights` are the static parameters of the weights."""

    text: ModelText
    parts: Sequence[tuple[str, Callee]]
    weights: str

    def write(self, body: Body, x: str) -> str:
        """Append the layer on the streams `x`, and return the name of the result."""
        for number, (name, block) in enumerate(self.parts, 1):
            given = (f"weights = ({self.weights})", f"as = {name}_streams")
            read = self.text.use("streams", "D N", *given, function="read_streams")
            write = self.text.use("streams", "N", function="write_streams")
            made = f"%x{number}, %write{number}, %mix{number}"
            body.do(f"{made} = stg.call @{read}({x})")
            n = RMS.write(body, f"n{number}", f"%x{number}", f"{name}_norm")
            y = body.call(name[0], block, n)
            x = body.call(f"h{number}", write, x, y, f"%write{number}", f"%mix{number}")
        return x


def write_streams(
    text: ModelText, kinds: Mapping[str, StreamLayer], order: Sequence[str], decoder: Decoder
) -> ModelText:
    """Add the main function of a decoder whose layers work on N streams."""
    body = Body()
    x, table = decoder.embed(body, "x")
    x = body.call("streams", text.use("streams", "N", function="streams_of"), x)
    x = write_stack(text, body, x, kinds, order)
    y = body.call("sum", text.use("streams", "D N", function="sum_streams"), x)
    return decoder.end(text, body, y, table)


@reads(
    "DeepSeek-V4",
    "deepseek_v4",
    "deepseek_ref",
    features="keys compressed from several tokens, residual streams that layers mix",
)
def read_deepseek_v4(config: Config) -> ModelText:
    """DeepSeek-V4: windows, and rows of 4 tokens that an indexer selects or all rows of 128 tokens,
    by layer; four residual streams; experts by the root of a softplus, beside a shared one."""
    config.fixed(num_key_value_heads=1)
    config.only("attention_bias", False)
    config.skip("expert_dtype", "hc_eps", "intermediate_size")
    sizes = Sizes(4096, -1, 43, 64, 129280, 1 << 20, groups=1, dim=512)
    model = DecoderModel(config, sizes)
    text = model.text
    kinds = _kinds(model)
    rope = _read_attention(model)
    if "sparse" in kinds:
        text.notes.append("The loss does not reach indexers: their parameters are frozen.")
    mixture = _experts(model)
    text.symbol("N", config.size("hc_mult", default=4), "hc_mult")
    weights = f"iterations = {config.size('hc_sinkhorn_iters', default=20)}"
    layers: dict[str, StreamLayer] = {}
    for kind in dict.fromkeys(kinds):
        used = "D G_o H_o K R Q W U" + (f" M_{kind}" if kind != "local" else "")
        used += " H_i J N_keys" * (kind == "sparse")
        options = [f"rows = {_ROWS[kind]}"] * (kind != "local")
        options += [f"rope = ({rope[kind != 'local']})"]
        block = text.use("compressed", used, *options)
        layers[kind] = StreamLayer(text, [("attn", block), ("ffn", mixture.write(text))], weights)
    return write_streams(text, layers, kinds, Decoder(tied=model.tied()))


def _kinds(model: DecoderModel) -> list[str]:
    """The kind of each layer, by `layer_types` or the tokens of its rows; declares these."""
    config, text = model.config, model.text
    section, rates = config.section("compress_rates"), dict[int, str]()
    for key, kind in _KINDS.items():
        if kind in _RATES:
            name, few = _RATES[kind]
            rate = config.size(name, default=few)
            rate = section.size(key, default=rate) if section else rate
            if rate in rates and config.has("compress_ratios"):
                raise config.refuse(
                    "compress_ratios",
                    "does not say which layers have an indexer, as both kinds have rows of as many "
                    "tokens",
                )
            rates[rate] = kind
            text.symbol(f"M_{kind}", rate, "tokens of a row")
    if section is not None:
        section.skip("sliding_attention")
        section.finish()
    config.shorten(model.count, "layer_types", "compress_ratios", "mlp_layer_types")
    types = config.kinds("layer_types", names=_KINDS, length=model.count)
    ratios = config.sizes("compress_ratios", length=model.count)
    if unknown := set(ratios) - {0, *rates}:
        expected = ", ".join(map(str, sorted({0, *rates})))
        raise config.refuse("compress_ratios", f"has {min(unknown)}: expected {expected}")
    usual = ["sparse" if i > 1 and i % 2 else "heavy" for i in range(model.count)]
    return [*types] or [{0: "local", **rates}[ratio] for ratio in ratios] or usual


def _read_attention(model: DecoderModel) -> tuple[str, str]:
    """Declare the sizes of attention. Returns the static parameters of the rotation in layers with
    a window only, and in others, whose frequencies alone are stretched, without a factor."""
    config, text = model.config, model.text
    read_size(config, text, "Q", "q_lora_rank", default=1024)
    read_size(config, text, "W", "sliding_window", default=128)
    groups = read_size(config, text, "G_o", "o_groups", default=8)
    config.divides("o_groups", groups, model.heads, "heads")
    text.symbol("H_o", model.heads // groups, "num_attention_heads / o_groups")
    read_size(config, text, "U", "o_lora_rank", default=1024)
    for symbol, key, default in (
        ("H_i", "index_n_heads", 64),
        ("J", "index_head_dim", 128),
        ("N_keys", "index_topk", 512),
    ):
        read_size(config, text, symbol, key, default=default)
    parameters = config.section("rope_parameters")
    nested = [parameters.section(k) if parameters else None for k in ("main", "compress")]
    bases = ("theta", "rope_theta", 10000), ("theta_rows", "compress_rope_theta", 160000)
    for (symbol, key, default), inner in zip(bases, nested, strict=True):
        base = config.size(key, default=default, most=1 << 60)
        base = inner.size("rope_theta", default=base, most=1 << 60) if inner else base
        text.symbol(symbol, base, key)
    share = config.ratio("partial_rotary_factor", default=Fraction(64, 512))
    share = nested[0].ratio("partial_rotary_factor", default=share) if nested[0] else share
    rotated = config.size("qk_rope_head_dim", default=int(share * model.dim))
    if rotated % 2 or rotated > min(model.dim, text.value("J")):
        most = min(model.dim, text.value("J"))
        raise config.wrong("qk_rope_head_dim", f"an even number of at most {most}")
    text.symbol("R", rotated, "rotated elements of a head")
    scaled = "".join(
        read_scaling(section, config, text)
        for section in (nested[1] or parameters, config.section("rope_scaling"))
        if section
    )
    if nested[0] is not None:
        read_scaling(nested[0], config, text)
    if nested[1] is not None and parameters is not None:
        parameters.skip("rope_theta", "rope_type", "partial_rotary_factor")
        parameters.finish()
    if "yarn" in scaled and "mscale" not in scaled:
        scaled += ", mscale = 0"
    return "base = theta", ", ".join(filter(None, ["base = theta_rows", scaled]))


def _experts(model: DecoderModel) -> Experts:
    """Experts by scores with a bias; the first layers choose them by a table of tokens, with the
    same work."""
    config = model.config
    mixture = model.experts(count=256, top=6, inner=2048)
    config.only("topk_method", "noaux_tc")
    among = ("sqrtsoftplus", "softmax", "sigmoid")
    scores = config.word("scoring_func", among=among, default="sqrtsoftplus")
    config.only("norm_topk_prob", True)
    types = config.words("mlp_layer_types", among=("hash_moe", "moe"), length=model.count)
    hashed = config.count("num_hash_layers", default=3)
    if types.count("hash_moe") if types else hashed:
        note = "Left out: tables by which the first layers choose the experts of a token."
        model.text.notes.append(note)
    number = config.count("n_shared_experts", default=1)
    limit = config.ratio("swiglu_limit", default=10)
    bounds = (f"limit = {limit}",) if limit else ()
    shared = model.shared(number, "n_shared_experts") if number else None
    route = (*([f"scores = {scores}"] if scores != "softmax" else []), "normalize")
    route = (*route, *model.weights(Fraction("1.5")))
    shared = replace(shared, bounds=bounds) if shared else None
    return replace(mixture, route=route, choice_bias="state", statics=bounds, shared=shared)
