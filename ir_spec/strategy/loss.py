"""How the cross entropy of logits is computed."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir_spec.strategy.statement import (
    Flag,
    Record,
    Section,
    Statement,
    parameter,
)

FORMS = ("fused", "stock")


@dataclass(frozen=True)
class LossRule(Record):
    """How the cross entropy of logits is computed."""

    form: str = parameter(
        "name",
        "fused: one op; stock: a log-softmax and the loss by it, as PyTorch without a compiler",
        default="fused",
        choices=FORMS,
        flag=Flag(
            "loss",
            "The cross entropy is one op (fused), or a log-softmax and the loss by it, with three "
            "copies of the logits in backward, as PyTorch without a compiler (stock).",
            rare=True,
        ),
    )


class LossOp(Statement):
    """How the cross entropy of logits is computed: by one op, whose backward takes the logits
    (`fused`), or by those of PyTorch without a compiler (`stock`), whose backward takes the
    log-softmax and makes its gradient before that of the logits, so that three tensors of the size
    of the logits are there at once. Losses over a split vocabulary stay fused.
    """

    name, record = "stg.loss", LossRule
    section = Section.KERNELS
    training = "there is no loss"
    example = "stg.loss[form = stock]"
