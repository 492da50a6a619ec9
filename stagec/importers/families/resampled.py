"""MiniCPM-V: language models of other families, and a tower of SigLIP whose patches a few queries
attend to, or which are merged twice."""

from dataclasses import replace

from stagec.importers.common.idle import siglip
from stagec.importers.common.sizes import read_size
from stagec.importers.families.images_beside import language_of
from stagec.importers.families.llama import read_llama, read_qwen2, read_qwen3
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.text import ModelText

#: The reader of the language model of each version.
_WORDS = {"2.6": read_qwen2, "4": read_llama, "4.0": read_llama, "4.5": read_qwen3}


@reads("MiniCPM-V", "minicpmv", features="Qwen2, Llama or Qwen3; SigLIP, a resampler")
def read_minicpmv(config: Config) -> ModelText:
    """MiniCPM-V (arXiv 2408.01800) 2.6, 4 and 4.5, by the key `version`: queries attend to the
    patches of the tower, and are normed before and after a product."""
    version = f"{float(config.ratio('version')):g}"
    if version not in _WORDS:
        known = ", ".join(dict.fromkeys(f"{float(v):g}" for v in _WORDS))
        raise config.refuse("version", f"is {version}, which is not modeled: expected {known}")
    vision = config.needed("vision_config")
    config.fixed(drop_vision_last_layer=False, slice_mode=True, batch_vision_input=True)
    config.skip("slice_config", "image_size", "patch_size", "use_image_id", "vision_batch_size")
    config.skip("batch_3d_resampler", "temporal_id", "max_window_layers")
    text = _WORDS[version](config)
    read_size(config, text, "N_q", "query_num", default=64)
    idle = siglip(vision, text)
    idle.param("query", "N_q, D")
    idle.matrix("resampler_kv", "D_v, D")
    idle.matrix("resampler_q resampler_k resampler_v resampler_o", "D, D", "D")
    idle.norm("resampler_q_norm resampler_kv_norm resampler_norm", "D")
    idle.matrix("projector", "D, D")
    return replace(idle.beside(), name="minicpmv")


@reads(
    "MiniCPM-V 4.6",
    "minicpmv4_6",
    "minicpmv4_7",
    features="Qwen3.5; SigLIP, patches merged in the tower",
)
def read_minicpmv4_6(config: Config) -> ModelText:
    """MiniCPM-V 4.6: attention in windows and a product merge patches behind a layer of the tower,
    and `merger_times` further ones behind it."""
    vision, spoken = config.needed("vision_config"), config.needed("text_config")
    text = language_of(config, spoken, "qwen3_5_text")
    config.only("drop_vision_last_layer", False)
    config.skip("insert_layer_id", "image_size", "patch_size", "downsample_mode")
    rows, columns = vision.sizes("window_kernel_size", length=2, least=1) or (2, 2)
    config.only("merge_kernel_size", [2, 2])
    config.skip("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
    kind = config.text("model_type")
    vision.word("model_type", among=(f"{kind}_vision",), default=f"{kind}_vision")
    vision.skip("insert_layer_id")
    idle = siglip(vision, text)
    text.symbol("U_v", rows * columns * text.value("D_v"), "patches of a window")
    text.symbol("J_v", rows * columns * text.value("F_v"), "inner widths of a window")
    idle.norm("window_norm", "D_v")
    idle.matrix("window_q window_k window_v window_o", "D_v, D_v", "D_v")
    idle.norm("merger_norm", "U_v")
    idle.matrix("merger_in", "U_v, J_v", "J_v")
    idle.matrix("merger_out", "J_v, D_v", "D_v")
    times = config.size("merger_times", default=1)
    for number in range(1, times + 1):
        width = "D" if number == times else "D_v"
        idle.norm(f"projector{number}_norm", "4*D_v")
        idle.matrix(f"projector{number}_in", "4*D_v, 4*D_v", "4*D_v")
        idle.matrix(f"projector{number}_out", f"4*D_v, {width}", width)
    return replace(idle.beside(), name=kind)
