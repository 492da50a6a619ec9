"""Values that are gathered before they are used."""

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir_spec.strategy.flag_values import FlagValues, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Statement, parameter


class GatherRule(Record):
    """Activations split over these dimensions are gathered, or the values named are whole."""

    dims: tuple[str, ...] = parameter("dims", "dimension names", required=True, positional=True)
    of: tuple[str, ...] = parameter("values", "only values of these names")
    regather: bool = parameter("flag", "backward gathers them again and does not keep them")


class GatherOp(Statement):
    """Activations split over these dimensions are gathered before an op that would treat the split
    specially.

    `stg.gather[V]` computes the loss over gathered logits instead of a vocabulary-parallel loss.
    With `regather`, backward keeps the rank's own part and gathers it again, as Transformer Engine
    and PyTorch do with keys and values under context parallelism. With `of`, the values with these
    names are not split in the dimensions, whichever op uses them.
    """

    name, record, repeats = "stg.gather", GatherRule, True
    rare = True
    flags = (
        Flag(
            "no_vocab_parallel",
            "Gather the logits instead of a vocabulary-parallel loss.",
            "switch",
            False,
            needs=("tp",),
            tries=(True, False),
        ),
        Flag(
            "cp_inputs",
            "With --cp-mode all-gather: gather keys and values again in backward, or save them.",
            "choice",
            "regather",
            choices=("regather", "save-gathered"),
            needs=("cp",),
            only=("cp_mode", "all-gather"),
            tries=("save-gathered", "regather"),
        ),
    )
    example = "stg.gather[V]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if op.flag("regather") and "of" in op.attrs:
            yield "'regather' needs operands of ops, but 'of' names values"

    def from_flags(self, request: FlagValues) -> Statements:
        if "cp" in request.axes and request.cp_mode == "all-gather":
            again = {"regather": True} if request["cp_inputs"] == "regather" else {}
            yield {"dims": request.context, **again}
        if "tp" in request.axes and request["no_vocab_parallel"]:
            yield {"dims": "V"}
