"""Calls that reduce many gradients at once."""

from stagec.ir_spec.strategy.axes import REDUCED
from stagec.ir_spec.strategy.flag_values import FlagValues, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, flagged, parameter

#: Bytes of a call that reduces gradients, as in PyTorch's DDP (`bucket_cap_mb`).
BUCKET = 25 << 20


class BucketRule(Record):
    """Bytes of one call that reduces gradients; 0: one call after backward."""

    bytes: int = parameter(
        "int",
        "bytes with which a call is full; 0: one call after backward",
        required=True,
        least=0,
        flag=Flag(
            "ddp_bucket",
            "ZeRO 0 and 1: reduce gradients in calls of this size, as soon as they are computed "
            "(default 25 MiB; 0: in one call after backward).",
            default=BUCKET,
            least=0,
            metavar="BYTES",
        ),
    )
    copies: bool = flagged(
        "ddp_copies",
        "ZeRO 0 and 1: copy gradients into flat buffers that stay across steps, and reduce those, "
        "as DDP with gradient_as_bucket_view=False.",
        software=True,
    )
    views: bool = flagged(
        "ddp_views",
        "ZeRO 0 and 1: copy gradients into flat buffers as soon as they are complete; they are "
        "parts of these from then on, as in DDP with gradient_as_bucket_view=True.",
        doc="gradients are parts of the flat buffers, into which they are copied",
        software=True,
    )


class BucketOp(Statement):
    """Reduces gradients during backward, under ZeRO 0 and 1: complete gradients are collected until
    a call has this many bytes. Without the statement, or with 0, there is one call after backward.

    The rule is that of PyTorch's DDP and of Megatron-LM (`overlap_grad_reduce`): no gradient is
    cut, and the gradient with which a call reaches its size completes it. Each chunk of a pipeline
    stage has separate calls. PyTorch's first call, of 1 MiB, is not modeled.

    With `copies` the buffers of calls exist beside the gradients. With `views`, which precedes,
    gradients are parts of these buffers, which stay across steps, whatever
    `stg.gradients[lifetime]` says: the engine makes a gradient, and adds up those of several uses
    and microbatches (`no_sync`), in a tensor of its own, which ends when it is copied
    (torch/csrc/distributed/c10d/reducer.cpp: `mark_variable_ready_dense`).
    """

    name, record = "stg.bucket", BucketRule
    section = Section.DATA
    rare, needs = True, (REDUCED,)
    training = "there are no gradients to reduce"
    example = "stg.bucket[bytes = 26214400]"

    def from_flags(self, request: FlagValues) -> Statements:
        if request["ddp_bucket"] and request["zero"] < 2 and request.over(*REDUCED):
            yield {**self.flag_values(request), "bytes": request["ddp_bucket"]}
