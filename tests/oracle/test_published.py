"""Imported models compute what their papers say: the loss of the text on one device equals that of
a small implementation in numpy, written from the published definition (`numpy_layers`). More
families stand in `test_attended_models.py` and `test_towers_in_numpy.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from tests import numpy_layers as nn
from tests.configurations import small
from tests.support import EXHAUSTIVE, inputs_of, run_numeric, run_passes

Array = Any
Params = Mapping[str, Array]
Model = Callable[[Params], float]
#: One layer: from the stream and the layer's parameters to the stream.
Layer = Callable[[Array, Params], Array]


def under(p: Params, prefix: str) -> dict[str, Array]:
    """The parameters whose names begin with a prefix, by the rest of their names."""
    return {k.removeprefix(f"{prefix}/"): v for k, v in p.items() if k.startswith(f"{prefix}/")}


def stack(x: Array, p: Params, layers: Mapping[str, Layer], order: str) -> Array:
    """Layers of several kinds, one after the other; each takes its kind's next parameters."""
    taken = dict.fromkeys(layers, 0)
    for kind in order.split():
        own = {k: v[taken[kind]] for k, v in under(p, kind).items()}
        x, taken[kind] = layers[kind](x, own), taken[kind] + 1
    return x


def loss(logits: Array, labels: Array) -> float:
    """The mean cross entropy."""
    chosen = np.take_along_axis(nn.softmax(logits), labels[..., None], -1)
    return float(-np.log(chosen).mean())


def language_loss(y: Array, p: Params, norm: Callable[..., Array] = nn.rms) -> float:
    """The loss behind a last norm and a head, maybe the table of the embedding."""
    own = under(p, "lm_head")
    scale = next(p[n] for n in ("lm_head/norm/scale", "lm_loss/norm", "norm") if n in p)
    head = own["head"] if "head" in own else p.get("head", p["embed"].T)
    bias = [own["norm/bias"]] if "norm/bias" in own else []
    return loss(norm(y, scale, *bias) @ head, p["labels"])


def residual(mixer: Layer, block: Layer, norm: Callable[[Array, Array], Array] = nn.rms) -> Layer:
    """A norm before each part, and after it where the layer has such norms."""

    def layer(x: Array, p: Params) -> Array:
        for name, part in (("attn", mixer), ("ffn", block)):
            y = part(norm(x, p[f"{name}_norm"]), p)
            post = p.get(f"{name}_post_norm")
            x = x + (y if post is None else norm(y, post))
        return x

    return layer


def attends(name: str, **more: Any) -> Layer:
    return lambda x, p: nn.self_attention(x, under(p, name), **more)


def feeds(name: str, act: Callable[[Array], Array] = nn.silu) -> Layer:
    return lambda x, p: nn.gated(x, under(p, name), act)


def one_centred(x: Array, w: Array) -> Array:
    """RMSNorm whose scale is 1 + w."""
    return nn.rms(x, 1 + w)


def turned(base: float, **more: Any) -> Callable[[Array], Array]:
    return lambda x: nn.rope(x, base, **more)


# -- decoders --------------------------------------------------------------------------------------


def llama(p: Params) -> float:
    layer = residual(attends("attention", turn=turned(100)), feeds("swiglu"))
    return language_loss(stack(p["embed"][p["tokens"]], p, {"layers": layer}, "layers " * 4), p)


def qwen3(p: Params) -> float:
    mixer = attends("attention", turn=turned(100), norm=nn.rms)
    layer = residual(mixer, feeds("swiglu"))
    return language_loss(stack(p["embed"][p["tokens"]], p, {"layers": layer}, "layers " * 4), p)


def mixture(x: Array, own: Params) -> Array:
    """Two experts of the softmax; a shared one, maybe behind a gate of its own."""
    moe = under(own, "moe")
    y = nn.experts(x, under(moe, "experts"), nn.softmax_of_chosen, x @ moe["router"], 2)
    shared = under(moe, "shared")
    if shared:
        y = y + nn.sigmoid(x @ moe["shared_gate"])[..., None] * nn.gated(x, shared)
    return y


