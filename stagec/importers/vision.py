"""Encoders of images, and of images with texts: ViT, CLIP, SigLIP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagec.importers.blocks import ACTIVATIONS, LAYER, FeedForward
from stagec.importers.common import begin, read_size
from stagec.importers.config import Config
from stagec.importers.encoders import classify, read_activation, read_heads_of
from stagec.importers.family import ModelFamily
from stagec.importers.text import Body, ModelText
from stagec.importers.towers import (
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
class Sizes:
    """The values of keys that a tower's configuration leaves out."""

    width: int
    inner: int
    layers: int
    heads: int
    image: int = 224
    patch: int = 16


def read_images(config: Config, text: ModelText, sizes: Sizes) -> None:
    """Declare C, P and X: channels, elements of a patch's side, patches of an image's side."""
    read_size(config, text, "C", "num_channels", default=3)
    patch = read_size(config, text, "P", "patch_size", default=sizes.patch)
    image = config.size("image_size", default=sizes.image)
    if image < patch:
        raise config.refuse("image_size", f"is {image}, less than one patch of {patch}")
    if image % patch:
        text.notes.append(f"Images are cropped from {image} to a multiple of {patch}.")
    text.symbol("X", image // patch, "patches along a side: image_size / patch_size")


def read_tower(config: Config, text: ModelText, suffix: str, sizes: Sizes) -> Tower:
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
    sizes = Sizes(768, 3072, 12, 12)
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
    classify(body, linear(body, "z", c, "classifier", "D, N"), "N")
    return text.train(f"{_IMAGES}, %labels: i32[B]", body)


# -- images with texts -----------------------------------------------------------------------------


def read_clip(config: Config) -> ModelText:
    """CLIP (arXiv 2103.00020): the vector of each image is to be near that of its own text, among
    all pairs of the batch."""
    text, vision, words = _two_towers(config, "CLIP")
    v = read_tower(vision, text, VISION, Sizes(768, 3072, 12, 12, patch=32))
    read_images(vision, text, Sizes(768, 3072, 12, 12, patch=32))
    t = _read_words(words, text, Sizes(512, 2048, 12, 8), 49408, 77)
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


def _read_words(words: Config, text: ModelText, sizes: Sizes, vocab: int, length: int) -> Tower:
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
    sizes = Sizes(768, 3072, 12, 12)
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
    ModelFamily("CLIP", ("clip",), read_clip, "two towers, contrastive loss over the batch"),
    ModelFamily("SigLIP", ("siglip",), read_siglip, "two towers, attention pooling, sigmoid loss"),
)
