"""Qwen-Omni: Qwen-VL with an audio encoder in addition to the vision tower.

A full model also has a talker, which generates speech from the output of the thinker; only the
thinker is read.
"""

from collections.abc import Callable
from dataclasses import replace

from stagec.importers.common.idle import Idle, words_of
from stagec.importers.common.sizes import read_size
from stagec.importers.families.llama import read_qwen2, read_qwen3
from stagec.importers.families.mixture import read_qwen3_moe
from stagec.importers.families.multimodal import qwen2_5_tower, qwen3_tower, words_and_tower
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.text import ModelText

_TALKER = """
    talker_config token2wav_config code2wav_config enable_audio_output enable_talker
    system_prompt_len assistant_token_id user_token_id system_token_id tts_pad_token_id
"""
_THINKER = """
    position_id_per_seconds seconds_per_chunk audio_start_token_id initializer_range
    audio_end_token_id user_token_id
"""


@reads(
    "Qwen2.5-Omni",
    "qwen2_5_omni",
    "qwen2_5_omni_thinker",
    features="the thinker: Qwen2.5-VL; encoder of sounds",
)
def read_qwen2_5_omni(config: Config) -> ModelText:
    """Qwen2.5-Omni (arXiv 2503.20215): the thinker, Qwen2.5-VL with an encoder of sounds."""
    return _thinker(config, read_qwen2, qwen2_5_tower, _whisper)


@reads(
    "Qwen3-Omni",
    "qwen3_omni_moe",
    "qwen3_omni_moe_thinker",
    features="the thinker: Qwen3-VL-MoE; encoder of sounds",
)
def read_qwen3_omni(config: Config) -> ModelText:
    """Qwen3-Omni (arXiv 2509.17765): the thinker, Qwen3-VL-MoE with an encoder of sounds."""
    return _thinker(config, read_qwen3_moe, qwen3_tower, _sounds)


@reads("Qwen3-ASR", "qwen3_asr", features="Qwen3; encoder of sounds of Qwen3-Omni")
def read_qwen3_asr(config: Config) -> ModelText:
    """Qwen3-ASR: Qwen3 with the encoder of sounds of Qwen3-Omni. Releases have the model in
    `thinker_config`."""
    inner = config.section("thinker_config")
    model = inner or config
    model.inherit(config, "model_type")
    words = words_of(model)
    text = read_qwen3(words)
    words.skip("model_type", "rope_scaling")
    words.finish()
    idle = Idle(text)
    sound = model.section("audio_config")
    if sound is not None:
        _sounds(sound, idle)
        sound.finish()
    model.skip("timestamp_token_id", "token_classification_bias", *_THINKER.split())
    config.skip("support_languages")
    if inner is not None:
        inner.finish()
    return replace(idle.beside("sounds"), name="qwen3_asr")


def _thinker(
    config: Config,
    read: Callable[[Config], ModelText],
    tower: Callable[[Config, ModelText], Idle],
    sounds: Callable[[Config, Idle], None],
) -> ModelText:
    inner = config.section("thinker_config")
    if inner is not None:
        inner.inherit(config, "model_type")
        config.skip(*_TALKER.split())
    thinker = inner or config
    text, vision = words_and_tower(thinker, read)
    idle = tower(vision, text)
    vision.finish()
    sound = thinker.section("audio_config")
    if sound is not None:
        sounds(sound, idle)
        sound.finish()
    thinker.skip(*_THINKER.split())
    if inner is not None:
        inner.finish()
        text.notes.append("The thinker; the talker and what makes sounds of it are left out.")
    return idle.beside("towers")


def _sizes(sound: Config, idle: Idle) -> None:
    """Declare the sizes of an encoder of sounds."""
    text = idle.text
    read_size(sound, text, "D_a", "d_model", default=1280)
    read_size(sound, text, "F_a", "encoder_ffn_dim", default=5120)
    text.symbol("L_a", sound.layers("encoder_layers", default=32), "encoder_layers")
    read_size(sound, text, "C_a", "num_mel_bins", default=128)
    read_size(sound, text, "O_a", "output_dim", default=3584)
    sound.skip("encoder_attention_heads", "activation_function", "scale_embedding")
    sound.skip("max_source_positions", "n_window", "n_window_infer", "conv_chunksize")
    sound.skip("num_hidden_layers", "max_position_embeddings")


def _layers(idle: Idle, *, key_bias: bool) -> None:
    for name in "qkvo":
        bias = "L_a, D_a" if name != "k" or key_bias else ""
        idle.matrix(f"sound_{name}", "L_a, D_a, D_a", bias)
    idle.matrix("sound_up", "L_a, D_a, F_a", "L_a, F_a")
    idle.matrix("sound_down", "L_a, F_a, D_a", "L_a, D_a")
    idle.norm("sound_attn_norm sound_mlp_norm", "L_a, D_a")
    idle.norm("sound_norm", "D_a")


def _whisper(sound: Config, idle: Idle) -> None:
    """The encoder of Whisper with a projection, and vectors that begin and end sounds."""
    _sizes(sound, idle)
    idle.matrix("conv_a", "3, C_a, D_a", "D_a")
    idle.matrix("conv_b", "3, D_a, D_a", "D_a")
    _layers(idle, key_bias=False)
    idle.matrix("sound_out", "D_a, O_a", "O_a")
    idle.param("sound_ends", "2, O_a")


def _sounds(sound: Config, idle: Idle) -> None:
    """Three convolutions that halve time and frequency each, then layers of Whisper."""
    _sizes(sound, idle)
    text = idle.text
    read_size(sound, text, "X_a", "downsample_hidden_size", default=480)
    bins = text.value("C_a")
    for _ in range(3):
        bins = (bins + 1) // 2
    text.symbol("N_a", bins, "num_mel_bins, halved three times")
    for name, channels in (("conv_a", "1"), ("conv_b", "X_a"), ("conv_c", "X_a")):
        idle.matrix(name, f"3, 3, {channels}, X_a", "X_a")
    idle.matrix("sound_in", "N_a, X_a, D_a")
    _layers(idle, key_bias=True)
    idle.matrix("projector_a", "D_a, D_a", "D_a")
    idle.matrix("projector_b", "D_a, O_a", "O_a")
