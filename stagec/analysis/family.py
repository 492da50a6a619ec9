"""A job in many sizes: compiled once for all sizes with the same decisions, evaluated for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar
from weakref import finalize

from stagec.analysis.figures import FigureFormulas, Figures, MemoryFigures
from stagec.analysis.memory_moments import MemoryMoments
from stagec.analysis.model_flops import ModelFlops, model_flops, step_flops, step_tokens
from stagec.ir.bind import check_names
from stagec.ir.core import Operation
from stagec.ir.expr import Expr, UnboundError
from stagec.ir.module import Module
from stagec.ir.opdef import Registry
from stagec.ir.queries import Queries
from stagec.ir_spec.phases import phase_named
from stagec.pipeline.blame import plugin_of
from stagec.pipeline.instrument import LOWERING, PLAN, STATED, Hooks, Instrument, Verification
from stagec.pipeline.manager import PassManager
from stagec.pipeline.passes import Pass
from stagec.pipeline.spec import Pipeline
from stagec.pipeline.verify import verify_module
from stagec.program.classes import RankClass, rank_classes
from stagec.support.diagnostics import Diagnostic, error
from stagec.support.source import Source
from stagec.text.build import parse_module
from stagec.time.step import Issued

F = TypeVar("F")


class _Watch(Hooks):
    """Records the queries of passes, and extracts the FLOPs of the model and the memory plan, if
    there is one, before they are lowered."""

    def __init__(self) -> None:
        self.decisions = Queries()
        self.plans: MemoryMoments | None = None
        self.flops: ModelFlops | None = None
        self.tokens: Expr | None = None

    def after_pass(self, pass_: Pass, module: Module) -> None:
        if pass_.name == PLAN:
            self.plans = MemoryMoments(module)
        module.decisions = None
        if pass_.name in STATED:
            self.flops, self.tokens = model_flops(module), step_tokens(module)
        module.decisions = self.decisions


class _TextVerification(Verification):
    """Verifies the module of the text: before the first pass, and when its values have types."""

    _typed = False

    def after_pass(self, pass_: Pass, module: Module) -> None:
        phase = phase_named(module.phase)
        if not self._typed and phase is not None and phase.row.typed:
            self._typed = True
            super().after_pass(pass_, module)


#: The number of cached programs of a compile, each of which has the nodes of all classes.
_MOST_ISSUED = 4


class Compiles:
    """The compiles of one job in many sizes and degrees.

    A compile records its queries. Values for which all queries have the same answers reuse the
    compile; for others the job is compiled again. So figures equal those of a separate compile,
    whatever the values.
    """

    def __init__(self) -> None:
        self._compiles: list[Compiled] = []

    def find(
        self, values: Mapping[str, int], compiled: Callable[[], Compiled], *, figures: bool = False
    ) -> Compiled:
        """The compile that is valid for these values of all symbols and axes, with `figures` one
        that has figures; `compiled` compiles the job with the values. Raises `DiagnosticError`."""
        match = next((c for c in self._compiles if c.decisions.same(values)), None)
        if match is not None:
            self._compiles.remove(match)
        if match is None or (figures and not match.has_figures(values)):
            match = compiled()
        self._compiles.insert(0, match)  # the next job is likely to be similar
        return match

    def __len__(self) -> int:
        """The number of compiles."""
        return len(self._compiles)

    @property
    def nodes(self) -> int:
        """The number of nodes of the cached programs, which dominate the memory."""
        return sum(each.nodes for each in self._compiles)

    def forget(self) -> None:
        """Drop everything that evaluations do not need."""
        for each in self._compiles:
            each.forget()


class Family:
    """A text in many sizes and degrees: a module with its mesh and strategy, whose symbols and axes
    may have values or be open. `pipeline` ends with a lowered module."""

    def __init__(self, source: Source, registry: Registry, pipeline: Pipeline) -> None:
        self._source, self._registry, self._pipeline = source, registry, pipeline
        self._compiles = Compiles()
        self._module = parse_module(source, registry)

    def at(self, values: Mapping[str, int]) -> Figures:
        """The figures for these values of symbols and axes; others have their values in the text.
        Raises `DiagnosticError` for unknown names and for those without a value."""
        check_names(self._module, values)
        complete = {**self._module.env, **values}
        mesh = self._module.mesh
        names = (*self._module.symbols, *(mesh.axes if mesh else ()))
        if missing := [n for n in names if n not in complete]:
            raise self._module.root.error(
                f"no value for {', '.join(missing)}",
                remedy="give each of them a value, here or in the text",
            )

        def compiled() -> Compiled:
            module = parse_module(self._source, self._registry)
            module.set_values(complete)
            return Compiled(module, self._pipeline)

        return self._compiles.find(complete, compiled).at(complete)

    def __len__(self) -> int:
        """The number of compiles."""
        return len(self._compiles)


def _forget_origins(module: Module) -> None:
    """Drop the operations from which a module was lowered: times, and figures of planned memory,
    need only the lowered module."""
    for graph in module.graphs:
        if graph.origin is not None:
            graph.origin.decompose()
            for op in [graph, *graph.body.walk()]:
                op.origin = None


def _decompose(root: Operation) -> None:
    """Take apart a module, and the operations from which it was lowered."""
    for op in root.body.ops:
        if op.origin is not None:
            op.origin.decompose()
    root.decompose()


class Compiled:
    """A compile of a family by a pipeline that ends with a lowered module: its decisions, and its
    figures as expressions. `model_flops` and `tokens` are those of a step of all ranks, None if
    unknown. Without `plans` the pass that plans memory is left out: the plan is made when figures
    are needed, and is not in the module. Equal actions are then lowered once, so their nodes have
    the names of the first one."""

    def __init__(
        self,
        module: Module,
        pipeline: Pipeline,
        around: Sequence[Instrument] = (),
        *,
        plans: bool = True,
    ) -> None:
        watch = _Watch()
        # with our own passes the text and the result are verified, with plug-ins every pass
        own = not any(plugin_of(type(p).__module__) for p in pipeline.passes)
        text = [_TextVerification()] if own else []
        self._plans_late = own and not plans and not around
        if self._plans_late:
            pipeline = pipeline.without({PLAN}).having(LOWERING, share_actions=True)
        module.decisions = watch.decisions  # what is verified is a decision, too
        PassManager(pipeline, [watch, *text, *around], verify=not own).run(module)
        if own:
            verify_module(module)
        module.decisions = None
        self.decisions = watch.decisions
        self.diagnostics: tuple[Diagnostic, ...] = tuple(module.diagnostics.items)
        self._module, self._plans, self.tokens = module, watch.plans, watch.tokens
        finalize(module, _decompose, module.root)  # programs keep the module alive
        flops = None if watch.flops is None else step_flops(watch.flops, module.graphs)
        self.model_flops = flops
        self._issued: list[Issued] = []
        #: How many nodes the programs have that are kept.
        self.nodes = 0
        if not self._plans_late:
            _forget_origins(module)

    @cached_property
    def _formulas(self) -> FigureFormulas:
        if self._plans is None:
            raise error(
                f"figures need the pass '{PLAN}', which was not run",
                remedy=f"put {PLAN} before lower-to-trace in the pipeline",
            )
        return FigureFormulas(self._module, self._plans)

    def has_figures(self, values: Mapping[str, int]) -> bool:
        """Whether figures are available for values with the same decisions: if memory is planned,
        the decisions of the plan count too; otherwise the original operations must still exist."""
        if self._plans is None and self._plans_late:
            return any(graph.origin is not None for graph in self._module.graphs)
        return self.decisions.same(values)

    def _plan(self, values: Mapping[str, int]) -> None:
        """Plan memory for values with the same decisions."""
        module = self._module
        module.set_values(self.settled(values))
        module.decisions = self.decisions
        try:
            functions = (graph.origin for graph in module.graphs)
            self._plans = MemoryMoments(module, [f for f in functions if f is not None])
        finally:
            module.decisions = None
        _forget_origins(module)

    def settled(self, values: Mapping[str, int]) -> Mapping[str, int]:
        """The values of symbols and axes in the expressions, for values with the same decisions:
        passes round up some sizes."""
        return self.decisions.settled(values)

    def issued(self, values: Mapping[str, int]) -> Issued:
        """The programs of the ranks for values with the same decisions: cached ones, if these
        values give the same programs. Raises `DiagnosticError`."""
        values = self.settled(values)
        for number, cached in enumerate(self._issued):
            if (issued := cached.at(values)) is not None:
                self._issued.insert(0, self._issued.pop(number))
                return issued
        self._module.set_values(values)
        issued = Issued.of(self._module)
        self._issued = [issued, *self._issued[: _MOST_ISSUED - 1]]
        self.nodes = sum(each.size for each in self._issued)
        return issued

    def forget(self) -> None:
        """Drop everything that evaluations do not need; the rest is computed again on demand."""
        for each in self._issued:
            each.forget()
        _forget_origins(self._module)

    def classes(self, values: Mapping[str, int]) -> list[RankClass]:
        """The rank classes for values with the same decisions. Raises `DiagnosticError`."""
        self._module.set_values(self.settled(values))
        return rank_classes(self._module)

    def at(self, values: Mapping[str, int]) -> Figures:
        """The figures for values for which they are available. Raises `DiagnosticError`."""
        return self._of_plan(FigureFormulas.at, values)

    def memory_figures(self, values: Mapping[str, int]) -> MemoryFigures:
        """The memory of these figures. Raises `DiagnosticError`."""
        return self._of_plan(FigureFormulas.memory_figures, values)

    def _of_plan(
        self, of: Callable[[FigureFormulas, Mapping[str, int]], F], values: Mapping[str, int]
    ) -> F:
        if self._plans is None and self._plans_late:
            self._plan(values)
        try:
            return of(self._formulas, self.settled(values))
        except UnboundError as e:
            raise self._module.no_value(e.names, self._module.root.loc) from None
