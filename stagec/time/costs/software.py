"""What the software of a job says of its seconds: gaps between kernels, the time of hosts around a
step (`stg.hosts`), and who adds up over ranks (`stg.collectives`), on whatever machine."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.ir.module import Module
from stagec.ir.serving import DECODE
from stagec.ir_spec.strategy.collectives import CollectivesRule
from stagec.ir_spec.strategy.hosts import HostsRule
from stagec.machines import Machine
from stagec.sharding.strategy import read_strategy


@dataclass(frozen=True)
class Software:
    """What statements of a strategy say of seconds, and nodes of a trace do not. `serving` is the
    kind of a step of serving."""

    hosts: HostsRule = HostsRule()
    collectives: CollectivesRule = CollectivesRule()
    serving: str = ""

    @classmethod
    def of(cls, module: Module) -> Software:
        """That of a module's strategy."""
        strategy = read_strategy(module)
        hosts, collectives = strategy.one(HostsRule), strategy.one(CollectivesRule)
        return cls(hosts, collectives, module.serving)

    def on(self, machine: Machine) -> Machine:
        """The machine as this software runs on it: with its gaps between kernels of a graph, which
        engines capture of steps that decode."""
        gap = self.hosts.graph_gap_seconds
        if gap is None or self.serving != DECODE or not machine.compute.launch.value:
            return machine  # one that has no gaps has none in graphs
        return machine.changed({"compute.launch": gap})

    @property
    def step_seconds(self) -> float:
        """What a host takes between this step and the next, in which devices wait."""
        return self.hosts.step_seconds if self.serving else 0.0

    @property
    def request_seconds(self) -> float:
        """What a request takes outside of its steps."""
        return self.hosts.request_seconds if self.serving else 0.0
