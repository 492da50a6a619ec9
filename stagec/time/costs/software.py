"""What the software of a job says of its seconds: which share of their speed products keep in a
step, and how fast hosts issue (`stg.sustained`, `stg.hosts`), on whatever machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from stagec.ir.expr import fraction
from stagec.ir.module import Module
from stagec.ir_spec.strategy.hosts import HostsRule
from stagec.ir_spec.strategy.kernels import DEVICE, KernelsRule
from stagec.ir_spec.strategy.sustained import SustainedRule
from stagec.machines import Machine
from stagec.sharding.strategy import read_strategy


@dataclass(frozen=True)
class Software:
    """What statements of a strategy say of seconds, and nodes of a trace do not."""

    kernels: KernelsRule = field(default_factory=KernelsRule)
    hosts: HostsRule = field(default_factory=HostsRule)
    sustained: SustainedRule = field(default_factory=SustainedRule)

    @classmethod
    def of(cls, module: Module) -> Software:
        """That of a module's strategy."""
        strategy = read_strategy(module)
        one = strategy.one
        return cls(one(KernelsRule), one(HostsRule), one(SustainedRule))

    def on(self, machine: Machine) -> Machine:
        """The machine as this software runs on it: with what it sustains there, and its hosts."""
        share, issue = self.sustained.on(machine.family), self.hosts.seconds
        experts = self.sustained.experts
        values = {
            "efficiency.sustained.products": share,
            "efficiency.sustained.experts": None if experts is None else float(fraction(experts)),
            "efficiency.host.issue": issue,
        }
        changed = {path: value for path, value in values.items() if value is not None}
        return machine.changed(changed) if changed else machine

    @property
    def attention(self) -> str:
        """The kernel of attention, as a flag names it; empty where it is the machine's own."""
        name = self.kernels.attention
        return "" if name == DEVICE else name.replace("_", "-")
