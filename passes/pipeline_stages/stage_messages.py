"""Messages between pipeline stages, complete or in parts.

With `scatter` axes, ranks with the same value send one part each, and the receivers gather the
parts (scatter-gather of Megatron-LM):

    %p = stg.all_slice[dim = 1, over = tp](%y) : bf16[B, S@tp, D]              // the sender
    stg.send[over = pp, by = 1](%p)

    %q = stg.recv[over = pp, by = 1] : bf16[B, S@tp, D]                    // the receiver
    %x = stg.all_gather[dim = 1, over = tp](%q) : bf16[B, S, D]
"""

from collections.abc import Mapping
from dataclasses import replace

from stagec.api import AxisUse, Builder, Module, TensorType, Value, axis_size, evaluate
from stagec.ir.builder import RawAttr
from stagec.ir.expr import numerator_and_denominator
from stagec.ir.facts import divisible
from stagec.ir_spec.strategy.pipeline import PipelineRule
from stagec.sharding.assumptions import Assumptions

#: The dimension that is split for a message, and the axes over which it is split.
_Cut = tuple[int, tuple[str, ...]]


class StageMessages:
    """Inserts the ends of messages."""

    def __init__(self, module: Module, rule: PipelineRule) -> None:
        self._module, self._rule = module, rule
        self._assumptions = Assumptions(module, "split-stages", rule.loc)
        self._cuts: dict[TensorType, _Cut | None] = {}

    def send(self, b: Builder, value: Value, attrs: Mapping[str, RawAttr]) -> None:
        """Send a value, or the part of this rank."""
        cut = self._cut(value.tensor)
        if cut is not None:
            value = b.value("stg.all_slice", [value], _moved(cut), hint=f"{value.name}_s")
        b.op("stg.send", [value], attrs, types=())

    def receive(
        self, b: Builder, type_: TensorType, attrs: Mapping[str, RawAttr], name: str
    ) -> Value:
        """Receive a value of this type, or receive a part and gather the others."""
        cut = self._cut(type_)
        if cut is None:
            return b.value("stg.recv", (), attrs, type=type_, hint=name)
        d, over = cut
        dim = type_.dims[d]
        split = replace(dim, split=(*dim.split, *(AxisUse(a) for a in over)))
        sent = replace(type_.with_dim(d, split), placed=True)
        got = b.value("stg.recv", (), attrs, type=sent, hint=f"{name}_s")
        return b.value("stg.all_gather", [got], _moved(cut), hint=name)

    def _cut(self, type_: TensorType) -> _Cut | None:
        """How a value is split; None if the axes split it already."""
        over = tuple(a for a in self._rule.scatter if a not in type_.axes)
        if not over:
            return None
        if type_ not in self._cuts:
            self._cuts[type_] = self._dividing(type_, over), over
        return self._cuts[type_]

    def _dividing(self, type_: TensorType, over: tuple[str, ...]) -> int:
        """The first dimension that divides over the axes; adds this to the assumptions."""
        env, ranks = self._module.env, axis_size(over)
        for d, dim in enumerate(type_.dims):
            above, below = numerator_and_denominator(dim.local)
            relation = divisible(above, below * ranks)
            known = relation.symbols <= env.keys()
            if dim.load is None and (
                relation.holds(env) if known else self._assumptions.facts.divides(ranks, dim.local)
            ):
                self._assumptions.divides(dim.local, ranks, self._rule.loc)
                return d
        count = f" = {evaluate(ranks, env)}" if ranks.symbols <= env.keys() else ""
        raise self._rule.error(
            f"no dimension of {type_} divides over {', '.join(over)}{count}, expected one that "
            "ranks can send in parts",
            remedy="send whole values: leave out 'scatter' (--scatter-gather)",
        )


def _moved(cut: _Cut) -> dict[str, RawAttr]:
    d, over = cut
    return {"dim": (d,), "over": over}
