"""Scans equal the forms that their kernels compute, in chunks, and count their products.

The forms here are written from the papers, with a counter beside each product; the references of
the ops are recurrences, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from stagec.ir.expr import evaluate
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.opdef import Array
from tests.support import compiled, inputs_of, operations, run_numeric

SIZES = {"B": 2, "S": 8, "H": 4, "G": 2, "K": 3, "V": 5, "N": 2, "Q": 4, "W": 3}


@dataclass
class Counter:
    """FLOPs of products, two per multiply-add."""

    flops: int = 0

    def product(self, spec: str, *args: Array) -> Array:
        sizes = {
            f: n
            for part, a in zip(spec.partition("->")[0].split(","), args, strict=True)
            for f, n in zip(part, a.shape, strict=True)
        }
        self.flops += 2 * int(np.prod([*sizes.values()]))
        return np.einsum(spec, *args)


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def unit(x: Array) -> Array:
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def chunks(x: Array) -> Array:
    """[B, S, ...] as [B, chunks, Q, ...]."""
    return x.reshape(x.shape[0], -1, SIZES["Q"], *x.shape[2:])


def ssd(x: Mapping[str, Array], n: Counter) -> Array:
    """arXiv 2405.21060, listing 1: B and C of groups, states of heads."""
    dt, heads = softplus(x["dt"] + x["bias"]), SIZES["H"]
    u, b, c = chunks(x["x"] * dt[..., None]), chunks(x["b"]), chunks(x["c"])
    a = np.cumsum(chunks(dt * -np.exp(x["A"])), axis=2)
    scores = n.product("bcign,bcjgn->bcgij", c, b)
    each = np.repeat(scores, heads // SIZES["G"], axis=2)
    a = np.moveaxis(a, 3, 2)
    decay = np.tril(np.exp(a[..., :, None] - a[..., None, :]))
    y = n.product("bchij,bcjhp->bcihp", each * decay, u)
    b, c = (np.repeat(v, heads // SIZES["G"], axis=3) for v in (b, c))
    left = np.moveaxis(np.exp(a[..., -1:] - a), 3, 2)
    states = n.product("bcjhn,bcjhp->bchnp", b * left[..., None], u)
    state, before = np.zeros_like(states[:, 0]), list[Array]()
    for i in range(states.shape[1]):
        before.append(state)
        state = np.exp(a[:, i, :, -1])[..., None, None] * state + states[:, i]
        n.flops += 2 * state.size
    read = n.product("bcihn,bchnp->bcihp", c, np.stack(before, 1))
    y = y + read * np.moveaxis(np.exp(a), 3, 2)[..., None]
    return y.reshape(x["x"].shape) + x["sk"][:, None] * x["x"]


def linear(x: Mapping[str, Array], n: Counter) -> Array:
    """arXiv 2405.17381: a constant decay for each head."""
    q, k, v = (chunks(x[f]) for f in "qkv")
    t = np.arange(SIZES["Q"])
    back = t[:, None] - t[None, :]
    mask = np.where(back >= 0, np.exp(-x["d"][:, None, None] * back), 0)
    scores = n.product("bcihk,bcjhk->bchij", q, k)
    y = n.product("bchij,bcjhv->bcihv", scores * mask, v)
    fade = np.exp(-x["d"][None, :] * (SIZES["Q"] - 1 - t)[:, None])
    state = np.zeros((SIZES["B"], SIZES["H"], SIZES["K"], SIZES["V"]))
    for i in range(q.shape[1]):
        reach = np.exp(-x["d"][None, :] * (1 + t)[:, None])
        y[:, i] += n.product("bihk,bhkv->bihv", q[:, i] * reach[None, ..., None], state)
        added = n.product("bjhk,bjhv->bhkv", k[:, i] * fade[None, ..., None], v[:, i])
        state = np.exp(-x["d"] * SIZES["Q"])[:, None, None] * state + added
    return y.reshape(*x["v"].shape)


def _system(matrix: Array, right: Array) -> tuple[Array, Array]:
    """The solutions for keys and for values."""
    solve: Any = np.linalg.solve
    solved = solve(matrix, right)
    return solved[..., : SIZES["K"]], solved[..., SIZES["K"] :]


def delta(x: Mapping[str, Array], n: Counter) -> Array:
    """arXiv 2412.06464, section 3.3: a triangular system in each chunk."""
    heads, size = SIZES["H"], SIZES["Q"]
    q, k = (np.repeat(unit(x[f]), heads // SIZES["G"], axis=2) for f in "qk")
    q, k, v = chunks(q / np.sqrt(SIZES["K"])), chunks(k), chunks(x["v"])
    beta = chunks(sigmoid(x["b"]))
    g = np.cumsum(chunks(-np.exp(x["A"]) * softplus(x["a"] + x["bias"])), axis=2)
    state = np.zeros((SIZES["B"], heads, SIZES["K"], SIZES["V"]))
    out = np.zeros_like(v)
    for i in range(q.shape[1]):
        gi = np.moveaxis(g[:, i], 2, 1)
        decay = np.tril(np.exp(gi[..., :, None] - gi[..., None, :]))
        kk = n.product("bihk,bjhk->bhij", k[:, i], k[:, i])
        strict = np.tril(kk * decay * np.moveaxis(beta[:, i], 2, 1)[..., None], -1)
        right = np.concatenate([k[:, i] * np.exp(g[:, i])[..., None], v[:, i]], -1)
        right = np.moveaxis(right * beta[:, i, ..., None], 2, 1)
        w, u = _system(np.eye(size) + strict, right)
        n.flops += size * right.size
        new = u - n.product("bhik,bhkv->bhiv", w, state)
        scores = n.product("bihk,bjhk->bhij", q[:, i], k[:, i]) * decay
        read = n.product("bihk,bhkv->bihv", q[:, i] * np.exp(g[:, i])[..., None], state)
        out[:, i] = read + n.product("bhij,bhjv->bihv", scores, new)
        left = np.exp(g[:, i, -1:] - g[:, i])[..., None]
        added = n.product("bjhk,bhjv->bhkv", k[:, i] * left, new)
        state = np.exp(g[:, i, -1])[..., None, None] * state + added
    return out.reshape(x["v"].shape)


def selective(x: Mapping[str, Array], n: Counter) -> Array:
    """arXiv 2312.00752, equation 3b: all tokens with all before them."""
    dt = softplus(x["dt"] + x["bias"])
    a = np.cumsum(dt[..., None] * -np.exp(x["A"]), axis=1)
    s = np.arange(SIZES["S"])
    seen = (s[:, None] >= s[None, :])[None, :, :, None, None]
    reach = np.where(seen, np.exp(np.minimum(a[:, :, None] - a[:, None], 0)), 0)
    y = np.einsum("btn,btsdn,bsd,bsn,bsd->btd", x["c"], reach, dt, x["b"], x["x"])
    n.flops = 9 * x["x"].size * SIZES["N"]
    return y + x["sk"] * x["x"]


def wkv(x: Mapping[str, Array], n: Counter) -> Array:
    """arXiv 2503.14456, equations 17 to 19, with matrices of one head."""
    y = np.zeros_like(x["v"])
    w = np.exp(-np.exp(-0.5) * sigmoid(x["w"]))
    kappa = unit(x["kappa"])
    for b, h in np.ndindex(SIZES["B"], SIZES["H"]):
        state = np.zeros((SIZES["K"], SIZES["K"]))
        for t in range(SIZES["S"]):
            i = (b, t, h)
            step = np.diag(w[i]) - np.outer(kappa[i], x["a"][i] * kappa[i])
            state = state @ step + np.outer(x["v"][i], x["k"][i])
            y[i] = state @ x["r"][i]
    n.flops = 9 * y.size * SIZES["K"]
    return y


def wkv6(x: Mapping[str, Array], n: Counter) -> Array:
    """arXiv 2404.05892, the kernel of section 4, element by element: seven operations each."""
    y = np.zeros_like(x["v"])
    for b, h, i, j in np.ndindex(SIZES["B"], SIZES["H"], SIZES["K"], SIZES["V"]):
        state = 0.0
        for t in range(SIZES["S"]):
            kv = x["k"][b, t, h, i] * x["v"][b, t, h, j]
            y[b, t, h, j] += x["r"][b, t, h, i] * (x["now"][h, i] * kv + state)
            state = np.exp(-np.exp(x["w"][b, t, h, i])) * state + kv
            n.flops += 7
    return y


def rg_lru(x: Mapping[str, Array], n: Counter) -> Array:
    """arXiv 2402.19427, equations 1 to 4, channel by channel; a sigmoid is two operations."""
    y = np.zeros_like(x["x"])
    for b, h, k in np.ndindex(SIZES["B"], SIZES["H"], SIZES["K"]):
        state, base = 0.0, sigmoid(-x["a"][h, k])  # the parameter Lambda of the paper is -a
        for t in range(SIZES["S"]):
            gate = base ** (8 * sigmoid(x["r"][b, t, h, k]))
            state = gate * state
            state += np.sqrt(1 - gate**2) * sigmoid(x["i"][b, t, h, k]) * x["x"][b, t, h, k]
            y[b, t, h, k] = state
            n.flops += 2 * 2 + 1 + 1 + 3 + 2 + 2
    return y


def conv(x: Mapping[str, Array], n: Counter) -> Array:
    """Each channel alone; the products of the padded sequence."""
    y = np.zeros_like(x["x"])
    for b, c in np.ndindex(SIZES["B"], SIZES["V"]):
        full = np.convolve(x["x"][b, :, c], x["w"][c, ::-1])
        y[b, :, c] = full[: SIZES["S"]] + x["bias"][c]
        n.flops += 2 * SIZES["W"] * len(full)
    return y * sigmoid(y)


@dataclass(frozen=True)
class Form:
    """An op, its operands with their dimensions, and the form that it equals."""

    line: str
    operands: Mapping[str, str]
    form: Callable[[Mapping[str, Array], Counter], Array]


_SSM = {"A": "H", "b": "B, S, G, N", "c": "B, S, G, N", "sk": "H", "bias": "H"}
_MAMBA1 = {"A": "V, N", "b": "B, S, N", "c": "B, S, N", "sk": "V", "bias": "V"}
_QK = {"q": "B, S, H, K", "k": "B, S, H, K", "v": "B, S, H, V"}
_DELTA = {**dict.fromkeys("qk", "B, S, G, K"), "v": "B, S, H, V"}
FORMS = {
    "ssd": Form(
        "stg.ssd[chunk = Q](%x, %dt, %A, %b, %c, %sk, %bias)",
        {"x": "B, S, H, V", "dt": "B, S, H", **_SSM},
        ssd,
    ),
    "linear_attention": Form(
        "stg.linear_attention[chunk = Q](%q, %k, %v, %d)", {**_QK, "d": "H"}, linear
    ),
    "gated_delta_rule": Form(
        "stg.gated_delta_rule[chunk = Q](%q, %k, %v, %a, %b, %A, %bias)",
        {**_DELTA, "a": "B, S, H", "b": "B, S, H", "A": "H", "bias": "H"},
        delta,
    ),
    "selective_scan": Form(
        "stg.selective_scan(%x, %dt, %A, %b, %c, %sk, %bias)",
        {"x": "B, S, V", "dt": "B, S, V", **_MAMBA1},
        selective,
    ),
    "wkv6": Form(
        "stg.wkv6(%r, %w, %k, %v, %now)",
        {**dict.fromkeys("rwk", "B, S, H, K"), "v": "B, S, H, V", "now": "H, K"},
        wkv6,
    ),
    "wkv7": Form(
        "stg.wkv7(%r, %w, %k, %v, %kappa, %a)",
        dict.fromkeys(("r", "w", "k", "v", "kappa", "a"), "B, S, H, K"),
        wkv,
    ),
    "rg_lru": Form(
        "stg.rg_lru(%x, %r, %i, %a)", {**dict.fromkeys("xri", "B, S, H, K"), "a": "H, K"}, rg_lru
    ),
    "causal_conv": Form(
        "stg.causal_conv[silu](%x, %w, %bias)", {"x": "B, S, V", "w": "V, W", "bias": "V"}, conv
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_values_and_flops_are_those_of_the_form_in_chunks(name: str) -> None:
    form = FORMS[name]
    args = ", ".join(f"%{n}: f32[{dims}]" for n, dims in form.operands.items())
    symbols = ", ".join(f"{n} = {v}" for n, v in SIZES.items())
    text = (
        f"stg.module @m {{\n  stg.symbols[{symbols}]\n  stg.assume[H % G == 0]\n"
        f"  stg.func @f({args}) {{\n    %y = {form.line}\n    stg.return(%y)\n  }}\n}}\n"
    )
    module = compiled(text, "infer-shapes")
    inputs, counter = inputs_of(module, 7), Counter()
    (actual,) = run_numeric(module, inputs)
    np.testing.assert_allclose(actual, form.form(inputs, counter), rtol=1e-9, atol=1e-12)
    (op,) = operations(module, f"stg.{name}")
    rule = op.definition.rule(op)
    assert rule is not None
    flops = op.definition.flops(op, factor_sizes(op, rule))
    assert evaluate(flops, module.env) == counter.flops
