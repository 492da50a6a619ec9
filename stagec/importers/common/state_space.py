"""Blocks of state-space layers and of linear attention, and the keys that they are made of.

Heads of these layers are H_m, of P, in G_m groups; channels of Mamba-1 are I.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from stagec.importers.common.heads import read_head
from stagec.importers.common.sizes import begin, read_size
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import joined
from stagec.importers.writing.stack import ONE, scaled
from stagec.importers.writing.text import Body, Callee, ModelText


@dataclass(frozen=True, slots=True)
class Mamba1:
    """A layer of Mamba-1; `norms` are those of step sizes, B and C: with a scale, or without."""

    bias: bool = False
    conv_bias: bool = True
    norms: Literal["", "full", "none"] = ""

    def write(self, text: ModelText, kind: str = "") -> Callee:
        """Add the block; its name."""
        if self == Mamba1():
            return text.use("mamba", "D I N R W")
        body = Body()
        steps = [f'stg.einsum["bsd,dzi->bzsi"]({{}}, {body.param("w_in", "D, 2, I")})']
        if self.bias:
            steps.append(f'stg.add["bzsi,zi->bzsi"]({{}}, {body.param("b_in", "2, I")})')
        uz = body.steps("uz", "%x", steps)
        body.do(f"%u0, %z = stg.unbind[dim = 1, count = 2]({uz})")
        u = body.let("u", convolved(body, "conv", "I", self.conv_bias).format("%u0"))
        w_x = body.param("w_x", "I, R + 2*N")
        rbc = body.let("rbc", f'stg.einsum["bsi,ic->bsc"]({u}, {w_x})')
        r, b, c = self._parts(body, rbc)
        dt = body.let("dt", f'stg.einsum["bsr,ri->bsi"]({r}, {body.param("w_dt", "R, I")})')
        bias, a_log = body.param("dt_bias", "I"), body.param("A_log", "I, N")
        operands = ", ".join([u, dt, a_log, b, c, body.param("skip", "I"), bias])
        y = body.let("y", f"stg.selective_scan({operands})")
        m = body.let("m", f"stg.mul({y}, {body.let('g', 'stg.silu(%z)')})")
        steps = [f'stg.einsum["bsi,id->bsd"]({{}}, {body.param("w_out", "I, D")})']
        if self.bias:
            steps.append(f'stg.add["bsd,d->bsd"]({{}}, {body.param("b_out", "D")})')
        body.do(f"stg.return({body.steps('o', m, steps)})")
        return text.function(joined(kind, "mamba"), "%x", body)

    def _parts(self, body: Body, rbc: str) -> Sequence[str]:
        """Step sizes, B and C."""
        names = ("r", "b", "c")
        if not self.norms:
            body.do(f"%r, %b, %c = stg.cut[sizes = (R, N, N)]({rbc})")
            return [f"%{n}" for n in names]
        body.do(f"%r0, %b0, %c0 = stg.cut[sizes = (R, N, N)]({rbc})")
        if self.norms == "none":
            return [body.let(n, f"stg.rmsnorm[affine = none](%{n}0)") for n in names]
        return [
            body.let(n, f"stg.rmsnorm(%{n}0, {body.param(f'{n}_norm', size)})")
            for n, size in zip(names, "RNN", strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A layer of Mamba-2; `grouped` if there are several B and C. The norm behind the gate is of
    all heads together, of each group, or there is none. `scales` multiply z, x, B, C and the step
    sizes, as projected."""

    grouped: bool = False
    norm: Literal["all", "groups", "none"] = "all"
    bias: bool = False
    conv_bias: bool = True
    scales: tuple[Fraction, ...] = (ONE,) * 5

    def write(self, text: ModelText, kind: str = "") -> Callee:
        """Add the block; its name."""
        if self.grouped:
            text.assume("H_m % G_m == 0")
        if self == Mamba2():
            return text.use("mamba2", "D H_m P N Q W")
        body = Body()
        group = ("G_m, N", "gn") if self.grouped else ("N", "n")
        shapes = {"u": ("H_m, P", "hp"), "b": group, "c": group}
        by = dict[str, Fraction](zip(("z", "u", "b", "c", "dt"), self.scales, strict=True))
        z = self._projected(body, "z", *shapes["u"], by["z"])
        for out, shape in shapes.items():
            x = self._projected(body, f"{out}0", *shape, by[out])
            conv = convolved(body, f"conv_{out}", shape[0], self.conv_bias)
            body.let(out, conv.format(x))
        dt = self._projected(body, "dt", "H_m", "h", by["dt"])
        names = ("dt_bias", "A_log", "skip")
        bias, a_log, skip = (body.param(n, "H_m") for n in names)
        y = body.let("y", f"stg.ssd[chunk = Q](%u, {dt}, {a_log}, %b, %c, {skip}, {bias})")
        g = body.let("g", f"stg.silu({z})")
        steps = [f"stg.mul({{}}, {g})", *self._normed(body)]
        m = body.steps("m", y, steps)
        steps = [f'stg.einsum["bshp,hpd->bsd"]({{}}, {body.param("w_out", "H_m, P, D")})']
        if self.bias:
            steps.append(f'stg.add["bsd,d->bsd"]({{}}, {body.param("b_out", "D")})')
        body.do(f"stg.return({body.steps('o', m, steps)})")
        return text.function(joined(kind, "mamba2"), "%x", body)

    def _projected(self, body: Body, out: str, dims: str, letters: str, by: Fraction) -> str:
        name = out.removesuffix("0")
        weight = body.param(f"w_{name}", f"D, {dims}")
        steps = [f'stg.einsum["bsd,d{letters}->bs{letters}"]({{}}, {weight})']
        if self.bias:
            bias = body.param(f"b_{name}", dims)
            steps.append(f'stg.add["bs{letters},{letters}->bs{letters}"]({{}}, {bias})')
        return body.steps(out, "%x", [*steps, *scaled(by)])

    def _normed(self, body: Body) -> list[str]:
        if self.norm == "none":
            return []
        if self.norm == "all":
            return together(body, "norm", "hp", "H_m*P", "p", "P")
        weight = body.param("norm", "G_m, H_m*P/G_m")
        return [
            'stg.reshape["bs(gh)p->bsg(hp)", factors = g, sizes = G_m]({})',
            "stg.rmsnorm[affine = none]({})",
            f'stg.einsum["bsgc,gc->bsgc"]({{}}, {weight})',
            'stg.reshape["bsg(hp)->bs(gh)p", factors = h, sizes = H_m/G_m]({})',
        ]


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta net."""

    def write(self, text: ModelText, kind: str = "") -> Callee:
        """Add the block; its name."""
        text.assume("H_m % G_m == 0")
        return text.use("gated_delta", "D H_m G_m K_m P Q W")


@dataclass(frozen=True, slots=True)
class Lightning:
    """Lightning attention."""

    def write(self, text: ModelText, kind: str = "") -> Callee:
        """Add the block; its name."""
        return text.use("lightning", "D H K Q")


def convolved(body: Body, name: str, channels: str, bias: bool, width: str = "W") -> str:
    """A causal convolution of `width` tokens with SiLU, on `{}`; its parameters are declared."""
    operands = ["{}", body.param(name, f"{channels}, {width}")]
    if bias:
        operands.append(body.param(f"{name}_bias", channels))
    return f"stg.causal_conv[silu]({', '.join(operands)})"


def together(body: Body, name: str, letters: str, dims: str, last: str, size: str) -> list[str]:
    """The steps of a norm over all heads as one row."""
    return [
        f'stg.reshape["bs{letters}->bs({letters})"]({{}})',
        f"stg.rmsnorm({{}}, {body.param(name, dims)})",
        f'stg.reshape["bs({letters})->bs{letters}", factors = {last}, sizes = {size}]({{}})',
    ]


# -- keys ------------------------------------------------------------------------------------------


def read_mamba1(config: Config, text: ModelText, prefix: str = "", **more: str) -> Mamba1:
    """Mamba-1 by its keys, which hybrids have with a prefix; declares I, N, R and W."""
    d = text.symbols["D"].value or 1
    state, conv = ("mamba_d_state", "mamba_d_conv") if prefix else ("state_size", "conv_kernel")
    times = config.size(f"{prefix}expand", default=2)
    inner = config.size("intermediate_size", default=times * d) if not prefix else times * d
    text.symbol("I", inner, f"{prefix}expand * hidden_size")
    read_size(config, text, "N", state, default=16)
    read_size(config, text, "W", conv, default=4)
    rank = f"{prefix}dt_rank" if prefix else "time_step_rank"
    if config.is_text(rank) or not config.has(rank):
        config.word(rank, among=("auto",), default="auto")
        text.symbol("R", -(-d // 16), f"{rank}: hidden_size / 16")
    else:
        read_size(config, text, "R", rank)
    return Mamba1(
        bias=config.flag(f"{prefix}proj_bias" if prefix else "use_bias", default=False),
        conv_bias=config.flag(f"{prefix}conv_bias" if prefix else "use_conv_bias", default=True),
    )


@dataclass(frozen=True, slots=True)
class Mamba2Keys:
    """The keys of Mamba-2, which families call differently."""

    heads: str = "mamba_n_heads"
    size: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    conv: str = "mamba_d_conv"
    chunk: str = "mamba_chunk_size"
    bias: str = "mamba_proj_bias"
    conv_bias: str = "mamba_conv_bias"
    expand: str = "expand"


PLAIN = Mamba2Keys(
    "num_heads",
    "head_dim",
    "n_groups",
    "state_size",
    "conv_kernel",
    "chunk_size",
    "use_bias",
    "use_conv_bias",
)
PREFIXED = Mamba2Keys(expand="mamba_expand")


def read_mamba2(
    config: Config,
    text: ModelText,
    keys: Mamba2Keys,
    *,
    heads: int,
    groups: int = 1,
    state: int = 128,
    norm: Literal["all", "groups", "none"] = "all",
    inner: int | None = None,
) -> Mamba2:
    """Mamba-2 by these keys; declares H_m, P, G_m, N, W and Q. The numbers are those of keys left
    out; `inner` is the width of all heads, if not `expand` times that of the model."""
    h = read_size(config, text, "H_m", keys.heads, default=heads)
    inner = inner or config.size(keys.expand, default=2) * (text.symbols["D"].value or 1)
    if config.is_text(keys.size) or not config.has(keys.size):
        config.word(keys.size, among=("auto",), default="auto")
        if inner % h:
            raise config.refuse(keys.heads, f"is {h}, which does not divide {inner}")
        text.symbol("P", inner // h, f"{keys.expand} * hidden_size / {keys.heads}")
    else:
        read_size(config, text, "P", keys.size)
    g = config.size(keys.groups, default=groups)
    if h % g:
        raise config.refuse(keys.groups, f"is {g}, which does not divide {h} heads")
    text.symbol("G_m", g, keys.groups)
    read_size(config, text, "N", keys.state, default=state)
    read_size(config, text, "W", keys.conv, default=4)
    read_size(config, text, "Q", keys.chunk, default=256)
    config.skip(keys.expand)
    skip_steps(config, text)
    return Mamba2(
        grouped=g > 1,
        norm="all" if norm == "groups" and g == 1 else norm,
        bias=config.flag(keys.bias, default=False),
        conv_bias=config.flag(keys.conv_bias, default=True),
    )


def skip_steps(config: Config, text: ModelText) -> None:
    """Keys of how step sizes begin, and of their bounds, which the kernel clamps them to."""
    config.skip(
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "time_step_scale",
        "time_step_rank",
        "time_step_init_scheme",
    )
    if config.names("time_step_limit"):
        text.notes.append("Left out: step sizes are clamped to time_step_limit.")


def begin_scans(
    config: Config, title: str, width: int, layers: int, vocab: int
) -> tuple[ModelText, int]:
    """The text of a model without attention, and how many layers it has."""
    text, _ = begin(config, title, 4096)
    read_head(config, text)
    read_size(config, text, "D", "hidden_size", "d_model", default=width)
    read_size(config, text, "V", "vocab_size", default=vocab)
    config.only("hidden_act", "silu")
    return text, config.layers("num_hidden_layers", "n_layer", default=layers)
