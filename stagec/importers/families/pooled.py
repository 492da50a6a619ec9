"""Molmo: language models of other families, and a tower whose patches are pooled by attention. A
step of texts does not use the tower (`idle`)."""

from dataclasses import replace

from stagec.importers.common.decoder_model import DecoderModel, PerLayer, Sizes
from stagec.importers.common.idle import Idle, read_idle, words_of
from stagec.importers.common.sizes import read_size
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, Attention, Block, FeedForward
from stagec.importers.writing.stack import Decoder
from stagec.importers.writing.text import ModelText

#: Rows of the table of embeddings behind those of the vocabulary.
_NEW_ROWS = 128
#: The tower of Molmo: ViT-L/14 of CLIP for images of 336 x 336 without its last layer.
_TOWER = (
    ("D_v", 1024, "width of the tower"),
    ("F_v", 4096, "inner width of the tower"),
    ("L_v", 23, "layers of the tower"),
    ("C", 3, "channels of an image"),
    ("P_v", 14, "side of a patch"),
    ("N_v", 576, "patches of an image"),
)


@reads("Molmo", "molmo", features="Qwen2 or OLMo; tower of CLIP, patches pooled by attention")
def read_molmo(config: Config) -> ModelText:
    """Molmo (arXiv 2409.17146). The sizes of the tower are those of the class of the release
    (`VisionBackboneConfig` in vllm/model_executor/models/molmo.py), which joins two layers."""
    model = DecoderModel(config, Sizes(3584, 37888, 28, 28, 152064, 4096, groups=4))
    text = model.text
    if model.inner % 2:
        raise config.wrong("intermediate_size", "an even number")
    text.replace("F", model.inner // 2, "half of intermediate_size")
    config.only("embedding_size", text.value("V"))
    config.fixed(layer_norm_type="rms", weight_tying=False, tie_word_embeddings=False)
    config.skip("use_position_ids")
    text.symbol("N_new", _NEW_ROWS, "further rows of the table of embeddings")
    normed = RMS if model.flag("attention_layer_norm") else None
    mixer = Attention(
        qkv_bias=model.flag("qkv_bias", True),
        qk_norm=normed,
        norm_dims="together",
        rope=model.rope(),
        packed=True,
    )
    text = _stacked(config, model, mixer, FeedForward(packed=True))
    for symbol, value, comment in _TOWER:
        text.symbol(symbol, value, comment)
    idle = Idle(text)
    idle.matrix("patch", "C, P_v, P_v, D_v")
    idle.param("class_token", "D_v")
    idle.param("positions", "N_v + 1, D_v")
    idle.norm("pre_norm", "D_v")
    idle.layers()
    idle.param("padded", "2, 2*D_v")
    idle.matrix("pool_q pool_k pool_v", "2*D_v, D_v", "D_v")
    idle.matrix("pool_o", "D_v, D_v", "D_v")
    idle.matrix("projector_gate_up", "D_v, 2, F")
    idle.matrix("projector_down", "F, D")
    return idle.beside()


@reads("Molmo 2", "molmo2", features="Qwen3 or OLMo 3; SigLIP 2, patches pooled by attention")
def read_molmo2(config: Config) -> ModelText:
    """Molmo 2: queries and keys are normed per head or as one row; some layers
    may have unscaled positions."""
    spoken = words_of(config)
    spoken.family = config.family
    spoken.word("model_type", among=("molmo2", "molmo2_text"))
    model = DecoderModel(spoken, Sizes(4096, 12288, 36, 32, 151936, 36864, groups=8, dim=128))
    new = spoken.count("additional_vocab_size", default=_NEW_ROWS)
    model.text.symbol("N_new", new, "additional_vocab_size")
    by_row = spoken.word("qk_norm_type", among=("qwen3", "olmo"), default="qwen3") == "olmo"
    spoken.fixed(use_qk_norm=True, tie_word_embeddings=False)
    mixer = Attention(
        qkv_bias=spoken.flag("attention_bias", "qkv_bias", default=False),
        qk_norm=RMS,
        norm_dims="together" if by_row else "head",
        rope=model.rope(),
        packed=True,
    )
    scaled = spoken.sizes("rope_scaling_layers", most=model.count - 1)
    if not scaled and not spoken.has("rope_scaling_layers"):
        scaled = tuple(range(model.count))
    mixers: PerLayer = mixer
    if mixer.rope and mixer.rope.scaling and len(set(scaled)) < model.count:
        plain = replace(mixer, rope=replace(mixer.rope, scaling=""))
        both = {True: ("scaled", mixer), False: ("plain", plain)}
        mixers = [both[i in scaled] for i in range(model.count)]
    text = _stacked(spoken, model, mixers, FeedForward(model.activation(), packed=True))
    spoken.finish()
    return replace(_siglip(config, text).beside(), name="molmo2")


def _stacked(config: Config, model: DecoderModel, mixers: PerLayer, block: Block) -> ModelText:
    norm, post = (None, RMS) if config.flag("norm_after", default=False) else (RMS, None)
    decoder = Decoder(more="N_new" if model.text.value("N_new") else "")
    return model.stack(mixers, block, decoder, norm=norm, post=post)


def _siglip(config: Config, text: ModelText) -> Idle:
    """The tower, and the pooling of a few of its layers. The key `vit_config` of releases states
    more layers than they have: the last one that is pooled is the last one."""
    config.skip("image_patch_id", "image_low_res_id", "image_col_id", "use_frame_special_tokens")
    released, pool = config.section("vit_config"), config.needed("adapter_config")
    vision = released or config.needed("vision_config")
    read_idle(vision, text, width=1152, inner=4304, layers=25, patch=14)
    width, layers = text.value("D_v"), text.value("L_v")
    whole = vision.size("num_attention_heads", default=16)
    vision.fixed(head_dim=width // whole, num_key_value_heads=whole)
    image = vision.sizes("image_size", "image_default_input_size", length=2, least=1) or (378, 378)
    patch = vision.size("image_patch_size", default=text.value("P_v"))
    text.replace("P_v", patch, "patch_size")
    rows = image[0] // patch * (image[1] // patch)
    rows = vision.size("num_position_embeddings", "image_num_pos", default=rows)
    text.symbol("N_v", rows, "num_position_embeddings")
    vision.skip("model_type", "float32_attention", "num_channels")
    key = "vit_layers" if pool.has("vit_layers") else "vision_feature_layer"
    given = pool.sizes(key, least=-layers, most=layers - 1) or (24, 18)
    kept = [i % layers for i in given]
    if released:
        text.replace("L_v", max(kept) + 1, "layers up to the last one of vit_layers")
    biased = vision.flag("attention_bias", default=True)
    idle = Idle(text)
    idle.matrix("patch", "C, P_v, P_v, D_v", "D_v")
    idle.param("positions", "N_v, D_v")
    idle.layers(attention_bias=biased)
    vision.finish()
    _pooled(pool, idle, len(kept))
    return idle


def _pooled(pool: Config, idle: Idle, layers: int) -> None:
    """Attention of the mean of 2 x 2 patches to them, each of several layers of the tower, and a
    gate to the width D."""
    text = idle.text
    read_size(pool, text, "D_a", "hidden_size", default=1152)
    dim = pool.size("head_dim", default=72)
    heads = pool.size("num_attention_heads", default=16)
    groups = pool.size("num_key_value_heads", default=16)
    text.symbol("U_a", heads * dim, "num_attention_heads * head_dim")
    text.symbol("G_a", groups * dim, "num_key_value_heads * head_dim")
    read_size(pool, text, "F_a", "intermediate_size", default=18944)
    pool.only("text_hidden_size", text.value("D"))
    pool.fixed(image_padding_embed=None)
    pool.skip("model_type", "float32_attention", "hidden_act")
    biased = pool.flag("attention_bias", default=True)
    wide = pool.flag("mlp_bias", default=False)
    for name, into in (("q", "U_a"), ("k", "G_a"), ("v", "G_a")):
        idle.matrix(f"pool_{name}", f"{layers}*D_v, {into}", into if biased else "")
    idle.matrix("pool_o", "U_a, D_a", "D_a" if biased else "")
    idle.matrix("projector_gate_up", "D_a, 2, F_a", "2, F_a" if wide else "")
    idle.matrix("projector_down", "F_a, D", "D" if wide else "")
    pool.finish()
