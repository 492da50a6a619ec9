"""An op that gathers its left operand itself while it computes."""

from stagec.api import Expr, OpDef, Operation, Plugin, Rule, Sizes, make_rule, product


class GatherProduct(OpDef):
    """A product that gathers `s`."""

    name = "my.gather_product"
    operands = ("x", "w")
    example = "%y = my.gather_product(%x, %w)"

    def rule(self, op: Operation) -> Rule:
        return make_rule("sd,df->sf", gathered="s")

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(n.values()) * 2


PLUGIN = Plugin(ops=(GatherProduct(),))