def mixtral(p: Params) -> float:
    layer = residual(attends("attention", turn=turned(100)), mixture)
    return language_loss(stack(p["embed"][p["tokens"]], p, {"layers": layer}, "layers " * 4), p)


def deepseek_v3(p: Params) -> float:
    def block(x: Array, own: Params) -> Array:
        moe = under(own, "moe")
        weights = nn.normed_sigmoids(2.5)
        y = nn.experts(x, under(moe, "experts"), weights, x @ moe["router"], 2)
        return y + nn.gated(x, under(moe, "shared"))

    def mixer(x: Array, own: Params) -> Array:
        return nn.latent_attention(x, under(own, "mla"), 100)

    layers = {"dense": residual(mixer, feeds("swiglu")), "sparse": residual(mixer, block)}
    return language_loss(stack(p["embed"][p["tokens"]], p, layers, "dense" + 3 * " sparse"), p)


def gpt2(p: Params) -> float:
    def layer(x: Array, p: Params) -> Array:
        n = nn.layer_norm(x, p["attn_norm_w"], p["attn_norm_b"])
        x = x + nn.self_attention(n, under(p, "attention"))
        n = nn.layer_norm(x, p["ffn_norm_w"], p["ffn_norm_b"])
        return x + nn.mlp(n, under(p, "mlp"), nn.gelu_tanh)

    x = p["embed"][p["tokens"]] + p["positions"][: p["tokens"].shape[1]]
    x = stack(x, p, {"layers": layer}, "layers " * 4)
    return language_loss(x, p, nn.layer_norm)


# -- scans -----------------------------------------------------------------------------------------


def state_space(name: str, block: Layer, p: Params) -> float:
    def layer(x: Array, p: Params) -> Array:
        return x + block(nn.rms(x, p["ssm_norm"]), under(p, name))

    return language_loss(stack(p["embed"][p["tokens"]], p, {"layers": layer}, "layers " * 4), p)


def mamba2(x: Array, p: Params) -> Array:
    """Mamba-2, whose convolutions stand behind all projections."""
    own = {f"{n}/in/w": p[f"{n}/w"] for n in "ubc"}
    own |= {f"{n}/{k}": p[f"conv_{n}/{k}"] for n in "ubc" for k in ("conv", "conv_bias")}
    return nn.mamba2(x, {**p, **own})


def qwen3_next(p: Params) -> float:
    more = {"turn": turned(10000, first=4), "norm": one_centred}
    layers = {
        "delta": residual(
            lambda x, p: nn.gated_delta(x, under(p, "gated_delta")), mixture, one_centred
        ),
        "attention": residual(attends("attention", **more), mixture, one_centred),
    }
    x = stack(p["embed"][p["tokens"]], p, layers, "delta attention delta attention")
    return language_loss(x, p, one_centred)


def minimax(p: Params) -> float:
    """The stream that a block is added to is the normed one (post-norm), times alpha."""

    def layer(mixer: Layer, alpha: float) -> Layer:
        def run(x: Array, p: Params) -> Array:
            n = nn.rms(x, p["attn_norm"])
            n = nn.rms(alpha * n + mixer(n, p), p["ffn_norm"])
            return n + mixture(n, p)

        return run

    layers = {
        "lightning": layer(lambda x, p: nn.lightning(x, under(p, "lightning")), 1.5),
        "attention": layer(attends("attention", turn=turned(1000000)), 1),
    }
    order = "lightning lightning attention lightning"
    return language_loss(stack(p["embed"][p["tokens"]], p, layers, order), p)


def normed(x: Array, p: Params, name: str) -> Array:
    """LayerNorm with the parameters of this name."""
    return nn.layer_norm(x, p[f"{name}_w"], p[f"{name}_b"])


def rwkv(name: str, time: Callable[[Array, Params], Array], p: Params) -> float:
    """RWKV-4 and -6, whose time mixing is of this name."""

    def layer(x: Array, p: Params) -> Array:
        x = x + time(normed(x, p, "time_norm"), under(p, name))
        n, own = normed(x, p, "channel_norm"), under(p, "rwkv6_channel")
        k, r = (n + (nn.before(n) - n) * own[f"{name}/mix"] for name in "kr")
        return x + nn.sigmoid(r @ own["w_r"]) * (np.maximum(k @ own["w_k"], 0) ** 2 @ own["w_v"])

    x = normed(p["embed"][p["tokens"]], p, "embed_norm")
    x = stack(x, p, {"layers": layer}, " ".join(["layers"] * 4))
    return language_loss(x, p, nn.layer_norm)


