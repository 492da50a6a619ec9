"""Blocks of decoder-only models: a text of the library where one fits, else a function of its own.

Each block maps the normed stream of width D to what is added to the stream; `write` adds it to a
text and tells its name. Norms stand in the layers (`stack`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from stagec.importers.writing.text import Body, ModelText

#: Letters of a line from which on an operation that stands twice has a function.
_LONG = 200


class Block(Protocol):
    """A block of a layer. Equal blocks are written once."""

    def write(self, text: ModelText, kind: str = "") -> str:
        """Add the block to the text; its name, which begins with that of the kind of layers where
        only these have it."""
        ...


def joined(kind: str, name: str) -> str:
    """The name of a block of a kind of layers."""
    return f"{kind}_{name}" if kind else name


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension: RMSNorm with a scale, or LayerNorm with a scale and a bias.
    `affine` are the vectors that it has, if not those; with `zero_centered` the scale is 1 + w."""

    kind: Literal["rms", "layer"] = "rms"
    affine: Literal["full", "scale", "none"] = "full"
    zero_centered: bool = False

    def write(self, body: Body, out: str, x: str, name: str, dims: str = "D") -> str:
        """Append the norm of `x`, with parameters of this name; the result's name."""
        return body.let(out, self.step(body, name, dims).format(x))

    def step(self, body: Body, name: str, dims: str = "D") -> str:
        """The operation, on `{}`; its parameters are declared."""
        statics = [] if self.affine == "full" else [f"affine = {self.affine}"]
        statics = (["zero_centered"] if self.zero_centered else []) + statics
        brackets = f"[{', '.join(statics)}]" if statics else ""
        with_bias = self.kind == "layer" and self.affine == "full"
        operands = ["{}"]
        if self.affine != "none":
            operands.append(body.param(f"{name}_w" if with_bias else name, dims))
        if with_bias:
            operands.append(body.param(f"{name}_b", dims))
        op = "rmsnorm" if self.kind == "rms" else "layernorm"
        return f"stg.{op}{brackets}({', '.join(operands)})"


RMS = Norm()
LAYER = Norm("layer")
LAYER_SCALE = Norm("layer", "scale")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: the symbol of their base, and how many first elements of a head are
    rotated, or last ones; pairs are the two halves of these, or neighbours. `scaling` are the
    static parameters that stretch the frequencies. With `sections`, static parameters too, the
    positions are data, an operand `%places` of the block. What is rotated may be `cached` in place
    of what follows from it; `inverse` rotates the other way."""

    base: str = "theta"
    part: str | None = None
    interleaved: bool = False
    scaling: str = ""
    last: bool = False
    sections: str = ""
    cached: bool = False
    inverse: bool = False

    def step(self) -> str:
        """The operation, on `{}`."""
        words = [f"base = {self.base}"]
        if self.part:
            words.append(f"{'last' if self.last else 'first'} = {self.part}")
        words += ["interleaved"] if self.interleaved else []
        words += ["inverse"] if self.inverse else []
        words += ["cached"] if self.cached else []
        words += [word for word in (self.scaling, self.sections) if word]
        places = ", %places" if self.sections else ""
        return f"stg.rope[{', '.join(words)}]({{}}{places})"

    def brief(self, text: ModelText, name: str) -> str:
        """The operation, or a call of a function that has it if it is long, for `name`."""
        step = self.step()
        if len(step) < _LONG or self.sections:
            return step
        body = Body()
        body.do(f"stg.return({body.let('y', step.format('%x'))})")
        called = text.function(self.base.replace("theta", "turned"), "%x", body)
        return f"stg.call @{called}[as = {name}]({{}})"


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of H query heads of K over G heads of keys and values; `groups` is "H" where there
    are as many. `qk_norm` normalises queries and keys before their rotation, or `after_rope`: each
    head, each head by a scale of its own (`heads`), or all heads as one row (`together`). `mask`
    are the static parameters of `stg.attention`; with `sinks` each head has a logit of its own
    besides. `queries` and `values` are operations on `{}` that these go through at last; heads of
    values have `value_dim` elements. What attention gives is multiplied by a sigmoid of the input
    if it is `gated`, and normed as one row by `out_norm`."""

    groups: str = "G"
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    norm_dims: Literal["head", "heads", "together"] = "head"
    after_rope: bool = False
    rope: Rope | None = Rope()
    mask: str = "causal"
    sinks: bool = False
    queries: str = ""
    gated: bool = False
    out_norm: Norm | None = None
    value_dim: str = "K"
    values: str = ""

    def write(self, text: ModelText, kind: str = "") -> str:
        """Add the block; its name."""
        if self == Attention():
            return text.use("gqa", "D H G K theta")
        body = Body()
        q = self._projected(text, body, "q", "H", "h")
        letter = "h" if self.groups == "H" else "g"
        k = self._projected(text, body, "k", self.groups, letter)
        v = self._projected(text, body, "v", self.groups, letter)
        operands = [q, k, v]
        if self.sinks:
            operands.append(body.param("sinks", "H"))
        mask = f"{self.mask}, sinks" if self.sinks else self.mask
        a = body.let("a", f"stg.attention[{mask}]({', '.join(operands)})")
        if self.gated:
            weight = body.param("wg", f"D, H, {self.value_dim}")
            steps = [f'stg.einsum["bsd,dhk->bshk"]({{}}, {weight})', "stg.sigmoid({})"]
            a = body.let("m", f"stg.mul({a}, {body.steps('g', '%x', steps)})")
        steps = _as_row(self.out_norm, body, "out_norm", "H", "h") if self.out_norm else []
        steps.append(
            f'stg.einsum["bshk,hkd->bsd"]({{}}, {body.param("wo", f"H, {self.value_dim}, D")})'
        )
        if self.out_bias:
            steps.append(f'stg.add["bsd,d->bsd"]({{}}, {body.param("bo", "D")})')
        body.do(f"stg.return({body.steps('o', a, steps)})")
        args = "%x, %places" if self.rope and self.rope.sections else "%x"
        return text.function(joined(kind, "attention"), args, body)

    def _projected(self, text: ModelText, body: Body, out: str, heads: str, letter: str) -> str:
        dim = self.value_dim if out == "v" else "K"
        weight = body.param(f"w{out}", f"D, {heads}, {dim}")
        steps = [f'stg.einsum["bsd,d{letter}k->bs{letter}k"]({{}}, {weight})']
        if self.qkv_bias:
            bias = body.param(f"b{out}", f"{heads}, {dim}")
            steps.append(f'stg.add["bs{letter}k,{letter}k->bs{letter}k"]({{}}, {bias})')
        if out != "v":
            norm = self._normed(body, f"{out}_norm", heads, letter)
            rope = [self.rope.brief(text, out)] if self.rope else []
            steps += [*rope, *norm] if self.after_rope else [*norm, *rope]
        if out == "q" and self.queries:
            steps.append(self.queries)
        if out == "v" and self.values:
            steps.append(self.values)
        return body.steps(out, "%x", steps)

    def _normed(self, body: Body, name: str, heads: str, letter: str) -> list[str]:
        if self.qk_norm is None:
            return []
        if self.norm_dims == "head":
            return [self.qk_norm.step(body, name, "K")]
        if self.norm_dims == "heads":
            plain = replace(self.qk_norm, affine="none")
            weight = body.param(name, f"{heads}, K")
            rule = f"bs{letter}k,{letter}k->bs{letter}k"
            return [plain.step(body, name), f'stg.einsum["{rule}"]({{}}, {weight})']
        return _as_row(self.qk_norm, body, name, heads, letter)


