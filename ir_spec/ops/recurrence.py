"""The recurrence that all state-space and linear-attention layers compute, and its gradient, token
by token in float64: what the numeric references of scans are made of.

A head keeps a state of K x V. Token t changes it, and reads it:

    state_t = diag(exp(w_t)) state_(t-1) + b_t (a_t^T state_(t-1)) + k_t v_t^T
    y_t     = q_t^T state_t

| layer                | w                  | a, b             | K           | V         |
|----------------------|--------------------|------------------|-------------|-----------|
| Mamba-1              | dt A, each element | none             | state size  | 1         |
| Mamba-2 (SSD)        | dt A, one number   | none             | state size  | head size |
| lightning attention  | constant, a number | none             | head size   | head size |
| gated delta rule     | one number         | -beta k, exp(w)k | key size    | value size|
| RWKV-7               | each element       | yes              | head size   | head size |
| RWKV-6               | each element       | none; `delayed`  | head size   | head size |
"""

from dataclasses import dataclass, replace

import numpy as np

from stagec.ir.opdef import Array


@dataclass(frozen=True)
class Tokens:
    """What the tokens are: `q`, `k`, `a`, `b` [N, S, H, K], `v` [N, S, H, V], `w` [N, S, H, K] or
    [N, S, H, 1]. What an algorithm does not need may be missing."""

    w: Array
    q: Array = None
    k: Array = None
    v: Array = None
    a: Array = None
    b: Array = None


def delayed(x: Tokens) -> Tokens:
    """The tokens of a recurrence that reads the state before each of them: what changes it comes
    one token later, and one more token reads nothing."""
    first = [_padded(v, (1, 0)) for v in (x.w, x.k, x.v)]
    return replace(x, w=first[0], k=first[1], v=first[2], q=_padded(x.q, (0, 1)))


def on_time(d: Tokens) -> Tokens:
    """The gradients of tokens from those of `delayed` ones."""
    return replace(d, w=d.w[:, 1:], k=d.k[:, 1:], v=d.v[:, 1:], q=d.q[:, :-1])


def _padded(x: Array, ends: tuple[int, int]) -> Array:
    return np.pad(x, [(0, 0), ends, *[(0, 0)] * (x.ndim - 2)])


def run(x: Tokens, start: Array = None) -> tuple[Array, list[Array]]:
    """The states [N, H, K, V] before the first token and behind each one, and y [N, S, H, V] if
    there is a q. Without `start` the first state is 0."""
    state = np.zeros((*x.k[:, 0].shape, x.v.shape[-1])) if start is None else start
    states, read = [state], list[Array]()
    for t in range(x.k.shape[1]):
        state = _step(x, t, state) + x.k[:, t, :, :, None] * x.v[:, t, :, None, :]
        states.append(state)
        if x.q is not None:
            read.append(np.einsum("nhk,nhkv->nhv", x.q[:, t], state))
    return np.stack(read, 1) if read else None, states


def _step(x: Tokens, t: int, state: Array) -> Array:
    """What is left of a state after token t."""
    kept = np.exp(x.w[:, t])[..., None] * state
    if x.a is None:
        return kept
    return kept + np.einsum("nhl,nhk,nhkv->nhlv", x.b[:, t], x.a[:, t], state)


def _step_back(x: Tokens, t: int, d_state: Array) -> Array:
    """The transposed of `_step`."""
    kept = np.exp(x.w[:, t])[..., None] * d_state
    if x.a is None:
        return kept
    return kept + np.einsum("nhk,nhl,nhlv->nhkv", x.a[:, t], x.b[:, t], d_state)


def transition(x: Tokens) -> Array:
    """What all tokens together leave of a state: factors [N, H, K] (or [N, H, 1]), or with `a` and
    `b` the matrix [N, H, K, K] to multiply it with."""
    if x.a is None:
        return np.exp(x.w.sum(1))
    n, s, h, k = x.a.shape
    matrix = np.broadcast_to(np.eye(k), (n, h, k, k))
    for t in range(s):
        matrix = _step(x, t, matrix)
    return matrix


def into_start(x: Tokens, dy: Array, *, late: bool = False) -> Array:
    """The gradient of the first state, from that of y alone; `late`: a token reads the state before
    it."""
    d_state = np.zeros((*x.q[:, 0].shape, dy.shape[-1]))
    for t in reversed(range(dy.shape[1])):
        read = x.q[:, t, :, :, None] * dy[:, t, :, None, :]
        d_state = _step_back(x, t, d_state) + read if late else _step_back(x, t, d_state + read)
    return d_state


def back(x: Tokens, dy: Array, start: Array = None, d_end: Array = None) -> Tokens:
    """The gradients of what the tokens are; `d_end` is that of the last state."""
    _, states = run(replace(x, q=None), start)
    d_state = np.zeros_like(states[0]) if d_end is None else d_end
    d = {n: np.zeros_like(v) for n, v in vars(x).items() if v is not None}
    for t in reversed(range(dy.shape[1])):
        before, after = states[t], states[t + 1]
        d["q"][:, t] = np.einsum("nhkv,nhv->nhk", after, dy[:, t])
        d_state = d_state + x.q[:, t, :, :, None] * dy[:, t, :, None, :]
        d["k"][:, t] = np.einsum("nhkv,nhv->nhk", d_state, x.v[:, t])
        d["v"][:, t] = np.einsum("nhkv,nhk->nhv", d_state, x.k[:, t])
        faded = np.exp(x.w[:, t]) * (d_state * before).sum(-1)
        d["w"][:, t] = faded if x.w.shape[-1] > 1 else faded.sum(-1, keepdims=True)
        if x.a is not None:
            d["a"][:, t] = np.einsum("nhl,nhlv,nhkv->nhk", x.b[:, t], d_state, before)
            d["b"][:, t] = np.einsum("nhlv,nhk,nhkv->nhl", d_state, x.a[:, t], before)
        d_state = _step_back(x, t, d_state)
    return Tokens(**d)
