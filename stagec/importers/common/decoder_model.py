"""Decoders of attention and feed-forward blocks, such as Llama, which share most of their keys.

The reader of a family creates a `DecoderModel`, reads sizes and keys by it, and passes one mixer
and one feed-forward block for each layer to `stack`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from stagec.importers.common.positions import declare_part, read_rope
from stagec.importers.common.sizes import begin, expect_head, read_head, read_size
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import (
    ACTIVATIONS,
    RMS,
    Attention,
    Block,
    Experts,
    FeedForward,
    Norm,
    Rope,
)
from stagec.importers.writing.stack import ONE, Decoder, Layer, Positions, Sublayer
from stagec.importers.writing.text import ModelText

_WIDTH = ("hidden_size", "n_embd", "d_model", "n_embed")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_GROUPS = (
    *("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    *("kv_n_heads", "num_attention_groups"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP = ("num_experts_per_tok", "moe_topk", "num_experts_per_token")
_INNER = ("moe_intermediate_size",)
_QK_NORMS = ("use_qk_norm", "qk_norm", "qk_layernorm")
#: The name of a kind of layers (empty if all layers are of one kind), and its block.
Named = tuple[str, Block]
#: The same block in every layer, or the block of each.
PerLayer = Block | Sequence[Named]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The defaults of missing keys, from the configuration class of the family; a negative `inner`
    is a multiple of the width. A class without a key for grouped heads is not `grouped`."""

    width: int
    inner: int
    layers: int
    heads: int
    vocab: int
    length: int
    groups: int | None = None
    dim: int | None = None
    base: int = 10000
    grouped: bool = True


