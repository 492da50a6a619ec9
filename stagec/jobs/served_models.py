"""The models whose steps a server runs: the one that it serves, and a draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from stagec.ir.drafts import DRAFT
from stagec.ir_spec.strategy.part import MAIN
from stagec.jobs.admission import Room, cache_room
from stagec.jobs.figures import CompiledJob
from stagec.jobs.pod_options import guests, options_of
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.jobs.step_modules import StepModules
from stagec.serving.step import Step, step_of

if TYPE_CHECKING:
    from stagec.machines import Machine


@dataclass(frozen=True)
class ServedModels:
    """The steps of the model that is served, `main`, and of the one that makes drafts for it, if
    there is one: on ranks of its own, beside it, or by turns on the same ranks. Where prompts are
    computed it computes the same tokens, so that it has their caches."""

    main: StepModules
    draft: StepModules | None = None
    by_turns: bool = False

    @classmethod
    def of(cls, options: JobOptions, session: Session) -> ServedModels:
        """The models of a server. Raises `DiagnosticError`."""
        plain = options.changed(serve=None, prompt=None, context=None)
        if plain.draft is None:
            return cls(StepModules(plain, session))
        each = (options_of(pod, plain).changed(draft=None, keep="") for pod in (MAIN, DRAFT))
        main, draft = (StepModules(one, session) for one in each)
        return cls(main, draft, by_turns=bool(guests(options)))

    @property
    def _every(self) -> Sequence[StepModules]:
        return (self.main,) if self.draft is None else (self.main, self.draft)

    @property
    def _pods(self) -> Sequence[Sequence[StepModules]]:
        """The models by the ranks that they are on."""
        return [self._every] if self.by_turns else [[each] for each in self._every]

    @property
    def ranks(self) -> int:
        """All ranks."""
        meshes = [models[0].builder.module.mesh for models in self._pods]
        return sum(prod(n or 1 for n in m.sizes.values()) if m else 1 for m in meshes)

    @property
    def replicas(self) -> int:
        """How many replicas of the server there are, those whose ranks nothing joins: a draft model
        on ranks of its own joins all. Raises `DiagnosticError`."""
        return len(self.main.replicas) if len(self._pods) == 1 else 1

    def together(self, of: Callable[[CompiledJob], float], step: Step) -> float:
        """What a step takes of all models: their sum by turns, else the most that one of them
        takes. Raises `DiagnosticError`."""
        each = [of(models.compiled(self._dealt(step, models))) for models in self._every]
        return sum(each) if self.by_turns else max(each)

    def room(self, machine: Machine, largest: Step, tokens: int) -> Room:
        """The room for caches, in blocks of so many tokens of each group of ranks of the model that
        is served: of models on ranks of their own the least. Raises `DiagnosticError`."""
        rooms: list[Room] = []
        for models in self._pods:
            found = cache_room(models, machine, self._dealt(largest, models[0]), tokens)
            blocks = found.blocks * models[0].groups // self.main.groups
            rooms.append(replace(found, blocks=blocks))
        return min(rooms, key=lambda room: room.blocks)

    def _dealt(self, step: Step, models: StepModules) -> Step:
        """A step of a group of `main`, dealt to the groups of one of the models."""
        of, over = self.main.groups, models.groups
        if of == over:
            return step
        return step_of([replace(c, count=-(-c.count * of // over)) for c in step.classes])
