"""Whether a step of training drops elements."""

from __future__ import annotations

from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

CONFIGURED = "configured"
#: The rates of `stg.module`: of what layers add to the stream, of what they begin with, and of the
#: shares of attention.
RATES = HIDDEN, EMBEDDING, ATTENTION = "hidden_dropout", "embedding_dropout", "attention_dropout"


class DropoutRule(Record):
    """Whether a step of training drops elements."""

    rates: str = flagged(
        "dropout",
        "Drop elements with the rates of the model's configuration (configured), or none.",
        doc="configured: those that the text of the model states; none: nothing is dropped",
        choices=("none", CONFIGURED),
        rare=True,
        software=True,
        numerics=True,
    )


class DropoutsOp(Statement):
    """Whether a step of training drops elements, as the rates of `stg.module` say, which importers
    write: `add-dropout` puts `stg.dropout` into the program.

    Backward keeps a mask of one byte for each element (`native_dropout` of PyTorch on GPUs); a
    kernel of attention draws its mask again from a seed, and only attention that runs operation by
    operation keeps one, with the shares that are left.
    """

    name, record = "stg.dropouts", DropoutRule
    section = Section.KERNELS
    training = "inference drops nothing"
    example = "stg.dropouts[rates = configured]"