def xlstm(p: Params) -> float:
    """xLSTM, whose logits are bounded by 30."""
    layer = residual(lambda x, p: nn.xlstm(x, under(p, "xlstm")), feeds("swiglu"))
    x = stack(p["embed"][p["tokens"]], p, {"layers": layer}, "layers " * 4)
    logits = nn.rms(x, p["lm_head/norm/scale"]) @ p["lm_head/head"]
    return loss(30 * np.tanh(logits / 30), p["labels"])


def rwkv7(p: Params) -> float:
    def layer(x: Array, p: Params, first: Array | None) -> tuple[Array, Array]:
        n = normed(x, p, "time_norm")
        x_v = n + (nn.before(n) - n) * p["v/mix"]
        if first is None:
            v = nn.heads_of(x_v, p["rwkv7_values/w_v"])
        else:
            own = under(p, "rwkv7_blend")
            v = nn.heads_of(x_v, own["rwkv7_values/w_v"])
            share = nn.sigmoid(own["v0"] + np.tensordot(x_v @ own["v1"], own["v2"], 1))
            v = v + (first - v) * share
        x = x + nn.rwkv7_time(n, under(p, "rwkv7_time"), v)
        n, own = normed(x, p, "channel_norm"), under(p, "rwkv7_channel")
        mixed = n + (nn.before(n) - n) * own["token_mix/mix"]
        return x + np.maximum(mixed @ own["w_k"], 0) ** 2 @ own["w_v"], v

    x = normed(p["embed"][p["tokens"]], p, "embed_norm")
    x, first = layer(x, under(p, "first"), None)
    for i in range(4):
        x, _ = layer(x, {k: v[i] for k, v in under(p, "layers/rwkv7_layer").items()}, first)
    return language_loss(x, p, nn.layer_norm)


#: Model types with further keys of their configuration, and what they compute.
MODELS: Mapping[str, tuple[dict[str, Any], Model]] = {
    "llama": ({"num_key_value_heads": 2}, llama),
    "qwen3": ({"num_key_value_heads": 2}, qwen3),
    "mixtral": ({"num_key_value_heads": 2}, mixtral),
    "deepseek_v3": ({"routed_scaling_factor": 2.5}, deepseek_v3),
    "gpt2": ({}, gpt2),
    "mamba": ({}, partial(state_space, "mamba", nn.mamba)),
    "mamba2": ({"n_groups": 2}, partial(state_space, "mamba2", mamba2)),
    "qwen3_next": ({"num_key_value_heads": 2}, qwen3_next),
    "minimax_m1": ({}, minimax),
    "rwkv": ({}, partial(rwkv, "rwkv4_time", nn.rwkv4_time)),
    "rwkv6": ({}, partial(rwkv, "rwkv6_time", nn.rwkv6_time)),
    "rwkv7": ({}, rwkv7),
    "xlstm": ({}, xlstm),
}
QUICK = ("llama", "deepseek_v3", "mamba2", "qwen3_next", "rwkv", "rwkv6", "rwkv7")


@pytest.mark.parametrize(
    "model_type", [pytest.param(m, marks=() if m in QUICK else EXHAUSTIVE) for m in MODELS]
)
def test_the_forward_program_is_the_published_one(model_type: str, tmp_path: Path) -> None:
    keys, published = MODELS[model_type]
    path = tmp_path / f"{model_type}.json"
    path.write_text(json.dumps(small(model_type, **keys)))
    sizes = {"B": 2, "S": 12}
    module = JobBuilder(JobOptions(str(path), sizes=sizes)).module
    module = run_passes(module, "inline,infer-shapes")
    inputs = inputs_of(module, 3)
    actual = float(run_numeric(module, inputs)[0])
    assert actual == pytest.approx(published(inputs), rel=1e-9)
