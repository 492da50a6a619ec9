"""The recurrence of Griffin and RecurrentGemma: a gated linear recurrence of each channel."""

from collections.abc import Mapping

import numpy as np

from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr
from stagec.ir.opdef import Array, Sizes
from stagec.ir_spec.ops.curves import sigmoid
from stagec.ir_spec.ops.recurrence import Tokens
from stagec.ir_spec.ops.scan_base import THREE_TIMES, Named, Scan, count
from stagec.ir_spec.ops.state_space import softplus

#: The constant c of the paper.
_POWER = 8


def _decay(x: Named) -> Array:
    """The logarithm of what is left of a state."""
    return -_POWER * sigmoid(x["r"]) * softplus(x["a"])


def _share(w: Array) -> Array:
    """What the input is multiplied by, so that states keep their size."""
    return np.sqrt(-np.expm1(2 * w))


def _channels(x: Array) -> Array:
    """Each channel as a head of its own, with one element: [N, S, H, K] as [N, S, H*K, 1]."""
    return x.reshape(*x.shape[:2], -1, 1)


class RgLru(Scan):
    """The real-gated linear recurrent unit of Griffin (arXiv 2402.19427, equations 3 to 5).

    `w_t = -8 softplus(a) sigmoid(r_t)`, `h_t = exp(w_t) h_(t-1) + sqrt(1 - exp(2 w_t)) sigmoid(i_t)
    x_t`, `y_t = h_t`, for each channel of H heads of K, all in one kernel. FLOPs are 13 B S H K:
    two for each sigmoid, one for w, one for its exponential, three for the root, two for the input,
    two for the state; there are no matrix products. Its inputs alone are stashed. Over a split
    sequence, ranks gather H K fp32 elements of a state from each other, and as many decays.
    """

    name = "stg.rg_lru"
    inputs, carried, seen = ("x", "r", "i", "a"), ("x", "r", "i", "a"), ("r", "a")
    example = "%y = stg.rg_lru(%x, %r, %i, %a) : bf16[B, S, H, K]"
    input_types = "bf16[B, S, H, K], bf16[B, S, H, K], bf16[B, S, H, K], f32[H, K]"
    part_types = "f32[B, 4, H, K], f32[B, 4, H, K]"
    notes = (
        THREE_TIMES,
        "; 13 FLOPs per token and channel",
        "; 6 FLOPs per token and channel: the gate, and a sum",
    )

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return count(n, "s", "r", "k") * 13

    def part_flops(self, op: Operation, n: Sizes) -> Expr:
        return count(n, "s", "r", "k") * 13

    def part_gradient_flops(self, op: Operation, n: Sizes) -> Expr:
        return count(n, "s", "r", "k") * 6

    def shapes(self, op: Operation, given: Mapping[str, Value]) -> Mapping[str, str]:
        tokens = dict.fromkeys(("x", "r", "i", "y"), "{b}srk")
        return {**tokens, "a": "rk", "state": "{b}rk", "keep": "{b}rk"}

    def tokens(self, x: Named) -> Tokens:
        w = _channels(_decay(x))
        v = _channels(x["x"] * sigmoid(x["i"])) if "x" in x else None
        return Tokens(w=w, q=np.ones_like(w), k=_share(w), v=v)

    def pull(self, x: Named, d: Tokens, dy: Array) -> Named:
        w, r, i = _channels(_decay(x)), sigmoid(x["r"]), sigmoid(x["i"])
        d_w = (d.w - d.k * np.exp(2 * w) / _share(w)).reshape(r.shape)
        d_v = d.v.reshape(i.shape)
        return {
            "x": d_v * i,
            "r": d_w * -_POWER * softplus(x["a"]) * r * (1 - r),
            "i": d_v * x["x"] * i * (1 - i),
            "a": (d_w * -_POWER * r * sigmoid(x["a"])).sum((0, 1)),
        }
