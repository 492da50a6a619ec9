"""Vision-language models: a language model, and a tower of vision beside it (`idle`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stagec.importers.blocks import ACTIVATIONS, Attention, FeedForward
from stagec.importers.common import read_size
from stagec.importers.config import Config
from stagec.importers.family import ModelFamily
from stagec.importers.idle import Idle, clip, gates, read_idle, siglip
from stagec.importers.images import read_qwen2_5_vl_images
from stagec.importers.images_llama import read_mllama_images
from stagec.importers.kin import Kin, Sizes
from stagec.importers.llama import FAMILIES as LANGUAGES
from stagec.importers.llama import read_qwen2
from stagec.importers.stack import Decoder
from stagec.importers.text import ModelText


def _vision(config: Config) -> Config:
    vision = config.section("vision_config")
    if vision is None:
        raise config.refuse("vision_config", "is missing: expected the tower of vision")
    return vision


# -- Qwen-VL ---------------------------------------------------------------------------------------


def read_qwen2_5_vl(config: Config) -> ModelText:
    """Qwen2.5-VL (arXiv 2502.13923): a tower with RMSNorm and SwiGLU, patches of two frames, 2 x 2
    patches merged to a token."""
    text, vision = _qwen(config)
    read_idle(vision, text, width=3584, inner=3420, layers=32, patch=14)
    vision.skip("window_size", "fullatt_block_indexes")
    idle = _qwen_tower(vision, text)
    for name in ("attn", "mlp"):
        idle.norm(f"{name}_norm", "L_v, D_v", bias=False)
    idle.matrix("gate_up", "L_v, D_v, 2, F_v", "L_v, 2, F_v")
    idle.matrix("down", "L_v, F_v, D_v", "L_v, D_v")
    idle.param("merger_norm", "D_v")
    return _merged(vision, idle, "out_hidden_size")


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
    read_size(vision, text, "P", "patch_size", default=14)
    vision.skip("num_heads", "hidden_act")
    idle = _qwen_tower(vision, text)
    for name in ("attn", "mlp"):
        idle.norm(f"{name}_norm", "L_v, D_v")
    idle.matrix("up", "L_v, D_v, F_v", "L_v, F_v")
    idle.matrix("down", "L_v, F_v, D_v", "L_v, D_v")
    idle.norm("merger_norm", "D_v")
    return _merged(vision, idle, "hidden_size")


def _qwen(config: Config) -> tuple[ModelText, Config]:
    config.merge("text_config")
    config.skip("vision_config")
    return read_qwen2(config), _vision(config)


def _qwen_tower(vision: Config, text: ModelText) -> Idle:
    """What the towers of both have: patches of some frames, q, k and v with biases."""
    read_size(vision, text, "Y_v", "temporal_patch_size", default=2)
    vision.skip("spatial_patch_size", "tokens_per_second", "in_chans", "rope_parameters")
    idle = Idle(text)
    idle.matrix("patch", "C, Y_v, P, P, D_v")
    idle.matrix("qkv", "L_v, D_v, 3, D_v", "L_v, 3, D_v")
    idle.matrix("o", "L_v, D_v, D_v", "L_v, D_v")
    return idle


def _merged(vision: Config, idle: Idle, key: str) -> ModelText:
    """The merger: two products of m x m patches, to the width of the language model."""
    text = idle.text
    merge = vision.size("spatial_merge_size", default=2)
    text.symbol("U_v", merge * merge * (text.symbols["D_v"].value or 1), "merged patches")
    read_size(vision, text, "O_v", key, default=3584)
    idle.matrix("merger_in", "U_v, U_v", "U_v")
    idle.matrix("merger_out", "U_v, O_v", "O_v")
    vision.finish()
    return idle.beside()


# -- Llama 3.2 Vision ------------------------------------------------------------------------------


def read_mllama(config: Config) -> ModelText:
    """Llama 3.2 Vision: some layers attend to images alone, behind a gate; a step of texts leaves
    them out."""
    vision = _vision(config)
    config.merge("text_config")
    crossed = config.sizes("cross_attention_layers")
    kin = Kin(config, "Llama 3.2 Vision", Sizes(4096, 14336, 40, 32, 128256, 131072, groups=8))
    text, total = kin.text, kin.count
    if any(layer >= total for layer in crossed) or len(set(crossed)) < len(crossed):
        raise config.refuse("cross_attention_layers", f"are not layers of {total}")
    kin = _without(kin, total - len(crossed))
    mixer, block = Attention(rope=kin.rope()), FeedForward(kin.activation())
    kin.stack(kin.all(mixer), kin.all(block), Decoder(tied=kin.tied()))
    idle = Idle(text)
    idle.param("image_words", "8, D")
    if crossed:
        _crossed(idle, text, len(crossed))
    read_idle(vision, text, width=1280, inner=5120, layers=32, patch=14)
    _tiled(vision, idle)
    return idle.beside()


def _without(kin: Kin, count: int) -> Kin:
    if count < 1:
        raise kin.config.refuse("cross_attention_layers", "leave no layer of self-attention")
    kin.count = count
    return kin


def _crossed(idle: Idle, text: ModelText, count: int) -> None:
    """Layers that attend to images, their gates and norms of queries and keys included."""
    n = text.symbol("L_cross", count, "cross_attention_layers")
    for name, dims in (("q", "D, H, K"), ("k", "D, G, K"), ("v", "D, G, K"), ("o", "H, K, D")):
        idle.matrix(f"cross_{name}", f"{n}, {dims}")
    for name in ("q_norm", "k_norm"):
        idle.param(f"cross_{name}", f"{n}, K")
    for name in ("attn", "ffn"):
        idle.param(f"cross_{name}_norm", f"{n}, D")
    idle.matrix("cross_gate_up", f"{n}, D, 2, F")
    idle.matrix("cross_down", f"{n}, F, D")
    gates(idle, ["cross_attn_gate", "cross_ffn_gate"], n)


def _tiled(vision: Config, idle: Idle) -> None:
    """The tower: images in tiles, each with positions of its own; layers with gates behind the
    others; outputs of several layers side by side."""
    text = idle.text
    side = vision.size("image_size", default=448) // (text.symbols["P"].value or 1)
    text.symbol("N_v", side * side + 1, "(image_size / patch_size)^2 + 1")
    tiles = vision.size("max_num_tiles", default=4)
    text.symbol("X_v", tiles, "max_num_tiles")
    found = vision.lists("supported_aspect_ratios")
    text.symbol("A_v", 1 + (found or 8), "supported_aspect_ratios, and none")
    text.symbol("L_global", vision.layers("num_global_layers", default=8), "num_global_layers")
    parts = len(vision.sizes("intermediate_layers_indices")) or 5
    width = (1 + parts) * (text.symbols["D_v"].value or 1)
    text.symbol("U_v", width, "(1 + intermediate_layers_indices) * D_v")
    vision.only("vision_output_dim", width)
    idle.matrix("patch", "C, P, P, D_v")
    idle.param("class_token", "D_v")
    idle.param("positions", "N_v, D_v")
    idle.param("tile_positions", "A_v, X_v, N_v, D_v")
    idle.param("pre_tile_positions", "A_v, X_v, D_v")
    idle.param("post_tile_positions", "A_v, X_v, D_v")
    gates(idle, ["position_gate", "pre_tile_gate", "post_tile_gate"])
    idle.norm("pre_norm", "D_v")
    idle.norm("post_norm", "D_v")
    idle.layers(attention_bias=False)
    idle.layers("L_global", "global_", attention_bias=False)
    gates(idle, ["global_attn_gate", "global_mlp_gate"], "L_global")
    idle.matrix("projector", "U_v, D", "D")
    vision.finish()


# -- LLaVA -----------------------------------------------------------------------------------------


def read_llava(config: Config) -> ModelText:
    """LLaVA (arXiv 2304.08485): a tower of CLIP or SigLIP, two products, a language model."""
    vision, words = _vision(config), config.section("text_config")
    if words is None:
        raise config.refuse("text_config", "is missing: expected the language model")
    readers = {name: family for family in LANGUAGES for name in family.model_types}
    kind = words.word("model_type", among=readers)
    text = readers[kind].read(words)
    words.finish()
    towers = {"clip_vision_model": clip, "siglip_vision_model": siglip}
    tower = vision.word("model_type", among=towers)
    idle = towers[tower](vision, text)
    bias = config.flag("multimodal_projector_bias", default=True)
    config.word("projector_hidden_act", among=ACTIVATIONS, default="gelu")
    idle.matrix("projector_in", "D_v, D", "D" if bias else "")
    idle.matrix("projector_out", "D, D", "D" if bias else "")
    if config.text("model_type") != "llava":
        idle.param("image_newline", "D")
    config.skip(*_LLAVA)
    return replace(idle.beside(), name=config.text("model_type"))


_LLAVA = (
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "image_seq_length",
    "image_grid_pinpoints",
    "ignore_index",
    "vocab_size",
    "tie_word_embeddings",
    "use_image_newline_parameter",
)

FAMILIES: Sequence[ModelFamily] = (
    ModelFamily(
        "Qwen2.5-VL",
        ("qwen2_5_vl",),
        read_qwen2_5_vl,
        "Qwen2; tower with SwiGLU, 2 x 2 merger",
        read_images=read_qwen2_5_vl_images,
    ),
    ModelFamily("Qwen2-VL", ("qwen2_vl",), read_qwen2_vl, "Qwen2; tower of ViT, 2 x 2 merger"),
    ModelFamily(
        "Llama 3.2 Vision",
        ("mllama",),
        read_mllama,
        "gated cross attention, tiles",
        read_images=read_mllama_images,
    ),
    ModelFamily(
        "LLaVA", ("llava", "llava_next"), read_llava, "Llama's kin; tower of CLIP or SigLIP"
    ),
)
