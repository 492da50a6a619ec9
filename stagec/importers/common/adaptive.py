"""Blocks of diffusion transformers, whose norms have no vectors of their own: a condition shifts
and scales what they give, and gates what is added to the stream (adaptive norms, arXiv 2212.09748).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stagec.importers.common.sizes import identifier, read_size
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import FeedForward
from stagec.importers.writing.text import Body, Callee, ModelText

_PLAIN = "stg.layernorm[affine = none]({})"


def begin_images(config: Config, title: str, *sequences: str) -> ModelText:
    """A text about images, whose tokens are along these dimensions."""
    name = config.text("_class_name")
    text = ModelText(
        identifier(title.lower()),
        f"{title}: a training step, forward. Written by stagec import from a {name};",
        ["the comments name the keys of the configuration."],
        sequences=sequences,
    )
    text.symbol("B", None, "images")
    return text


def read_width(config: Config, text: ModelText, heads: int, dim: int) -> int:
    """Declare H, K and D, the width of all heads; the width."""
    h = read_size(config, text, "H", "num_attention_heads", default=heads)
    k = read_size(config, text, "K", "attention_head_dim", default=dim)
    text.symbol("D", h * k, "num_attention_heads * attention_head_dim")
    return h * k


def read_latents(config: Config, text: ModelText, side: int, channels: int) -> None:
    """Declare P, X, C and C_out: latents of X*X patches of P x P; `side` and `channels` are those
    of keys left out."""
    patch = read_size(config, text, "P", "patch_size", default=2)
    size = config.size("sample_size", default=side)
    if size % patch:
        raise config.refuse("sample_size", f"is {size}, which {patch} does not divide")
    text.symbol("X", size // patch, "patches along a side: sample_size / patch_size")
    found = read_size(config, text, "C", "in_channels", default=channels)
    read_size(config, text, "C_out", "out_channels", default=found)


def last_norm(
    text: ModelText, body: Body, x: str, condition: str, order: Sequence[str] = ("scale", "shift")
) -> str:
    """Append the norm behind all blocks, under the condition, whose parts come in this order."""
    m = body.let("m", f"stg.call @{modulation(text, 2)}({condition})")
    values = dict(zip(order, unbound(body, m, order), strict=True))
    call = f"stg.call @{modulated(text)}[as = norm]({x}, {values['shift']}, {values['scale']})"
    return body.let("n", call)


def predict_patches(text: ModelText, body: Body, n: str, args: str) -> ModelText:
    """Append the head and the loss of the noise that was added to patches; the text, whose other
    arguments are `args`."""
    steps = [
        f'stg.einsum["bsd,dpqc->bspqc"]({{}}, {body.param("head", "D, P, P, C_out")})',
        f'stg.add["bspqc,pqc->bspqc"]({{}}, {body.param("head_bias", "P, P, C_out")})',
    ]
    z = body.steps("z", n, steps)
    body.let("loss", f"stg.mse[mean = B*X*X*P*P*C_out]({z}, %noise)")
    body.do("stg.return(%loss)")
    text.notes.append("%positions are a fixed sinusoid.")
    images = "%images: bf16[B, C, X*P, X*P], %positions: bf16[X*X, D],"
    return text.train(f"{images} {args}, %noise: bf16[B, X*X, P, P, C_out]", body)


def embedder(text: ModelText) -> Callee:
    """Two products with SiLU between them, from the width U to D."""
    return _use(text, "embedder", "U D")


def modulation(text: ModelText, parts: int) -> Callee:
    """The shifts, scales and gates of a condition [B, D], `parts` of them."""
    return _use(text, "modulation", "D", f"Z = {parts}")


def unbound(body: Body, m: str, names: Sequence[str]) -> list[str]:
    values = [f"%{n}" for n in names]
    body.do(f"{', '.join(values)} = stg.unbind[dim = 1, count = {len(names)}]({m})")
    return values


def modulated(text: ModelText) -> Callee:
    """LayerNorm(x) * (1 + scale) + shift."""
    return _use(text, "modulated", "D")


def gated(body: Body, out: str, x: str, a: str, gate: str) -> str:
    """Append x + gate * a."""
    g = body.let(f"{out}g", f'stg.einsum["bsd,bd->bsd"]({a}, {gate})')
    return body.let(out, f"stg.add({x}, {g})")


def adaptive_mlp(text: ModelText) -> Callee:
    """The feed-forward block of all of these models."""
    return FeedForward("gelu_tanh", gated=False, bias=True).write(text)


def sinusoid(body: Body, name: str, data: str) -> str:
    """Append what the embedder of times sees: a sinusoid of U numbers."""
    steps = ["stg.sinusoid[size = U]({})", "stg.cast[bf16]({})"]
    return body.steps(name, data, steps)


def projected(body: Body, out: str, x: str, name: str, sizes: str) -> str:
    """Append the product of `x` [B, S, in] with a parameter [in, out] and a bias."""
    _, _, width = sizes.rpartition(", ")
    steps = [
        f'stg.einsum["bsd,de->bse"]({{}}, {body.param(f"w_{name}", sizes)})',
        f'stg.add["bse,e->bse"]({{}}, {body.param(f"b_{name}", width)})',
    ]
    return body.steps(out, x, steps)


def qkv_of(text: ModelText, normed: bool = True) -> Callee:
    """Queries, keys and values, the first two normalised for each head if `normed`."""
    return _use(text, "qkv", "D H K", *([] if normed else ["normed = no"]))


def output(text: ModelText) -> Callee:
    """The product behind attention."""
    return _use(text, "output", "D H K")


def _named(callee: Callee, name: str) -> Callee:
    """The function, called by this name in paths."""
    return callee.with_(f"as = {name}")


def _use(text: ModelText, name: str, symbols: str, *given: str) -> Callee:
    """A function of the library's text of these models."""
    return replace(text.use("adaptive", symbols, *given), name=name)


