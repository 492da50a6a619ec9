"""Llama 3.2 Vision whose step takes images (`stagec import --images`): some layers of the language
model attend to what a tower makes of tiles, behind gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stagec.importers.common.kin import Kin, Sizes
from stagec.importers.common.sizes import read_size
from stagec.importers.families.encoders import read_activation, read_heads_of
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, RMS, Attention, FeedForward
from stagec.importers.writing.stack import Decoder, Layer, Part, write_stack
from stagec.importers.writing.text import Body, Callee, ModelText
from stagec.importers.writing.towers import MultiHead

#: The tower pads the rows of a tile to a multiple of so many.
_ROWS = 8
#: Rows of a tile: its patches and a class token.
_TILE = "E_v*E_v + 1"
_PADDED = f"{_ROWS}*ceildiv({_TILE}, {_ROWS})"
_INDICES = (3, 7, 15, 23, 30)


def gated(body: Body, out: str, x: str, gate: str, rule: str = "bsd") -> str:
    """Append x times the tanh of a scalar parameter; the result's name."""
    g = body.let(f"{out}_g", f"stg.tanh({body.param(gate, '')})")
    return body.let(out, f'stg.einsum["{rule},->{rule}"]({x}, {g})')


@dataclass(frozen=True, slots=True)
class _Gated(Layer):
    """A layer each part of which is gated before it is added to the stream."""

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`; the result's name."""
        for number, part in enumerate(self.parts, 1):
            a = part.write(body, x, number)
            a = gated(body, f"g{number}", a, f"{part.name}_gate")
            x = body.let(f"r{number}", f"stg.add({x}, {a})")
        return x


def read_mllama_images(config: Config) -> ModelText:
    """Llama 3.2 Vision with an image of X_v tiles for each sequence: S tokens of words, and layers
    that attend to the X_v*(E_v^2 + 1) outputs of the tower."""
    vision = config.section("vision_config")
    if vision is None:
        raise config.refuse("vision_config", "is missing: expected the tower of vision")
    config.merge("text_config")
    config.only("tie_word_embeddings", False)
    crossed = config.sizes("cross_attention_layers")
    kin = Kin(config, "Llama 3.2 Vision", Sizes(4096, 14336, 40, 32, 128256, 131072, groups=8))
    text = kin.text
    if any(layer >= kin.count for layer in crossed) or len(set(crossed)) < len(crossed):
        raise config.refuse("cross_attention_layers", f"are not layers of {kin.count}")
    block = FeedForward(kin.activation()).write(text)
    kinds = {
        "layers": Layer([Part(Attention(rope=kin.rope()).write(text), "attn"), Part(block, "ffn")])
    }
    if crossed:
        seen = Attention(qk_norm=RMS, rope=None, mask="", crossed=True)
        cross = Part(seen.write(text), "attn", operands=["%images"])
        kinds["cross"] = _Gated([cross, Part(block, "ffn")])
    order = ["cross" if i in crossed else "layers" for i in range(kin.count)]
    parts = _read_tower(vision, text)
    body = Body()
    _write_tower(vision, text, body, parts)
    table = body.param("embed", "V + 8, D")
    x = body.let("x", f"stg.embedding({table}, %tokens)")
    y = write_stack(text, body, x, {k: v for k, v in kinds.items() if k in order}, order)
    Decoder().write_head(text, body, y, table)
    vision.finish()
    text.notes.append("%tiles are parts of an image, %aspects the number of their arrangement.")
    labels = "B" if text.head == "class" else "B, S"
    return text.train(
        "%tiles: bf16[B, X_v, C, E_v*P, E_v*P], %aspects: i32[B],\n"
        f"                   %tokens: i32[B, S], %labels: i32[{labels}]",
        body,
    )


def _read_tower(vision: Config, text: ModelText) -> Sequence[int]:
    """Declare the sizes of the tower; the layers whose inputs are kept."""
    read_size(vision, text, "D_v", "hidden_size", default=1280)
    read_heads_of(vision, text, "_v", "attention_heads", 16)
    read_size(vision, text, "F_v", "intermediate_size", default=5120)
    count = vision.layers("num_hidden_layers", default=32)
    read_size(vision, text, "C", "num_channels", default=3)
    patch = read_size(vision, text, "P", "patch_size", default=14)
    side = vision.size("image_size", default=448) // patch
    text.symbol("E_v", side, "patches along a side: image_size / patch_size")
    read_size(vision, text, "X_v", "max_num_tiles", default=4)
    found = vision.lists("supported_aspect_ratios")
    text.symbol("A_v", 1 + (found or 8), "supported_aspect_ratios, and none")
    count_global = vision.layers("num_global_layers", default=8)
    text.symbol("L_global", count_global, "num_global_layers")
    kept = vision.sizes("intermediate_layers_indices", most=count - 1)
    kept = kept or tuple(min(i, count - 1) for i in _INDICES)
    if list(kept) != sorted(kept):
        raise vision.refuse("intermediate_layers_indices", "are not in order: not modelled")
    width = (1 + len(kept)) * (text.symbols["D_v"].value or 1)
    vision.only("vision_output_dim", width)
    vision.skip("norm_eps")
    return [*kept, count]


def _write_tower(vision: Config, text: ModelText, body: Body, kept: Sequence[int]) -> None:
    """Append the tower and the projector: `%images` [B, X_v*(E_v^2 + 1), D]."""
    mlp = FeedForward(read_activation(vision, "hidden_act"), gated=False, bias=True)
    attention = MultiHead("", name="tile_attention").write(text, "H_v")
    parts = [
        Part(attention.with_("D = D_v", "H = H_v", "K = K_v"), "attn", LAYER, width="D_v"),
        Part(mlp.write(text).with_("D = D_v", "F = F_v"), "mlp", LAYER, width="D_v"),
    ]
    cut = 'stg.reshape["bxc(hp)(wq)->bxchpwq", factors = (p, q), sizes = (P, P)]({})'
    weight = body.param("w_patch", "C, P, P, D_v")
    steps = [
        cut,
        f'stg.einsum["bxchpwq,cpqd->bxhwd"]({{}}, {weight})',
        'stg.reshape["bxhwd->bx(hw)d"]({})',
    ]
    h = body.steps("p", "%tiles", steps)
    h = _by_arrangement(body, "pre_tile", h)
    token = body.param("class_token", "D_v")
    token = body.let("token", f'stg.broadcast["d->bxsd", sizes = (B, X_v, 1)]({token})')
    h = body.let("pc", f"stg.concat[dim = 2]({token}, {h})")
    h = LAYER.write(body, "pn", _placed(body, h), "pre_norm", "D_v")
    padded = body.let("padded", f"stg.pad[dim = 2, size = {_PADDED}]({h})")
    layer = _whole_layer(text, parts)
    h = body.let("v0", f'stg.reshape["bxnd->b(xn)d"]({padded})')
    streams: list[str] = []
    before = 0
    for number, end in enumerate(kept, 1):
        if end > before:
            name = f"tiles{number}"
            text.symbol(f"L_{name}", end - before, f"layers {before} to {end - 1} of the tower")
            order = [name] * (end - before)
            h = write_stack(text, body, h, {name: layer}, order, out=f"v{number}")
        before = end
        streams.append(h)
    *inner, h = streams
    h = LAYER.write(body, "post", h, "post_norm", "D_v")
    h = _by_arrangement(body, "post_tile", _apart(body, "post_tiles", h))
    h = body.let("all", f'stg.reshape["bxnd->b(xn)d"]({h})')
    count = text.symbols["L_global"].value or 1
    h = write_stack(text, body, h, {"global": _Gated(parts)}, ["global"] * count, out="seen")
    every = [
        body.let(f"u{i}", f"stg.slice[dim = 2, size = {_TILE}]({_apart(body, f't{i}', s)})")
        for i, s in enumerate([h, *inner])
    ]
    u = body.let("u", f"stg.concat[dim = 3]({', '.join(every)})")
    wide = f"{len(every)}*D_v"
    steps = [
        f'stg.einsum["bxnu,ud->bxnd"]({{}}, {body.param("w_projector", f"{wide}, D")})',
        f'stg.add["bxnd,d->bxnd"]({{}}, {body.param("b_projector", "D")})',
        'stg.reshape["bxnd->b(xn)d"]({})',
    ]
    body.steps("images", u, steps)


@dataclass(frozen=True, slots=True)
class _Called(Layer):
    """A layer that is a function of the text."""

    callee: Callee = field(default_factory=lambda: Callee(""))

    def write(self, body: Body, x: str) -> str:
        """Append its call on `x`; the result's name."""
        return body.let("r", f"stg.call @{self.callee}({x})")


def _whole_layer(text: ModelText, parts: Sequence[Part]) -> Layer:
    """Add a layer of these parts as a function; its call."""
    body = Body()
    body.do(f"stg.return({Layer(parts).write(body, '%h')})")
    return _Called(parts, callee=text.function("tile_layer", "%h", body))


def _apart(body: Body, out: str, x: str) -> str:
    """Append the tiles of x apart again."""
    sizes = f"factors = n, sizes = {_PADDED}"
    return body.let(out, f'stg.reshape["b(xn)d->bxnd", {sizes}]({x})')


def _by_arrangement(body: Body, name: str, x: str) -> str:
    """Append what is learned for each tile of an arrangement, behind a gate."""
    table = body.param(f"{name}_positions", "A_v, X_v*D_v")
    e = body.let(f"{name}0", f"stg.embedding({table}, %aspects)")
    e = body.let(f"{name}1", f'stg.reshape["b(xd)->bxd", factors = d, sizes = D_v]({e})')
    e = gated(body, f"{name}2", e, f"{name}_gate", "bxd")
    return body.let(name, f'stg.add["bxnd,bxd->bxnd"]({x}, {e})')


def _placed(body: Body, x: str) -> str:
    """Append learned positions: those of a tile, and of a share by the gate those of a tile in its
    arrangement: x + p + g (t - p)."""
    p = body.param("positions", f"{_TILE}, D_v")
    table = body.param("tile_positions", f"A_v, X_v*({_TILE})*D_v")
    t = body.let("tile0", f"stg.embedding({table}, %aspects)")
    cut = f'"b(xnd)->bxnd", factors = (n, d), sizes = ({_TILE}, D_v)'
    t = body.let("tile1", f"stg.reshape[{cut}]({t})")
    minus = body.let("minus", f"stg.scale[by = -1]({p})")
    delta = body.let("delta", f'stg.add["bxnd,nd->bxnd"]({t}, {minus})')
    moved = gated(body, "moved", delta, "position_gate", "bxnd")
    return body.let("placed", f'stg.add["bxnd,bxnd,nd->bxnd"]({x}, {moved}, {p})')
