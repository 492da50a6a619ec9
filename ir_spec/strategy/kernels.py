"""Which kernels compute the ops of a model."""

from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, flagged, parameter

DEVICE = "device"
MARLIN, FLASHINFER, TRITON_BLOCKS = "marlin", "flashinfer", "triton_blocks"
DEEPGEMM, CUTLASS = "deepgemm", "cutlass"
XQA, MQA_LOGITS = "xqa", "mqa_logits"
CLEARED = "cleared"
#: A server has adapters for all linear modules, because the engine cannot know which are used.
ALL_MODULES = "all"
MATH, EAGER = "math", "eager"
#: The forms of attention without a fused kernel.
UNFUSED = (MATH, EAGER)
#: The kernel that PyTorch chooses for a device.
SDPA = "sdpa"
#: Kernels of attention.
ATTENTION = (*UNFUSED, SDPA, "flash_1", "flash_2", "flash_3", "cudnn", "triton")
TORCH = "torch"


class KernelsRule(Record):
    """Which kernels compute the ops of a model."""

    attention: str = flagged(
        "attention",
        "The kernel of attention: FlashAttention 1, 2 or 3, cuDNN, Triton, the one that PyTorch "
        "chooses (sdpa), products and softmax one by one (math; as in transformers: eager), or the "
        "kernel with which the machine was measured (device).",
        choices=(DEVICE, *ATTENTION),
    )
    decoding: str = parameter(
        "name",
        "the kernel of attention of a few queries behind cached keys: XQA of TensorRT-LLM, or the "
        "one with which the machine was measured (device)",
        choices=(DEVICE, XQA),
    )
    indexer: str = parameter(
        "name",
        "the kernel that scores keys for sparse attention: that of DeepGEMM, which multiplies in 8 "
        "bits (mqa_logits), or that of attention (device)",
        choices=(DEVICE, MQA_LOGITS),
    )
    expands: str = flagged(
        "expanding_kernel",
        "The kernel that multiplies weights of 4 bits by activations of 16: that of Marlin, which "
        "weights in int4 have anyway, or the one with which the machine was measured (device).",
        choices=(DEVICE, MARLIN),
        beside=("weight_dtype",),
    )
    blocks: str = flagged(
        "block_kernel",
        "The kernel that multiplies weights in blocks of fp8, but for those of experts: that of "
        "FlashInfer on Blackwell, or the one with which the machine was measured (device).",
        choices=(DEVICE, FLASHINFER),
        beside=("weight_dtype",),
    )
    experts: str = flagged(
        "expert_kernel",
        "The kernel that multiplies weights of experts: in blocks of fp8 that of Triton with its "
        "default blocks, or the backend DEEPGEMM of TensorRT-LLM, in nvfp4 its backend CUTLASS, or "
        "the one with which the machine was measured (device).",
        choices=(DEVICE, TRITON_BLOCKS, DEEPGEMM, CUTLASS),
        beside=("weight_dtype",),
    )
    eager: tuple[str, ...] = parameter(
        "names",
        flag=Flag(
            "eager",
            "Run these operation by operation, as PyTorch without a compiler or fused kernels "
            "does: swiglu, geglu, gelu, rmsnorm, layernorm, attention, normed_keys, route, "
            "part_of, clamp, expert_bias, expert_weights, expert_rows, scaled_rope, complex_rope, "
            "alibi, sinks, softcap; or none of a stack's (none); gate_in_place: as kernels of a "
            "compiler overwrite gate and up, gate_up_in_place and norm_in_place: as those of Liger "
            "do. Backward keeps the tensors that each operation saves.",
            "names",
            "",
            metavar="OP,...",
        ),
    )
    ring: str = flagged(
        "ring_steps",
        "Run ring attention as one kernel (fused), or operation by operation as PyTorch's "
        "context_parallel does: with keys and values of all ranks in one buffer (gathered), or "
        "passed on.",
        choices=("fused", "gathered", "passed"),
        needs=("cp",),
    )
    elementwise: str = parameter(
        "name",
        "kernels of element-wise ops, norms and rotations: one for each op at the speed of the "
        "memory (device), or those that PyTorch launches without a compiler",
        choices=(DEVICE, TORCH),
    )
    shrink: str = parameter(
        "name",
        "products with the adapters of a server write their results (stored), or add parts of them "
        "up in a buffer that a kernel clears before (cleared)",
        choices=("stored", CLEARED),
    )
    adapters: str = parameter(
        "name",
        "slots of adapters of a server, and products with them, are those of the named parameters "
        "(named), or of all linear modules of layers, whatever adapters have (all)",
        choices=("named", ALL_MODULES),
    )
    adapter_ranks: tuple[int, ...] = parameter(
        "ints",
        "ranks that slots of adapters of a server have, in order: adapters are filled up to the "
        "first one that is enough (default: any)",
    )

    def adapter_rank(self, rank: int) -> int | None:
        """The rank that slots have for adapters of this one; None if all are less."""
        return next(
            (r for r in self.adapter_ranks if r >= rank), None if self.adapter_ranks else rank
        )


