"""Language models with images in the step (`stagec import --images`): a projector maps patches of
the tower of another family to tokens, which are inserted among the tokens of the text."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.common.idle import Idle, image_tokens, read_idle
from stagec.importers.common.sizes import read_size
from stagec.importers.families import (
    deepseek,
    gated_heads,
    linear_attention,
    llama,
    llama_variants,
    mixture,
    short_convolutions,
    windows,
)
from stagec.importers.families.encoders import read_activation, read_heads_of
from stagec.importers.families.windows import GEMMA_NORM, gemma3, read_llama4
from stagec.importers.family import Reader, declared_in
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import (
    ACTIVATIONS,
    LAYER,
    RMS,
    FeedForward,
    Norm,
    Rope,
    activated,
)
from stagec.importers.writing.stack import repeated
from stagec.importers.writing.text import Among, Body, ModelText
from stagec.importers.writing.towers import (
    MultiHead,
    Tower,
    encoder,
    with_class_token,
    with_positions,
)

_READERS = (
    *(llama, llama_variants, mixture, windows, deepseek, gated_heads, short_convolutions),
    linear_attention,
)
_LANGUAGES = {
    name: family
    for readers in _READERS
    for family in declared_in(readers.__name__)
    for name in family.model_types
}
_KEYS = """
    vision_feature_layer vision_feature_select_strategy image_seq_length image_grid_pinpoints
    ignore_index vocab_size use_image_newline_parameter hidden_size vision_aspect_ratio
