"""Encoders of images in stages, each with fewer and wider elements than the one before."""

from __future__ import annotations

from collections.abc import Sequence

from stagec.importers.common.heads import expect_head, is_bare
from stagec.importers.common.sizes import begin
from stagec.importers.families.encoders import classify, read_activation, vectors
from stagec.importers.family import ModelFamily
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, activated
from stagec.importers.writing.text import Body, Callee, ModelText
from stagec.importers.writing.towers import linear

IMAGES = "%images: bf16[B, C, X*P, X*P]"


def at(symbol: str, stage: int) -> str:
    """The symbol of a stage: that of the first one has no number."""
    return f"{symbol}_{stage}" if stage > 1 else symbol


def side_of(stage: int) -> str:
    """The elements along a side of a stage."""
    return f"X/{1 << (stage - 1)}" if stage > 1 else "X"


def begin_pyramid(
    config: Config, title: str, widths: Sequence[int], depths: Sequence[int]
) -> ModelText:
    """The text, with C, P and X of images, and D and L of each stage; X has to halve behind each
    stage but the last one."""
    expect_head(config, "ImageClassification")
    text, _ = begin(config, title, 1)
    text.symbols.pop("S")
    text.symbol("C", config.size("num_channels", default=3), "num_channels")
    patch = text.symbols[text.symbol("P", config.side("patch_size", default=4), "patch_size")].value
    image = config.side("image_size", default=224)
    side, halves = image // (patch or 1), len(depths) - 1
    if side < 1 or side * (patch or 1) != image or side % (1 << halves):
        raise config.refuse(
            "image_size", f"is {image}, which {patch} * {1 << halves} does not divide"
        )
    text.symbol("X", side, "patches along a side: image_size / patch_size")
    for i, (width, depth) in enumerate(zip(widths, depths, strict=True), 1):
        text.symbol(at("D", i), width, f"width of stage {i}")
        text.symbol(at("L", i), depth, f"layers of stage {i}")
    return text


def stem(body: Body) -> str:
    """Append the patches of `%images` as a grid [B, X, X, D], normed; its name."""
    steps = [
        'stg.reshape["bc(hp)(wq)->bchpwq", factors = (p, q), sizes = (P, P)]({})',
        f'stg.einsum["bchpwq,cpqd->bhwd"]({{}}, {body.param("w_patches", "C, P, P, D")})',
        f'stg.add["bhwd,d->bhwd"]({{}}, {body.param("b_patches", "D")})',
        LAYER.step(body, "patch_norm"),
    ]
    return body.steps("x", "%images", steps)


def pooled(body: Body, y: str, side: str) -> str:
    """Append the mean over a grid [B, side, side, D]; its name."""
    return body.steps(
        "m", y, ['stg.sum["bhwd->bd"]({})', f"stg.scale[by = 1/({side}*{side})]({{}})"]
    )


def finish(
    config: Config, text: ModelText, body: Body, c: str, width: str, args: str = IMAGES
) -> ModelText:
    """Append the head on the vectors `c` [B, width]: classes, or the vectors themselves."""
    if is_bare(config):
        return text.train(f"{args}, {vectors(text, body, c, width)}", body)
    text.symbol("N", config.labels(), "num_labels")
    classify(body, linear(body, "z", c, "classifier", f"{width}, N"))
    return text.train(f"{args}, %labels: i32[B]", body)


# -- ConvNeXt --------------------------------------------------------------------------------------


def read_convnext(config: Config) -> ModelText:
    """ConvNeXt (arXiv 2201.03545): depth-wise convolutions of 7 x 7, then a feed-forward block of
    four times the width."""
    return _convnext(config, "ConvNeXt", responds=False)


def read_convnextv2(config: Config) -> ModelText:
    """ConvNeXt V2 (arXiv 2301.00808): channels are multiplied by the share of their norm over an
    image in the mean one."""
    return _convnext(config, "ConvNeXt V2", responds=True)


