"""Blocks of decoder-only models: texts of the library where they fit, else separate functions.

Each block maps the normalized stream of width D to the values that are added to the stream; `write`
adds it to a text and returns its name. Norms belong to the layers (`stack`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from stagec.importers.writing.text import Body, Callee, ModelText


class Block(Protocol):
    """A block of a layer. Equal blocks are written once."""

    def write(self, text: ModelText) -> Callee:
        """Add the block to the text."""
        ...


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension: RMSNorm with a scale, or LayerNorm with a scale and a bias.
    `affine` states its vectors if they are others; with `zero_centered` the scale is 1 + w; with
    `wide_scale` model code scales in fp32, and with `given_input` it multiplies the unconverted
    input; `code` is the implementation of a LayerNorm, if it is not a kernel."""

    kind: Literal["rms", "layer"] = "rms"
    affine: Literal["full", "scale", "none"] = "full"
    zero_centered: bool = False
    wide_scale: bool = False
    given_input: bool = False
    code: Literal["kernel", "wide", "narrow", "stepwise"] = "kernel"

    def write(self, body: Body, out: str, x: str, name: str, dims: str = "D") -> str:
        """Append the norm of `x`, with parameters of this name, and return the name of the
        result."""
        return body.let(out, self.step(body, name, dims).format(x))

    def step(self, body: Body, name: str, dims: str = "D") -> str:
        """The operation on `{}`; declares its parameters."""
        statics = self.statics(self.affine)
        brackets = f"[{statics}]" if statics else ""
        with_bias = self.kind == "layer" and self.affine == "full"
        operands = ["{}"]
        if self.affine != "none":
            operands.append(body.param(f"{name}_w" if with_bias else name, dims))
        if with_bias:
            operands.append(body.param(f"{name}_b", dims))
        op = "rmsnorm" if self.kind == "rms" else "layernorm"
        return f"stg.{op}{brackets}({', '.join(operands)})"

    @property
    def weights(self) -> str:
        """The option of a block for the vectors of its norm."""
        if self.affine == "full":
            return "both" if self.kind == "layer" else "scale"
        return self.affine

    def statics(self, affine: str) -> str:
        """The static parameters of the operation with these vectors."""
        parts = [n for n in ("zero_centered", "wide_scale", "given_input") if getattr(self, n)]
        parts += [f"code = {self.code}"] if self.code != "kernel" else []
        return ", ".join([*parts, *([f"affine = {affine}"] if affine != "full" else [])])

    def options(self) -> Iterator[str]:
        """The options of a block whose norm is by default an RMSNorm."""
        yield from [f"norm = {self.kind}"] if self.kind != "rms" else []
        yield from [f"norm_weights = {self.weights}"] if self.weights != "scale" else []
        statics = self.statics(self.affine)
        yield from [f"norm_statics = ({statics})"] if statics else []

    def options_of_heads(self, dims: Literal["head", "heads", "together"]) -> Iterator[str]:
        """The options of the block `attention` for this norm of queries and keys."""
        yield f"qk_norm = {self.kind}"
        yield from [f"norm_of = {'row' if dims == 'together' else dims}"] if dims != "head" else []
        yield from [f"norm_weights = {self.weights}"] if self.weights != "scale" else []
        statics = self.statics(self.affine)
        yield from [f"norm = ({statics})"] if statics else []


