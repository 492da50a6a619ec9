"""LLaVA in the form of its authors: the keys of the language model, and a tower by its name. A step
of texts does not use the tower (`idle`)."""

from dataclasses import replace

from stagec.importers.common.idle import NAMED, as_clip, as_siglip, declare_named
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


@reads("LLaVA of releases", *_WORDS, features="Llama, Mistral or Qwen2; tower of CLIP or SigLIP")
def read_llava_release(config: Config) -> ModelText:
    """LLaVA (arXiv 2310.03744), LLaVA-NeXT and LLaVA-OneVision (2408.03326). Towers of SigLIP have
    neither their last layer nor their head."""
    kind, tower = config.text("model_type"), config.word("mm_vision_tower", among=NAMED)
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
