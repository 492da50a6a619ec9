"""Further decoders: MiniCPM, ChatGLM, Orion, Ling, Grok-2, GLM-5."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.families.deepseek import read_deepseek_v32
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, RMS, Attention, FeedForward, Rope
from stagec.importers.writing.stack import Decoder, root
from stagec.importers.writing.text import ModelText

HALF = Fraction(1, 2)


@reads("MiniCPM", "minicpm", features="scaled embeddings, residuals, logits")
def read_minicpm(config: Config) -> ModelText:
    """MiniCPM (arXiv 2404.06395): Llama with scaled embeddings, residuals and logits."""
    model = DecoderModel(config, "MiniCPM", Sizes(4096, 11008, 32, 32, 32000, 2048))
    mixer = model.biased(Attention(rope=model.rope()))
    base = config.size("dim_model_base", default=1)
    decoder = Decoder(
        tied=model.tied(True),
        embed_scale=config.ratio("scale_emb", default=1),
        logit_scale=Fraction(base, model.width) if config.has("dim_model_base") else Fraction(1),
    )
    depth = config.ratio("scale_depth", default=1)
    config.only("num_experts", 0)
    block = FeedForward(model.activation())
    return model.stack(mixer, block, decoder, scale=depth / root(model.count))


@reads("ChatGLM", "chatglm", features="partial rotation, biases by keys")
def read_chatglm(config: Config) -> ModelText:
    """ChatGLM2 and later (arXiv 2406.12793): half of each head is rotated."""
    grouped = config.flag("multi_query_attention", default=False)
    if not grouped:
        config.skip("multi_query_group_num")
    sizes = Sizes(4096, 13696, 28, 32, 65024, 2048, dim=128, grouped=grouped)
    model = DecoderModel(config, "ChatGLM", sizes)
    config.fixed(rmsnorm=True, post_layer_norm=True, interleaved_qkv=False, pre_seq_len=None)
    config.fixed(apply_residual_connection_post_layernorm=False, prefix_projection=False)
    config.skip("bias_dropout_fusion", "original_rope", "quantization_bit")
    base = 10000 * config.ratio("rope_ratio", default=1)
    if base.denominator != 1 or not 0 < base < 1 << 60:
        raise config.wrong("rope_ratio", "a number that makes a whole base of 10000 times it")
    model.text.symbol("theta", int(base), "10000 * rope_ratio")
    biased = model.flag("add_bias_linear")
    rope = model.partly(Rope(interleaved=True), model.dim // 2, "head_dim")
    mixer = Attention(qkv_bias=model.flag("add_qkv_bias") or biased, out_bias=biased, rope=rope)
    block = FeedForward(model.activation(), bias=biased)
    return model.stack(mixer, block)


@reads("Orion", "orion", features="LayerNorm")
def read_orion(config: Config) -> ModelText:
    """Orion (arXiv 2401.12246): Llama with LayerNorm."""
    model = DecoderModel(config, "Orion", Sizes(4096, 15360, 40, 40, 84608, 4096))
    mixer = model.biased(Attention(rope=model.rope()))
    block = FeedForward(model.activation())
    return model.stack(mixer, block, norm=LAYER)


@reads("Ling", "bailing_moe", features="shared experts, dense first")
def read_bailing(config: Config) -> ModelText:
    """Ling (arXiv 2503.05139): experts by a softmax, shared ones beside them."""
    model = DecoderModel(config, "Ling", Sizes(2048, 5632, 28, 16, 126464, 16384, groups=4))
    _refuse_of_ling(config)
    normalize = model.flag("norm_topk_prob", True)
    mixture = model.experts(count=64, top=6, inner=1408, normalize=normalize)
    number = config.count("num_shared_experts", default=0)
    shared = model.shared(number, "num_shared_experts") if number else None
    mixer = Attention(
        qkv_bias=model.flag("use_qkv_bias"), out_bias=model.flag("use_bias"), rope=model.rope()
    )
    dense = config.count("first_k_dense_replace", default=0)
    blocks = model.dense_first(
        dense, replace(mixture, shared=shared), FeedForward(mixture.activation)
    )
    return model.stack(mixer, blocks)


@reads("Ling 2.0", "bailing_moe_v2", features="sigmoid routing, q and k normed")
def read_bailing_v2(config: Config) -> ModelText:
    """Ling 2.0: as DeepSeek-V3's experts, over attention with normed heads, half rotated."""
    sizes = Sizes(2048, 5120, 20, 16, 157184, 32768, groups=4, base=600000)
    model = DecoderModel(config, "Ling 2.0", sizes)
    _refuse_of_ling(config)
    config.fixed(score_function="sigmoid", moe_router_enable_expert_bias=True)
    config.skip("router_dtype", "moe_router_topk_scaling_factor")
    mixture = model.sigmoid_experts(count=256, top=8, inner=512, shared=1, wide=False)
    if config.has("moe_shared_expert_intermediate_size"):
        inner = model.text.symbols["M"].value
        config.only("moe_shared_expert_intermediate_size", inner)
    biased, norm = model.flag("use_bias"), RMS if model.flag("use_qk_norm", True) else None
    mixer = Attention("G", model.flag("use_qkv_bias"), biased, norm, rope=model.rope(partial=HALF))
    dense = config.count("first_k_dense_replace", default=0)
    blocks = model.dense_first(dense, mixture, FeedForward(mixture.activation))
    return model.stack(mixer, blocks)


def _refuse_of_ling(config: Config) -> None:
    for key in ("multi_gate", "norm_head", "use_sliding_window"):
        config.only(key, False)
    config.skip("max_window_layers", "norm_softmax", "sliding_window", "rotary_dim")


@reads("Grok-2", "grok-2", "grok2", "git", features="dense block beside experts")
def read_grok2(config: Config) -> ModelText:
    """Grok-2: a dense block beside the experts, norms before and behind, bounded scores. Both are
    divided by the root of 2 before a norm, which takes that out again."""
    sizes = Sizes(8192, 32768, 64, 64, 131072, 131072, groups=8, dim=128)
    model = DecoderModel(config, "Grok-2", sizes)
    cap = config.ratio("attn_logit_softcapping", default=30)
    config.fixed(sliding_window_size=-1, global_attn_every_n=1, residual_moe=True)
    config.skip("router_logit_softcapping", "attn_temperature_len", "rope_type", "scaling_factor")
    config.skip("original_max_position_embeddings", "extrapolation_factor", "attn_factor")
    config.skip("beta_fast", "beta_slow")
    gelu = model.activation("gelu_pytorch_tanh")
    mixture = model.experts(count=8, top=2, inner=16384, normalize=False, activation=gelu)
    model.text.symbol("F_shared", model.inner, "intermediate_size")
    mixture = replace(mixture, shared=FeedForward(gelu))
    decoder = Decoder(
        tied=model.tied(),
        embed_scale=config.ratio("embedding_multiplier_scale", default=1),
        logit_scale=config.ratio("output_multiplier_scale", default=1),
        logit_cap=config.ratio("final_logit_softcapping", default=50),
    )
    mixer = Attention(rope=model.rope(), mask=f"causal, softcap = {cap}")
    return model.stack(mixer, mixture, decoder, post=RMS)


@reads("GLM-5", "glm_moe_dsa", features="latent attention with an indexer")
def read_glm5(config: Config) -> ModelText:
    """GLM-5: DeepSeek-V3.2 by its keys."""
    return read_deepseek_v32(config)
