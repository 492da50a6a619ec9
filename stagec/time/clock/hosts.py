"""The time that hosts spend on nodes. A host issues one node after the other and waits for other
ranks where its device does, so the clock of devices serves for hosts, with other costs.

    device   norm 0..10    gather 10..310    product 310..610    send 610
    host     norm 0..100   gather 100..100   product 100..200    send 200

A host that waits for its device at both ends of forward and backward does not run ahead into the
next phase. The time by which it exceeds its device becomes gaps before kernels (`delay_kernels`).

    device   forward: busy 500, host 800     backward: busy 1000, host 900
    step     800 + 1000, where a host that runs ahead would end at max(1500, 1700)

If a host waits for each kernel, all its time becomes gaps: 1300 + 1900.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from stagec.ir.types import DTYPE_BYTES
from stagec.ir_spec.ops.optimizer import AccumulateGrad
from stagec.ir_spec.strategy.hosts import KERNELS, NEVER, PHASES
from stagec.program.groups import GroupAxes
from stagec.program.kernels import Kernel
from stagec.program.nodes import Node
from stagec.time.clock.graph import StepGraph
from stagec.time.clock.times import NodeCosts
from stagec.time.costs.eager import launches_of
from stagec.time.streams import Cost

#: The kind of nodes that add gradients up.
_SUM = AccumulateGrad.name.partition(".")[2]
#: The phases of forward and of backward, at whose ends hosts may wait.
_ACTIONS: Final = (("forward",), ("backward", "recompute", "gradient"))


class HostTimes(NamedTuple):
    """Picoseconds that a host spends on nodes: `issue` on a computation, `checks` on a collective
    of each group; `backward` on a computation of backward and `product` on a product in `bits` or
    less, where these differ. `waits` says whether the host waits for its device, at both ends of
    forward and backward or behind each kernel; before a forward it then spends `microbatch`, while
    the device is idle."""

    issue: int
    checks: tuple[tuple[GroupAxes, int], ...] = ()
    backward: int | None = None
    waits: str = NEVER
    microbatch: int = 0
    product: int | None = None
    bits: int = 8

    def cost(self, node: Node) -> Cost:
        """The time that the host spends on a node."""
        if _is_issued(node):
            if self.product is not None and any(map(self._is_narrow, node.kernels)):
                return Cost(0, self.product)
            count = 1 if node.kernel is None else launches_of(node.kernel.form)
            if self.backward is None or node.phase in ("forward", "recompute"):
                return Cost(0, count * self.issue)
            return Cost(0, count * self.backward)
        return Cost(next((time for axes, time in self.checks if axes == node.group), 0))

    def _is_narrow(self, kernel: Kernel) -> bool:
        """Whether a kernel is a single product, not a batch of them, in `bits` or less."""
        one = kernel.kind == "matmul" and kernel.extents[0] == 1
        return one and 8 * DTYPE_BYTES[kernel.dtype] <= self.bits


def delay_kernels(graph: StepGraph, costs: NodeCosts, spent: Sequence[HostTimes]) -> NodeCosts:
    """The costs of devices whose hosts wait; `spent` has the times of the host of each class.

    Where a host waits at both ends of a phase, the time by which it exceeds its device there is
    divided over gaps before the computations of the phase. Where it waits for each kernel, all that
    it spends on a computation is a gap before it.
    """
    launch = costs.launch.copy()
    for nodes, times in zip(graph.classes, spent, strict=True):
        if times.waits == NEVER:
            continue
        placed = nodes.prototypes
        own = slice(nodes.shift, nodes.shift + len(placed))
        runs = np.bincount(nodes.prototype, minlength=len(placed))
        busy = np.where([p.computes for p in placed], costs.spans[own], 0)
        hosts = (times.cost(p.node) for p in placed)
        spends = np.array([cost.time + cost.launch for cost in hosts])
        issued = np.array([_is_issued(p.node) for p in placed])
        if times.waits == KERNELS:
            launch[own] += np.where(issued, spends, 0)
        for phases in _ACTIONS:
            of_it = np.array([p.node.phase in phases for p in placed])
            count = int(runs[of_it & issued].sum())
            late = int((runs * (spends - busy))[of_it].sum())
            if count and late > 0 and times.waits == PHASES:
                launch[own][of_it & issued] += late // count
            if phases == _ACTIONS[0] and count:
                first = placed[int(np.argmax(of_it & issued))].node
                alike = [(p.node.op, p.node.layer) == (first.op, first.layer) for p in placed]
                launch[own][alike] += times.microbatch
    return costs._replace(launch=launch)


def _is_issued(node: Node) -> bool:
    """Whether a host spends `issue` on a node. Optimizers launch few kernels, each for many
    parameters; sums of gradients are launched by the autograd engine itself, with no call of a
    module (PyTorch, torch/csrc/autograd/functions/accumulate_grad.cpp)."""
    return node.is_computation and node.phase != "optimizer" and node.kind != _SUM
