"""Vision-language models: a language model, and an unused vision tower (`idle`).

Qwen3-VL with images in the step (`stagec import --images`): results of intermediate layers of
the tower are added to the stream of the text after its first layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.idle import Idle, image_tokens, read_idle, words_of
from stagec.importers.common.sizes import read_size
from stagec.importers.families.encoders import read_activation, read_heads_of
from stagec.importers.families.images import (
    read_qwen2_5_vl_images,
    read_qwen2_vl_images,
    seen_attention,
)
from stagec.importers.families.images_llama import read_mllama_images
from stagec.importers.families.linear_attention import read_qwen3_5, read_qwen3_5_moe
from stagec.importers.families.llama import read_exaone4, read_glm4v_text, read_qwen2, read_qwen3
from stagec.importers.families.mixture import read_glm4_moe, read_qwen3_moe
from stagec.importers.family import Reader, reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, Attention, FeedForward
from stagec.importers.writing.stack import Layer, Sublayer, write_stack
from stagec.importers.writing.text import Among, Body, ModelText

_ARGS = (
    "%patches: bf16[B, I_v, N_v, C, Y_v, P_v, P_v], %cells: i32[B, I_v, N_v],\n"
    "    %rows_and_columns: i32[B, I_v, 2, N_v]"
)
_NOTES = (
    "%patches are those of images, four that become one token after each other; %cells are their",
    "rows of the table of positions (the reference interpolates between four), %rows_and_columns",
    "their places. %merged is the number of each token of an image, or for one of text I_v*N_v.",
    "Positions of tokens by three axes are rotated like those of one: the same work.",
)


def _reader(read: Reader) -> Reader:
    def read_images(config: Config) -> ModelText:
        vision, words = config.needed("vision_config"), words_of(config)
        count = vision.layers("depth", default=27)
        deep = vision.sizes("deepstack_visual_indexes", most=count - 1)
        if not vision.is_list("deepstack_visual_indexes"):
            deep = (8, 16, 24)
        if list(deep) != sorted(set(deep)) or len(deep) >= words.layers(default=32):
            raise vision.refuse(
                "deepstack_visual_indexes",
                "must increase, and be fewer than the layers of the language model",
            )

        def write(text: ModelText, body: Body) -> str:
            _read_tower(vision, text)
            return _write_tower(vision, text, body, count, deep)

        words.among = Among(_ARGS, write, len(deep))
        text = read(words)
        words.finish()
        vision.finish()
        text.name = config.text("model_type")
        text.notes += _NOTES
        return text

    return read_images


def _read_tower(vision: Config, text: ModelText) -> None:
    """Declare the sizes of the tower."""
    read_size(vision, text, "D_v", "hidden_size", default=1152)
    read_heads_of(vision, text, "_v", "num_heads", 16)
    read_size(vision, text, "F_v", "intermediate_size", default=4304)
    read_size(vision, text, "C", "in_channels", "in_chans", default=3)
    read_size(vision, text, "P_v", "patch_size", default=16)
    read_size(vision, text, "Y_v", "temporal_patch_size", default=2)
    read_size(vision, text, "X_v", "num_position_embeddings", default=2304)
    merge = vision.size("spatial_merge_size", default=2)
    text.symbol("U_v", merge * merge, "spatial_merge_size^2")
    text.symbol("I_v", 1, "images of a sequence")
    text.symbol("N_v", 1024, "patches of an image")
    text.assume("N_v % U_v == 0")
    vision.only("out_hidden_size", text.value("D"))
    vision.skip("rope_parameters")


def _write_tower(
    vision: Config, text: ModelText, body: Body, count: int, deep: Sequence[int]
) -> str:
    """Append the tower and its mergers, and return tokens [B, I_v*N_v/U_v, D]."""
    mlp = FeedForward(
        read_activation(vision, "hidden_act", default="gelu_pytorch_tanh"), gated=False, bias=True
    )
    attention = seen_attention(text)
    block = mlp.write(text).with_("D = D_v", "F = F_v")
    layer = Layer(
        [
            Sublayer(attention, "attn", LAYER, width="D_v", operands=["%at"]),
            Sublayer(block, "ffn", LAYER, width="D_v"),
        ]
    )
    tower, projector = Body(), Body()
    table = tower.param("vision_positions", "X_v, D_v")
    e = tower.let("e", f"stg.embedding({table}, %cells)")
    placed = text.use("seen", "C Y_v D_v", "placed", "P = P_v", function="seen_patches")
    x = tower.call("pe", placed, "%patches", e)
    tower.let("at", 'stg.reshape["bian->(bi)an"](%rows_and_columns)')
    merge = text.use("seen", "D D_v I_v U_v", function="seen_merged")
    ends = [0, *(i + 1 for i in deep), count]
    streams: list[str] = []
    for number, (start, end) in enumerate(pairwise(ends)):
        if end > start:
            kind = f"vision{number}"
            x = write_stack(text, tower, x, {kind: layer}, [kind] * (end - start), out=f"v{number}")
        streams.append(x)
    seen = list(dict.fromkeys(streams))  # the last two are equal if the last layer is a deep one
    text.scope(body, "vision", "%patches, %cells, %rows_and_columns", tower, *seen)
    *inner, last = streams
    merged = [
        projector.call(f"m{n}", merge.with_("norm_of = token"), x) for n, x in enumerate(inner)
    ]
    merged.append(projector.call("image0", merge, last))
    text.scope(body, "projector", ", ".join(seen), projector, *merged)
    for number in range(len(deep)):
        zeros = body.let(f"zeros{number}", f"stg.scale[by = 0]({_WORDS})", "for text")
        body.let(f"deep{number}", f"stg.merge_rows({zeros}, %m{number}, %merged)")
    return body.let("image", 'stg.reshape["bsd->bsd"](%image0)')  # a part may end here


#: The embedded words, as a decoder names them.
_WORDS = "%words"


read_qwen3_vl_images = _reader(read_qwen3)
read_qwen3_vl_moe_images = _reader(read_qwen3_moe)


# -- Qwen-VL ---------------------------------------------------------------------------------------


@reads(
    "Qwen2.5-VL",
    "qwen2_5_vl",
    features="Qwen2; tower with SwiGLU, 2 x 2 merger",
    read_images=read_qwen2_5_vl_images,
)
def read_qwen2_5_vl(config: Config) -> ModelText:
    """Qwen2.5-VL (arXiv 2502.13923): a tower with RMSNorm and SwiGLU, patches of two frames, 2 x 2
    patches merged to a token."""
    text, vision = _qwen(config)
    idle = qwen2_5_tower(vision, text)
    vision.finish()
    return idle.beside()


@reads("EXAONE 4.5", "exaone4_5", features="EXAONE 4; tower of Qwen2.5-VL, grouped queries")
def read_exaone4_5(config: Config) -> ModelText:
    """EXAONE 4.5: EXAONE 4 with the tower of Qwen2.5-VL, whose queries share heads of keys."""
    config.merge("text_config")
    config.skip("vision_config")
    text, vision = read_exaone4(config), config.needed("vision_config")
    heads = vision.size("num_heads", default=16)
    groups = vision.size("num_key_value_heads", default=8)
    vision.divides("num_key_value_heads", groups, heads, "heads")
    width = vision.size("hidden_size", default=3584)
    text.symbol("J_v", groups * (width // heads), "num_key_value_heads * hidden_size / num_heads")
    idle = qwen2_5_tower(vision, text)
    vision.finish()
    return idle.beside()


def qwen2_5_tower(vision: Config, text: ModelText) -> Idle:
    """Declare the tower of Qwen2.5-VL, with its merger."""
    read_idle(vision, text, width=3584, inner=3420, layers=32, patch=14)
    vision.skip("window_size", "fullatt_block_indexes")
    idle = _qwen_tower(vision, text)
    idle.param("attn_norm mlp_norm", "L_v, D_v")
    idle.matrix("gate_up", "L_v, D_v, 2, F_v", "L_v, 2, F_v")
    idle.matrix("down", "L_v, F_v, D_v", "L_v, D_v")
    idle.param("merger_norm", "D_v")
    _merger(vision, idle, "out_hidden_size")
    return idle


@reads(
    "Qwen2-VL",
    "qwen2_vl",
    features="Qwen2; tower of ViT, 2 x 2 merger",
    read_images=read_qwen2_vl_images,
)
def read_qwen2_vl(config: Config) -> ModelText:
    """Qwen2-VL (arXiv 2409.12191): a ViT of any resolution, 2 x 2 patches merged to a token."""
    text, vision = _qwen(config)
    width = vision.size("embed_dim", default=1280)
    ratio = vision.size("mlp_ratio", default=4)
    read_size(vision, text, "O_v", "hidden_size", default=3584)
    text.symbol("D_v", width, "embed_dim")
    text.symbol("F_v", ratio * width, "mlp_ratio * embed_dim")
    text.symbol("L_v", vision.layers("depth", default=32), "depth")
    read_size(vision, text, "C", "in_channels", "in_chans", default=3)
    read_size(vision, text, "P_v", "patch_size", default=14)
    vision.skip("num_heads", "hidden_act")
    idle = _qwen_tower(vision, text)
    idle.norm("attn_norm mlp_norm", "L_v, D_v")
    idle.feed_forward()
    idle.norm("merger_norm", "D_v")
    _merger(vision, idle, "hidden_size")
    vision.finish()
    return idle.beside()


def _qwen(config: Config) -> tuple[ModelText, Config]:
    config.merge("text_config")
    config.skip("vision_config")
    return read_qwen2(config), config.needed("vision_config")


def _qwen_tower(vision: Config, text: ModelText, bias: str = "") -> Idle:
    """The common parts of the towers: patches of some frames, with a bias of these dimensions; q, k
    and v with biases."""
    read_size(vision, text, "Y_v", "temporal_patch_size", default=2)
    vision.skip("spatial_patch_size", "tokens_per_second", "in_chans", "rope_parameters")
    idle = Idle(text)
    idle.matrix("patch", "C, Y_v, P_v, P_v, D_v", bias)
    if "J_v" in text.symbols:  # the width of all keys, which are fewer than queries
        idle.matrix("q", "L_v, D_v, D_v", "L_v, D_v")
        idle.matrix("k v", "L_v, D_v, J_v", "L_v, J_v")
    else:
        idle.matrix("qkv", "L_v, D_v, 3, D_v", "L_v, 3, D_v")
    idle.matrix("o", "L_v, D_v, D_v", "L_v, D_v")
    return idle


def _merger(vision: Config, idle: Idle, key: str) -> None:
    """Declare the merger: two products of m x m patches, to the width of the language model."""
    text = idle.text
    merge = vision.size("spatial_merge_size", default=2)
    text.symbol("U_v", merge * merge * text.value("D_v"), "merged patches")
    read_size(vision, text, "O_v", key, default=3584)
    idle.matrix("merger_in", "U_v, U_v", "U_v")
    idle.matrix("merger_out", "U_v, O_v", "O_v")


# -- Llama 3.2 Vision ------------------------------------------------------------------------------


@reads(
    "Llama 3.2 Vision",
    "mllama",
    features="gated cross attention, tiles",
    read_images=read_mllama_images,
)
def read_mllama(config: Config) -> ModelText:
    """Llama 3.2 Vision: some layers have gated attention to images only; a step with text leaves
    them out."""
    vision = config.needed("vision_config")
    config.merge("text_config")
    crossed = config.sizes("cross_attention_layers")
    model = DecoderModel(config, Sizes(4096, 14336, 40, 32, 128256, 131072, groups=8))
    text, total = model.text, model.count
    if any(layer >= total for layer in crossed) or len(set(crossed)) < len(crossed):
        raise config.refuse("cross_attention_layers", f"must be different layers below {total}")
    model = _without(model, total - len(crossed))
    mixer, block = Attention(rope=model.rope()), FeedForward(model.activation())
    model.stack(mixer, block)
    idle = Idle(text)
    idle.param("image_words", "8, D")
    if crossed:
        _crossed(idle, text, len(crossed))
    read_idle(vision, text, width=1280, inner=5120, layers=32, patch=14)
    _tiled(vision, idle)
    return idle.beside()


def _without(model: DecoderModel, count: int) -> DecoderModel:
    if count < 1:
        raise model.config.refuse(
            "cross_attention_layers", "contains all layers: none is left for self-attention"
        )
    model.count = count
    return model


def _crossed(idle: Idle, text: ModelText, count: int) -> None:
    """Declare layers that attend to images, with their gates and norms of queries and keys."""
    n = text.symbol("L_cross", count, "cross_attention_layers")
    for name, dims in (("q", "D, H, K"), ("k", "D, G, K"), ("v", "D, G, K"), ("o", "H, K, D")):
        idle.matrix(f"cross_{name}", f"{n}, {dims}")
    idle.param("cross_q_norm cross_k_norm", f"{n}, K")
    idle.param("cross_attn_norm cross_ffn_norm", f"{n}, D")
    idle.matrix("cross_gate_up", f"{n}, D, 2, F")
    idle.matrix("cross_down", f"{n}, F, D")
    idle.param("cross_attn_gate cross_ffn_gate", n)


def _tiled(vision: Config, idle: Idle) -> None:
    """Declare the tower: images in tiles with separate positions; layers with gates after the
    others; concatenated outputs of several layers."""
    text = idle.text
    side = vision.size("image_size", default=448) // text.value("P_v")
    text.symbol("N_v", side * side + 1, "(image_size / patch_size)^2 + 1")
    tiles = vision.size("max_num_tiles", default=4)
    text.symbol("X_v", tiles, "max_num_tiles")
    ratios = vision.lists("supported_aspect_ratios")
    text.symbol("A_v", 1 + (ratios or 8), "supported_aspect_ratios, and none")
    text.symbol("L_global", vision.layers("num_global_layers", default=8), "num_global_layers")
    parts = len(vision.sizes("intermediate_layers_indices")) or 5
    width = (1 + parts) * text.value("D_v")
    text.symbol("U_v", width, "(1 + intermediate_layers_indices) * D_v")
    vision.only("vision_output_dim", width)
    idle.matrix("patch", "C, P_v, P_v, D_v")
    idle.param("class_token", "D_v")
    idle.param("positions", "N_v, D_v")
    idle.param("tile_positions", "A_v, X_v, N_v, D_v")
    idle.param("pre_tile_positions post_tile_positions", "A_v, X_v, D_v")
    idle.param("position_gate pre_tile_gate post_tile_gate", "")
    idle.norm("pre_norm post_norm", "D_v")
    idle.layers(attention_bias=False)
    idle.layers("L_global", "global_", attention_bias=False)
    idle.param("global_attn_gate global_mlp_gate", "L_global")
    idle.matrix("projector", "U_v, D", "D")
    vision.finish()


# -- Qwen3-VL, GLM-V -------------------------------------------------------------------------------


@reads(
    "Qwen3-VL",
    "qwen3_vl",
    features="Qwen3; ViT with deep mergers",
    read_images=read_qwen3_vl_images,
)
def read_qwen3_vl(config: Config) -> ModelText:
    """Qwen3-VL (arXiv 2511.21631): a ViT with mergers of intermediate layers."""
    return _qwen3_vl(config, read_qwen3)


@reads(
    "Qwen3-VL-MoE",
    "qwen3_vl_moe",
    features="Qwen3-MoE; the same tower",
    read_images=read_qwen3_vl_moe_images,
)
def read_qwen3_vl_moe(config: Config) -> ModelText:
    """Qwen3-VL with experts."""
    return _qwen3_vl(config, read_qwen3_moe)


@reads("Qwen3.5 with images", "qwen3_5", features="the tower of Qwen3-VL")
def read_qwen3_5_vl(config: Config) -> ModelText:
    """Qwen3.5 with its tower: that of Qwen3-VL with a merger of the last layer only."""
    return _qwen3_vl(config, read_qwen3_5, deep=())


@reads("Qwen3.5-MoE with images", "qwen3_5_moe", features="the tower of Qwen3-VL")
def read_qwen3_5_vl_moe(config: Config) -> ModelText:
    """Qwen3.5 with experts and the same tower."""
    return _qwen3_vl(config, read_qwen3_5_moe, deep=())


_DEEP = (8, 16, 24)


def _qwen3_vl(config: Config, read: Reader, deep: Sequence[int] = _DEEP) -> ModelText:
    text, vision = words_and_tower(config, read)
    idle = qwen3_tower(vision, text, deep)
    vision.finish()
    return idle.beside()


def qwen3_tower(vision: Config, text: ModelText, deep: Sequence[int] = _DEEP) -> Idle:
    """Declare the tower of Qwen3-VL, with its merger and those of the layers `deep`."""
    read_idle(vision, text, width=1152, inner=4304, layers=27, patch=16)
    read_size(vision, text, "N_v", "num_position_embeddings", default=2304)
    if vision.has("deepstack_visual_indexes"):
        deep = vision.sizes("deepstack_visual_indexes")
    idle = _qwen_tower(vision, text, bias="D_v")
    idle.param("positions", "N_v, D_v")
    idle.norm("attn_norm mlp_norm", "L_v, D_v")
    idle.feed_forward()
    idle.norm("merger_norm", "D_v")
    _merger(vision, idle, "out_hidden_size")
    if deep:
        text.symbol("L_deep", len(deep), "deepstack_visual_indexes")
        idle.norm("deep_norm", "L_deep, U_v")
        idle.matrix("deep_in", "L_deep, U_v, U_v", "L_deep, U_v")
        idle.matrix("deep_out", "L_deep, U_v, O_v", "L_deep, O_v")
    return idle


@reads("GLM-4.1V", "glm4v", features="GLM-4; tower with a gate, 2 x 2 merger")
def read_glm4v(config: Config) -> ModelText:
    """GLM-4.1V (arXiv 2507.01006): a tower with a gate, 2 x 2 patches merged by a convolution."""
    return _glm_v(config, read_glm4v_text)


@reads("GLM-4.5V", "glm4v_moe", features="GLM-4.5; the same tower")
def read_glm4v_moe(config: Config) -> ModelText:
    """GLM-4.5V: GLM-4.5 with the same tower."""
    return _glm_v(config, read_glm4_moe)


@reads("GLM-4.6V", "glm46v", features="GLM-4.5V, or the small GLM-4.1V")
def read_glm46v(config: Config) -> ModelText:
    """GLM-4.6V: GLM-4.5V, or the small GLM-4.1V by the type of the language model."""
    words = config.section("text_config")
    types = ("glm4v_text", "glm4v_moe_text", "glm4", "glm4_moe")
    kind = words.word("model_type", among=types, default=types[0]) if words else types[0]
    return _glm_v(config, read_glm4_moe if "moe" in kind else read_glm4v_text)


def _glm_v(config: Config, read: Reader) -> ModelText:
    text, vision = words_and_tower(config, read)
    # the inner width of layers is the output width; the key is that of the merger
    inner = vision.size("out_hidden_size", default=4096)
    read_size(vision, text, "U_v", "intermediate_size", default=13696)
    text.symbol("D_v", vision.size("hidden_size", default=1536), "hidden_size")
    text.symbol("F_v", inner, "out_hidden_size")
    text.symbol("L_v", vision.layers("depth", default=24), "depth")
    read_size(vision, text, "C", "in_channels", default=3)
    read_size(vision, text, "P_v", "patch_size", default=14)
    read_size(vision, text, "Y_v", "temporal_patch_size", default=2)
    read_size(vision, text, "X_v", "spatial_merge_size", default=2)
    image_tokens(vision, text, 336)
    vision.only("attention_bias", False)
    vision.skip("num_heads", "hidden_act", "rope_parameters")
    idle = Idle(text)
    idle.matrix("patch", "C, Y_v, P_v, P_v, D_v", "D_v")
    idle.param("positions", "N_v, D_v")
    idle.param("pre_norm post_norm", "D_v")
    idle.param("attn_norm mlp_norm", "L_v, D_v")
    idle.matrix("qkv", "L_v, D_v, 3, D_v")
    idle.matrix("o", "L_v, D_v, D_v")
    idle.matrix("gate_up", "L_v, D_v, 2, F_v")
    idle.matrix("down", "L_v, F_v, D_v")
    idle.matrix("merge", "X_v, X_v, D_v, F_v", "F_v")
    idle.matrix("projector", "F_v, F_v")
    idle.norm("projector_norm", "F_v")
    idle.matrix("merger_gate_up", "F_v, 2, U_v")
    idle.matrix("merger_down", "U_v, F_v")
    vision.finish()
    return idle.beside()


def words_and_tower(config: Config, read: Reader) -> tuple[ModelText, Config]:
    """The text of the language model in `text_config`, and the tower's configuration."""
    words = words_of(config)
    text = read(words)
    words.finish()
    return replace(text, name=config.text("model_type")), config.needed("vision_config")