RMS = Norm()
WIDE_RMS = Norm(wide_scale=True)
T5_RMS = Norm(given_input=True)
LAYER = Norm("layer")
LAYER_SCALE = Norm("layer", "scale")
COHERE_NORM = Norm("layer", "scale", code="stepwise")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: the symbol of their base, and the number of rotated elements of a head (by
    default all); pairs are the two halves of these, or with `interleaved` neighbours. `scaling` are
    the static parameters that scale the frequencies. With `sections`, also static parameters, the
    positions are data, an operand `%places` of the block. Rotated values may be `cached` in place
    of derived ones; `inverse` rotates backwards; with `by_token` model code rotates before it
    transposes the heads."""

    base: str = "theta"
    part: str | None = None
    interleaved: bool = False
    scaling: str = ""
    sections: str = ""
    cached: bool = False
    inverse: bool = False
    by_token: bool = False

    def statics(self) -> str:
        """The static parameters of the operation."""
        parts = [f"base = {self.base}"]
        if self.part:
            parts.append(f"first = {self.part}")
        flags = ("interleaved", "inverse", "cached", "by_token")
        parts += [name for name in flags if getattr(self, name)]
        return ", ".join(filter(None, [*parts, self.scaling, self.sections]))


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of H query heads of K over G heads of keys and values; `heads` and `groups` are
    other symbols for their numbers. `qk_norm` normalizes queries and keys before their rotation, or
    `after_rope`: each head, each head with its own scale (`heads`), or all heads as one row
    (`together`). `mask` are the static parameters of `stg.attention`; with `sinks` each head has an
    additional logit. `temperature` are those of `stg.temperature` on queries, `key_scale` and
    `value_scale` those of `stg.scale` on keys and values; heads of values have `value_dim`
    elements. The result is multiplied by a sigmoid of the input if it is `gated`, with `head_gate`
    by this function of one number for each head, and normalized as one row by `out_norm`. With
    `crossed`, keys and values are those of another operand of the call. With `packed`, model code
    computes queries, keys and values in one product."""

    groups: str = "G"
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    norm_dims: Literal["head", "heads", "together"] = "head"
    after_rope: bool = False
    rope: Rope | None = Rope()
    mask: str = "causal"
    sinks: bool = False
    temperature: str = ""
    gated: bool = False
    head_gate: Literal["", "sigmoid", "softplus"] = ""
    out_norm: Norm | None = None
    value_dim: str = "K"
    crossed: bool = False
    key_scale: str = ""
    value_scale: str = ""
    packed: bool = False
    heads: str = "H"

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        base = self.rope.base if self.rope else ""
        symbols = ["D K", self.heads, self.groups, self.value_dim, base]
        return text.use("attention", " ".join(symbols), *self._options())

    def _options(self) -> Iterator[str]:
        yield from [f"H = {self.heads}"] if self.heads != "H" else []
        yield from [f"G = {self.groups}"] if self.groups != "G" else []
        flags = {"qkv_bias": self.qkv_bias, "out_bias": self.out_bias, "sinks": self.sinks}
        yield from (name for name, is_set in flags.items() if is_set)
        yield from self.qk_norm.options_of_heads(self.norm_dims) if self.qk_norm else []
        yield from ["norm_at = behind"] if self.qk_norm and self.after_rope else []
        if self.rope != Rope():
            yield f"rope = ({self.rope.statics()})" if self.rope else "rope = no"
        yield from [f"temperature = ({self.temperature})"] if self.temperature else []
        yield from [f"key_scale = ({self.key_scale})"] if self.key_scale else []
        yield from [f"value_scale = ({self.value_scale})"] if self.value_scale else []
        yield from [f"value_dim = {self.value_dim}"] if self.value_dim != "K" else []
        yield from ["keys_of = beside"] if self.crossed else []
        if self.mask != "causal":
            yield f"mask = ({self.mask})" if self.mask else "mask = no"
        yield from ["gated"] if self.gated else []
        yield from ["gated = heads"] if self.head_gate else []
        yield from ["gate = softplus"] if self.head_gate == "softplus" else []
        yield from ["out_norm = rms"] if self.out_norm else []
        yield from ["packed"] if self.packed else []


#: Activations of configurations: the op, and the static parameters of a GELU.
ACTIVATIONS = {
    "silu": ("silu", ""),
    "swish": ("silu", ""),
    "gelu_new": ("gelu", "stepwise"),
    "gelu_pytorch_tanh": ("gelu", ""),
    "gelu_fast": ("gelu", "stepwise"),
    "gelu_tanh": ("gelu", ""),
    "gelu": ("gelu", "form = erf"),
    "gelu_python": ("gelu", "form = erf"),
    "quick_gelu": ("gelu", "form = quick, stepwise"),
    "relu": ("relu", ""),
    "relu2": ("relu2", ""),
}


