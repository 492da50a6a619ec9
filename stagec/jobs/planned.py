"""A look at a module in the middle of a compilation, such as its memory plan: later passes lower it
away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from stagec.ir.module import Module
from stagec.pipeline.instrument import BUFFERS, PLAN, STATED, Hooks
from stagec.pipeline.passes import Pass
from stagec.support.diagnostics import error

Result = TypeVar("Result")


class Planned(Hooks, Generic[Result]):
    """Calls `look` right after a pass, the planner by default, or the last of several that run, and
    keeps what it finds; None if none was run."""

    def __init__(self, look: Callable[[Module], Result], *after: str) -> None:
        self._look, self._after = look, after or (PLAN,)
        self.result: Result | None = None

    def after_pass(self, pass_: Pass, module: Module) -> None:
        """Right after that pass."""
        if pass_.name in self._after:
            self.result = self._look(module)

    def needed(self, option: str) -> Result:
        """What was found. Raises `DiagnosticError` if the pass was not run."""
        if self.result is None:
            raise error(
                f"{option} needs the pass '{self._after[0]}', which is not in the pipeline",
                remedy=f"put '{self._after[0]}' before 'lower-to-trace' in --pipeline",
            )
        return self.result


class Looks:
    """What may be looked at while a module is compiled: FLOPs and tokens that its text states, the
    peak of its memory in bytes and its worst moments, planned or before there is a plan
    (`early_peak`), its plans as rows of counts (`moments`), and its memory over time
    (`events`)."""

    def __init__(self) -> None:
        from stagec.analysis.footprint import peak_bytes, worst_moments
        from stagec.analysis.memory_events import EventPlans
        from stagec.analysis.memory_moments import MemoryMoments
        from stagec.analysis.model_flops import model_flops, step_tokens

        self.flops, self.tokens = Planned(model_flops, *STATED), Planned(step_tokens, *STATED)
        self.peak, self.early_peak = Planned(peak_bytes), Planned(peak_bytes, BUFFERS)
        self.worst, self.events = Planned(worst_moments), Planned(EventPlans)
        self.moments = Planned(MemoryMoments)

    def watching(self, **asked: bool) -> list[Hooks]:
        """The instruments that look at what is asked for, by name."""
        return [getattr(self, name) for name, wanted in asked.items() if wanted]
