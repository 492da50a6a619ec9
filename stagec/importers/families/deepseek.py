"""DeepSeek, and families with its latent attention and experts."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby, pairwise
from typing import Literal

from stagec.importers.common.decoder_model import DecoderModel, Named, PerLayer, Sizes
from stagec.importers.common.positions import growing_temperature, score_share
from stagec.importers.common.sizes import read_size
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, Attention, Block, FeedForward, Rope
from stagec.importers.writing.stack import Decoder, Sublayer, root
from stagec.importers.writing.text import Body, Callee, ModelText


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (arXiv 2405.04434): H heads of K + R for queries and keys, R of them
    rotated, and of W for values; ranks Q of the queries' latent, if they have one, and C of the
    keys' and values'. Scores are divided by the square root of `share` of a head. Without a `rope`
    nothing is rotated. `temperature` are the static parameters of that of queries. Where it is
    `indexed`, H_i heads of J select N_keys keys for each query (arXiv 2512.02556), or keys are
    given. A sigmoid of the input is a gate of each of `gated`."""

    low_rank: bool = True
    rope: Rope | None = field(default_factory=Rope)
    share: Fraction = Fraction(1)
    temperature: str = ""
    indexed: Literal["", "yes", "given"] = ""
    gated: Literal["", "heads", "elements"] = ""

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        symbols = [
            "D H C K R W theta",
            "Q" * self.low_rank,
            "H_i J N_keys" * (self.indexed == "yes"),
        ]
        return text.use("mla", " ".join(symbols), *self._options())

    def _options(self) -> Iterator[str]:
        yield from [] if self.low_rank else ["query_latent = no"]
        if self.rope != Rope():
            yield f"rope = ({self.rope.statics()})" if self.rope else "rope = no"
        yield from [f"temperature = ({self.temperature})"] if self.temperature else []
        if self.share != 1:
            part = f"{self.share.numerator}*(K + R)/{self.share.denominator}"
            yield f"mask = (causal, rsqrt = {part})"
        yield from [f"gated = {self.gated}"] if self.gated else []
        yield from {"yes": ["indexed"], "given": ["indexed = given"]}.get(self.indexed, [])


@reads("DeepSeekMoE", "deepseek", features="dense first, shared experts")
def read_deepseek(config: Config) -> ModelText:
    """DeepSeekMoE (arXiv 2401.06066): shared and many small experts, dense layers first."""
    model = DecoderModel(config, Sizes(4096, 11008, 30, 32, 102400, 2048))
    mixer = model.biased(Attention(rope=model.rope()))
    return model.stack(mixer, _softmax_experts(model))


def _softmax_experts(model: DecoderModel) -> PerLayer:
    """Dense layers, then experts by a softmax; without experts if the configuration has none."""
    config = model.config
    config.fixed(scoring_func="softmax", ep_size=1)
    plain = FeedForward(model.activation())
    dense = config.count("first_k_dense_replace", default=0)
    every = config.size("moe_layer_freq", default=1)
    normalize = model.flag("norm_topk_prob")
    if not config.has("n_routed_experts"):
        return plain
    mixture = model.experts(count=1, top=1, inner=1407, normalize=normalize)
    method = config.word(
        "topk_method", among=("greedy", "gready", "group_limited_greedy"), default="greedy"
    )
    groups = model.groups()
    route = [*mixture.route, "wide_logits", *([] if normalize else model.weights())]
    route += groups if method == "group_limited_greedy" else []
    config.skip("routed_scaling_factor")
    number = config.count("n_shared_experts", default=0)
    shared = model.shared(number, "n_shared_experts") if number else None
    mixture = replace(mixture, route=tuple(route), shared=shared)
    return [
        ("sparse", mixture) if i >= dense and i % every == 0 else ("dense", plain)
        for i in range(model.count)
    ]


@reads("DeepSeek-V2", "deepseek_v2", features="latent attention, groups")
def read_deepseek_v2(config: Config) -> ModelText:
    """DeepSeek-V2 (arXiv 2405.04434): latent attention."""
    model, mixer = latent_of(config, Sizes(4096, 11008, 32, 32, 102400, 2048))
    return model.stack(mixer, _softmax_experts(model))


