"""Swin and Swin V2: encoders of images in stages, with attention in shifted windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagec.importers.families.encoders import read_activation
from stagec.importers.families.pyramids import (
    IMAGES,
    at,
    begin_pyramid,
    finish,
    pooled,
    side_of,
    stem,
)
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, activation_options
from stagec.importers.writing.text import Body, Callee, ModelText


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stages of a model, numbered from 1: patches along a side, and those of a window; `layer`
    is the block of a layer. With `second_version` biases are computed from distances (Swin V2)."""

    layer: Callee
    sides: Sequence[int]
    windows: Sequence[int]
    second_version: bool

    def shifts(self, stage: int) -> bool:
        """Whether every second layer is shifted."""
        return self.sides[stage - 1] > self.windows[stage - 1]

    def first(self, stage: int) -> int:
        """The first stage with windows of the same size, which names their symbols and
        arguments."""
        return self.windows.index(self.windows[stage - 1]) + 1

    def pairs(self, stage: int) -> str:
        """The operands of the layers of a stage in addition to the stream."""
        names = ["%coords", "%pairs"] if self.second_version else ["%pairs"]
        return ", ".join(at(name, self.first(stage)) for name in names)


@reads("Swin", "swin", features="attention in shifted windows, in stages")
def read_swin(config: Config) -> ModelText:
    """Swin (arXiv 2103.14030): attention in windows, which every second layer shifts by half a
    window; 2 x 2 elements are merged between stages."""
    return _swin(config, second_version=False)


@reads("Swin V2", "swinv2", features="Swin with cosines, biases made of distances")
def read_swinv2(config: Config) -> ModelText:
    """Swin V2 (arXiv 2111.09883): norms after the parts, cosines for scores, biases that a small
    network computes from distances."""
    config.skip("pretrained_window_sizes")
    return _swin(config, second_version=True)


def _swin(config: Config, *, second_version: bool) -> ModelText:
    depths = config.sizes("depths", least=1) or (2, 2, 6, 2)
    count = len(depths)
    heads = config.sizes("num_heads", length=count, least=1) or (3, 6, 12, 24)
    if len(heads) != count:
        raise config.wrong("depths", f"{len(heads)} numbers of layers, one for each stage")
    width = config.size("embed_dim", default=96)
    config.fixed(hidden_size=width << (count - 1), num_layers=count, use_absolute_embeddings=False)
    config.skip("stage_names", "out_features", "out_indices", "drop_path_rate", "encoder_stride")
    config.skip("path_norm")
    text = begin_pyramid(config, [width << i for i in range(count)], depths)
    window = config.count("window_size", default=7, least=2)
    ratio = config.positive("mlp_ratio", default=4)
    sides = [text.value("X") >> i for i in range(count)]
    windows = [min(side, window) for side in sides]
    for i, (number, side) in enumerate(zip(heads, sides, strict=True), 1):
        d = width << (i - 1)
        if d % number:
            raise config.refuse("num_heads", f"has {number}, which does not divide {d}")
        config.divides("window_size", windows[i - 1], side, "patches")
        if side > window and depths[i - 1] % 2:
            raise config.refuse(
                "depths",
                f"has {depths[i - 1]}: expected an even number, as every second layer shifts",
            )
        text.symbol(at("H", i), number, f"heads of stage {i}")
        text.symbol(at("K", i), d // number, "width / heads")
        text.symbol(at("F", i), int(ratio * d), "mlp_ratio * width")
        if i == 1 or windows[i - 1] != windows[0]:
            text.symbol(at("W", i), windows[i - 1], "window_size, or all of the image")
            text.symbol(at("U", i), windows[i - 1] // 2, "half a window, rounded down")
    biased = config.flag("qkv_bias", default=True)
    act = read_activation(config, "hidden_act")
    options = [*activation_options(act), *["bias = no"] * (not biased)]
    used = f"D H K F X W {'U' * any(s > w for s, w in zip(sides, windows, strict=True))}"
    layer = text.use("swin", used, *options, function="swin2" if second_version else "swin")
    stages = _Stages(layer, sides, windows, second_version)
    body = Body()
    x = stem(text, body)
    for i in range(1, count + 1):
        if i > 1:
            given = [
                f"C = {at('D', i - 1)}",
                f"D = {at('D', i)}",
                *["norm = behind"] * second_version,
            ]
            merged = text.use("swin", "", *given, f"as = merged_{i}", function="swin_merged")
            x = body.call(f"x_{i}", merged, x)
        x = _stage(stages, body, x, i)
    last = at("D", count)
    c = pooled(text, body, LAYER.write(body, "n", x, "norm", last), side_of(count))
    text.notes.append("%pairs are the rows of the tables of biases, by the places in a window;")
    if second_version:
        text.notes.append("%coords are the distances of these rows, on a logarithmic scale;")
    text.notes.append("the masks hide pairs that are no neighbours in shifted windows (-100).")
    return finish(config, text, body, c, last, IMAGES + _data(stages))


def _data(stages: _Stages) -> str:
    """The arguments in addition to images."""
    arguments = ""
    for i in range(1, len(stages.sides) + 1):
        w, side = at("W", stages.first(i)), side_of(i)
        if stages.first(i) == i:
            rows = f"(2*{w} - 1)*(2*{w} - 1)"
            arguments += f", {at('%coords', i)}: bf16[{rows}, 2]" if stages.second_version else ""
            arguments += f", {at('%pairs', i)}: i32[{w}*{w}, {w}*{w}]"
        if stages.shifts(i):
            arguments += f", %mask_{i}: bf16[{side}*{side}/({w}*{w}), {w}*{w}, {w}*{w}]"
    return arguments


def _stage(stages: _Stages, body: Body, x: str, stage: int) -> str:
    """Append the layers of a stage, and return the name of the result."""
    own = {n: at(n, stage) for n in "DHKF"} | {"X": side_of(stage)}
    window = {n: at(n, stages.first(stage)) for n in "WU"}
    bound = [f"{n} = {its}" for n, its in {**own, "W": window["W"]}.items() if n != its]
    half = [] if window["U"] == "U" else [f"U = {window['U']}"]
    pairs, inner = stages.pairs(stage), Body()
    plain = stages.layer.with_(*bound)
    if stages.shifts(stage):
        r = inner.let("r0", f"stg.call @{plain.with_('as = whole')}(%h, {pairs})")
        shifted = plain.with_(*half, "shifted", "as = shifted")
        r = inner.call("r", shifted, r, pairs, f"%mask_{stage}")
        times = f"{at('L', stage)}/2"
    else:
        r = inner.call("r", plain, "%h", pairs)
        times = at("L", stage)
    inner.do(f"stg.yield({r})")
    return body.repeat(f"%y_{stage}", f"stage_{stage}", times, f"%h = {x}", inner)
