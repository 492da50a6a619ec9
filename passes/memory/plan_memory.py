"""plan-memory: lifetimes of buffers and the bytes on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from stagec.api import Module, Pass, Phase
from stagec.memory.arena import state_arenas
from stagec.memory.offload import offload
from stagec.memory.plan import plan_memory
from stagec.sharding.strategy import read_strategy


@dataclass(frozen=True)
class PlanMemory(Pass):
    """Insert `stg.free` where buffers die, and a `stg.memory` that states the bytes of each
    category.

    First the copies of what the strategy offloads to host memory are made explicit.

    Before:
        %b = stg.gelu(%a) : bf16[B, F]
        %c = stg.gelu(%b) : bf16[B, F]
    After:
        %b = stg.gelu(%a) : bf16[B, F]
        %c = stg.gelu(%b) : bf16[B, F]
        stg.free(%b)
    """

    place: str = field(
        default="", metadata={"help": "state offsets: best-fit, or caching as PyTorch does it"}
    )

    name = "plan-memory"
    needs = Phase.PARTITIONED
    gives = Phase.PLANNED

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        offload(module, strategy.offload)
        plan_memory(module, strategy.prefetch)
        for func in module.functions if self.place else ():
            state_arenas(module, func, strategy.prefetch, self.place)
