"""Language models of other families with a vision tower: LLaVA and its successors.

The tower and its projector are declared and frozen (`idle`): a step with text does not use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction

from stagec.importers.common.idle import (
    Idle,
    clip,
    gemma3_tower,
    image_tokens,
    llama4_tower,
    read_idle,
    siglip,
)
from stagec.importers.common.sizes import read_size
from stagec.importers.families.images_beside import (
    READ_IDEFICS3,
    READ_INTERNVL,
    READ_LLAVA,
    READ_MISTRAL3,
    READ_PALIGEMMA,
    language_of,
    read_gemma3_images,
    read_llama4_images,
)
from stagec.importers.families.windows import gemma3, read_llama4
from stagec.importers.family import Reader, reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import ACTIVATIONS
from stagec.importers.writing.text import ModelText

#: Adds a projector to a tower, by the configuration of the model.
Projector = Callable[[Config, Idle], None]


def _pixtral(vision: Config, text: ModelText) -> Idle:
    """Declare the tower of Pixtral (arXiv 2410.07073): RMSNorm, a gate, rotary positions."""
    read_idle(vision, text, width=1024, inner=4096, layers=24, patch=16)
    vision.only("head_dim", text.value("D_v") // vision.size("num_attention_heads", default=16))
    vision.skip("image_size", "rope_theta", "rope_parameters", "vocab_size")
    idle = Idle(text)
    idle.matrix("patch", "C, P_v, P_v, D_v")
    idle.param("pre_norm", "D_v")
    idle.matrix("q k v o", "L_v, D_v, D_v")
    idle.matrix("gate_up", "L_v, D_v, 2, F_v")
    idle.matrix("down", "L_v, F_v, D_v")
    idle.param("attn_norm ffn_norm", "L_v, D_v")
    vision.finish()
    return idle


#: Keys of a tower of InternVL for experts, which no release has.
_INTERN_EXPERTS = """
    use_moe capacity_factor eval_capacity_factor laux_allreduce moe_coeff_ratio num_experts
    moe_intermediate_size moe_output_scale noisy_gate_policy num_routed_experts num_shared_experts
    shared_expert_intermediate_size use_residual use_rts use_weighted_residual
