"""Phi with images and sounds: towers of CLIP or SigLIP, and a Conformer. A step of texts does not
use them (`idle`)."""

from stagec.importers.common.decoder_model import Sizes
from stagec.importers.common.idle import Idle, as_clip, as_siglip, declare_named
from stagec.importers.common.sizes import read_size
from stagec.importers.families.llama import phi3_words
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.text import ModelText

_CLIP = "openai/clip-vit-large-patch14-336"
#: `Phi4MultimodalVisionConfig` of transformers.
_SIGLIP = {"D_v": 1152, "F_v": 4304, "L_v": 27, "P_v": 14, "C": 3}
_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size", "num_channels")


@reads("Phi-3-Vision", "phi3_v", features="Phi-3; tower of CLIP")
def read_phi3_vision(config: Config) -> ModelText:
    """Phi-3-Vision and Phi-3.5-Vision (arXiv 2404.14219): four patches of CLIP are one token."""
    seen, embedding = config.section("img_processor"), config.section("embd_layer")
    if seen is not None:
        seen.fixed(name="clip_vision_model", model_name=_CLIP)
        seen.fixed(image_dim_out=1024, num_img_tokens=144)
        seen.finish()
    if embedding is not None:
        _read_embedding(embedding)
    text = phi3_words(config, Sizes(3072, 8192, 32, 32, 32064, 4096))
    declare_named(text, _CLIP)
    idle = as_clip(text)
    idle.param("row_end image_end", "4*D_v")
    idle.two("projector", "4*D_v")
    return idle.beside()


@reads(
    "Phi-4-Multimodal",
    "phi4_multimodal",
    "phi4mm",
    features="Phi-3; tower of SigLIP, a Conformer; adapters for images and sounds",
)
def read_phi4_multimodal(config: Config) -> ModelText:
    """Phi-4-Multimodal (arXiv 2503.01743). Releases (`phi4mm`) state sizes of the Conformer in
    `audio_processor`, and have adapters of all products, which a step of texts does not use."""
    released = config.text("model_type") == "phi4mm"
    seen, heard = config.section("vision_config"), config.section("audio_config")
    embedding, processor = config.section("embd_layer"), config.section("audio_processor")
    if processor is not None:
        processor.fixed(name="cascades")
        heard = heard or processor.section("config")
        processor.finish()
    heard = heard or config.needed("audio_config")
    if embedding is not None:
        _read_embedding(embedding)
    config.only("img_processor")
    sizes = Sizes(3072, 8192, 32, 32, 200064, 131072, groups=8)
    text = phi3_words(config, sizes)
    _tower(seen, text)
    idle = as_siglip(text, headed=True)
    idle.param("row_end image_end", "D_v")
    idle.two("projector", "D_v")
    _sounds(heard, idle, normed=released)
    if released:
        _adapters(config, idle)
    return idle.beside("towers")


def _read_embedding(embedding: Config) -> None:
    """Check how images and sounds become tokens, in an object or in one for each of both."""
    parts = [embedding.section(f"{name}_embd_layer") for name in ("image", "audio")]
    for part in (embedding, *filter(None, parts)):
        part.fixed(use_hd_transform=True, with_learnable_separator=True, projection_cls="mlp")
        part.fixed(hd_transform_order="sub_glb", image_token_compression_cls="avg_pool_2d")
        part.fixed(crop_size=448, use_qformer=False, use_conv_downsample=False)
        part.fixed(compression_rate=8, downsample_rate=1)
        part.skip("embedding_cls", "enable_gradient_checkpointing")
        part.finish()


