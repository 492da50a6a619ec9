"""Diffusion transformers by the configurations of diffusers: DiT, Flux, Stable Diffusion 3 and
Qwen-Image, and PixArt and Wan, whose blocks share one condition and add a table to it
(adaLN-single, arXiv 2310.00426, section 2.3).

A step predicts the noise of latents and is trained by the mean squared error.

Their blocks have adaptive norms (arXiv 2212.09748): a condition shifts and
scales the results of norms, and gates the values that are added to the stream.
"""

from stagec.importers.common.sizes import identifier, read_size
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS
from stagec.importers.writing.text import Body, Callee, ModelText
from stagec.importers.writing.towers import patches, projected


def begin_images(config: Config, *sequences: str) -> ModelText:
    """A text for images, whose tokens are along these dimensions."""
    name = config.text("_class_name")
    text = ModelText(
        identifier(config.family.lower()),
        f"{config.family}: a training step, forward. Written by stagec import from a {name};",
        ["the comments name the keys of the configuration."],
        sequences=sequences,
    )
    text.symbol("B", None, "images")
    return text


def read_width(config: Config, text: ModelText, heads: int, dim: int) -> int:
    """Declare H, K and D, the width of all heads, and return the width."""
    h = read_size(config, text, "H", "num_attention_heads", default=heads)
    k = read_size(config, text, "K", "attention_head_dim", default=dim)
    text.symbol("D", h * k, "num_attention_heads * attention_head_dim")
    return h * k


