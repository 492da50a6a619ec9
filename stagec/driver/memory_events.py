"""`compile --memory-events`: keeps the memory plan of a compilation, for its traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagec.ir.module import Module
from stagec.pipeline.instrument import Hooks
from stagec.pipeline.passes import Pass
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.analysis.memory_events import Plans
    from stagec.trace.emit import Annotate

_PLAN = "plan-memory"


class KeepPlans(Hooks):
    """Takes the plans of the functions before they are lowered."""

    def __init__(self) -> None:
        self._plans: Plans | None = None

    def after_pass(self, pass_: Pass, module: Module) -> None:
        """Right after the planner."""
        from stagec.analysis.memory_events import Plans

        if pass_.name == _PLAN:
            self._plans = Plans(module)

    @property
    def annotate(self) -> Annotate:
        """What adds the events to a program. Raises `DiagnosticError` if nothing was planned."""
        if self._plans is None:
            raise error(
                f"--memory-events needs the pass '{_PLAN}', which was not run",
                remedy=f"put {_PLAN} before lower-to-trace in --pipeline",
            )
        return self._plans.annotate
