"""Decoders of grouped queries in which each query sees the keys that an indexer selects."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Named, Sizes
from stagec.importers.common.idle import Idle, read_idle, words_of
from stagec.importers.common.sizes import read_size
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.reading.json_text import Json
from stagec.importers.writing.blocks import Attention, FeedForward, Norm, Rope
from stagec.importers.writing.stack import Decoder
from stagec.importers.writing.text import Callee, ModelText

_NORM = Norm(zero_centered=True)
_NOTE = (
    "Each query sees keys that are selected one by one, alike for all heads; the model selects",
    "blocks of sparse_block_size keys for each group of heads.",
)


@dataclass(frozen=True, slots=True)
class _SelectedHeads:
    """Attention to the keys that an indexer selects."""

    rope: Rope

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        given = (f"rope = ({self.rope.statics()})", f"norm = ({_NORM.statics(_NORM.affine)})")
        return text.use("selected_heads", "D H G K R H_i J N_keys theta", *given)


@reads(
    "MiniMax-M3", "minimax_m3", "minimax_m3_vl_text", features="an indexer selects blocks of keys"
)
def read_minimax_m3(config: Config) -> ModelText:
    """MiniMax-M3: an indexer selects keys, norms of 1 + w, a bounded gate, experts by sigmoids
    beside a shared one."""
    sizes = Sizes(6144, 3072, 60, 64, 200064, 524288, groups=4, dim=128, base=5000000)
    model = DecoderModel(config, sizes)
    rotated = config.size("rotary_dim", default=64)
    rope = model.rope(partial=Fraction(rotated, model.dim))
    mixer = Attention(qk_norm=_NORM, rope=rope)
    mixers: list[Named] = [
        ("selected", _SelectedHeads(rope)) if each else ("full", mixer)
        for each in _selecting(model)
    ]
    config.fixed(use_gemma_norm=True, use_qk_norm=True, qk_norm_type="per_head")
    config.fixed(attention_output_gate=False, scoring_func="sigmoid", n_shared_experts=1)
    config.fixed(use_routing_bias=True, swiglu_beta=1)
    config.word("hidden_act", among=("swigluoai", "silu"), default="silu")
    slope = config.ratio("swiglu_alpha", default=Fraction("1.702"))
    limit = config.ratio("swiglu_limit", default=7)
    bounds = (f"slope = {slope}", f"limit = {limit}", "shift = 1")
    mixture = model.experts(count=128, top=4, inner="F", activation="silu")
    config.skip("moe_intermediate_size", "first_k_dense_replace")
    model.size("F_shared", "shared_intermediate_size", default=3072)
    model.size("F_dense", "dense_intermediate_size", default=12288)
    plain = FeedForward(bounds=bounds)
    route = ("scores = sigmoid", "normalize", *model.weights(2))
    mixture = replace(mixture, route=route, choice_bias="state", statics=bounds, shared=plain)
    kinds = config.sizes("moe_layer_freq", length=model.count, most=1)
    sparse = [bool(k) for k in kinds] or [True] * model.count
    types = config.words("mlp_layer_types", among=("dense", "sparse"), length=model.count)
    sparse = [t == "sparse" for t in types] or sparse
    dense = replace(plain, width="F_dense")
    blocks = [("sparse", mixture) if each else ("dense", dense) for each in sparse]
    decoder = Decoder(_NORM, tied=model.tied())
    model.text.notes += _NOTE
    return model.stack(mixers, blocks, decoder, norm=_NORM)


def _selecting(model: DecoderModel) -> Sequence[bool]:
    """For each layer, whether it selects keys; declares H_i, J and N_keys."""
    config, count = model.config, model.count
    among = ("full_attention", "minimax_m3_sparse")
    types = config.words("layer_types", among=among, length=count)
    inner = config.section("sparse_attention_config")
    source, names = config, _V5
    chosen = [t == "minimax_m3_sparse" for t in types] or [False] * count
    if inner is not None:
        source, names = inner, _RELEASE
        flags = inner.sizes("sparse_attention_freq", length=count, most=1)
        used = inner.flag("use_sparse_attention", default=True)
        if flags and not types:
            chosen = [bool(flag) and used for flag in flags]
        without: list[Json] = [int(each) for each in chosen]
        inner.fixed(sparse_score_type="max", sparse_init_block=0)
        inner.only("sparse_disable_index_value", without)
    heads, dim, size, top, local = names
    model.text.symbol("H_i", source.size(heads, default=4), heads)
    model.text.symbol("J", source.size(dim, default=128), dim)
    keys = source.size(size, default=128) * source.size(top, default=16)
    model.text.symbol("N_keys", keys, f"{size} * {top}")
    source.skip(local)
    if inner is not None:
        inner.finish()
    return chosen


@reads("MiniMax-M3 with images", "minimax_m3_vl", features="tower of CLIP without positions")
def read_minimax_m3_vl(config: Config) -> ModelText:
    """MiniMax-M3 with its tower, which a step of texts does not use."""
    vision, words = config.needed("vision_config"), words_of(config)
    text = read_minimax_m3(words)
    words.finish()
    read_idle(vision, text, width=1280, inner=5120, layers=32, patch=14)
    merged = vision.section("img_token_compression_config") or vision
    merged.fixed(image_token_compression_method="patch_merge")
    merge = merged.size("spatial_merge_size", default=2)
    config.only("merged_hidden_size", text.value("D") * merge**2)
    read_size(merged, text, "Y_v", "temporal_patch_size", default=2)
    if merged is not vision:
        merged.finish()
    vision.fixed(position_embedding_type="rope", rope_mode="3d")
    vision.skip("image_size", "rope_theta", "rope_parameters", "vision_segment_max_frames")
    vision.skip("projection_dim", "vocab_size")
    read_size(config, text, "J_v", "projector_hidden_size", default=6144)
    text.symbol("U_v", merge**2 * text.value("D"), "spatial_merge_size^2 * D")
    config.fixed(multimodal_projector_bias=True, projector_hidden_act="gelu", num_reward_heads=0)
    config.skip("img_token_compression_config", "image_grid_pinpoints", "process_image_mode")
    config.skip("vision_feature_layer", "vision_feature_select_strategy")
    idle = Idle(text)
    idle.matrix("patch", "C, Y_v, P_v, P_v, D_v")
    idle.norm("pre_norm", "D_v")
    idle.layers()
    idle.matrix("projector_in", "D_v, J_v", "J_v")
    idle.matrix("projector_out", "J_v, D", "D")
    idle.matrix("merger_in", "U_v, J_v", "J_v")
    idle.matrix("merger_out", "J_v, D", "D")
    vision.finish()
    return replace(idle.beside(), name=config.text("model_type"))


_V5 = (
    *("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks"),
    "index_local_blocks",
)
_RELEASE = (
    *("sparse_num_index_heads", "sparse_index_dim", "sparse_block_size", "sparse_topk_blocks"),
    "sparse_local_block",
)
