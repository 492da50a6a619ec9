"""DeepSeek and what uses its latent attention and its experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagec.importers.blocks import Attention, Block, FeedForward, joined
from stagec.importers.common import read_size
from stagec.importers.config import Config
from stagec.importers.family import ModelFamily
from stagec.importers.kin import Kin, Named, Sizes
from stagec.importers.stack import Decoder
from stagec.importers.text import Body, ModelText


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (arXiv 2405.04434): H heads of K + R for queries and keys, R of them
    rotated, and of W for values; ranks Q of the queries' latent, if they have one, and C of the
    keys' and values'."""

    low_rank: bool = True

    def write(self, text: ModelText, kind: str = "") -> str:
        """Add the block; its name."""
        symbols = "D H C K R W theta"
        if self.low_rank:
            return text.use("mla", f"{symbols} Q")
        body = Body()
        q0 = body.let("q0", f'stg.einsum["bsd,dhk->bshk"](%x, {body.param("wq", "D, H, K + R")})')
        q = body.let("q", f"stg.rope[base = theta, last = R]({q0})")
        c0 = body.let("c0", f'stg.einsum["bsd,dc->bsc"](%x, {body.param("wkv_a", "D, C")})')
        c = body.let("c", f"stg.rmsnorm[cached]({c0}, {body.param('kv_norm', 'C')})")
        kr0 = body.let("kr0", f'stg.einsum["bsd,dr->bsr"](%x, {body.param("wk_rope", "D, R")})')
        kr1 = body.let("kr1", f"stg.rope[base = theta, cached]({kr0})")
        kr = body.let("kr", f'stg.broadcast["bsr->bshr", sizes = H]({kr1})')
        kn = body.let("kn", f'stg.einsum["bsc,chk->bshk"]({c}, {body.param("wk_b", "C, H, K")})')
        k = body.let("k", f"stg.concat({kn}, {kr})")
        v = body.let("v", f'stg.einsum["bsc,chw->bshw"]({c}, {body.param("wv_b", "C, H, W")})')
        a = body.let("a", f"stg.attention[causal]({q}, {k}, {v})")
        o = body.let("o", f'stg.einsum["bshw,hwd->bsd"]({a}, {body.param("wo", "H, W, D")})')
        body.do(f"stg.return({o})")
        return text.function(joined(kind, "mla"), "%x", body)


@dataclass(frozen=True, slots=True)
class SparseLatent:
    """Latent attention to the keys that an indexer selects (arXiv 2512.02556): I heads of J for
    queries and one for keys, the first R elements rotated; each query sees N keys.

    The language model's loss does not reach the indexer, which has a loss of its own: its
    parameters are frozen. What multiplies all scores alike is left out.
    """

    def write(self, text: ModelText, kind: str = "") -> str:
        """Add the block; its name."""
        body = Body()
        for name, dims in (("wq_a", "D, Q"), ("q_norm", "Q"), ("wq_b", "Q, H, K + R")):
            body.param(name, dims)
        for name, dims in (("wkv_a", "D, C"), ("kv_norm", "C"), ("wk_rope", "D, R")):
            body.param(name, dims)
        for name, dims in (("wk_b", "C, H, K"), ("wv_b", "C, H, W"), ("wo", "H, W, D")):
            body.param(name, dims)
        body.do(
            '%qc0 = stg.einsum["bsd,dq->bsq"](%x, %wq_a)',
            "%qc = stg.rmsnorm(%qc0, %q_norm)",
            '%q0 = stg.einsum["bsq,qhk->bshk"](%qc, %wq_b)',
            "%q = stg.rope[base = theta, last = R](%q0)",
            '%c0 = stg.einsum["bsd,dc->bsc"](%x, %wkv_a)',
            "%c = stg.rmsnorm[cached](%c0, %kv_norm)",
            '%kr0 = stg.einsum["bsd,dr->bsr"](%x, %wk_rope)',
            "%kr1 = stg.rope[base = theta, cached](%kr0)",
            '%kr = stg.broadcast["bsr->bshr", sizes = H](%kr1)',
            '%kn = stg.einsum["bsc,chk->bshk"](%c, %wk_b)',
            "%k = stg.concat(%kn, %kr)",
            '%v = stg.einsum["bsc,chw->bshw"](%c, %wv_b)',
            f"%keys = stg.call @{self._indexer(text)}(%x, %qc)",
            "%a = stg.attention[causal, selected](%q, %k, %v, %keys)",
            '%o = stg.einsum["bshw,hwd->bsd"](%a, %wo)',
            "stg.return(%o)",
        )
        return text.function(joined(kind, "sparse_mla"), "%x", body)

    def _indexer(self, text: ModelText) -> str:
        body = Body()
        for name, dims in (("wq", "Q, I, J"), ("wk", "D, J"), ("k_norm_w", "J"), ("k_norm_b", "J")):
            body.param(name, dims, role="frozen")
        body.param("weights", "D, I", role="frozen")
        body.do(
            '%q0 = stg.einsum["bsq,qij->bsij"](%qc, %wq)',
            "%q = stg.rope[base = theta, first = R](%q0)",
            '%k0 = stg.einsum["bsd,dj->bsj"](%x, %wk)',
            "%k1 = stg.layernorm(%k0, %k_norm_w, %k_norm_b)",
            "%k = stg.rope[base = theta, first = R](%k1)",
            '%w = stg.einsum["bsd,di->bsi"](%x, %weights)',
            "%scores = stg.index_scores[causal](%q, %k, %w)",
            "%top, %keys = stg.topk[k = min(N_keys, S)](%scores)",
            "stg.return(%keys)",
        )
        return text.function("indexer", "%x, %qc", body)


