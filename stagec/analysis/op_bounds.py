"""The bound of each op of a step: its FLOPs per byte, compared with those of the machine.

The roofline of S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52 (2009): an op whose
FLOPs per byte are below the ridge, peak over bandwidth, is bound by memory, else by compute.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stagec.analysis.count import lowered_graphs, weighted
from stagec.analysis.mean_loads import MeanLoads
from stagec.analysis.report import in_env
from stagec.ir.core import Operation
from stagec.ir.expr import ONE, ZERO, Env, Expr, expand, ratio
from stagec.ir.kernel import MEMORY
from stagec.ir.module import Module
from stagec.ir.types import index_name
from stagec.ir_spec.ops.trace import MessageOp
from stagec.machines import Machine
from stagec.program.classes import class_coordinates
from stagec.schedule.attached import stages_of
from stagec.time.costs.kernels import peak

COMMUNICATION, COMPUTE = "communication", "compute"


@dataclass(frozen=True, slots=True)
class OpBound:
    """An op on a rank of these stages, with the calls in a step, and the FLOPs and bytes of a call.
    `kernel` is a `Kernel.kind`, or `communication`, whose `bytes` are those of the full buffer;
    `dtype` is '' for ops that neither multiply matrices nor communicate."""

    op: str
    kind: str
    kernel: str
    dtype: str
    stages: tuple[int, ...]
    calls: Expr
    flops: Expr
    bytes: Expr

    def shown(self, show: Callable[[Expr], Any], machine: Machine | None) -> dict[str, Any]:
        """The object of `--json`, with FLOPs and bytes of all calls: numbers, or texts of
        expressions. `intensity` is FLOPs per byte, null for communication and for ops that move
        nothing. Without a machine `ridge` and `bound` are null, except `bound` of communication."""
        flops, size = (show(expand(self.calls * each)) for each in (self.flops, self.bytes))
        moves = self.kernel == COMMUNICATION
        intensity = None if moves else self._intensity(flops, size)
        ridge = None
        if machine is not None and self.dtype and not moves:
            ridge = peak(machine, self.dtype) / machine.memory.bandwidth.value
        bound = COMMUNICATION if moves else None
        if machine is not None and not moves:
            above = ridge is not None and isinstance(intensity, float) and intensity >= ridge
            bound = COMPUTE if above else MEMORY
        return {
            "op": self.op,
            "kind": self.kind,
            "kernel": self.kernel,
            "dtype": self.dtype,
            "stages": list(self.stages),
            "calls": show(expand(self.calls)),
            "flops": flops,
            "bytes": size,
            "intensity": intensity,
            "ridge": ridge,
            "bound": bound,
        }

    def _intensity(self, flops: Any, size: Any) -> float | str | None:
        if isinstance(flops, str):
            return str(ratio(self.flops, self.bytes)) if self.bytes != ZERO else None
        return flops / size if size else None


def op_bounds(
    module: Module, *, symbolic: bool = False, machine: Machine | None = None
) -> list[dict[str, Any]]:
    """The ops of a lowered step that take time, as `OpBound.shown`, in the order of the text. If
    expert loads differ between ranks, they are those of the first class. Raises `DiagnosticError`
    for an element type without a peak rate on the machine, and for an open size without
    `symbolic`."""
    rows: list[dict[str, Any]] = []
    for graph in lowered_graphs(module):
        means = MeanLoads(module, graph)
        ops = list(_ops(module, graph, means, symbolic=symbolic))
        coords = next(iter(class_coordinates(module, graph)))
        inner = {index_name(a): i for a, i in coords.items() if a != graph.text("over")}
        loads = means.values(coords)
        env: Env = {**module.env, **inner, **loads}
        rows += [op.shown(str if symbolic else in_env(env, module), machine) for op in ops]
    return rows


def _ops(
    module: Module, graph: Operation, means: MeanLoads, *, symbolic: bool
) -> Iterator[OpBound]:
    size = Operation.expr if symbolic else means.size
    stages = tuple(stages_of(graph) or (0,))
    for op, times in weighted(module, graph, graph.body, ONE):
        if op.name == "et.comp" and "bytes" in op.attrs:
            kernel, dtype = op.text("kernel", MEMORY), op.text("dtype", "")
            flops, moved = size(op, "flops"), size(op, "bytes")
            kind = "+".join(op.names("fuses")) or op.text("kind")
            yield OpBound(_name(op), kind, kernel, dtype, stages, times, flops, moved)
        elif op.name == "et.coll" or isinstance(op.definition, MessageOp):
            kind = op.text("kind") if op.name == "et.coll" else op.name.removeprefix("et.")
            dtype, moved = op.text("dtype"), size(op, "bytes")
            yield OpBound(_name(op), kind, COMMUNICATION, dtype, stages, times, ZERO, moved)


def _name(op: Operation) -> str:
    return op.results[0].name if op.results else ""
