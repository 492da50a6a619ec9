"""Language models of other families with a tower, and several layers between both. A step of texts
does not use them (`idle`)."""

from stagec.importers.common.idle import Idle
from stagec.importers.common.sizes import read_size
from stagec.importers.families.towers import projects
from stagec.importers.reading.config import Config


@projects(
    "VideoLLaMA 3",
    "video_llama_3",
    features="Qwen2; SigLIP with rotary positions",
    tower="video_llama_3_vision",
    words="qwen2",
)
@projects("DeepSeek-VL", "deepseek_vl", features="Llama; tower of SigLIP")
@projects(
    "Audio Flamingo 3",
    "audioflamingo3",
    "musicflamingo",
    features="Qwen2; encoder of Whisper",
    tower="audioflamingo3_encoder",
    words="qwen2",
)
def _two(config: Config, idle: Idle) -> None:
    config.skip("audio_frame_step", "rope_parameters")
    idle.two(bias=config.flag("projector_bias", default=True))


@projects(
    "GLM-ASR",
    "glmasr",
    features="Llama; encoder of Whisper with rotary positions",
    tower="glmasr_encoder",
)
def _doubled(config: Config, idle: Idle) -> None:
    """GLM-ASR: frames that make up the inner width are one token, and two products."""
    idle.matrix("projector_in", "F_v, 2*D", "2*D")
    idle.matrix("projector_out", "2*D, D", "D")


@projects(
    "Ovis 2",
    "ovis2",
    features="Qwen2; tower of AIMv2, a vocabulary of images",
    tower="ovis2_vision",
    words="qwen2",
)
def _table(config: Config, idle: Idle) -> None:
    """Ovis 2 (arXiv 2405.20797): probabilities of tokens of images select rows of a table."""
    config.skip("visual_indicator_token_ids")
    idle.param("image_embed", "X_v, D")


@projects(
    "GOT-OCR 2",
    "got_ocr2",
    "pp_chart2table",
    features="Qwen2; tower of SAM, two convolutions",
    tower="got_ocr2_vision",
    words="qwen2",
)
def _halved(config: Config, idle: Idle) -> None:
    """GOT-OCR 2 (arXiv 2409.01704): two convolutions that each halve the sides, and a product."""
    idle.matrix("halved", "O_v, 3, 3, 2*O_v")
    idle.matrix("quartered", "2*O_v, 3, 3, 4*O_v")
    idle.matrix("projector", "4*O_v, D", "D")


@projects(
    "Idefics 2",
    "idefics2",
    features="Mistral; tower of SigLIP, layers that queries attend with",
    tower="idefics2_vision",
    words="mistral",
)
def _perceiver(config: Config, idle: Idle) -> None:
    """Idefics 2 (arXiv 2405.02246): a gated block to the width D, and layers whose queries attend
    to patches and to each other."""
    inner, text = config.section("perceiver_config") or config, idle.text
    read_size(inner, text, "N_q", "resampler_n_latents", default=64)
    text.symbol("L_q", inner.layers("resampler_depth", default=3), "resampler_depth")
    dim = inner.size("resampler_head_dim", default=96)
    heads = inner.size("resampler_n_heads", default=16)
    text.symbol("A_q", heads * dim, "resampler_n_heads * resampler_head_dim")
    groups = inner.size("num_key_value_heads", default=4)
    text.symbol("G_q", groups * dim, "num_key_value_heads * resampler_head_dim")
    inner.skip("hidden_size", "hidden_act")
    idle.matrix("projector_gate_up", "D_v, 2, F")
    idle.matrix("projector_down", "F, D")
    idle.param("query", "N_q, D")
    idle.param("query_norm patch_norm query_ffn_norm", "L_q, D")
    for name, dims in (("q", "D, A_q"), ("k", "D, G_q"), ("v", "D, G_q"), ("o", "A_q, D")):
        idle.matrix(f"query_{name}", f"L_q, {dims}")
    idle.matrix("query_gate_up", "L_q, D, 2, 4*D")
    idle.matrix("query_down", "L_q, 4*D, D")
    idle.param("query_out_norm", "D")
    if inner is not config:
        inner.finish()


@projects(
    "Aria",
    "aria",
    features="experts beside shared ones; tower of SigLIP, queries that attend to patches",
    tower="idefics3_vision",
    words="aria_text",
)
def _queries(config: Config, idle: Idle) -> None:
    """Aria (arXiv 2410.05993): as many queries as the largest image has tokens attend to patches,
    with two products before attention, and two behind it."""
    tokens = config.section("projector_patch_to_query_dict")
    counts = [tokens.size(key) for key in tokens.members] if tokens else [256]
    idle.text.symbol("N_q", max(counts), "projector_patch_to_query_dict")
    idle.param("query", "N_q, D_v")
    idle.matrix("query_q query_k query_v", "D_v, D_v")
    idle.matrix("inner_q inner_k inner_v inner_o query_o", "D_v, D_v", "D_v")
    idle.norm("query_norm patch_norm projector_norm", "D_v")
    idle.matrix("projector_in", "D_v, D")
    idle.matrix("projector_out", "D, D")


@projects(
    "Granite Speech",
    "granite_speech",
    features="Granite; a Conformer, layers of BERT whose queries attend to frames",
    tower="granite_speech_encoder",
    words="granite",
)
def _windows(config: Config, idle: Idle) -> None:
    """Granite Speech (arXiv 2505.08699): in each window of frames queries attend to them and to
    each other, with the layers of BLIP-2 (2301.12597)."""
    inner, text = config.needed("projector_config"), idle.text
    inner.word("model_type", among=("blip_2_qformer",), default="blip_2_qformer")
    queries = config.size("window_size", default=15) // config.size("downsample_rate", default=5)
    text.symbol("N_q", queries, "window_size / downsample_rate")
    read_size(inner, text, "D_q", "hidden_size", default=768)
    read_size(inner, text, "F_q", "intermediate_size", default=3072)
    count = inner.layers("num_hidden_layers", default=12)
    text.symbol("L_q", count, "layers of the projector")
    every = inner.size("cross_attention_frequency", default=2)
    text.symbol("L_x", -(-count // every), "layers of the projector that attend to frames")
    read_size(inner, text, "E_q", "encoder_hidden_size", default=1408)
    inner.only("use_qformer_text_input", False)
    inner.skip("num_attention_heads", "hidden_act", "max_position_embeddings", "vocab_size")
    inner.finish()
    config.skip("has_lora_adapter")
    idle.param("query", "N_q, D_q")
    idle.norm("query_norm", "D_q")
    for name, layers, keys in (("query", "L_q", "D_q"), ("frame", "L_x", "E_q")):
        idle.matrix(f"{name}_q {name}_o", f"{layers}, D_q, D_q", f"{layers}, D_q")
        idle.matrix(f"{name}_k {name}_v", f"{layers}, {keys}, D_q", f"{layers}, D_q")
        idle.norm(f"{name}_attn_norm", f"{layers}, D_q")
    idle.matrix("query_up", "L_q, D_q, F_q", "L_q, F_q")
    idle.matrix("query_down", "L_q, F_q, D_q", "L_q, D_q")
    idle.norm("query_ffn_norm", "L_q, D_q")
    idle.matrix("projector", "D_q, D", "D")
