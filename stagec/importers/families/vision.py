"""Encoders of images, and of images with texts: ViT, CLIP, SigLIP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagec.importers.common.idle import Idle
from stagec.importers.common.sizes import begin, read_size
from stagec.importers.families.encoders import classify, read_activation, read_heads_of
from stagec.importers.family import ModelFamily
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import ACTIVATIONS, LAYER, FeedForward, Rope
from stagec.importers.writing.text import Body, ModelText
from stagec.importers.writing.towers import (
    MultiHead,
    Tower,
    encoder,
    linear,
    patches,
    with_class_token,
    with_positions,
)

#: The suffix of the symbols of a vision tower beside a text model.
VISION = "_v"
_IMAGES = "%images: bf16[B, C, X*P, X*P]"


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """The values of keys that a tower's configuration leaves out."""

    width: int
    inner: int
    layers: int
    heads: int
    image: int = 224
    patch: int = 16


def read_images(config: Config, text: ModelText, sizes: TowerSizes) -> None:
    """Declare C, P and X: channels, elements of a patch's side, patches of an image's side."""
    read_size(config, text, "C", "num_channels", default=3)
    patch = read_size(config, text, "P", "patch_size", default=sizes.patch)
    image = config.size("image_size", default=sizes.image)
    if image < patch:
        raise config.refuse("image_size", f"is {image}, less than one patch of {patch}")
    if image % patch:
        text.notes.append(f"Images are cropped from {image} to a multiple of {patch}.")
    text.symbol("X", image // patch, "patches along a side: image_size / patch_size")


def read_tower(config: Config, text: ModelText, suffix: str, sizes: TowerSizes) -> Tower:
    """Declare D, H, K, F and L of a tower."""
    tower = Tower(suffix)
    read_size(config, text, tower["D"], "hidden_size", default=sizes.width)
    read_heads_of(config, text, suffix, "num_attention_heads", sizes.heads)
    read_size(config, text, tower["F"], "intermediate_size", default=sizes.inner)
    count = config.layers("num_hidden_layers", default=sizes.layers)
    text.symbol(tower["L"], count, "num_hidden_layers")
    return tower


# -- ViT -------------------------------------------------------------------------------------------


def read_vit(config: Config) -> ModelText:
    """ViT (arXiv 2010.11929): patches, a class token, learned positions."""
    return _vit(config, "ViT", ("class_token",))


def read_deit(config: Config) -> ModelText:
    """DeiT (arXiv 2012.12877): ViT with a second token, for distillation."""
    return _vit(config, "DeiT", ("class_token", "distillation_token"))


def _vit(config: Config, title: str, tokens: Sequence[str]) -> ModelText:
    text, _ = begin(config, title, 1)
    text.symbols.pop("S")
    sizes = TowerSizes(768, 3072, 12, 12)
    read_images(config, text, sizes)
    t = read_tower(config, text, "", sizes)
    biased = config.flag("qkv_bias", default=True)
    config.skip("encoder_stride", "pooler_output_size", "pooler_act")
    mlp = FeedForward(read_activation(config, "hidden_act"), gated=False, bias=True)
    body = Body()
    p = body.let("p", t.call(patches(text, bias=True), "D", "%images"))
    x = with_class_token(body, "xc", p, "D", tokens)
    x = with_positions(body, "x", x, f"X*X + {len(tokens)}, D")
    layers = encoder(text, MultiHead("qkvo" if biased else "o"), mlp)
    n = LAYER.write(body, "n", layers.write(body, x, "y"), "norm")
    c = body.let("c", f"stg.take[at = 0]({n})")
    heads = {name.rpartition("For")[2] for name in config.strings("architectures")}
    if any(name.endswith("Model") for name in heads):
        pooled = body.let("z", f"stg.tanh({linear(body, 'z0', c, 'pooler', 'D, D')})")
        text.notes.append("Its image vectors are trained towards given ones.")
        body.let("loss", f"stg.mse[mean = B*D]({pooled}, %target)")
        body.do("stg.return(%loss)")
        return text.train(f"{_IMAGES}, %target: bf16[B, D]", body)
    text.symbol("N", config.labels(1000), "num_labels")
    z = linear(body, "z", c, "classifier", "D, N")
    if any(name.endswith("WithTeacher") for name in heads):
        d = linear(body, "zd", body.let("d", f"stg.take[at = 1]({n})"), "distillation", "D, N")
        z = body.steps("zm", z, [f"stg.add({{}}, {d})", "stg.scale[by = 1/2]({})"])
    classify(body, z, "N")
    return text.train(f"{_IMAGES}, %labels: i32[B]", body)


# -- DINO ------------------------------------------------------------------------------------------


def read_dinov2(config: Config) -> ModelText:
    """DINOv2 (arXiv 2304.07193): ViT whose layers scale what they add; some have a SiLU gate."""
    return _dinov2(config, "DINOv2", 0)


def read_dinov2_registers(config: Config) -> ModelText:
    """DINOv2 with registers (arXiv 2309.16588): tokens that mean nothing behind that of the
    class."""
    return _dinov2(config, "DINOv2 with registers", config.size("num_register_tokens", default=4))


def _dinov2(config: Config, title: str, registers: int) -> ModelText:
    text, _ = begin(config, title, 1)
    text.symbols.pop("S")
    sizes = TowerSizes(768, 3072, 12, 12, patch=14)
    read_images(config, text, sizes)
    width = read_size(config, text, "D", "hidden_size", default=768)
    read_heads_of(config, text, "", "num_attention_heads", 12)
    text.symbol("L", config.layers(default=12), "num_hidden_layers")
    gated = config.flag("use_swiglu_ffn", default=False)
    inner = width * config.size("mlp_ratio", default=4)
    text.symbol("F", (inner * 2 // 3 + 7) // 8 * 8 if gated else inner, "by mlp_ratio")
    config.skip("interpolate_antialias", "interpolate_offset")
    act = "silu" if gated else read_activation(config, "hidden_act")
    config.skip("hidden_act")
    biased = config.flag("qkv_bias", default=True)
    mlp = FeedForward(act, gated=gated, bias=True)
    body = Body()
    p = body.let("p", f"stg.call @{patches(text, bias=True)}(%images)")
    x = with_class_token(body, "xc", p, "D", ["class_token"])
    x = with_positions(body, "xp" if registers else "x", x, "X*X + 1, D")
    if registers:
        x = _registers(body, text, x, registers)
    layers = encoder(text, MultiHead("qkvo" if biased else "o"), mlp, scaled=True)
    masked = config.flag("use_mask_token", default=True)
    return _dino_head(config, text, body, layers.write(body, x, "y"), masked, registers)


def _registers(body: Body, text: ModelText, x: str, count: int) -> str:
    """Append learned tokens behind the first of `x`."""
    text.symbol("R", count, "num_register_tokens")
    r = body.let(
        "r0", 'stg.broadcast["rd->brd", sizes = B](' + body.param("registers", "R, D") + ")"
    )
    body.do(f"%first, %rest = stg.cut[dim = 1, sizes = (1, X*X)]({x})")
    return body.let("x", f"stg.concat[dim = 1](%first, {r}, %rest)")


def _dino_head(
    config: Config, text: ModelText, body: Body, y: str, masked: bool, registers: int
) -> ModelText:
    """The norm behind the layers, and the head of the architecture: a class by the first token and
    the mean of the patches, or the vector of the first token."""
    config.skip("layerscale_value", "apply_layernorm", "reshape_hidden_states", "stage_names")
    config.skip("out_features", "out_indices", "encoder_stride")
    n = LAYER.write(body, "n", y, "norm")
    c = body.let("c", f"stg.take[at = 0]({n})")
    if any(name.endswith("ForImageClassification") for name in config.strings("architectures")):
        text.symbol("N", config.labels(1000), "num_labels")
        start = 1 + registers
        steps = [
            f"stg.slice[dim = 1, start = {start}, size = X*X]({{}})",
            'stg.sum["bsd->bd"]({})',
            "stg.scale[by = 1/(X*X)]({})",
            f"stg.concat({c}, {{}})",
        ]
        both = body.steps("both", n, steps)
        classify(body, linear(body, "z", both, "classifier", "2*D, N"), "N")
        text.train(f"{_IMAGES}, %labels: i32[B]", body)
    else:
        text.notes.append("Its image vectors are trained towards given ones.")
        body.let("loss", f"stg.mse[mean = B*D]({c}, %target)")
        body.do("stg.return(%loss)")
        text.train(f"{_IMAGES}, %target: bf16[B, D]", body)
    if not masked:
        return text
    idle = Idle(text)
    idle.param("mask_token", "D")
    return idle.beside("masks", "The token of masked patches is declared and frozen.")


def read_dinov3(config: Config) -> ModelText:
    """DINOv3 (arXiv 2508.10104): rotary positions, registers, biases by keys."""
    text, _ = begin(config, "DINOv3", 1)
    text.symbols.pop("S")
    sizes = TowerSizes(384, 1536, 12, 6)
    read_images(config, text, sizes)
    read_tower(config, text, "", sizes)
    text.symbol("theta", config.size("rope_theta", default=100), "rope_theta")
    keys = {"q": "query_bias", "k": "key_bias", "v": "value_bias", "o": "proj_bias"}
    biases = "".join(n for n, key in keys.items() if config.flag(key, default=n != "k"))
    gated = config.flag("use_gated_mlp", default=False)
    act = read_activation(config, "hidden_act")
    mlp = FeedForward(act, gated=gated, bias=config.flag("mlp_bias", default=True))
    config.skip("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale", "rope_parameters")
    registers = config.count("num_register_tokens", default=0)
    body = Body()
    p = body.let("p", f"stg.call @{patches(text, bias=True)}(%images)")
    x = with_class_token(body, "xc" if registers else "x", p, "D", ["class_token"])
    if registers:
        x = _registers(body, text, x, registers)
    layers = encoder(text, MultiHead(biases, rope=Rope()), mlp, scaled=True)
    text.notes.append("Positions of two axes are rotated like those of one: the same work.")
    return _dino_head(config, text, body, layers.write(body, x, "y"), True, registers)


# -- images with texts -----------------------------------------------------------------------------


def read_clip(config: Config) -> ModelText:
    """CLIP (arXiv 2103.00020): the vector of each image is to be near that of its own text, among
    all pairs of the batch."""
    text, vision, words = _two_towers(config, "CLIP")
    v = read_tower(vision, text, VISION, TowerSizes(768, 3072, 12, 12, patch=32))
    read_images(vision, text, TowerSizes(768, 3072, 12, 12, patch=32))
    t = _read_words(words, text, TowerSizes(512, 2048, 12, 8), 49408, 77)
    read_size(config, text, "J", "projection_dim", default=512)
    config.skip("logit_scale_init_value")
    for side in (vision, words):
        side.skip("projection_dim")
    body = Body()
    p = body.let("p", v.call(patches(text, bias=False), "D", "%images"))
    x = with_class_token(body, "xc", p, v["D"], ["class_token"])
    x = with_positions(body, "xp", x, f"X*X + 1, {v['D']}")
    x = LAYER.write(body, "xn", x, "pre_norm", v["D"])
    mlp = FeedForward(read_activation(vision, "hidden_act", default="quick_gelu"), False, True)
    layers = encoder(text, MultiHead(), mlp, tower=v, name="vision", count=v["L"])
    c = body.let("i0", f"stg.take[at = 0]({layers.write(body, x, 'yv')})")
    i = LAYER.write(body, "i1", c, "post_norm", v["D"])
    i = linear(body, "i", i, "image", f"{v['D']}, J", bias=False)
    x = _words(body, t, "%tokens")
    act = read_activation(words, "hidden_act", default="quick_gelu")
    if ACTIVATIONS[act] != ACTIVATIONS[mlp.activation]:
        raise words.refuse("hidden_act", f"is {act!r}, and that of images {mlp.activation!r}")
    causal = MultiHead(statics="causal", name="causal_attention")
    layers = encoder(text, causal, mlp, tower=t, name="text", count=t["L"])
    n = LAYER.write(body, "w0", layers.write(body, x, "yt"), "text_norm", t["D"])
    w = body.let("w1", f"stg.take({n}, %ends)")
    w = linear(body, "w", w, "text", f"{t['D']}, J", bias=False)
    vision.finish()
    words.finish()
    logits = similarities(body, i, w, "J")
    body.do(f'%across = stg.permute["ij->ji"]({logits})')
    one, other = (
        body.let(f"loss_{n}", f"stg.cross_entropy[mean = B]({x}, %pairs)")
        for n, x in (("image", logits), ("text", "%across"))
    )
    body.do(*_halved(one, other))
    text.notes.append("%ends are the positions of the last tokens, %pairs the numbers 0 to B - 1.")
    return text.train(f"{_IMAGES}, %tokens: i32[B, S], %ends: i32[B], %pairs: i32[B]", body)


def _halved(one: str, other: str) -> list[str]:
    return [
        f"%both = stg.add({one}, {other})",
        "%loss = stg.scale[by = 1/2](%both)",
        "stg.return(%loss)",
    ]


def _two_towers(config: Config, title: str) -> tuple[ModelText, Config, Config]:
    text, _ = begin(config, title, 1)
    text.symbols.pop("S")
    vision, words = config.section("vision_config"), config.section("text_config")
    if vision is None or words is None:
        raise config.refuse("vision_config", "and 'text_config' are the two towers: one is missing")
    config.skip("vision_config_dict", "text_config_dict")
    return text, vision, words


def _read_words(
    words: Config, text: ModelText, sizes: TowerSizes, vocab: int, length: int
) -> Tower:
    tower = read_tower(words, text, "", sizes)
    read_size(words, text, "V", "vocab_size", default=vocab)
    longest = words.size("max_position_embeddings", default=length)
    text.symbol("S", longest, "tokens of a text")
    text.symbol("P_max", longest, "max_position_embeddings")
    text.assume("P_max >= S")
    return tower


def _words(body: Body, tower: Tower, tokens: str) -> str:
    width = tower["D"]
    e = body.let("e", f"stg.embedding({body.param('embed', f'V, {width}')}, {tokens})")
    p = body.let("pt", f"stg.slice[size = S]({body.param('text_positions', f'P_max, {width}')})")
    return body.let("t", f'stg.add["bsd,sd->bsd"]({e}, {p})')


def similarities(body: Body, images: str, texts: str, width: str) -> str:
    """Append the logits [B, B] in fp32: cosines of images and texts [B, width], times a trained
    scale."""
    i, w = (
        body.let(n, f"stg.rmsnorm[affine = none, eps = 0]({x})")
        for n, x in (("ni", images), ("nw", texts))
    )
    scale = body.let("scale", f"stg.exp({body.param('logit_scale', '')})")
    steps = [
        f'stg.einsum["id,jd->ij"]({{}}, {w})',
        f'stg.einsum["ij,->ij"]({{}}, {scale})',
        f"stg.scale[by = 1/{width}]({{}})",
        "stg.cast[f32]({})",
    ]
    return body.steps("logits", i, steps)


def read_siglip(config: Config) -> ModelText:
    """SigLIP (arXiv 2303.15343): each pair of image and text is judged by itself."""
    text, vision, words = _two_towers(config, "SigLIP")
    sizes = TowerSizes(768, 3072, 12, 12)
    v = read_tower(vision, text, VISION, sizes)
    read_images(vision, text, sizes)
    t = _read_words(words, text, sizes, 32000, 64)
    config.skip("initializer_factor", "projection_dim")
    for side in (vision, words):
        side.skip("projection_dim", "projection_size", "num_image_tokens")
    vision.only("vision_use_head", True)
    if text.symbols["D"].value != text.symbols["D_v"].value:
        raise words.refuse("hidden_size", "differs from that of images")
    act = read_activation(vision, "hidden_act", default="gelu_pytorch_tanh")
    words.only("hidden_act", act)
    mlp = FeedForward(act, False, True)
    body = Body()
    p = body.let("p", v.call(patches(text, bias=True), "D", "%images"))
    x = with_positions(body, "x", p, "X*X, D_v")
    layers = encoder(text, MultiHead(), mlp, tower=v, name="vision", count=v["L"])
    n = LAYER.write(body, "nv", layers.write(body, x, "yv"), "vision_norm", "D_v")
    i = _attention_pool(text, body, v, mlp, n)
    x = _words(body, t, "%tokens")
    layers = encoder(text, MultiHead(), mlp, tower=t, name="text", count=t["L"])
    n = LAYER.write(body, "nt", layers.write(body, x, "yt"), "text_norm", "D")
    w = linear(body, "w", body.let("last", f"stg.take[at = S - 1]({n})"), "text", "D, D_v")
    vision.finish()
    words.finish()
    logits = similarities(body, i, w, "D_v")
    body.do(
        f'%biased = stg.add["ij,->ij"]({logits}, {_wide(body)})',
        "%signed = stg.mul(%biased, %signs)",
        "%lost = stg.softplus(%signed)",
        '%sum = stg.sum["ij->"](%lost)',
        "%loss = stg.scale[by = 1/B](%sum)",
        "stg.return(%loss)",
    )
    text.notes.append("%signs are -1 for the pairs that belong together, and 1 for all others.")
    return text.train(f"{_IMAGES}, %tokens: i32[B, S], %signs: f32[B, B]", body)


def _wide(body: Body) -> str:
    return body.let("bias", f"stg.cast[f32]({body.param('logit_bias', '')})")


def _attention_pool(text: ModelText, body: Body, tower: Tower, mlp: FeedForward, x: str) -> str:
    """Append a head in which one learned token attends to all others."""
    probe = body.param("probe", tower["D"])
    q = body.let("iq", f'stg.broadcast["d->bsd", sizes = (B, 1)]({probe})')
    cross = MultiHead(cross=True, name="pool")
    a = body.let("ip", tower.call(cross.write(text), cross.symbols, q, x))
    n = LAYER.write(body, "in", a, "pool_norm", tower["D"])
    m = body.let("im", tower.call(mlp.write(text), "D F", n, name="pool_mlp"))
    return body.let("i", f"stg.take[at = 0]({body.let('ir', f'stg.add({a}, {m})')})")


FAMILIES: Sequence[ModelFamily] = (
    ModelFamily("ViT", ("vit",), read_vit, "patches, class token, learned positions"),
    ModelFamily("DeiT", ("deit",), read_deit, "ViT with a token for distillation"),
    ModelFamily("DINOv2", ("dinov2",), read_dinov2, "ViT with scaled layers, maybe a SiLU gate"),
    ModelFamily(
        "DINOv2 with registers", ("dinov2_with_registers",), read_dinov2_registers, "registers"
    ),
    ModelFamily("DINOv3", ("dinov3_vit",), read_dinov3, "rotary positions, registers"),
    ModelFamily("CLIP", ("clip",), read_clip, "two towers, contrastive loss over the batch"),
    ModelFamily("SigLIP", ("siglip",), read_siglip, "two towers, attention pooling, sigmoid loss"),
)
