"""What hosts spend on nodes. A host issues one node after the other and waits for others where its
device does, so its clock is that of devices with other costs.

    device   norm 0..10    gather 10..310    product 310..610    send 610
    host     norm 0..100   gather 100..100   product 100..200    send 200
"""

from __future__ import annotations

from typing import NamedTuple

from stagec.ir_spec.ops.optimizer import AccumulateGrad
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Node
from stagec.time.streams import Cost

#: The kind of nodes that add gradients up.
_SUM = AccumulateGrad.name.partition(".")[2]


class HostTimes(NamedTuple):
    """Picoseconds that a host spends on a computation, and on a collective of a group."""

    issue: int
    checks: tuple[tuple[GroupAxes, int], ...] = ()

    def cost(self, node: Node) -> Cost:
        """What a node costs its host."""
        if _is_issued(node):
            return Cost(0, self.issue)
        return Cost(next((time for axes, time in self.checks if axes == node.group), 0))


def _is_issued(node: Node) -> bool:
    """Whether a node counts. Optimizers launch few kernels, each for many parameters; sums of
    gradients are launched by the engine of backward itself, with no call of a module (PyTorch,
    torch/csrc/autograd/functions/accumulate_grad.cpp)."""
    return node.is_computation and node.phase != "optimizer" and node.kind != _SUM
