"""How the cross entropy of logits is computed."""

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir_spec.strategy.flag_values import FlagValues, Problems
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

FORMS = ("fused", "stock", "in_place", "fused_in_place", "chunked", "compiled", "linear")
#: The forms that process the tokens in parts.
IN_CHUNKS = ("chunked", "linear")


class LossRule(Record):
    """How the cross entropy of logits is computed."""

    form: str = flagged(
        "loss",
        "The cross entropy is one op (fused), one that casts its logits (compiled), one op whose "
        "gradient takes the buffer of the logits (in-place: in several kernels; fused-in-place), a "
        "log-softmax and a loss (stock, or "
        "chunked: in parts of the tokens), or one op with the head, without whole logits (linear).",
        choices=FORMS,
    )
    logits: str = flagged(
        "loss_logits",
        "Logits of a split vocabulary stay split for the loss, or are gathered before it in the "
        "type of the head.",
        choices=("split", "gathered"),
        needs=("tp",),
    )
    chunks: int = flagged(
        "loss_chunks",
        "Parts of the tokens of a chunked or linear loss (default: that of the form).",
        "int",
        doc="parts of the tokens (0: 8 if chunked; linear: the vocabulary over the width)",
        least=0,
        needs=("loss",),
    )


class LossOp(Statement):
    """How the cross entropy of logits is computed. Tensors of the size of the logits in backward:

    | form             | tensors                                                  | as in     |
    |------------------|----------------------------------------------------------|-----------|
    | `fused`          | the logits and their gradient, in the type of the logits | compilers |
    | `stock`          | log-softmax, its gradient, that of the logits, in fp32;  | PyTorch,  |
    |                  | with a split vocabulary one more, all over the ranks     | DTensor   |
    | `in_place`       | one: the gradient takes the buffer of the logits; a      | Megatron  |
    |                  | kernel for each step, which read and write it 10 times   |           |
    | `fused_in_place` | one, in the type of the head                             | Transfor- |
    |                  |                                                          | mer Engine|
    | `compiled`       | the logits and their gradient, in the type that their    | Inductor  |
    |                  | product has, which the kernels cast; with a split        |           |
    |                  | vocabulary two fp32 tensors in forward, of which         |           |
    |                  | log-softmax is kept                                      |           |
    | `chunked`        | log-softmax in fp32, the gradient of the logits in their | torchtune |
    |                  | type, and two fp32 tensors of a part of the tokens       |           |
    | `linear`         | none but logits of a part of the tokens; gradients of    | Liger     |
    |                  | head and input are made in forward                       |           |

    `logits = gathered`: all ranks of a split vocabulary have all logits and compute the whole loss
    (`ColwiseParallel(output_layouts = Replicate())`, "colwise_rep" of transformers).

    A form that is not possible for a loss, such as `linear` over a split vocabulary, has no effect.
    """

    name, record = "stg.loss", LossRule
    section = Section.KERNELS
    rare, software = True, True
    training = "there is no loss"
    example = "stg.loss[form = stock]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if "chunks" in op.attrs and op.text("form", "fused") not in IN_CHUNKS:
            yield f"'chunks' needs a form in parts: {', '.join(IN_CHUNKS)}"
        if op.text("logits") == "gathered" and op.text("form") == "linear":
            yield "'linear' never has whole logits, so they cannot be gathered"

    def problems(self, request: FlagValues) -> Problems:
        yield from super().problems(request)
        form = request["loss"]  # of a flag or of a stack; by default the flag is said to be idle
        if request["loss_chunks"] and form not in (FORMS[0], *IN_CHUNKS):
            message = f"--loss-chunks {request['loss_chunks']} needs a loss in parts, found {form}"
            yield message, "add --loss chunked or --loss linear, or leave it out"
