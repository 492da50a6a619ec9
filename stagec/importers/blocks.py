"""Blocks of decoder-only models, each written as one private function of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stagec.importers.text import Body, ModelText


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension: RMSNorm, or LayerNorm with or without a bias; `one_plus`
    where the weight is stored as its difference to 1."""

    kind: Literal["rms", "layer"] = "rms"
    bias: bool = True
    weight: bool = True
    one_plus: bool = False

    def write(self, body: Body, out: str, x: str, name: str, dims: str = "D") -> str:
        """Append the norm of `x`, with parameters of this name; the result's name."""
        if self.kind == "rms":
            return body.let(out, f"stg.rmsnorm({x}, {body.param(name, dims)})")
        weight = body.param(f"{name}_w", dims)
        bias = body.param(f"{name}_b", dims)
        return body.let(out, f"stg.layernorm({x}, {weight}, {bias})")


RMS = Norm()
LAYER = Norm("layer")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: the symbol of their base, and how many elements of a head are rotated."""

    base: str = "theta"
    last: str | None = None

    def step(self) -> str:
        """The operation, on `{}`."""
        last = f", last = {self.last}" if self.last else ""
        return f"stg.rope[base = {self.base}{last}]({{}})"


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention with H query heads of K and as many, or G, heads of keys and values.

    `norm` and `post_norm` stand before and behind it; `qk_norm` normalises queries and keys of each
    head. `mask` are the static parameters of `stg.attention`.
    """

    norm: Norm | None = RMS
    post_norm: Norm | None = None
    groups: str = "G"
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    rope: Rope | None = Rope()
    mask: str = "causal"

    def write(self, text: ModelText, name: str = "attention", comment: str = "") -> str:
        """Add the function; its name."""
        body = Body()
        x = self.norm.write(body, "n", "%x", "norm") if self.norm else "%x"
        q = self._projected(body, "q", x, "H", "h")
        key = "g" if self.groups == "G" else "h"
        k = self._projected(body, "k", x, self.groups, key)
        v = self._projected(body, "v", x, self.groups, key)
        a = body.let("a", f"stg.attention[{self.mask}]({q}, {k}, {v})")
        wo = body.param("wo", "H, K, D")
        steps = [f'stg.einsum["bshk,hkd->bsd"]({{}}, {wo})']
        if self.out_bias:
            steps.append(f'stg.add["bsd,d->bsd"]({{}}, {body.param("bo", "D")})')
        out = body.steps("o", a, steps)
        out = self.post_norm.write(body, "y", out, "post_norm") if self.post_norm else out
        body.do(f"stg.return({out})")
        text.function(name, "%x", body, comment)
        return name

    def _projected(self, body: Body, out: str, x: str, heads: str, letter: str) -> str:
        weight = body.param(f"w{out}", f"D, {heads}, K")
        steps = [f'stg.einsum["bsd,d{letter}k->bs{letter}k"]({{}}, {weight})']
        if self.qkv_bias:
            bias = body.param(f"b{out}", f"{heads}, K")
            steps.append(f'stg.add["bs{letter}k,{letter}k->bs{letter}k"]({{}}, {bias})')
        if out != "v" and self.qk_norm:
            steps.append(f"stg.rmsnorm({{}}, {body.param(f'{out}_norm', 'K')})")
        if out != "v" and self.rope:
            steps.append(self.rope.step())
        return body.steps(out, x, steps)


#: Activations of configurations, by the op on `{}`.
ACTIVATIONS = {
    "silu": "stg.silu({})",
    "swish": "stg.silu({})",
    "gelu_new": "stg.gelu({})",
    "gelu_pytorch_tanh": "stg.gelu({})",
    "gelu_fast": "stg.gelu({})",
    "gelu_tanh": "stg.gelu({})",
}


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward block of the width `width`: with a gate, or without one."""

    activation: str = "silu"
    gated: bool = True
    norm: Norm | None = RMS
    post_norm: Norm | None = None
    bias: bool = False
    width: str = "F"

    def write(self, text: ModelText, name: str = "", comment: str = "") -> str:
        """Add the function; its name."""
        name = name or self.name
        body = Body()
        x = self.norm.write(body, "n", "%x", "norm") if self.norm else "%x"
        down = self.inner(body, x)
        down = self.post_norm.write(body, "y", down, "post_norm") if self.post_norm else down
        body.do(f"stg.return({down})")
        text.function(name, "%x", body, comment)
        return name

    @property
    def name(self) -> str:
        """What the block is called: swiglu, geglu, or mlp without a gate."""
        if not self.gated:
            return "mlp"
        return "swiglu" if self.activation in ("silu", "swish") else "geglu"

    def inner(self, body: Body, x: str, prefix: str = "") -> str:
        """Append the products and the activation; the result's name."""
        f, w = self.width, prefix
        if self.gated:
            up = [f'stg.einsum["bsd,dzf->bzsf"]({{}}, {body.param(f"{w}w_gate_up", f"D, 2, {f}")})']
            add, dims = "bzsf,zf->bzsf", f"2, {f}"
        else:
            up = [f'stg.einsum["bsd,df->bsf"]({{}}, {body.param(f"{w}w_up", f"D, {f}")})']
            add, dims = "bsf,f->bsf", f
        if self.bias:
            up.append(f'stg.add["{add}"]({{}}, {body.param(f"{w}b_up", dims)})')
        m = activated(body, body.steps(f"{w}u", x, up), self.activation, self.gated, f"{w}m")
        down = [f'stg.einsum["bsf,fd->bsd"]({{}}, {body.param(f"{w}w_down", f"{f}, D")})']
        if self.bias:
            down.append(f'stg.add["bsd,d->bsd"]({{}}, {body.param(f"{w}b_down", "D")})')
        return body.steps(f"{w}d", m, down)