class KernelsOp(Statement):
    """The kernels that compute the ops of a model, where the choice changes time or memory.

    A kernel of `attention` has separate constants in the text of a machine
    (`efficiency.attention.kernels`); if a machine does not have them, its general constants are
    used, and the answer says so. The kernel also computes attention that a text writes as products
    and a softmax (`fuse-attention`). With `math`, attention is not a kernel: its two products and
    the softmax between them are ops (`expand-attention`). With `eager`, they are those of
    transformers' `eager` implementation: keys and values are copied for the heads that share them,
    and backward keeps the softmax both in fp32 and in the type of its product.

    `sdpa` is PyTorch's own choice: cuDNN on Hopper and Blackwell, FlashAttention 2 on other devices
    (ATen/native/transformers/cuda/sdp_utils.cpp: `check_prefer_cudnn_attention`). It does not
    support windows: sequences that are at least as long as the window use a mask, with which the
    kernel computes all pairs.

    With `elementwise = torch`, a node states the kernels that PyTorch launches for it (`form =
    eager_...`, `stagec/time/costs/eager.py`): all kernels of a norm or rotation, and kernels that
    compute the address of each element because an operand is broadcast or has another type. Hosts
    issue each of them.

    Kernels that expand 4-bit weights (`expands`) have separate constants too
    (`efficiency.matmul.kernels`). Marlin expands them once for each block of at most 64 rows, and
    multiplies with instructions of Ampere (vLLM, csrc/moe/marlin_moe_wna16). vLLM uses it for int4
    weights, and for mxfp4 on Hopper with VLLM_MXFP4_USE_MARLIN, instead of Triton kernels, whose
    start includes their routing (TensorRT-LLM, fused_moe_triton.py; triton_kernels/routing.py).

    Products with weights in blocks of fp8 are those of DeepGEMM on Hopper and Blackwell. With
    `blocks = flashinfer` they are those of FlashInfer on Blackwell (`gemm_fp8_nt_groupwise` of
    trtllm-gen), which keep up with few rows only: SGLang has them where its environment says
    SGL_ENABLE_JIT_DEEPGEMM=false (srt/layers/quantization/fp8_utils.py). Products of experts have
    kernels of their own. With `experts = triton_blocks` they are those of Triton, which vLLM has on
    Hopper unless ranks have whole experts, and on Blackwell with VLLM_USE_FLASHINFER_MOE_FP8=0 and
    VLLM_MOE_USE_DEEP_GEMM=0 (fused_moe/oracle/fp8.py: `_get_priority_backends`), and SGLang on
    Hopper. Shapes for which an engine ships tuned blocks, such as DeepSeek on Hopper, are up to
    twice as fast, as the machine's own kernel. `experts = deepgemm` and `experts = cutlass` are the
    backends DEEPGEMM (weights in blocks of fp8) and CUTLASS (in nvfp4) of TensorRT-LLM on Blackwell
    (`moe_config.backend`; _torch/modules/fused_moe/create_moe.py), where its backend TRTLLM is the
    machine's own kernel. With `cutlass` the order of tokens, the activation and its cast are
    kernels of their own. Other types of weights keep their kernels.

    The ops that `eager` names become the operations that PyTorch runs without a compiler and
    without a library kernel for the whole op (`expand-kernels`). Backward then keeps the tensors
    that each of these saves. `swiglu`, `geglu`: the activation of the gate, then the product;
    backward keeps the activated gate in addition to gate and up. `rmsnorm`: in fp32, cast back and
    scaled, as in `LlamaRMSNorm` of transformers; backward keeps the input in fp32 and the
    normalized input, while the kernel of `torch.nn.RMSNorm` keeps only its input. A zero-centered
    scale is applied in fp32, as in `Gemma3RMSNorm`. `attention`: keys and values that heads share
    are copied for each head before the kernel, and backward keeps the copies, as with `repeat_kv`
    of torchtitan's Llama models. `clamp`: the limits of a gated activation are applied to gate and
    up separately, and the results are concatenated for the kernel of the activation; backward keeps
    these in addition to the clamped values. `expert_bias`: the bias of the results of experts,
    times the weights of their rows, is added in fp32 (`stg.expert_bias`). `expert_rows`: backward
    of the sum over experts copies rows three times (transformers). `scaled_rope`: rotations that
    multiply by a factor (YaRN), as products with cosines and sines. `complex_rope`: rotations as
    products of complex numbers, in fp32 (torchtitan), for `elementwise`. `gelu`, `layernorm`,
    `route`: the code of some models has no kernel for them, but computes them in fp32 or with a
    separate product (attributes of ops: `stepwise`, `code`, `wide_logits`). `part_of`: a view of a
    part of a product keeps the whole product. `alibi`, `sinks`, `softcap`: attention with a bias by
    distance, with sinks or with bounded scores has no kernel (`expand-attention`).
    `joined_queries`: the result of attention over queries that are partly rotated, or copied, is
    copied. `normed_keys`: with norms of heads, keys of the only head on a rank are copied as well
    (torchtitan's Qwen3). `gate_in_place` is an optimization of compilers: the gradients of gate and
    up overwrite these, of which Inductor can overwrite one while the kernel runs.
    `gate_up_in_place` and `norm_in_place` are kernels of Liger: the gradients of gate and up
    overwrite both, and that of the input of an RMSNorm overwrites that of its result.

    `ring`: `context_parallel` of PyTorch merges parts of attention operation by operation. The
    result is in the order of heads, so it is copied for the following product, and backward keeps
    both. The steps of backward need buffers (`stg.workspace`): keys and values, whole or those of a
    step, which are concatenated for their transfer, and sums of their gradients. Those of forward
    are smaller, and not modeled.
    """

    name, record = "stg.kernels", KernelsRule
    section = Section.KERNELS
    rare, software = True, True
    example = "stg.kernels[attention = flash_2, eager = (swiglu, rmsnorm)]"
