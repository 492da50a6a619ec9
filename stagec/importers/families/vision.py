"""Encoders of images: ViT and its variants."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from stagec.importers.common.idle import Idle
from stagec.importers.common.sizes import begin_text, heads_of, is_bare, read_size
from stagec.importers.families.encoders import classify, read_activation, read_heads_of, vectors
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, FeedForward, Rope
from stagec.importers.writing.stack import repeated
from stagec.importers.writing.text import Body, ModelText
from stagec.importers.writing.towers import (
    MultiHead,
    Tower,
    encoder,
    linear,
    pair_bias,
    patches,
    with_class_token,
    with_positions,
)

IMAGES = "%images: bf16[B, C, X*P, X*P]"


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """The defaults of missing keys of a tower."""

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


@reads("ViT", "vit", features="patches, class token, learned positions")
def read_vit(config: Config) -> ModelText:
    """ViT (arXiv 2010.11929): patches, a class token, learned positions."""
    return _vit(config, ("class_token",))


@reads("DeiT", "deit", features="ViT with a token for distillation")
def read_deit(config: Config) -> ModelText:
    """DeiT (arXiv 2012.12877): ViT with a second token, for distillation."""
    return _vit(config, ("class_token", "distillation_token"))


def _vit(config: Config, tokens: Sequence[str]) -> ModelText:
    text = begin_text(config, "ImageClassification", "ImageClassificationWithTeacher")
    sizes = TowerSizes(768, 3072, 12, 12)
    read_images(config, text, sizes)
    t = read_tower(config, text, "", sizes)
    biased = config.flag("qkv_bias", default=True)
    config.skip("encoder_stride", "pooler_output_size", "pooler_act")
    mlp = FeedForward(read_activation(config, "hidden_act"), gated=False, bias=True)
    body = Body()
    p = body.call("p", t.of(patches(text, bias=True), "D"), "%images")
    x = with_class_token(body, "xc", p, "D", tokens)
    x = with_positions(body, "x", x, f"X*X + {len(tokens)}, D")
    layer = encoder(text, MultiHead("qkvo" if biased else "o", wide=True), mlp)
    n = LAYER.write(body, "n", repeated(body, x, layer, "y"), "norm")
    c = body.let("c", f"stg.take[at = 0]({n})")
    if is_bare(config):
        pooled = body.let("z", f"stg.tanh({linear(text, body, 'z0', c, 'pooler', 'D, D')})")
        return text.train(f"{IMAGES}, {vectors(text, body, pooled)}", body)
    text.symbol("N", config.labels(), "num_labels")
    z = linear(text, body, "z", c, "classifier", "D, N")
    if "ImageClassificationWithTeacher" in heads_of(config):
        d = linear(
            text, body, "zd", body.let("d", f"stg.take[at = 1]({n})"), "distillation", "D, N"
        )
        z = body.steps("zm", z, [f"stg.add({{}}, {d})", "stg.scale[by = 1/2]({})"])
    classify(body, z)
    return text.train(f"{IMAGES}, %labels: i32[B]", body)


@reads("BEiT", "beit", features="biases by distance in two dimensions")
def read_beit(config: Config) -> ModelText:
    """BEiT (arXiv 2106.08254): biases by two-dimensional distance, scaled layers, a mean of
    patches."""
    return _beit(config, pooler=True)


@reads("data2vec of images", "data2vec-vision", features="as BEiT")
def read_data2vec_images(config: Config) -> ModelText:
    """data2vec of images (arXiv 2202.03555): BEiT, whose vectors have no norm after their mean."""
    config.family = "BEiT"
    return _beit(config, pooler=not is_bare(config))


def _beit(config: Config, *, pooler: bool) -> ModelText:
    text = begin_text(config, "ImageClassification")
    sizes = TowerSizes(768, 3072, 12, 12)
    read_images(config, text, sizes)
    t = read_tower(config, text, "", sizes)
    side = 2 * text.value("X") - 1
    text.symbol("N", side * side + 3, "rows of biases: (2*X - 1)^2 + 3")
    config.skip("vocab_size", "drop_path_rate", "pool_scales", "out_features", "out_indices")
    config.skip("semantic_loss_ignore_index", "add_fpn", "reshape_hidden_states", "stage_names")
    config.skip("use_auxiliary_head", *(f"auxiliary_{n}" for n in _AUXILIARY))
    mlp = FeedForward(read_activation(config, "hidden_act"), gated=False, bias=True)
    body = Body()
    p = body.call("p", t.of(patches(text, bias=True), "D"), "%images")
    placed = config.flag("use_absolute_position_embeddings", default=False)
    x = with_class_token(body, "xc" if placed else "x", p, "D", ["class_token"])
    x = with_positions(body, "x", x, "X*X + 1, D") if placed else x
    own = config.flag("use_relative_position_bias", default=False)
    shared = config.flag("use_shared_relative_position_bias", default=False)
    if own and shared:
        message = "cannot be combined with 'use_relative_position_bias'"
        raise config.refuse("use_shared_relative_position_bias", message)
    operands = [pair_bias(body, "bias", body.param("bias_table", "N, H"))] if shared else []
    operands += ["%pairs"] if own else []
    mixer = MultiHead("qvo", bias=shared, pairs=own)
    scaled = config.ratio("layer_scale_init_value", default=Fraction(1, 10)) > 0
    layer = encoder(text, mixer, mlp, scaled=scaled, operands=operands)
    y = repeated(body, x, layer, "y")
    c = _beit_vector(config, body, y, pooler=pooler)
    args = IMAGES + (", %pairs: i32[X*X + 1, X*X + 1]" if own or shared else "")
    if own or shared:
        text.notes.append("%pairs are the rows of biases, by the places of two patches.")
    if is_bare(config):
        text.train(f"{args}, {vectors(text, body, c)}", body)
    else:
        text.symbol("M", config.labels(), "num_labels")
        classify(body, linear(text, body, "z", c, "classifier", "D, M"))
        text.train(f"{args}, %labels: i32[B]", body)
    if not config.flag("use_mask_token", default=False):
        return text
    idle = Idle(text)
    idle.param("mask_token", "D")
    return idle.beside("masks", "The token of masked patches is declared and frozen.")


_AUXILIARY = ("loss_weight", "channels", "num_convs", "concat_input")


def _beit_vector(config: Config, body: Body, y: str, *, pooler: bool) -> str:
    """Append the vector of an image: the mean of its patches, normed by a `pooler`, or its class
    token."""
    if not config.flag("use_mean_pooling", default=True):
        return body.let("c", f"stg.take[at = 0]({LAYER.write(body, 'n', y, 'norm')})")
    steps = [*_mean_of_patches(1), *([LAYER.step(body, "norm")] if pooler else [])]
    return body.steps("c", y, steps)


def _mean_of_patches(start: int) -> list[str]:
    """The operations, on `{}`, which has `start` tokens before the patches."""
    patches = f"stg.slice[dim = 1, start = {start}, size = X*X]({{}})"
    return [patches, 'stg.sum["bsd->bd"]({})', "stg.scale[by = 1/(X*X)]({})"]


# -- DINO ------------------------------------------------------------------------------------------


@reads("DINOv2", "dinov2", features="ViT with scaled layers, maybe a SiLU gate")
def read_dinov2(config: Config) -> ModelText:
    """DINOv2 (arXiv 2304.07193): ViT whose layers scale their results; some have a SiLU gate."""
    return _dinov2(config, 0)


@reads("DINOv2 with registers", "dinov2_with_registers", features="registers")
def read_dinov2_registers(config: Config) -> ModelText:
    """DINOv2 with registers (arXiv 2309.16588): additional learned tokens after the class
    token."""
    return _dinov2(config, config.size("num_register_tokens", default=4))


def _dinov2(config: Config, registers: int) -> ModelText:
    text = begin_text(config, "ImageClassification")
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
    layer = encoder(text, MultiHead("qkvo" if biased else "o"), mlp, scaled=True)
    masked = config.flag("use_mask_token", default=True)
    return _dino_head(config, text, body, repeated(body, x, layer, "y"), masked, registers)


def _registers(body: Body, text: ModelText, x: str, count: int) -> str:
    """Append learned tokens after the first of `x`."""
    text.symbol("R", count, "num_register_tokens")
    r = body.let(
        "r0", 'stg.broadcast["rd->brd", sizes = B](' + body.param("registers", "R, D") + ")"
    )
    body.do(f"%first, %rest = stg.cut[dim = 1, sizes = (1, X*X)]({x})")
    return body.let("x", f"stg.concat[dim = 1](%first, {r}, %rest)")


def _dino_head(
    config: Config, text: ModelText, body: Body, y: str, masked: bool, registers: int
) -> ModelText:
    """The norm after the layers, and the head of the architecture: a class by the first token and
    the mean of the patches, or the vector of the first token."""
    config.skip("layerscale_value", "apply_layernorm", "reshape_hidden_states", "stage_names")
    config.skip("out_features", "out_indices", "encoder_stride")
    n = LAYER.write(body, "n", y, "norm")
    c = body.let("c", f"stg.take[at = 0]({n})")
    if any(name.endswith("ForImageClassification") for name in config.strings("architectures")):
        text.symbol("N", config.labels(), "num_labels")
        steps = [*_mean_of_patches(1 + registers), f"stg.concat({c}, {{}})"]
        both = body.steps("both", n, steps)
        classify(body, linear(text, body, "z", both, "classifier", "2*D, N"))
        text.train(f"{IMAGES}, %labels: i32[B]", body)
    else:
        text.train(f"{IMAGES}, {vectors(text, body, c)}", body)
    if not masked:
        return text
    idle = Idle(text)
    idle.param("mask_token", "D")
    return idle.beside("masks", "The token of masked patches is declared and frozen.")


@reads("DINOv3", "dinov3_vit", features="rotary positions, registers")
def read_dinov3(config: Config) -> ModelText:
    """DINOv3 (arXiv 2508.10104): rotary positions, registers, biases by keys."""
    text = begin_text(config, "ImageClassification")
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
    layer = encoder(text, MultiHead(biases, rope=Rope()), mlp, scaled=True)
    text.notes.append("Positions of two axes are rotated like those of one: the same work.")
    return _dino_head(config, text, body, repeated(body, x, layer, "y"), True, registers)
