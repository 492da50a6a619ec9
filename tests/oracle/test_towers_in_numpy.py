"""Imported encoders against small implementations in numpy: the loss of a step is theirs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from stagec.ir.opdef import Array
from tests.oracle.test_towers import plain
from tests.towers import TOWERS

Inputs = dict[str, Array]


def layer_norm(x: Array, w: Array | float = 1.0, b: Array | float = 0.0) -> Array:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * w + b


def rms_norm(x: Array, w: Array | float = 1.0) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(x: Array) -> Array:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def cross_entropy(logits: Array, labels: Array) -> float:
    chosen = np.take_along_axis(np.log(softmax(logits)), labels[..., None], -1)
    return float(-chosen.mean())


def attention(
    p: Inputs,
    name: str,
    i: int,
    x: Array,
    c: Array,
    *,
    bias: Array | float = 0.0,
    scale: bool = True,
) -> Array:
    """Attention of layer i from x to c; biases that are missing are zero."""

    def project(out: str, of: Array) -> Array:
        w, b = f"{name}/w{out}", f"{name}/b{out}"
        if w not in p:  # projected by a block
            w, b = f"{name}/{out}/w", f"{name}/{out}/b"
        return np.tensordot(of, p[w][i], 1) + (p[b][i] if b in p else 0.0)

    q, k, v = project("q", x), project("k", c), project("v", c)
    scores = np.einsum("bshk,bthk->bhst", q, k)
    scores = scores / math.sqrt(q.shape[-1]) if scale else scores
    a = np.einsum("bhst,bthk->bshk", softmax(scores + bias), v)
    added = p[f"{name}/bo"][i] if f"{name}/bo" in p else 0.0
    return np.tensordot(a, p[f"{name}/wo"][i], 2) + added


def mlp(p: Inputs, name: str, i: int, x: Array, act: Any) -> Array:
    up = p[f"{name}/b_up"][i] if f"{name}/b_up" in p else 0.0
    down = p[f"{name}/b_down"][i] if f"{name}/b_down" in p else 0.0
    return act(x @ p[f"{name}/w_up"][i] + up) @ p[f"{name}/w_down"][i] + down


def norm(p: Inputs, name: str, x: Array, i: int | None = None) -> Array:
    w, b = p[f"{name}_w"], p[f"{name}_b"]
    return layer_norm(x, w, b) if i is None else layer_norm(x, w[i], b[i])


def causal(n: int) -> Array:
    return np.where(np.tri(n) > 0, 0.0, -np.inf)


def bert(p: Inputs) -> float:
    x = p["embed"][p["tokens"]] + p["type_embed"][p["types"]] + p["positions"]
    x = norm(p, "embed_norm", x)
    for i in range(4):
        x = norm(p, "layers/attn_norm", x + attention(p, "layers/attention", i, x, x), i)
        x = norm(p, "layers/mlp_norm", x + mlp(p, "layers/mlp", i, x, gelu), i)
    name = "masked_words"
    t = norm(p, f"{name}/norm", gelu(x @ p[f"{name}/w"] + p[f"{name}/b"]))
    return cross_entropy(t @ p["embed"].T + p[f"{name}/head_bias"], p["labels"])


def vit(p: Inputs) -> float:
    x = _patches(p, "patches", p["images"], 2)
    first = np.broadcast_to(p["class_token"], (len(x), 1, x.shape[-1]))
    x = np.concatenate([first, x], 1) + p["positions"]
    x = _pre_norm(p, "layers", "attention", 4, x, gelu)
    c = norm(p, "norm", x)[:, 0]
    return cross_entropy(c @ p["classifier/w"] + p["classifier/b"], p["labels"])


def _patches(p: Inputs, name: str, images: Array, size: int) -> Array:
    """Every patch by itself."""
    height, width = images.shape[2:]
    rows: list[Array] = []
    for top in range(0, height, size):
        for left in range(0, width, size):
            patch = images[:, :, top : top + size, left : left + size]
            rows.append(np.tensordot(patch, p[f"{name}/w"], 3))
    actual: Array = np.stack(rows, 1)
    return actual + p[f"{name}/b"] if f"{name}/b" in p else actual


def _pre_norm(
    p: Inputs, where: str, name: str, count: int, x: Array, act: Any, mask: Array | float = 0.0
) -> Array:
    for i in range(count):
        n = norm(p, f"{where}/attn_norm", x, i)
        x = x + attention(p, f"{where}/{name}", i, n, n, bias=mask)
        x = x + mlp(p, f"{where}/mlp", i, norm(p, f"{where}/mlp_norm", x, i), act)
    return x


def clip(p: Inputs) -> float:
    def quick(x: Array) -> Array:
        return x / (1 + np.exp(-1.702 * x))

    x = _patches(p, "patches", p["images"], 2)
    first = np.broadcast_to(p["class_token"], (len(x), 1, x.shape[-1]))
    x = norm(p, "pre_norm", np.concatenate([first, x], 1) + p["positions"])
    i = norm(p, "post_norm", _pre_norm(p, "vision", "attention", 4, x, quick)[:, 0]) @ p["w_image"]
    x = p["embed"][p["tokens"]] + p["text_positions"]
    x = _pre_norm(p, "text", "causal_attention", 2, x, quick, causal(x.shape[1]))
    w = norm(p, "text_norm", x)[np.arange(len(x)), p["ends"]] @ p["w_text"]
    i, w = (v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (i, w))
    logits = i @ w.T * np.exp(p["contrastive/similarities/logit_scale"])
    return (cross_entropy(logits, p["pairs"]) + cross_entropy(logits.T, p["pairs"])) / 2


def buckets(length: int, *, both: bool, count: int = 4, most: int = 128) -> Array:
    """The class of each distance, one by one (arXiv 1910.10683, section 2.1)."""
    actual = np.zeros((length, length), dtype=int)
    n = count // 2 if both else count
    exact = n // 2
    for query in range(length):
        for key in range(length):
            far = abs(key - query) if both else max(query - key, 0)
            if far >= exact:
                share = math.log(far / exact) / math.log(most / exact)
                far = min(exact + int(share * (n - exact)), n - 1)
            actual[query, key] = far + (n if both and key > query else 0)
    return actual


def t5(p: Inputs) -> float:
    def relu(x: Array) -> Array:
        return np.maximum(x, 0)

    def own(where: str, name: str, x: Array, mask: Array | float, i: int) -> Array:
        n = rms_norm(x, p[f"{where}_norm"][i])
        return x + attention(p, name, i, n, n, bias=mask, scale=False)

    x = p["embed"][p["tokens"]]
    bias = np.moveaxis(p["encoder_bias_table"][buckets(x.shape[1], both=True)], -1, 0)
    for i in range(4):
        x = own("encoder/attn", "encoder/attention", x, bias, i)
        x = x + mlp(p, "encoder/mlp", i, rms_norm(x, p["encoder/mlp_norm"][i]), relu)
    e = rms_norm(x, p["encoder_norm"])
    x = p["embed"][p["targets"]]
    bias = np.moveaxis(p["decoder_bias_table"][buckets(x.shape[1], both=False)], -1, 0)
    for i in range(4):
        mask = bias + causal(x.shape[1])
        x = own("decoder/self", "decoder/causal_attention", x, mask, i)
        n = rms_norm(x, p["decoder/cross_norm"][i])
        x = x + attention(p, "decoder/cross_attention", i, n, e, scale=False)
        x = x + mlp(p, "decoder/mlp", i, rms_norm(x, p["decoder/mlp_norm"][i]), relu)
    y = rms_norm(x, p["norm"]) / math.sqrt(x.shape[-1])
    return cross_entropy(y @ p["embed"].T, p["labels"])


def whisper(p: Inputs) -> float:
    x = p["mel"]
    for name, stride in (("conv_a", 1), ("conv_b", 2)):
        w = p[f"w_{name}"]
        wide = np.pad(x, ((0, 0), (1, 1), (0, 0)))
        starts = range(0, x.shape[1], stride)
        windows = [np.tensordot(wide[:, s : s + 3], w, 2) for s in starts]
        x = gelu(np.stack(windows, 1) + p[f"b_{name}"])
    x = x + p["encoder_positions"]
    e = norm(p, "encoder_norm", _pre_norm(p, "encoder", "attention", 4, x, gelu))
    x = p["embed"][p["targets"]] + p["positions"]
    for i in range(4):
        n = norm(p, "decoder/self_norm", x, i)
        x = x + attention(p, "decoder/causal_attention", i, n, n, bias=causal(x.shape[1]))
        n = norm(p, "decoder/cross_norm", x, i)
        x = x + attention(p, "decoder/cross_attention", i, n, e)
        x = x + mlp(p, "decoder/mlp", i, norm(p, "decoder/mlp_norm", x, i), gelu)
    return cross_entropy(norm(p, "norm", x) @ p["embed"].T, p["labels"])


def convolved(x: Array, w: Array, stride: int) -> Array:
    """Windows [b, s, width, c] of a sound, times weights [width, c, d]."""
    starts = range(0, x.shape[1] - len(w) + 1, stride)
    return np.stack([np.tensordot(x[:, i : i + len(w)], w, 2) for i in starts], 1)


def wavlm(p: Inputs) -> float:
    x = convolved(p["sounds"], p["front_0/w"], 5)
    x = layer_norm(x.swapaxes(1, 2)).swapaxes(1, 2) * p["front_0/norm_w"] + p["front_0/norm_b"]
    x = gelu(convolved(gelu(convolved(gelu(x), p["front_1/w"], 2)), p["front_2/w"], 2))
    x = norm(p, "front_norm", x) @ p["front/w"] + p["front/b"]
    w = p["positions/direction"]
    w = w / np.sqrt((w * w).sum((1, 2, 3), keepdims=True))
    w = w * p["positions/length"][:, None, None, None]
    around = np.pad(x, ((0, 0), (4, 4), (0, 0)))
    groups = np.split(around, 2, -1)
    near = np.concatenate([convolved(x, w[:, g], 1) for g, x in enumerate(groups)], -1)
    x = norm(p, "norm", x + gelu(near[:, : x.shape[1]] + p["positions/b"]))
    bias = np.moveaxis(p["bias_table"][buckets(x.shape[1], both=True, count=8, most=800)], -1, 0)
    name = "layers/attention"
    for i in range(4):
        parts = np.stack(np.split(x, 4, -1), 1)  # of each head
        gates = np.tensordot(parts, p[f"{name}/w_gate"][i], 1) + p[f"{name}/b_gate"][i]
        a, b = np.moveaxis(1 / (1 + np.exp(-gates.sum(-1))), -1, 0)
        gate = a * (b * p[f"{name}/scale"][i][:, None] - 1) + 2
        x = norm(
            p, "layers/attn_norm", x + attention(p, name, i, x, x, bias=gate[..., None] * bias), i
        )
        x = norm(p, "layers/mlp_norm", x + mlp(p, "layers/mlp", i, x, gelu), i)
    return float(((x - p["target"]) ** 2).mean())


def swinv2(p: Inputs) -> float:
    """Three stages of 8, 4 and 2 patches along a side, in windows of 4; each patch is a pixel."""
    x = np.moveaxis(p["images"], 1, -1) @ p["patch_grid/w"][:, 0, 0] + p["patch_grid/b"]
    x = norm(p, "patch_grid/norm", x)
    for stage, window in ((1, 4), (2, 4), (3, 2)):
        if stage > 1:
            corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
            joined = np.concatenate(corners, -1) @ p[f"merged_{stage}/w"]
            x = norm(p, f"merged_{stage}/norm", joined)
        for layer in ("whole", "shifted") if stage == 1 else ("swin2",):
            name = f"stage_{stage}/{layer}"
            shift = 2 if layer == "shifted" else 0
            a = in_windows(p, name, np.roll(x, (-shift, -shift), (1, 2)), window, stage)
            x = x + norm(p, f"{name}/attn_norm", np.roll(a, (shift, shift), (1, 2)), 0)
            x = x + norm(p, f"{name}/mlp_norm", mlp(p, f"{name}/swin_network", 0, x, gelu), 0)
    return float(((norm(p, "norm", x).mean((1, 2)) - p["target"]) ** 2).mean())


def in_windows(p: Inputs, layer: str, x: Array, size: int, stage: int) -> Array:
    """Attention of each window by itself."""
    masked = layer.endswith("shifted")
    name, end = f"{layer}/cosine_windows", "_3" if stage == 3 else ""
    near, out = f"{name}/near_biases", f"{name}/window_attention"
    hidden = p[f"coords{end}"] @ p[f"{near}/w_up"][0] + p[f"{near}/b_up"][0]
    rows = np.maximum(hidden, 0) @ p[f"{near}/w_down"][0]
    bias = 16 / (1 + np.exp(-np.moveaxis(rows[p[f"pairs{end}"]], -1, 0)))
    sharp = np.exp(np.minimum(p[f"{name}/sharpness/power"][0], 4.60517))
    actual, number = np.zeros_like(x), 0
    for top in range(0, x.shape[1], size):
        for left in range(0, x.shape[2], size):
            here = (slice(None), slice(top, top + size), slice(left, left + size))
            rows = x[here].reshape(len(x), size * size, -1)
            q, k, v = (np.tensordot(rows, p[f"{name}/{n}/w"][0], 1) for n in "qkv")
            q, v = q + p[f"{name}/q/b"][0], v + p[f"{name}/v/b"][0]
            q, k = (t / np.linalg.norm(t, axis=-1, keepdims=True) for t in (q, k))
            scores = np.einsum("bshk,bthk->bhst", q, k) * sharp[:, None, None] + bias
            scores = scores + p["mask_1"][number] if masked else scores
            a = np.einsum("bhst,bthk->bshk", softmax(scores), v)
            actual[here] = (np.tensordot(a, p[f"{out}/wo"][0], 2) + p[f"{out}/bo"][0]).reshape(
                x[here].shape
            )
            number += 1
    return actual


MODELS = {
    "bert": bert,
    "vit": vit,
    "clip": clip,
    "t5": t5,
    "whisper": whisper,
    "wavlm": wavlm,
    "swinv2-wide": swinv2,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_numpy(name: str) -> None:
    assert name in TOWERS
    inputs, results = plain(name)
    np.testing.assert_allclose(next(iter(results.values())), MODELS[name](inputs), rtol=1e-9)
