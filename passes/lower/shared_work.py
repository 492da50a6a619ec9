"""Nodes of a mixed step that have the tokens of several groups of ranks."""

from dataclasses import dataclass

from stagec.api import Module, Operation, TensorType, read_strategy
from stagec.ir.serving_step import MIXED
from stagec.ir_spec.ops.comm import AllToAll
from stagec.passes.lower.beside_gathers import came_from


@dataclass(frozen=True)
class SharedWork:
    """Marks nodes that are lowered from ops with the tokens of several groups, over whose axes
    `over` the dimension `batch` is split elsewhere: experts of routed tokens, and what gathers
    tokens. An all_to_all has no mark, because the group with most tokens sends all of them."""

    batch: str
    over: frozenset[str]

    @classmethod
    def of(cls, module: Module) -> "SharedWork":
        """The marks of a module, of which only a mixed step has any."""
        strategy = read_strategy(module)
        over = strategy.axes_of(strategy.batch) if module.serving == MIXED else ()
        return cls(strategy.batch, frozenset(over))

    def finish(self, origin: Operation, made: Operation) -> None:
        """Note the operation from which a node is lowered, and mark the node."""
        came_from(origin, made)
        marks = "shared" in made.definition.params_by_name
        if marks and not isinstance(origin.definition, AllToAll) and self._is_shared(origin):
            made.attrs["shared"] = True

    def _is_shared(self, op: Operation) -> bool:
        types = (v.type for v in (*op.operands, *op.results) if isinstance(v.type, TensorType))
        dims = (dim for each in types for dim in each.dims if self.batch in dim.size.symbols)
        return any(self.over - {*dim.axes} for dim in dims)
