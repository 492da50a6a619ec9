"""Blocks of encoders, decoders with cross attention and vision towers, and their stacks.

A model may have towers of several sizes. Blocks are written once, with the symbols D, H, K and F; a
call binds them to those of its tower: `stg.call @attention[D = D_vision, H = H_vision](%n)`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagec.importers.writing.blocks import LAYER, FeedForward, Norm, Rope
from stagec.importers.writing.stack import Layer, NormedSums, Sublayer
from stagec.importers.writing.text import Body, Callee, ModelText


@dataclass(frozen=True, slots=True)
class Tower:
    """The symbols of a tower: with the `suffix` `_vision`, D is `D_vision`."""

    suffix: str = ""

    def __getitem__(self, symbol: str) -> str:
        return f"{symbol}{self.suffix}"

    def of(self, block: Callee, symbols: str) -> Callee:
        """A block with these symbols, bound to the sizes of this tower."""
        return block.with_(*(f"{s} = {self[s]}" for s in symbols.split() if self.suffix))


#: A tower whose symbols have no suffix.
PLAIN = Tower()


@dataclass(frozen=True, slots=True)
class MultiHead:
    """Attention of H heads of K. `biases` has the letters of q, k, v and o with a bias. With
    `cross` keys and values are those of another sequence; `statics` are the static parameters of
    the kernel. With `bias` an operand of the block is added to the scores; `relative` are the
    static parameters of a bias by distance within the block; with `pairs` the block has a table of
    biases [N, H], and an operand with the row of each pair. Queries and keys may be rotated. Model
    code computes the softmax in the type of its operands unless it is `wide`, and with `packed`
    queries, keys and values in one product."""

    biases: str = "qkvo"
    statics: str = ""
    cross: bool = False
    bias: bool = False
    name: str = "attention"
    relative: str = ""
    pairs: bool = False
    rope: Rope | None = None
    wide: bool = False
    packed: bool = False

    def write(self, text: ModelText, heads: str = "H") -> Callee:
        """Add the block, for a tower with this number of heads."""
        symbols = ["D H K", "N" * bool(self.relative or self.pairs)]
        symbols += [self.rope.base] if self.rope else []
        return text.use("attention", " ".join(symbols), f"G = {heads}", *self._options())

    def _options(self) -> Iterator[str]:
        if "q" in self.biases:
            yield "qkv_bias" if "k" in self.biases else "qkv_bias = without_k"
        yield from ["out_bias"] * ("o" in self.biases)
        if self.rope != Rope():
            yield f"rope = ({self.rope.statics()})" if self.rope else "rope = no"
        yield from ["keys_of = beside"] * self.cross
        statics = ", ".join(filter(None, [self.statics, "" if self.wide else "given_type"]))
        yield f"mask = ({statics})" if statics else "mask = no"
        yield from ["bias = beside"] * self.bias
        if self.relative:
            yield from ("bias = distance", f"distance = ({self.relative})")
        yield from ["bias = pairs"] * self.pairs
        yield from ["packed"] * self.packed
        yield from [f"as = {self.name}"] if self.name != "attention" else []


def pair_bias(body: Body, out: str, table: str) -> str:
    """Append a bias [H, S, T] from a table [N, H] with rows `%pairs` [S, T], and return its
    name."""
    steps = [f"stg.embedding({table}, {{}})", 'stg.permute["sth->hst"]({})']
    return body.steps(out, "%pairs", steps)


def encoder(
    text: ModelText,
    attention: MultiHead,
    mlp: FeedForward,
    *,
    tower: Tower = PLAIN,
    norm: Norm = LAYER,
    post: bool = False,
    scaled: bool = False,
    operands: Sequence[str] = (),
) -> Layer:
    """A layer of self-attention, with additional `operands`, and a feed-forward block. With `post`
    a norm follows each sum, else it precedes the part; with `scaled` results of parts are
    multiplied by a vector."""
    before, width = None if post else norm, tower["D"]
    mixer = tower.of(attention.write(text, tower["H"]), "D H K")
    parts = [
        Sublayer(mixer, "attn", before, width=width, operands=operands, vector=scaled),
        Sublayer(tower.of(mlp.write(text), "D F"), "mlp", before, width=width, vector=scaled),
    ]
    return NormedSums(parts) if post else Layer(parts)


def decoder(
    text: ModelText,
    attention: MultiHead,
    cross: MultiHead,
    mlp: FeedForward,
    source: str,
    *,
    post: bool = False,
) -> Layer:
    """A layer of self-attention, attention to `source` and a feed-forward block."""
    before = None if post else LAYER
    parts = [
        Sublayer(attention.write(text), "self", before),
        Sublayer(cross.write(text), "cross", before, operands=[source]),
        Sublayer(mlp.write(text), "mlp", before),
    ]
    return NormedSums(parts) if post else Layer(parts)


def linear(
    text: ModelText, body: Body, out: str, x: str, name: str, sizes: str, *, bias: bool = True
) -> str:
    """Append the product of `x` [B, in] with a parameter [in, out], and a bias, and return the name
    of the result. `sizes` are the two sizes."""
    return body.call(out, _product(text, "linear", name, sizes, *["bias = no"] * (not bias)), x)


def projected(text: ModelText, body: Body, out: str, x: str, name: str, sizes: str) -> str:
    """As `linear`, for `x` [B, S, in]."""
    return body.call(out, _product(text, "projected", name, sizes), x)


def _product(text: ModelText, function: str, name: str, sizes: str, *given: str) -> Callee:
    d_in, _, d_out = sizes.partition(", ")
    sized = (f"D_in = {d_in}", f"D_out = {d_out}")
    return text.use("linear", "", *sized, *given, f"as = {name}", function=function)


def patches(text: ModelText, *, bias: bool) -> Callee:
    """The block that divides images [B, C, X*P, X*P] into P x P patches and projects each to D."""
    return text.use("patches", "C P D", *["bias = no"] * (not bias))


def with_class_token(
    body: Body, out: str, x: str, width: str, names: Sequence[str], batch: str = "B"
) -> str:
    """Append learned tokens before the sequence `x`, and return the name of the result."""
    tokens = [
        body.let(f"{n}0", f'stg.broadcast["d->bsd", sizes = ({batch}, 1)]({body.param(n, width)})')
        for n in names
    ]
    return body.let(out, f"stg.concat[dim = 1]({', '.join([*tokens, x])})")


def with_positions(
    body: Body, out: str, x: str, dims: str, *, start: int = 0, size: str = ""
) -> str:
    """Append the sum of `x` and learned positions, and return its name: `size` rows of a table with
    these dimensions from `start` (empty: all rows)."""
    p = body.param("positions", dims)
    if size:
        begin = f"start = {start}, " if start else ""
        p = body.let("p", f"stg.slice[dim = 0, {begin}size = {size}]({p})")
    return body.let(out, f'stg.add["bsd,sd->bsd"]({x}, {p})')
