"""The parameters of a vision-language model that a step with text only does not use. They are
declared and frozen, without computations.

`beside` adds them to the text of a language model. A tower is a function of declarations with
symbols that end in `_v`; parameters of its layers have the number of layers as first dimension.
"""

from collections.abc import Mapping, Sequence

from stagec.importers.common.sizes import read_size
from stagec.importers.reading.config import Config
from stagec.importers.writing.text import Body, ModelText

_NOTE = "A step of texts: what images need is declared in @{name} and frozen, and is not computed."


class Idle:
    """Declarations of parameters of a tower, each frozen."""

    def __init__(self, text: ModelText) -> None:
        self.text, self.body = text, Body()

    def param(self, names: str, dims: str) -> None:
        """Declare parameters with these names, separated by blanks, and these dimensions."""
        for name in names.split():
            self.body.param(name, dims, role="frozen")

    def matrix(self, names: str, dims: str, bias: str = "") -> None:
        """Declare matrices, each with a bias of these dimensions."""
        for name in names.split():
            self.param(f"w_{name}", dims)
            if bias:
                self.param(f"b_{name}", bias)

    def norm(self, names: str, dims: str, *, bias: bool = True) -> None:
        """Declare the vectors of norms."""
        for name in names.split():
            self.param(f"{name}_w {name}_b" if bias else name, dims)

    def layers(self, count: str = "L_v", prefix: str = "", *, attention_bias: bool = True) -> None:
        """Declare layers of LayerNorm, attention and a feed-forward block without a gate."""
        self.norm(f"{prefix}attn_norm {prefix}mlp_norm", f"{count}, D_v")
        names = " ".join(prefix + name for name in "qkvo")
        self.matrix(names, f"{count}, D_v, D_v", f"{count}, D_v" if attention_bias else "")
        self.feed_forward(count, prefix)

    def two(self, name: str = "projector", inner: str = "D_v", *, bias: bool = True) -> None:
        """Declare two products to the width D."""
        self.matrix(f"{name}_in", f"{inner}, D", "D" if bias else "")
        self.matrix(f"{name}_out", "D, D", "D" if bias else "")

    def feed_forward(self, count: str = "L_v", prefix: str = "") -> None:
        """Declare feed-forward blocks of layers, without a gate."""
        self.matrix(f"{prefix}up", f"{count}, D_v, F_v", f"{count}, F_v")
        self.matrix(f"{prefix}down", f"{count}, F_v, D_v", f"{count}, D_v")

    def beside(self, name: str = "vision", note: str = _NOTE) -> ModelText:
        """Add the function and its call to the text, with a note, and return the text."""
        call, text = self.call(name, note), self.text
        train = text.functions.pop("train")
        text.functions["train"] = [train[0], f"  {call}", *train[1:]]
        return text

    def call(self, name: str, note: str) -> str:
        """Add the function to the text, with a note, and return its call."""
        self.body.do("stg.return()")
        self.text.notes.append(note.format(name=name))
        return f"stg.call @{self.text.function(name, '', self.body)}()"


#: Towers that releases state by name only, with the sizes of their configurations.
NAMED: Mapping[str, Mapping[str, int]] = {
    "openai/clip-vit-large-patch14": {"D_v": 1024, "F_v": 4096, "L_v": 24, "P_v": 14, "N_v": 256},
    "openai/clip-vit-large-patch14-336": {
        "D_v": 1024,
        "F_v": 4096,
        "L_v": 24,
        "P_v": 14,
        "N_v": 576,
    },
    "google/siglip-so400m-patch14-384": {
        "D_v": 1152,
        "F_v": 4304,
        "L_v": 27,
        "P_v": 14,
        "N_v": 729,
    },
}


def declare_named(text: ModelText, name: str) -> None:
    """Declare the sizes of a tower of this name."""
    for symbol, value in NAMED[name].items():
        text.symbol(symbol, value, f"of {name}")
    text.symbol("C", 3, "channels of an image")


def words_of(config: Config) -> Config:
    """The configuration of the language model, with keys of the whole model. Raises
    `DiagnosticError` if it is missing."""
    words = config.needed("text_config")
    words.inherit(config, "tie_word_embeddings")
    if not words.has("model_type"):
        words.inherit(config, "model_type")
    return words


def read_idle(
    config: Config, text: ModelText, *, width: int, inner: int, layers: int, patch: int
) -> None:
    """Declare D_v, F_v, L_v, C and P of a tower; the arguments are the defaults of missing keys."""
    read_size(config, text, "D_v", "hidden_size", "embed_dim", default=width)
    read_size(config, text, "F_v", "intermediate_size", default=inner)
    count = config.layers("num_hidden_layers", "depth", default=layers)
    text.symbol("L_v", count, "layers of the tower")
    read_size(config, text, "C", "num_channels", "in_chans", "in_channels", default=3)
    text.symbol("P_v", config.side("patch_size", default=patch), "patch_size")
    config.skip("num_attention_heads", "num_heads", "attention_heads", "hidden_act", "norm_eps")


