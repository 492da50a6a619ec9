"""The exact times of the steps of a server on a machine; each distinct step is evaluated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from stagec.jobs.step_modules import StepModules
from stagec.serving.requests import SECOND
from stagec.serving.step import Step
from stagec.time.costs.replay_options import ReplayOptions

if TYPE_CHECKING:
    from stagec.machines import Machine
    from stagec.time.costs.nodes import Measurements


@dataclass
class StepTimes:
    """Nanoseconds of the steps of a job, which are captured as `graphs` or not. Engines compute the
    attention of all sequences that decode in one kernel, and that of all prompts in another one, so
    these are one class each (`Step.together`). On `depth` pipeline stages it is the time between
    the starts of two steps, if all stages take equally long."""

    modules: StepModules
    machine: Machine
    measured: Measurements | None
    depth: int
    graphs: bool = True
    _known: dict[Step, int] = field(default_factory=dict[Step, int])

    def __call__(self, step: Step) -> int:
        """The nanoseconds of a step. Raises `DiagnosticError`."""
        step = step.together()
        picoseconds = self._known.get(step)
        if picoseconds is None:
            job = self.modules.compiled(step)
            replay = ReplayOptions(graphs=self.graphs, measured=self.measured)
            seconds = job.time(self.machine, replay)
            picoseconds = max(1, ceil(seconds.step_seconds * SECOND / self.depth))
            self._known[step] = picoseconds
        return picoseconds

    def __len__(self) -> int:
        """The number of distinct steps."""
        return len(self._known)
