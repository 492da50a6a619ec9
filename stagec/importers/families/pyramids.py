"""Encoders of images in stages, each with fewer and wider elements than the previous one; those of
Swin have attention in shifted windows."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagec.importers.common.sizes import begin_text, is_bare
from stagec.importers.families.encoders import classify, read_activation, vectors
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, activation_options
from stagec.importers.writing.text import Body, Callee, ModelText
from stagec.importers.writing.towers import linear

IMAGES = "%images: bf16[B, C, X*P, X*P]"


def at(symbol: str, stage: int) -> str:
    """The symbol of a stage, without a number for the first one."""
    return f"{symbol}_{stage}" if stage > 1 else symbol


def side_of(stage: int) -> str:
    """The elements along a side of a stage."""
    return f"X/{1 << (stage - 1)}" if stage > 1 else "X"


def begin_pyramid(config: Config, widths: Sequence[int], depths: Sequence[int]) -> ModelText:
    """The text, with C, P and X of images, and D and L of each stage; X has to halve after each
    stage but the last one."""
    text = begin_text(config, "ImageClassification")
    text.symbol("C", config.size("num_channels", default=3), "num_channels")
    patch = text.symbols[text.symbol("P", config.side("patch_size", default=4), "patch_size")].value
    image = config.side("image_size", default=224)
    side, halves = image // (patch or 1), len(depths) - 1
    if side < 1 or side * (patch or 1) != image or side % (1 << halves):
        raise config.refuse("image_size", f"is {image}, not a multiple of {patch} * {1 << halves}")
    text.symbol("X", side, "patches along a side: image_size / patch_size")
    for i, (width, depth) in enumerate(zip(widths, depths, strict=True), 1):
        text.symbol(at("D", i), width, f"width of stage {i}")
        text.symbol(at("L", i), depth, f"layers of stage {i}")
    return text


def stem(text: ModelText, body: Body) -> str:
    """Append the patches of `%images` as a grid [B, X, X, D], normed, and return its name."""
    return body.let(
        "x", f"stg.call @{text.use('grids', 'C D P X', function='patch_grid')}(%images)"
    )


def pooled(text: ModelText, body: Body, y: str, side: str) -> str:
    """Append the mean over a grid [B, side, side, D], and return its name."""
    mean = text.use("grids", "X", f"X = {side}", function="grid_mean")
    return body.call("m", mean, y)


def finish(
    config: Config, text: ModelText, body: Body, c: str, width: str, args: str = IMAGES
) -> ModelText:
    """Append the head on the vectors `c` [B, width]: classes, or the vectors themselves."""
    if is_bare(config):
        return text.train(f"{args}, {vectors(text, body, c, width)}", body)
    text.symbol("N", config.labels(), "num_labels")
    classify(body, linear(text, body, "z", c, "classifier", f"{width}, N"))
    return text.train(f"{args}, %labels: i32[B]", body)


# -- ConvNeXt --------------------------------------------------------------------------------------


@reads("ConvNeXt", "convnext", features="depth-wise convolutions in stages")
def read_convnext(config: Config) -> ModelText:
    """ConvNeXt (arXiv 2201.03545): depth-wise convolutions of 7 x 7, then a feed-forward block of
    four times the width."""
    return _convnext(config, responds=False)


@reads("ConvNeXt V2", "convnextv2", features="ConvNeXt; norms of channels over an image")
def read_convnextv2(config: Config) -> ModelText:
    """ConvNeXt V2 (arXiv 2301.00808): channels are multiplied by their norm over an image, relative
    to the mean norm."""
    return _convnext(config, responds=True)


def _convnext(config: Config, *, responds: bool) -> ModelText:
    widths = config.sizes("hidden_sizes", least=1) or (96, 192, 384, 768)
    count = len(widths)
    depths = config.sizes("depths", length=count, least=1) or (3, 3, 9, 3)
    if len(depths) != count:
        raise config.wrong("hidden_sizes", f"{len(depths)} widths, one for each stage")
    config.only("num_stages", count)
    config.skip("stage_names", "out_features", "out_indices", "drop_path_rate")
    text = begin_pyramid(config, widths, depths)
    scaled = not responds and config.ratio("layer_scale_init_value", default=1) > 0
    text.symbol("F", 4, "the feed-forward width, in widths")
    act = read_activation(config, "hidden_act")
    options = [*activation_options(act), *["responds"] * responds, *["scaled"] * scaled]
    block = text.use("convnext", "D F", *options)
    body = Body()
    x = stem(text, body)
    for i in range(1, count + 1):
        width = at("D", i)
        if i > 1:
            sizes = (f"C = {at('D', i - 1)}", f"D = {width}")
            merged = text.use(
                "convnext", "", *sizes, f"as = merged_{i}", function="convnext_merged"
            )
            x = body.call(f"x_{i}", merged, x)
        inner = Body()
        own = block.with_(f"D = {width}") if i > 1 else block
        inner.do(f"stg.yield({inner.let('r', f'stg.call @{own}(%h)')})")
        x = body.repeat(f"%y_{i}", f"stage_{i}", at("L", i), f"%h = {x}", inner)
    last = at("D", count)
    c = LAYER.write(body, "c", pooled(text, body, x, side_of(count)), "norm", last)
    return finish(config, text, body, c, last)


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