def activated(body: Body, u: str, activation: str, gated: bool, out: str) -> str:
    """Append the activation of `u`, which holds gate and up in dimension 1 if `gated`."""
    if not gated:
        return body.let(out, ACTIVATIONS[activation].format(u))
    if activation in ("silu", "swish"):
        return body.let(out, f"stg.swiglu({u})")
    body.do(f"%{out}_gate, %{out}_up = stg.unbind[dim = 1, count = 2]({u})")
    gate = body.let(f"{out}_act", ACTIVATIONS[activation].format(f"%{out}_gate"))
    return body.let(out, f"stg.mul({gate}, %{out}_up)")


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of E experts of width M, of which each token takes T.

    `route` are further static parameters of `stg.route`; `choice_bias` is the bias that counts for
    the choice only. `shared` is the block that every token takes, and `shared_gate` its sigmoid.
    """

    route: str = ", normalize"
    choice_bias: bool = False
    activation: str = "silu"
    gated: bool = True
    norm: Norm | None = RMS
    shared: FeedForward | None = None

    def write(self, text: ModelText, name: str = "experts", comment: str = "") -> str:
        """Add the function; its name."""
        body = Body()
        x = self.norm.write(body, "n", "%x", "norm") if self.norm else "%x"
        routed = self._routed(body, x)
        if self.shared:
            routed = body.let("d", f"stg.add({routed}, {self.shared.inner(body, x, 's_')})")
        body.do(f"stg.return({routed})")
        text.assume("E >= T")
        text.function(name, "%x", body, comment)
        return name

    def _routed(self, body: Body, x: str) -> str:
        rl = body.let("rl", f'stg.einsum["bsd,de->bse"]({x}, {body.param("router", "D, E")})')
        bias = ""
        if self.choice_bias:
            bias = ", " + body.param("bias", "E", dtype="f32", role="state")
        body.do(f"%weights, %experts = stg.route[k = T{self.route}]({rl}{bias})")
        xs = body.let("xs", f"stg.dispatch[count = E]({x}, %experts)")
        if self.gated:
            up = f'stg.einsum["ebcd,edzm->ezbcm"]({xs}, {body.param("w_gate_up", "E, D, 2, M")})'
        else:
            up = f'stg.einsum["ebcd,edm->ebcm"]({xs}, {body.param("w_up", "E, D, M")})'
        m = activated(body, body.let("u", up), self.activation, self.gated, "m")
        down = f'stg.einsum["ebcm,emd->ebcd"]({m}, {body.param("w_down", "E, M, D")})'
        ys = body.let("ys", down)
        return body.let("r" if self.shared else "d", f"stg.combine({ys}, %experts, %weights)")


@dataclass(frozen=True, slots=True)
class Layer:
    """A kind of layers: its blocks in order, each of which adds to the residual stream; with
    `parallel` all of them read what comes in, under a common `norm` if there is one."""

    blocks: Sequence[str]
    parallel: bool = False
    norm: Norm | None = None

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`; the result's name."""
        if self.parallel:
            n = self.norm.write(body, "n", x, "norm") if self.norm else x
            parts = [body.let(part_name(block), f"stg.call @{block}({n})") for block in self.blocks]
            return body.let("r", f"stg.add({', '.join([x, *parts])})")
        for number, block in enumerate(self.blocks, 1):
            part = body.let(part_name(block), f"stg.call @{block}({x})")
            x = body.let(f"r{number}", f"stg.add({x}, {part})")
        return x


def part_name(block: str) -> str:
    """The value that a block of a layer makes: a of attention, m of what follows it."""
    return "m" if block in ("swiglu", "geglu", "mlp", "experts") else block[0]
