"""Kernels that PyTorch launches without a compiler for an op that is one kernel elsewhere.

An op is marked `eager_WHAT_TYPE` (`passes/lower/eager_kernels.py`), where a stack says so
(`stg.kernels[elementwise = torch]`). Its time follows from the bytes that it touches:

    n = bytes / (touched x bytes of the type)          elements of its tensors
    seconds = launches start + moved n width / (B bandwidth)
              + max(places n / (P clock rate), placed n width / (B bandwidth))

Kernels of TensorIterator whose operands are contiguous and of one type read 16 bytes at a time, and
wait for memory alone. Where an operand is broadcast, strided, or of another type, a thread computes
the place of each element (ATen/native/cuda/CUDALoops.cuh: `launch_legacy_kernel`,
`launch_unrolled_kernel`), which costs as much whatever the type: `rate` elements per clock of a
processor, `efficiency.memory.places`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from stagec.ir.types import DTYPE_BYTES

EAGER = "eager_"


@dataclass(frozen=True)
class EagerKernels:
    """What PyTorch launches for an op: tensors of its size that the op `touched` as one kernel,
    those that vectorized kernels `moved`, elements of which kernels computed `places`, and the
    tensors that these `placed`, each per element."""

    touched: float
    launches: int
    moved: float = 0
    places: float = 0
    placed: float = 0


#: By the mark. Backward follows torch/csrc/autograd/FunctionsManual.cpp.
KERNELS: Mapping[str, EagerKernels] = {
    # aten::_to_copy to a wider type; touched is in tensors of the narrow one
    "cast": EagerKernels(3, 1, places=1, placed=3),
    # x * w of rows or of columns; a sum with a mask
    "broadcast": EagerKernels(2, 1, places=1, placed=2),
    # x * y of views with strides
    "strided": EagerKernels(3, 1, places=1, placed=3),
    # the bias of a linear layer: addmm adds it in the epilogue of its product
    "bias": EagerKernels(2, 0),
    # the gradient of a scale: dy * x, summed over rows
    "rows": EagerKernels(2, 2, moved=4),
    # models/llama/modeling_llama.py, LlamaRMSNorm: pow, mean, + eps, rsqrt, x * r
    "rmsnorm": EagerKernels(2, 5, moved=3, places=1, placed=2),
    # dy * r, dy * x and its sum, three of rsqrt, the mean's, three of pow, the sum of both paths
    "rmsnorm_grad": EagerKernels(6, 11, moved=14, places=2, placed=3),
    # ATen/native/cuda/layer_norm_kernel.cu: statistics first; the gradients of scale and bias by a
    # kernel of their own, which reads both operands again
    "layernorm": EagerKernels(2, 1, moved=3.5),
    "layernorm_grad": EagerKernels(3, 2, moved=7.8),
    # the gradient of a bias: ATen/native/cuda/Reduce.cuh over rows
    "sum": EagerKernels(1, 1, moved=1.6),
    # transformers, eager_attention_forward: scores are scaled and masked in the type of the model
    "softmax": EagerKernels(2, 3, moved=3.6, places=1, placed=1),
    "softmax_grad": EagerKernels(3, 2, moved=4),
    # modeling_llama.py, apply_rotary_pos_emb: q * cos, -half, cat, * sin, +
    "rope": EagerKernels(2, 5, places=5, placed=10),
    # two products, -half, zeros and copies of two slices, two sums
    "rope_grad": EagerKernels(2, 9, moved=5, places=4.5, placed=10),
    # torchtitan, models/llama3/model/model.py, apply_rotary_emb: a cast to fp32, a product of
    # complex numbers, one place for each, and a cast back; backward the same
    "complex_rope": EagerKernels(2, 3, places=2.5, placed=10),
    # ATen/native/cuda/SoftMax.cu, cunn_SoftMaxForward: rows that no block keeps are read three
    # times, those of backward twice
    "log_softmax": EagerKernels(2, 1, moved=4),
    "log_softmax_grad": EagerKernels(3, 1, moved=5),
    # ATen/native/cuda/fused_adam_utils.cuh, adam_math for each element; touched by AdamW
    "adamw": EagerKernels(7, 1, moved=7, places=0.65),
    # utils/clip_grad.py: norms, and all gradients times the factor
    "squared_norm": EagerKernels(1, 1, moved=3, places=0.2),
    # transformers, integrations/moe.py, grouped_mm_experts_forward: rows are gathered, those of
    # other ranks masked, in the results of both products as well, then weighted and added up
    "dispatch": EagerKernels(1.2, 10, moved=2, places=1, placed=2),
    "dispatch_grad": EagerKernels(1.2, 8, moved=1, places=3, placed=6),
    "routed_silu": EagerKernels(2, 4, moved=4, places=3, placed=6),
    "routed_silu_grad": EagerKernels(3, 4, moved=4, places=3, placed=7),
    "combine": EagerKernels(1.2, 5, moved=5, places=2, placed=4),
    "combine_grad": EagerKernels(1.2, 4, moved=1, places=2, placed=4),
    "combine_weights_grad": EagerKernels(1.2, 2, moved=1, places=1, placed=2),
}


@cache
def eager_kernels(form: str) -> tuple[EagerKernels, float] | None:
    """What a mark stands for, and the bytes of an element; None of other marks."""
    if not form.startswith(EAGER):
        return None
    what, _, dtype = form.removeprefix(EAGER).rpartition("_")
    return KERNELS[what], float(DTYPE_BYTES[dtype])


def launches_of(form: str) -> int:
    """How many kernels a computation with this mark launches."""
    kernels = eager_kernels(form)
    return 1 if kernels is None else kernels[0].launches
