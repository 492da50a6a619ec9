"""Jobs of several pods: one prefills and another one decodes, to which caches go; each has a part
of the model, and values cross; or one drafts words that another one verifies."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.driver.job.builder import JobBuilder
from stagec.driver.job.pod_options import has_pods, options_of, pod_names
from stagec.driver.output.common import reports_once
from stagec.driver.request.options import JobOptions
from stagec.ir.expr import const
from stagec.ir.module import BATCH, Module
from stagec.ir.serving import DECODE, PREFILL
from stagec.ir.traits import Accumulates
from stagec.ir_spec.phases import Phase
from stagec.pipeline.instrument import Hooks
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import DiagnosticError, note

if TYPE_CHECKING:
    from stagec.program.nodes import Ints

#: The last pass before values cross, and the one behind it.
_PLACED, _BEHIND = "eliminate-dead-code", "offload-to-host"


@dataclass(frozen=True)
class Pods:
    """The builder and the lowered module of each pod; and by pod and other pod, the ranks of that
    one that its messages go to or come from."""

    builders: Mapping[str, JobBuilder]
    modules: Mapping[str, Module]
    far: Mapping[str, Mapping[str, Sequence[Ints]]]

    @property
    def name(self) -> str:
        """The name of the model."""
        return next(iter(self.builders.values())).model_name


def lower_pods(options: JobOptions, watching: Mapping[str, Sequence[Hooks]] | None = None) -> Pods:
    """Compile all pods, each with its further instruments. Raises `DiagnosticError`.

    Each is compiled up to where values cross, then further, since who sends what to whom takes the
    placements of all.
    """
    from stagec.text.printer import print_module

    builders: dict[str, JobBuilder] = {}
    running: dict[str, Iterator[str]] = {}
    names = pod_names(options)
    with tempfile.TemporaryDirectory() as folder, reports_once():
        texts = {pod: Path(folder) / f"{pod}.stg" for pod in names}
        for pod, text in texts.items():
            with about_pod(pod):
                builder = builders[pod] = _builder(pod, options, builders)
                passes = [builder.pipeline_text(), *_crossing(pod, options, texts)]
                seen = (watching or {}).get(pod, ())
                running[pod] = builder.passes(watching=seen, text=",".join(passes))
                _run_until_placed(running[pod], builder.module)
            text.write_text(print_module(builder.module), encoding="utf-8")
        far = _far({pod: builder.module for pod, builder in builders.items()})
        for pod, rest in running.items():
            with about_pod(pod):
                for _ in rest:
                    pass
    return Pods(builders, {pod: each.module for pod, each in builders.items()}, far)


def _builder(pod: str, options: JobOptions, others: Mapping[str, JobBuilder]) -> JobBuilder:
    """What compiles a pod. Parts have the batch of the first pod."""
    given = options_of(pod, options)
    builder = JobBuilder(given)
    first = next(iter(others.values()), None)
    if first is None or not (given.part or given.draft):
        return builder
    if (batch := first.module.symbols.get(BATCH)) is None:
        return builder
    sizes = {"sizes": {**builder.options.sizes, BATCH: batch}}
    return JobBuilder(given.changed(**({"batch": batch} if given.serve else sizes)))


def _crossing(pod: str, options: JobOptions, texts: Mapping[str, Path]) -> Iterator[str]:
    """The passes by which values cross between a pod and the others."""
    for other, text in texts.items():
        if other != pod and DECODE not in (pod, other):
            yield f"+before({_BEHIND}):connect-parts{{module={text}}}"
    if DECODE in texts and pod in (PREFILL, DECODE):
        to = pod == PREFILL
        other = DECODE if to else PREFILL
        yield _hand_over("to" if to else "source", other, texts[other])


def _hand_over(way: str, other: str, text: Path) -> str:
    return f"+before({_BEHIND}):hand-over{{{way}={other},module={text}}}"


def _run_until_placed(running: Iterator[str], module: Module) -> None:
    """Run the passes up to where values cross."""
    for name in running:
        if name == _PLACED and module.phase == Phase.PARTITIONED.label:
            return


def _far(modules: Mapping[str, Module]) -> dict[str, dict[str, Sequence[Ints]]]:
    """Who meets whom, by pod and other pod."""
    from stagec.program.crossings import crossings
    from stagec.program.parts import part_crossings

    far: dict[str, dict[str, Sequence[Ints]]] = {pod: {} for pod in modules}
    for one, other in combinations(modules, 2):
        if other != DECODE:
            met = part_crossings(modules[one], modules[other])
            far[one][other], far[other][one] = met.peers[one], met.peers[other]
        elif one == PREFILL:
            found = crossings(modules[one], modules[other])
            far[one][other], far[other][one] = found.to, found.of
    return far


def one_group(options: JobOptions) -> str:
    """The placed module of a pod as those see it who send it the sequences of a step: these go to
    one of the groups of ranks that have sequences of their own, and into one microbatch there. A
    text of which placements, stages and microbatches hold. Raises `DiagnosticError`."""
    from stagec.program.crossings import caches_of
    from stagec.text.printer import print_module

    module = JobBuilder(options).lower(until=_PLACED)
    batch = read_strategy(module).batch
    held = [dim for _, cache, _, _ in caches_of(module) for dim in cache.tensor.dims]
    over = [axis for dim in held if batch in dim.size.symbols for axis in dim.axes]
    module.set_values(dict.fromkeys(over, 1))
    for op in module.functions[0].body.ops:
        if op.has(Accumulates):
            op.attrs["count"] = const(1)
    return print_module(module)


def handing_over(options: JobOptions, to: Path) -> JobOptions:
    """The options of a step of prefill that hands its caches over to the pod of a text. Raises
    `DiagnosticError`."""
    text = JobBuilder(options).pipeline_text()
    return options.changed(pipeline=f"{text},{_hand_over('to', DECODE, to)}")


@contextmanager
def about_pod(pod: str) -> Generator[None]:
    """Say of errors which pod they are about."""
    try:
        yield
    except DiagnosticError as found:
        which = note(f"in the pod '{pod}'")
        raise DiagnosticError(
            *(replace(d, notes=(*d.notes, which)) for d in found.diagnostics)
        ) from None


def strategy_of(options: JobOptions, *, symbolic: bool = False) -> str:
    """The text of mesh and strategy of a job: a file that can be given as STRATEGY; of several pods
    that of each. Raises `DiagnosticError`."""
    if has_pods(options):
        return strategies(options)
    return JobBuilder(options, symbolic=symbolic).strategy()


def strategies(options: JobOptions) -> str:
    """The texts of mesh and strategy of all pods. Raises `DiagnosticError`."""
    builders: dict[str, JobBuilder] = {}
    with reports_once():
        for pod in pod_names(options):
            with about_pod(pod):
                builders[pod] = _builder(pod, options, builders)
    return "".join(f"// {pod}\n{each.strategy()}" for pod, each in builders.items())
