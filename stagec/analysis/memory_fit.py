"""Whether the memory of a job fits a machine: the peak of a rank, and the room on a device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagec.machines import Machine


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """The bytes of the fullest rank at its peak, and the bytes of a device that a job may use: its
    capacity without those of the driver, the context and the communicators."""

    peak: int
    room: int

    @property
    def by(self) -> int:
        """The bytes that are left; negative if bytes are missing."""
        return self.room - self.peak

    @property
    def fits(self) -> bool:
        """Whether the peak fits."""
        return self.by >= 0

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        return {"peak": self.peak, "room": self.room, "fits": self.fits, "by": self.by}


def memory_fit(machine: Machine, mesh: Mapping[str, int], peak: int) -> MemoryFit:
    """The fit of a job on this mesh, which has a communicator for each axis."""
    return MemoryFit(peak, room_of(machine, mesh))


def room_of(machine: Machine, mesh: Mapping[str, int]) -> int:
    """The bytes of a device that a job on this mesh may use."""
    return machine.left(sum(size > 1 for size in mesh.values()))
