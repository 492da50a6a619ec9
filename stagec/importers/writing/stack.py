"""A complete decoder-only model: embedding, the stack of layers, final norm, head and loss."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from math import isqrt
from typing import Protocol

from stagec.importers.writing.blocks import LAYER, RMS, Block, Norm
from stagec.importers.writing.text import Body, Callee, ModelText

ONE = Fraction(1)
#: A part of a layer: its name among the kinds of parts, the prefix of its norms, and the block.
Place = tuple[str, str, Block]


def root(of: int) -> Fraction:
    """The square root to six decimals."""
    return Fraction(isqrt(of * 10**12), 10**6)


def times(by: Fraction) -> str:
    """The static parameters of `stg.scale` for a number, rounded to a fraction with a denominator
    of at most a million."""
    return f"by = {by.limit_denominator(10**6)}"


def scaled(by: Fraction) -> list[str]:
    """The operation that multiplies `{}` by a number, if that is not 1."""
    return [f"stg.scale[{times(by)}]({{}})"] if by != 1 else []


@dataclass(frozen=True, slots=True)
class Sublayer:
    """A block of a layer with the norms before and after it; `name` is the prefix of their names.
    Its result is multiplied by `scale`, with `vector` by a parameter, and added to the stream of
    width `width`. `operands` follow the stream in its call."""

    block: Callee
    name: str
    norm: Norm | None = RMS
    post_norm: Norm | None = None
    scale: Fraction = ONE
    width: str = "D"
    operands: Sequence[str] = ()
    vector: bool = False

    def write(self, body: Body, x: str, number: int) -> str:
        """Append the part on `x`, and return the name of the value that is added to the stream."""
        letter = self.name[0]
        if self.norm:
            x = self.norm.write(body, f"n{number}", x, f"{self.name}_norm", self.width)
        steps = [f"stg.call @{self.block}({', '.join(['{}', *self.operands])})"]
        if self.post_norm:
            steps.append(self.post_norm.step(body, f"{self.name}_post_norm", self.width))
        if self.vector:
            scale = body.param(f"{self.name}_scale", self.width)
            steps.append(f'stg.einsum["bsd,d->bsd"]({{}}, {scale})')
        steps += scaled(self.scale)
        return body.steps(letter, x, steps)


class LayerKind(Protocol):
    """A kind of layers."""

    def write(self, body: Body, x: str) -> str:
        """Append a layer on `x`, and return the name of the result."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """A kind of layers: its parts in order, each of which adds to the residual stream. With
    `parallel` all of them read the input of the layer, after a common `norm` if there is one."""

    parts: Sequence[Sublayer]
    parallel: bool = False
    norm: Norm | None = None

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`; the result's name."""
        if self.parallel:
            n = self.norm.write(body, "n", x, "norm") if self.norm else x
            added = [part.write(body, n, number) for number, part in enumerate(self.parts, 1)]
            return body.let("r", f"stg.add({', '.join([x, *added])})")
        for number, part in enumerate(self.parts, 1):
            x = body.let(f"r{number}", f"stg.add({x}, {part.write(body, x, number)})")
        return x


@dataclass(frozen=True, slots=True)
class NormedSums(Layer):
    """A layer of parts without norms: each sum with the stream is normalized by `norm`, by default
    a LayerNorm."""

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`; the result's name."""
        for number, part in enumerate(self.parts, 1):
            r = body.let(f"r{number}", f"stg.add({x}, {part.write(body, x, number)})")
            x = (self.norm or LAYER).write(body, f"n{number}", r, f"{part.name}_norm")
        return x


@dataclass(frozen=True, slots=True)
class _Added:
    """A layer after which a value of this name is added to the stream."""

    layer: LayerKind
    value: str

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`; the result's name."""
        return body.let("more", f"stg.add({self.layer.write(body, x)}, %{self.value})")


