"""Dimensions that are padded, so that ranks have whole blocks of them."""

from stagec.ir_spec.strategy.axes import WIDTHS
from stagec.ir_spec.strategy.flag_values import FlagValues, Problems, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, parameter


class PadDimensionsRule(Record):
    """The number of which a rank's part of these dimensions is a multiple."""

    dims: tuple[str, ...] = parameter("dims", "dimension names", required=True, positional=True)
    multiple: int = parameter(
        "int",
        required=True,
        least=1,
        flag=Flag(
            "pad_widths",
            "Pad feed-forward widths, also of experts, to a multiple of this number on each rank "
            "that splits them, as engines do if blocks of low-bit weights do not divide.",
            default=0,
            least=0,
            numerics=True,
            rare=True,
        ),
    )


class PadDimensionsOp(Statement):
    """Pads dimensions to a multiple of `multiple` times the number of ranks that split them. With
    `stg.pad_dimensions[M, multiple = 32]`, the 2,880 columns of an expert of gpt-oss, 90 blocks of
    32, become 2,944 over tp = 4: 23 blocks on each rank. The weights and FLOPs of padding are
    counted; engines set it to zero.

    Engines pad experts in mxfp4 themselves (`stg.weights[fill]`), and reject fp8 blocks that do not
    divide evenly (vLLM to 0.25 and SGLang: "is not divisible by weight quantization block_n").
    """

    name, record, repeats = "stg.pad_dimensions", PadDimensionsRule, True
    subject = "dims"
    section = Section.SERVING
    example = "stg.pad_dimensions[(F, M), multiple = 128]"

    def from_flags(self, request: FlagValues) -> Statements:
        dims = tuple(name for name in WIDTHS if name in request.sizes)
        if request["pad_widths"] and dims:
            yield {"dims": dims, "multiple": request["pad_widths"]}

    def problems(self, request: FlagValues) -> Problems:
        if request["pad_widths"] and not any(name in request.sizes for name in WIDTHS):
            yield "--pad-widths: the model has no feed-forward width", "leave it out"