@reads("DeepSeek-V3", "deepseek_v3", "kimi_k2", features="latent attention, sigmoids")
def read_deepseek_v3(config: Config) -> ModelText:
    """DeepSeek-V3 (arXiv 2412.19437) and Kimi K2: latent attention, sigmoid routing with a bias."""
    model, mixer = latent_of(config, Sizes(7168, 18432, 61, 128, 129280, 4096))
    return sigmoid_stack(model, mixer)


def sigmoid_stack(
    model: DecoderModel,
    mixer: Block,
    *,
    count: int = 256,
    top: int = 8,
    inner: int = 2048,
    dense: int = 3,
    scale: Fraction = Fraction("2.5"),
    normed: bool = False,
) -> ModelText:
    """Dense layers first, then experts chosen by sigmoids, whose sum may be `normed`; the other
    arguments are defaults of missing keys."""
    config = model.config
    mixture = model.sigmoid_experts(count=count, top=top, inner=inner, shared=1, scale=scale)
    mixture = replace(mixture, out_norm=normed)
    plain = FeedForward(model.activation())
    dense = config.count("first_k_dense_replace", default=dense)
    config.only("moe_layer_freq", 1)
    blocks = model.dense_first(dense, mixture, plain)
    return model.stack(mixer, blocks)


@reads("Sarvam with latents", "sarvam_mla", features="DeepSeek-V3 with full queries")
def read_sarvam_mla(config: Config) -> ModelText:
    """Sarvam 105B: DeepSeek-V3 without a latent of queries."""
    config.skip("q_head_dim")
    sizes = Sizes(4096, 16384, 32, 64, 262144, 4096)
    model, mixer = latent_of(config, sizes, LatentSizes(queries=0))
    return sigmoid_stack(model, mixer, count=128, dense=1)


@reads("A.X K1", "axk1", features="DeepSeek-V3, a norm behind the experts")
def read_axk1(config: Config) -> ModelText:
    """A.X K1: DeepSeek-V3 with a norm after the experts."""
    model, mixer = latent_of(config, Sizes(7168, 18432, 61, 64, 163840, 131072))
    return sigmoid_stack(model, mixer, count=192, dense=1, normed=True)


@reads("Mistral 4", "mistral4", features="latent attention, queries grow, a shared expert")
def read_mistral4(config: Config) -> ModelText:
    """Mistral Small 4: latent attention whose queries grow with the position, experts by a softmax
    beside a shared one."""
    sizes = Sizes(4096, 12288, 36, 32, 131072, 1 << 20)
    latent = LatentSizes(kept=64, keys=256, queries=1024)
    model, mixer = latent_of(config, sizes, latent)
    mixer = replace(mixer, temperature=growing_temperature(config))
    normalize = model.flag("norm_topk_prob", True)
    mixture = model.experts(count=128, top=4, inner=2048, normalize=normalize)
    config.fixed(n_group=1, topk_group=1)
    number = config.count("n_shared_experts", default=1)
    shared = model.shared(number, "n_shared_experts") if number else None
    mixture = replace(mixture, route=(*mixture.route, *model.weights()), shared=shared)
    dense = config.count("first_k_dense_replace", default=0)
    blocks = model.dense_first(dense, mixture, FeedForward(model.activation()))
    return model.stack(mixer, blocks)


