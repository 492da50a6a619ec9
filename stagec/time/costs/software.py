"""How the software of a job affects its times, on any machine: the share of their speed that
products sustain in a step (`stg.sustained`), how fast hosts issue, gaps between kernels and the
time of schedulers (`stg.hosts`), and which kernels run (`stg.kernels`, `stg.collectives`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from stagec.ir.expr import fraction
from stagec.ir.module import Module
from stagec.ir.serving_step import DECODE
from stagec.ir_spec.strategy.collectives import CollectivesRule
from stagec.ir_spec.strategy.hosts import BESIDE, CAPTURED, HostsRule
from stagec.ir_spec.strategy.kernels import DEVICE, KernelsRule
from stagec.ir_spec.strategy.machine import MachineRule
from stagec.ir_spec.strategy.moe import DEEPEP, MoeRule
from stagec.ir_spec.strategy.sustained import SustainedRule
from stagec.machines import Machine, load_machine
from stagec.sharding.strategy import read_strategy

#: The processors of a device that kernels of DeepEP take in prefill (deepseek-ai/DeepEP,
#: deep_ep/buffer.py: `num_sms = 20`). Two half batches leave these to them (SGLang,
#: srt/operations_strategy.py: `deep_gemm_num_sms`), those of low latency take none.
SENDING: Final = 20


@dataclass(frozen=True)
class Software:
    """The statements of a strategy that affect times but do not show in the nodes of a trace.
    `serving` is the kind of a serving step; empty for training. `machine` names the machine of the
    job, where it is not that of all jobs of a step."""

    kernels: KernelsRule = field(default_factory=KernelsRule)
    hosts: HostsRule = field(default_factory=HostsRule)
    sustained: SustainedRule = field(default_factory=SustainedRule)
    collectives: CollectivesRule = field(default_factory=CollectivesRule)
    moe: MoeRule = field(default_factory=MoeRule)
    serving: str = ""
    machine: str = ""

    @classmethod
    def of(cls, module: Module) -> Software:
        """The software that the strategy of a module states."""
        strategy = read_strategy(module)
        one = strategy.one
        return cls(
            *(one(KernelsRule), one(HostsRule), one(SustainedRule), one(CollectivesRule)),
            one(MoeRule),
            module.serving,
            one(MachineRule).name,
        )

    def machine_of(self, machine: Machine) -> Machine:
        """The machine of the job, if `machine` is that of a step. Raises `DiagnosticError`."""
        return load_machine(self.machine) if self.machine else machine

    def on(self, machine: Machine) -> Machine:
        """The machine with the constants that this software has there: sustained shares, times of
        hosts, kernels of attention that the engine has while it decodes and for an indexer, and
        gaps between the kernels of a CUDA graph, which engines capture of decode."""
        experts = self.sustained.experts
        decodes = self.serving == DECODE and machine.compute.launch.value  # else there are no gaps
        values = {
            "efficiency.sustained.products": self._products(machine),
            "efficiency.sustained.experts": None if experts is None else float(fraction(experts)),
            "efficiency.host.issue": self.hosts.issue_seconds,
            "compute.launch": self.hosts.graph_gap_seconds if decodes else None,
        }
        changed = {path: value for path, value in values.items() if value is not None}
        machine = machine.changed(changed) if changed else machine
        efficiency, rule = machine.efficiency, self.kernels
        named = {"decoding": rule.decoding, "indexer": rule.indexer}
        own = {use: name for use, name in named.items() if name in efficiency.attention.kernels}
        if not own:
            return machine
        attention = efficiency.attention.model_copy(update=own)
        efficiency = efficiency.model_copy(update={"attention": attention})
        return machine.model_copy(update={"efficiency": efficiency})

    def _products(self, machine: Machine) -> float | None:
        """The share of their speed that products and attention sustain; None for the machine's."""
        share = self.sustained.on(machine.family)
        if share is not None and self.sustained.products is None:
            share = min(share * machine.efficiency.sustained.power, 1)
        if not self.moe.two_batches or self.moe.dispatch != DEEPEP or self.serving == DECODE:
            return share
        others = max(1 - SENDING / machine.compute.processors.value, 0.5)
        return others * (machine.efficiency.sustained.products if share is None else share)

    @property
    def is_graph(self) -> bool:
        """Whether hosts launch a step as a whole."""
        if self.serving:
            return self.serving == DECODE or self.hosts.prompts == CAPTURED
        return self.hosts.graphs

    def attention_on(self, machine: Machine) -> str:
        """The kernel of attention, as a flag names it; empty where it is the machine's own."""
        name = self.kernels.attention
        chosen = machine.efficiency.attention.chosen(name)
        return "" if name == DEVICE else chosen.replace("_", "-")

    def waiting_seconds(self, step: float) -> float:
        """Seconds that devices wait for hosts behind a step of `step` seconds: for the scheduler of
        an engine, or for a trainer."""
        if not self.serving:
            return self.hosts.between_seconds
        least = step if self.hosts.scheduler == BESIDE else 0.0
        return max(self.hosts.step_seconds - least, 0.0)

    @property
    def request_seconds(self) -> float:
        """Seconds that a request takes outside of its steps."""
        return self.hosts.request_seconds if self.serving else 0.0
