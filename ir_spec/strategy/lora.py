"""Low-rank adapters: which parameters are trained."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir.core import Value
from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, flagged, parameter


@dataclass(frozen=True)
class LoraRule(Record):
    """Which parameters get low-rank adapters; all others are frozen. A server has `slots` of
    them."""

    targets: tuple[str, ...] = parameter(
        "values",
        "names of parameters, the last parts of their paths, as in (wq, wv)",
        required=True,
        flag=Flag(
            "lora",
            "Low-rank adapters of these parameters, such as wq,wv; training freezes all others, "
            "serving has --max-loras of each.",
            "names",
            "",
            metavar="NAME,...",
            numerics=True,
        ),
    )
    rank: int = flagged(
        "lora_rank",
        "The rank of the adapters; in serving the largest, which all are filled up to.",
        "int",
        default=16,
        least=1,
        needs=("lora",),
        numerics=True,
    )
    alpha: int = parameter("int", "the adapters' results are times alpha / rank (0: times 1)")
    slots: int = flagged(
        "max_loras",
        "With --serve and --lora: adapters that ranks hold, of which each sequence uses one at "
        "random.",
        "int",
        doc="adapters that a server holds, of which a sequence uses one",
        default=1,
        least=1,
        needs=("lora",),
        rare=True,
    )

    def adapts(self, param: Value) -> bool:
        """Whether a parameter gets adapters."""
        return any(param.is_called(name) for name in self.targets)


class LoraOp(Statement):
    """Low-rank adapters (LoRA, arXiv 2106.09685): a product x W with a parameter of these names
    becomes x W + x A B, and all parameters but A and B are frozen.

    A has the contracted dimensions of W and the rank, B the rank and the other dimensions:
    rank * (in + out) parameters for each matrix.

    A server has `slots` adapters of each, filled up to `rank`, and multiplies each sequence by its
    own; one adapter alone can be added to the weights.
    """

    name, record = "stg.lora", LoraRule
    section = Section.PARTS
    example = "stg.lora[targets = (wq, wv), rank = 16]"
