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
from stagec.importers.family import ModelFamily
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, activated
from stagec.importers.writing.text import Body, Callee, ModelText

#: The logarithm of 100.
_MOST = "4605170/1000000"


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stages of a model, by number from 1: patches along a side, and those of a window. `near`
    tells whether biases are made of distances (Swin V2), `biased` whether projections have one."""

    text: ModelText
    sides: Sequence[int]
    windows: Sequence[int]
    act: str
    near: bool
    biased: bool

    def shifts(self, stage: int) -> bool:
        """Whether every second layer is shifted."""
        return self.sides[stage - 1] > self.windows[stage - 1]

    def first(self, stage: int) -> int:
        """The first stage with windows of the same size, after which their symbols and arguments
        are called."""
        return self.windows.index(self.windows[stage - 1]) + 1

    def pairs(self, stage: int) -> str:
        """What the layers of a stage take besides the stream."""
        names = ["%coords", "%pairs"] if self.near else ["%pairs"]
        return ", ".join(at(name, self.first(stage)) for name in names)


def read_swin(config: Config) -> ModelText:
    """Swin (arXiv 2103.14030): attention in windows, which every second layer shifts by half a
    window; 2 x 2 elements are merged between stages."""
    return _swin(config, "Swin", near=False)


def read_swinv2(config: Config) -> ModelText:
    """Swin V2 (arXiv 2111.09883): norms behind the parts, cosines for scores, biases that a small
    network makes of distances."""
    config.skip("pretrained_window_sizes")
    return _swin(config, "Swin V2", near=True)


def _swin(config: Config, title: str, *, near: bool) -> ModelText:
    depths = config.sizes("depths", least=1) or (2, 2, 6, 2)
    count = len(depths)
    heads = config.sizes("num_heads", length=count, least=1) or (3, 6, 12, 24)
    if len(heads) != count:
        raise config.wrong("depths", f"{len(heads)} numbers of layers, one for each stage")
    width = config.size("embed_dim", default=96)
    config.only("hidden_size", width << (count - 1))
    config.only("num_layers", count)
    config.only("use_absolute_embeddings", False)
    config.skip("stage_names", "out_features", "out_indices", "drop_path_rate", "encoder_stride")
    config.skip("path_norm")
    text = begin_pyramid(config, title, [width << i for i in range(count)], depths)
    window = config.size("window_size", default=7)
    ratio = config.ratio("mlp_ratio", default=4)
    sides = [(text.symbols["X"].value or 1) >> i for i in range(count)]
    windows = [min(side, window) for side in sides]
    for i, (number, side) in enumerate(zip(heads, sides, strict=True), 1):
        d = width << (i - 1)
        if d % number:
            raise config.refuse("num_heads", f"has {number}, which does not divide {d}")
        if side % windows[i - 1]:
            raise config.refuse("window_size", f"is {window}, which does not divide {side} patches")
        if side > window and depths[i - 1] % 2:
            raise config.refuse("depths", f"has {depths[i - 1]}: every second layer is shifted")
        text.symbol(at("H", i), number, f"heads of stage {i}")
        text.symbol(at("K", i), d // number, "width / heads")
        text.symbol(at("F", i), int(ratio * d), "mlp_ratio * width")
        if i == 1 or windows[i - 1] != windows[0]:
            text.symbol(at("W", i), windows[i - 1], "window_size, or all of the image")
            text.symbol(at("U", i), windows[i - 1] // 2, "half a window, rounded down")
    biased = config.flag("qkv_bias", default=True)
    act = read_activation(config, "hidden_act")
    stages = _Stages(text, sides, windows, act, near, biased)
    body = Body()
    x = stem(body)
    for i in range(1, count + 1):
        x = _stage(stages, body, _merged(body, x, i, late=near) if i > 1 else x, i)
    last = at("D", count)
    c = pooled(body, LAYER.write(body, "n", x, "norm", last), side_of(count))
    text.notes.append("%pairs are the rows of the tables of biases, by the places in a window;")
    if near:
        text.notes.append("%coords are the distances of these rows, on a logarithmic scale;")
    text.notes.append("the masks hide pairs that are no neighbours in shifted windows (-100).")
    return finish(config, text, body, c, last, IMAGES + _data(stages))


def _data(stages: _Stages) -> str:
    """The arguments besides images."""
    found = ""
    for i in range(1, len(stages.sides) + 1):
        w, side = at("W", stages.first(i)), side_of(i)
        if stages.first(i) == i:
            rows = f"(2*{w} - 1)*(2*{w} - 1)"
            found += f", {at('%coords', i)}: bf16[{rows}, 2]" if stages.near else ""
            found += f", {at('%pairs', i)}: i32[{w}*{w}, {w}*{w}]"
        if stages.shifts(i):
            found += f", %mask_{i}: bf16[{side}*{side}/({w}*{w}), {w}*{w}, {w}*{w}]"
    return found


def _stage(stages: _Stages, body: Body, x: str, stage: int) -> str:
    """Append the layers of a stage; the result's name."""
    own = {n: at(n, stage) for n in "DHKF"} | {"X": side_of(stage)}
    window = {n: at(n, stages.first(stage)) for n in "WU"}
    bound = [f"{n} = {its}" for n, its in {**own, "W": window["W"]}.items() if n != its]
    half = [] if window["U"] == "U" else [f"U = {window['U']}"]
    pairs = stages.pairs(stage)
    plain, inner = _layer(stages, shifted=False), Body()
    if stages.shifts(stage):
        other = _layer(stages, shifted=True)
        first, second = (
            ", ".join([*bound, "as = whole"]),
            ", ".join([*bound, *half, "as = shifted"]),
        )
        r = inner.let("r0", f"stg.call @{plain}[{first}](%h, {pairs})")
        r = inner.let("r", f"stg.call @{other}[{second}]({r}, {pairs}, %mask_{stage})")
        times = f"{at('L', stage)}/2"
    else:
        brackets = f"[{', '.join(bound)}]" if bound else ""
        r = inner.let("r", f"stg.call @{plain}{brackets}(%h, {pairs})")
        times = at("L", stage)
    inner.do(f"stg.yield({r})")
    head = f"%y_{stage} = stg.repeat @stage_{stage}[count = {times}, carry = 1] (%h = {x}) {{"
    body.nested(head, inner)
    return f"%y_{stage}"