def activated(activation: str) -> str:
    """The operation of an activation on `{}`."""
    op, form = ACTIVATIONS[activation]
    statics = f"[{form}]" if form else ""
    return f"stg.{'relu' if op == 'relu2' else op}{statics}({{}})"


def activation_options(activation: str, *, gated: bool = False, default: str = "") -> Iterator[str]:
    """The options of a block for its activation (GELU or the `default` without an option), or for
    that of its gate (SiLU without an option)."""
    op, form = ACTIVATIONS[activation]
    default = default or ("silu" if gated else "gelu")
    yield from [f"{'gate' if gated else 'activation'} = {op}"] if op != default else []
    yield from [f"form = ({form})"] if form else []


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward block of the width F, or another symbol, with or without a gate. With
    `packed`, model code computes gate and up by one product; with `as_weights`, without a gate, it
    casts to the type of its weights before the second; `bounds` are further static parameters of
    the gate."""

    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    packed: bool = False
    as_weights: bool = False
    bounds: tuple[str, ...] = ()
    width: str = "F"

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        chosen = activation_options(self.activation, gated=self.gated)
        name = "swiglu" if self.gated else "mlp"
        statics = [*self.bounds, *["joined"] * self.packed]
        joined = [f"packed = ({', '.join(statics)})"] if statics else []
        width = [f"F = {self.width}"] if self.width != "F" else []
        casts = ["down = (as_weights)"] * (self.as_weights and not self.gated)
        given = (*width, *chosen, *joined, *["bias"] * self.bias, *casts)
        return text.use(name, f"D {self.width}", *given)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of E experts of width M, of which each token uses T.

    `route` are the static parameters of `stg.route` except k; `choice_bias` is the role of a bias
    that only affects the choice, if there is one; `router_bias` adds a bias to the logits.
    `statics` are parameters of the activation; with `bias` both products of an expert have one.
    With `scaled_inputs` the input of an expert is multiplied by its weight, in place of its result,
    and T is 1. If `narrow`, experts work on a projection of the width U; with `narrow_norm` their
    sum has an RMSNorm there. `shared` is a block of width F_shared for all tokens; with
    `shared_gate` it is multiplied by its own sigmoid for each token. `halved`, the sum is the
    average of experts and shared block; with `out_norm` it has an RMSNorm.
    """

    route: tuple[str, ...] = ("normalize",)
    choice_bias: Literal["", "state", "frozen"] = ""
    activation: str = "silu"
    gated: bool = True
    statics: tuple[str, ...] = ()
    router_bias: bool = False
    bias: bool = False
    scaled_inputs: bool = False
    shared: FeedForward | None = None
    shared_gate: bool = False
    narrow: bool = False
    narrow_norm: bool = False
    out_norm: bool = False
    halved: bool = False

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        text.assume("E >= T")
        symbols = ["D M E T", *["F_shared"] * bool(self.shared), *["U"] * self.narrow]
        return text.use("moe", " ".join(symbols), *self._options())

    def _options(self) -> Iterator[str]:
        op, form = ACTIVATIONS[self.activation]
        statics = [*self.statics, *([form] if form else [])]
        if self.route != ("normalize",):
            yield f"route = ({', '.join(self.route)})" if self.route else "route = no"
        yield from ["router_bias"] if self.router_bias else []
        yield from [f"choice_bias = {self.choice_bias}"] if self.choice_bias else []
        yield from [] if self.gated else ["gated = no"]
        yield from [f"activation = {op}"] if op != "silu" else []
        yield from [f"form = ({', '.join(statics)})"] if statics else []
        yield from ["bias"] if self.bias else []
        yield from ["weighted = inputs"] if self.scaled_inputs else []
        yield from ["narrow"] if self.narrow else []
        yield from ["narrow_norm"] if self.narrow_norm else []
        if self.shared:
            yield "shared = gated" if self.shared_gate else "shared"
        yield from ["out_norm"] if self.out_norm else []
        yield from ["halved"] if self.halved else []