def read_deepseek(config: Config) -> ModelText:
    """DeepSeekMoE (arXiv 2401.06066): shared experts beside many small ones, dense layers first."""
    kin = Kin(config, "DeepSeekMoE", Sizes(4096, 11008, 30, 32, 102400, 2048))
    biased = kin.flag("attention_bias")
    mixer = Attention(qkv_bias=biased, out_bias=biased, rope=kin.rope())
    return kin.stack(kin.all(mixer), _softmax_experts(kin), Decoder(tied=kin.tied()))


def _softmax_experts(kin: Kin) -> list[Named]:
    """Dense layers, then experts by a softmax; without any if the configuration names none."""
    config = kin.config
    config.only("scoring_func", "softmax")
    config.only("ep_size", 1)
    plain = FeedForward(kin.activation())
    dense = config.count("first_k_dense_replace", default=0)
    every = config.size("moe_layer_freq", default=1)
    normalize = kin.flag("norm_topk_prob")
    if not config.has("n_routed_experts"):
        return kin.all(plain)
    mixture = kin.experts(count=1, top=1, inner=1407, normalize=normalize)
    method = config.word(
        "topk_method", among=("greedy", "gready", "group_limited_greedy"), default="greedy"
    )
    groups = kin.groups()
    route = [*mixture.route, *([] if normalize else kin.weights())]
    route += groups if method == "group_limited_greedy" else []
    config.skip("routed_scaling_factor")
    number = config.count("n_shared_experts", default=0)
    shared = kin.shared(number, "n_shared_experts") if number else None
    mixture = replace(mixture, route=tuple(route), shared=shared)
    return [
        ("sparse", mixture) if i >= dense and i % every == 0 else ("dense", plain)
        for i in range(kin.count)
    ]


def read_deepseek_v2(config: Config) -> ModelText:
    """DeepSeek-V2 (arXiv 2405.04434): latent attention."""
    kin, mixer = _latent(config, "DeepSeek-V2", Sizes(4096, 11008, 32, 32, 102400, 2048))
    return kin.stack(kin.all(mixer), _softmax_experts(kin), Decoder(tied=kin.tied()))


def read_deepseek_v3(config: Config) -> ModelText:
    """DeepSeek-V3 (arXiv 2412.19437) and Kimi K2: latent attention, sigmoid routing with a bias."""
    kin, mixer = _latent(config, "DeepSeek-V3", Sizes(7168, 18432, 61, 128, 129280, 4096))
    return _sigmoid_stack(kin, mixer)


def _sigmoid_stack(kin: Kin, mixer: Block) -> ModelText:
    """Dense layers first, then experts chosen by sigmoids."""
    config = kin.config
    mixture = kin.sigmoid_experts(count=256, top=8, inner=2048, shared=1)
    plain = FeedForward(kin.activation())
    dense = config.count("first_k_dense_replace", default=3)
    config.only("moe_layer_freq", 1)
    blocks = kin.dense_first(dense, mixture, plain)
    return kin.stack(kin.all(mixer), blocks, Decoder(tied=kin.tied()))


def read_deepseek_v32(config: Config) -> ModelText:
    """DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3, whose attention sees selected keys only."""
    kin, _ = _latent(config, "DeepSeek-V3.2", Sizes(7168, 18432, 61, 128, 129280, 4096))
    if "Q" not in kin.text.symbols:
        raise config.refuse("q_lora_rank", "is null, but the indexer needs the queries' latent")
    read_size(config, kin.text, "I", "index_n_heads", default=64)
    read_size(config, kin.text, "J", "index_head_dim", default=128)
    read_size(config, kin.text, "N_keys", "index_topk", default=2048)
    config.skip("indexer_rope_interleave")
    return _sigmoid_stack(kin, SparseLatent())


def _latent(config: Config, title: str, sizes: Sizes) -> tuple[Kin, Latent]:
    """The model with the sizes of latent attention."""
    config.skip("num_key_value_heads", "head_dim", "qk_head_dim", "rope_interleave")
    config.only("attention_bias", False)
    kin = Kin(
        config, title, replace(sizes, dim=128), read_groups=False, dim_keys=["qk_nope_head_dim"]
    )
    read_size(config, kin.text, "R", "qk_rope_head_dim", default=64)
    read_size(config, kin.text, "W", "v_head_dim", default=128)
    read_size(config, kin.text, "C", "kv_lora_rank", default=512)
    low_rank = config.has("q_lora_rank") or not config.names("q_lora_rank")
    if low_rank:
        read_size(config, kin.text, "Q", "q_lora_rank", default=1536)
    kin.rope()
    return kin, Latent(low_rank)


FAMILIES = (
    ModelFamily("DeepSeekMoE", ("deepseek",), read_deepseek, "dense first, shared experts"),
    ModelFamily("DeepSeek-V2", ("deepseek_v2",), read_deepseek_v2, "latent attention, groups"),
    ModelFamily(
        "DeepSeek-V3", ("deepseek_v3", "kimi_k2"), read_deepseek_v3, "latent attention, sigmoids"
    ),
    ModelFamily(
        "DeepSeek-V3.2", ("deepseek_v32",), read_deepseek_v32, "an indexer selects 2048 keys"
    ),
)
