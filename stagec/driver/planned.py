"""A look at the memory plan of a compilation, whose later passes lower it away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from stagec.ir.module import Module
from stagec.pipeline.instrument import Hooks
from stagec.pipeline.passes import Pass
from stagec.support.diagnostics import error

PLAN = "plan-memory"
Found = TypeVar("Found")


class Planned(Hooks, Generic[Found]):
    """Calls `look` right after the planner, and keeps what it finds; None if nothing was
    planned."""

    def __init__(self, look: Callable[[Module], Found]) -> None:
        self._look = look
        self.found: Found | None = None

    def after_pass(self, pass_: Pass, module: Module) -> None:
        """Right after the planner."""
        if pass_.name == PLAN:
            self.found = self._look(module)

    def needed(self, option: str) -> Found:
        """What was found. Raises `DiagnosticError` if nothing was planned."""
        if self.found is None:
            raise error(
                f"{option} needs the pass '{PLAN}', which was not run",
                remedy=f"put {PLAN} before lower-to-trace in --pipeline",
            )
        return self.found