def _merged(body: Body, x: str, stage: int, *, late: bool) -> str:
    """Append the merger of 2 x 2 elements before a stage, normed before the product or, `late`,
    behind it; the result's name."""
    before, width = at("D", stage - 1), at("D", stage)
    weight = body.param(f"w_{stage}", f"4*{before}, {width}")
    product = f'stg.einsum["bhwc,cd->bhwd"]({{}}, {weight})'
    norm = LAYER.step(body, f"norm_{stage}", width if late else f"4*{before}")
    steps = [
        'stg.reshape["b(hp)(wq)c->bhpwqc", factors = (p, q), sizes = (2, 2)]({})',
        'stg.permute["bhpwqc->bhwqpc"]({})',
        'stg.reshape["bhwqpc->bhw(qpc)"]({})',
        *((product, norm) if late else (norm, product)),
    ]
    return body.steps(f"x_{stage}", x, steps)


def _layer(stages: _Stages, *, shifted: bool) -> Callee:
    """Add a layer on a grid [B, X, X, D]; its name."""
    near, text = stages.near, stages.text
    windows = _windows(stages, masked=shifted)
    given = ("%coords, " if near else "") + "%pairs"
    body = Body()
    n = "%h" if near else LAYER.write(body, "n1", "%h", "attn_norm")
    if shifted:
        n = _rolled(body, "s", n, "U, X - U")
    cut = [
        'stg.reshape["b(yw)(xv)d->bywxvd", factors = (w, v), sizes = (W, W)]({})',
        'stg.permute["bywxvd->byxwvd"]({})',
        'stg.reshape["byxwvd->b(yx)(wv)d"]({})',
        f"stg.call @{windows}({{}}, {given}{', %mask' if shifted else ''})",
        'stg.reshape["b(yx)(wv)d->byxwvd", factors = (x, v), sizes = (X/W, W)]({})',
        'stg.permute["byxwvd->bywxvd"]({})',
        'stg.reshape["bywxvd->b(yw)(xv)d"]({})',
    ]
    a = body.steps("a", n, cut)
    if shifted:
        a = _rolled(body, "t", a, "X - U, U")
    a = LAYER.write(body, "n1", a, "attn_norm") if near else a
    r = body.let("sum", f"stg.add(%h, {a})")
    norm = LAYER.step(body, "mlp_norm")
    steps = [
        *([] if near else [norm]),
        f'stg.einsum["bhwd,df->bhwf"]({{}}, {body.param("w_up", "D, F")})',
        f'stg.add["bhwf,f->bhwf"]({{}}, {body.param("b_up", "F")})',
        activated(stages.act),
        f'stg.einsum["bhwf,fd->bhwd"]({{}}, {body.param("w_down", "F, D")})',
        f'stg.add["bhwd,d->bhwd"]({{}}, {body.param("b_down", "D")})',
        *([norm] if near else []),
        f"stg.add({r}, {{}})",
    ]
    body.do(f"stg.return({body.steps('r', r, steps)})")
    args = f"%h, {given}" + (", %mask" if shifted else "")
    return text.function("shifted" if shifted else "layer", args, body)