@reads("DeepSeek-V3.2", "deepseek_v32", features="an indexer selects 2048 keys")
def read_deepseek_v32(config: Config) -> ModelText:
    """DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 with attention to selected keys."""
    model, latent = _indexed(config, Sizes(7168, 18432, 61, 128, 129280, 4096), LatentSizes(), 64)
    config.words("indexer_types", among=("full",), length=model.count)
    return sigmoid_stack(model, latent)


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The defaults of missing keys of latent attention: the unrotated and rotated elements of a
    head and those of its values (0: heads share the width), and the ranks of keys and queries (0:
    queries have no latent)."""

    kept: int = 128
    turned: int = 64
    values: int = 128
    keys: int = 512
    queries: int = 1536


def latent_of(
    config: Config, sizes: Sizes, own: LatentSizes | None = None
) -> tuple[DecoderModel, Latent]:
    """The model with the sizes of latent attention."""
    own = own or LatentSizes()
    config.skip("num_key_value_heads", "head_dim", "qk_head_dim", "rope_interleave")
    config.only("attention_bias", False)
    sizes = replace(sizes, dim=own.kept, grouped=False)
    model = DecoderModel(config, sizes, dim_keys=["qk_nope_head_dim"])
    if read_size(config, model.text, "R", "qk_rope_head_dim", default=own.turned) % 2:
        raise config.wrong("qk_rope_head_dim", "an even number")
    read_size(
        config, model.text, "W", "v_head_dim", default=own.values or model.width // model.heads
    )
    read_size(config, model.text, "C", "kv_lora_rank", default=own.keys)
    unstated = bool(own.queries) and not config.names("q_lora_rank")
    low_rank = config.has("q_lora_rank") or unstated
    if low_rank:
        read_size(config, model.text, "Q", "q_lora_rank", default=own.queries)
    return model, Latent(low_rank, model.rope(), score_share(config))


def _indexed(
    config: Config, sizes: Sizes, own: LatentSizes, heads: int
) -> tuple[DecoderModel, Latent]:
    """The model with the sizes of latent attention and of its indexer, which has so many `heads`
    by default."""
    model, latent = latent_of(config, sizes, own)
    if "Q" not in model.text.symbols:
        raise config.refuse("q_lora_rank", "is null, but the indexer needs a latent of the queries")
    read_size(config, model.text, "H_i", "index_n_heads", default=heads)
    read_size(config, model.text, "J", "index_head_dim", default=128)
    read_size(config, model.text, "N_keys", "index_topk", default=2048)
    config.skip("indexer_rope_interleave")
    names = ("indexed_attention", "deepseek_sparse_attention")
    config.words("layer_types", among=names, length=model.count)
    return model, replace(latent, indexed="yes")


@reads("MiniCPM 3", "minicpm3", features="latent attention, scaled residuals")
def read_minicpm3(config: Config) -> ModelText:
    """MiniCPM 3 (arXiv 2404.06395): latent attention; scaled embeddings, residuals and logits."""
    sizes, latent = Sizes(2560, 6400, 62, 40, 73448, 32768), LatentSizes(64, 32, 0, 256, 768)
    model, mixer = latent_of(config, sizes, latent)
    base = config.size("dim_model_base", default=256)
    decoder = Decoder(
        tied=model.tied(True),
        embed_scale=config.ratio("scale_emb", default=12),
        logit_scale=Fraction(base, model.width),
    )
    depth = config.ratio("scale_depth", default=Fraction("1.4"))
    block = FeedForward(model.activation(), bias=model.flag("mlp_bias"))
    return model.stack(mixer, block, decoder, scale=depth / root(model.count))


@reads("Youtu", "youtu", features="latent attention, dense")
def read_youtu(config: Config) -> ModelText:
    """Youtu-LLM: latent attention, dense blocks."""
    model, mixer = latent_of(config, Sizes(2048, 6144, 32, 16, 128256, 131072))
    block = FeedForward(model.activation())
    return model.stack(mixer, block, Decoder(tied=model.tied(True)))


@reads("GLM-4.7-Flash", "glm4_moe_lite", features="latent attention")
def read_glm4_moe_lite(config: Config) -> ModelText:
    """GLM-4.7-Flash: GLM-4.5's experts over latent attention."""
    sizes = Sizes(2048, 10240, 47, 20, 154880, 202752)
    model, mixer = latent_of(config, sizes, LatentSizes(192, 64, 256, 512, 768))
    scale = Fraction("1.8")
    return sigmoid_stack(model, mixer, count=64, top=4, inner=1536, dense=1, scale=scale)


