"""The models of a server: the one that is served, and a draft model if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

from stagec.jobs.admission import Room, cache_room
from stagec.jobs.figures import CompiledJob
from stagec.jobs.lowered import LoweredJob
from stagec.jobs.part_steps import PartSteps
from stagec.jobs.pod_options import guests, models_alone, of_layers
from stagec.jobs.request.limit import Limit
from stagec.jobs.request.options import IDEAL, JobOptions
from stagec.jobs.session import Session
from stagec.jobs.step_modules import ServedSteps, StepModules
from stagec.machines import Machine
from stagec.serving.adapters import AdapterSlots
from stagec.serving.requests import Request
from stagec.serving.step import SequenceClass, Step, step_of
from stagec.serving.step_times import SECOND
from stagec.support.diagnostics import error

T = TypeVar("T")
AnyJob: TypeAlias = CompiledJob | LoweredJob


@dataclass(frozen=True)
class ServedModels:
    """The steps of the model that is served (the first one), and of its draft model, if there is
    one, which runs at the same time on ranks of its own, or `by_turns` on the same ranks. A draft
    model also computes the tokens of prompts, since it needs their caches."""

    every: Sequence[ServedSteps]
    by_turns: bool = False

    @classmethod
    def of(cls, options: JobOptions, session: Session) -> ServedModels:
        """The models of a server. Raises `DiagnosticError`."""
        plain = options.changed(serve=None, prompt=None, context=None)
        if of_layers(options):
            return cls([PartSteps(plain, session)])
        each = [StepModules(model, session) for model in models_alone(plain)]
        return cls(each, by_turns=bool(guests(options)))

    @property
    def main(self) -> ServedSteps:
        """The model that is served."""
        return self.every[0]

    @property
    def _pods(self) -> Sequence[Sequence[ServedSteps]]:
        """The models, grouped by the ranks that they run on."""
        return [self.every] if self.by_turns else [[each] for each in self.every]

    @property
    def ranks(self) -> int:
        """The number of ranks of all models."""
        return sum(pod[0].ranks for pod in self._pods)

    @property
    def replicas(self) -> int:
        """The number of replicas of the server, which do not communicate with each other. With a
        draft model on ranks of its own there is one. Raises `DiagnosticError`."""
        return len(self.main.replicas) if len(self._pods) == 1 else 1

    def together(self, of: Callable[[AnyJob], float], step: Step) -> float:
        """A figure of a step for all models: the sum if they run by turns, else the largest. Raises
        `DiagnosticError`."""
        return self.joined(self.each(of, step))

    def each(self, of: Callable[[AnyJob], T], step: Step) -> list[T]:
        """A figure of a step for each model. Raises `DiagnosticError`."""
        return [of(models.compiled(self._dealt(step, models))) for models in self.every]

    def joined(self, each: Iterable[float]) -> float:
        """The figure for all models, given those of each."""
        return sum(each) if self.by_turns else max(each)

    def room(self, machine: Machine, largest: Step, tokens: int, limit: Limit | None) -> Room:
        """The room for caches, in blocks of `tokens` tokens for each group of ranks of the model
        that is served; the least one if models have ranks of their own. Raises
        `DiagnosticError`."""
        rooms: list[Room] = []
        for models in self._pods:
            room = cache_room(models, machine, self._dealt(largest, models[0]), tokens, limit)
            blocks = room.blocks * models[0].groups // self.main.groups
            rooms.append(replace(room, blocks=blocks))
        return min(rooms, key=lambda each: each.blocks)

    def _dealt(self, step: Step, models: ServedSteps) -> Step:
        """A step of each group of `main`, divided over the groups of one of the models."""
        of, over = self.main.groups, models.groups
        if of == over:
            return step
        return step_of([replace(c, count=-(-c.count * of // over)) for c in step.classes])


def most_bytes(name: str) -> Callable[[AnyJob], float]:
    """A function from a job to the largest number of bytes in a category on any rank."""
    return lambda job: max(
        stage.get(name, 0) for pod in job.figures().each for stage in pod.by_stage
    )


def adapter_slots(
    options: JobOptions, requests: Sequence[Request], machine: Machine | None, session: Session
) -> Callable[[], AdapterSlots | None]:
    """Makes the slots for adapters of a replica; None if no request names one. A rank loads an
    adapter from its host in the time of the bytes by which a second slot increases the parameters,
    without a machine in none. Raises `DiagnosticError` if the model has no adapters."""
    named = next((r for r in requests if r.adapter), None)
    if named is None:
        return lambda: None
    if not options.lora:
        raise error(
            f"a request uses the adapter '{named.adapter:.40}', but the server has none",
            named.loc,
            remedy="add --lora wq,wk,wv,wo --max-loras 8",
        )
    load = 0
    if machine is not None:
        one, two = (
            ServedModels.of(options.changed(max_loras=slots, stack=IDEAL), session).together(
                most_bytes("parameters"), step_of([SequenceClass(1, 1, 1, 1)])
            )
            for slots in (1, 2)
        )
        load = max(1, round((two - one) / machine.host.bandwidth.value * SECOND))
    return partial(AdapterSlots, options.max_loras, load)
