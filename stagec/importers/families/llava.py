"""Language models of other families with a vision tower: LLaVA and its successors.

The tower and its projector are declared and frozen (`idle`): a step with text does not use them.
"""

from __future__ import annotations

from stagec.importers.common.idle import Idle, gemma3_tower, llama4_tower
from stagec.importers.common.sizes import read_size
from stagec.importers.families.images_beside import (
    READ_IDEFICS3,
    READ_INTERNVL,
    READ_LLAVA,
    READ_MISTRAL3,
    READ_PALIGEMMA,
    read_gemma3_images,
    read_llama4_images,
)
from stagec.importers.families.towers import projects
from stagec.importers.families.windows import gemma3, read_llama4
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.text import ModelText


@projects(
    "LLaVA",
    "llava",
    features="another family; tower of CLIP, SigLIP or Pixtral",
    tower="clip_vision_model",
    read_images=READ_LLAVA,
)
@projects(
    "LLaVA-NeXT",
    "llava_next",
    "llava_onevision",
    "llava_next_video",
    features="LLaVA; parts of images",
    tower="clip_vision_model",
)
def _llava(config: Config, idle: Idle) -> None:
    config.skip("spatial_pool_mode", "spatial_pool_stride", "video_seq_length")
    idle.two(bias=config.flag("multimodal_projector_bias", default=True))
    if config.text("model_type") != "llava":
        idle.param("image_newline", "D")


@projects(
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
    idle.two(inner="U_v")


@projects(
    "LightOnOCR",
    "lighton_ocr",
    features="Qwen3; tower of Pixtral, 2 x 2 merger",
    tower="pixtral",
    words="qwen3",
)
@projects(
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
    idle.two(bias=config.flag("multimodal_projector_bias", default=False))


@projects(
    "InternVL of releases",
    "internvl_chat",
    features="another family; ViT, pixel shuffle",
    tower="intern_vit_6b",
    words="internlm2",
)
@projects(
    "Qianfan-OCR",
    "qianfan_ocr",
    features="Qwen3; tower of InternVL, pixel shuffle",
    tower="qianfan_ocr_vision",
    words="qwen3",
)
@projects(
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
    idle.two(inner="U_v")


@projects(
    "PaliGemma",
    "paligemma",
    features="Gemma; tower of SigLIP",
    words="gemma",
    read_images=READ_PALIGEMMA,
)
@projects(
    "Qwen2-Audio",
    "qwen2_audio",
    features="Qwen2; encoder of Whisper",
    tower="qwen2_audio_encoder",
    words="qwen2",
)
def _linear(config: Config, idle: Idle) -> None:
    config.only("projection_dim", idle.text.value("D"))
    idle.matrix("projector", "D_v, D", "D")


@projects(
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


@projects(
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


@projects(
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


@projects(
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


@projects(
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


@projects("Voxtral", "voxtral", features="Llama; encoder of Whisper", tower="voxtral_encoder")
def _frames(config: Config, idle: Idle) -> None:
    """Voxtral: frames that make up the inner width are one token."""
    idle.text.symbol("U_v", idle.text.value("F_v"), "four frames")
    idle.two(inner="U_v", bias=False)


@projects(
    "Kimi-VL",
    "kimi_vl",
    features="DeepSeek-V3; tower of its own, 2 x 2 merger",
    tower="moonvit",
    words="deepseek_v3",
)
@projects(
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


@projects(
    "Kimi K3",
    "kimi_k3",
    features="Kimi Linear, averages of earlier streams; tower of its own, 2 x 2 merger",
    tower="kimi_k25_vision",
    words="kimi_linear",
)
def _merged_behind(config: Config, idle: Idle) -> None:
    """Kimi K3: two products of patches that are merged, and a norm."""
    config.skip("image_placeholder", "media_placeholder_token_id")
    idle.matrix("projector_in", "U_v, U_v")
    idle.matrix("projector_out", "U_v, D")
    idle.param("projector_norm", "D")


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
