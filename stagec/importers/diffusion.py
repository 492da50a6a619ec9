"""Diffusion transformers by the configurations of diffusers: DiT and Flux.

A step predicts what was added to latents and is trained by the mean squared error. Norms have no
vectors of their own: a condition shifts and scales what they give, and gates what is added to the
stream (adaptive norms, arXiv 2212.09748).
"""

from __future__ import annotations

from collections.abc import Sequence

from stagec.importers.blocks import RMS
from stagec.importers.common import read_size
from stagec.importers.config import Config
from stagec.importers.family import ModelFamily
from stagec.importers.text import Body, ModelText
from stagec.importers.towers import MultiHead, linear, patches

_PLAIN = "stg.layernorm[affine = none]({})"


def _begin(config: Config, title: str) -> ModelText:
    name = config.text("_class_name")
    text = ModelText(
        title.lower(),
        f"{title}: a training step, forward. Written by stagec import from a {name};",
        ["the comments name the keys of the configuration."],
    )
    text.symbol("B", None, "images")
    return text


def _read_heads(config: Config, text: ModelText, heads: int, dim: int) -> int:
    """Declare H, K and D, the width of all heads; the width."""
    h = read_size(config, text, "H", "num_attention_heads", default=heads)
    k = read_size(config, text, "K", "attention_head_dim", default=dim)
    text.symbol("D", h * k, "num_attention_heads * attention_head_dim")
    return h * k


def _embedder(text: ModelText) -> str:
    """Two products with SiLU between them, from the width U to D; the block's name."""
    body = Body()
    u = linear(body, "u", "%x", "in", "U, D")
    a = body.let("a", f"stg.silu({u})")
    body.do(f"stg.return({linear(body, 'y', a, 'out', 'D, D')})")
    return text.function("embedder", "%x", body)


def _modulation(text: ModelText, parts: int) -> str:
    """The shifts, scales and gates of a condition [B, D], `parts` of them; the block's name."""
    body = Body()
    steps = [
        f'stg.einsum["bd,dze->bze"]({{}}, {body.param("w", f"D, {parts}, D")})',
        f'stg.add["bze,ze->bze"]({{}}, {body.param("b", f"{parts}, D")})',
    ]
    m = body.steps("m", body.let("a", "stg.silu(%c)"), steps)
    body.do(f"stg.return({m})")
    return text.function(f"modulation{parts}", "%c", body)


def _unbound(body: Body, m: str, names: Sequence[str]) -> list[str]:
    values = [f"%{n}" for n in names]
    body.do(f"{', '.join(values)} = stg.unbind[dim = 1, count = {len(names)}]({m})")
    return values


def _modulate(text: ModelText) -> str:
    """LayerNorm(x) * (1 + scale) + shift; the block's name."""
    body = Body()
    n = body.let("n", _PLAIN.format("%x"))
    s = body.let("s", f'stg.einsum["bsd,bd->bsd"]({n}, %scale)')
    y = body.let("y", f'stg.add["bsd,bsd,bd->bsd"]({n}, {s}, %shift)')
    body.do(f"stg.return({y})")
    return text.function("modulated", "%x, %shift, %scale", body)


def _gated(body: Body, out: str, x: str, a: str, gate: str) -> str:
    """Append x + gate * a."""
    g = body.let(f"{out}g", f'stg.einsum["bsd,bd->bsd"]({a}, {gate})')
    return body.let(out, f"stg.add({x}, {g})")


def _mlp(text: ModelText) -> str:
    body = Body()
    steps = [
        f'stg.einsum["bsd,df->bsf"]({{}}, {body.param("w_up", "D, F")})',
        f'stg.add["bsf,f->bsf"]({{}}, {body.param("b_up", "F")})',
        "stg.gelu({})",
        f'stg.einsum["bsf,fd->bsd"]({{}}, {body.param("w_down", "F, D")})',
        f'stg.add["bsd,d->bsd"]({{}}, {body.param("b_down", "D")})',
    ]
    body.do(f"stg.return({body.steps('y', '%x', steps)})")
    return text.function("mlp", "%x", body)


def _time(body: Body, name: str, data: str) -> str:
    """Append what the embedder of times sees: a sinusoid of U numbers."""
    steps = ["stg.sinusoid[size = U]({})", "stg.cast[bf16]({})"]
    return body.steps(name, data, steps)


# -- DiT -------------------------------------------------------------------------------------------


