"""Kernels of a program: what a cost model and measured tables need to know of a computation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one launch on a device computes: what a cost model and measured tables need to know."""

    kind: str
    dtype: str
    extents: tuple[int, ...]
    flops: int
    bytes: int
    op: str = ""
    causal: bool = False


_ATTENTION = ("batch", "heads", "kv_heads", "queries", "keys", "qk", "v")
EXTENTS = {
    "matmul": ("batch", "m", "n", "k"),
    "attention": _ATTENTION,
    "attention_backward": _ATTENTION,
    "memory": (),
}
