"""Diffusion transformers by the configurations of diffusers: DiT and Flux.

A step predicts what was added to latents and is trained by the mean squared error. Norms have no
vectors of their own: a condition shifts and scales what they give, and gates what is added to the
stream (adaptive norms, arXiv 2212.09748).
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """Append what the embedder of times sees: a sinusoid of 256 numbers."""
    steps = ["stg.sinusoid[size = 256]({})", "stg.cast[bf16]({})"]
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
    text.symbol("L", config.layers("num_layers", default=28), "num_layers")
    text.symbol("N", config.size("num_embeds_ada_norm", default=1000) + 1, "classes, and none")
    config.only("norm_type", "ada_norm_zero")
    config.only("activation_fn", "gelu-approximate")
    config.only("attention_bias", True)
    config.only("norm_elementwise_affine", False)
    config.skip("norm_num_groups", "upcast_attention", "norm_eps")
    body, inner = Body(), Body()
    embedder = _embedder(text)
    condition = _condition(text, embedder)
    modulate = _modulate(text)
    x = body.let("x0", f"stg.call @{patches(text, bias=True)}(%images)")
    x = body.let("x", f'stg.add["bsd,sd->bsd"]({x}, %positions)')
    t = _time(body, "times", "%time")
    inner_c = f"stg.call @{condition}({t}, %classes)"
    c = inner.let("c", inner_c)
    m = inner.let("m", f"stg.call @{_modulation(text, 6)}({c})")
    names = ["shift1", "scale1", "gate1", "shift2", "scale2", "gate2"]
    s1, c1, g1, s2, c2, g2 = _unbound(inner, m, names)
    n = inner.let("n1", f"stg.call @{modulate}[as = norm1](%h, {s1}, {c1})")
    a = inner.let("a", f"stg.call @{MultiHead().write(text)}({n})")
    h = _gated(inner, "r1", "%h", a, g1)
    n = inner.let("n2", f"stg.call @{modulate}[as = norm2]({h}, {s2}, {c2})")
    f = inner.let("f", f"stg.call @{_mlp(text)}({n})")
    inner.do(f"stg.yield({_gated(inner, 'r2', h, f, g2)})")
    body.nested(f"%y = stg.repeat @layers[count = L, carry = 1] (%h = {x}) {{", inner)
    _dit_head(text, body, condition, modulate, t)
    text.notes.append("%positions are a fixed sinusoid. diffusers computes the condition of the")
    text.notes.append("last norm with the embedder of the first block, once more: here it has one,")
    text.notes.append("frozen, whose parameters are not counted.")
    args = "%images: bf16[B, C, X*P, X*P], %positions: bf16[X*X, D], %time: f32[B],"
    return text.train(f"{args} %classes: i32[B], %noise: bf16[B, X*X, P, P, C_out]", body)


def _condition(text: ModelText, embedder: str) -> str:
    """The condition of a time and a class; the block's name."""
    body = Body()
    t = body.let("t", f"stg.call @{embedder}[U = 256, as = time](%time)")
    e = body.let("e", f"stg.embedding({body.param('class_embed', 'N, D')}, %classes)")
    body.do(f"stg.return({body.let('c', f'stg.add({t}, {e})')})")
    return text.function("condition", "%time, %classes", body)


def _dit_head(text: ModelText, body: Body, condition: str, modulate: str, t: str) -> None:
    c = body.let("c", f"stg.call @{condition}({t}, %classes)")
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


FAMILIES: Sequence[ModelFamily] = (
    ModelFamily(
        "DiT",
        (),
        read_dit,
        "adaptive norms by time and class, patches of latents",
        ("DiTTransformer2DModel",),
    ),
)
