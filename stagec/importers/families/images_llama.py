"""Llama 3.2 Vision with images in the step (`stagec import --images`): some layers of the language
model have gated attention to the results of a tower for tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.sizes import read_size
from stagec.importers.families.encoders import read_activation, read_heads_of
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, RMS, Attention, FeedForward
from stagec.importers.writing.stack import Decoder, Layer, Sublayer, write_stack
from stagec.importers.writing.text import Body, Callee, ModelText
from stagec.importers.writing.towers import MultiHead

_INDICES = (3, 7, 15, 23, 30)


def _tiles(text: ModelText, function: str, *given: str, symbols: str = "D_v E_v") -> Callee:
    return text.use("tiles", symbols, *given, function=function)


@dataclass(frozen=True, slots=True)
class _Gated(Layer):
    """A layer whose parts are multiplied by a `gate` before they are added to the stream."""

    gate: Callee = field(kw_only=True)

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`, and return the name of the result."""
        for number, part in enumerate(self.parts, 1):
            a = part.write(body, x, number)
            a = body.call(f"g{number}", self.gate.with_(f"as = {part.name}_gate"), a)
            x = body.let(f"r{number}", f"stg.add({x}, {a})")
        return x


def read_mllama_images(config: Config) -> ModelText:
    """Llama 3.2 Vision with an image of X_v tiles for each sequence: S tokens of text, and layers
    that attend to the X_v*(E_v^2 + 1) outputs of the tower."""
    vision = config.needed("vision_config")
    config.merge("text_config")
    config.only("tie_word_embeddings", False)
    crossed = config.sizes("cross_attention_layers")
    model = DecoderModel(config, Sizes(4096, 14336, 40, 32, 128256, 131072, groups=8))
    text = model.text
    if any(layer >= model.count for layer in crossed) or len(set(crossed)) < len(crossed):
        message = f"must be different layers below {model.count}"
        raise config.refuse("cross_attention_layers", message)
    block = FeedForward(model.activation()).write(text)
    kinds = {
        "layers": Layer(
            [Sublayer(Attention(rope=model.rope()).write(text), "attn"), Sublayer(block, "ffn")]
        )
    }
    if crossed:
        seen = Attention(qk_norm=RMS, rope=None, mask="", crossed=True)
        cross = Sublayer(seen.write(text), "attn", operands=["%images"])
        kinds["cross"] = _Gated([cross, Sublayer(block, "ffn")], gate=_tiles(text, "tanh_gate"))
    order = ["cross" if i in crossed else "layers" for i in range(model.count)]
    parts = _read_tower(vision, text)
    body = Body()
    _write_tower(vision, text, body, parts)
    table = body.param("embed", "V + 8, D")
    x = body.let("x", f"stg.embedding({table}, %tokens)")
    y = write_stack(text, body, x, {k: v for k, v in kinds.items() if k in order}, order)
    vision.finish()
    text.notes.append("%tiles are parts of an image, %aspects the number of their arrangement.")
    labels = "B" if text.head == "class" else "B, S"
    args = (
        "%tiles: bf16[B, X_v, C, E_v*P, E_v*P], %aspects: i32[B],\n"
        f"                   %tokens: i32[B, S], %labels: i32[{labels}]"
    )
    return Decoder().end(text, body, y, table, args)


def _read_tower(vision: Config, text: ModelText) -> Sequence[int]:
    """Declare the sizes of the tower, and return the layers whose inputs are also outputs."""
    read_size(vision, text, "D_v", "hidden_size", default=1280)
    read_heads_of(vision, text, "_v", "attention_heads", 16)
    read_size(vision, text, "F_v", "intermediate_size", default=5120)
    count = vision.layers("num_hidden_layers", default=32)
    read_size(vision, text, "C", "num_channels", default=3)
    patch = read_size(vision, text, "P", "patch_size", default=14)
    side = vision.size("image_size", default=448) // patch
    text.symbol("E_v", side, "patches along a side: image_size / patch_size")
    read_size(vision, text, "X_v", "max_num_tiles", default=4)
    ratios = vision.lists("supported_aspect_ratios")
    text.symbol("A_v", 1 + (ratios or 8), "supported_aspect_ratios, and none")
    count_global = vision.layers("num_global_layers", default=8)
    text.symbol("L_global", count_global, "num_global_layers")
    kept = vision.sizes("intermediate_layers_indices", most=count - 1)
    kept = kept or tuple(min(i, count - 1) for i in _INDICES)
    if list(kept) != sorted(kept):
        raise vision.refuse("intermediate_layers_indices", "must be in increasing order")
    width = (1 + len(kept)) * text.value("D_v")
    vision.only("vision_output_dim", width)
    vision.skip("norm_eps")
    return [*kept, count]


def _write_tower(vision: Config, text: ModelText, body: Body, kept: Sequence[int]) -> None:
    """Append the tower and the projector: `%images` [B, X_v*(E_v^2 + 1), D]."""
    mlp = FeedForward(read_activation(vision, "hidden_act"), gated=False, bias=True)
    attention = MultiHead("", name="tile_attention", wide=True).write(text, "H_v")
    parts = [
        Sublayer(attention.with_("D = D_v", "H = H_v", "K = K_v"), "attn", LAYER, width="D_v"),
        Sublayer(mlp.write(text).with_("D = D_v", "F = F_v"), "mlp", LAYER, width="D_v"),
    ]
    tower, projector = Body(), Body()
    symbols = "C P D_v A_v E_v X_v"
    h = tower.call("v0", _tiles(text, "tiles_joined", symbols=symbols), "%tiles", "%aspects")
    layer = Layer(parts)
    streams: list[str] = []
    before = 0
    for number, end in enumerate(kept, 1):
        if end > before:
            name = f"tiles{number}"
            text.symbol(f"L_{name}", end - before, f"layers {before} to {end - 1} of the tower")
            order = [name] * (end - before)
            h = write_stack(text, tower, h, {name: layer}, order, out=f"v{number}")
        before = end
        streams.append(h)
    *inner, h = streams
    h = tower.call("all", _tiles(text, "tiles_between"), h, "%aspects")
    kinds, order = {"global": _Gated(parts, gate=_tiles(text, "tanh_gate"))}, ["global"]
    h = write_stack(text, tower, h, kinds, order * text.value("L_global"), out="seen")
    rows = _tiles(text, "tile_rows")
    every = [tower.call(f"u{i}", rows, s) for i, s in enumerate([h, *inner])]
    u = tower.let("u", f"stg.concat[dim = 3]({', '.join(every)})")
    text.scope(body, "vision", "%tiles, %aspects", tower, u)
    product = _tiles(text, "tile_projector", f"U = {len(every)}*D_v", symbols="D D_v")
    text.scope(body, "projector", u, projector, projector.call("images0", product, u))
    body.let("images", 'stg.reshape["bsd->bsd"](%images0)')  # a part may end here