def read_dit(config: Config) -> ModelText:
    """DiT (arXiv 2212.09748), as diffusers has it: each block embeds time and class itself."""
    text = _begin(config, "DiT")
    _read_heads(config, text, 16, 72)
    patch = read_size(config, text, "P", "patch_size", default=2)
    size = config.size("sample_size", default=32)
    if size % patch:
        raise config.refuse("sample_size", f"is {size}, which {patch} does not divide")
    text.symbol("X", size // patch, "patches along a side: sample_size / patch_size")
    channels = read_size(config, text, "C", "in_channels", default=4)
    read_size(config, text, "C_out", "out_channels", default=channels)
    text.symbol("F", 4 * (text.symbols["D"].value or 1), "four times the width")
    count = config.layers("num_layers", default=28)
    if count < 2:
        raise config.refuse("num_layers", "is 1: expected a first block and others")
    text.symbol("L", count - 1, "num_layers - 1")
    text.symbol("N", config.size("num_embeds_ada_norm", default=1000) + 1, "classes, and none")
    config.only("norm_type", "ada_norm_zero")
    config.only("activation_fn", "gelu-approximate")
    config.only("attention_bias", True)
    config.only("norm_elementwise_affine", False)
    config.skip("norm_num_groups", "upcast_attention", "norm_eps")
    text.symbol("U", 256, "numbers of a time's sinusoid")
    condition, block, modulate = _condition(text), _dit_block(text), _modulate(text)
    body = Body()
    x = body.let("x0", f"stg.call @{patches(text, bias=True)}(%images)")
    x = body.let("x", f'stg.add["bsd,sd->bsd"]({x}, %positions)')
    t = _time(body, "times", "%time")
    first = _condition_weights(body, "first_")
    c = body.let("c0", f"stg.call @{condition}[as = first]({t}, %classes, {first})")
    x = body.let("x1", f"stg.call @{block}[as = first]({x}, {c})")
    inner = Body()
    own = _condition_weights(inner)
    c = inner.let("c", f"stg.call @{condition}({t}, %classes, {own})")
    inner.do(f"stg.yield({inner.let('r', f'stg.call @{block}(%h, {c})')})")
    body.nested(f"%y = stg.repeat @layers[count = L, carry = 1] (%h = {x}) {{", inner)
    t = _time(body, "last_times", "%time")  # anew: a last pipeline stage has only the data
    c = body.let("c1", f"stg.call @{condition}[as = last]({t}, %classes, {first})")
    m = body.let("m", f"stg.call @{_modulation(text, 2)}({c})")
    shift, scale = _unbound(body, m, ["shift", "scale"])
    n = body.let("n", f"stg.call @{modulate}[as = norm](%y, {shift}, {scale})")
    steps = [
        f'stg.einsum["bsd,dpqc->bspqc"]({{}}, {body.param("head", "D, P, P, C_out")})',
        f'stg.add["bspqc,pqc->bspqc"]({{}}, {body.param("head_bias", "P, P, C_out")})',
    ]
    z = body.steps("z", n, steps)
    body.let("loss", f"stg.mse[mean = B*X*X*P*P*C_out]({z}, %noise)")
    body.do("stg.return(%loss)")
    text.notes.append("The first block stands alone: its condition is that of the last norm too.")
    text.notes.append("%positions are a fixed sinusoid.")
    args = "%images: bf16[B, C, X*P, X*P], %positions: bf16[X*X, D], %time: f32[B],"
    return text.train(f"{args} %classes: i32[B], %noise: bf16[B, X*X, P, P, C_out]", body)


def _condition_weights(body: Body, prefix: str = "") -> str:
    """Declare what a condition is computed with; the operands."""
    sizes = {
        "w_time": "U, D",
        "b_time": "D",
        "w_hidden": "D, D",
        "b_hidden": "D",
        "class_embed": "N, D",
    }
    return ", ".join(body.param(f"{prefix}{name}", dims) for name, dims in sizes.items())


def _condition(text: ModelText) -> str:
    """The condition of a time and a class, by weights that are given; the block's name."""
    body = Body()
    steps = [
        'stg.einsum["bd,de->be"]({}, %w_time)',
        'stg.add["be,e->be"]({}, %b_time)',
        "stg.silu({})",
        'stg.einsum["bd,de->be"]({}, %w_hidden)',
        'stg.add["be,e->be"]({}, %b_hidden)',
    ]
    t = body.steps("t", "%time", steps)
    e = body.let("e", "stg.embedding(%class_embed, %classes)")
    body.do(f"stg.return({body.let('c', f'stg.add({t}, {e})')})")
    args = "%time, %classes, %w_time, %b_time, %w_hidden, %b_hidden, %class_embed"
    return text.function("condition", args, body)


def _dit_block(text: ModelText) -> str:
    modulate, attention, mlp = _modulate(text), MultiHead().write(text), _mlp(text)
    body = Body()
    m = body.let("m", f"stg.call @{_modulation(text, 6)}(%c)")
    names = ["shift1", "scale1", "gate1", "shift2", "scale2", "gate2"]
    s1, c1, g1, s2, c2, g2 = _unbound(body, m, names)
    n = body.let("n1", f"stg.call @{modulate}[as = norm1](%h, {s1}, {c1})")
    a = body.let("a", f"stg.call @{attention}({n})")
    h = _gated(body, "r1", "%h", a, g1)
    n = body.let("n2", f"stg.call @{modulate}[as = norm2]({h}, {s2}, {c2})")
    f = body.let("f", f"stg.call @{mlp}({n})")
    body.do(f"stg.return({_gated(body, 'r2', h, f, g2)})")
    return text.function("block", "%h, %c", body)


# -- Flux ------------------------------------------------------------------------------------------


def read_flux(config: Config) -> ModelText:
    """Flux: text and image streams that meet in attention, then one stream whose blocks compute
    attention and a feed-forward block side by side."""
    text = _begin(config, "Flux")
    text.symbol("S", 512, "tokens of a text")
    text.symbol("X", 4096, "tokens of an image: 16 x 16 elements each, of 1024 x 1024")
    width = _read_heads(config, text, 24, 128)
    text.symbol("F", 4 * width, "four times the width")
    channels = read_size(config, text, "C", "in_channels", default=64)
    config.only("out_channels", channels)
    config.only("patch_size", 1)
    text.symbol("L", config.layers("num_layers", default=19), "num_layers")
    singles = config.layers("num_single_layers", default=38)
    text.symbol("L_single", singles, "num_single_layers")
    read_size(config, text, "J", "joint_attention_dim", default=4096)
    read_size(config, text, "U_text", "pooled_projection_dim", default=768)
    text.symbol("U", 256, "numbers of a time's sinusoid")
    guided = config.flag("guidance_embeds", default=False)
    axes = config.sizes("axes_dims_rope")
    if axes and sum(axes) != text.symbols["K"].value:
        raise config.refuse("axes_dims_rope", "does not make up a head")
    embedder, double, single = _embedder(text), _double(text), _single(text)
    body = Body()
    x = _projected(body, "x0", "%images", "image_in", "C, D")
    c = _projected(body, "c0", "%texts", "text_in", "J, D")
    conditions = [("time", _time(body, "times", "%time"), "")]
    if guided:
        conditions.append(("guidance", _time(body, "guides", "%guidance"), ""))
    conditions.append(("text", "%pooled", "U = U_text, "))
    made = [
        body.let(f"t_{name}", f"stg.call @{embedder}[{sizes}as = {name}]({data})")
        for name, data, sizes in conditions
    ]
    t = body.let("t0", f"stg.add({', '.join(made)})")
    # layers carry the condition, so that pipeline stages send it on
    inner = Body()
    inner.do(f"%x, %c = stg.call @{double}(%h, %g, %t)", "stg.yield(%x, %c, %t)")
    head = "%y, %yc, %ty = stg.repeat @double[count = L, carry = 3]"
    body.nested(f"{head} (%h = {x}, %g = {c}, %t = {t}) {{", inner)
    x = body.let("joined", "stg.concat[dim = 1](%yc, %y)")
    inner = Body()
    inner.do(f"stg.yield({inner.let('r', f'stg.call @{single}(%h, %t)')}, %t)")
    head = "%z, %tz = stg.repeat @single[count = L_single, carry = 2]"
    body.nested(f"{head} (%h = {x}, %t = %ty) {{", inner)
    last = body.let("last", "stg.slice[dim = 1, start = S, size = X](%z)")
    m = body.let("m", f"stg.call @{_modulation(text, 2)}(%tz)")
    scale, shift = _unbound(body, m, ["scale", "shift"])
    n = body.let("n", f"stg.call @{_modulate(text)}({last}, {shift}, {scale})")
    v = _projected(body, "v", n, "head", "D, C")
    body.let("loss", f"stg.mse[mean = B*X*C]({v}, %noise)")
    body.do("stg.return(%loss)")
    text.notes.append("Positions of three axes are rotated like those of one: the same work.")
    args = "%images: bf16[B, X, C], %texts: bf16[B, S, J], %pooled: bf16[B, U_text],"
    args += " %time: f32[B]," + (" %guidance: f32[B]," if guided else "")
    return text.train(f"{args} %noise: bf16[B, X, C]", body)


def _projected(body: Body, out: str, x: str, name: str, sizes: str) -> str:
    """Append the product of `x` [B, S, in] with a parameter [in, out] and a bias."""
    _, _, width = sizes.rpartition(", ")
    steps = [
        f'stg.einsum["bsd,de->bse"]({{}}, {body.param(f"w_{name}", sizes)})',
        f'stg.add["bse,e->bse"]({{}}, {body.param(f"b_{name}", width)})',
    ]
    return body.steps(out, x, steps)


def _qkv(text: ModelText) -> str:
    """Queries, keys and values, the first two normalised for each head."""
    body = Body()
    made: list[str] = []
    for out in "qkv":
        steps = [
            f'stg.einsum["bsd,dhk->bshk"]({{}}, {body.param(f"w{out}", "D, H, K")})',
            f'stg.add["bshk,hk->bshk"]({{}}, {body.param(f"b{out}", "H, K")})',
        ]
        if out != "v":
            steps.append(RMS.step(body, f"{out}_norm", "K"))
        made.append(body.steps(out, "%x", steps))
    body.do(f"stg.return({', '.join(made)})")
    return text.function("qkv", "%x", body)


def _attended(body: Body, q: str, k: str, v: str) -> str:
    """Append attention with rotary positions."""
    q, k = (body.let(f"{n}r", f"stg.rope[base = 10000]({x})") for n, x in (("q", q), ("k", k)))
    return body.let("a", f"stg.attention({q}, {k}, {v})")


def _output(text: ModelText) -> str:
    body = Body()
    steps = [
        f'stg.einsum["bshk,hkd->bsd"]({{}}, {body.param("w", "H, K, D")})',
        f'stg.add["bsd,d->bsd"]({{}}, {body.param("b", "D")})',
    ]
    body.do(f"stg.return({body.steps('o', '%a', steps)})")
    return text.function("output", "%a", body)


def _double(text: ModelText) -> str:
    """A block of two streams, %x of the image and %c of the text, under the condition %t."""
    modulation, modulate, mlp = _modulation(text, 6), _modulate(text), _mlp(text)
    qkv, output = _qkv(text), _output(text)
    body = Body()
    gates: dict[str, list[str]] = {}
    for s, stream in (("x", "image"), ("c", "text")):
        m = body.let(f"m{s}", f"stg.call @{modulation}[as = {stream}_modulation](%t)")
        names = [f"{s}_{n}" for n in ("shift1", "scale1", "gate1", "shift2", "scale2", "gate2")]
        gates[s] = _unbound(body, m, names)
        shift, scale, *_ = gates[s]
        n = body.let(f"n{s}", f"stg.call @{modulate}[as = {stream}_norm1](%{s}, {shift}, {scale})")
        body.do(f"%q{s}, %k{s}, %v{s} = stg.call @{qkv}[as = {stream}_qkv]({n})")
    q, k, v = (body.let(n, f"stg.concat[dim = 1](%{n}c, %{n}x)") for n in "qkv")
    a = _attended(body, q, k, v)
    body.do(f"%ac, %ax = stg.cut[dim = 1, sizes = (S, X)]({a})")
    results: list[str] = []
    for s, stream in (("x", "image"), ("c", "text")):
        _, _, gate1, shift, scale, gate2 = gates[s]
        o = body.let(f"o{s}", f"stg.call @{output}[as = {stream}_output](%a{s})")
        h = _gated(body, f"r{s}", f"%{s}", o, gate1)
        n = body.let(f"k{s}n", f"stg.call @{modulate}[as = {stream}_norm2]({h}, {shift}, {scale})")
        f = body.let(f"f{s}", f"stg.call @{mlp}[as = {stream}_mlp]({n})")
        results.append(_gated(body, f"y{s}", h, f, gate2))
    body.do(f"stg.return({', '.join(results)})")
    return text.function("double", "%x, %c, %t", body)


def _single(text: ModelText) -> str:
    """A block of one stream: the last product of attention and that of the feed-forward block are
    one, of two parts."""
    body = Body()
    m = body.let("m", f"stg.call @{_modulation(text, 3)}(%t)")
    shift, scale, gate = _unbound(body, m, ["shift", "scale", "gate"])
    n = body.let("n", f"stg.call @{_modulate(text)}(%x, {shift}, {scale})")
    body.do(f"%q, %k, %v = stg.call @{_qkv(text)}({n})")
    a = _attended(body, "%q", "%k", "%v")
    u = body.steps("u", _projected(body, "u0", n, "up", "D, F"), ["stg.gelu({})"])
    o = body.let("o", f'stg.einsum["bshk,hkd->bsd"]({a}, {body.param("wo", "H, K, D")})')
    d = body.let("d", f'stg.einsum["bsf,fd->bsd"]({u}, {body.param("w_down", "F, D")})')
    b = body.param("b_out", "D")
    s = body.let("s", f'stg.add["bsd,bsd,d->bsd"]({o}, {d}, {b})')
    body.do(f"stg.return({_gated(body, 'y', '%x', s, gate)})")
    return text.function("single", "%x, %t", body)


FAMILIES: Sequence[ModelFamily] = (
    ModelFamily(
        "DiT",
        (),
        read_dit,
        "adaptive norms by time and class, patches of latents",
        ("DiTTransformer2DModel",),
    ),
    ModelFamily(
        "Flux",
        (),
        read_flux,
        "streams of image and text, adaptive norms, parallel blocks",
        ("FluxTransformer2DModel",),
    ),
)
