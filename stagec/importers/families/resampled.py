"""MiniCPM-V: language models of other families, and a tower of SigLIP whose patches a few queries
attend to."""

from dataclasses import replace

from stagec.importers.common.idle import siglip, tower_of
from stagec.importers.common.sizes import read_size
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
    vision = tower_of(config)
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
