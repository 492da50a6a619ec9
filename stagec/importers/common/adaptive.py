"""Blocks of diffusion transformers with adaptive norms (arXiv 2212.09748): a condition shifts and
scales the results of norms, and gates the values that are added to the stream."""

from stagec.importers.common.sizes import identifier, read_size
from stagec.importers.reading.config import Config
from stagec.importers.writing.text import Body, Callee, ModelText
from stagec.importers.writing.towers import patches


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