"""


def _intern(vision: Config, text: ModelText) -> Idle:
    """Declare the tower of InternVL (arXiv 2312.14238): a ViT whose layers scale their results."""
    read_idle(vision, text, width=1024, inner=4096, layers=24, patch=14)
    image_tokens(vision, text, 448)
    biased = vision.flag("attention_bias", "qkv_bias", default=False)
    normed = vision.flag("use_qk_norm", "qk_normalization", default=False)
    if not vision.flag("use_moe", default=False):
        vision.skip(*_INTERN_EXPERTS.split())
    vision.fixed(use_absolute_position_embeddings=True, use_mask_token=False)
    rms = vision.word("norm_type", among=("layer_norm", "rms_norm"), default="layer_norm")
    vision.skip("layer_scale_init_value", "use_mean_pooling")
    idle = Idle(text)
    idle.matrix("patch", "C, P_v, P_v, D_v", "D_v")
    idle.param("class_token", "D_v")
    idle.param("positions", "N_v + 1, D_v")
    idle.matrix("q k v", "L_v, D_v, D_v", "L_v, D_v" if biased else "")
    idle.matrix("o", "L_v, D_v, D_v", "L_v, D_v")
    idle.feed_forward()
    for name in ("attn", "mlp"):
        idle.norm(f"{name}_norm", "L_v, D_v", bias=rms == "layer_norm")
        idle.param(f"{name}_scale", "L_v, D_v")
    if normed:
        idle.param("q_norm k_norm", "L_v, D_v")
    if not vision.flag("use_mean_pooling", default=True):
        idle.norm("norm", "D_v")
    vision.finish()
    return idle


def _whisper(sound: Config, text: ModelText) -> Idle:
    """Declare the encoder of Whisper (arXiv 2212.04356)."""
    read_size(sound, text, "D_v", "d_model", "hidden_size", default=1280)
    read_size(sound, text, "F_v", "encoder_ffn_dim", "intermediate_size", default=5120)
    count = sound.layers("encoder_layers", "num_hidden_layers", default=32)
    text.symbol("L_v", count, "layers of the tower")
    read_size(sound, text, "C", "num_mel_bins", default=128)
    read_size(sound, text, "N_v", "max_source_positions", default=1500)
    sound.skip("encoder_attention_heads", "num_attention_heads", "num_hidden_layers", "head_dim")
    sound.skip("num_key_value_heads", "activation_function", "scale_embedding", "vocab_size")
    idle = Idle(text)
    idle.matrix("conv_a", "3, C, D_v", "D_v")
    idle.matrix("conv_b", "3, D_v, D_v", "D_v")
    idle.param("positions", "N_v, D_v")
    for name in "qkvo":
        idle.matrix(name, "L_v, D_v, D_v", "" if name == "k" else "L_v, D_v")
    idle.feed_forward()
    idle.norm("attn_norm mlp_norm", "L_v, D_v")
    idle.norm("norm", "D_v")
    sound.finish()
    return idle


def _moon(vision: Config, text: ModelText) -> Idle:
    """Declare the tower of Kimi-VL and Kimi K2.5 (MoonViT, arXiv 2504.07491): an interpolated table
    of positions of two axes. Names of keys of K2.5 begin with `vt_`."""
    width = read_size(vision, text, "D_v", "hidden_size", "vt_hidden_size", default=1152)
    read_size(vision, text, "F_v", "intermediate_size", "vt_intermediate_size", default=4304)
    count = vision.layers("num_hidden_layers", "vt_num_hidden_layers", default=27)
    text.symbol("L_v", count, "layers of the tower")
    text.symbol("P_v", vision.side("patch_size", default=14), "patch_size")
    for symbol, key in (("Y_v", "height"), ("X_v", "width")):
        read_size(vision, text, symbol, f"pos_emb_{key}", f"init_pos_emb_{key}", default=64)
    rows, columns = vision.sizes("merge_kernel_size", length=2, least=1) or (2, 2)
    text.symbol("U_v", rows * columns * width, "merged patches")
    vision.fixed(merge_type="sd2_tpool", mm_projector_type="patchmerger", mm_hidden_size=width)
    vision.skip("pos_emb_time", "init_pos_emb_time", "pos_emb_type", "video_attn_type")
    vision.skip("num_attention_heads", "vt_num_attention_heads", "hidden_act", "rope_parameters")
    vision.skip("projector_hidden_act", "projector_ln_eps", "text_hidden_size")
    idle = Idle(text)
    idle.matrix("patch", "3, P_v, P_v, D_v", "D_v")
    idle.param("positions", "Y_v, X_v, D_v")
    idle.layers()
    idle.norm("norm", "D_v")
    vision.finish()
    return idle


def _perception(vision: Config, text: ModelText) -> Idle:
    """Declare the tower of Step 3.7: patches without a bias, layers that scale their results, and
    two convolutions of 3 x 3 that each halve the sides and double the width."""
    width = read_size(vision, text, "D_v", "hidden_size", "width", default=1536)
    inner = int(vision.ratio("mlp_ratio", default=Fraction(8960, 1536)) * width + Fraction(1, 2))
    text.symbol("F_v", inner, "mlp_ratio * width")
    count = vision.layers("num_hidden_layers", "layers", default=47)
    text.symbol("L_v", count, "layers of the tower")
    read_size(vision, text, "C", "num_channels", default=3)
    text.symbol("P_v", vision.side("patch_size", default=14), "patch_size")
    image_tokens(vision, text, 728)
    vision.fixed(use_cls_token=False, use_ln_pre=True, use_ln_post=False, use_abs_posemb=True)
    vision.fixed(use_rope2d=True, output_dim=None, pool_type="none")
    vision.skip("num_attention_heads", "heads", "hidden_act", "intermediate_size", "ls_init_value")
    vision.skip("layer_scale_init_value", "rope_parameters", "max_position_embeddings")
    idle = Idle(text)
    idle.matrix("patch", "C, P_v, P_v, D_v")
    idle.param("positions", "N_v, D_v")
    idle.norm("pre_norm", "D_v")
    idle.layers()
    idle.param("attn_scale mlp_scale", "L_v, D_v")
    idle.matrix("halved", "D_v, 3, 3, 2*D_v", "2*D_v")
    idle.matrix("quartered", "2*D_v, 3, 3, 4*D_v", "4*D_v")
    vision.finish()
    return idle


_TOWERS: Mapping[str, Callable[[Config, ModelText], Idle]] = {
    "clip_vision_model": clip,
    "siglip_vision_model": siglip,
    "siglip2_vision_model": siglip,
    "perception_encoder": _perception,
    "step3p5_vision": _perception,
    "idefics3_vision": siglip,
    "smolvlm_vision": siglip,
    "pixtral": _pixtral,
    "kimi_k25_vision": _moon,
    "kimi_k25": _moon,
    "moonvit": _moon,
    "internvl_vision": _intern,
    "intern_vit_6b": _intern,
    "qwen2_audio_encoder": _whisper,
    "voxtral_encoder": _whisper,
}


def _read(config: Config, projector: Projector, *, tower: str, words: str) -> ModelText:
    """The text of a language model with a tower; `tower` and `words` are the types of these where
    no key says them."""
    seen = config.needed("vision_config", "audio_config")
    spoken = config.needed("text_config", "llm_config")
    text = language_of(config, spoken, words)
    kind = seen.word("model_type", among=("", *_TOWERS), default=tower)  # '': Kimi-K2.5-NVFP4
    idle = _TOWERS[kind or tower](seen, text)
    projector(config, idle)
    config.word("projector_hidden_act", among=ACTIVATIONS, default="gelu")
    name = config.text("model_type")
    return replace(idle.beside(), name=name)


# -- projectors ------------------------------------------------------------------------------------


def _families(
    name: str,
    *model_types: str,
    features: str,
    tower: str = "siglip_vision_model",
    words: str = "llama",
    read_images: Reader | None = None,
) -> Callable[[Projector], Projector]:
    """Declare a projector as that of a family, whose tower and language model are of these types
    without a key."""

    def declare(projector: Projector) -> Projector:
        @reads(name, *model_types, features=features, read_images=read_images)
        def read(config: Config) -> ModelText:  # pyright: ignore[reportUnusedFunction]
            return _read(config, projector, tower=tower, words=words)

        return projector

    return declare


def _two(idle: Idle, inner: str = "D_v", *, bias: bool = True) -> None:
    """Two products to the width D."""
    idle.matrix("projector_in", f"{inner}, D", "D" if bias else "")
    idle.matrix("projector_out", "D, D", "D" if bias else "")


@_families(
    "LLaVA",
    "llava",
    features="another family; tower of CLIP, SigLIP or Pixtral",
    tower="clip_vision_model",
    read_images=READ_LLAVA,
)
@_families(
    "LLaVA-NeXT",
    "llava_next",
    "llava_onevision",
    "llava_next_video",
    features="LLaVA; parts of images",
    tower="clip_vision_model",
)
def _llava(config: Config, idle: Idle) -> None:
    config.skip("spatial_pool_mode", "spatial_pool_stride", "video_seq_length")
    _two(idle, bias=config.flag("multimodal_projector_bias", default=True))
    if config.text("model_type") != "llava":
        idle.param("image_newline", "D")


@_families(
    "ViP-LLaVA",
    "vipllava",
    features="LLaVA; layers of the tower are joined",
    tower="clip_vision_model",
)
def _joined_layers(config: Config, idle: Idle) -> None:
    """ViP-LLaVA (arXiv 2312.00784): a norm of the results of several layers, and two products."""
    key = "vision_feature_layer"
    config.skip("projector_layernorm_eps")
    count = config.length(key, default=1) if config.has(key) else 5
    idle.text.symbol("U_v", count * idle.text.value("D_v"), f"layers of {key} * width")
    idle.norm("projector_norm", "U_v")
    _two(idle, "U_v")


@_families(
    "LightOnOCR",
    "lighton_ocr",
    features="Qwen3; tower of Pixtral, 2 x 2 merger",
    tower="pixtral",
    words="qwen3",
)
@_families(
    "Mistral 3",
    "mistral3",
    features="Mistral; tower of Pixtral, 2 x 2 merger",
    tower="pixtral",
    words="mistral",
    read_images=READ_MISTRAL3,
)
def _mistral3(config: Config, idle: Idle) -> None:
    merged = config.size("spatial_merge_size", default=2) ** 2
    idle.param("projector_norm", "D_v")
    idle.matrix("merger", f"{merged}*D_v, D_v")
    _two(idle, bias=config.flag("multimodal_projector_bias", default=False))


@_families(
    "InternVL of releases",
    "internvl_chat",
    features="another family; ViT, pixel shuffle",
    tower="intern_vit_6b",
    words="internlm2",
)
@_families(
    "InternVL",
    "internvl",
    features="another family; ViT, pixel shuffle",
    tower="internvl_vision",
    words="qwen2",
    read_images=READ_INTERNVL,
)
def _shuffled(config: Config, idle: Idle) -> None:
    """InternVL: a pixel shuffle, a norm and two products."""
    config.only("select_layer", -1)
    config.fixed(use_backbone_lora=0, use_llm_lora=0)
    config.skip("dynamic_image_size", "force_image_size", "max_dynamic_patch", "pad2square")
    config.skip("min_dynamic_patch", "ps_version", "template", "use_thumbnail")
    wide = idle.text.value("D_v") / config.positive("downsample_ratio", default=1) ** 2
    if wide.denominator != 1:
        raise config.wrong("downsample_ratio", "a share of the side of an image, as 0.5")
    idle.text.symbol("U_v", int(wide), "hidden_size / downsample_ratio^2")
    idle.norm("projector_norm", "U_v")
    _two(idle, "U_v")


@_families(
    "PaliGemma",
    "paligemma",
    features="Gemma; tower of SigLIP",
    words="gemma",
    read_images=READ_PALIGEMMA,
)
@_families(
    "Qwen2-Audio",
    "qwen2_audio",
    features="Qwen2; encoder of Whisper",
    tower="qwen2_audio_encoder",
    words="qwen2",
)
def _linear(config: Config, idle: Idle) -> None:
    config.only("projection_dim", idle.text.value("D"))
    idle.matrix("projector", "D_v, D", "D")


@_families(
    "Idefics 3",
    "idefics3",
    "smolvlm",
    features="Llama; tower of SigLIP, packed patches",
    tower="idefics3_vision",
    read_images=READ_IDEFICS3,
)
def _packed(config: Config, idle: Idle) -> None:
    """Idefics 3: as many patches as make a square are one token."""
    factor = config.size("scale_factor", default=2)
    idle.text.symbol("U_v", factor**2 * idle.text.value("D_v"), "scale_factor^2 * hidden_size")
    idle.matrix("projector", "U_v, D")


@_families(
    "Aya Vision", "aya_vision", features="Command R7B; tower of SigLIP, a gate", words="cohere2"
)
def _gated(config: Config, idle: Idle) -> None:
    """Aya Vision: a pixel shuffle, a norm, and two products with a gate between them."""
    _joined(config, idle.text)
    inner = config.size("alignment_intermediate_size", default=idle.text.value("D"))
    if inner % 2:
        raise config.wrong("alignment_intermediate_size", "an even number")
    idle.text.symbol("J_v", inner // 2, "alignment_intermediate_size / 2")
    config.skip("adapter_layer_norm_eps")
    idle.norm("projector_norm", "U_v")
    idle.matrix("projector_in", "U_v, 2, J_v", "2, J_v")
    idle.matrix("projector_out", "J_v, D", "D")


@_families(
    "Command A Vision",
    "cohere2_vision",
    features="Command A; tower of SigLIP, a gate",
    words="cohere2",
)
def _wide_gated(config: Config, idle: Idle) -> None:
    """Command A Vision: a pixel shuffle, and two products with a gate between them."""
    factor = config.size("downsample_factor", default=2)
    idle.text.symbol("U_v", factor**2 * idle.text.value("D_v"), "downsample_factor^2 * width")
    inner = config.size("alignment_intermediate_size", default=36864)
    config.divides("alignment_intermediate_size", 2, inner)
    idle.text.symbol("J_v", inner // 2, "alignment_intermediate_size / 2")
    idle.matrix("projector_in", "U_v, 2, J_v", "2, J_v")
    idle.matrix("projector_out", "J_v, D", "D")


@_families(
    "LFM2-VL",
    "lfm2_vl",
    features="LFM2; tower of SigLIP 2, pixel shuffle",
    tower="siglip2_vision_model",
    words="lfm2",
)
def _normed(config: Config, idle: Idle) -> None:
    """LFM2-VL: a pixel shuffle, a norm by a key, and two products."""
    _joined(config, idle.text)
    read_size(config, idle.text, "J_v", "projector_hidden_size", default=2560)
    bias = config.flag("projector_bias", default=True)
    if config.flag("projector_use_layernorm", default=True):
        idle.norm("projector_norm", "U_v")
    config.skip(*(key for key in config.members if key in _OF_PROCESSOR.split()))
    idle.matrix("projector_in", "U_v, J_v", "J_v" if bias else "")
    idle.matrix("projector_out", "J_v, D", "D" if bias else "")


def _joined(config: Config, text: ModelText) -> None:
    """Declare U_v, the width of patches that a pixel shuffle joins."""
    factor = config.size("downsample_factor", default=2)
    text.symbol("U_v", factor**2 * text.value("D_v"), "downsample_factor^2 * width")


_OF_PROCESSOR = """
    do_image_splitting encoder_patch_size max_image_tokens max_num_patches max_pixels_tolerance
    max_tiles min_image_tokens min_tiles tile_size use_image_special_tokens use_thumbnail