def image_tokens(config: Config, text: ModelText, image: int) -> None:
    """Declare N_v, the patches of an image."""
    size, patch = config.side("image_size", default=image), text.value("P_v")
    side = size // patch
    if not side:
        raise config.refuse("image_size", f"is {size}, less than one patch of {patch}")
    text.symbol("N_v", side * side, "(image_size / patch_size)^2")


def siglip(
    vision: Config,
    text: ModelText,
    usual: Sequence[int] = (768, 3072, 12, 16, 224),
    *,
    headed: bool = False,
) -> Idle:
    """Declare the tower of SigLIP (arXiv 2303.15343) or SigLIP 2 (2502.14786), which states the
    number of patches, with its pooling head if `vision_use_head` is set, by default `headed`.
    `usual` are the defaults of the width, the inner width, the layers, and the sides of a patch and
    of an image."""
    width, inner, layers, patch, image = usual
    read_idle(vision, text, width=width, inner=inner, layers=layers, patch=patch)
    if vision.text("model_type", default="").startswith("siglip2"):
        read_size(vision, text, "N_v", "num_patches", default=256)
        vision.skip("image_size")
    else:
        image_tokens(vision, text, image)
    headed = vision.flag("vision_use_head", default=headed)
    vision.skip("projection_dim", "num_image_tokens", "projector_hidden_act", "num_positions")
    vision.skip("max_image_size", "vocab_size")
    vision.finish()
    return as_siglip(text, headed=headed)


def as_siglip(text: ModelText, *, headed: bool) -> Idle:
    """A tower with learned positions and a norm after its layers, maybe with a pooling head."""
    idle = Idle(text)
    idle.matrix("patch", "C, P_v, P_v, D_v", "D_v")
    idle.param("positions", "N_v, D_v")
    idle.layers()
    idle.norm("norm", "D_v")
    if headed:
        idle.param("probe", "D_v")
        idle.matrix("head_q head_k head_v head_o", "D_v, D_v", "D_v")
        idle.norm("head_norm", "D_v")
        idle.matrix("head_up", "D_v, F_v", "F_v")
        idle.matrix("head_down", "F_v, D_v", "D_v")
    return idle


def as_clip(text: ModelText) -> Idle:
    """A tower with a class token, learned positions, and a norm before and after its layers."""
    idle = Idle(text)
    idle.matrix("patch", "C, P_v, P_v, D_v")
    idle.param("class_token", "D_v")
    idle.param("positions", "N_v + 1, D_v")
    idle.norm("pre_norm", "D_v")
    idle.layers()
    idle.norm("post_norm", "D_v")
    return idle


def clip(vision: Config, text: ModelText) -> Idle:
    """Declare the tower of CLIP (arXiv 2103.00020)."""
    read_idle(vision, text, width=768, inner=3072, layers=12, patch=32)
    image_tokens(vision, text, 224)
    vision.skip("projection_dim", "vocab_size")
    idle = as_clip(text)
    vision.finish()
    return idle


def gemma3_tower(config: Config, text: ModelText) -> ModelText:
    """The tower of Gemma-3: SigLIP without a head, and a projection to the width D."""
    vision = config.section("vision_config")
    if vision is None:
        return text
    config.skip("mm_tokens_per_image")
    idle = siglip(vision, text)
    idle.param("projector_norm", "D_v")
    idle.param("w_projector", "D_v, D")
    return idle.beside()


def llama4_tower(config: Config, text: ModelText) -> ModelText:
    """The tower of Llama 4: unfolded patches, a class token, a pixel shuffle before two
    products, and a projection to the width D."""
    vision = config.section("vision_config")
    if vision is None:
        return text
    read_idle(vision, text, width=768, inner=5632, layers=34, patch=14)
    image_tokens(vision, text, 448)
    ratio = vision.positive("pixel_shuffle_ratio", default=1)
    read_size(vision, text, "U_v", "projector_input_dim", default=4096)
    read_size(vision, text, "O_v", "projector_output_dim", default=4096)
    vision.only("vision_output_dim", text.value("O_v"))
    shuffled = text.value("D_v") / ratio**2
    if shuffled.denominator != 1 or shuffled != text.symbols["F_v"].value:
        raise vision.refuse("pixel_shuffle_ratio", "does not give the width in 'intermediate_size'")
    vision.skip("rope_theta", "vision_feature_layer", "vision_feature_select_strategy")
    vision.skip("multi_modal_projector_bias", "projector_dropout", "rope_parameters")
    idle = as_clip(text)
    idle.matrix("adapter_in", "F_v, U_v")
    idle.matrix("adapter_out", "U_v, O_v")
    idle.matrix("projector", "O_v, D")
    vision.finish()
    return idle.beside()