"""


def language_of(config: Config, spoken: Config, words: str) -> ModelText:
    """The text of the language model in `spoken`, of the type `words` if it states none."""
    config.skip(*_KEYS.split())
    spoken.inherit(config, "tie_word_embeddings")
    kind = spoken.word("model_type", among=_LANGUAGES, default=words)
    if not spoken.has("model_type"):
        spoken.inherit(config, "model_type")
    prefix = spoken.drop("use_bidirectional_attention")
    text = _LANGUAGES[kind].read(spoken)
    if prefix:
        text.notes.append("Left out: tokens of a prompt see each other in both directions.")
    spoken.skip("num_image_tokens")
    spoken.finish()
    return text


def language_alone(config: Config, words: str) -> ModelText:
    """The text of a model of the type `words`, of which a configuration states only the keys of the
    language model."""
    text = _LANGUAGES[words].read(config)
    text.notes.append("Left out: the tower, of which the configuration states nothing.")
    return replace(text, name=config.text("model_type"))


_V = Tower("_v")
_NOTES = (
    "Of I_v images the patches of each row follow each other; %merged is the number of each token",
    "of an image, and as many as there are or more for one of text.",
)
#: Appends a projector on patches [B*I_v, N_v, D_v], and returns its tokens [B*I_v, N, D].
Projector = Callable[[Config, ModelText, Body, str], str]


@dataclass(frozen=True, slots=True)
class Eye:
    """A vision tower by its differences from that of SigLIP: a `token` before the patches, a norm
    `pre` before the layers; `turned` rotates queries and keys by rows and columns; without `wide`
    model code computes the softmax in the type of its operands; the last `unused` layers and the
    final norm are not computed if the projector uses an earlier layer."""

    patch_bias: bool = True
    token: bool = False
    positions: bool = True
    pre: Norm | None = None
    norm: Norm = LAYER
    post: bool = True
    scaled: bool = False
    turned: bool = False
    gated: bool = False
    biases: str = "qkvo"
    wide: bool = True
    unused: int = 0

    def see(self, vision: Config, text: ModelText, body: Body, idle: Idle) -> str:
        """Append the tower on `%images`, and return vectors of patches; declares unused layers."""
        x = self._patches(body)
        rope = Rope("10000") if self.turned else None
        if rope:
            text.notes.append("Rows and columns are rotated like one position: the same work.")
        attention = MultiHead(self.biases, name="image_attention", rope=rope, wide=self.wide)
        default = "silu" if self.gated else "gelu_pytorch_tanh"
        act = read_activation(vision, "hidden_act", default=default)
        mlp = FeedForward(act, gated=self.gated, bias="o" in self.biases)
        layer = encoder(text, attention, mlp, tower=_V, norm=self.norm, scaled=self.scaled)
        count = "L_v"
        if self.unused:
            text.symbol("L_rest", self.unused, "layers of the tower behind those that are used")
            count = "L_v - L_rest"
            idle.layers("L_rest", "rest_")
        y = repeated(body, x, layer, "seen0", "vision", count)
        if self.post and self.unused:
            idle.norm("post_norm", "D_v")
        elif self.post:
            y = self.norm.write(body, "seen1", y, "vision_norm", "D_v")
        if not self.token:
            return y
        return body.let("seen", f"stg.slice[dim = 1, start = 1, size = N_v]({y})")

    def _patches(self, body: Body) -> str:
        steps = [
            'stg.reshape["bic(hp)(wq)->bichpwq", factors = (p, q), sizes = (P_v, P_v)]({})',
            f'stg.einsum["bichpwq,cpqd->bihwd"]({{}}, {body.param("w_patch", "C, P_v, P_v, D_v")})',
        ]
        if self.patch_bias:
            steps.append(f'stg.add["bihwd,d->bihwd"]({{}}, {body.param("b_patch", "D_v")})')
        steps.append('stg.reshape["bihwd->(bi)(hw)d"]({})')
        x = body.steps("p", "%images", steps)
        if self.token:
            x = with_class_token(body, "pc", x, "D_v", ["class_token"], batch="B*I_v")
        if self.positions:
            class_token = " + 1" if self.token else ""
            x = with_positions(body, "pp", x, f"X_v*X_v{class_token}, D_v")
        return self.pre.write(body, "pn", x, "pre_norm", "D_v") if self.pre else x


_CLIP = Eye(patch_bias=False, token=True, pre=LAYER)
_GATED = Eye(patch_bias=False, positions=False, post=False, turned=True, gated=True, biases="")
_SIGLIP = (Eye(), (768, 3072, 12, 16, 12, 224))
#: Towers by type, with the defaults of missing keys: width, inner width, layers, side of a patch,
#: heads, side of an image.
_EYES = {
    "clip_vision_model": (_CLIP, (768, 3072, 12, 32, 12, 224)),
    "siglip_vision_model": _SIGLIP,
    "idefics3_vision": _SIGLIP,
    "smolvlm_vision": _SIGLIP,
    "pixtral": (replace(_GATED, pre=RMS, norm=RMS), (1024, 4096, 24, 16, 16, 1024)),
    "llama4_vision_model": (replace(_CLIP, turned=True, wide=False), (768, 5632, 34, 14, 16, 448)),
    "internvl_vision": (
        Eye(token=True, post=False, scaled=True, wide=False),
        (1024, 4096, 24, 14, 16, 448),
    ),
}


def _read_eye(kind: str, vision: Config, text: ModelText) -> Eye:
    """Declare the sizes of a tower, and return its differences from others."""
    eye, (width, inner, layers, patch, heads, image) = _EYES[kind]
    read_idle(vision, text, width=width, inner=inner, layers=layers, patch=patch)
    read_heads_of(vision, text, "_v", "num_attention_heads", heads)
    image_tokens(vision, text, image)
    text.symbol("X_v", vision.side("image_size", default=image) // text.value("P_v"), "of a side")
    text.replace("N_v", text.value("N_v"), "X_v*X_v: patches of an image")
    text.assume("N_v == X_v*X_v")
    text.symbol("I_v", 1, "images of a sequence")
    vision.only("vision_use_head", False)
    vision.skip("projection_dim", "vocab_size", "num_image_tokens", "projector_hidden_act")
    vision.skip("rope_theta", "rope_parameters", "num_positions", "max_image_size", "head_dim")
    if kind == "internvl_vision":
        vision.fixed(use_qk_norm=False, norm_type="layer_norm")
        vision.fixed(use_absolute_position_embeddings=True, use_mask_token=False)
        vision.only("use_mean_pooling", True)
        vision.skip("layer_scale_init_value")
        biased = vision.flag("attention_bias", default=False)
        eye = replace(eye, biases="qkvo" if biased else "o")
    return eye


# -- projectors ------------------------------------------------------------------------------------


def _two(config: Config, body: Body, x: str, inner: str, *, bias: bool) -> str:
    """Append two products to the width D with an activation between them."""
    act = config.word("projector_hidden_act", among=ACTIVATIONS, default="gelu")
    u = _product(body, "inner", x, "in", f"{inner}, D", bias=bias)
    return _product(body, "proj", activated(act).format(u), "out", "D, D", bias=bias)


def _product(body: Body, out: str, x: str, name: str, sizes: str, *, bias: bool) -> str:
    steps = [f'stg.einsum["bsd,de->bse"]({{}}, {body.param(f"w_projector_{name}", sizes)})']
    if bias:
        width = sizes.rpartition(", ")[2]
        steps.append(f'stg.add["bse,e->bse"]({{}}, {body.param(f"b_projector_{name}", width)})')
    x = body.let(f"{out}_x", x) if x.startswith("stg") else x
    return body.steps(out, x, steps)


def _squares(config: Config, key: str, text: ModelText, body: Body, x: str, side: int) -> str:
    """Append squares of side x side patches: [B*I_v, rows, side, columns, side, D_v]."""
    if side < 1 or text.value("X_v") % side:
        patches = text.value("X_v")
        raise config.refuse(key, f"gives squares of {side}, which do not tile {patches} patches")
    sizes = f"({side}, X_v/{side}, {side})"
    text.assume(f"X_v % {side} == 0")
    cut = f'stg.reshape["b(huwv)d->bhuwvd", factors = (u, w, v), sizes = {sizes}]'
    return body.let("squares", f"{cut}({x})")


def _joined(body: Body, squares: str) -> str:
    steps = ['stg.permute["bhuwvd->bhwuvd"]({})', 'stg.reshape["bhwuvd->b(hw)(uvd)"]({})']
    return body.steps("joined", squares, steps)


def _llava(config: Config, text: ModelText, body: Body, x: str) -> str:
    return _two(config, body, x, "D_v", bias=config.flag("multimodal_projector_bias", default=True))


def _linear(config: Config, text: ModelText, body: Body, x: str) -> str:
    config.only("projection_dim", text.value("D"))
    return _product(body, "proj", x, "linear", "D_v, D", bias=True)


def _pooled(config: Config, text: ModelText, body: Body, x: str) -> str:
    """Gemma 3: means of squares of patches, a norm and a product."""
    tokens = config.size("mm_tokens_per_image", default=256)
    side = next((n for n in range(1, 65) if n * n * tokens == text.value("N_v")), 0)
    s = _squares(config, "mm_tokens_per_image", text, body, x, side)
    steps = [
        'stg.sum["bhuwvd->bhwd"]({})',
        f"stg.scale[by = 1/{side * side}]({{}})",
        'stg.reshape["bhwd->b(hw)d"]({})',
        GEMMA_NORM.step(body, "projector_norm", "D_v"),
    ]
    n = body.steps("pooled", s, steps)
    return _product(body, "proj", n, "linear", "D_v, D", bias=False)


def _merged(config: Config, text: ModelText, body: Body, x: str) -> str:
    """Mistral 3: a norm, squares of patches joined by a product, and two products."""
    side = config.size("spatial_merge_size", default=2)
    n = RMS.write(body, "pnorm", x, "projector_norm", "D_v")
    j = _joined(body, _squares(config, "spatial_merge_size", text, body, n, side))
    m = _product(body, "union", j, "merge", f"{side * side}*D_v, D_v", bias=False)
    bias = config.flag("multimodal_projector_bias", default=False)
    return _two(config, body, m, "D_v", bias=bias)


def _shuffled(config: Config, text: ModelText, body: Body, x: str) -> str:
    """InternVL: squares of patches, a norm and two products."""
    ratio = config.ratio("downsample_ratio", default=1)
    side = int(1 / ratio) if ratio > 0 and (1 / ratio).denominator == 1 else 0
    j = _joined(body, _squares(config, "downsample_ratio", text, body, x, side))
    n = LAYER.write(body, "pnorm", j, "projector_norm", f"{side * side}*D_v")
    return _two(config, body, n, f"{side * side}*D_v", bias=True)


def _packed(config: Config, text: ModelText, body: Body, x: str) -> str:
    """Idefics 3: squares of patches and a product."""
    side = config.size("scale_factor", default=2)
    j = _joined(body, _squares(config, "scale_factor", text, body, x, side))
    return _product(body, "proj", j, "linear", f"{side * side}*D_v, D", bias=False)


# -- readers ---------------------------------------------------------------------------------------


def _among(config: Config, vision: Config, kind: str, project: Projector) -> Among:
    def write(text: ModelText, body: Body) -> str:
        eye = _read_eye(kind, vision, text)
        default = -2 if kind == "clip_vision_model" else -1
        layer = config.count("vision_feature_layer", default=default, least=-text.value("L_v"))
        eye = replace(eye, unused=-1 - layer if layer < 0 else text.value("L_v") - layer)
        idle, tower, projector = Idle(text), Body(), Body()
        seen = eye.see(vision, text, tower, idle)
        if eye.unused:
            tower.do(idle.call("unused", "Layers of the tower behind those used: @{name}."))
        text.scope(body, "vision", "%images", tower, seen)
        tokens = project(config, text, projector, seen)
        text.scope(body, "projector", seen, projector, tokens)
        vision.finish()
        text.notes += _NOTES
        rows = 'stg.reshape["(bi)sd->b(is)d", factors = i, sizes = I_v]'
        return body.let("image", f"{rows}({tokens})")

    return Among("%images: bf16[B, I_v, C, X_v*P_v, X_v*P_v]", write)


def reader(project: Projector, tower: str, words: str) -> Reader:
    """The reader of a language model with a tower; `tower` and `words` are their default types."""

    def read(config: Config) -> ModelText:
        vision, spoken = config.needed("vision_config"), config.needed("text_config")
        kind = vision.word("model_type", among=_EYES, default=tower)
        spoken.among = _among(config, vision, kind, project)
        return _finished(config, language_of(config, spoken, words))

    return read


def read_gemma3_images(config: Config) -> ModelText:
    """Gemma 3 with I_v images in each sequence."""
    vision = config.needed("vision_config")
    config.merge("text_config")
    config.among = _among(config, vision, "siglip_vision_model", _pooled)
    return _finished(config, gemma3(config, seen=True))


def read_llama4_images(config: Config) -> ModelText:
    """Llama 4 with I_v images in each sequence: squares of patches, an adapter, a projection."""
    vision = config.needed("vision_config")
    config.merge("text_config")

    def adapted(config: Config, text: ModelText, body: Body, x: str) -> str:
        ratio = vision.ratio("pixel_shuffle_ratio", default=Fraction(1, 2))
        side = int(1 / ratio) if ratio > 0 and (1 / ratio).denominator == 1 else 0
        j = _joined(body, _squares(vision, "pixel_shuffle_ratio", text, body, x, side))
        vision.only("intermediate_size", side * side * text.value("D_v"))
        read_size(vision, text, "U_v", "projector_input_dim", default=4096)
        read_size(vision, text, "O_v", "projector_output_dim", default=4096)
        vision.only("vision_output_dim", text.value("O_v"))
        vision.skip("vision_feature_select_strategy", "multi_modal_projector_bias")
        vision.skip("projector_dropout", "vision_feature_layer")
        for out, sizes in (("adapted0", f"{side * side}*D_v, U_v"), ("adapted1", "U_v, O_v")):
            u = _product(body, f"{out}_u", j, out, sizes, bias=False)
            j = body.let(out, f"stg.gelu[form = erf]({u})")
        return _product(body, "proj", j, "linear", "O_v, D", bias=False)

    config.among = _among(config, vision, "llama4_vision_model", adapted)
    return _finished(config, read_llama4(config))


def _finished(config: Config, text: ModelText) -> ModelText:
    config.skip("vision_feature_select_strategy", "image_seq_length", "image_grid_pinpoints")
    return replace(text, name=config.text("model_type"))


READ_LLAVA = reader(_llava, "clip_vision_model", "llama")
READ_MISTRAL3 = reader(_merged, "pixtral", "mistral")
READ_INTERNVL = reader(_shuffled, "internvl_vision", "qwen2")
READ_PALIGEMMA = reader(_linear, "siglip_vision_model", "gemma")
READ_IDEFICS3 = reader(_packed, "siglip_vision_model", "llama")
