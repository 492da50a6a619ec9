"""Blocks of state-space layers and of linear attention, and the readers of their keys.

Heads of these layers are H_m, of P, in G_m groups; channels of Mamba-1 are I.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from stagec.importers.common.sizes import begin, read_head, read_size
from stagec.importers.reading.config import Config
from stagec.importers.writing.stack import ONE, times
from stagec.importers.writing.text import Callee, ModelText


@dataclass(frozen=True, slots=True)
class Mamba1:
    """A layer of Mamba-1; `norms` are those of step sizes, B and C, with or without a scale."""

    bias: bool = False
    conv_bias: bool = True
    norms: Literal["no", "scale", "plain"] = "no"

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        given = ["bias"] if self.bias else []
        given += [] if self.conv_bias else ["conv_bias = no"]
        given += [f"norms = {self.norms}"] if self.norms != "no" else []
        return text.use("mamba", "D I N R W", *given)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A layer of Mamba-2; `grouped` if there are several B and C. The norm after the gate is of
    all heads together, of each group, or there is none. `scales` multiply z, x, B, C and the step
    sizes, as projected."""

    grouped: bool = False
    norm: Literal["all", "groups", "no"] = "all"
    bias: bool = False
    conv_bias: bool = True
    scales: tuple[Fraction, ...] = (ONE,) * 5

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        if self.grouped:
            text.assume("H_m % G_m == 0")
        symbols = "D H_m P N Q W G_m" if self.grouped else "D H_m P N Q W"
        return text.use("mamba2", symbols, *self._options())

    def _options(self) -> Iterator[str]:
        yield from ["grouped"] if self.grouped else []
        yield from [f"norm = {self.norm}"] if self.norm != "all" else []
        yield from ["bias"] if self.bias else []
        yield from [] if self.conv_bias else ["conv_bias = no"]
        for name, by in zip(("z", "u", "b", "c", "dt"), self.scales, strict=True):
            yield from [f"{name}_scale = ({times(by)})"] if by != 1 else []


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta net."""

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        text.assume("H_m % G_m == 0")
        return text.use("gated_delta", "D H_m G_m K_m P Q W")


@dataclass(frozen=True, slots=True)
class Lightning:
    """Lightning attention."""

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        return text.use("lightning", "D H K Q")


# -- keys ------------------------------------------------------------------------------------------


def read_mamba1(config: Config, text: ModelText, prefix: str = "", **more: str) -> Mamba1:
    """Mamba-1 by its keys, which have a prefix in hybrids; declares I, N, R and W."""
    d = text.value("D")
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
    """The keys of Mamba-2, whose names differ between families."""

    heads: str = "mamba_n_heads"
    size: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    conv: str = "mamba_d_conv"
    chunk: str = "mamba_chunk_size"
    bias: str = "mamba_proj_bias"
    conv_bias: str = "mamba_conv_bias"
    expand: str = "expand"

    @classmethod
    def of(cls, keys: str) -> Mamba2Keys:
        """The keys in this order; missing last ones have the usual names."""
        return cls(*keys.split())


PLAIN = Mamba2Keys.of(
    "num_heads head_dim n_groups state_size conv_kernel chunk_size use_bias use_conv_bias"
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
    norm: Literal["all", "groups", "no"] = "all",
    inner: int | None = None,
) -> Mamba2:
    """Mamba-2 by these keys; declares H_m, P, G_m, N, W and Q. The arguments are defaults of
    missing keys; `inner` is the width of all heads, if not `expand` times that of the model."""
    h = read_size(config, text, "H_m", keys.heads, default=heads)
    inner = inner or config.size(keys.expand, default=2) * text.value("D")
    if config.is_text(keys.size) or not config.has(keys.size):
        config.word(keys.size, among=("auto",), default="auto")
        config.divides(keys.heads, h, inner)
        text.symbol("P", inner // h, f"{keys.expand} * hidden_size / {keys.heads}")
    else:
        read_size(config, text, "P", keys.size)
    g = config.size(keys.groups, default=groups)
    config.divides(keys.groups, g, h, "heads")
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
    """Ignore the keys of the initialization and the bounds of step sizes."""
    config.skip("time_step_min", "time_step_max", "time_step_floor", "time_step_scale")
    config.skip("time_step_rank", "time_step_init_scheme")
    if config.names("time_step_limit"):
        text.notes.append("Left out: step sizes are clamped to time_step_limit.")


def begin_scans(config: Config, width: int, layers: int, vocab: int) -> tuple[ModelText, int]:
    """The text of a model without attention, and the number of its layers."""
    text, _ = begin(config, 4096)
    read_head(config, text)
    read_size(config, text, "D", "hidden_size", "d_model", default=width)
    read_size(config, text, "V", "vocab_size", default=vocab)
    config.only("hidden_act", "silu")
    return text, config.layers("num_hidden_layers", "n_layer", default=layers)
