"""Parameters, gradients and optimizer state, sharded over the axes of ZeRO."""

from fractions import Fraction

from stagec.ir.core import Value
from stagec.ir.expr import evaluate, total
from stagec.ir.module import Module
from stagec.ir.traits import Recasts, Repeats
from stagec.ir.types import TensorType, axis_size
from stagec.ir_spec.ops.rope import RelativeBias
from stagec.ir_spec.ops.selection import Slice
from stagec.ir_spec.strategy.shard_padding import ShardPaddingRule
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.shard import common_dimensions, shard_at_rest
from stagec.sharding.strategy import Strategy


class Sharder:
    """Shards parameters over the ZeRO axes, preferably along the dimension that most of them
    have."""

    def __init__(self, module: Module, strategy: Strategy, assumptions: Assumptions) -> None:
        self._module, self._strategy, self._assumptions = module, strategy, assumptions
        self._preferred = common_dimensions(p.tensor for p in module.parameters())
        self._counts = _repeat_counts(module)
        self._whole: list[Value] = []

    def shard(self, param: Value) -> TensorType:
        """The type of a parameter sharded at rest; unsharded if no dimension divides."""
        strategy, module = self._strategy, self._module
        axes = tuple(a for a in strategy.zero_axes if a not in param.tensor.axes)
        if not axes:
            return param.tensor
        preferred = [*self._read_in_part(param), *self._preferred]
        sharded, done = shard_at_rest(
            param.tensor, axes, preferred, self._assumptions.facts, module.env, self._counts
        )
        if not done:
            self._whole.append(param)
        for d in sharded.dims:
            if d.split:
                self._assumptions.divides(d.size, axis_size(d.axes), strategy.loc)
        return sharded

    def _read_in_part(self, param: Value) -> list[str]:
        """The dimensions of which users of a parameter take a part, as of a table of positions or
        of biases, if rows are sharded: a gather is then one of all of it, as FSDP2's."""
        if self._strategy.one(ShardPaddingRule).rule != "dim0":
            return []
        casts = [op.result for op, _ in param.uses if op.has(Recasts)]
        users = [op for value in (param, *casts) for op, _ in value.uses]
        cuts = [op for op in users if isinstance(op.definition, Slice | RelativeBias)]
        return [str(param.tensor.dims[op.integer("dim", 0)].size) for op in cuts]

    def check(self) -> None:
        """Report parameters that are not sharded.

        Raises `DiagnosticError` if they are more than 1% of all elements.
        """
        if not self._whole:
            return
        module, axes = self._module, ", ".join(self._strategy.zero_axes)
        names = ", ".join(f"%{p.name}" for p in self._whole)
        message = f"over {axes} no dimension of {names} divides: they stay whole"
        share = self._share_left_whole()
        if share > Fraction(1, 100) and self._preferred:  # scalars have no dimension to shard
            padded = self._strategy.one(ShardPaddingRule).rule == "dim0"
            fewer = "fewer shards (--dp-replicate)" if padded else "--shard-padding dim0"
            raise self._strategy.error(
                f"{message}, {float(share):.0%} of all parameters",
                remedy=f"choose a size of {axes} that divides {self._preferred[0]}, or --zero 0, "
                f"or {fewer}",
            )
        module.diagnostics.remark(message, self._strategy.loc)

    def _share_left_whole(self) -> Fraction:
        """The share of the elements of all parameters that is not sharded; 0 if sizes have no
        values."""
        env = self._module.env
        every = total(p.tensor.elements for p in self._module.parameters())
        if not every.symbols <= env.keys():
            return Fraction(0)
        left = sum(evaluate(p.tensor.elements, env) for p in self._whole)
        return Fraction(left, evaluate(every, env))


def _repeat_counts(module: Module) -> frozenset[str]:
    """Sizes along which repeats slice. They are never sharded, since an iteration needs a complete
    slice."""
    return frozenset(str(op.expr("count")) for op in module.walk() if op.has(Repeats))


class StatePlacement:
    """Placements of gradients and state, from that of the parameter and the ZeRO stage."""

    def __init__(self, module: Module, strategy: Strategy, by: str) -> None:
        """`by` is the name of the pass that needs them."""
        self._sharder = Sharder(module, strategy, Assumptions(module, by, strategy.loc))
        self._further = strategy.zero in (1, 2) and not strategy.gathers_first

    def gradient(self, param: Value) -> TensorType:
        """The placement of the reduced gradient of a parameter, and of its optimizer state."""
        return self._sharder.shard(param) if self._further else param.tensor
