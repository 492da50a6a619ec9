"""The recurrences of RWKV-6 and RWKV-7."""

from collections.abc import Mapping

import numpy as np

from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr
from stagec.ir.opdef import Array, Sizes
from stagec.ir_spec.ops.curves import sigmoid
from stagec.ir_spec.ops.linear_attention import normalized
from stagec.ir_spec.ops.recurrence import Tokens
from stagec.ir_spec.ops.scan_base import THREE_TIMES, Named, Scan, count

#: The log decay of a token is at least minus this: a state keeps exp(-exp(-1/2)) or more of itself.
_FASTEST = float(np.exp(-0.5))


def _work(n: Sizes, per_element: int) -> Expr:
    """FLOPs of `per_element` for each token and element of the K x V states."""
    return count(n, "s", "r", "k", "v") * per_element


class Wkv6(Scan):
    """The recurrence of RWKV-6 (Finch, arXiv 2404.05892, section 4): each head has a state of K x
    V, with a decay `exp(-exp(w_t))` for each token and row. If w is [H, K], the decay is the same
    for all tokens, as in RWKV-5 (Eagle, the same paper).

    `y_t = r_t^T (h_(t-1) + diag(now) k_t v_t^T)`, `h_t = diag(exp(-exp(w_t))) h_(t-1) + k_t v_t^T`.
    FLOPs are 7 S H K V: one for the product k v^T, two for adding it to the state with the weight
    `now`, two for the product with r, two for the state; there are no matrix products. Only the
    inputs are stashed. Over a split sequence, ranks gather a state of H K V fp32 elements and H K
    decays from each other.
    """

    name = "stg.wkv6"
    inputs, carried, seen = ("r", "w", "k", "v", "now"), ("w", "k", "v"), ("r", "w")
    late = True
    example = "%y = stg.wkv6(%q, %w, %k, %v, %now) : bf16[B, S, H, K]"
    input_types = (
        "bf16[B, S, H, K], bf16[B, S, H, K], bf16[B, S, H, K], bf16[B, S, H, K], bf16[H, K]"
    )
    part_types = "f32[B, 4, H, K, K], f32[B, 4, H, K]"
    notes = (THREE_TIMES, "; 3 FLOPs per token and element", "; 3 FLOPs per token and element")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _work(n, 7)

    def part_flops(self, op: Operation, n: Sizes) -> Expr:
        return _work(n, 3)

    def shapes(self, op: Operation, given: Mapping[str, Value]) -> Mapping[str, str]:
        constant = given["w"].tensor.rank == len("rk")
        return {
            **dict.fromkeys(("r", "k"), "{b}srk"),
            "w": "rk" if constant else "{b}srk",
            **dict.fromkeys("vy", "{b}srv"),
            "now": "rk",
            "state": "{b}rkv",
            "keep": "{b}rk",
        }

    def tokens(self, x: Named) -> Tokens:
        like = next(x[n] for n in ("k", "r") if n in x)
        w = np.broadcast_to(-np.exp(x["w"]), like.shape)
        return Tokens(w=w, q=x.get("r"), k=x.get("k"), v=x.get("v"))

    def skip(self, x: Named) -> Array:
        return (x["r"] * x["now"] * x["k"]).sum(-1, keepdims=True) * x["v"]

    def pull(self, x: Named, d: Tokens, dy: Array) -> Named:
        own = (x["r"] * x["now"] * x["k"]).sum(-1, keepdims=True)
        d_own = (dy * x["v"]).sum(-1, keepdims=True)
        return {
            "r": d.q + d_own * x["now"] * x["k"],
            "w": -(d.w if x["w"].ndim == d.w.ndim else d.w.sum((0, 1))) * np.exp(x["w"]),
            "k": d.k + d_own * x["now"] * x["r"],
            "v": d.v + own * dy,
            "now": (d_own * x["r"] * x["k"]).sum((0, 1)),
        }


class Wkv7(Scan):
    """The recurrence of RWKV-7 (arXiv 2503.14456, equation 17): each head has a state of K x V.

    `h_t = diag(exp(w_t)) h_(t-1) - (a_t kappa_t) (kappa_t^T h_(t-1)) + k_t v_t^T`, `y_t = r_t^T
    h_t`. The kernel normalizes kappa to length 1 and computes the decay, `w = -exp(-1/2)
    sigmoid(w)`. FLOPs are 9 S H K V; there are no matrix products. Only the inputs are stashed.
    Over a split sequence, ranks gather a state of H K V and a matrix of H K K fp32 elements from
    each other.
    """

    name = "stg.wkv7"
    inputs = ("r", "w", "k", "v", "kappa", "a")
    carried, seen = ("w", "k", "v", "kappa", "a"), ("r", "w", "kappa", "a")
    matrix = True
    example = "%y = stg.wkv7(%q, %w, %k, %v, %kappa, %a) : bf16[B, S, H, K]"
    input_types = ", ".join(["bf16[B, S, H, K]"] * 6)
    part_types = "f32[B, 4, H, K, K], f32[B, 4, H, K, K]"
    notes = (
        THREE_TIMES,
        "; 7 FLOPs per token and element of both",
        "; 7 FLOPs per token and element of both",
    )

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return _work(n, 9)

    def part_flops(self, op: Operation, n: Sizes) -> Expr:
        return count(n, "s", "r", "k") * (n["k"] + n["v"]) * 7

    def shapes(self, op: Operation, given: Mapping[str, Value]) -> Mapping[str, str]:
        return {
            **dict.fromkeys(("r", "w", "k", "kappa", "a"), "{b}srk"),
            **dict.fromkeys("vy", "{b}srv"),
            "state": "{b}rkv",
            "keep": "{b}rkl",
        }

    def tokens(self, x: Named) -> Tokens:
        w, unit = -_FASTEST * sigmoid(x["w"]), normalized(x["kappa"])[0]
        return Tokens(w=w, q=x.get("r"), k=x.get("k"), v=x.get("v"), a=unit, b=-unit * x["a"])

    def pull(self, x: Named, d: Tokens, dy: Array) -> Named:
        s, (unit, back) = sigmoid(x["w"]), normalized(x["kappa"])
        return {
            "r": d.q,
            "w": -_FASTEST * d.w * s * (1 - s),
            "k": d.k,
            "v": d.v,
            "kappa": back(d.a - d.b * x["a"]),
            "a": -d.b * unit,
        }
