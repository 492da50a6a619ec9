"""Observes a module in the middle of a compilation, such as its memory plan, which later passes
lower away."""

from collections.abc import Callable
from typing import Generic, TypeVar

from stagec.ir.module import Module
from stagec.pipeline.instrument import BUFFERS, PLAN, STATED, Hooks
from stagec.pipeline.passes import Pass
from stagec.support.diagnostics import error

Result = TypeVar("Result")


class Planned(Hooks, Generic[Result]):
    """Calls `look` after a pass, by default the planner, and keeps its result; of several passes
    that run, after each, so that the last result stays. None if none of them ran."""

    def __init__(self, look: Callable[[Module], Result], *after: str) -> None:
        self._look, self._after = look, after or (PLAN,)
        self.result: Result | None = None

    def after_pass(self, pass_: Pass, module: Module) -> None:
        """Look at the module if this is one of the passes."""
        if pass_.name in self._after:
            self.result = self._look(module)

    def needed(self, option: str) -> Result:
        """The result. Raises `DiagnosticError`, for an option that needs it, if the pass did not
        run."""
        if self.result is None:
            raise error(
                f"{option} needs the pass '{self._after[0]}', which is not in the pipeline",
                remedy=f"put '{self._after[0]}' before 'lower-to-trace' in --pipeline",
            )
        return self.result


class Looks:
    """The observations of a module while it is compiled: the FLOPs and tokens that its text states,
    the peak of its memory in bytes (`peak`, or `early_peak` before there is a plan), the moments of
    the peak (`worst`), its plans as rows of counts (`moments`), and its memory over time
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
        """The instruments for the observations that are asked for, by name."""
        return [getattr(self, name) for name, wanted in asked.items() if wanted]