class DecoderModel:
    """A model under construction: its `text`, the number of layers `count`, and the keys. With
    `masked` its head is that of a masked language model."""

    def __init__(
        self,
        config: Config,
        sizes: Sizes,
        *,
        dim_keys: Sequence[str] = ("head_dim", "kv_channels"),
        masked: bool = False,
    ) -> None:
        self.config = config
        self.text, self.longest = begin(config, sizes.length)
        expect_head(config, "MaskedLM") if masked else read_head(config, self.text)
        self.count = config.layers(
            "num_hidden_layers", "n_layer", "num_layers", "n_layers", default=sizes.layers
        )
        self._read_heads(sizes, dim_keys)
        self.width = self.text.value("D")
        self.dim = self.text.value("K")
        self.heads = self.text.value("H")
        self.groups_of_heads = self.text.value("G")
        inner = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "block_ff_dim")
        times = -sizes.inner * self.width if sizes.inner < 0 else sizes.inner
        if config.is_list(inner[0]):
            self.inner = self.same_of(inner[0], default=times)
            self.text.symbol("F", self.inner, inner[0])
        else:
            if sizes.inner > 0:
                config.expect_value(inner[0])
            self.inner = read_size(config, self.text, "F", *inner, default=times)
        read_size(config, self.text, "V", "vocab_size", "padded_vocab_size", default=sizes.vocab)
        self._base = sizes.base

    def _read_heads(self, sizes: Sizes, dim_keys: Sequence[str]) -> None:
        """Declare D, H, G and K. If the size of heads is null, they share the width."""
        config, text = self.config, self.text
        d = self.size("D", *_WIDTH, default=sizes.width)
        h = self.size("H", *_HEADS, default=sizes.heads)
        if sizes.grouped:
            g = self.size("G", *_GROUPS, default=sizes.groups or h)
            config.divides(_GROUPS[0], g, h, "heads")
        else:
            text.symbol("G", sizes.groups or h, "heads of keys and values")
        text.assume("H % G == 0")
        if config.has(*dim_keys) or (sizes.dim and not config.names(*dim_keys)):
            self.size("K", *dim_keys, default=sizes.dim)
            return
        config.divides(_HEADS[0], h, d)
        text.symbol("K", d // h, "hidden_size / num_attention_heads")

    # -- keys --------------------------------------------------------------------------------------

    def rope(self, *, partial: Fraction | int = 1, interleaved: bool = False) -> Rope:
        """Rotary positions of all elements of a head, or of the first part of them; pairs are
        neighbours if `interleaved`. Code that may rotate a part (`partial` is its default) joins
        the parts also where one is empty."""
        rope = read_rope(self.config, self.text, base=self._base, partial=Fraction(partial))
        joined = rope.part if partial == 1 else rope.part or "K"
        return replace(rope, interleaved=interleaved, part=joined)

    def partly(self, rope: Rope, rotated: int, key: str) -> Rope:
        """These positions on the first `rotated` elements of each head, which are the value of a
        key."""
        part = declare_part(self.config, self.text, rotated, key)
        return replace(rope, part="R" if part else None)

    def positions(self, before: int = 0) -> Positions:
        """Learned positions, one for each token of the longest sequence, after `before` unused
        rows."""
        self.text.symbol("P", self.longest + before, "learned positions")
        self.text.assume(f"P >= S + {before}" if before else "P >= S")
        return Positions("P", before)

    def biased(self, mixer: Attention, default: bool = False) -> Attention:
        """Attention with biases of all its products if `attention_bias` is set."""
        biased = self.flag("attention_bias", default)
        return replace(mixer, qkv_bias=biased, out_bias=biased)

    def clip(self) -> None:
        """Read `clip_qkv`: clamping of queries, keys and values is left out, since it is free in a
        fused kernel."""
        if self.config.has("clip_qkv"):
            bound = self.config.ratio("clip_qkv")
            self.text.notes.append(f"Left out: queries, keys and values are clamped to {bound}.")

    def activation(self, default: str = "silu") -> str:
        """The activation of feed-forward blocks."""
        keys = ("hidden_act", "hidden_activation", "activation_function")
        return self.config.word(*keys, among=ACTIVATIONS, default=default)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean key."""
        return self.config.flag(key, default=default)

    def tied(self, default: bool = False) -> bool:
        """Whether the head uses the embedding table."""
        return self.config.flag("tie_word_embeddings", default=default)

    def size(self, symbol: str, *keys: str, default: int | None = None) -> int:
        """Declare a symbol with the value of a key, and return the value."""
        return read_size(self.config, self.text, symbol, *keys, default=default)

    def windows(self, default: Sequence[bool]) -> list[bool]:
        """For each layer, whether it has windowed attention: by `layer_types`, else the default."""
        among = ("full_attention", "sliding_attention")
        types = self.config.words("layer_types", among=among, length=self.count)
        return [t == "sliding_attention" for t in types] or list(default)

    def window(self, default: int | None = None) -> int | None:
        """The tokens of `sliding_window`, `default` if the key is missing, None if it is null."""
        if self.config.names("sliding_window") and not self.config.has("sliding_window"):
            return None
        size = self.config.count("sliding_window", default=default or self.longest, most=1 << 30)
        return size if 0 < size < self.longest else None

    def late_windows(self, mixer: Attention) -> list[Named]:
        """The mixers of Qwen: with `use_sliding_window`, layers from `max_window_layers` have a
        window. What `dual_chunk_attention_config` changes beyond a chunk is left out."""
        if self.config.drop("dual_chunk_attention_config"):
            self.text.notes.append("Left out: dual chunk attention, which only vLLM has.")
        window = self.window(4096)
        first = self.config.count("max_window_layers", default=28)
        if not self.flag("use_sliding_window"):
            window = None
        return self.masked(mixer, self.windows([i >= first for i in range(self.count)]), window)

    def masked(self, mixer: Attention, windows: Sequence[bool], size: int | None) -> list[Named]:
        """The mixer of each layer, with a window of `size` tokens if `windows` states it."""
        if size is None or not any(windows):
            return [("", mixer)] * self.count
        self.text.symbol("W", size, "sliding_window")
        local = replace(mixer, mask=f"{mixer.mask}, window = W")
        return [("local", local) if window else ("global", mixer) for window in windows]

    def windowed(self, mixer: Attention, default: int | None = None) -> list[Named]:
        """The mixer of each layer, with a window in all layers or in those of `layer_types`;
        `default` is its size if no key states it."""
        return self.masked(mixer, self.windows([True] * self.count), self.window(default))

    def local(self, mixer: Attention, default: int) -> Attention:
        """The mixer with a window, also if that exceeds the positions: for kinds of layers that
        differ in more than the window. `default` is its size if the key is missing."""
        size = self.config.size("sliding_window", default=default, most=1 << 30)
        self.text.symbol("W", size, "sliding_window")
        return replace(mixer, mask=f"{mixer.mask}, window = W")

    def in_window(self, mixer: Attention, size: int | None) -> Block:
        """The mixer with a window of `size` tokens, if there is one."""
        return self.masked(mixer, [True] * self.count, size)[0][1]

    # -- experts -----------------------------------------------------------------------------------

    def experts(
        self,
        *,
        count: int,
        top: int,
        inner: int | Literal["F"],
        normalize: bool = True,
        keys: Sequence[str] = (),
        activation: str | None = None,
    ) -> Experts:
        """Experts chosen by a softmax. Declares E, T and M; the arguments are defaults of missing
        keys, "F" is the width of dense blocks. `keys` are additional names for E, T and M."""
        names = dict(zip("ETM", keys, strict=False))
        e = self.size("E", *filter(None, [names.get("E")]), *_EXPERTS, default=count)
        t = self.size("T", *filter(None, [names.get("T")]), *_TOP, default=top)
        if t > e:
            raise self.config.refuse(_TOP[0], f"is {t}, but there are only {e} experts")
        if inner == "F":
            f = self.text.symbols["F"]
            self.text.symbol("M", f.value, f.comment)
        else:
            self.size("M", *filter(None, [names.get("M")]), *_INNER, default=inner)
        function = activation or self.activation()
        if not activation and ACTIVATIONS[function][0] not in ("silu", "gelu"):
            message = f"is {function!r}, which experts do not have as a gate: expected SiLU or GELU"
            raise self.config.refuse("hidden_act", message)
        return Experts(route=("normalize",) if normalize else (), activation=function)

    def sigmoid_experts(
        self,
        *,
        count: int,
        top: int,
        inner: int,
        shared: int,
        scale: Fraction | int = 1,
        normalize: bool = True,
        wide: bool = True,
    ) -> Experts:
        """Experts of DeepSeek-V3: sigmoids with a bias for the choice, optionally among groups, and
        `shared` ones for all tokens. `scale` and `normalize` are defaults of missing keys; with
        `wide` model code computes logits in fp32."""
        config = self.config
        mixture = self.experts(count=count, top=top, inner=inner)
        config.only("scoring_func", "sigmoid", "noaux_tc")
        config.only("topk_method", "noaux_tc")
        normalize = config.flag("norm_topk_prob", "moe_renormalize", default=normalize)
        route = ["scores = sigmoid", *(["normalize"] if normalize else [])]
        route += [*self.weights(scale), *self.groups(), *(["wide_logits"] if wide else [])]
        keys = ("n_shared_experts", "num_shared_experts")
        number = config.count(*keys, default=shared)
        block = self.shared(number, "n_shared_experts") if number else None
        return replace(mixture, route=tuple(route), choice_bias="state", shared=block)

    def weights(self, default: Fraction | int = 1) -> list[str]:
        """The static parameter of the router for `routed_scaling_factor`."""
        keys = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
        scale = self.config.ratio(*keys, default=default)
        return [f"scale = {scale}"] if scale != 1 else []

    def groups(self, top: int | None = None, symbol: str = "N") -> list[str]:
        """The static parameters of the router for `n_group` and `topk_group`; declares N, or
        another symbol, and N_top. The default of the second key is `top`, or all groups."""
        groups = self.config.size("n_group", "num_expert_group", default=1)
        top = self.config.size("topk_group", default=min(top or groups, groups))
        experts = self.text.value("E")
        if experts % groups or top > groups:
            raise self.config.refuse(
                "n_group",
                f"is {groups}: it must divide the {experts} experts, and be at least "
                f"'topk_group' {top}",
            )
        if top == groups:
            return []
        self.text.symbol(symbol, groups, "n_group")
        self.text.symbol("N_top", top, "topk_group")
        self.text.assume(f"E % {symbol} == 0")
        self.text.assume(f"{symbol} >= N_top")
        return [f"groups = {symbol}", "top_groups = N_top"]

    def beside(self, mixture: Experts, key: str, *, default: int) -> Experts:
        """Experts with a gated shared block whose width is the value of a key, and without it if
        that is 0; declares F_shared."""
        if not self.config.count(key, default=default):
            return mixture
        self.size("F_shared", key, default=default)
        return replace(mixture, shared=FeedForward(mixture.activation), shared_gate=True)

    def shared(self, number: int, key: str) -> FeedForward:
        """Shared experts, as one block; declares F_shared."""
        inner = self.text.value("M")
        self.text.symbol("F_shared", number * inner, f"{key} * M")
        return FeedForward(self.activation())

    def same_of(self, key: str, *, default: int) -> int:
        """A size that is given once, or equal for all layers."""
        if not self.config.is_list(key):
            return self.config.size(key, default=default)
        values = set(self.config.sizes(key, length=self.count, least=1))
        if len(values) != 1:
            raise self.config.refuse(key, "differs between layers, which is not modeled")
        return values.pop()

    # -- layers ------------------------------------------------------------------------------------

    def in_layers(self, blocks: PerLayer) -> Sequence[Named]:
        """The block of each layer."""
        return blocks if isinstance(blocks, Sequence) else [("", blocks)] * self.count

    def dense_first(self, dense: int, mixture: Experts, plain: FeedForward) -> list[Named]:
        """The feed-forward blocks of layers: `dense` dense ones, then experts."""
        kinds = self.config.words("mlp_layer_types", among=("dense", "sparse"), length=self.count)
        if kinds:
            return [(k, plain if k == "dense" else mixture) for k in kinds]
        dense = min(dense, self.count)
        first: list[Named] = [("dense", plain)] * dense
        return [*first, *([("sparse", mixture)] * (self.count - dense))]

    def stack(
        self,
        mixers: PerLayer,
        blocks: PerLayer | None = None,
        decoder: Decoder | None = None,
        *,
        norm: Norm | None = RMS,
        post: Norm | None = None,
        scale: Fraction = ONE,
        parallel: bool = False,
        common_norm: Norm | None = None,
    ) -> ModelText:
        """The text, with a mixer and a feed-forward block for each layer, by default one with the
        activation of the configuration, and a decoder, by default with this norm and tied if the
        configuration states it. `norm` and `post` are applied before and after each block, whose
        results are multiplied by `scale`."""
        blocks = FeedForward(self.activation()) if blocks is None else blocks
        columns = [self.in_layers(each) for each in (mixers, blocks)]
        attention = [mixer for _, mixer in columns[0] if isinstance(mixer, Attention)]
        if attention:
            self.config.restates(any(a.qk_norm for a in attention), *_QK_NORMS)
        varied = [len(set(column)) > 1 for column in columns]
        kinds: dict[str, Layer] = {}
        order: list[str] = []
        for layer in zip(*columns, strict=True):
            names = [name if vary else "" for (name, _), vary in zip(layer, varied, strict=True)]
            kind = "_".join(filter(None, names)) or "layers"
            order.append(kind)
            if kind not in kinds:
                parts = [
                    Sublayer(block.write(self.text), part, norm, post, scale)
                    for (_, block), part in zip(layer, ("attn", "ffn"), strict=True)
                ]
                kinds[kind] = Layer(parts, parallel, common_norm)
        return (decoder or Decoder(norm or RMS, tied=self.tied())).write(self.text, kinds, order)