def _as_row(norm: Norm, body: Body, name: str, heads: str, letter: str) -> list[str]:
    """The steps of a norm of all heads as one row."""
    return [
        f'stg.reshape["bs{letter}k->bs({letter}k)"]({{}})',
        norm.step(body, name, f"{heads}*K"),
        f'stg.reshape["bs({letter}k)->bs{letter}k", factors = k, sizes = K]({{}})',
    ]


#: Activations of configurations, by the op on `{}`.
ACTIVATIONS = {
    "silu": "stg.silu({})",
    "swish": "stg.silu({})",
    "gelu_new": "stg.gelu({})",
    "gelu_pytorch_tanh": "stg.gelu({})",
    "gelu_fast": "stg.gelu({})",
    "gelu_tanh": "stg.gelu({})",
    "gelu": "stg.gelu[form = erf]({})",
    "gelu_python": "stg.gelu[form = erf]({})",
    "quick_gelu": "stg.gelu[form = quick]({})",
    "relu": "stg.relu({})",
    "relu2": "stg.relu({})",
}
#: The same with a gate, on what holds gate and up in dimension 1.
GATED = {
    name: op.replace("stg.silu", "stg.swiglu").replace("stg.gelu", "stg.geglu")
    for name, op in ACTIVATIONS.items()
    if "relu" not in name
}


