"""Which share of their speed products and attention keep in a step."""

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, fraction
from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged, parameter

FAMILIES = ("ampere", "hopper", "blackwell", "tpu")


class SustainedRule(Record):
    """Which share of their speed products and attention keep in a step."""

    products: Expr | None = flagged(
        "sustained",
        "The share of their speed that products and attention sustain in a step, such as 9/10 "
        "(default: that of the machine).",
        "ratio",
        doc="the share on any device",
        least=0,
    )
    ampere: Expr | None = parameter("ratio", "the share on devices of this family")
    hopper: Expr | None = parameter("ratio", "the share on devices of this family")
    blackwell: Expr | None = parameter("ratio", "the share on devices of this family")
    tpu: Expr | None = parameter("ratio", "the share on devices of this family")

    experts: Expr | None = flagged(
        "sustained_experts",
        "The share of the speed of products that grouped products of experts sustain, such as 1/2 "
        "(default: all of it).",
        "ratio",
        doc="of that share, what grouped products of experts keep",
        least=0,
        needs=(EXPERTS,),
    )

    def on(self, family: str) -> float | None:
        """The share on a device of a family; None if it is not stated."""
        shares = {
            "ampere": self.ampere,
            "hopper": self.hopper,
            "blackwell": self.blackwell,
            "tpu": self.tpu,
        }
        share = self.products if self.products is not None else shares.get(family)
        return None if share is None else float(fraction(share))


class SustainedOp(Statement):
    """The share of their isolated speed that matrix products and attention sustain in a step.

    Kernels are timed for milliseconds on a cool device, with operands of a library's choice. The
    share that remains in training that runs for hours depends on the power limit of the device, and
    on the framework: versions of libraries, layouts and alignments of operands, tuned
    configurations. So a stack states it for families of devices (`family` in the text of a
    machine); a machine without a family keeps its own share, as do all without this statement.
    `experts` is a further factor for grouped products of several experts of a rank: their rows are
    ragged and padded, and they include sorting, routing and the time in which hosts wait for the
    number of rows. The product of a single expert counts as a plain one. If kernels of experts
    order rows themselves (`stg.fusion[experts]`), the factor applies only to 8-bit products.
    """

    name, record = "stg.sustained", SustainedRule
    section = Section.KERNELS
    rare, software = True, True
    example = "stg.sustained[hopper = 9/10]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        for name in ("products", *FAMILIES, "experts"):
            share = op.expr(name) if name in op.attrs else None
            if share is not None and (share.symbols or not 0 < fraction(share) <= 1):
                yield f"expects '{name}' to be more than 0 and at most 1, found {share}"
