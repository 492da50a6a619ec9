"""What the software of a job says of its seconds: gaps between kernels and the time of hosts around
a step (`stg.hosts`), who adds up over ranks (`stg.collectives`), and which share of their speed
products keep in a step (`stg.sustained`), on whatever machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from stagec.ir.module import Module
from stagec.ir.serving import DECODE
from stagec.ir_spec.strategy.collectives import CollectivesRule
from stagec.ir_spec.strategy.hosts import HostsRule
from stagec.ir_spec.strategy.sustained import SustainedRule
from stagec.machines import Machine
from stagec.sharding.strategy import read_strategy


@dataclass(frozen=True)
class Software:
    """What statements of a strategy say of seconds, and nodes of a trace do not. `serving` is the
    kind of a step of serving."""

    hosts: HostsRule = field(default_factory=HostsRule)
    collectives: CollectivesRule = field(default_factory=CollectivesRule)
    sustained: SustainedRule = field(default_factory=SustainedRule)
    serving: str = ""

    @classmethod
    def of(cls, module: Module) -> Software:
        """That of a module's strategy."""
        strategy = read_strategy(module)
        return cls(
            strategy.one(HostsRule),
            strategy.one(CollectivesRule),
            strategy.one(SustainedRule),
            module.serving,
        )

    def on(self, machine: Machine) -> Machine:
        """The machine as this software runs on it: with what it sustains there, and with its gaps
        between kernels of a graph, which engines capture of steps that decode."""
        graph = self.serving == DECODE and machine.compute.launch.value  # else there are no gaps
        values = {
            "efficiency.sustained.products": self.sustained.on(machine.family),
            "compute.launch": self.hosts.graph_gap_seconds if graph else None,
        }
        changed = {path: value for path, value in values.items() if value is not None}
        return machine.changed(changed) if changed else machine

    @property
    def step_seconds(self) -> float:
        """What a host takes between this step and the next, in which devices wait."""
        return self.hosts.step_seconds if self.serving else 0.0

    @property
    def request_seconds(self) -> float:
        """What a request takes outside of its steps."""
        return self.hosts.request_seconds if self.serving else 0.0
