"""Kernels of a program: the description of a computation for cost models and measured tables."""

from typing import NamedTuple

from stagec.ir.kernel import EXTENTS

__all__ = ("EXTENTS", "Kernel")


class Kernel(NamedTuple):
    """One kernel launch on a device.

    `kind` is `matmul`, `attention`, `attention_backward` or `memory`; `extents` are the values of
    `EXTENTS[kind]`. `dtype` is the element type of the operands of products (bf16, f32, f8e4m3), ''
    for other kinds. `flops` counts all executed operations, `bytes` those read and written. `op` is
    the operation: einsum, rmsnorm, softmax, adamw, or several joined by +. `causal` means that a
    mask removes half of the pairs of queries and keys, `windowed` that keys are the mean number of
    those in a window. `form` is the name of the kernel in a library, if a strategy chooses one
    (`stg.kernels`). `transposed` means that rows of both operands of a product are summed up, as in
    gradients of weights: m and n elements are contiguous, not k.
    """

    kind: str
    dtype: str
    extents: tuple[int, ...]
    flops: int
    bytes: int
    op: str = ""
    causal: bool = False
    form: str = ""
    windowed: bool = False
    transposed: bool = False

    def __str__(self) -> str:
        """`matmul bf16 1 x 4096 x 4096 x 1024`."""
        return " ".join(filter(None, (self.kind, self.dtype, " x ".join(map(str, self.extents)))))
