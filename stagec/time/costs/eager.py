"""Kernels that eager PyTorch launches for an op that a compiler makes one kernel.

`passes/lower/kernels.py` marks such ops `eager_WHAT_TYPE` where the strategy states
`stg.kernels[elementwise = torch]`. The time of an op follows from the bytes that it touches:

    n = bytes / (touched x bytes of the type)          elements of its tensors
    seconds = launches start + moved n width / (B bandwidth)
              + max(places n / (P clock rate), placed n width / (B bandwidth))

Kernels of TensorIterator whose operands are contiguous and of one type read 16 bytes at a time and
are bound by memory alone. Where an operand is broadcast, strided, or of another type, a thread
computes the offset of each element (ATen/native/cuda/CUDALoops.cuh: `launch_legacy_kernel`,
`launch_unrolled_kernel`), at a cost that does not depend on the type: `rate` elements per clock of
a processor (`efficiency.memory.places`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from stagec.ir.kernel import STAYS
from stagec.ir.types import DTYPE_BYTES

EAGER = "eager_"


@dataclass(frozen=True)
class EagerKernels:
    """The kernels that PyTorch launches for an op, in tensors of the op's size: `touched` are those
    that a single kernel would read and write, `moved` those that vectorized kernels read and write.
    Further kernels compute the offsets of `places` elements for each element of a tensor, and read
    and write `placed` tensors."""

    touched: float
    launches: int
    moved: float = 0
    places: float = 0
    placed: float = 0


#: The kernels by mark. Backward follows torch/csrc/autograd/FunctionsManual.cpp.
KERNELS: Mapping[str, EagerKernels] = {
    # aten::_to_copy to a wider type; touched is in tensors of the narrow one
    "cast": EagerKernels(3, 1, places=1, placed=3),
    # a cast for a kernel that takes two types, and that kernel: x + y, where y is half as wide
    "promoted": EagerKernels(3, 0),
    "mixed": EagerKernels(3, 1, places=1, placed=2.5),
    # x * w of rows or of columns; a sum with a mask
    "broadcast": EagerKernels(2, 1, places=1, placed=2),
    # an activation of a view with strides (models/phi3/modeling_phi3.py, Phi3MLP: chunk)
    "part": EagerKernels(2, 1, places=1, placed=2),
    # x * y of views with strides, and the gradient of an activation of one
    "strided": EagerKernels(3, 1, places=1, placed=3),
    # the bias of a linear layer: addmm adds it in the epilogue of its product
    "bias": EagerKernels(2, 0),
    # peft/tuners/lora/layer.py, Linear.forward, with adapters in fp32: their product is scaled, and
    # added in fp32 to the result in 16 bits; the cast behind it is a node
    "adapter": EagerKernels(3, 2, moved=4, places=1, placed=5),
    # the gradient becomes fp32, and 16 bits again for the result (torch/csrc/autograd/engine.cpp,
    # validate_outputs), and is scaled
    "adapter_grad": EagerKernels(3, 3, moved=7, places=1, placed=3),
    # both have it
    "adapter_scale": EagerKernels(2, 0),
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
    # torch/distributed/tensor/experimental/_attention.py, _SDPAMerger._merge_one: a cast of the
    # part, out - part, its product with a sigmoid of rows, out - product, for all queries or half
    # of them, whose result is concatenated again; and seven of rows
    "merge": EagerKernels(2.5, 11, moved=5.5, places=1.5, placed=2.6),
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
    """The kernels of a mark `eager_WHAT_TYPE`, and the bytes of an element; None for other
    marks."""
    if not form.startswith(EAGER):
        return None
    what, _, dtype = form.removeprefix(EAGER).rpartition("_")
    return KERNELS[what], float(DTYPE_BYTES[dtype])


def launches_of(form: str) -> int:
    """The number of kernels that a computation with this mark launches."""
    kernels = eager_kernels(form)
    return int(form != STAYS) if kernels is None else kernels[0].launches
