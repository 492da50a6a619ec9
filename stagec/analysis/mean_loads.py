"""Expert loads for counts: the mean over the layers that run an op, which suffices since its costs
are linear in the load.

A graph is counted once for all ranks: loads are named by their layers, and each rank class assigns
values to these names.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, evaluate, substitute, symbol
from stagec.ir.loads import Loads
from stagec.ir.module import Module
from stagec.ir.recompute_window import is_partial, replays
from stagec.schedule.attached import stages_of

#: A load, the enclosing repeat, and whether only the recomputed layers count.
_Name = tuple[str, Operation | None, bool]


class MeanLoads:
    """The loads of the ranks that run a graph."""

    def __init__(self, module: Module, graph: Operation) -> None:
        self._loads, self._env = Loads(module), module.env
        self._stages, self._over = stages_of(graph), graph.text("over")
        self._names: dict[_Name, str] = {}

    def size(self, op: Operation, name: str) -> Expr:
        """An attribute of an op, with loads named by the layers of the op."""
        size, around = op.expr(name), op.parent_op
        if not (used := size.symbols & self._loads.symbols):
            return size
        again = op.phase == "recompute" and is_partial(around)
        return substitute(size, {s: symbol(self._named((s, around, again))) for s in used})

    def _named(self, name: _Name) -> str:
        return self._names.setdefault(name, f"{name[0]}_{len(self._names)}")

    def values(self, coords: Mapping[str, int]) -> dict[str, Fraction]:
        """The values of these names on the ranks at these coordinates."""
        slot = self._stages.index(coords[self._over]) if self._stages else 0
        means: dict[str, Fraction] = {}
        for (load, around, again), name in self._names.items():
            layers = self._layers(around, slot, again=again)
            loads = (self._loads.at(coords, n)[load] for n in layers)
            means[name] = sum(loads, Fraction(0)) / max(1, len(layers))
        return means

    def _layers(self, around: Operation | None, slot: int, *, again: bool) -> Sequence[int]:
        """The numbers of the layers that a repeat runs on a stage; any layer if the repeat has no
        loads of its own."""
        if around is None or "first" not in around.attrs:
            return range(1)
        first, count = around.exprs("first")[slot], around.expr("count")
        start = evaluate(first, self._env)
        layers = range(start, evaluate(first + count, self._env))
        return [n for n in layers if replays(around, n - start)] if again else layers
