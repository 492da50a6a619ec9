"""Which kernels compute collectives, and in which order of elements."""

from stagec.ir_spec.strategy.axes import AXES
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

#: Elements are copied between the order of ranks and that of a dimension.
COPIED = "copied"
LIBRARY, ONE_SHOT, TWO_SHOT = "library", "one_shot", "two_shot"


class CollectivesRule(Record):
    """Which kernels compute collectives, and in which order of elements."""

    all_reduce: str = flagged(
        "all_reduce",
        "What reduces within a node: the communication library, or kernels that read the memory of "
        "other ranks, if they are faster (one-shot: all operands; two-shot: that, or each rank "
        "reduces a part).",
        choices=(LIBRARY, ONE_SHOT, TWO_SHOT),
        beside=(("tp", *AXES),),
    )
    below: int = flagged(
        "all_reduce_below",
        "The most bytes for --all-reduce; the library reduces more.",
        "int",
        doc="bytes up to which kernels of an engine are taken",
        default=8 << 20,
        least=1,
        metavar="BYTES",
        needs=("all_reduce",),
    )
    reads: int = flagged(
        "all_reduce_reads",
        "The most bytes that a rank reads from the others in one shot; two shots reduce more "
        "(0: any number in one).",
        "int",
        doc="bytes up to which a rank reads all operands, or 0",
        least=0,
        metavar="BYTES",
        needs=("all_reduce",),
    )
    norms: bool = flagged(
        "all_reduce_norms",
        "Kernels of all_reduces also add the residual and normalize.",
        doc="kernels of all_reduces add to the sum and normalize it",
        needs=("all_reduce",),
    )
    statistics: bool = flagged(
        "all_reduce_statistics",
        "Sums over rows that several norms need, such as those of queries and keys, are one "
        "all_reduce.",
        doc="sums of several norms that could start together are one all_reduce",
        needs=("tp",),
    )
    order: str = flagged(
        "collective_order",
        "Collectives of activations work along any dimension (given), or along the first only, "
        "with copies after gathers and before reductions along others (copied).",
        choices=("given", COPIED),
        needs=(("tp", "cp"),),
    )


class CollectivesOp(Statement):
    """Which kernels compute collectives.

    Serving engines have their own kernels for small all_reduces within a node, in which each rank
    reads the memory of the others (vLLM, csrc/custom_all_reduce.cuh; TensorRT-LLM,
    customAllReduceKernels.cu): with `one_shot` it reads all operands; with `two_shot` it adds a
    part of the buffer and then reads the other sums. They are used for up to `below` bytes, if they
    are faster than the library. With `one_shot` and `reads`, n ranks reduce a buffer of more than
    `reads / (n - 1)` bytes in two shots (FlashInfer, `_should_use_oneshot`). Their constants are
    those of the machine (`efficiency.network.LEVEL.direct`); a machine without them uses the
    library.

    With `norms`, the kernel of an all_reduce also adds the residual and normalizes the sum, or
    normalizes by sums of squares that it has added up, so that no further kernel is launched
    (flashinfer.comm.trtllm_allreduce_fusion, which vLLM and SGLang call; TensorRT-LLM,
    AllReduceFusionOp.RESIDUAL_RMS_NORM). The model assumes the same for large all_reduces of the
    library, next to which the start of a kernel is negligible.

    With `statistics`, the sums of squares of several independent norms over split rows are one
    all_reduce, such as those of the queries and keys of MiniMax-M2 (vLLM,
    model_executor/layers/mamba/linear_attn.py: MiniMaxText01RMSNormTP.forward_qk; SGLang,
    srt/models/minimax_m2.py; TensorRT-LLM, minimax_allreduce_rms_qk).

    `order = copied`: in libraries the parts of ranks follow each other, which is the order of the
    first dimension only. For other dimensions, PyTorch's functional collectives concatenate what
    they have gathered, and what they will reduce (torch/distributed/_functional_collectives.py:
    `all_gather_tensor`, `reduce_scatter_tensor`): a kernel and another tensor of that size.
    Operands and results of products that run in steps during the transfer are not copied.
    """

    name, record = "stg.collectives", CollectivesRule
    section = Section.KERNELS
    rare, software = True, True
    example = "stg.collectives[all_reduce = two_shot, below = 8388608]"