@reads("GLM-5", "glm_moe_dsa", features="latent attention with an indexer")
def read_glm5(config: Config) -> ModelText:
    """GLM-5: DeepSeek-V3.2 by its keys. From GLM-5.2 on, most layers take the keys that an earlier
    one selected: these are one kind of layers together."""
    sizes = Sizes(6144, 12288, 78, 64, 154880, 202752)
    model, latent = _indexed(config, sizes, LatentSizes(192, 64, 256, 512, 2048), 32)
    types = _indexers(model)
    config.skip("index_share_for_mtp_iteration", "moe_router_dtype")
    if "shared" not in types:
        return sigmoid_stack(model, latent)
    mixture = model.sigmoid_experts(count=256, top=8, inner=2048, shared=1, scale=Fraction("2.5"))
    dense = config.count("first_k_dense_replace", default=3)
    config.only("moe_layer_freq", 1)
    blocks = model.dense_first(dense, mixture, FeedForward(model.activation()))
    starts = [i for i, each in enumerate(types) if each == "full"]
    kinds: dict[str, _Selecting] = {}
    order: list[str] = []
    for start, end in pairwise([*starts, model.count]):
        names = [name for name, _ in blocks[start:end]]
        runs = [(name, len([*run])) for name, run in groupby(names)]
        order.append("_".join(f"{name}{n if n > 1 else ''}" for name, n in runs))
        kinds[order[-1]] = _Selecting(model.text, latent, tuple(blocks[start:end]))
    return Decoder(tied=model.tied()).write(model.text, kinds, order)


def _indexers(model: DecoderModel) -> tuple[str, ...]:
    """For each layer, whether it has an indexer (full), by a list, a word of letters F and S, or a
    period and the layer at which it begins."""
    config, names = model.config, {"F": "full", "S": "shared"}
    types = config.words("indexer_types", among=names.values(), length=model.count)
    word = config.text("index_topk_pattern", default="")
    every = config.size("index_topk_freq", default=1)
    begin = config.count("index_skip_topk_offset", default=2) - 1
    if word and not types:
        if len(word) != model.count or set(word) - set(names):
            raise config.wrong("index_topk_pattern", f"a word of {model.count} letters F and S")
        types = tuple(names[letter] for letter in word)
    default = ("full" if max(i - begin, 0) % every == 0 else "shared" for i in range(model.count))
    types = types or tuple(default)
    if types[0] != "full":
        raise config.refuse("indexer_types", "has no full indexer in the first layer")
    return types


@dataclass(frozen=True, slots=True)
class _Selecting:
    """A layer whose indexer selects keys, and layers that take the same ones, each with one of
    these feed-forward blocks."""

    text: ModelText
    latent: Latent
    blocks: tuple[Named, ...]

    def write(self, body: Body, x: str) -> str:
        """Append the layers on `x`, and return the name of the result."""
        for number, (name, block) in enumerate(self.blocks, 1):
            if number == 1:
                body.do(f"%h1, %keys = stg.call @{self._layer(name, block, 'yes')}({x})")
            else:
                layer = self._layer(name, block, "given")
                body.do(f"%h{number} = stg.call @{layer}(%h{number - 1}, %keys)")
        return f"%h{len(self.blocks)}"

    def _layer(self, name: str, block: Block, indexed: Literal["yes", "given"]) -> Callee:
        """The function of a layer, which returns the keys that it selects."""
        attention = replace(self.latent, indexed=indexed).write(self.text)
        body, selects = Body(), indexed == "yes"
        n1 = RMS.write(body, "n1", "%h", "attn_norm")
        results, given = ("%a, %keys", n1) if selects else ("%a", f"{n1}, %keys")
        body.do(f"{results} = stg.call @{attention}({given})")
        r1 = body.let("r1", "stg.add(%h, %a)")
        added = Sublayer(block.write(self.text), "ffn").write(body, r1, 2)
        r2 = body.let("r2", f"stg.add({r1}, {added})")
        body.do(f"stg.return({r2}, %keys)" if selects else f"stg.return({r2})")
        kind = f"{name}_selecting" if selects else f"{name}_sharing"
        return self.text.function(kind, "%h" if selects else "%h, %keys", body)
