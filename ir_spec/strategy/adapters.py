"""How low-rank adapters are computed."""

from stagec.ir_spec.strategy.flag_values import FlagValues, Statements
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged


class AdaptersRule(Record):
    """The element type of the adapters of `stg.lora`."""

    dtype: str = flagged(
        "lora_dtype",
        "Element type of the adapters of --lora: that of the parameters (given), or f32, for which "
        "each adapter casts its input.",
        doc="given: that of the parameters beside them; f32: 32 bits, also beside 16",
        required=True,
        choices=("given", "f32"),
        needs=("lora",),
        numerics=True,
        rare=True,
    )


class AdaptersOp(Statement):
    """The element type of the adapters of `stg.lora`.

    With `f32`, the adapters of a 16-bit model are 32-bit parameters, with moments of that type.
    Each adapter casts its input, which backward keeps, and casts its result to the type of the
    value that it is added to, as peft does by default (`autocast_adapter_dtype`) for 4-bit weights;
    for others peft adds in 32 bits and casts the sum, with the same number of bytes. In a 32-bit
    model, and for parameters that ZeRO-3 casts when it gathers them, adapters have the type of the
    adapted parameters. Under `stg.autocast` each adapter then casts what a product has made to 32
    bits, and autocast casts it back (`_cast_input_dtype` of peft/tuners/lora/layer.py), but not
    beside weights in few bits (`requires_conversion` of peft/tuners/lora/bnb.py).
    """

    name, record = "stg.adapters", AdaptersRule
    section = Section.PARTS
    training = "adapters of a server have the type of the parameters beside them"
    example = "stg.adapters[dtype = f32]"

    def from_flags(self, request: FlagValues) -> Statements:
        return super().from_flags(request) if request["lora"] else iter(())
