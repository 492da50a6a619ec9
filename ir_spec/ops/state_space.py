"""State-space layers: the selective scan of Mamba-1 and the structured one of Mamba-2 (SSD)."""

from collections.abc import Mapping

import numpy as np

from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, call
from stagec.ir.opdef import Array, Sizes
from stagec.ir.param import Param
from stagec.ir_spec.ops.curves import sigmoid
from stagec.ir_spec.ops.recurrence import Tokens
from stagec.ir_spec.ops.scan_base import THREE_TIMES, Named, Scan, count

CHUNK = Param("chunk", "size", "tokens that matrix products compute together", required=True)


def chunk_of(op: Operation, n: Sizes) -> Expr:
    """The tokens of a chunk: at most those of the sequence."""
    return call("min", [op.expr("chunk"), n["s"]])


def softplus(x: Array) -> Array:
    """log(1 + exp(x))."""
    return np.logaddexp(x, 0)


def on_heads(x: Array, heads: int) -> Array:
    """Values of groups [N, S, G, K], or shared by all heads [N, S, K], repeated for each head,
    [N, S, H, K]."""
    if x.ndim == 3:
        return np.broadcast_to(x[:, :, None], (*x.shape[:2], heads, x.shape[2]))
    return np.repeat(x, heads // x.shape[2], axis=2)


def on_groups(d: Array, like: Array) -> Array:
    """The gradient of `on_heads`: those of the heads, summed to the shape of `like`."""
    if like.ndim == 3:
        return d.sum(2)
    n, s, g, k = like.shape
    return d.reshape(n, s, g, -1, k).sum(3)


class _StateSpace(Scan):
    """Base of both scans. A head of P channels has a state of N x P; in Mamba-1 every channel is a
    head."""

    inputs = ("x", "dt", "A_log", "B", "C", "D", "dt_bias")
    carried, seen = ("x", "dt", "A_log", "B", "dt_bias"), ("dt", "A_log", "C", "dt_bias")

    def tokens(self, x: Named) -> Tokens:
        dt = softplus(x["dt"] + x["dt_bias"])[..., None]
        b, c = x.get("B"), x.get("C")
        return Tokens(
            w=dt * _rates(x),
            q=None if c is None else on_heads(c, dt.shape[2]),
            k=None if b is None else on_heads(b, dt.shape[2]) * dt,
            v=_channels(x["x"]) if "x" in x else None,
        )

    def skip(self, x: Named) -> Array:
        return x["D"][:, None] * _channels(x["x"])

    def pull(self, x: Named, d: Tokens, dy: Array) -> Named:
        raw, rates = x["dt"] + x["dt_bias"], _rates(x)
        dt, b = softplus(raw)[..., None], on_heads(x["B"], raw.shape[2])
        d_dt = ((d.w * rates).sum(-1) + (d.k * b).sum(-1)) * sigmoid(raw)
        return {
            "x": d.v + x["D"][:, None] * dy,
            "dt": d_dt,
            "A_log": (d.w * dt * rates).sum((0, 1)),
            "B": on_groups(d.k * dt, x["B"]),
            "C": on_groups(d.q, x["C"]),
            "D": (dy * _channels(x["x"])).sum((0, 1, 3)),
            "dt_bias": d_dt.sum((0, 1)),
        }


def _rates(x: Named) -> Array:
    """A of each head and row of its state, [H, N], or of each head, [H, 1]."""
    a = -np.exp(x["A_log"])
    return a if a.ndim == 2 else a[:, None]


def _channels(x: Array) -> Array:
    """Values as [N, S, H, P]; those of heads of one channel are given as [N, S, H]."""
    return x if x.ndim == 4 else x[..., None]


class SelectiveScan(_StateSpace):
    """The scan of Mamba-1 (arXiv 2312.00752, algorithm 2): each of D channels has a state of N
    elements.

    `h_t = exp(dt A) h_(t-1) + dt B_t x_t`, `y_t = C_t h_t + D x_t`, with `dt = softplus(dt +
    dt_bias)` and `A = -exp(A_log)`, all in one kernel. FLOPs are 9 B S D N, as in published counts
    of the kernel; there are no matrix products. Only the inputs are stashed. Over a split sequence,
    ranks gather D N fp32 elements of a state from each other, and as many decays.
    """

    name = "stg.selective_scan"
    rank = 3
    example = "%y = stg.selective_scan(%x, %dt, %A_log, %b, %c, %skip, %dt_bias) : bf16[B, S, F]"
    input_types = (
        "bf16[B, S, F], bf16[B, S, F], f32[F, K], bf16[B, S, K], bf16[B, S, K], f32[F], f32[F]"
    )
    part_types = "f32[B, 4, F, K], f32[B, 4, F, K]"
    notes = (
        THREE_TIMES,
        "; 9 FLOPs per token and element of the state",
        "; 9 FLOPs per token and element of the state",
    )

    def shapes(self, op: Operation, given: Mapping[str, Value]) -> Mapping[str, str]:
        tokens = dict.fromkeys(("x", "dt", "y"), "{b}sd") | dict.fromkeys("BC", "{b}sn")
        parameters = {"A_log": "dn", "D": "d", "dt_bias": "d"}
        return {**tokens, **parameters, "state": "{b}dn", "keep": "{b}dn"}

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return count(n, "s", "d", "n") * 9

    def part_flops(self, op: Operation, n: Sizes) -> Expr:
        return self.flops(op, n)


def _scores(op: Operation, n: Sizes) -> Expr:
    """FLOPs of C B^T inside chunks, once for each group."""
    return count(n, "s", "k", "g") * chunk_of(op, n) * 2


def _inside(op: Operation, n: Sizes) -> Expr:
    """FLOPs of the masked scores times x, inside chunks."""
    return count(n, "s", "v", "g", "r") * chunk_of(op, n) * 2


def _states(n: Sizes) -> Expr:
    """FLOPs of adding the tokens to the states of chunks, or of reading these states."""
    return count(n, "s", "k", "v", "g", "r") * 2


def _passed(op: Operation, n: Sizes) -> Expr:
    """FLOPs of passing states from chunk to chunk."""
    chunks = call("ceildiv", [n["s"], chunk_of(op, n)])
    return count(n, "k", "v", "g", "r") * chunks * 2


class Ssd(_StateSpace):
    """The scan of Mamba-2 (arXiv 2405.21060, section 6): each of H heads has a state of N x P.

    `h_t = exp(dt A) h_(t-1) + dt B_t x_t^T`, `y_t = C_t^T h_t + D x_t`, with `dt = softplus(dt +
    dt_bias)` and `A = -exp(A_log)`, all in one kernel. B and C belong to groups of heads
    ([B, S, G, N]) or to all heads ([B, S, N]). FLOPs are those of its products in chunks of Q
    tokens: 2 S Q N G and 2 S Q P H inside chunks, 2 S N P H each for adding to states and reading
    them, 2 N P H for each chunk to pass its state on. For one token from a given state they are
    5 N P H + 2 P H, as in selective_state_update of mamba_ssm: the state decays, the outer product
    of dt B and x is added, C reads it, D x is added. Only the inputs are stashed. Over a split
    sequence, ranks gather H N P fp32 elements of a state from each other, and H decays.
    """

    name = "stg.ssd"
    params = (CHUNK,)
    example = (
        "%y = stg.ssd[chunk = 256](%x, %dt, %A_log, %b, %c, %skip, %dt_bias) : bf16[B, S, H, K]"
    )
    input_types = (
        "bf16[B, S, H, K], bf16[B, S, H], f32[H], bf16[B, S, F], bf16[B, S, F], f32[H], f32[H]"
    )
    part_types = "f32[B, 4, H, F, K], f32[B, 4, H]"
    notes = (
        (
            ": two products for each of its products, and the scores and states again, as in the "
            "kernels of mamba_ssm"
        ),
        "",
        "",
    )

    def shapes(self, op: Operation, given: Mapping[str, Value]) -> Mapping[str, str]:
        of_groups = next(v for n, v in given.items() if n in "BC")
        first = op.operands[0].tensor.rank
        grouped = of_groups.tensor.rank == first
        h, groups = ("(gr)", "{b}sgk") if grouped else ("r", "{b}sk")
        return {
            **dict.fromkeys(("x", "y"), f"{{b}}s{h}v"),
            "dt": f"{{b}}s{h}",
            **dict.fromkeys("BC", groups),
            **dict.fromkeys(("A_log", "D", "dt_bias"), h),
            "state": f"{{b}}{h}kv",
            "keep": f"{{b}}{h}",
        }

    def flops(self, op: Operation, n: Sizes) -> Expr:
        chunks = _scores(op, n) + _inside(op, n) + _states(n) * 2 + _passed(op, n)
        return self.counted(op, n, chunks)

    def one(self, n: Sizes) -> Expr:
        return count(n, "v", "g", "r") * (n["k"] * 5 + 2)

    def gradient_flops(self, op: Operation, n: Sizes) -> Expr:
        return (_scores(op, n) + _passed(op, n)) * 3 + _inside(op, n) * 2 + _states(n) * 5

    def part_flops(self, op: Operation, n: Sizes) -> Expr:
        return _states(n) + _passed(op, n)