def _rolled(body: Body, out: str, x: str, sizes: str) -> str:
    """Append a rotation of a grid, whose sides are cut in two parts: the first comes last."""
    for dim, name in ((1, f"{out}y"), (2, f"{out}x")):
        parts = f"%{name}0, %{name}1"
        body.do(f"{parts} = stg.cut[dim = {dim}, sizes = ({sizes})]({x})")
        x = body.let(name, f"stg.concat[dim = {dim}](%{name}1, %{name}0)")
    return x


def _windows(stages: _Stages, *, masked: bool) -> Callee:
    """Add attention in windows [B, N, W*W, D]; its name."""
    near, body = stages.near, Body()
    for out in "qkv":
        steps = [f'stg.einsum["bnsd,dhk->bnshk"]({{}}, {body.param(f"w{out}", "D, H, K")})']
        if stages.biased and not (near and out == "k"):
            steps.append(f'stg.add["bnshk,hk->bnshk"]({{}}, {body.param(f"b{out}", "H, K")})')
        if near and out != "v":
            steps += ["stg.rmsnorm[affine = none, eps = 0]({})", "stg.scale[rsqrt = K]({})"]
        if near and out == "q":
            steps.append(f'stg.einsum["bnshk,h->bnshk"]({{}}, {_sharpness(body)})')
        steps += ["stg.scale[rsqrt = K]({})"] if out == "q" and not near else []
        body.steps(out, "%x", steps)
    if near:
        _near(body)
    else:
        table = body.param("bias", "(2*W - 1)*(2*W - 1), H")
        body.let("near", f"stg.embedding({table}, %pairs)")
    steps = [
        'stg.einsum["bnshk,bnthk->bnhst"]({}, %k)',
        'stg.add["bnhst,sth->bnhst"]({}, %near)',
        *(['stg.add["bnhst,nst->bnhst"]({}, %mask)'] if masked else []),
        "stg.softmax({})",
        'stg.einsum["bnhst,bnthk->bnshk"]({}, %v)',
        f'stg.einsum["bnshk,hkd->bnsd"]({{}}, {body.param("wo", "H, K, D")})',
        f'stg.add["bnsd,d->bnsd"]({{}}, {body.param("bo", "D")})',
    ]
    body.do(f"stg.return({body.steps('o', '%q', steps)})")
    args = "%x, " + ("%coords, " if near else "") + "%pairs" + (", %mask" if masked else "")
    return stages.text.function("masked_windows" if masked else "windows", args, body)


def _sharpness(body: Body) -> str:
    """Append what cosines of each head are multiplied by: e to a learned power, 100 at most."""
    power = body.param("sharpness", "H")
    most = body.steps("most", f"stg.constant[value = {_MOST}]", ["{}", "stg.cast[bf16]({})"])
    steps = [
        "stg.scale[by = -1]({})",
        f'stg.add["h,->h"]({{}}, {most})',
        "stg.relu({})",
        "stg.scale[by = -1]({})",
        f'stg.add["h,->h"]({{}}, {most})',
        "stg.exp({})",
    ]
    return body.steps("sharp", power, steps)


def _near(body: Body) -> None:
    """Append the biases `%near` [W*W, W*W, H] that a network of two layers makes of `%coords`."""
    steps = [
        f'stg.einsum["rc,cf->rf"]({{}}, {body.param("near_up", "2, 512")})',
        f'stg.add["rf,f->rf"]({{}}, {body.param("near_bias", "512")})',
        "stg.relu({})",
        f'stg.einsum["rf,fh->rh"]({{}}, {body.param("near_down", "512, H")})',
        "stg.embedding({}, %pairs)",
        "stg.sigmoid({})",
        "stg.scale[by = 16]({})",
    ]
    body.steps("near", "%coords", steps)


FAMILIES: Sequence[ModelFamily] = (
    ModelFamily("Swin", ("swin",), read_swin, "attention in shifted windows, in stages"),
    ModelFamily("Swin V2", ("swinv2",), read_swinv2, "Swin with cosines, biases made of distances"),
)
