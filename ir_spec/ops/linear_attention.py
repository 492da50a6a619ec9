"""Linear attention with decay: lightning attention and its variants, and the gated delta rule."""

from collections.abc import Callable, Mapping

import numpy as np

from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr
from stagec.ir.opdef import Array, Sizes
from stagec.ir.param import Param
from stagec.ir_spec.ops.curves import sigmoid
from stagec.ir_spec.ops.recurrence import Tokens
from stagec.ir_spec.ops.scan_base import Named, Scan, count
from stagec.ir_spec.ops.state_space import CHUNK, chunk_of, on_groups, on_heads, softplus

_EPS = 1e-6


def normalized(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Vectors normalized to length 1 along the last dimension, and the function of their
    gradients."""
    scale = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + _EPS)
    unit = x * scale
    return unit, lambda d: scale * (d - unit * (d * unit).sum(-1, keepdims=True))


# -- lightning attention ---------------------------------------------------------------------------

_DECAYS = {1: "r", 3: "{b}sr", 4: "{b}srk"}


def _linear_state(n: Sizes) -> Expr:
    return count(n, "s", "r", "k", "v") * 2


class LinearAttention(Scan):
    """Causal linear attention with decay: `h_t = exp(-decay) h_(t-1) + k_t v_t^T`, `y_t = q_t^T
    h_t`; nothing is scaled.

    The decay is a number per head ([H]: lightning attention of MiniMax-01, arXiv 2501.08313,
    RetNet), per token and head ([B, S, H]), or also per key element ([B, S, H, K]: gated linear
    attention, arXiv 2312.06635). FLOPs are those of its products in chunks of C tokens: 2 S H C (K
    + V) inside chunks and 4 S H K V with states. One token from a state has 5 H K V: the state
    decays, the outer product of k and v is added, and q reads it. Only its inputs are stashed. Over
    a split sequence, ranks gather states of H K V fp32 elements, and decays.
    """

    name = "stg.linear_attention"
    inputs, carried, seen = ("q", "k", "v", "decay"), ("k", "v", "decay"), ("q", "decay")
    params = (CHUNK,)
    example = "%a = stg.linear_attention[chunk = 256](%q, %k, %v, %decay) : bf16[B, S, H, K]"
    input_types = "bf16[B, S, H, K], bf16[B, S, H, K], bf16[B, S, H, K], f32[H]"
    part_types = "f32[B, 4, H, K, K], f32[B, 4, H]"
    notes = (
        (
            ": five products instead of two, inside of chunks and with states (arXiv 2405.17381, "
            "algorithm 2)"
        ),
        "",
        "",
    )

    def flops(self, op: Operation, n: Sizes) -> Expr:
        """q k^T inside chunks and the masked result times v; updates and reads of states."""
        inside = count(n, "s", "r") * chunk_of(op, n) * (n["k"] + n["v"]) * 2
        return self.counted(op, n, inside + _linear_state(n) * 2)

    def one(self, n: Sizes) -> Expr:
        return count(n, "r", "k", "v") * 5

    def gradient_flops(self, op: Operation, n: Sizes) -> Expr:
        k, v, chunk = n["k"], n["v"], chunk_of(op, n)
        inside = count(n, "s", "r") * chunk * (k * 3 + v * 2) * 2
        return inside + _linear_state(n) * 5

    def part_flops(self, op: Operation, n: Sizes) -> Expr:
        return _linear_state(n)

    def shapes(self, op: Operation, given: Mapping[str, Value]) -> Mapping[str, str]:
        rank = given["decay"].tensor.rank
        form = max(1, rank - op.operands[0].tensor.rank + self.rank)
        return {
            **dict.fromkeys("qk", "{b}srk"),
            **dict.fromkeys("vy", "{b}srv"),
            "decay": _DECAYS.get(form, "r"),
            "state": "{b}rkv",
            "keep": "{b}rk" if form == 4 else "{b}r",
        }

    def tokens(self, x: Named) -> Tokens:
        decay, like = -x["decay"], x["k"] if "k" in x else x["q"]
        w = decay if decay.ndim == 4 else decay[..., None]
        w = np.broadcast_to(w, (*like.shape[:3], w.shape[-1]))
        return Tokens(w=w, q=x.get("q"), k=x.get("k"), v=x.get("v"))

    def pull(self, x: Named, d: Tokens, dy: Array) -> Named:
        form = x["decay"].ndim
        decay = d.w if form == 4 else d.w[..., 0] if form == 3 else d.w.sum((0, 1, 3))
        return {"q": d.q, "k": d.k, "v": d.v, "decay": -decay}


# -- gated delta rule ------------------------------------------------------------------------------

_DOUBLE = Param("double", "flag", "beta is up to 2, so that a step may reflect (arXiv 2411.12537)")


def _each_key(x: Array) -> Array:
    """Gates [N, S, H] or [N, S, H, K], the former with a last dimension of 1."""
    return x if x.ndim == 4 else x[..., None]


def _products(op: Operation, n: Sizes) -> Expr:
    """k k^T, q k^T and its product with v inside of chunks; three products with states."""
    k, v = n["k"], n["v"]
    return count(n, "s", "g", "r") * (chunk_of(op, n) * (k * 4 + v * 2) + k * v * 6)


def _solved(op: Operation, n: Sizes) -> Expr:
    """The triangular system of a chunk, for keys and values."""
    return count(n, "s", "g", "r") * chunk_of(op, n) * (n["k"] + n["v"])


class GatedDeltaRule(Scan):
    """The gated delta rule (arXiv 2412.06464) in chunks: a state of K x V for each head of values.

    `h_t = exp(g_t) h_(t-1)`, then `h_t += k_t beta_t (v_t - k_t^T h_t)^T`; `y_t = q_t^T h_t`. The
    gates are computed in the kernel: `g = -exp(A_log) softplus(a + dt_bias)`, `beta = sigmoid(b)`,
    or twice as much with `double`; q and k are normalized to length 1, and q is divided by sqrt(K).
    There may be fewer heads of q and k. With a [B, S, H, K] and dt_bias [H, K], each element of a
    key has its own decay (Kimi Delta Attention, arXiv 2510.26692); the products are the same. FLOPs
    for H heads of values and chunks of C tokens are those of its products, S H (4 C K + 2 C V + 6 K
    V), and of a triangular system in each chunk, S H C (K + V). One token from a state has 7 H K V:
    the state decays, k reads it, an outer product is added, and q reads it. Only its inputs are
    stashed. Over a split sequence, ranks gather states of H K V and matrices of H K K fp32
    elements.
    """

    name = "stg.gated_delta_rule"
    inputs = ("q", "k", "v", "a", "b", "A_log", "dt_bias")
    carried = ("k", "v", "a", "b", "A_log", "dt_bias")
    seen = ("q", "k", "a", "b", "A_log", "dt_bias")
    params = (CHUNK, _DOUBLE)
    matrix = True
    example = (
        "%y = stg.gated_delta_rule[chunk = 64](%q, %k, %v, %gate, %beta, %A_log, %dt_bias) : "
        "bf16[B, S, H, K]"
    )
    input_types = (
        "bf16[B, S, G, K], bf16[B, S, G, K], bf16[B, S, H, K], bf16[B, S, H], bf16[B, S, H], "
        "f32[H], f32[H]"
    )
    part_types = "f32[B, 4, H, K, K], f32[B, 4, H, K, K]"
    notes = (
        (
            ": two products for each of its products, and the states again, as the kernels of "
            "flash-linear-attention compute them"
        ),
        "",
        "",
    )

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return self.counted(op, n, _products(op, n) + _solved(op, n))

    def one(self, n: Sizes) -> Expr:
        return count(n, "g", "r", "k", "v") * 7

    def gradient_flops(self, op: Operation, n: Sizes) -> Expr:
        states = count(n, "s", "g", "r") * n["k"] * n["v"] * 4
        return _products(op, n) * 2 + _solved(op, n) * 3 + states

    def part_flops(self, op: Operation, n: Sizes) -> Expr:
        """k k^T and the triangular system; two products with states for values, and two for the
        matrix of a part."""
        k, v = n["k"], n.get("v", n["k"])
        inside = chunk_of(op, n) * (k * 3 + v)
        return count(n, "s", "g", "r") * (inside + k * (k + v) * 4)

    def constants(self, op: Operation) -> Named:
        """The largest beta."""
        return {"most": np.float64(1 + op.flag("double"))}

    def shapes(self, op: Operation, given: Mapping[str, Value]) -> Mapping[str, str]:
        parts = op.operands[0].tensor.rank - self.rank
        k = "k" if given["a"].tensor.rank - parts == 4 else ""
        return {
            **dict.fromkeys("qk", "{b}sgk"),
            **dict.fromkeys("vy", "{b}s(gr)v"),
            "a": "{b}s(gr)" + k,
            "b": "{b}s(gr)",
            "A_log": "(gr)",
            "dt_bias": "(gr)" + k,
            "state": "{b}(gr)kv",
            "keep": "{b}(gr)kl",
        }

    def tokens(self, x: Named) -> Tokens:
        raw, heads = _each_key(x["a"] + x["dt_bias"]), x["a"].shape[2]
        w = -np.exp(x["A_log"])[:, None] * softplus(raw)
        beta = x["most"] * sigmoid(x["b"])[..., None]
        k = on_heads(normalized(x["k"])[0], heads)
        q = None
        if "q" in x:
            q = on_heads(normalized(x["q"])[0], heads) / np.sqrt(k.shape[-1])
        return Tokens(w=w, q=q, k=k * beta, v=x.get("v"), a=k * np.exp(w), b=-k * beta)

    def pull(self, x: Named, d: Tokens, dy: Array) -> Named:
        raw, heads = _each_key(x["a"] + x["dt_bias"]), x["a"].shape[2]
        a, share = -np.exp(x["A_log"])[:, None], sigmoid(x["b"])
        beta = x["most"] * share
        kn, back_k = normalized(x["k"])
        _, back_q = normalized(x["q"])
        k, fade = on_heads(kn, heads), np.exp(a * softplus(raw))
        d_kb = d.k - d.b
        d_k = d_kb * beta[..., None] + d.a * fade
        through = d.a * k * fade
        d_gate = d.w + (through if raw.shape[-1] > 1 else through.sum(-1, keepdims=True))
        d_raw = (d_gate * a * sigmoid(raw)).reshape(x["a"].shape)
        return {
            "q": back_q(on_groups(d.q, x["q"]) / np.sqrt(k.shape[-1])),
            "k": back_k(on_groups(d_k, x["k"])),
            "v": d.v,
            "a": d_raw,
            "b": (d_kb * k).sum(-1) * beta * (1 - share),
            "A_log": (d_gate * a * softplus(raw)).sum((0, 1, 3)),
            "dt_bias": d_raw.sum((0, 1)),
        }
