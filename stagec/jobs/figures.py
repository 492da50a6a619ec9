"""The figures and the time of a job, compiled once for all jobs of the same structure. Sweeps and
searches use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from stagec.analysis.family import Compiled, Compiles
from stagec.analysis.figures import Figures, MemoryFigures
from stagec.analysis.memory_fit import MemoryFit, memory_fit
from stagec.ir.core import Operation
from stagec.ir.queries import Queries
from stagec.jobs.builder import ASSUMED, MESH, SHORTHAND, JobBuilder, count_copies
from stagec.jobs.instruments import instruments
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.machines import Machine
from stagec.models import LIBRARY
from stagec.support.diagnostics import Diagnostic
from stagec.support.source import Source
from stagec.time.costs.replay_options import USUAL, ReplayOptions
from stagec.time.step import Issued

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport

#: The structures that the process has compiled, the most recently used one last. Jobs that differ
#: only in sizes and degrees have one structure.
_structures: dict[Hashable, Compiles] = {}
#: The most compiles that are kept, and the most nodes of all of them: a compile takes 3 to 10 MB, a
#: node about 100 bytes. Probes of a model with experts need up to 190 compiles, in turns.
_MOST_KEPT, _MOST_NODES = 160, 1_000_000


@dataclass(frozen=True)
class CompiledJob:
    """A job whose structure is compiled once in a process. `again` compiles it with figures, if the
    compile no longer has them."""

    name: str
    compiled: Compiled
    values: Mapping[str, int]
    again: Callable[[], CompiledJob]

    @classmethod
    def of(
        cls, options: JobOptions, session: Session | None = None, *, figures: bool = False
    ) -> CompiledJob:
        """The job of these options, with `figures` from a compile that has figures. Diagnostics go
        to the session, if there is one. Raises `DiagnosticError`."""
        session = session or Session()
        request, builder = _request(options, session)

        def compiled() -> Compiled:
            return compiled_of(builder or _builder(options, Session()))

        match = _compiles_of(request).find(request.values, compiled, figures=figures)
        session.report(*match.diagnostics)
        again = partial(cls.of, options, figures=True)
        return cls(request.name, match, request.values, again)

    @property
    def by_step(self) -> Mapping[str, CompiledJob]:
        """The one step of the job, by the empty name; `LoweredJob` may have several steps."""
        return {"": self}

    @cached_property
    def issued(self) -> Mapping[str, Issued]:
        """What its ranks issue, by the empty name."""
        return {"": self.compiled.issued(self.values)}

    def figures(self) -> Figures:
        """The figures of the job. Raises `DiagnosticError`."""
        if self.compiled.has_figures(self.values):
            return self.compiled.at(self.values)
        return self.again().figures()

    def memory_figures(self) -> MemoryFigures:
        """The figures of the memory of its ranks. Raises `DiagnosticError`."""
        if self.compiled.has_figures(self.values):
            return self.compiled.memory_figures(self.values)
        return self.again().memory_figures()

    def time(
        self, machine: Machine, replay: ReplayOptions = USUAL, *, levers: bool = False
    ) -> TimeReport:
        """The time of its step on a machine. Raises `DiagnosticError`."""
        from stagec.analysis.time_report import time_report

        return time_report(
            self.name,
            self.issued[""],
            machine,
            self.compiled.settled(self.values),
            model_flops=self.compiled.model_flops,
            tokens=self.compiled.tokens,
            replay=replay,
            levers=levers,
            fit=lambda: self.fit(machine),
        )

    def fit(self, machine: Machine) -> MemoryFit:
        """Whether it fits the memory of a machine. Raises `DiagnosticError`."""
        memory = self.memory_figures()
        return memory_fit(machine, memory.mesh, memory.peak)


class _Request(NamedTuple):
    """The options of a job after their checks: the name of the model, the `values` of its symbols
    and axes, what its compiles have in common, the sizes that were read, the texts, and what was
    reported."""

    name: str
    values: Mapping[str, int]
    structure: Hashable
    decisions: Queries
    sources: Mapping[str, Source]
    diagnostics: Sequence[Diagnostic]


#: The last requests, by all options but sizes. Other sizes have the same request, if no check reads
#: them.
_requests: dict[Hashable, _Request] = {}


def _request(options: JobOptions, session: Session) -> tuple[_Request, JobBuilder | None]:
    """The request of a job, and its builder, if the options are not those of a known request.
    Raises `DiagnosticError`."""
    given = {name: size for name, size in options.sizes.items() if size is not None}
    stated = [(n, v) for n, v in vars(options).items() if n != "sizes" and v != _DEFAULTS[n]]
    key = repr(stated), *given
    known = _requests.pop(key, None)
    if known is not None and known.decisions.same(values := {**known.values, **given}):
        _requests[key] = known
        session.sources.update(known.sources)
        session.report(*known.diagnostics)
        return known._replace(values=values), None
    aside = session.aside()
    aside.sources = {}
    try:
        builder = _builder(options, aside)
        values = dict(builder.module.env)
        if builder.serving is not None:
            values |= builder.serving.values
        about = builder.model_name, values, _structure(builder), builder.decisions
    finally:
        session.sources.update(aside.sources)
        session.report(*aside.diagnostics)
    request = _Request(*about, aside.sources, aside.diagnostics)
    if given.items() <= values.items() and not _reads_files(options, aside):
        _requests[key] = request
        if len(_requests) > _MOST_KEPT:
            del _requests[next(iter(_requests))]
    return request, builder


#: The options of a job of which nothing is given.
_DEFAULTS = vars(JobOptions(""))


def _reads_files(options: JobOptions, session: Session) -> bool:
    """Whether a job reads texts that may change: any but those of the library and of flags."""
    texts = (name for name in session.sources if not name.startswith(LIBRARY))
    return bool(options.plugin) or not {SHORTHAND, MESH, ASSUMED}.issuperset(texts)


def _builder(options: JobOptions, session: Session) -> JobBuilder:
    builder = JobBuilder(options, session)
    count_copies(builder.module)
    return builder


def _structure(builder: JobBuilder) -> Hashable:
    """What the compiles of a job have in common: its model, axes, strategy, passes and plug-ins."""
    module, options, pipeline = builder.module, builder.options, builder.pipeline_text
    serving = builder.serving
    same = pipeline
    if serving is not None and options.pipeline is None:
        same = serving.structure  # equal for steps that differ in sizes alone
    texts = tuple(source.text for source in module.sources.values())
    stated = tuple(map(_form, (*module.ops("stg.assume"), *module.ops("stg.strategy"))))
    axes = module.mesh.axes if module.mesh else ()
    return texts, stated, axes, same, options.plugin, options.check_numerics


def _compiles_of(request: _Request) -> Compiles:
    """The compiles of the structure of a job, which are kept as the last ones."""
    key = request.structure
    compiles = _structures.pop(key, None) or Compiles()
    if _structures:
        next(reversed(_structures.values())).forget()
    while _structures and _is_full(_structures.values()):
        mean = sum(each.nodes for each in _structures.values()) / len(_structures)
        # to drop small ones in place of one large structure would take many of them
        _structures.pop(next(k for k, each in _structures.items() if each.nodes >= mean))
    _structures[key] = compiles
    return compiles


def _form(op: Operation) -> Hashable:
    """What a statement says, with those inside it."""
    inside = tuple(map(_form, op.region.ops)) if op.region is not None else ()
    return op.name, op.symbol, tuple(op.attrs.items()), inside


def _is_full(kept: Collection[Compiles]) -> bool:
    compiles = sum(max(1, len(each)) for each in kept)
    return compiles >= _MOST_KEPT or sum(each.nodes for each in kept) > _MOST_NODES


def compiled_of(builder: JobBuilder) -> Compiled:
    """Compile the module of a builder. Raises `DiagnosticError`."""
    passes = builder.loaded.pipeline(builder.pipeline_text)
    return Compiled(
        builder.module,
        passes,
        instruments(builder.options, passes, builder.loaded, builder.session),
        plans=builder.options.pipeline is not None,
    )