def activated(body: Body, u: str, activation: str, gated: bool) -> str:
    """Append the activation `%m` of `u`, which holds gate and up in dimension 1 if `gated`."""
    if gated:
        return body.let("m", GATED[activation].format(u))
    if activation == "relu2":
        r = body.let("r", f"stg.relu({u})")
        return body.let("m", f"stg.mul({r}, {r})")
    return body.let("m", ACTIVATIONS[activation].format(u))


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward block of the width F, with a gate or without one."""

    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def write(self, text: ModelText, kind: str = "") -> str:
        """Add the block; its name."""
        if self.gated and not self.bias and "swiglu" in GATED[self.activation]:
            return text.use("swiglu", "D F")
        body = Body()
        m = activated(body, body.steps("u", "%x", self._up(body)), self.activation, self.gated)
        steps = [f'stg.einsum["bsf,fd->bsd"]({{}}, {body.param("w_down", "F, D")})']
        if self.bias:
            steps.append(f'stg.add["bsd,d->bsd"]({{}}, {body.param("b_down", "D")})')
        body.do(f"stg.return({body.steps('y', m, steps)})")
        return text.function(joined(kind, self.name), "%x", body)

    @property
    def name(self) -> str:
        """What the block is called: swiglu, geglu, or mlp without a gate."""
        if not self.gated:
            return "mlp"
        return "swiglu" if "swiglu" in GATED[self.activation] else "geglu"

    def _up(self, body: Body) -> list[str]:
        if self.gated:
            weight = body.param("w_gate_up", "D, 2, F")
            steps = [f'stg.einsum["bsd,dzf->bzsf"]({{}}, {weight})']
            rule, dims = "bzsf,zf->bzsf", "2, F"
        else:
            steps = [f'stg.einsum["bsd,df->bsf"]({{}}, {body.param("w_up", "D, F")})']
            rule, dims = "bsf,f->bsf", "F"
        if self.bias:
            steps.append(f'stg.add["{rule}"]({{}}, {body.param("b_up", dims)})')
        return steps


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of E experts of width M, of which each token takes T.

    `route` are the static parameters of `stg.route` besides k; `choice_bias` is the role of a bias
    that counts for the choice only, if there is one, `router_bias` one of the logits. `statics` are
    parameters of the gate's activation; `bias` says that both products of an expert have one. With
    `scaled_inputs` an expert
    takes the token times its weight, in place of its result; T is 1 then. `shared` is a block of
    width F_shared that every token takes; with `shared_gate` it is multiplied by a sigmoid of its
    own for each token.
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

    def write(self, text: ModelText, kind: str = "") -> str:
        """Add the block; its name."""
        text.assume("E >= T")
        if self == Experts():
            return text.use("moe", "D M E T")
        experts = self._write_experts(text)
        body = Body()
        router = body.param("router", "D, E")
        bias = (
            body.param("bias", "E", dtype="f32", role=self.choice_bias) if self.choice_bias else ""
        )
        steps = [f'stg.einsum["bsd,de->bse"]({{}}, {router})']
        if self.router_bias:
            steps.append(f'stg.add["bse,e->bse"]({{}}, {body.param("router_bias", "E")})')
        logits = body.steps("logits", "%x", steps)
        route = ", ".join(["k = T", *self.route])
        operands = ", ".join(filter(None, (logits, bias)))
        body.do(f"%weights, %chosen = stg.route[{route}]({operands})")
        out = "routed" if self.shared else "y"
        y = body.let(out, f"stg.call @{experts}(%x, %weights, %chosen)")
        if self.shared:
            y = body.let("y", f"stg.add({y}, {self._write_shared(text, body, self.shared)})")
        body.do(f"stg.return({y})")
        return text.function("moe", "%x", body)

    def _write_experts(self, text: ModelText) -> str:
        special = self.statics or self.bias or self.scaled_inputs
        if self.gated and "swiglu" in GATED[self.activation] and not special:
            return text.use("experts", "D M E T")
        body = Body()
        x = "%x"
        if self.scaled_inputs:
            w = body.steps("w", "%weights", ['stg.sum["bsk->bs"]({})', "stg.cast[bf16]({})"])
            x = body.let("scaled", f'stg.einsum["bsd,bs->bsd"](%x, {w})')
        xs = body.let("xs", f"stg.dispatch[count = E]({x}, %chosen)")
        if self.gated:
            weight = body.param("w_gate_up", "E, D, 2, M")
            steps = [f'stg.einsum["ebcd,edzm->ezbcm"]({{}}, {weight})']
            if self.bias:
                bias = body.param("b_gate_up", "E, 2, M")
                steps.append(f'stg.add["ezbcm,ezm->ezbcm"]({{}}, {bias})')
        else:
            steps = [f'stg.einsum["ebcd,edm->ebcm"]({{}}, {body.param("w_up", "E, D, M")})']
        u = body.steps("u", xs, steps)
        if self.statics:
            gate = GATED[self.activation].replace("(", f"[{', '.join(self.statics)}](")
            m = body.let("m", gate.format(u))
        else:
            m = activated(body, u, self.activation, self.gated)
        steps = [f'stg.einsum["ebcm,emd->ebcd"]({{}}, {body.param("w_down", "E, M, D")})']
        if self.bias:
            steps.append(f'stg.add["ebcd,ed->ebcd"]({{}}, {body.param("b_down", "E, D")})')
        operands = [body.steps("ys", m, steps), "%chosen"]
        operands += [] if self.scaled_inputs else ["%weights"]
        y = body.let("y", f"stg.combine({', '.join(operands)})")
        body.do(f"stg.return({y})")
        return text.function("experts", "%x, %weights, %chosen", body)

    def _write_shared(self, text: ModelText, body: Body, shared: FeedForward) -> str:
        call = f"stg.call @{shared.write(text)}[F = F_shared, as = shared](%x)"
        if not self.shared_gate:
            return body.let("shared", call)
        s = body.let("s", call)
        gate = f'stg.einsum["bsd,d->bs"](%x, {body.param("shared_gate", "D")})'
        g = body.let("g", f"stg.sigmoid({body.let('g0', gate)})")
        return body.let("shared", f'stg.einsum["bsd,bs->bsd"]({s}, {g})')
