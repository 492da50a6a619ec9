"""Layers of published models in plain numpy, on whole sequences in float64, written from the papers
and their reference code: loops over tokens, heads and experts, with no thought of speed.

Shapes: x [B, S, D]; heads [B, S, H, K]. Weights are laid out as in the models' texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = Any
Params = Mapping[str, Array]
#: Whether the query at a position sees a key.
Mask = Callable[[int, int], bool]
EPS = 1e-5


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu_tanh(x: Array) -> Array:
    """Hendrycks and Gimpel, arXiv 1606.08415."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rms(x: Array, scale: Array | float = 1.0) -> Array:
    """arXiv 1910.07467."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale


def layer_norm(x: Array, scale: Array = 1.0, shift: Array = 0.0, eps: float = EPS) -> Array:
    """arXiv 1607.06450."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * scale + shift


def unit(x: Array) -> Array:
    """Vectors of length 1, as the kernels of the delta rule make them."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def rope(x: Array, base: float, first: int | None = None, pairs: str = "halves") -> Array:
    """arXiv 2104.09864 on the first elements of each head; pairs are halves or neighbours."""
    size = first or x.shape[-1]
    out = x.copy()
    for i in range(size // 2):
        a, b = (i, i + size // 2) if pairs == "halves" else (2 * i, 2 * i + 1)
        for s in range(x.shape[1]):
            angle = s * base ** (-2 * i / size)
            c, d = np.cos(angle), np.sin(angle)
            out[:, s, ..., a] = x[:, s, ..., a] * c - x[:, s, ..., b] * d
            out[:, s, ..., b] = x[:, s, ..., b] * c + x[:, s, ..., a] * d
    return out


# -- attention -------------------------------------------------------------------------------------


def causal(query: int, key: int) -> bool:
    return key <= query


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask = causal,
    *,
    scale: float | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    cap: float | None = None,
) -> Array:
    """Softmax attention, head by head; groups of query heads share keys (arXiv 2305.13245)."""
    b, s, heads, size = q.shape
    out = np.zeros((b, s, heads, v.shape[-1]))
    hidden = np.array([[not mask(i, j) for j in range(k.shape[1])] for i in range(s)])
    for h in range(heads):
        g = h * k.shape[2] // heads
        scores = q[:, :, h] @ k[:, :, g].swapaxes(1, 2) * (scale or size**-0.5)
        scores = cap * np.tanh(scores / cap) if cap else scores
        scores = scores if bias is None else scores + bias[h]
        scores[:, hidden] = -np.inf
        if sinks is not None:  # a logit that has no value
            sink = np.full((b, s, 1), sinks[h])
            scores = np.concatenate([scores, sink], axis=-1)
        out[:, :, h] = softmax(scores)[..., : k.shape[1]] @ v[:, :, g]
    return out


def heads_of(x: Array, w: Array, bias: Array | None = None) -> Array:
    """[B, S, D] to [B, S, H, K]."""
    y = np.tensordot(x, w, 1)
    return y if bias is None else y + bias


def merged(a: Array, wo: Array, bias: Array | None = None) -> Array:
    """[B, S, H, K] to [B, S, D]."""
    y = np.tensordot(a, wo, 2)
    return y if bias is None else y + bias


def self_attention(
    x: Array,
    p: Params,
    turn: Callable[[Array], Array] = lambda x: x,
    mask: Mask = causal,
    *,
    source: Array | None = None,
    norm: Callable[[Array, Array], Array] | None = None,
    **more: Any,
) -> Array:
    """Projections with the biases that there are, norms of queries and keys, positions, attention;
    keys and values of another `source` in cross attention."""
    y = x if source is None else source
    q, k = heads_of(x, p["wq"], p.get("bq")), heads_of(y, p["wk"], p.get("bk"))
    v = heads_of(y, p["wv"], p.get("bv"))
    if norm is not None:
        q, k = norm(q, p["q_norm/scale"]), norm(k, p["k_norm/scale"])
    a = attention(turn(q), turn(k), v, mask, sinks=p.get("sinks"), **more)
    if "wg" in p:
        a = a * sigmoid(heads_of(x, p["wg"]))
    return merged(a, p["wo"], p.get("bo"))


def latent_attention(x: Array, p: Params, base: float) -> Array:
    """Multi-head latent attention (arXiv 2405.04434, equations 37 to 47)."""
    rotated = p["wk_rope"].shape[1]
    c_q = rms(x @ p["wq_a"], p["q_norm"])
    q = heads_of(c_q, p["wq_b"])
    q_nope, q_rope = q[..., :-rotated], rope(q[..., -rotated:], base)
    c_kv = rms(x @ p["wkv_a"], p["kv_norm"])
    k_rope = rope((x @ p["wk_rope"])[:, :, None], base)
    k_nope = heads_of(c_kv, p["wk_b"])
    k_rope = np.repeat(k_rope, k_nope.shape[2], axis=2)
    q, k = np.concatenate([q_nope, q_rope], -1), np.concatenate([k_nope, k_rope], -1)
    return merged(attention(q, k, heads_of(c_kv, p["wv_b"])), p["wo"])


# -- feed-forward ----------------------------------------------------------------------------------


def gated(x: Array, p: Params, act: Callable[[Array], Array] = silu) -> Array:
    """act(x W_gate) * (x W_up), times W_down (arXiv 2002.05202)."""
    gate, up = x @ p["w_gate_up"][:, 0], x @ p["w_gate_up"][:, 1]
    return (act(gate) * up) @ p["w_down"]


def mlp(x: Array, p: Params, act: Callable[[Array], Array]) -> Array:
    up = act(x @ p["w_up"] + p.get("b_up", 0.0))
    return up @ p["w_down"] + p.get("b_down", 0.0)


#: The weights of the experts that a token takes, from its logits.
Weights = Callable[[Array, Sequence[int]], Array]


def balanced(token: int, count: int, experts: int) -> list[int]:
    """The experts of a token where all are loaded alike: the numeric reference does not choose by
    the values (docs/decisions/experts.md#015), so the papers' choice is not tested."""
    return [(token * count + j) % experts for j in range(count)]


def experts(
    x: Array,
    p: Params,
    weights: Weights,
    logits: Array,
    count: int,
    expert: Callable[[Array, Params], Array] = gated,
    *,
    scaled_inputs: bool = False,
) -> Array:
    """Each token through its experts."""
    out = np.zeros_like(x)
    for place in np.ndindex(*x.shape[:2]):
        chosen = balanced(place[1], count, logits.shape[-1])
        for e, weight in zip(chosen, weights(logits[place], chosen), strict=True):
            own = {name: w[e] for name, w in p.items()}
            if scaled_inputs:
                out[place] += expert(x[place] * weight, own)
            else:
                out[place] += weight * expert(x[place], own)
    return out


def softmax_of_chosen(logits: Array, chosen: Sequence[int]) -> Array:
    """Mixtral (arXiv 2401.04088): the softmax of the chosen logits."""
    return softmax(logits[list(chosen)])


def normed_sigmoids(scale: float) -> Weights:
    """DeepSeek-V3 (arXiv 2412.19437, equations 12 to 15): sigmoids whose sum is made `scale`."""

    def weights(logits: Array, chosen: Sequence[int]) -> Array:
        scores = sigmoid(logits[list(chosen)])
        return scores / scores.sum() * scale

    return weights


# -- scans -----------------------------------------------------------------------------------------


def causal_conv(x: Array, w: Array, bias: Array | float = 0.0) -> Array:
    """SiLU of a depth-wise convolution over the last tokens, the own one last."""
    taps = w.shape[-1]
    out = np.zeros_like(x)
    for s in range(x.shape[1]):
        for j in range(taps):
            if s - (taps - 1) + j >= 0:
                out[:, s] += x[:, s - (taps - 1) + j] * w[..., j]
    return silu(out + bias)


def mamba(x: Array, p: Params) -> Array:
    """Selective state spaces (arXiv 2312.00752, algorithm 2)."""
    rank, states = p["w_dt"].shape[0], p["A_log"].shape[1]
    u, z = x @ p["w_in"][:, 0], x @ p["w_in"][:, 1]
    u = causal_conv(u, p["conv"], p["conv_bias"])
    low, b, c = np.split(u @ p["w_x"], [rank, rank + states], axis=-1)
    dt = softplus(low @ p["w_dt"] + p["dt_bias"])
    a, h, y = -np.exp(p["A_log"]), np.zeros((*u[:, 0].shape, states)), np.zeros_like(u)
    for s in range(x.shape[1]):
        d = dt[:, s, :, None]
        h = np.exp(d * a) * h + d * b[:, s, None] * u[:, s, :, None]
        y[:, s] = (h * c[:, s, None]).sum(-1) + p["skip"] * u[:, s]
    return (y * silu(z)) @ p["w_out"]


def mamba2(x: Array, p: Params) -> Array:
    """State space duality (arXiv 2405.21060): a decay for each head and token."""
    z = heads_of(x, p["z/w"])
    u, b, c = (
        causal_conv(heads_of(x, p[f"{n}/in/w"]), p[f"{n}/conv"], p[f"{n}/conv_bias"]) for n in "ubc"
    )
    dt, a = softplus(x @ p["dt/w"] + p["dt_bias"]), -np.exp(p["A_log"])
    y = np.zeros_like(u)
    for h in range(u.shape[2]):
        g = h * b.shape[2] // u.shape[2]
        state = np.zeros((x.shape[0], u.shape[3], b.shape[3]))
        for s in range(x.shape[1]):
            d = dt[:, s, h, None, None]
            outer = u[:, s, h, :, None] * b[:, s, g, None]
            state = np.exp(d * a[h]) * state + d * outer
            y[:, s, h] = (state * c[:, s, g, None]).sum(-1) + p["skip"][h] * u[:, s, h]
    y = (y * silu(z)).reshape(*x.shape[:2], -1)
    return rms(y, p["norm"]) @ p["w_out"].reshape(-1, x.shape[2])


def gated_delta(x: Array, p: Params) -> Array:
    """The gated delta rule (arXiv 2412.06464, equation 10), as Qwen3-Next has it."""
    q, k, v = (causal_conv(heads_of(x, p[f"w_{n}"]), p[f"conv_{n}"]) for n in "qkv")
    beta = sigmoid(x @ p["w_b"])
    decay = np.exp(-np.exp(p["A_log"]) * softplus(x @ p["w_a"] + p["dt_bias"]))
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    y = np.zeros_like(v)
    for h in range(v.shape[2]):
        g = h * q.shape[2] // v.shape[2]
        state = np.zeros((x.shape[0], q.shape[3], v.shape[3]))
        for s in range(x.shape[1]):
            state = state * decay[:, s, h, None, None]
            known = (state * k[:, s, g, :, None]).sum(1)
            news = beta[:, s, h, None] * (v[:, s, h] - known)
            state = state + k[:, s, g, :, None] * news[:, None]
            y[:, s, h] = (state * q[:, s, g, :, None]).sum(1)
    return merged(rms(y, p["norm"]) * silu(heads_of(x, p["w_z"])), p["w_out"])


def lightning(x: Array, p: Params) -> Array:
    """Lightning attention (arXiv 2501.08313): a sum over earlier tokens that decays by a constant
    of each head; a norm of all heads, and a gate."""
    q, k, v = (silu(heads_of(x, p[f"w{n}"])) for n in "qkv")
    y = np.zeros_like(v)
    for s in range(x.shape[1]):
        for t in range(s + 1):
            weight = (q[:, s] * k[:, t]).sum(-1) * np.exp(-p["decay"] * (s - t))
            y[:, s] += weight[..., None] * v[:, t]
    y = rms(y.reshape(*x.shape[:2], -1), p["norm"]).reshape(y.shape)
    return merged(y * sigmoid(heads_of(x, p["wg"])), p["wo"])


def before(x: Array) -> Array:
    """Each token's predecessor."""
    return np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def xlstm(x: Array, p: Params, bound: float = 15) -> Array:
    """Cells with matrix memories (arXiv 2405.04517, equations 19 to 27) and bounded gates (arXiv
    2503.13427), token by token, with the running maximum of the exponents."""
    q, k, v, o = (np.tensordot(x, p[f"w{n}"], 1) for n in "qkvg")
    i, f = (bound * np.tanh((x @ p[f"w{n}"] + p[f"b{n}"]) / bound) for n in "if")
    y, (batch, length, heads, dim) = np.zeros_like(v), q.shape
    memory, norm = np.zeros((batch, heads, dim, v.shape[-1])), np.zeros((batch, heads, dim))
    most = np.full((batch, heads), -np.inf)
    for t in range(length):
        kept = -np.log1p(np.exp(-f[:, t])) + most
        most = np.maximum(kept, i[:, t])
        decay, into = np.exp(kept - most)[..., None], np.exp(i[:, t] - most)[..., None]
        memory = decay[..., None] * memory + (into * k[:, t])[..., None] * v[:, t][..., None, :]
        norm = decay * norm + into * k[:, t]
        query = q[:, t] / np.sqrt(dim)
        weight = np.maximum(np.abs((query * norm).sum(-1)), np.exp(-most))
        y[:, t] = (query[..., None] * memory).sum(-2) / weight[..., None]
    out = layer_norm(y, p["norm/scale"]) * sigmoid(o)
    return np.tensordot(out, p["wo"], 2)


def rwkv4_time(x: Array, p: Params) -> Array:
    """Time mixing of RWKV-4 (arXiv 2305.13048, section 3.1), token by token."""
    step = before(x) - x
    r, k, v = (
        np.tensordot(x + step * p[f"{n}/mix"], p[f"w_{n}"][..., 0], 1) for n in ("r", "k", "v")
    )
    decay, first = np.exp(-np.exp(p["decay"][:, 0])), p["first"][:, 0]
    actual, total, weight = np.zeros_like(v), np.zeros_like(v[:, 0]), np.zeros_like(v[:, 0])
    for t in range(x.shape[1]):
        now, later = np.exp(k[:, t] + first), np.exp(k[:, t])
        actual[:, t] = (total + now * v[:, t]) / (weight + now)
        total, weight = decay * total + later * v[:, t], decay * weight + later
    return (sigmoid(r) * actual) @ p["w_o"][:, 0]


def rwkv6_time(x: Array, p: Params) -> Array:
    """Time mixing of RWKV-6 (arXiv 2404.05892, section 4), token by token."""
    step = before(x) - x
    low = np.tanh(np.tensordot(x + step * p["token_mix/mix"], p["m1"], 1))
    shares = np.einsum("bszr,zrd->zbsd", low, p["m2"]) + p["mix"][:, None, None]
    w, k, v, r, g = (x + step * share for share in shares)
    r, k, v, g = (heads_of(y, p[f"w_{n}"]) for n, y in zip("rkvg", (r, k, v, g), strict=True))
    rate = np.exp(p["w0"] + np.tensordot(np.tanh(w @ p["w1"]), p["w2"], 1))
    y, state = np.zeros_like(v), np.zeros((*v.shape[:1], *k.shape[2:], v.shape[3]))
    for t in range(x.shape[1]):
        kv = k[:, t, :, :, None] * v[:, t, :, None, :]
        y[:, t] = (r[:, t, :, :, None] * (state + p["now"][..., None] * kv)).sum(2)
        state = state * np.exp(-rate[:, t])[..., None] + kv
    y = layer_norm(y, p["norm_w"], p["norm_b"], 64e-5)
    return merged(y * g * sigmoid(g), p["w_o"])


def rwkv7_time(x: Array, p: Params, v: Array) -> Array:
    """Time mixing of RWKV-7 (arXiv 2503.14456, section 4) with given values."""

    def mixed(name: str) -> Array:
        return x + (before(x) - x) * p[f"{name}/mix"]

    def low_rank(name: str, y: Array) -> Array:
        return np.tensordot(y, p[f"{name}2"], 1)

    r, k = heads_of(mixed("r"), p["w_r"]), heads_of(mixed("k"), p["w_k"])
    log_w = -softplus(-(p["w0"] + low_rank("w", np.tanh(mixed("w") @ p["w1"])))) - 0.5
    decay = np.exp(-np.exp(log_w))
    a = sigmoid(p["a0"] + low_rank("a", mixed("a") @ p["a1"]))
    gate = low_rank("g", sigmoid(mixed("g") @ p["g1"]))
    kk = unit(k * p["k_k"])
    k = k * (1 + (a - 1) * p["k_a"])
    y, heads = np.zeros_like(v), v.shape[2]
    for h in range(heads):
        state = np.zeros((x.shape[0], v.shape[3], k.shape[3]))
        for s in range(x.shape[1]):
            at = (slice(None), s, h)
            removed = (state * -kk[at][:, None]).sum(-1, keepdims=True)
            state = state * decay[at][:, None] + removed * (kk[at] * a[at])[:, None]
            state = state + v[at][..., None] * k[at][:, None]
            y[at] = (state * r[at][:, None]).sum(-1)
    y = layer_norm(y, p["norm_w"], p["norm_b"], 64e-5)
    y = y + (r * k * p["r_k"]).sum(-1, keepdims=True) * v
    return merged(y * gate, p["w_o"])
