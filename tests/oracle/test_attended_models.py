"""Imported models with windows, blocks, sinks, bounds and selected keys: their loss is that of
plain implementations of the published models, written here token by token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.ir.opdef import Array
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from tests.configurations import small
from tests.support import inputs_of, run_numeric, run_passes

B, S, HEADS, BASE = 2, 12, 4, 100
Params = Mapping[str, Array]


def rms(x: Array, scale: Array | float = 1.0) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def layer_norm(x: Array, scale: Array, bias: Array | float = 0.0) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + bias


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: Array) -> Array:
    return np.asarray(x * sigmoid(x))


def gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def rope(x: Array, base: float = BASE, neighbours: bool = False) -> Array:
    """[s, ..., k] as complex numbers that turn."""
    half = x.shape[-1] // 2
    angles = np.array([[t * base ** (-n / half) for n in range(half)] for t in range(len(x))])
    turn = np.exp(1j * angles).reshape(len(x), *([1] * (x.ndim - 2)), half)
    if neighbours:
        z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], -1)


def everything(i: int, j: int) -> bool:
    return True


def near(i: int, j: int) -> bool:
    return i - j < 6


def same_block(i: int, j: int) -> bool:
    return i // 4 == j // 4


def attend(
    q: Array,
    k: Array,
    v: Array,
    sees: Callable[[int, int], bool],
    *,
    divisor: float | None = None,
    cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """[s, h, k] with [s, g, k]: one query and one head at a time."""
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if j <= i and sees(i, j)]
        for h in range(q.shape[1]):
            g = h * k.shape[1] // q.shape[1]
            scores = np.array([q[i, h] @ k[j, g] for j in keys]) / (divisor or q.shape[2] ** 0.5)
            if cap:
                scores = cap * np.tanh(scores / cap)
            shares = softmax(scores if sinks is None else np.append(scores, sinks[h]))
            out[i, h] = sum((p * v[j, g] for p, j in zip(shares, keys, strict=False)), 0 * v[0, 0])
    return out


def projected(x: Array, p: Params, name: str) -> Array:
    actual = np.einsum("sd,dhk->shk", x, p[f"w{name}"])
    return np.asarray(actual + p[f"b{name}"] if f"b{name}" in p else actual)


def experts_of(token: int, count: int) -> list[int]:
    """The experts of a token, of four. The numeric reference of the router takes these whatever the
    scores are, so that the load is balanced (docs/decisions/experts.md#015)."""
    return [(token * count + n) % 4 for n in range(count)]


def output(a: Array, p: Params) -> Array:
    return np.asarray(np.einsum("shk,hkd->sd", a, p["wo"]) + p.get("bo", 0))


def gated(x: Array, p: Params, act: Callable[[Array], Array] = silu) -> Array:
    gate, up = np.einsum("sd,dzf->zsf", x, p["w_gate_up"])
    return np.asarray((act(gate) * up) @ p["w_down"])


def inside(p: Params, block: str) -> Params:
    """The parameters of a block, by their names in it."""
    return {n.removeprefix(f"{block}/"): v for n, v in p.items() if n.startswith(f"{block}/")}


Layer = Callable[[Array, Params, int], Array]


def gemma2(x: Array, p: Params, i: int) -> Array:
    local = i % 2 == 0
    w = inside(p, "attention")
    n = rms(x, 1 + p["attn_norm"])
    q, k = rope(projected(n, w, "q")), rope(projected(n, w, "k"))
    sees = near if local else everything
    a = output(attend(q, k, projected(n, w, "v"), sees, divisor=2, cap=50), w)
    x = x + rms(a, 1 + p["attn_post_norm"])
    f = gated(rms(x, 1 + p["ffn_norm"]), inside(p, "swiglu"), gelu)
    return x + rms(f, 1 + p["ffn_post_norm"])


def gemma3(x: Array, p: Params, i: int) -> Array:
    local = i % 2 == 0
    w = inside(p, "attention")
    n, base = rms(x, 1 + p["attn_norm"]), 10000 if local else BASE
    q = rope(rms(projected(n, w, "q"), 1 + w["q_norm/scale"]), base)
    k = rope(rms(projected(n, w, "k"), 1 + w["k_norm/scale"]), base)
    sees = near if local else everything
    a = output(attend(q, k, projected(n, w, "v"), sees, divisor=16), w)
    x = x + rms(a, 1 + p["attn_post_norm"])
    f = gated(rms(x, 1 + p["ffn_norm"]), inside(p, "swiglu"), gelu)
    return x + rms(f, 1 + p["ffn_post_norm"])


def olmo2(x: Array, p: Params, i: int) -> Array:
    w = inside(p, "attention")
    q, k = (projected(x, w, n) for n in "qk")
    q = rope(rms(q.reshape(S, -1), w["q_norm/scale"]).reshape(q.shape))
    k = rope(rms(k.reshape(S, -1), w["k_norm/scale"]).reshape(k.shape))
    a = output(attend(q, k, projected(x, w, "v"), everything), w)
    x = x + rms(a, p["attn_post_norm"])
    return x + rms(gated(x, inside(p, "swiglu")), p["ffn_post_norm"])


def cohere2(x: Array, p: Params, i: int) -> Array:
    local = (i + 1) % 4 != 0
    w = inside(p, "attention")
    n = layer_norm(x, p["norm"])
    q, k, v = (projected(n, w, name) for name in "qkv")
    if local:
        q, k = rope(q, neighbours=True), rope(k, neighbours=True)
    sees = near if local else everything
    return x + output(attend(q, k, v, sees), w) + gated(n, inside(p, "swiglu"))


def gpt_oss(x: Array, p: Params, i: int) -> Array:
    local = i % 2 == 0
    w = inside(p, "attention")
    n = rms(x, p["attn_norm"])
    q, k = rope(projected(n, w, "q")), rope(projected(n, w, "k"))
    sees = near if local else everything
    x = x + output(attend(q, k, projected(n, w, "v"), sees, sinks=w["sinks"]), w)
    n, m, e = rms(x, p["ffn_norm"]), inside(p, "moe"), inside(p, "moe/experts")
    out = np.zeros_like(x)
    for s in range(S):
        logits = n[s] @ m["router"] + m["router_bias"]
        chosen = experts_of(s, 2)
        for share, which in zip(softmax(logits[chosen]), chosen, strict=True):
            gate, up = np.einsum("d,dzm->zm", n[s], e["w_gate_up"][which]) + e["b_gate_up"][which]
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            made = (up + 1) * gate * sigmoid(1.702 * gate)
            out[s] += share * (made @ e["w_down"][which] + e["b_down"][which])
    return x + out


def llama4(x: Array, p: Params, i: int) -> Array:
    local = (i + 1) % 4 != 0
    w = inside(p, "attention")
    n = rms(x, p["attn_norm"])
    q, k, v = (projected(n, w, name) for name in "qkv")
    if local:
        q, k = rms(rope(q, neighbours=True)), rms(rope(k, neighbours=True))
    else:
        q = q * (np.log(np.floor((np.arange(S) + 1) / 8192) + 1) * 0.1 + 1)[:, None, None]
    sees = same_block if local else everything
    x = x + output(attend(q, k, v, sees), w)
    n = rms(x, p["ffn_norm"])
    if i % 2 == 0:
        return x + gated(n, inside(p, "swiglu"))
    e, out = inside(p, "moe/experts"), gated(n, inside(p, "moe/shared"))
    for s in range(S):
        logits = n[s] @ p["moe/router"]
        (which,) = experts_of(s, 1)
        one = {name: value[which] for name, value in e.items()}
        out[s] += gated(n[s : s + 1] * sigmoid(logits[which]), one)[0]
    return x + out


def deepseek_v32(x: Array, p: Params, i: int) -> Array:
    w = inside(p, "mla")
    n = rms(x, p["attn_norm"])
    latent = rms(n @ w["wq_a"], w["q_norm"])
    q = np.einsum("sq,qhk->shk", latent, w["wq_b"])
    q = np.concatenate([q[..., :4], rope(q[..., 4:])], -1)
    c, turned = rms(n @ w["wkv_a"], w["kv_norm"]), rope(n @ w["wk_rope"])
    k = np.einsum("sc,chk->shk", c, w["wk_b"])
    k = np.concatenate([k, np.repeat(turned[:, None], HEADS, 1)], -1)
    v = np.einsum("sc,chw->shw", c, w["wv_b"])
    z = inside(w, "indexer")
    qi = np.einsum("sq,qij->sij", latent, z["wq"])
    ki = layer_norm(n @ z["wk"], z["k_norm_w"], z["k_norm_b"])
    qi = np.concatenate([rope(qi[..., :2]), qi[..., 2:]], -1)
    ki = np.concatenate([rope(ki[..., :2]), ki[..., 2:]], -1)
    best: list[set[int]] = []
    for s in range(S):
        scores = [np.maximum(qi[s] @ ki[t], 0) @ (n[s] @ z["weights"]) for t in range(s + 1)]
        best.append(set(np.argsort(-np.array(scores), kind="stable")[:5].tolist()))
    a = attend(q, k, v, lambda s, t: t in best[s], divisor=6**0.5)
    x = x + output(a, w)
    n = rms(x, p["ffn_norm"])
    if i < 1:
        return x + gated(n, inside(p, "swiglu"))
    m, e, out = inside(p, "moe"), inside(p, "moe/experts"), gated(n, inside(p, "moe/shared"))
    for s in range(S):
        shares = sigmoid(n[s] @ m["router"])
        chosen = experts_of(s, 2)
        for which in chosen:
            one = {name: value[which] for name, value in e.items()}
            # 2.5 is what its class scales by, unless told
            share = 2.5 * shares[which] / shares[chosen].sum()
            out[s] += share * gated(n[s : s + 1], one)[0]
    return x + out


def kinds(model: str) -> list[str]:
    """What the four layers of a model are called."""
    if model == "llama4_text":
        return ["local_dense", "local_sparse", "local_dense", "global_sparse"]
    if model == "deepseek_v32":
        return ["dense", "sparse", "sparse", "sparse"]
    if model == "cohere2":
        return ["local", "local", "local", "global"]
    return ["layers"] * 4 if model == "olmo2" else ["local", "global"] * 2


MODELS: Mapping[str, tuple[Layer, Mapping[str, Any]]] = {
    "gemma2": (gemma2, {"scale": 32**0.5, "cap": 30, "centered": True}),
    "gemma3_text": (gemma3, {"scale": 32**0.5, "centered": True}),
    "olmo2": (olmo2, {}),
    "cohere2": (cohere2, {"norm": layer_norm, "logit_scale": 1 / 16}),
    "gpt_oss": (gpt_oss, {}),
    "llama4_text": (llama4, {}),
    "deepseek_v32": (deepseek_v32, {}),
}


def loss_of(model: str, given: Params) -> float:
    """The mean cross entropy of all tokens."""
    layer, ends = MODELS[model]
    order = kinds(model)
    total = 0.0
    for b in range(B):
        x = given["embed"][given["tokens"][b]] * ends.get("scale", 1)
        for i, kind in enumerate(order):
            place = order[:i].count(kind)
            stacked = inside(given, kind)
            x = layer(x, {n: v[place] for n, v in stacked.items()}, i)
        scale = next(given[n] for n in ("lm_head/norm/scale", "lm_loss/norm", "norm") if n in given)
        x = ends.get("norm", rms)(x, 1 + scale if ends.get("centered") else scale)
        heads = (given[n] for n in ("lm_head/head", "head") if n in given)
        head = next(heads, given["embed"].T)
        logits = x @ head * ends.get("logit_scale", 1)
        if "cap" in ends:
            logits = ends["cap"] * np.tanh(logits / ends["cap"])
        for s in range(S):
            total -= math.log(softmax(logits[s])[given["labels"][b, s]])
    return total / (B * S)


@pytest.mark.parametrize("model", MODELS)
def test_loss_is_that_of_the_published_model(model: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(model)))
    builder = JobBuilder(JobOptions(str(path), sizes={"B": B, "S": S}))
    module = run_passes(builder.module, "inline,infer-shapes")
    inputs: dict[str, Array] = inputs_of(module, 7)
    (actual,) = run_numeric(module, inputs)
    np.testing.assert_allclose(actual, loss_of(model, inputs), rtol=1e-5)