def gemma4_towers(config: Config, text: ModelText) -> ModelText:
    """The towers of Gemma 4: images by RMSNorm and a gate, sounds by a Conformer, each projected to
    the width D."""
    vision, sound = config.section("vision_config"), config.section("audio_config")
    if vision is None and sound is None:
        return text
    idle = Idle(text)
    if vision is not None:
        _gemma4_images(vision, idle)
    if sound is not None:
        _gemma4_sounds(sound, idle)
    config.skip("vision_soft_tokens_per_image", "initializer_range")
    return idle.beside("vision" if sound is None else "towers")


def _gemma4_images(vision: Config, idle: Idle) -> None:
    text = idle.text
    read_idle(vision, text, width=768, inner=3072, layers=16, patch=16)
    heads = vision.size("num_attention_heads", default=12)
    dim = read_size(vision, text, "K_v", "head_dim", default=64)
    text.symbol("U_v", heads * dim, "num_attention_heads * head_dim")
    groups = vision.size("num_key_value_heads", default=12)
    text.symbol("G_v", groups * dim, "num_key_value_heads * head_dim")
    read_size(vision, text, "N_v", "position_embedding_size", default=10240)
    vision.only("attention_bias", False)
    vision.skip("hidden_activation", "max_position_embeddings", "rope_parameters", "rope_theta")
    vision.skip("pooling_kernel_size", "default_output_length", "use_clipped_linears")
    vision.skip("standardize", "global_head_dim")
    idle.matrix("patch", "C, P_v, P_v, D_v")
    idle.param("positions", "2, N_v, D_v")
    for name, dims in (("q", "D_v, U_v"), ("k", "D_v, G_v"), ("v", "D_v, G_v"), ("o", "U_v, D_v")):
        idle.matrix(name, f"L_v, {dims}")
    idle.param("q_norm k_norm", "L_v, K_v")
    idle.param("attn_norm attn_post_norm ffn_norm ffn_post_norm", "L_v, D_v")
    idle.matrix("gate_up", "L_v, D_v, 2, F_v")
    idle.matrix("down", "L_v, F_v, D_v")
    idle.matrix("projector", "D_v, D")
    vision.finish()


def _gemma4_sounds(sound: Config, idle: Idle) -> None:
    text = idle.text
    width = read_size(sound, text, "D_a", "hidden_size", default=1024)
    text.symbol("L_a", sound.layers("num_hidden_layers", default=12), "layers of the tower")
    heads = sound.size("num_attention_heads", default=8)
    text.symbol("K_a", width // heads, "hidden_size / num_attention_heads")
    read_size(sound, text, "W_a", "conv_kernel_size", default=5)
    read_size(sound, text, "O_a", "output_proj_dims", default=1536)
    first, second = sound.sizes("subsampling_conv_channels", length=2) or (128, 32)
    text.symbol("C_a", first, "subsampling_conv_channels")
    text.symbol("C_b", second, "subsampling_conv_channels")
    text.symbol("U_a", first // 4 * second, "channels of a quarter of them, together")
    sound.skip("hidden_act", "residual_weight", "use_clipped_linears", "gradient_clipping")
    names = ("chunk_size", "context_left", "context_right", "logit_cap", "invalid_logits_value")
    sound.skip(*(f"attention_{name}" for name in names))
    idle.matrix("conv_a", "3, 3, C_a")
    idle.param("conv_a_norm", "C_a")
    idle.matrix("conv_b", "C_a, 3, 3, C_b")
    idle.param("conv_b_norm", "C_b")
    idle.matrix("sound_in", "U_a, D_a")
    for name in ("ffn_a", "ffn_b"):
        idle.matrix(f"{name}_up", "L_a, D_a, 4*D_a")
        idle.matrix(f"{name}_down", "L_a, 4*D_a, D_a")
        idle.param(f"{name}_norm {name}_post_norm", "L_a, D_a")
    idle.matrix("sound_q sound_k sound_v sound_o sound_distance", "L_a, D_a, D_a")
    idle.param("sound_scale", "L_a, K_a")
    idle.param("sound_norm sound_post_norm out_norm pre_norm_conv conv_norm", "L_a, D_a")
    idle.matrix("conv_up", "L_a, D_a, 2, D_a")
    idle.matrix("conv", "L_a, D_a, W_a")
    idle.matrix("conv_down", "L_a, D_a, D_a")
    idle.matrix("sound_out", "D_a, O_a", "O_a")
    idle.matrix("sound_projector", "O_a, D")
    sound.finish()