def joint(
    text: ModelText,
    name: str,
    *,
    rotated: bool = False,
    normed: bool = True,
    dual: bool = False,
    last: bool = False,
) -> Callee:
    """A block of two streams, %x of the image and %c of the text, under the condition %t; its name.

    Both meet in attention. With `dual` the image has attention of its own besides; the `last` block
    makes nothing of the text.
    """
    modulate, mlp, qkv, out = (
        modulated(text),
        adaptive_mlp(text),
        qkv_of(text, normed),
        output(text),
    )
    body = Body()
    gates: dict[str, list[str]] = {}
    for s, stream in (("x", "image"), ("c", "text")):
        short = last and s == "c"
        parts = ["scale1", "shift1"] if short else _PARTS + (_MORE if dual and s == "x" else [])
        m = f"stg.call @{_named(modulation(text, len(parts)), stream + '_modulation')}(%t)"
        found = unbound(body, body.let(f"m{s}", m), [f"{s}_{n}" for n in parts])
        gates[s] = [*found[1::-1]] if short else found
        shift, scale, *_ = gates[s]
        n = body.let(f"n{s}", f"stg.call @{modulate}[as = {stream}_norm1](%{s}, {shift}, {scale})")
        body.do(f"%q{s}, %k{s}, %v{s} = stg.call @{_named(qkv, stream + '_qkv')}({n})")
    q, k, v = (body.let(n, f"stg.concat[dim = 1](%{n}c, %{n}x)") for n in "qkv")
    a = attended(body, "a", (q, k, v), rotated=rotated)
    if last:
        body.let("ax", f"stg.slice[dim = 1, start = S, size = X]({a})")
    else:
        body.do(f"%ac, %ax = stg.cut[dim = 1, sizes = (S, X)]({a})")
    results: list[str] = []
    for s, stream in (("x", "image"), ("c", "text")):
        if last and s == "c":
            continue
        _, _, gate1, shift, scale, gate2, *more = gates[s]
        o = body.let(f"o{s}", f"stg.call @{out}[as = {stream}_output](%a{s})")
        h = gated(body, f"r{s}", f"%{s}", o, gate1)
        if more:
            h = _beside(text, body, h, more, normed)
        n = body.let(f"k{s}n", f"stg.call @{modulate}[as = {stream}_norm2]({h}, {shift}, {scale})")
        f = body.let(f"f{s}", f"stg.call @{_named(mlp, stream + '_mlp')}({n})")
        results.append(gated(body, f"y{s}", h, f, gate2))
    body.do(f"stg.return({', '.join(results)})")
    return text.function(name, "%x, %c, %t", body)


_PARTS = ["shift1", "scale1", "gate1", "shift2", "scale2", "gate2"]
_MORE = ["shift3", "scale3", "gate3"]


def _beside(text: ModelText, body: Body, h: str, parts: Sequence[str], normed: bool) -> str:
    """Append attention of the image to itself, on what the block takes."""
    shift, scale, gate = parts
    n = body.let("nz", f"stg.call @{modulated(text)}[as = image_norm3](%x, {shift}, {scale})")
    body.do(f"%qz, %kz, %vz = stg.call @{_named(qkv_of(text, normed), 'own_qkv')}({n})")
    a = body.let("az", "stg.attention(%qz, %kz, %vz)")
    o = body.let("oz", f"stg.call @{output(text)}[as = own_output]({a})")
    return gated(body, "rz", h, o, gate)


def attended(body: Body, out: str, qkv: Sequence[str], *, rotated: bool) -> str:
    """Append attention, with rotary positions if `rotated`."""
    q, k, v = qkv
    if rotated:
        q, k = (body.let(f"{n}r", f"stg.rope[base = 10000]({x})") for n, x in (("q", q), ("k", k)))
    return body.let(out, f"stg.attention({q}, {k}, {v})")