@dataclass(frozen=True, slots=True)
class Positions:
    """Learned positions: the symbol of their number, and the number of unused ones at the start."""

    count: str
    before: int = 0

    def step(self, body: Body) -> str:
        """The operation that adds them to `{}`."""
        start = f"start = {self.before}, " if self.before else ""
        table = body.param("positions", f"{self.count}, D")
        p = body.let("p", f"stg.slice[dim = 0, {start}size = S]({table})")
        return f'stg.add["bsd,sd->bsd"]({{}}, {p})'


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder without its layers: embedding and head. A `tied` head uses the embedding table.

    `embed_scale` and `logit_scale` multiply the embeddings and the logits. The table may have
    another width, the symbol `narrow`, with products from and to it, and `more` rows than logits.
    """

    norm: Norm | None = RMS
    tied: bool = False
    head_bias: bool = False
    embed_norm: Norm | None = None
    embed_scale: Fraction = ONE
    logit_scale: Fraction = ONE
    logit_cap: Fraction | None = None
    positions: Positions | None = None
    narrow: str = ""
    more: str = ""

    def write(
        self, text: ModelText, kinds: Mapping[str, LayerKind], order: Sequence[str]
    ) -> ModelText:
        """Add the main function, with layers of these kinds in this order, and return the text."""
        body = Body()
        x, table = self.embed(body, "words" if text.among else "x")
        if text.among:
            seen = text.among.write(text, body)
            x = body.let("x", f"stg.merge_rows({x}, {seen}, %merged)")
            deep = [f"deep{i}" for i in range(text.among.deep)]
            kinds = dict(kinds) | {k: _Added(kinds[order[i]], k) for i, k in enumerate(deep)}
            order = [*deep, *order[len(deep) :]]
        x = write_stack(text, body, x, kinds, order)
        return self.end(text, body, x, table)

    def embed(self, body: Body, out: str) -> tuple[str, str]:
        """Append the embedding of `%tokens`, and return its name, `out`, and that of the table."""
        rows = f"V + {self.more}" if self.more else "V"
        table = body.param("embed", f"{rows}, {self.narrow or 'D'}")
        steps = [f"stg.embedding({table}, {{}})"]
        if self.narrow:
            weight = body.param("project_in", f"{self.narrow}, D")
            steps.append(f'stg.einsum["bse,ed->bsd"]({{}}, {weight})')
        steps += scaled(self.embed_scale)
        given = "%tokens"
        if self.positions:  # code reads the table of positions last, so its gradient comes first
            given = body.steps("e", given, steps)
            steps = [self.positions.step(body)]
        if self.embed_norm:
            steps.append(self.embed_norm.step(body, "embed_norm", "D"))
        return body.steps(out, given, steps), table

    @property
    def _is_plain(self) -> bool:
        """Whether the head is that of the library."""
        given = (self.tied, self.head_bias, self.logit_scale, self.logit_cap, self.narrow)
        return given == (False, False, ONE, None, "")

    def end(
        self, text: ModelText, body: Body, x: str, table: str, args: str | None = None
    ) -> ModelText:
        """Append the final norm, the head and the loss of the stream `x`, add the main function
        with these arguments, by default those of a decoder, and return the text."""
        if text.head != "words":
            self._classify(text, body, x)
        elif self.norm == RMS and self._is_plain:
            head = body.param("head", "D, V")
            block = text.use("lm_loss", "B S D V")
            body.ends(f"stg.call @{block}({x}, {head}, %labels)")
        else:
            symbols = f"B S D V {self.narrow}"
            block = text.use("lm_head", symbols, *self._options())
            operands = [x, "%labels", *[table] * self.tied]
            body.ends(f"stg.call @{block}({', '.join(operands)})")
        return text.train(arguments(text) if args is None else args, body)

    def _options(self) -> Iterator[str]:
        yield from self.norm.options() if self.norm else ["norm = no"]
        yield from [f"J = {self.narrow}", "narrow"] if self.narrow else []
        yield from ["tied"] * self.tied + ["bias"] * self.head_bias
        if self.logit_scale != 1:
            yield f"scale = ({times(self.logit_scale)})"
        if self.logit_cap:
            yield f"cap = ({times(1 / self.logit_cap)})"
            yield f"uncap = ({times(self.logit_cap)})"

    def _classify(self, text: ModelText, body: Body, x: str) -> None:
        """Append the scores of classes, at all tokens as in the reference, and the loss of the last
        token or of all tokens; with a bias if all count (`modeling_layers.py` of transformers)."""
        n = self.norm.write(body, "n", x, "norm") if self.norm else x
        steps = [f'stg.einsum["bsd,dn->bsn"]({{}}, {body.param("score", "D, N_classes")})']
        if text.head == "classes":
            steps.append(f'stg.add["bsn,n->bsn"]({{}}, {body.param("score_bias", "N_classes")})')
        else:
            steps.append("stg.take[at = S - 1]({})")
        logits = body.steps("logits", n, [*steps, "stg.cast[f32]({})"])
        mean = "B" if text.head == "class" else "B*S"
        body.ends(f"stg.cross_entropy[mean = {mean}]({logits}, %labels)")


def arguments(text: ModelText) -> str:
    """The arguments of a decoder: inserted embeddings, tokens and labels."""
    labels = f"%labels: i32[{'B' if text.head == 'class' else 'B, S'}]"
    if text.among:
        return f"{text.among.args},\n    %tokens: i32[B, S], %merged: i32[B, S], {labels}"
    return f"%tokens: i32[B, S], {labels}"


def stacked(
    text: ModelText,
    layers: Sequence[Sequence[Place]],
    decoder: Decoder,
    *,
    scale: Fraction = ONE,
    norm: Norm = RMS,
) -> ModelText:
    """The text of layers with these parts, each after a norm and multiplied by `scale`."""
    kinds: dict[str, Layer] = {}
    order: list[str] = []
    for places in layers:
        kind = "_".join(filter(None, (name for name, _, _ in places))) or "layers"
        order.append(kind)
        if kind not in kinds:
            parts = [
                Sublayer(block.write(text), part, norm, None, scale) for _, part, block in places
            ]
            kinds[kind] = Layer(parts)
    return decoder.write(text, kinds, order)


def write_stack(
    text: ModelText,
    body: Body,
    x: str,
    kinds: Mapping[str, LayerKind],
    order: Sequence[str],
    *,
    name: str = "layers",
    out: str = "y",
) -> str:
    """Append a repeat for each kind of layers on `x`, and return the name of the result, `out`.

    If each kind has a single run, they are a chain of repeats; any other order is stated by
    `stg.order`, and the counts are numbers.
    """
    runs = [kind for kind, _ in groupby(order)]
    distinct = list(dict.fromkeys(order))
    mixed = len(runs) > len(distinct)
    if mixed:
        text.declarations.append(f"stg.order @{name}[{order_text(order)}]")
    for number, kind in enumerate(distinct):
        last = number == len(distinct) - 1
        count = str(order.count(kind)) if mixed else _count(text, kind, order.count(kind))
        result = out if last else f"{out}{number}"
        x = repeated(body, x, kinds[kind], result, kind, count, name if mixed else "")
    return x


def repeated(
    body: Body,
    x: str,
    layer: LayerKind,
    out: str,
    name: str = "layers",
    count: str = "L",
    order: str = "",
) -> str:
    """Append a repeat of a layer on `x`, and return the name of the result, `out`."""
    inner = Body()
    inner.do(f"stg.yield({layer.write(inner, '%h')})")
    return body.repeat(f"%{out}", name, count, f"%h = {x}", inner, order)


def _count(text: ModelText, kind: str, count: int) -> str:
    """The symbol of the number of layers of a kind: L for the kind `layers`, else L_kind."""
    if kind == "layers":
        return text.symbol("L", count, "num_hidden_layers")
    return text.symbol(f"L_{kind}", count, f"{kind} layers")


def order_text(order: Sequence[str]) -> str:
    """An order of kinds in short form: `(5*local, global)*10, 2*local`, with the period, and the
    layers before it, that have the shortest text."""
    best = _runs_text(order)
    for start in range(len(order) - 3):
        if start and order[start - 1] == order[start]:
            continue  # a run begins before
        for period in range(2, (len(order) - start) // 2 + 1):
            end = start + period
            while order[end : end + period] == order[start : start + period]:
                end += period
            if end > start + period:
                parts = [_runs_text(order[:start]), _runs_text(order[end:])]
                inner = _runs_text(order[start : start + period])
                repeats = f"({inner})*{(end - start) // period}"
                text = ", ".join(filter(None, [parts[0], repeats, parts[1]]))
                best = min(best, text, key=len)
    return best


def _runs_text(order: Sequence[str]) -> str:
    runs = [(kind, len(list(run))) for kind, run in groupby(order)]
    return ", ".join(kind if count == 1 else f"{count}*{kind}" for kind, count in runs)
