"""DeepSeek and what uses its latent attention and its experts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from stagec.importers.common.kin import Kin, Named, Sizes
from stagec.importers.common.positions import grown_queries, score_share
from stagec.importers.common.sizes import read_size
from stagec.importers.family import ModelFamily
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, Attention, Block, FeedForward, Rope, joined
from stagec.importers.writing.stack import Decoder
from stagec.importers.writing.text import Body, ModelText


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (arXiv 2405.04434): H heads of K + R for queries and keys, R of them
    rotated, and of W for values; ranks Q of the queries' latent, if they have one, and C of the
    keys' and values'. Scores are divided by the square root of `share` of a head. Without a `rope`
    nothing is rotated. Queries go through `queries` at last, an operation on `{}`."""

    low_rank: bool = True
    rope: Rope | None = field(default_factory=Rope)
    share: Fraction = Fraction(1)
    queries: str = ""

    def write(self, text: ModelText, kind: str = "") -> str:
        """Add the block; its name."""
        if self == Latent():
            return text.use("mla", "D H C K R W theta Q")
        body = Body()
        self.project(body)
        self.attend(body)
        return text.function(joined(kind, "mla"), "%x", body)

    def project(self, body: Body) -> None:
        """Append queries, keys and values; `%qc` is the queries' latent."""
        rotate = [replace(self.rope, part="R", last=True).step()] if self.rope else []
        steps = [*rotate, *([self.queries] if self.queries else [])]
        q_name = "qr" if len(steps) > 1 else "q0" if steps else "q"
        if self.low_rank:
            qc0 = body.let("qc0", f'stg.einsum["bsd,dq->bsq"](%x, {body.param("wq_a", "D, Q")})')
            qc = body.let("qc", RMS.step(body, "q_norm", "Q").format(qc0))
            wq = body.param("wq_b", "Q, H, K + R")
            q0 = body.let(q_name, f'stg.einsum["bsq,qhk->bshk"]({qc}, {wq})')
        else:
            wq = body.param("wq", "D, H, K + R")
            q0 = body.let(q_name, f'stg.einsum["bsd,dhk->bshk"](%x, {wq})')
        body.steps("q", q0, steps)
        c0 = body.let("c0", f'stg.einsum["bsd,dc->bsc"](%x, {body.param("wkv_a", "D, C")})')
        c = body.let("c", f"stg.rmsnorm[cached]({c0}, {body.param('kv_norm', 'C')})")
        flag = "" if self.rope else ", cached"
        step = f'stg.einsum["bsd,dr->bsr"{flag}](%x, {body.param("wk_rope", "D, R")})'
        kr1 = body.let("kr0", step)
        if self.rope:
            kr1 = body.let("kr1", replace(self.rope, cached=True).step().format(kr1))
        kr = body.let("kr", f'stg.broadcast["bsr->bshr", sizes = H]({kr1})')
        kn = body.let("kn", f'stg.einsum["bsc,chk->bshk"]({c}, {body.param("wk_b", "C, H, K")})')
        body.let("k", f"stg.concat({kn}, {kr})")
        body.let("v", f'stg.einsum["bsc,chw->bshw"]({c}, {body.param("wv_b", "C, H, W")})')

    def attend(self, body: Body, mask: str = "causal", keys: str = "") -> None:
        """Append attention and the product behind it."""
        if self.share != 1:
            mask += f", rsqrt = {self.share.numerator}*(K + R)/{self.share.denominator}"
        a = body.let("a", f"stg.attention[{mask}](%q, %k, %v{keys})")
        o = body.let("o", f'stg.einsum["bshw,hwd->bsd"]({a}, {body.param("wo", "H, W, D")})')
        body.do(f"stg.return({o})")


