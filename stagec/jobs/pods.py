"""The pods of a job, each with a module of its own. Most jobs have one. With several, one prefills
and sends its caches to another one that decodes; or each has a part of the model and values cross
between them; or one drafts tokens that another one verifies, on separate ranks or on the same."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING

from stagec.ir.clone import Copier
from stagec.ir.expr import UnboundError, const
from stagec.ir.module import BATCH, Module
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.ir.traits import Accumulates
from stagec.jobs.builder import JobBuilder
from stagec.jobs.pod_options import guests, has_pods, options_of, pod_names
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.pipeline.instrument import Instrument
from stagec.pipeline.passes import Pass
from stagec.program.nodes import Ints
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import DiagnosticError, note

if TYPE_CHECKING:
    from stagec.analysis.model_flops import ModelFlops
    from stagec.jobs.planned import Looks

#: The beginning of a note that names the pod of an error.
IN_POD = "in the pod"
#: The pass before which values cross between pods.
_BEHIND = "offload-to-host"
_HANDS_OVER = f"+before({_BEHIND}):hand-over{{to={DECODE}}}"
_TAKES_OVER = f"+before({_BEHIND}):hand-over{{source={PREFILL}}}"


@dataclass(frozen=True)
class Pods:
    """The pods of a job.

    `builders` has the builder of each pod with ranks; `guests` those of pods that run on the ranks
    of the first one, and become part of its module. `peers` are modules of further pods, which are
    not compiled here. Once lowered, `peers_in_other_pod[pod][other]` has for each message the ranks
    of the other pod that the ranks of a pod send to or receive from.
    """

    builders: Mapping[str, JobBuilder]
    guests: Mapping[str, JobBuilder] = field(default_factory=dict[str, JobBuilder])
    peers: Mapping[str, Module] = field(default_factory=dict[str, Module])
    peers_in_other_pod: Mapping[str, Mapping[str, Sequence[Ints]]] = field(
        default_factory=dict[str, "Mapping[str, Sequence[Ints]]"]
    )
    session: Session = field(default_factory=Session)
    aside: Session = field(default_factory=Session)  # of the builders, if there are several pods

    @classmethod
    def of(
        cls,
        options: JobOptions,
        session: Session | None = None,
        *,
        symbolic: bool = False,
        peers: Mapping[str, Module] = MappingProxyType({}),
    ) -> Pods:
        """The pods of a job, except those in `peers`. Parts and draft models have the batch of the
        first pod. Raises `DiagnosticError`."""
        if not has_pods(options):
            (pod,) = pod_names(options)
            return cls({pod: JobBuilder(options, session, symbolic=symbolic)})
        builders: dict[str, JobBuilder] = {}
        session = session or Session()
        with session.once() as aside:
            for pod in (name for name in pod_names(options) if name not in peers):
                with _about_pod(pod):
                    given = _with_batch(options_of(pod, options), builders)
                    builders[pod] = JobBuilder(given, aside, symbolic=symbolic, pod=pod)
        guest_builders = {pod: builders.pop(pod) for pod in guests(options)}
        return cls(builders, guest_builders, peers, session=session, aside=aside)

    @property
    def modules(self) -> Mapping[str, Module]:
        """The module of each pod."""
        return {pod: each.module for pod, each in self.builders.items()}

    @property
    def first(self) -> JobBuilder:
        """The builder of the first pod."""
        return next(iter(self.builders.values()))

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.first.model_name

    @property
    def every(self) -> Mapping[str, JobBuilder]:
        """The builder of each pod, guests included."""
        return {**self.builders, **self.guests}

    @property
    def several(self) -> bool:
        """Whether several pods have ranks of their own."""
        return len(self.builders) > 1

    @property
    def titles(self) -> Mapping[str, str]:
        """A title for each pod: its model, with the name of the pod if there are several, and with
        its guests."""
        each = self.builders.items()
        more = "".join(f" with {b.model_name} ({p})" for p, b in self.guests.items())
        return {p: b.model_name + (f" ({p})" if self.several else more) for p, b in each}

    def strategy(self) -> str:
        """The text of mesh and strategy, which can be given as STRATEGY; with several pods the text
        of each."""
        each = ((f"// {pod}\n", b.strategy()) for pod, b in self.every.items())
        return "".join(head + text if len(self.every) > 1 else text for head, text in each)

    def flops(self, pods: Sequence[str], looks: Mapping[str, Looks]) -> ModelFlops | None:
        """The FLOPs that the texts of these pods state, as observed by `looks`, with those of
        guests of the first pod; None if a size is open."""
        from stagec.analysis.model_flops import summed

        names = [*pods, *(self.guests if next(iter(self.builders)) in pods else ())]
        return summed((looks[pod].flops.result, self.every[pod].module) for pod in names)

    def lower(
        self,
        watching: Mapping[str, Sequence[Instrument]] | None = None,
        *,
        until: str | None = None,
        without: Collection[str] = (),
    ) -> Pods:
        """Compile all pods as `JobBuilder.lower` does, with further instruments by pod. Each is
        compiled up to the passes in which pods meet, then further, since the messages between them
        depend on the placements of all. Guests are not compiled further. Raises
        `DiagnosticError`."""
        running: dict[str, Iterator[Pass]] = {}
        with self.session.once(self.aside):
            for pod, builder in self.every.items():
                with self._about(pod):
                    how = until, (watching or {}).get(pod, ())
                    running[pod] = builder.passes(*how, text=self.passes(pod), without=without)
                    _run_until_met(running[pod])
            met: Mapping[str, Module] = {}
            if len(self._names) > 1:  # copies of the modules before any of them meets another one
                met = {p: _copy(b.module) for p, b in self.every.items()} | dict(self.peers)
            for pod, builder in self.builders.items():
                builder.module.peers = {p: m for p, m in met.items() if p != pod}
                with self._about(pod):
                    for _ in running[pod]:
                        pass
            for builder in self.guests.values():
                self.session.report(*builder.module.diagnostics.items)
        hosts = {p: m for p, m in met.items() if p not in self.guests}
        return replace(self, peers_in_other_pod=_peers_in_other_pod(hosts))

    def passes(self, pod: str) -> str:
        """The text of the pipeline of a pod."""
        return ",".join((self.every[pod].pipeline_text, *self._crossing(pod)))

    def _crossing(self, pod: str) -> Iterator[str]:
        """The passes by which values cross between a pod and the others."""
        for other in self._names:
            if other != pod and DECODE not in (pod, other):
                meet = "share-ranks" if other in self.guests else "connect-parts"
                yield f"+before({_BEHIND}):{meet}{{peer={other}}}"
        if DECODE in self._names and pod in (PREFILL, DECODE):
            yield _HANDS_OVER if pod == PREFILL else _TAKES_OVER

    @property
    def _names(self) -> Sequence[str]:
        return *self.every, *self.peers

    @contextmanager
    def _about(self, pod: str) -> Generator[None]:
        module = self.every[pod].module
        with _about_pod(pod) if len(self.every) > 1 else nullcontext():
            try:
                yield
            except UnboundError as open_:
                raise module.no_value(open_.names, module.root.loc) from None


def _with_batch(options: JobOptions, others: Mapping[str, JobBuilder]) -> JobOptions:
    """The options of a part or draft model with the batch of the first pod, if that is known."""
    first = next(iter(others.values()), None)
    batch = None if first is None else first.module.symbols.get(BATCH)
    if batch is None or not (options.part or options.draft):
        return options
    if options.serve:
        return options.changed(batch=batch)
    return options.changed(sizes={**options.sizes, BATCH: batch})


def _run_until_met(running: Iterator[Pass]) -> None:
    """Run passes up to, but without, the first one that meets other pods."""
    for pass_ in running:
        if pass_.meets:
            return


def _copy(module: Module) -> Module:
    root = Copier({}, {}, str, lambda loc: loc).copy(module.root)
    return Module(root, module.registry, module.sources)


def _peers_in_other_pod(modules: Mapping[str, Module]) -> dict[str, dict[str, Sequence[Ints]]]:
    """The value of `Pods.peers_in_other_pod` for these lowered modules."""
    from stagec.program.crossings import crossings
    from stagec.program.parts import part_crossings

    peers: dict[str, dict[str, Sequence[Ints]]] = {pod: {} for pod in modules}
    for one, other in combinations(modules, 2):
        if other != DECODE:
            values = part_crossings(modules[one], modules[other])
            peers[one][other], peers[other][one] = values.peers[one], values.peers[other]
        elif one == PREFILL:
            caches = crossings(modules[one], modules[other])
            peers[one][other], peers[other][one] = caches.to, caches.of
    return peers


def one_group(options: JobOptions, session: Session) -> Module:
    """The placed module of a pod, reduced to one of its groups of ranks with sequences of their own
    and to one microbatch, since the sequences of a sender's step go to one of each. Raises
    `DiagnosticError`."""
    from stagec.program.crossings import caches_of

    builder = JobBuilder(options, session)
    _run_until_met(builder.passes(text=f"{builder.pipeline_text},{_TAKES_OVER}"))
    module = builder.module
    batch = read_strategy(module).batch
    dims = [dim for _, cache, _, _ in caches_of(module) for dim in cache.tensor.dims]
    over = [axis for dim in dims if batch in dim.size.symbols for axis in dim.axes]
    module.set_values(dict.fromkeys(over, 1))
    for op in module.functions[0].body.ops:
        if op.has(Accumulates):
            op.attrs["count"] = const(1)
    return module


@contextmanager
def _about_pod(pod: str) -> Generator[None]:
    """Add a note with the name of the pod to errors."""
    try:
        yield
    except DiagnosticError as problem:
        which = note(f"{IN_POD} '{pod}'")
        raise DiagnosticError(
            *(replace(d, notes=(*d.notes, which)) for d in problem.diagnostics)
        ) from None
