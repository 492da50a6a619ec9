"""LLaVA in the form of its authors: the keys of the language model, and a tower by its name; VILA,
with sections for both. A step of texts does not use the tower (`idle`)."""

from dataclasses import replace

from stagec.importers.common.idle import (
    NAMED,
    Idle,
    as_clip,
    as_siglip,
    clip,
    declare_named,
    siglip,
)
from stagec.importers.families.images_beside import language_of
from stagec.importers.families.llama import read_llama, read_mistral, read_qwen2
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.text import ModelText

_WORDS = {"llava_llama": read_llama, "llava_mistral": read_mistral, "llava_qwen": read_qwen2}
_MERGED = ("flat", "spatial", "spatial_unpad")
#: Keys of training, and of how an image is divided.
_OF_IMAGES = """
    freeze_mm_mlp_adapter freeze_mm_vision_resampler image_aspect_ratio image_crop_resolution
    image_grid_pinpoints image_split_resolution tune_mm_mlp_adapter tune_mm_vision_resampler
    unfreeze_mm_vision_tower tokenizer_model_max_length tokenizer_padding_side mm_tunable_parts
    mm_projector_lr mm_vision_tower_lr mm_use_im_patch_token mm_use_im_start_end mm_newline_position
    mm_vision_select_feature mm_spatial_pool_mode mm_spatial_pool_stride
    mm_spatial_pool_out_channels add_faster_video add_time_instruction faster_token_stride
    force_sample pos_skipping_range vision_tower_pretrained use_pos_skipping
"""


#: Keys of VILA for training, and for how images and videos are divided.
_OF_VILA = """
    image_aspect_ratio image_encoder interpolate_mode max_tiles min_tiles model_dtype dynamic_s2
    mm_projector_lr mm_use_im_patch_token mm_use_im_start_end mm_vision_select_feature
    mm_vision_select_layer num_time_tokens num_video_frames resume_path s2 s2_max_split_size
    s2_resize_output_to_scale_idx s2_scales soft_ce_std time_token_format time_token_ids
    tune_language_model tune_mm_projector tune_vision_tower video_encoder video_max_tiles
    vision_resolution vision_tower_lr chat_template fps ps3
"""
#: The sides of the squares of patches that projectors of VILA join.
_SQUARES = {
    "linear": 0,
    "mlp2x_gelu": 1,
    "mlp_downsample": 2,
    "mlp_downsample_2x2_fix": 2,
    "mlp_downsample_3x3_fix": 3,
}


@reads(
    "LLaVA of releases",
    *_WORDS,
    "vila",
    features="Llama, Mistral or Qwen2; tower of CLIP or SigLIP; VILA",
)
def read_llava_release(config: Config) -> ModelText:
    """LLaVA (arXiv 2310.03744), LLaVA-NeXT and LLaVA-OneVision (2408.03326). Towers of SigLIP have
    neither their last layer nor their head."""
    kind = config.text("model_type")
    if config.has("llm_cfg") or kind not in _WORDS:
        return _read_vila(config)
    tower = config.word("mm_vision_tower", among=NAMED)
    text = replace(_WORDS[kind](config), name=kind)
    declare_named(text, tower)
    config.fixed(mm_projector_type="mlp2x_gelu", mm_hidden_size=text.value("D_v"), use_mm_proj=True)
    config.fixed(mm_vision_select_layer=-2, mm_resampler_type=None)
    merged = config.word("mm_patch_merge_type", among=_MERGED, default="flat")
    config.skip(*_OF_IMAGES.split())
    if "siglip" in tower:
        text.replace("L_v", text.value("L_v") - 1, f"of {tower}, without the last one")
    idle = as_siglip(text, headed=False) if "siglip" in tower else as_clip(text)
    if "unpad" in merged:
        idle.param("image_newline", "D")
    idle.two()
    return idle.beside()


def _read_vila(config: Config) -> ModelText:
    """VILA 1.5 and NVILA (arXiv 2312.07533, 2412.04468): squares of patches, possibly at several
    scales, are joined before two products."""
    spoken, vision = config.needed("llm_cfg"), config.needed("vision_tower_cfg")
    spoken.skip("model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side")
    text = language_of(config, spoken, "llama")
    kind = vision.word("model_type", among=("siglip_vision_model", "clip_vision_model"))
    idle = siglip(vision, text, headed=True) if "siglip" in kind else clip(vision, text)
    wide = config.size("mm_hidden_size", default=text.value("D_v"))
    config.divides("mm_hidden_size", text.value("D_v"), wide)
    text.symbol("W_v", wide, "mm_hidden_size")
    _square(config.needed("mm_projector_cfg"), idle)
    config.skip(*_OF_VILA.split())
    return replace(idle.beside(), name=config.text("model_type"))


def _square(config: Config, idle: Idle) -> None:
    """Declare a projector of VILA (llava/model/multimodal_projector/base_projector.py)."""
    side = _SQUARES[config.word("mm_projector_type", among=_SQUARES)]
    config.finish()
    if not side:
        idle.matrix("projector", "W_v, D", "D")
        return
    joined = f"{side * side}*W_v"
    if side > 1:
        idle.norm("projector_norm", joined)
    if side > 2:
        joined, before = f"{side}*W_v", joined
        idle.matrix("projector_joined", f"{before}, {joined}", joined)
        idle.norm("projector_joined_norm", joined)
    idle.two(inner=joined if side > 1 else "W_v")
