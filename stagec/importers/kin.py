"""Readers of Llama's kin: decoders of attention and feed-forward blocks by mostly the same keys.

A family's reader makes a `Kin`, asks it for sizes and keys, and hands one mixer and one
feed-forward block for each layer to `stack`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.blocks import (
    ACTIVATIONS,
    RMS,
    Attention,
    Block,
    Experts,
    FeedForward,
    Norm,
    Rope,
)
from stagec.importers.common import begin, declare_part, read_heads, read_rope, read_size
from stagec.importers.config import Config
from stagec.importers.stack import ONE, Decoder, Layer, Part, Positions
from stagec.importers.text import ModelText

#: A block and what its kind of layers is called, if not all layers have it.
Named = tuple[str, Block]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The values of keys that a configuration leaves out, from the family's own class; a negative
    `inner` is so many times the width."""

    width: int
    inner: int
    layers: int
    heads: int
    vocab: int
    length: int
    groups: int | None = None
    dim: int | None = None
    base: int = 10000


class Kin:
    """A model in the making: `text`, the number of layers `count`, and the keys asked for."""

    def __init__(
        self, config: Config, title: str, sizes: Sizes, *, read_groups: bool = True
    ) -> None:
        self.config = config
        self.text, self.longest = begin(config, title, sizes.length)
        self.count = config.layers(
            "num_hidden_layers", "n_layer", "num_layers", "n_layers", default=sizes.layers
        )
        read_heads(
            config,
            self.text,
            width=sizes.width,
            heads=sizes.heads,
            groups=sizes.groups,
            dim=sizes.dim,
            read_groups=read_groups,
        )
        self.width = self.text.symbols["D"].value or 1
        inner = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
        times = -sizes.inner * self.width if sizes.inner < 0 else sizes.inner
        read_size(config, self.text, "F", *inner, default=times)
        read_size(config, self.text, "V", "vocab_size", "padded_vocab_size", default=sizes.vocab)
        self._base = sizes.base
        self._sizes = sizes

    # -- keys --------------------------------------------------------------------------------------

    def rope(self, *, partial: Fraction | int = 1) -> Rope:
        """Rotary positions of all elements of a head, or of the first part of them."""
        return read_rope(self.config, self.text, base=self._base, partial=Fraction(partial))

    def partly(self, rope: Rope, rotated: int, key: str) -> Rope:
        """The same positions on the first elements of each head, so many by a key."""
        part = declare_part(self.config, self.text, rotated, key)
        return replace(rope, part="R" if part else None)

    def positions(self, before: int = 0) -> Positions:
        """Learned positions, one for each token that the model takes, behind some unused rows."""
        self.text.symbol("P", self.longest + before, "learned positions")
        self.text.assume(f"P >= S + {before}" if before else "P >= S")
        return Positions("P", before)

    def clip(self, config: Config) -> None:
        """`clip_qkv`: queries, keys and values are clamped, which costs nothing in a fused kernel
        and is left out."""
        if config.has("clip_qkv"):
            bound = config.ratio("clip_qkv")
            self.text.notes.append(f"Left out: queries, keys and values are clamped to {bound}.")

    def activation(self, default: str = "silu") -> str:
        """The activation of feed-forward blocks."""
        keys = ("hidden_act", "hidden_activation", "activation_function")
        return self.config.word(*keys, among=ACTIVATIONS, default=default)

    def flag(self, key: str, default: bool = False) -> bool:
        """A key that is true or false."""
        return self.config.flag(key, default=default)

    def tied(self, default: bool = False) -> bool:
        """Whether the head uses the table of the embedding."""
        return self.config.flag("tie_word_embeddings", default=default)

    def size(self, symbol: str, *keys: str, default: int | None = None) -> int:
        """Declare a symbol with the value of a key; the value."""
        return read_size(self.config, self.text, symbol, *keys, default=default)

    def windows(self, default: Sequence[bool]) -> list[bool]:
        """Which layers see a window only: by `layer_types`, else by the default."""
        among = ("full_attention", "sliding_attention")
        types = self.config.words("layer_types", among=among, length=self.count)
        return [t == "sliding_attention" for t in types] or list(default)

    def window(self, default: int | None = None) -> int | None:
        """`sliding_window`: how many tokens a token sees; None where it sees all of them."""
        if not self.config.has("sliding_window"):
            return default
        size = self.config.size("sliding_window", most=1 << 30)
        return size if size < self.longest else None

    def late_windows(self, mixer: Attention) -> list[Named]:
        """The mixers of Qwen: where `use_sliding_window` says so, the layers from
        `max_window_layers` on see a window."""
        window = self.window(4096)
        first = self.config.count("max_window_layers", default=28)
        if not self.flag("use_sliding_window"):
            window = None
        return self.masked(mixer, self.windows([i >= first for i in range(self.count)]), window)

    def masked(self, mixer: Attention, windows: Sequence[bool], size: int | None) -> list[Named]:
        """The mixer of each layer, in a window of `size` tokens where that is said."""
        if size is None or not any(windows):
            return [("", mixer)] * self.count
        self.text.symbol("W", size, "sliding_window")
        local = replace(mixer, mask=f"{mixer.mask}, window = W")
        return [("local", local) if window else ("global", mixer) for window in windows]

    # -- layers ------------------------------------------------------------------------------------

    def all(self, block: Block) -> list[Named]:
        """The same block in every layer."""
        return [("", block)] * self.count

    def dense_first(self, dense: int, mixture: Experts, plain: FeedForward) -> list[Named]:
        """Feed-forward blocks: so many dense ones, then experts."""
        dense = min(dense, self.count)
        return [("dense", plain)] * dense + [("sparse", mixture)] * (self.count - dense)

    def stack(
        self,
        mixers: Sequence[Named],
        blocks: Sequence[Named],
        decoder: Decoder,
        *,
        norm: Norm | None = RMS,
        post: Norm | None = None,
        scale: Fraction = ONE,
        parallel: bool = False,
        common_norm: Norm | None = None,
    ) -> ModelText:
        """The text, with a mixer and a feed-forward block for each layer; `norm` and `post` stand
        before and behind each of them. What they make is multiplied by `scale`."""
        kinds: dict[str, Layer] = {}
        order: list[str] = []
        names = _Names(mixers, blocks)
        for mixer, block in zip(mixers, blocks, strict=True):
            kind = names.kind(mixer, block)
            order.append(kind)
            if kind not in kinds:
                parts = (
                    Part(names.write(self.text, mixer, mixers), "attn", norm, post, scale),
                    Part(names.write(self.text, block, blocks), "ffn", norm, post, scale),
                )
                kinds[kind] = Layer(parts, parallel, common_norm)
        return decoder.write(self.text, kinds, order)


class _Names:
    """What the kinds of layers and their blocks are called."""

    def __init__(self, *columns: Sequence[Named]) -> None:
        self._vary: Mapping[int, bool] = {id(c): len({n for n, _ in c}) > 1 for c in columns}
        self._columns = columns

    def kind(self, *named: Named) -> str:
        """The kind of layers with these blocks."""
        words = [
            name
            for (name, _), column in zip(named, self._columns, strict=True)
            if self._vary[id(column)]
        ]
        return "_".join(filter(None, words)) or "layers"

    def write(self, text: ModelText, named: Named, column: Sequence[Named]) -> str:
        """Add the block of a layer to the text; its name."""
        name, block = named
        if isinstance(block, Attention) and name and self._vary[id(column)]:
            return block.write(text, f"{name}_attention")
        return block.write(text)