"""


@_families(
    "Step 3.7",
    "step3p7",
    features="Step 3.5; tower of its own, two convolutions",
    tower="step3p5_vision",
    words="step3p5",
)
def _convolved(config: Config, idle: Idle) -> None:
    config.skip("understand_projector_stride", "image_token_len", "patch_token_len")
    config.skip("im_start_token", "im_end_token", "im_patch_token")
    bias = config.flag("projector_bias", default=False)
    idle.matrix("projector", "4*D_v, D", "D" if bias else "")


@_families("Voxtral", "voxtral", features="Llama; encoder of Whisper", tower="voxtral_encoder")
def _frames(config: Config, idle: Idle) -> None:
    """Voxtral: frames that make up the inner width are one token."""
    idle.text.symbol("U_v", idle.text.value("F_v"), "four frames")
    _two(idle, "U_v", bias=False)


@_families(
    "Kimi-VL",
    "kimi_vl",
    features="DeepSeek-V3; tower of its own, 2 x 2 merger",
    tower="moonvit",
    words="deepseek_v3",
)
@_families(
    "Kimi K2.5",
    "kimi_k25",
    features="DeepSeek-V3; tower of its own, 2 x 2 merger",
    tower="kimi_k25_vision",
    words="deepseek_v3",
)
def _merged(config: Config, idle: Idle) -> None:
    """Kimi-VL and Kimi K2.5: a norm of patches, and two products of those that are merged."""
    config.only("projection_hidden_size", idle.text.value("D_v"))
    config.skip("projection_layer_norm_eps", "use_unified_vision_chunk", "video_placeholder")
    idle.norm("projector_norm", "D_v")
    idle.matrix("projector_in", "U_v, U_v", "U_v")
    idle.matrix("projector_out", "U_v, D", "D")


# -- families whose towers are declared as a whole ------------------------------------------------


@reads(
    "Gemma 3 with images", "gemma3", features="a tower of SigLIP", read_images=read_gemma3_images
)
def read_gemma3_towers(config: Config) -> ModelText:
    """Gemma 3 with its tower, which a step of texts does not use."""
    config.merge("text_config")
    return gemma3_tower(config, gemma3(config, seen=True))


@reads(
    "Llama 4 with images", "llama4", features="a tower of its own", read_images=read_llama4_images
)
def read_llama4_towers(config: Config) -> ModelText:
    """Llama 4 with its tower, which a step of texts does not use."""
    config.merge("text_config")
    return llama4_tower(config, read_llama4(config))
