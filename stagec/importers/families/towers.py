"""Towers of images and sounds beside language models of other families, and the declaration of
families by their projectors.

A tower and its projector are declared and frozen (`idle`): a step with text does not use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial

from stagec.importers.common.idle import Idle, clip, image_tokens, read_idle, siglip
from stagec.importers.common.sizes import read_size
from stagec.importers.families.images_beside import language_alone, language_of
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


def _whisper(sound: Config, text: ModelText, *, rotated: bool = False) -> Idle:
    """Declare the encoder of Whisper (arXiv 2212.04356), with a table of positions unless queries
    and keys are `rotated`."""
    read_size(sound, text, "D_v", "d_model", "hidden_size", default=1280)
    read_size(sound, text, "F_v", "encoder_ffn_dim", "intermediate_size", default=5120)
    count = sound.layers("encoder_layers", "num_hidden_layers", default=32)
    text.symbol("L_v", count, "layers of the tower")
    read_size(sound, text, "C", "num_mel_bins", default=128)
    if rotated:
        sound.only("num_key_value_heads", sound.size("num_attention_heads", default=20))
        sound.skip("max_position_embeddings", "rope_parameters", "hidden_act")
    else:
        read_size(sound, text, "N_v", "max_source_positions", default=1500)
    sound.skip("encoder_attention_heads", "num_attention_heads", "num_hidden_layers", "head_dim")
    sound.skip("num_key_value_heads", "activation_function", "scale_embedding", "vocab_size")
    idle = Idle(text)
    idle.matrix("conv_a", "3, C, D_v", "D_v")
    idle.matrix("conv_b", "3, D_v, D_v", "D_v")
    if not rotated:
        idle.param("positions", "N_v, D_v")
    for name in "qkvo":
        idle.matrix(name, "L_v, D_v, D_v", "" if name == "k" else "L_v, D_v")
    idle.feed_forward()
    idle.norm("attn_norm mlp_norm", "L_v, D_v")
    idle.norm("norm", "D_v")
    sound.finish()
    return idle


def _moon(vision: Config, text: ModelText) -> Idle:
    """Declare the tower of Kimi-VL, Kimi K2.5 and K3 (MoonViT, arXiv 2504.07491): an interpolated
    table of positions of two axes. Names of keys of K2.5 begin with `vt_`; that of K3 has RMSNorm,
    other widths of heads, and no biases."""
    width = read_size(vision, text, "D_v", "hidden_size", "vt_hidden_size", default=1152)
    read_size(vision, text, "F_v", "intermediate_size", "vt_intermediate_size", default=4304)
    count = vision.layers("num_hidden_layers", "vt_num_hidden_layers", default=27)
    text.symbol("L_v", count, "layers of the tower")
    text.symbol("P_v", vision.side("patch_size", default=14), "patch_size")
    for symbol, key in (("Y_v", "height"), ("X_v", "width")):
        read_size(vision, text, symbol, f"pos_emb_{key}", f"init_pos_emb_{key}", default=64)
    rows, columns = vision.sizes("merge_kernel_size", length=2, least=1) or (2, 2)
    text.symbol("U_v", rows * columns * width, "merged patches")
    vision.fixed(merge_type="sd2_tpool", mlp_type="mlp2", mm_hidden_size=width)
    vision.only("mm_projector_type", "patchmerger", "patchmergerv2")
    read_size(vision, text, "A_v", "qkv_hidden_size", default=width)
    layer = vision.word("norm_type", among=("layernorm", "rmsnorm"), default="layernorm")
    keys = ("attn_bias", "linear_bias", "patch_embed_proj_bias")
    attn, linear, patch = (vision.flag(key, default=True) for key in keys)
    vision.skip("activation_func", "pos_emb_interpolation_mode")
    vision.skip("pos_emb_time", "init_pos_emb_time", "pos_emb_type", "video_attn_type")
    vision.skip("num_attention_heads", "vt_num_attention_heads", "hidden_act", "rope_parameters")
    vision.skip("projector_hidden_act", "projector_ln_eps", "text_hidden_size")
    idle = Idle(text)
    idle.matrix("patch", "3, P_v, P_v, D_v", "D_v" if patch else "")
    idle.param("positions", "Y_v, X_v, D_v")
    idle.norm("attn_norm mlp_norm", "L_v, D_v", bias=layer == "layernorm")
    idle.matrix("q k v", "L_v, D_v, A_v", "L_v, A_v" if attn else "")
    idle.matrix("o", "L_v, A_v, D_v", "L_v, D_v" if attn else "")
    idle.matrix("up", "L_v, D_v, F_v", "L_v, F_v" if linear else "")
    idle.matrix("down", "L_v, F_v, D_v", "L_v, D_v" if linear else "")
    idle.norm("norm", "D_v", bias=layer == "layernorm")
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


def _of_any_size(vision: Config, text: ModelText) -> Idle:
    """Declare the tower of VideoLLaMA 3 (arXiv 2501.13106): SigLIP whose positions are rotated."""
    read_idle(vision, text, width=768, inner=3072, layers=12, patch=16)
    vision.skip("rope_parameters")
    vision.finish()
    idle = Idle(text)
    idle.matrix("patch", "C, P_v, P_v, D_v", "D_v")
    idle.layers()
    idle.norm("norm", "D_v")
    return idle


def _aim(vision: Config, text: ModelText) -> Idle:
    """Declare the tower of Ovis 2 (AIMv2, arXiv 2411.14402), with its head: probabilities of the
    tokens of a vocabulary of images, without those of `num_visual_indicator_tokens`."""
    read_idle(vision, text, width=1024, inner=2816, layers=24, patch=14)
    image_tokens(vision, text, 224)
    stride = vision.size("hidden_stride", default=1)
    tokens = read_size(vision, text, "X_v", "vocab_size", default=16384)
    marks = vision.size("num_visual_indicator_tokens", default=5, most=tokens - 1)
    text.symbol("U_v", tokens - marks, "vocab_size - num_visual_indicator_tokens")
    biased = vision.flag("qkv_bias", default=False)
    wide = vision.flag("mlp_bias", default=False)
    vision.skip("tokenize_function")
    vision.finish()
    idle = Idle(text)
    idle.matrix("patch", "C, P_v, P_v, D_v", "D_v")
    idle.param("positions", "N_v, D_v")
    idle.param("pre_norm post_norm", "D_v")
    idle.param("attn_norm ffn_norm", "L_v, D_v")
    idle.matrix("q k v o", "L_v, D_v, D_v", "L_v, D_v" if biased else "")
    idle.matrix("gate_up", "L_v, D_v, 2, F_v", "L_v, 2, F_v" if wide else "")
    idle.matrix("down", "L_v, F_v, D_v", "L_v, D_v" if wide else "")
    idle.matrix("head", f"{stride**2}*D_v, U_v")
    idle.norm("head_norm", "U_v")
    return idle


def _sam(vision: Config, text: ModelText) -> Idle:
    """Declare the tower of GOT-OCR 2 (ViTDet of SAM, arXiv 2304.02643): biases by distance, of
    windows in all layers but `global_attn_indexes`, and a neck of two convolutions."""
    width = read_size(vision, text, "D_v", "hidden_size", default=768)
    read_size(vision, text, "F_v", "mlp_dim", default=4 * width)
    count = vision.layers("num_hidden_layers", default=12)
    text.symbol("L_v", count, "layers of the tower")
    heads = vision.size("num_attention_heads", default=12)
    text.symbol("K_v", width // heads, "hidden_size / num_attention_heads")
    read_size(vision, text, "C", "num_channels", default=3)
    patch = vision.side("patch_size", default=16)
    text.symbol("P_v", patch, "patch_size")
    side = vision.side("image_size", default=1024) // patch
    read_size(vision, text, "O_v", "output_channels", default=256)
    full = vision.sizes("global_attn_indexes", most=count - 1) or (2, 5, 8, 11)
    window = vision.size("window_size", default=14)
    vision.fixed(use_abs_pos=True, use_rel_pos=True)
    biased = vision.flag("qkv_bias", default=True)
    vision.skip("hidden_act", "mlp_ratio", "num_pos_feats")
    vision.finish()
    idle = Idle(text)
    idle.matrix("patch", "C, P_v, P_v, D_v", "D_v")
    idle.param("positions", f"{side}, {side}, D_v")
    idle.param("full_distances", f"{len(full)}, 2, {2 * side - 1}, K_v")
    idle.param("distances", f"{count - len(full)}, 2, {2 * window - 1}, K_v")
    idle.norm("attn_norm mlp_norm", "L_v, D_v")
    idle.matrix("q k v", "L_v, D_v, D_v", "L_v, D_v" if biased else "")
    idle.matrix("o", "L_v, D_v, D_v", "L_v, D_v")
    idle.feed_forward()
    idle.matrix("neck_in", "D_v, O_v")
    idle.matrix("neck_out", "O_v, 3, 3, O_v")
    idle.norm("neck_in_norm neck_out_norm", "O_v")
    return idle


def _conformer(sound: Config, text: ModelText) -> Idle:
    """Declare the encoder of Granite Speech (arXiv 2505.08699): a Conformer whose attention has
    distances as vectors, and scores of letters that its middle layer adds to its input."""
    width = read_size(sound, text, "D_v", "hidden_dim", "hidden_size", default=1024)
    inner = width * sound.size("feedforward_mult", default=4)
    text.symbol("F_v", inner, "feedforward_mult * hidden_dim")
    count = sound.layers("num_layers", "num_hidden_layers", default=10)
    text.symbol("L_v", count, "layers of the encoder")
    read_size(sound, text, "C", "input_dim", "num_mel_bins", default=160)
    heads = sound.size("num_heads", "num_attention_heads", default=8)
    dim = read_size(sound, text, "K_v", "dim_head", default=width // heads)
    text.symbol("A_v", heads * dim, "num_heads * dim_head")
    read_size(sound, text, "O_v", "output_dim", default=42)
    read_size(sound, text, "W_v", "conv_kernel_size", default=15)
    distances = 2 * sound.size("max_pos_emb", default=512) + 1
    wide = width * sound.size("conv_expansion_factor", default=2)
    text.symbol("X_v", wide, "conv_expansion_factor * hidden_dim")
    sound.skip("context_size")
    sound.finish()
    idle = Idle(text)
    idle.matrix("in", "C, D_v", "D_v")
    for name in ("ffn_a", "ffn_b"):
        idle.norm(f"{name}_norm", "L_v, D_v")
        idle.matrix(f"{name}_up", "L_v, D_v, F_v", "L_v, F_v")
        idle.matrix(f"{name}_down", "L_v, F_v, D_v", "L_v, D_v")
    idle.norm("attn_norm conv_norm post_norm", "L_v, D_v")
    idle.matrix("q k v", "L_v, D_v, A_v")
    idle.matrix("o", "L_v, A_v, D_v", "L_v, D_v")
    idle.param("distances", f"L_v, {distances}, K_v")
    idle.matrix("conv_gate_up", "L_v, D_v, 2, X_v", "L_v, 2, X_v")
    idle.matrix("conv", "L_v, X_v, W_v")
    idle.norm("batch_norm", "L_v, X_v")
    idle.matrix("conv_down", "L_v, X_v, D_v", "L_v, D_v")
    idle.matrix("letters", "D_v, O_v", "O_v")
    idle.matrix("letters_back", "O_v, D_v", "D_v")
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
    "audioflamingo3_encoder": _whisper,
    "musicflamingo_encoder": _whisper,
    "glmasr_encoder": partial(_whisper, rotated=True),
    "granite_speech_encoder": _conformer,
    "idefics2": siglip,
    "idefics2_vision": siglip,
    "video_llama_3_vision": _of_any_size,
    "ovis2_vision": _aim,
    "got_ocr2_vision": _sam,
    "pp_chart2table_vision": _sam,
    "qianfan_ocr_vision": _intern,
}


#: The sections of towers, and of language models.
_SECTIONS = ("vision_config", "audio_config", "encoder_config", "text_config", "llm_config")


def _read(config: Config, projector: Projector, *, tower: str, words: str) -> ModelText:
    """The text of a language model with a tower; `tower` and `words` are the types of these where
    no key says them. Without a section for each it is the language model alone."""
    if config.has("num_hidden_layers") and not config.has(*_SECTIONS):
        return language_alone(config, words)
    seen, spoken = config.needed(*_SECTIONS[:3]), config.needed(*_SECTIONS[3:])
    text = language_of(config, spoken, words)
    kind = seen.word("model_type", among=("", *_TOWERS), default=tower)  # '': Kimi-K2.5-NVFP4
    idle = _TOWERS[kind or tower](seen, text)
    projector(config, idle)
    config.word("projector_hidden_act", among=ACTIVATIONS, default="gelu")
    name = config.text("model_type")
    return replace(idle.beside(), name=name)


def projects(
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
        def read(config: Config) -> ModelText:
            return _read(config, projector, tower=tower, words=words)

        read.__module__ = projector.__module__
        reads(name, *model_types, features=features, read_images=read_images)(read)
        return projector

    return declare
