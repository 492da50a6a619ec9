"""Slots for low-rank adapters on the devices of a replica, which requests share.

As in vLLM, a request whose adapter is in no slot waits while all slots have adapters of running
requests, and others are admitted before it (v1/core/sched/scheduler.py, `max_loras`). Otherwise the
least recently used adapter is evicted (lora/model_manager.py, `LRUCacheLoRAModelManager`), and the
step that begins the request waits until its adapter has been loaded from the host.
"""

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class AdapterSlots:
    """The `slots` of a replica, each of which takes `load` femtoseconds to fill. `users` has the
    adapters in them, the most recently used one last, each with its number of running requests."""

    slots: int
    load: int
    users: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])

    def has_room(self, adapter: str) -> bool:
        """Whether a request with this adapter may begin; '' stands for no adapter."""
        placed = not adapter or adapter in self.users or len(self.users) < self.slots
        return placed or not all(self.users.values())

    def use(self, adapter: str) -> bool:
        """Begin a request with this adapter. Returns whether the adapter has to be loaded."""
        if not adapter:
            return False
        loads = adapter not in self.users
        if loads and len(self.users) == self.slots:
            del self.users[next(a for a, count in self.users.items() if not count)]
        self.users[adapter] = self.users.get(adapter, 0) + 1
        self.users.move_to_end(adapter)
        return loads

    def leave(self, adapter: str) -> None:
        """End a request with this adapter."""
        if adapter:
            self.users[adapter] -= 1
