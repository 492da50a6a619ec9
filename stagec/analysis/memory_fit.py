"""Whether a job runs on a machine at all: what a rank holds at its peak, and what there is for
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagec.machines import Machine


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Bytes that the rank with the highest peak holds then, and those that a job may use of a
    device: its capacity, less what the driver, the context and the communicators hold."""

    peak: int
    room: int

    @property
    def by(self) -> int:
        """Bytes that are left; below zero, that are missing."""
        return self.room - self.peak

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.by >= 0

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        return {"peak": self.peak, "room": self.room, "fits": self.fits, "by": self.by}


def memory_fit(machine: Machine, mesh: Mapping[str, int], peak: int) -> MemoryFit:
    """Of a job on this mesh, which has a communicator for each axis."""
    return MemoryFit(peak, room_of(machine, mesh))


def room_of(machine: Machine, mesh: Mapping[str, int]) -> int:
    """Bytes of a device that a job on this mesh may use."""
    return machine.left(sum(size > 1 for size in mesh.values()))
