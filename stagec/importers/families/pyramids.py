"""Encoders of images in stages, each with fewer and wider elements than the previous one."""

from __future__ import annotations

from collections.abc import Sequence

from stagec.importers.common.heads import is_bare
from stagec.importers.common.sizes import begin_text
from stagec.importers.families.encoders import classify, read_activation, vectors
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, activation_options
from stagec.importers.writing.text import Body, ModelText
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
