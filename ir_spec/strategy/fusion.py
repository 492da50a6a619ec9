"""Neighbouring computations that run as one kernel."""

from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

#: The kinds in which a compiler fuses adjacent casts, and norms.
COMPILED = ("elementwise", "epilogue")


class FusionRule(Record):
    """Which neighbouring computations run as one kernel."""

    kind: str = flagged(
        "fusion",
        "Run consecutive element-wise computations as one kernel: without norms and softmax "
        "(pointwise), with them (elementwise), also after a matrix product (epilogue), or each "
        "alone (none).",
        positional=True,
        choices=("none", "pointwise", "elementwise", "epilogue"),
    )
    gradients: bool = flagged(
        "fuse_gradients",
        "Matrix products add weight gradients to the sum over microbatches themselves.",
        rare=True,
    )
    products: bool = flagged(
        "fuse_products",
        "Fuse matrix products of one operand with several weights, such as those of queries, keys "
        "and values.",
        rare=True,
    )
    caches: bool = flagged(
        "fuse_caches",
        "With --serve: one kernel rotates queries and keys, casts, and writes rows into caches.",
        rare=True,
    )
    sums: bool = flagged(
        "fuse_sums",
        "The sum at the end of a layer is part of the kernel of the next norm.",
        doc="the norm of the next layer adds up what a layer ends with",
        rare=True,
        software=True,
    )
    experts: str = flagged(
        "fuse_experts",
        "On which devices products of experts in mxfp4 and nvfp4 order tokens, compute the "
        "activation behind them and cast its result.",
        doc=(
            "blackwell: on devices of that family products of experts in mxfp4 and nvfp4 order "
            "tokens by experts, compute the activation behind them and cast its result; none"
        ),
        choices=("none", "blackwell"),
        needs=(EXPERTS,),
        rare=True,
        software=True,
    )
    own_casts: int = flagged(
        "own_casts",
        "Casts to this number of bits or fewer are separate kernels, not fused with the norm or "
        "the activation before them.",
        "int",
        doc="casts to so many bits or less are kernels of their own, but for the rows of caches",
        least=0,
        metavar="BITS",
        rare=True,
        software=True,
    )


class FusionOp(Statement):
    """Runs adjacent computations as one kernel, as a compiler would.

    `pointwise` fuses consecutive computations of single elements, as TorchScript does;
    `elementwise` fuses them with normalisations over rows; `epilogue` also fuses element-wise
    computations with the matrix product before them. With `gradients`, the products of weight
    gradients add to the sum over microbatches, as in Megatron-LM (`gradient_accumulation_fusion`);
    otherwise the addition is a separate kernel (`stg.accumulate_grad`), as in PyTorch's DDP. With
    `products`, consecutive matrix products with the same operand, such as the inputs of attention,
    are one product that also adds their biases, as engines store their weights. With `caches`, one
    kernel rotates rows, casts them and appends them to caches, and rotates queries with them. With
    `sums`, the norm at the start of a layer computes the sum at the end of the previous layer
    (fused_add_rms_norm). With `experts`, products of experts in mxfp4 and nvfp4 read the rows of
    their tokens, compute the activation and cast its result, on devices of that family (trtllm-gen,
    trtllm_fused_moe_runner.cu: PermuteGemm1 with routeAct and fusedAct; not Marlin, for int4). With
    `own_casts`, casts to this number of bits or fewer are separate kernels, as in engines that
    quantize with operators that are opaque to their compilers. Without the statement, every
    computation is a separate kernel, as in PyTorch without a compiler.
    """

    name, record = "stg.fusion", FusionRule
    section = Section.KERNELS
    example = "stg.fusion[elementwise]"
