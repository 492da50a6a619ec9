"""Pairs of images and texts: CLIP and SigLIP, and each of their towers alone."""

from stagec.importers.common.sizes import begin_text, read_size
from stagec.importers.families.encoders import read_activation, vectors
from stagec.importers.families.vision import IMAGES, TowerSizes, read_images, read_tower
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import ACTIVATIONS, LAYER, FeedForward
from stagec.importers.writing.stack import repeated
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

#: The suffix of the symbols of a vision tower in a model with text.
VISION = "_v"


@reads("CLIP", "clip", "metaclip_2", features="two towers, contrastive loss over the batch")
def read_clip(config: Config) -> ModelText:
    """CLIP (arXiv 2103.00020): the vector of each image is trained towards that of its text, among
    all pairs of the batch."""
    text, vision, words = _two_towers(config)
    v = _read_clip_images(vision, text, VISION)
    t = _read_words(words, text, TowerSizes(512, 2048, 12, 8), 49408, 77)
    read_size(config, text, "J", "projection_dim", default=512)
    config.skip("logit_scale_init_value")
    for side in (vision, words):
        side.skip("projection_dim", "tie_word_embeddings", "top_k")
    body = Body()
    mlp = FeedForward(read_activation(vision, "hidden_act", default="quick_gelu"), False, True)
    i = _clip_image(text, body, v, mlp, "vision")
    w_image = body.param("w_image", f"{v['D']}, J")
    i = body.let("i", f'stg.einsum["bd,de->be"]({i}, {w_image})')  # a part may end here
    act = read_activation(words, "hidden_act", default="quick_gelu")
    if ACTIVATIONS[act] != ACTIVATIONS[mlp.activation]:
        raise words.refuse("hidden_act", f"is {act!r}, but that of images is {mlp.activation!r}")
    w = _clip_text(text, body, t, mlp, "text")
    w_text = body.param("w_text", f"{t['D']}, J")
    w = body.let("w", f'stg.einsum["bd,de->be"]({w}, {w_text})')  # a part may end here
    vision.finish()
    words.finish()
    similar = text.use("pairs", "B", "D = J", function="contrastive")
    body.do(f"stg.return({body.call('loss', similar, i, w, '%pairs')})")
    text.notes += [_ENDS, "%pairs are the numbers 0 to B - 1."]
    return text.train(f"{IMAGES}, %tokens: i32[B, S], %ends: i32[B], %pairs: i32[B]", body)


_ENDS = "%ends are the positions of the last tokens."


def _read_clip_images(config: Config, text: ModelText, suffix: str) -> Tower:
    sizes = TowerSizes(768, 3072, 12, 12, patch=32)
    read_images(config, text, sizes)
    return read_tower(config, text, suffix, sizes)


def _clip_image(text: ModelText, body: Body, v: Tower, mlp: FeedForward, name: str) -> str:
    """Append the tower of images: the normed vector of the first token."""
    p = body.call("p", v.of(patches(text, bias=False), "D"), "%images")
    x = with_class_token(body, "xc", p, v["D"], ["class_token"])
    x = with_positions(body, "xp", x, f"X*X + 1, {v['D']}")
    x = LAYER.write(body, "xn", x, "pre_norm", v["D"])
    layer = encoder(text, MultiHead(wide=True), mlp, tower=v)
    c = body.let("i0", f"stg.take[at = 0]({repeated(body, x, layer, 'yv', name, v['L'])})")
    return LAYER.write(body, "i1", c, "post_norm", v["D"])


def _clip_text(text: ModelText, body: Body, t: Tower, mlp: FeedForward, name: str) -> str:
    """Append the tower of texts: the normed vector of the last token."""
    x = _words(body, t, "%tokens")
    causal = MultiHead(statics="causal", name="causal_attention", wide=True)
    layer = encoder(text, causal, mlp, tower=t)
    n = LAYER.write(body, "w0", repeated(body, x, layer, "yt", name, t["L"]), "text_norm", t["D"])
    return body.let("w1", f"stg.take({n}, %ends)")


@reads("CLIP, images", "clip_vision_model", features="a tower of CLIP")
def read_clip_vision(config: Config) -> ModelText:
    """The tower of images of CLIP alone, optionally with its projection."""
    text = _alone(config)
    tower = _read_clip_images(config, text, "")
    mlp = FeedForward(read_activation(config, "hidden_act", default="quick_gelu"), False, True)
    body = Body()
    return _projected(config, text, body, _clip_image(text, body, tower, mlp, "layers"), IMAGES)


@reads("CLIP, texts", "clip_text_model", features="a tower of CLIP")
def read_clip_text(config: Config) -> ModelText:
    """The tower of texts of CLIP alone, optionally with its projection."""
    text = _alone(config)
    tower = _read_words(config, text, TowerSizes(512, 2048, 12, 8), 49408, 77)
    mlp = FeedForward(read_activation(config, "hidden_act", default="quick_gelu"), False, True)
    body = Body()
    w = _clip_text(text, body, tower, mlp, "layers")
    text.notes.append(_ENDS)
    return _projected(config, text, body, w, "%tokens: i32[B, S], %ends: i32[B]")


def _alone(config: Config) -> ModelText:
    text = begin_text(config, "Model")
    config.skip("projection_dim", "vocab_size")
    return text


def _projected(config: Config, text: ModelText, body: Body, x: str, args: str) -> ModelText:
    """The text of a tower of CLIP whose vectors are `x`, projected depending on the
    architecture."""
    width = "D"
    if any(name.endswith("WithProjection") for name in config.strings("architectures")):
        read_size(config, text, "J", "projection_dim", default=512)
        x, width = linear(text, body, "j", x, "projection", "D, J", bias=False), "J"
    return text.train(f"{args}, {vectors(text, body, x, width)}", body)


