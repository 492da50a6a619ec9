"""Seconds of computations on a machine, as traces state them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import fsum

from stagec.ir.module import Module
from stagec.machines import Machine
from stagec.program.kernels import Kernel
from stagec.program.nodes import Node
from stagec.time.costs.kernels import seconds_in_step
from stagec.time.costs.nodes import Measurements
from stagec.time.costs.software import Software
from stagec.time.measured.tables import NOT_FOUND


@dataclass(frozen=True)
class Durations:
    """The seconds for which a computation occupies a device, the gap before each launch included,
    as in `stagec time`. A computation that was merged of several takes the sum of their times.
    Measured times (`measured`) take precedence over the models of the machine with this `software`.

    Raises `DiagnosticError` for a product whose type the machine does not compute.
    """

    machine: Machine
    measured: Measurements | None = None
    software: Software = field(default_factory=Software)
    _known: dict[Kernel, float] = field(default_factory=dict[Kernel, float], repr=False)

    def of(self, module: Module) -> Durations:
        """The same, of a job with this module's strategy."""
        software = Software.of(module)
        return Durations(software.machine_of(self.machine), self.measured, software)

    def __call__(self, node: Node) -> float:
        return fsum(self.of_kernel(kernel) for kernel in node.kernels)

    def of_kernel(self, kernel: Kernel) -> float:
        """Seconds of one launch."""
        if kernel not in self._known:
            launch = self.software.on(self.machine).compute.launch.value
            self._known[kernel] = self._seconds(kernel) + launch
        return self._known[kernel]

    def _seconds(self, kernel: Kernel) -> float:
        if self.measured is not None:
            seconds, ways = self.measured.kernels.seconds([kernel])
            if ways[0] != NOT_FOUND:
                return float(seconds[0])
        return float(seconds_in_step(self.software.on(self.machine), [kernel])[0])
