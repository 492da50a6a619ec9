"""Whether a step of training drops elements."""

from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

CONFIGURED = "configured"
#: The rates of `stg.module`: for the outputs of layers, for their first input, and for attention
#: weights.
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
    """Whether a training step drops elements, with the rates of `stg.module`, which importers
    write: `add-dropout` adds `stg.dropout` to the program.

    Backward keeps a mask of one byte per element (`native_dropout` of PyTorch on GPUs). An
    attention kernel generates its mask again from a seed; only attention that runs operation by
    operation keeps a mask, and the remaining weights.
    """

    name, record = "stg.dropouts", DropoutRule
    section = Section.KERNELS
    training = "inference drops nothing"
    example = "stg.dropouts[rates = configured]"