@dataclass(frozen=True, slots=True)
class SparseLatent:
    """Latent attention to the keys that an indexer selects (arXiv 2512.02556): I heads of J for
    queries and one for keys, the first R elements rotated; each query sees N keys.

    The language model's loss does not reach the indexer, which has a loss of its own: its
    parameters are frozen. What multiplies all of the indexer's scores alike is left out.
    """

    latent: Latent

    def write(self, text: ModelText, kind: str = "") -> str:
        """Add the block; its name."""
        body = Body()
        self.latent.project(body)
        body.do(f"%keys = stg.call @{self._indexer(text)}(%x, %qc)")
        self.latent.attend(body, "causal, selected", ", %keys")
        return text.function(joined(kind, "sparse_mla"), "%x", body)

    def _indexer(self, text: ModelText) -> str:
        body = Body()
        for name, dims in (("wq", "Q, I, J"), ("wk", "D, J"), ("k_norm_w", "J"), ("k_norm_b", "J")):
            body.param(name, dims, role="frozen")
        body.param("weights", "D, I", role="frozen")
        rotate = replace(self.latent.rope or Rope(), part="R").step()
        body.do(
            '%q0 = stg.einsum["bsq,qij->bsij"](%qc, %wq)',
            f"%q = {rotate.format('%q0')}",
            '%k0 = stg.einsum["bsd,dj->bsj"](%x, %wk)',
            "%k1 = stg.layernorm(%k0, %k_norm_w, %k_norm_b)",
            f"%k = {rotate.format('%k1')}",
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
    kin, mixer = latent_of(config, "DeepSeek-V2", Sizes(4096, 11008, 32, 32, 102400, 2048))
    return kin.stack(kin.all(mixer), _softmax_experts(kin), Decoder(tied=kin.tied()))


def read_deepseek_v3(config: Config) -> ModelText:
    """DeepSeek-V3 (arXiv 2412.19437) and Kimi K2: latent attention, sigmoid routing with a bias."""
    kin, mixer = latent_of(config, "DeepSeek-V3", Sizes(7168, 18432, 61, 128, 129280, 4096))
    return sigmoid_stack(kin, mixer)


def sigmoid_stack(
    kin: Kin,
    mixer: Block,
    *,
    count: int = 256,
    top: int = 8,
    inner: int = 2048,
    dense: int = 3,
    scale: Fraction = Fraction("2.5"),
) -> ModelText:
    """Dense layers first, then experts chosen by sigmoids; the numbers are those of keys left
    out."""
    config = kin.config
    mixture = kin.sigmoid_experts(count=count, top=top, inner=inner, shared=1, scale=scale)
    plain = FeedForward(kin.activation())
    dense = config.count("first_k_dense_replace", default=dense)
    config.only("moe_layer_freq", 1)
    blocks = kin.dense_first(dense, mixture, plain)
    return kin.stack(kin.all(mixer), blocks, Decoder(tied=kin.tied()))


def read_mistral4(config: Config) -> ModelText:
    """Mistral Small 4: latent attention whose queries grow with the position, experts by a softmax
    beside a shared one."""
    kin, mixer = latent_of(
        config,
        "Mistral 4",
        Sizes(4096, 12288, 36, 32, 131072, 1 << 20),
        LatentSizes(kept=64, keys=256, queries=1024),
    )
    mixer = replace(mixer, queries=grown_queries(config))
    normalize = kin.flag("norm_topk_prob", True)
    mixture = kin.experts(count=128, top=4, inner=2048, normalize=normalize)
    config.only("n_group", 1)
    config.only("topk_group", 1)
    number = config.count("n_shared_experts", default=1)
    shared = kin.shared(number, "n_shared_experts") if number else None
    mixture = replace(mixture, route=(*mixture.route, *kin.weights()), shared=shared)
    dense = config.count("first_k_dense_replace", default=0)
    blocks = kin.dense_first(dense, mixture, FeedForward(kin.activation()))
    return kin.stack(kin.all(mixer), blocks, Decoder(tied=kin.tied()))


def read_deepseek_v32(config: Config) -> ModelText:
    """DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3, whose attention sees selected keys only."""
    kin, latent = latent_of(config, "DeepSeek-V3.2", Sizes(7168, 18432, 61, 128, 129280, 4096))
    if "Q" not in kin.text.symbols:
        raise config.refuse("q_lora_rank", "is null, but the indexer needs the queries' latent")
    read_size(config, kin.text, "I", "index_n_heads", default=64)
    read_size(config, kin.text, "J", "index_head_dim", default=128)
    read_size(config, kin.text, "N_keys", "index_topk", default=2048)
    config.skip("indexer_rope_interleave")
    config.words("layer_types", among=("indexed_attention",), length=kin.count)
    config.words("indexer_types", among=("full",), length=kin.count)
    return sigmoid_stack(kin, SparseLatent(latent))


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The values of keys of latent attention that a configuration leaves out: elements of a head
    that are not rotated, and those that are, of its values (0: heads share the width), and the
    ranks of keys and of queries."""

    kept: int = 128
    turned: int = 64
    values: int = 128
    keys: int = 512
    queries: int = 1536


def latent_of(
    config: Config, title: str, sizes: Sizes, own: LatentSizes | None = None
) -> tuple[Kin, Latent]:
    """The model with the sizes of latent attention."""
    own = own or LatentSizes()
    config.skip("num_key_value_heads", "head_dim", "qk_head_dim", "rope_interleave")
    config.only("attention_bias", False)
    kin = Kin(
        config,
        title,
        replace(sizes, dim=own.kept),
        read_groups=False,
        dim_keys=["qk_nope_head_dim"],
    )
    if read_size(config, kin.text, "R", "qk_rope_head_dim", default=own.turned) % 2:
        raise config.wrong("qk_rope_head_dim", "an even number")
    read_size(config, kin.text, "W", "v_head_dim", default=own.values or kin.width // kin.heads)
    read_size(config, kin.text, "C", "kv_lora_rank", default=own.keys)
    low_rank = config.has("q_lora_rank") or not config.names("q_lora_rank")
    if low_rank:
        read_size(config, kin.text, "Q", "q_lora_rank", default=own.queries)
    return kin, Latent(low_rank, kin.rope(), score_share(config))


FAMILIES = (
    ModelFamily("DeepSeekMoE", ("deepseek",), read_deepseek, "dense first, shared experts"),
    ModelFamily("DeepSeek-V2", ("deepseek_v2",), read_deepseek_v2, "latent attention, groups"),
    ModelFamily(
        "DeepSeek-V3", ("deepseek_v3", "kimi_k2"), read_deepseek_v3, "latent attention, sigmoids"
    ),
    ModelFamily(
        "Mistral 4", ("mistral4",), read_mistral4, "latent attention, queries grow, a shared expert"
    ),
    ModelFamily(
        "DeepSeek-V3.2", ("deepseek_v32",), read_deepseek_v32, "an indexer selects 2048 keys"
    ),
)
