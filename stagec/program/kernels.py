"""Kernels of a program: what a cost model and measured tables need to know of a computation."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir.kernel import EXTENTS

__all__ = ("EXTENTS", "Kernel")


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one launch on a device computes: what a cost model and measured tables need to know.

    `kind` is `matmul`, `attention`, `attention_backward` or `memory`, `extents` are those of
    `EXTENTS[kind]`. `dtype` is the element type of the operands of products (bf16, f32, f8e4m3),
    '' for the others. `flops` are all that are executed, `bytes` those read and written. `op` is
    what it computes: einsum, rmsnorm, softmax, adamw, or several joined by +. With `causal` a mask
    leaves half of the pairs of queries and keys. `form` names the kernel of a library, where a
    strategy says which (`stg.kernels`).
    """

    kind: str
    dtype: str
    extents: tuple[int, ...]
    flops: int
    bytes: int
    op: str = ""
    causal: bool = False
    form: str = ""

    def __str__(self) -> str:
        """`matmul bf16 1 x 4096 x 4096 x 1024`."""
        return " ".join(filter(None, (self.kind, self.dtype, " x ".join(map(str, self.extents)))))
