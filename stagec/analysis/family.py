"""A job in many sizes: compiled once for all that decide alike, evaluated for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stagec.analysis.figures import FigureFormulas, Figures, MemoryMoments
from stagec.ir.decisions import Decisions
from stagec.ir.expr import UnboundError
from stagec.ir.module import Module
from stagec.ir.opdef import Registry
from stagec.pipeline.instrument import Hooks, Instrument, Verification
from stagec.pipeline.manager import PassManager
from stagec.pipeline.passes import Pass
from stagec.pipeline.spec import Pipeline
from stagec.support.diagnostics import Diagnostic, error
from stagec.support.source import Source
from stagec.text.build import parse_module

PLAN = "plan-memory"


class _Watch(Hooks):
    """Watches what passes read, and looks at the plan of memory before it is lowered away."""

    def __init__(self) -> None:
        self.decisions = Decisions()
        self.plans: MemoryMoments | None = None

    def before_pass(self, pass_: Pass, module: Module) -> None:
        module.decisions = self.decisions

    def after_pass(self, pass_: Pass, module: Module) -> None:
        module.decisions = None
        if pass_.name == PLAN:
            self.plans = MemoryMoments(module, self.decisions)


class Family:
    """One job in many sizes and degrees.

    `read` gives the module for values of its symbols and axes, before any pass; it may give them
    only to declarations (`stg.symbols`, `stg.mesh`). `pipeline` ends with a lowered module. What a
    compile looked at is noted: values with which all would have been seen alike are put into what
    was compiled already, for others it is compiled again. So figures are those of a compile of
    their own, whatever the values.
    """

    def __init__(
        self,
        read: Callable[[Mapping[str, int]], Module],
        pipeline: Pipeline,
        around: Sequence[Instrument] = (),
    ) -> None:
        self._read, self._pipeline, self._around = read, pipeline, around
        self._compiled: list[Compiled] = []

    @classmethod
    def of_text(cls, source: Source, registry: Registry, pipeline: Pipeline) -> Family:
        """The family of a text: a module with its mesh and strategy, whose symbols and axes may
        have values or be open."""

        def read(values: Mapping[str, int]) -> Module:
            module = parse_module(source, registry)
            module.set_values(values)
            return module

        return cls(read, pipeline)

    def at(self, values: Mapping[str, int]) -> Figures:
        """The figures for these values of all symbols and axes. Raises `DiagnosticError`."""
        return self.compiled(values).at(values)

    def compiled(self, values: Mapping[str, int], module: Module | None = None) -> Compiled:
        """What was compiled for these values; `module` is what would be read for them, if it has
        been read already. Raises `DiagnosticError`."""
        found = next((c for c in self._compiled if c.decisions.same(values)), None)
        if found is None:
            found = Compiled(module or self._read(values), self._pipeline, self._around)
        else:
            self._compiled.remove(found)
        self._compiled.insert(0, found)  # the next job is likely to be like this one
        return found

    def __len__(self) -> int:
        """How often it has been compiled."""
        return len(self._compiled)


class Compiled:
    """One compile of a family: what it decided, and its figures as expressions."""

    def __init__(
        self, module: Module, pipeline: Pipeline, around: Sequence[Instrument] = ()
    ) -> None:
        watch = _Watch()
        PassManager(pipeline, [watch, Verification(), *around], verify=False).run(module)
        if watch.plans is None:
            raise error(
                f"figures need the pass '{PLAN}', which was not run",
                remedy=f"put {PLAN} before lower-to-trace in the pipeline",
            )
        self.decisions = watch.decisions
        self.diagnostics: tuple[Diagnostic, ...] = tuple(module.diagnostics.items)
        self._module, self._formulas = module, FigureFormulas(module, watch.plans)

    def at(self, values: Mapping[str, int]) -> Figures:
        """The figures for values that were decided alike. Raises `DiagnosticError`."""
        try:
            return self._formulas.at(values)
        except UnboundError as e:
            raise error(
                f"no value for {', '.join(e.names)}",
                self._module.root.loc,
                remedy=self._module.how_to_set(e.names),
            ) from None
