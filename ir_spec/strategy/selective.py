"""The ops that selective recompute recomputes."""

from stagec.ir_spec.strategy.flag_values import FlagValues, Statements
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged


class SelectiveRule(Record):
    """The ops that `stg.recompute[selective]` recomputes."""

    what: str = flagged(
        "recompute_selective",
        "What --recompute selective recomputes: scores of all pairs, attention (fused or not), or "
        "all but attention and every other product (products).",
        doc=(
            "scores: what grows with the square of a dimension; attention: fused attention, too; "
            "products: all but products and attention, and every second product"
        ),
        required=True,
        positional=True,
        choices=("scores", "attention", "products"),
        needs=("recompute",),
        rare=True,
        software=True,
    )


class SelectiveOp(Statement):
    """The ops that `stg.recompute[selective]` recomputes, for which frameworks have different
    lists.

    `scores`: results that grow with the square of a dimension, such as the scores of unfused
    attention (arXiv 2205.05198); a block with fused attention has none. `attention`: these and
    fused attention, of which queries, keys and values are kept (Megatron-Core's `recompute_modules
    = core_attn`). `products`: all ops of a block except attention and products in 16 bits, and
    every second of these products (torchtitan's `selective_ac_option = "op"`), like
    `stg.recompute[full, keep = (einsum, attention), products = 2]`.
    """

    name, record = "stg.selective", SelectiveRule
    section = Section.MEMORY
    training = "there is no backward to compute again for"
    example = "stg.selective[attention]"

    def from_flags(self, request: FlagValues) -> Statements:
        return iter(()) if request["recompute"] == "none" else super().from_flags(request)