def _two_towers(config: Config) -> tuple[ModelText, Config, Config]:
    text = begin_text(config, "Model")
    vision, words = config.needed("vision_config"), config.needed("text_config")
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


@reads("SigLIP", "siglip", features="two towers, attention pooling, sigmoid loss")
def read_siglip(config: Config) -> ModelText:
    """SigLIP (arXiv 2303.15343): each pair of image and text has an independent loss."""
    text, vision, words = _two_towers(config)
    sizes = TowerSizes(768, 3072, 12, 12)
    v = read_tower(vision, text, VISION, sizes)
    read_images(vision, text, sizes)
    t = _read_words(words, text, sizes, 32000, 64)
    config.skip("initializer_factor", "projection_dim")
    for side in (vision, words):
        side.skip("projection_dim", "num_image_tokens")
        side.only("projection_size", text.value("D_v"))
    vision.only("vision_use_head", True)
    if text.symbols["D"].value != text.symbols["D_v"].value:
        raise words.refuse("hidden_size", "must be equal to that of images")
    act = read_activation(vision, "hidden_act", default="gelu_pytorch_tanh")
    words.only("hidden_act", act)
    mlp = FeedForward(act, False, True)
    body = Body()
    n = _siglip_image(text, body, v, mlp, "vision")
    i = _attention_pool(text, body, v, mlp, n)
    w = _siglip_text(text, body, t, mlp, "text", "D, D_v")
    vision.finish()
    words.finish()
    judged = text.use("pairs", "B", "D = D_v", function="judged_pairs")
    body.do(f"stg.return({body.call('loss', judged, i, w, '%signs')})")
    text.notes.append("%signs are -1 for the pairs that belong together, and 1 for all others.")
    return text.train(f"{IMAGES}, %tokens: i32[B, S], %signs: f32[B, B]", body)


def _siglip_image(text: ModelText, body: Body, v: Tower, mlp: FeedForward, name: str) -> str:
    """Append the tower of images: the normed vectors of all patches."""
    p = body.call("p", v.of(patches(text, bias=True), "D"), "%images")
    x = with_positions(body, "x", p, f"X*X, {v['D']}")
    layer = encoder(text, MultiHead(wide=True), mlp, tower=v)
    y = repeated(body, x, layer, "yv", name, v["L"])
    return LAYER.write(body, "nv", y, "vision_norm", v["D"])


def _siglip_text(
    text: ModelText, body: Body, t: Tower, mlp: FeedForward, name: str, sizes: str
) -> str:
    """Append the tower of texts: the vector of the last token, projected between these sizes."""
    x = _words(body, t, "%tokens")
    layer = encoder(text, MultiHead(wide=True), mlp, tower=t)
    n = LAYER.write(body, "nt", repeated(body, x, layer, "yt", name, t["L"]), "text_norm", t["D"])
    last = body.let("last", f"stg.take[at = S - 1]({n})")
    steps = [
        f'stg.einsum["bd,de->be"]({{}}, {body.param("w_text", sizes)})',
        f'stg.add["be,e->be"]({{}}, {body.param("b_text", sizes.partition(", ")[2])})',
    ]
    return body.steps("w", last, steps)  # a part may end here


@reads("SigLIP, images", "siglip_vision_model", features="a tower of SigLIP")
def read_siglip_vision(config: Config) -> ModelText:
    """The tower of images of SigLIP alone, with its pooling or without it."""
    text = _alone(config)
    sizes = TowerSizes(768, 3072, 12, 12)
    tower = read_tower(config, text, "", sizes)
    read_images(config, text, sizes)
    config.skip("projection_size", "num_image_tokens")
    act = read_activation(config, "hidden_act", default="gelu_pytorch_tanh")
    mlp = FeedForward(act, False, True)
    body = Body()
    n = _siglip_image(text, body, tower, mlp, "layers")
    if config.flag("vision_use_head", default=True):
        i = _attention_pool(text, body, tower, mlp, n)
        return text.train(f"{IMAGES}, {vectors(text, body, i)}", body)
    text.notes.append("The vectors of its patches are trained towards given ones.")
    body.ends(f"stg.mse[mean = B*X*X*D]({n}, %target)")
    return text.train(f"{IMAGES}, %target: bf16[B, X*X, D]", body)


@reads("SigLIP, texts", "siglip_text_model", features="a tower of SigLIP")
def read_siglip_text(config: Config) -> ModelText:
    """The tower of texts of SigLIP alone."""
    text = _alone(config)
    tower = _read_words(config, text, TowerSizes(768, 3072, 12, 12), 32000, 64)
    read_size(config, text, "J", "projection_size", default=text.symbols["D"].value)
    act = read_activation(config, "hidden_act", default="gelu_pytorch_tanh")
    body = Body()
    w = _siglip_text(text, body, tower, FeedForward(act, False, True), "layers", "D, J")
    return text.train(f"%tokens: i32[B, S], {vectors(text, body, w, 'J')}", body)


def _attention_pool(text: ModelText, body: Body, tower: Tower, mlp: FeedForward, x: str) -> str:
    """Append a head in which one learned token attends to all others."""
    probe = body.param("probe", tower["D"])
    q = body.let("iq", f'stg.broadcast["d->bsd", sizes = (B, 1)]({probe})')
    cross = MultiHead(cross=True, name="pool")
    a = body.call("ip", tower.of(cross.write(text, tower["H"]), "D H K"), q, x)
    n = LAYER.write(body, "in", a, "pool_norm", tower["D"])
    m = body.call("im", tower.of(mlp.write(text), "D F").with_("as = pool_mlp"), n)
    return body.let("i", f"stg.take[at = 0]({body.let('ir', f'stg.add({a}, {m})')})")
