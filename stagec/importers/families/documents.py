"""Small models that read documents: language models of other families, and a tower whose patches
are merged. A step of texts does not use the tower (`idle`)."""

from dataclasses import replace

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.idle import Idle, image_tokens, read_idle, siglip
from stagec.importers.common.sizes import read_size
from stagec.importers.families.multimodal import words_and_tower
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, Attention, FeedForward
from stagec.importers.writing.stack import Decoder
from stagec.importers.writing.text import ModelText


@reads("PaddleOCR-VL", "paddleocr_vl", features="ERNIE 4.5; tower of SigLIP, 2 x 2 merger")
def read_paddleocr(config: Config) -> ModelText:
    """PaddleOCR-VL (arXiv 2510.14528). Releases state the keys of the language model beside
    `vision_config`, classes of transformers in `text_config`."""
    vision = config.needed("vision_config")
    config.merge("text_config")
    sizes = Sizes(1024, 3072, 18, 16, 103424, 131072, groups=2, dim=128, base=500000)
    model = DecoderModel(config, sizes)
    biased = model.flag("use_bias")
    mixer = Attention(rope=model.rope(), qkv_bias=biased, out_bias=biased)
    block = FeedForward(model.activation(), bias=biased)
    config.skip("ignored_index", "rope_is_neox_style", "use_3d_rope", "weight_share_add_bias")
    text = model.stack(mixer, block, Decoder(tied=model.tied(True)))
    merged = vision.size("spatial_merge_size", default=2) ** 2
    vision.skip("temporal_patch_size", "tokens_per_second", "rope_parameters", "model_type")
    idle = siglip(vision, text, (1152, 4304, 27, 14, 384))
    text.symbol("U_v", merged * text.value("D_v"), "spatial_merge_size^2 * hidden_size")
    idle.norm("projector_norm", "D_v")
    idle.matrix("projector_in", "U_v, U_v", "U_v")
    idle.matrix("projector_out", "U_v, D", "D")
    return replace(idle.beside(), name="paddleocr_vl")


@reads("GLM-OCR", "glm_ocr", features="GLM-4; tower with a gate, q and k normed, 2 x 2 merger")
def read_glm_ocr(config: Config) -> ModelText:
    """GLM-OCR: the blocks of GLM-4.1V without learned positions, with biases and norms of queries
    and keys in the tower."""
    text, vision = words_and_tower(config, _read_words)
    read_idle(vision, text, width=1024, inner=4096, layers=24, patch=14)
    read_size(vision, text, "U_v", "out_hidden_size", default=1536)
    read_size(vision, text, "Y_v", "temporal_patch_size", default=2)
    read_size(vision, text, "X_v", "spatial_merge_size", default=2)
    heads = vision.size("num_heads", "num_attention_heads", default=16)
    text.symbol("K_v", text.value("D_v") // heads, "hidden_size / num_heads")
    image_tokens(vision, text, 336)
    biased = vision.flag("attention_bias", default=True)
    vision.skip("rope_parameters", "model_type")
    idle = Idle(text)
    idle.matrix("patch", "C, Y_v, P_v, P_v, D_v", "D_v")
    idle.param("attn_norm mlp_norm", "L_v, D_v")
    idle.matrix("q k v o", "L_v, D_v, D_v", "L_v, D_v" if biased else "")
    idle.param("q_norm k_norm", "L_v, K_v")
    idle.matrix("gate_up", "L_v, D_v, 2, F_v", "L_v, 2, F_v" if biased else "")
    idle.matrix("down", "L_v, F_v, D_v", "L_v, D_v" if biased else "")
    idle.param("post_norm", "D_v")
    idle.matrix("merge", "X_v, X_v, D_v, U_v", "U_v")
    idle.matrix("projector", "U_v, U_v")
    idle.norm("projector_norm", "U_v")
    idle.matrix("merger_gate_up", "U_v, 2, C*U_v")
    idle.matrix("merger_down", "C*U_v, U_v")
    vision.finish()
    return idle.beside()


def _read_words(config: Config) -> ModelText:
    """The language model of GLM-OCR: norms before and after the blocks, no biases."""
    config.family = "GLM-OCR"
    model = DecoderModel(config, Sizes(1024, 4096, 16, 16, 59392, 131072, groups=8))
    mixer = Attention(rope=model.rope(interleaved=True))
    return model.stack(mixer, FeedForward(model.activation(), packed=True), post=RMS)
