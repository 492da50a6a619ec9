"""The interface of schedules, built in or of plug-ins.

Symbols in formulas: p ranks, m microbatches, v chunks per rank, rank r; F forward, B whole
backward, W gradient of the weights, F&B an overlapped pair, each for the share of a rank in the
model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, TypeAlias

from stagec.schedule.action import Action, Actions, Placement, round_robin
from stagec.schedule.costs import UNIT, Costs
from stagec.schedule.simulate import ScheduleEvents
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.limits import MAX_ACTIONS
from stagec.support.words import counted

Scope: TypeAlias = Literal["step", "span"]


@dataclass(frozen=True, slots=True)
class Formulas:
    """Closed forms as text: idle time of a rank, microbatches in flight on it, and their
    condition."""

    bubble: str
    in_flight: str
    condition: str = ""


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """Closed forms as numbers; None if no form is known for these sizes and costs.

    `bubble` is in the unit of the costs; `in_flight` is per rank, in microbatches: a stash of one
    of v chunks counts 1/v.
    """

    bubble: Fraction | None = None
    in_flight: tuple[Fraction, ...] | None = None


class Schedule(ABC):
    """A pipeline schedule: a pure function of (stages p, microbatches m, chunks v).

    A subclass has a name and defines `rank_actions`; other methods have defaults for one chunk per
    rank. `scope` defines the bubble: `step`, all idle time of a rank in the step, or `span`, only
    that between the first and last action of the rank. The latter is used for zero-bubble
    schedules, whose ranks continue with the next step without waiting for each other.
    `keeps_sent_gradients` is set where PyTorch holds the messages of a backward until those of the
    next one exist (`stg.stage_buffers[gradients = next]`).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str] = ""
    formulas: ClassVar[Formulas] = Formulas("", "")
    default_chunks: ClassVar[int] = 1
    splits_weight_gradient: ClassVar[bool] = False
    keeps_sent_gradients: ClassVar[bool] = False
    scope: ClassVar[Scope] = "step"

    @abstractmethod
    def rank_actions(
        self, rank: int, stages: int, microbatches: int, chunks: int
    ) -> Iterable[Action]:
        """The actions of one rank in order, for sizes that passed `check`."""

    def actions(self, stages: int, microbatches: int, chunks: int) -> Actions:
        """The actions of every rank in order. Raises `DiagnosticError` like `check`."""
        self.check(stages, microbatches, chunks)
        sizes = stages, microbatches, chunks
        return tuple(tuple(self.rank_actions(rank, *sizes)) for rank in range(stages))

    def placement(self, stages: int, chunks: int) -> Placement:
        """The rank and chunk of each virtual stage."""
        return round_robin(stages, chunks)

    def check(self, stages: int, microbatches: int, chunks: int) -> None:
        """Raise `DiagnosticError`, with the nearest valid choice, for sizes that the schedule does
        not support."""
        self.check_sizes(stages, microbatches, chunks)

    def closed_form(
        self, stages: int, microbatches: int, chunks: int, costs: Costs = UNIT
    ) -> ClosedForm:
        """The closed forms for a replay without transfer times."""
        return ClosedForm()

    def bubble(self, timeline: ScheduleEvents) -> Fraction:
        """The largest idle time of a rank, in the `scope` of the schedule."""
        idle = timeline.idle if self.scope == "step" else timeline.idle_in_span
        return max(idle(rank) for rank in range(timeline.ranks))

    def check_sizes(self, stages: int, microbatches: int, chunks: int) -> None:
        """Raise `DiagnosticError` for sizes below 1, for an unsupported number of chunks, and for
        too many actions."""
        for size, what in ((stages, "stages"), (microbatches, "microbatches"), (chunks, "chunks")):
            if size < 1:
                raise error(f"{self.name} with {size} {what}", remedy="give at least 1")
        self.check_chunks(chunks)
        self.check_actions(stages, microbatches, chunks)

    def check_actions(self, stages: int, microbatches: int, chunks: int) -> None:
        """Raise `DiagnosticError` for more than `MAX_ACTIONS` actions."""
        each = stages * chunks * (3 if self.splits_weight_gradient else 2)
        if each * microbatches > MAX_ACTIONS:
            fitting = MAX_ACTIONS // each
            raise error(
                f"{self.name} with {counted(stages, 'stage')}, {counted(chunks, 'chunk')} per rank "
                f"and {microbatches:,} microbatches has {each * microbatches:,} actions, expected "
                f"at most {MAX_ACTIONS:,}",
                remedy=f"give at most {fitting:,} microbatches, or fewer stages"
                if fitting
                else f"give fewer {'chunks' if chunks > stages else 'stages'}",
            )

    def check_chunks(self, chunks: int) -> None:
        """Raise `DiagnosticError` for another number of chunks than `default_chunks`."""
        if chunks != self.default_chunks:
            raise error(
                f"{self.name} has {counted(self.default_chunks, 'chunk')} per rank, found {chunks}",
                remedy=f"give {self.default_chunks}, or choose the schedule 'interleaved'",
            )

    def refuse(self, constraint: str, problem: str, remedy: str) -> DiagnosticError:
        """The error for sizes that violate a constraint."""
        return error(f"{self.name} needs {constraint}: {problem}", remedy=remedy)
