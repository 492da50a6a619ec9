"""Recompute policies as attributes of repeats, for differentiation."""

from stagec.ir.core import Attr, Operation
from stagec.ir.expr import const
from stagec.ir_spec.strategy.recompute import RecomputeRule


def recompute_attrs(what: RecomputeRule) -> dict[str, Attr]:
    """The attributes of a `stg.repeat` for a policy; empty if nothing is recomputed."""
    if what.policy == "none" and not what.ops:
        return {}
    attrs: dict[str, Attr] = {
        "recompute": "" if what.ops else what.policy,
        "recompute_ops": what.ops,
        "recompute_keep": what.keep,
        "recompute_products": const(what.products),
        "recompute_modules": what.modules,
        "recompute_first": const(what.layers),
        "recompute_every": const(what.every),
    }
    return {name: value for name, value in attrs.items() if value not in ("", (), const(0))}


def take_recompute(op: Operation) -> RecomputeRule:
    """The policy of a `stg.repeat`, whose attributes are removed: the inverse of
    `recompute_attrs`."""
    rule = RecomputeRule(
        policy=op.text("recompute", "none"),
        ops=op.names("recompute_ops"),
        keep=op.names("recompute_keep"),
        products=op.integer("recompute_products", 0),
        modules=op.names("recompute_modules"),
        layers=op.integer("recompute_first", 0),
        every=op.integer("recompute_every", 0),
        loc=op.loc,
    )
    for name in [name for name in op.attrs if name.startswith("recompute")]:
        del op.attrs[name]
    return rule