def read_latents(config: Config, text: ModelText, side: int, channels: int) -> None:
    """Declare P, X, C and C_out: latents of X*X patches of P x P; `side` and `channels` are
    defaults of missing keys."""
    patch = read_size(config, text, "P", "patch_size", default=2)
    size = config.size("sample_size", default=side)
    if size % patch:
        raise config.refuse("sample_size", f"is {size}, not a multiple of 'patch_size' {patch}")
    text.symbol("X", size // patch, "patches along a side: sample_size / patch_size")
    inputs = read_size(config, text, "C", "in_channels", default=channels)
    read_size(config, text, "C_out", "out_channels", default=inputs)


def added_positions(text: ModelText, body: Body) -> str:
    """Append the patches of `%images`, with their positions, and return the name of the result."""
    p = body.call("p", patches(text, bias=True), "%images")
    return body.let("x0", f'stg.add["bsd,sd->bsd"]({p}, %positions)')


def last_norm(text: ModelText, body: Body, x: str, condition: str, *given: str) -> str:
    """Append the norm after all blocks, under the condition."""
    norm = text.use("adaptive", "D", *given, function="last_norm")
    return body.call("n", norm, x, condition)


def predict_patches(text: ModelText, body: Body, n: str, args: str) -> ModelText:
    """Append the head and the loss of the noise of patches, and return the text, whose other
    arguments are `args`."""
    steps = [
        f'stg.einsum["bsd,dpqc->bspqc"]({{}}, {body.param("head", "D, P, P, C_out")})',
        f'stg.add["bspqc,pqc->bspqc"]({{}}, {body.param("head_bias", "P, P, C_out")})',
    ]
    z = body.steps("z", n, steps)
    body.ends(f"stg.mse[mean = B*X*X*P*P*C_out]({z}, %noise)")
    text.notes.append("%positions are a fixed sinusoid.")
    images = "%images: bf16[B, C, X*P, X*P], %positions: bf16[X*X, D],"
    return text.train(f"{images} {args}, %noise: bf16[B, X*X, P, P, C_out]", body)


def sinusoid(text: ModelText, body: Body, out: str, data: str) -> str:
    """Append the input of the embedder of times, a sinusoid of U numbers."""
    return body.call(out, text.use("adaptive", "U", function="sinusoid"), data)


def embedder(text: ModelText, *given: str) -> Callee:
    """Two products with SiLU between them, from the width U to D."""
    return text.use("adaptive", "U D", *given, function="embedder")


def embedded_time(text: ModelText, body: Body, out: str = "t0") -> str:
    """Append the condition of `%time`."""
    times = sinusoid(text, body, "times", "%time")
    return body.call(out, embedder(text, "as = time"), times)


def joint(text: ModelText, *given: str) -> Callee:
    """A block of two streams, of the image and of the text, under a condition."""
    return text.use("adaptive", "D H K F", *given, function="joint")


# -- DiT -------------------------------------------------------------------------------------------


@reads(
    "DiT",
    features="adaptive norms by time and class, patches of latents",
    marks=("DiTTransformer2DModel",),
)
def read_dit(config: Config) -> ModelText:
    """DiT (arXiv 2212.09748) as in diffusers: each block embeds time and class itself."""
    text = begin_images(config, "X")
    read_width(config, text, 16, 72)
    read_latents(config, text, 32, 4)
    text.symbol("F", 4 * text.value("D"), "four times the width")
    count = config.layers("num_layers", default=28)
    if count < 2:
        raise config.refuse("num_layers", "is 1: expected two layers or more")
    text.symbol("L", count - 1, "num_layers - 1")
    text.symbol("N", config.size("num_embeds_ada_norm", default=1000) + 1, "classes, and none")
    config.fixed(norm_type="ada_norm_zero", activation_fn="gelu-approximate", attention_bias=True)
    config.only("norm_elementwise_affine", False)
    config.skip("norm_num_groups", "upcast_attention", "norm_eps")
    text.symbol("U", 256, "numbers of a time's sinusoid")
    condition = text.use("dit", "D", function="dit_condition")
    block = text.use("dit", "D H K F", function="dit_block")
    body = Body()
    x = added_positions(text, body)
    t = sinusoid(text, body, "times", "%time")
    first = _condition_weights(body, "first_")
    c = body.call("c0", condition.with_("as = first"), t, "%classes", first)
    x = body.call("x1", block.with_("as = first"), x, c)
    inner = Body()
    own = _condition_weights(inner)
    c = inner.call("c", condition, t, "%classes", own)
    inner.do(f"stg.yield({inner.call('r', block, '%h', c)})")
    body.repeat("%y", "layers", "L", f"%h = {x}", inner)
    # computed again, since a last pipeline stage has only the data
    t = sinusoid(text, body, "last_times", "%time")
    c = body.call("c1", condition.with_("as = last"), t, "%classes", first)
    n = last_norm(text, body, "%y", c, "order = shift")
    text.notes.append("The first block stands alone: its condition is that of the last norm too.")
    return predict_patches(text, body, n, "%time: f32[B], %classes: i32[B]")


def _condition_weights(body: Body, prefix: str = "") -> str:
    """Declare the weights of a condition, and return the operands."""
    sizes = {
        "w_time": "U, D",
        "b_time": "D",
        "w_hidden": "D, D",
        "b_hidden": "D",
        "class_embed": "N, D",
    }
    return ", ".join(body.param(f"{prefix}{name}", dims) for name, dims in sizes.items())


# -- Flux ------------------------------------------------------------------------------------------


@reads(
    "Flux",
    features="streams of image and text, adaptive norms, parallel blocks",
    marks=("FluxTransformer2DModel",),
)
def read_flux(config: Config) -> ModelText:
    """Flux: text and image streams that meet in attention, then one stream whose blocks compute
    attention and a feed-forward block side by side."""
    text = begin_images(config, "X", "S")
    text.symbol("S", 512, "tokens of a text")
    text.symbol("X", 4096, "tokens of an image: 16 x 16 elements each, of 1024 x 1024")
    width = read_width(config, text, 24, 128)
    text.symbol("F", 4 * width, "four times the width")
    channels = read_size(config, text, "C", "in_channels", default=64)
    config.fixed(out_channels=channels, patch_size=1)
    text.symbol("L", config.layers("num_layers", default=19), "num_layers")
    singles = config.layers("num_single_layers", default=38)
    text.symbol("L_single", singles, "num_single_layers")
    read_size(config, text, "J", "joint_attention_dim", default=4096)
    read_size(config, text, "U_text", "pooled_projection_dim", default=768)
    text.symbol("U", 256, "numbers of a time's sinusoid")
    guided = config.flag("guidance_embeds", default=False)
    axes = config.sizes("axes_dims_rope")
    if axes and sum(axes) != text.symbols["K"].value:
        raise config.refuse(
            "axes_dims_rope",
            f"has the sum {sum(axes)}, expected the {text.symbols['K'].value} elements of a head",
        )
    double = joint(text, "rotated")
    single = text.use("flux_single", "D H K F")
    body = Body()
    x = projected(text, body, "x0", "%images", "image_in", "C, D")
    c = projected(text, body, "c0", "%texts", "text_in", "J, D")
    conditions: list[tuple[str, str, list[str]]] = []
    conditions.append(("time", sinusoid(text, body, "times", "%time"), []))
    if guided:
        conditions.append(("guidance", sinusoid(text, body, "guides", "%guidance"), []))
    conditions.append(("text", "%pooled", ["U = U_text"]))
    made = [
        body.call(f"t_{name}", embedder(text, *sizes, f"as = {name}"), data)
        for name, data, sizes in conditions
    ]
    t = body.let("t0", f"stg.add({', '.join(made)})")
    # layers carry the condition, so that pipeline stages forward it
    inner = Body(f"%x, %c = stg.call @{double}(%h, %g, %t)", "stg.yield(%x, %c, %t)")
    body.repeat("%y, %yc, %ty", "double", "L", f"%h = {x}, %g = {c}, %t = {t}", inner)
    x = body.let("joined", "stg.concat[dim = 1](%yc, %y)")
    inner = Body()
    inner.do(f"stg.yield({inner.call('r', single, '%h', '%t')}, %t)")
    body.repeat("%z, %tz", "single", "L_single", f"%h = {x}, %t = %ty", inner)
    last = body.let("last", "stg.slice[dim = 1, start = S, size = X](%z)")
    n = last_norm(text, body, last, "%tz")
    v = projected(text, body, "v", n, "head", "D, C")
    body.ends(f"stg.mse[mean = B*X*C]({v}, %noise)")
    text.notes.append("Positions of three axes are rotated like those of one: the same work.")
    args = "%images: bf16[B, X, C], %texts: bf16[B, S, J], %pooled: bf16[B, U_text],"
    args += " %time: f32[B]," + (" %guidance: f32[B]," if guided else "")
    return text.train(f"{args} %noise: bf16[B, X, C]", body)


# -- Stable Diffusion 3 ----------------------------------------------------------------------------


@reads(
    "Stable Diffusion 3",
    features="streams of image and text, adaptive norms, patches of latents",
    marks=("SD3Transformer2DModel",),
)
def read_sd3(config: Config) -> ModelText:
    """Stable Diffusion 3 (arXiv 2403.03206): streams of image and text with joint attention; the
    first blocks of 3.5 medium also have attention of the image alone."""
    config.family = "SD3"
    text = begin_images(config, "X", "S")
    text.symbol("S", 333, "tokens of a text: 77 of CLIP and 256 of T5")
    read_latents(config, text, 128, 16)
    width = read_width(config, text, 18, 64)
    text.symbol("F", 4 * width, "four times the width")
    config.only("caption_projection_dim", width)
    config.skip("pos_embed_max_size")
    read_size(config, text, "J", "joint_attention_dim", default=4096)
    read_size(config, text, "U_text", "pooled_projection_dim", default=2048)
    text.symbol("U", 256, "numbers of a time's sinusoid")
    config.only("qk_norm", "rms_norm")
    normed = config.has("qk_norm")
    count = config.layers("num_layers", default=18)
    duals = config.sizes("dual_attention_layers", most=count - 1)
    if sorted(duals) != list(range(len(duals))) or len(duals) >= count:
        raise config.refuse(
            "dual_attention_layers", "must be the first layers, 0, 1, 2, ..., and not all of them"
        )
    body = Body()
    x = added_positions(text, body)
    c = projected(text, body, "c0", "%texts", "text_in", "J, D")
    t = embedded_time(text, body, "t_time")
    t2 = body.call("t_text", embedder(text, "U = U_text", "as = text"), "%pooled")
    t = body.let("t0", f"stg.add({t}, {t2})")
    block = joint(text, "X = X*X", *([] if normed else ["normed = no"]))
    for name, number in (("dual", len(duals)), ("joint", count - len(duals) - 1)):
        if number:
            text.symbol(f"L_{name}", number, f"{name} blocks")
            own = block.with_("dual") if name == "dual" else block
            inner = Body(f"%x, %c = stg.call @{own}(%h, %g, %t)", "stg.yield(%x, %c, %t)")
            made = ", ".join(f"%{n}_{name}" for n in "xct")
            body.repeat(made, name, f"L_{name}", f"%h = {x}, %g = {c}, %t = {t}", inner)
            x, c, t = made.split(", ")
    body.do(f"%y, %yc = stg.call @{block.with_('last')}({x}, {c}, {t})")
    n = last_norm(text, body, "%y", t)
    args = "%texts: bf16[B, S, J], %pooled: bf16[B, U_text], %time: f32[B]"
    return predict_patches(text, body, n, args)


_SINUSOID = "numbers of a time's sinusoid"


@reads(
    "Qwen-Image",
    features="streams of image and text, adaptive norms",
    marks=("QwenImageTransformer2DModel",),
)
def read_qwen_image(config: Config) -> ModelText:
    """Qwen-Image (arXiv 2508.02324): streams of image and text in all blocks."""
    text = begin_images(config, "X", "S")
    text.symbol("S", 512, "tokens of a text")
    text.symbol("X", 4096, "tokens of an image: 1024 x 1024")
    width = read_width(config, text, 24, 128)
    text.symbol("F", 4 * width, "four times the width")
    read_size(config, text, "C", "in_channels", default=64)
    patch = config.size("patch_size", default=2)
    size = patch * patch * config.size("out_channels", default=16)
    text.symbol("C_out", size, "patch_size^2 * out_channels")
    read_size(config, text, "J", "joint_attention_dim", default=3584)
    text.symbol("L", config.layers("num_layers", default=60), "num_layers")
    text.symbol("U", 256, _SINUSOID)
    for key in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"):
        config.only(key, False)
    axes = config.sizes("axes_dims_rope") or (16, 56, 56)
    if sum(axes) != text.symbols["K"].value:
        raise config.refuse(
            "axes_dims_rope", f"has the sum {sum(axes)}, expected 'attention_head_dim'"
        )
    body = Body()
    block = joint(text, "rotated")
    x = projected(text, body, "x0", "%images", "image_in", "C, D")
    n = RMS.write(body, "c1", "%texts", "text_norm", "J")
    c = projected(text, body, "c0", n, "text_in", "J, D")
    t = embedded_time(text, body)
    inner = Body(f"%x, %c = stg.call @{block}(%h, %g, %t)", "stg.yield(%x, %c, %t)")
    body.repeat("%y, %yc, %ty", "layers", "L", f"%h = {x}, %g = {c}, %t = {t}", inner)
    n = last_norm(text, body, "%y", "%ty")
    v = projected(text, body, "v", n, "head", "D, C_out")
    body.ends(f"stg.mse[mean = B*X*C_out]({v}, %noise)")
    text.notes.append("Positions of three axes are rotated like those of one: the same work.")
    args = "%images: bf16[B, X, C], %texts: bf16[B, S, J], %time: f32[B],"
    return text.train(f"{args} %noise: bf16[B, X, C_out]", body)


# -- one condition for all blocks ------------------------------------------------------------------


def _use(text: ModelText, function: str, *given: str, symbols: str = "D") -> Callee:
    return text.use("single_condition", symbols, *given, function=function)


def _blocks(text: ModelText, body: Body, x: str, c: str, t: str, *given: str) -> str:
    """Append all blocks on the image `x`, under the time `t` [B, D] and the text `c`, and the norm
    after them, and return its name."""
    m = body.call("all", _use(text, "condition_of_all"), t)
    inner = Body()
    block = _use(text, "conditioned_block", *given, symbols="D H K F")
    inner.do(f"stg.yield({inner.call('r', block, '%h', '%g', '%m')}, %g, %m, %t)")
    # layers carry the conditions, so that pipeline stages forward them
    carried = f"%h = {x}, %g = {c}, %m = {m}, %t = {t}"
    body.repeat("%y, %yc, %ym, %ty", "layers", "L", carried, inner)
    return body.call("n", _use(text, "last_conditioned"), "%y", "%ty")


@reads(
    "PixArt",
    features="one condition for all blocks, cross attention",
    marks=("PixArtTransformer2DModel",),
)
def read_pixart(config: Config) -> ModelText:
    """PixArt (arXiv 2310.00426), alpha and sigma."""
    text = begin_images(config, "X", "S")
    text.symbol("S", 300, "tokens of a text")
    read_latents(config, text, 128, 4)
    width = read_width(config, text, 16, 72)
    text.symbol("F", 4 * width, "four times the width")
    text.symbol("L", config.layers("num_layers", default=28), "num_layers")
    text.symbol("U", 256, _SINUSOID)
    config.fixed(cross_attention_dim=width, norm_type="ada_norm_single")
    config.fixed(activation_fn="gelu-approximate", norm_elementwise_affine=False)
    config.only("attention_type", "default")
    config.skip("norm_num_groups", "upcast_attention", "norm_eps", "num_embeds_ada_norm")
    config.skip("interpolation_scale")
    biased = config.flag("attention_bias", default=True)
    given = config.has("caption_channels")
    if given:
        read_size(config, text, "J", "caption_channels")
    sized = config.flag(
        "use_additional_conditions", default=config.size("sample_size", default=128) == 128
    )
    body = Body()
    x, c = added_positions(text, body), "%texts"
    if given:
        c = body.call("c0", _use(text, "text_condition", symbols="D J"), c)
    t = embedded_time(text, body)
    if sized:
        if width % 3:
            raise config.refuse(
                "num_attention_heads", f"gives the width {width}, not a multiple of 3"
            )
        text.assume("D % 3 == 0")
        block = _use(text, "size_condition", symbols="D U")
        both = (body.call(f"{n}_c", block.with_(f"as = {n}"), f"%{n}") for n in ("size", "ratio"))
        sizes = body.let("sized", f"stg.concat[dim = 1]({', '.join(both)})")
        t = body.let("t1", f"stg.add({t}, {sizes})")
    n = _blocks(text, body, x, c, t, *([] if biased else ["qkv_bias = no"]))
    more = ", %size: f32[B, 2], %ratio: f32[B, 1]" if sized else ""
    texts = "J" if given else "D"
    return predict_patches(text, body, n, f"%texts: bf16[B, S, {texts}], %time: f32[B]{more}")


@reads(
    "Wan",
    features="PixArt of videos, q and k normed over all heads",
    marks=("WanTransformer3DModel",),
)
def read_wan(config: Config) -> ModelText:
    """Wan (arXiv 2503.20314), from texts: patches of latents of a video."""
    text = begin_images(config, "X", "S")
    text.symbol("S", 512, "tokens of a text")
    text.symbol("X", 32760, "tokens of a video: 81 frames of 480 x 832")
    read_width(config, text, 40, 128)
    read_size(config, text, "F", "ffn_dim", default=13824)
    read_size(config, text, "J", "text_dim", default=4096)
    read_size(config, text, "U", "freq_dim", default=256)
    text.symbol("L", config.layers("num_layers", default=40), "num_layers")
    each = 1
    for size in config.sizes("patch_size", length=3, least=1) or (1, 2, 2):
        each *= size
    channels = config.size("in_channels", default=16)
    text.symbol("C", each * channels, "in_channels * patch_size")
    size = each * config.size("out_channels", default=channels)
    text.symbol("C_out", size, "out_channels * patch_size")
    config.only("qk_norm", "rms_norm_across_heads")
    for key in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
        config.only(key)
    config.skip("eps", "rope_max_seq_len")
    body = Body()
    x = projected(text, body, "x0", "%videos", "patch", "C, D")
    c = body.call("c0", _use(text, "text_condition", symbols="D J"), "%texts")
    t = embedded_time(text, body)
    given = ["qk_norm = rms", "rope = (base = 10000)"]
    given += ["cross_norm"] * config.flag("cross_attn_norm", default=True)
    n = _blocks(text, body, x, c, t, *given)
    v = projected(text, body, "v", n, "head", "D, C_out")
    body.ends(f"stg.mse[mean = B*X*C_out]({v}, %noise)")
    text.notes.append("Positions of three axes are rotated like those of one: the same work.")
    args = "%videos: bf16[B, X, C], %texts: bf16[B, S, J], %time: f32[B],"
    return text.train(f"{args} %noise: bf16[B, X, C_out]", body)
