"""Low-rank adapters on the devices of a replica: slots, which requests share.

As in vLLM: a request whose adapter is in no slot waits while all slots have adapters of requests
that run, and others are let in before it (v1/core/sched/scheduler.py, `max_loras`); else the
adapter that was used longest ago gives way (lora/model_manager.py, `LRUCacheLoRAModelManager`), and
the step that begins the request waits until its own has come from the host.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class AdapterSlots:
    """So many `slots`, each of which takes `load` femtoseconds to fill. `kept` are the adapters in
    them, the one used last at the end, each with the number of requests that run with it."""

    slots: int
    load: int
    kept: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])

    def has_room(self, adapter: str) -> bool:
        """Whether a request with this adapter may begin; '' stands for no adapter."""
        known = not adapter or adapter in self.kept or len(self.kept) < self.slots
        return known or not all(self.kept.values())

    def use(self, adapter: str) -> bool:
        """A request begins; whether its adapter is loaded for it."""
        if not adapter:
            return False
        loads = adapter not in self.kept
        if loads and len(self.kept) == self.slots:
            del self.kept[next(a for a, users in self.kept.items() if not users)]
        self.kept[adapter] = self.kept.get(adapter, 0) + 1
        self.kept.move_to_end(adapter)
        return loads

    def leave(self, adapter: str) -> None:
        """A request with this adapter runs no more."""
        if adapter:
            self.kept[adapter] -= 1