def _tower(vision: Config | None, text: ModelText) -> None:
    """Declare the sizes of the tower, which `vision` may state."""
    for key, (symbol, value) in zip(_KEYS, _SIGLIP.items(), strict=True):
        text.symbol(symbol, vision.side(key, default=value) if vision else value, key)
    side = vision.side("image_size", default=448) if vision else 448
    text.symbol("N_v", (side // text.value("P_v")) ** 2, "(image_size / patch_size)^2")
    if vision is not None:
        vision.skip("num_attention_heads", "hidden_act", "crop_size", "feature_layer", "model_type")
        vision.finish()


def _sounds(heard: Config, idle: Idle, *, normed: bool) -> None:
    """Declare the Conformer: strided convolutions, and layers of two halves of a feed-forward block
    around attention and a convolution. Releases norm bands of frequencies (`normed`)."""
    text = idle.text
    read_size(heard, text, "D_a", "hidden_size", "attention_dim", default=1024)
    read_size(heard, text, "F_a", "intermediate_size", "linear_units", default=1536)
    text.symbol("L_a", heard.layers("num_blocks", default=24), "num_blocks")
    read_size(heard, text, "H_a", "num_attention_heads", "attention_heads", default=16)
    bands = read_size(heard, text, "N_a", "input_size", default=80)
    read_size(heard, text, "W_a", "kernel_size", default=3)
    read_size(heard, text, "E_a", "ext_pw_out_channel", default=1024)
    keys = ("depthwise_separable_out_channel", "depthwise_seperable_out_channel")
    read_size(heard, text, "U_a", *keys, default=1024)
    settings = heard.section("nemo_conv_settings") or heard
    read_size(settings, text, "C_a", "nemo_conv_channels", "conv_channels", default=1024)
    table = heard.section("relative_attention_bias_args") or heard
    distance = table.size("bias_max_distance", "t5_bias_max_distance", default=1000)
    both = not table.flag("bias_symmetric", "t5_bias_symmetric", default=False)
    text.symbol("B_a", distance * (1 + both), "distances between frames")
    if settings is not heard:
        settings.finish()
    if table is not heard:
        table.fixed(type="t5")
        table.finish()
    steps = heard.size("time_reduction", default=8, most=bands)
    if steps & (steps - 1) or steps == 1:
        raise heard.wrong("time_reduction", "a power of 2, from 2")
    heard.skip("encoder_embedding_config", "downsample_rate", "feature_layer", "model_type")
    heard.skip("activation", "conv_activation", "conv_glu_type", "nemo_activation", "chunk_size")
    heard.skip("left_chunk", "activation_checkpointing", "causal", "nemo_final_size")
    heard.fixed(depthwise_multiplier=1, input_layer="nemo_conv", ext_pw_kernel_size=1)
    heard.fixed(batch_norm=False, bias_in_glu=True, cnn_layer_norm=True)
    heard.finish()
    if normed:
        idle.param("bands_mean bands_scale", "N_a")
    for number in range(steps.bit_length() - 1):
        idle.matrix(f"stride{number}", "C_a, 3, 3", "C_a")
        if number:
            idle.matrix(f"mix{number}", "C_a, C_a", "C_a")
    idle.matrix("sound_in", f"{-(-bands // steps)}*C_a, D_a", "D_a")
    idle.param("distances", "B_a, H_a")
    for name in ("ffn_a", "ffn_b"):
        idle.norm(f"{name}_norm", "L_a, D_a")
        idle.matrix(f"{name}_gate_up", "L_a, D_a, 2, F_a", "L_a, 2, F_a")
        idle.matrix(f"{name}_down", "L_a, F_a, D_a", "L_a, D_a")
    idle.norm("sound_norm conv_norm layer_norm", "L_a, D_a")
    idle.matrix("sound_q sound_k sound_v sound_o", "L_a, D_a, D_a", "L_a, D_a")
    idle.matrix("conv_gate_up", "L_a, D_a, 2, E_a", "L_a, 2, E_a")
    idle.param("conv_gate_b conv_up_b", "L_a, E_a")
    idle.matrix("conv", "L_a, D_a, W_a", "L_a, D_a")
    idle.matrix("conv_mix", "L_a, D_a, U_a", "L_a, U_a")
    idle.matrix("conv_down", "L_a, D_a, E_a", "L_a, E_a")
    idle.two("speech", "D_a")
    idle.two("speech_beside_images", "D_a")


def _adapters(config: Config, idle: Idle) -> None:
    """Declare the adapters of all products for images and for sounds."""
    for name, symbol, rank in (("vision", "R_v", 256), ("speech", "R_a", 320)):
        adapter = config.section(f"{name}_lora")
        if adapter is None:
            continue
        read_size(adapter, idle.text, symbol, "r", default=rank)
        adapter.skip("dp", "layer", "lora_alpha")
        adapter.finish()
        for product, into, out in (
            ("qkv", "D", "(H + 2*G)*K"),
            ("o", "H*K", "D"),
            ("gate_up", "D", "2*F"),
            ("down", "F", "D"),
        ):
            idle.matrix(f"{name}_{product}_a", f"L, {into}, {symbol}")
            idle.matrix(f"{name}_{product}_b", f"L, {symbol}, {out}")