def _convnext(config: Config, title: str, *, responds: bool) -> ModelText:
    widths = config.sizes("hidden_sizes", least=1) or (96, 192, 384, 768)
    count = len(widths)
    depths = config.sizes("depths", length=count, least=1) or (3, 3, 9, 3)
    if len(depths) != count:
        raise config.wrong("hidden_sizes", f"{len(depths)} widths, one for each stage")
    config.only("num_stages", count)
    config.skip("stage_names", "out_features", "out_indices", "drop_path_rate")
    text = begin_pyramid(config, title, widths, depths)
    scaled = not responds and config.ratio("layer_scale_init_value", default=1) > 0
    text.symbol("F", 4, "the feed-forward width, in widths")
    act = read_activation(config, "hidden_act")
    block = _convnext_block(text, act, scaled=scaled, responds=responds)
    body = Body()
    x = stem(body)
    for i in range(1, count + 1):
        if i > 1:
            before, width = at("D", i - 1), at("D", i)
            weight = body.param(f"w_{i}", f"2, 2, {before}, {width}")
            steps = [
                LAYER.step(body, f"norm_{i}", before),
                'stg.reshape["b(hp)(wq)c->bhpwqc", factors = (p, q), sizes = (2, 2)]({})',
                f'stg.einsum["bhpwqc,pqcd->bhwd"]({{}}, {weight})',
                f'stg.add["bhwd,d->bhwd"]({{}}, {body.param(f"b_{i}", width)})',
            ]
            x = body.steps(f"x_{i}", x, steps)
        inner = Body()
        bound = f"[D = {at('D', i)}]" if i > 1 else ""
        inner.do(f"stg.yield({inner.let('r', f'stg.call @{block}{bound}(%h)')})")
        count_ = at("L", i)
        head = f"%y_{i} = stg.repeat @stage_{i}[count = {count_}, carry = 1] (%h = {x}) {{"
        body.nested(head, inner)
        x = f"%y_{i}"
    last = at("D", count)
    c = LAYER.write(body, "c", pooled(body, x, side_of(count)), "norm", last)
    return finish(config, text, body, c, last)


def _convnext_block(text: ModelText, act: str, *, scaled: bool, responds: bool) -> Callee:
    body = Body()
    wide = [
        'stg.reshape["bhw(gc)->bhwgc", factors = c, sizes = 1]({})',
        f"stg.conv2d[pad = 3]({{}}, {body.param('w_depth', '7, 7, D, 1, 1')})",
        'stg.reshape["bhwgc->bhw(gc)"]({})',
        f'stg.add["bhwd,d->bhwd"]({{}}, {body.param("b_depth", "D")})',
        LAYER.step(body, "norm"),
        f'stg.einsum["bhwd,dfe->bhwfe"]({{}}, {body.param("w_up", "D, F, D")})',
        f'stg.add["bhwfe,fe->bhwfe"]({{}}, {body.param("b_up", "F, D")})',
        activated(act),
    ]
    u = body.steps("u", "%h", wide)
    u = _responding(body, u) if responds else u
    steps = [
        f'stg.einsum["bhwfe,fed->bhwd"]({{}}, {body.param("w_down", "F, D, D")})',
        f'stg.add["bhwd,d->bhwd"]({{}}, {body.param("b_down", "D")})',
    ]
    if scaled:
        steps.append(f'stg.einsum["bhwd,d->bhwd"]({{}}, {body.param("scale", "D")})')
    a = body.steps("a", u, steps)
    body.do(f"stg.return({body.let('r', f'stg.add(%h, {a})')})")
    return text.function("block", "%h", body)


def _responding(body: Body, u: str) -> str:
    """Append the global response normalization of `u` [B, h, w, F, D]; its name."""
    norm = [
        f"stg.mul({{}}, {u})",
        'stg.sum["bhwfe->bfe"]({})',
        "stg.power[exponent = 1/2]({})",
    ]
    g = body.steps("g", u, norm)
    mean = ['stg.sum["bfe->b"]({})', "stg.scale[by = 1/(F*D)]({})", "stg.power[exponent = -1]({})"]
    share = body.let("share", f'stg.einsum["bfe,b->bfe"]({g}, {body.steps("per", g, mean)})')
    steps = [
        f'stg.einsum["bhwfe,bfe->bhwfe"]({{}}, {share})',
        f'stg.einsum["bhwfe,fe->bhwfe"]({{}}, {body.param("grn_w", "F, D")})',
        f'stg.add["bhwfe,bhwfe,fe->bhwfe"]({{}}, {u}, {body.param("grn_b", "F, D")})',
    ]
    return body.steps("z", u, steps)


FAMILIES: Sequence[ModelFamily] = (
    ModelFamily("ConvNeXt", ("convnext",), read_convnext, "depth-wise convolutions in stages"),
    ModelFamily(
        "ConvNeXt V2", ("convnextv2",), read_convnextv2, "ConvNeXt; norms of channels over an image"
    ),
)
