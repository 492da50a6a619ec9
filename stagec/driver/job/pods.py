"""`--serve disaggregated`: one pod prefills, another one decodes, and caches go from the first to
the second."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagec.driver.job.builder import JobBuilder
from stagec.driver.output.common import reports_once
from stagec.driver.request.flags import FLAGS
from stagec.driver.request.options import JobOptions, job_options, take_options
from stagec.driver.request.serving import PODS
from stagec.ir.expr import const
from stagec.ir.module import Module
from stagec.ir.serving import DECODE, PREFILL
from stagec.ir.traits import Accumulates
from stagec.pipeline.instrument import Hooks
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import DiagnosticError, error, note
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.program.crossings import Crossings
    from stagec.program.nodes import Ints

#: The last pass before caches cross, and the one behind it.
_PLACED, _BEHIND = "eliminate-dead-code", "offload-to-host"
_OF_MESH = ("mesh", "ranks")


@dataclass(frozen=True)
class Pods:
    """The builder and the lowered module of each pod, and how the caches cross."""

    builders: Mapping[str, JobBuilder]
    modules: Mapping[str, Module]
    crossings: Crossings

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.builders[PREFILL].model_name

    @property
    def far(self) -> Mapping[str, Mapping[str, Sequence[Ints]]]:
        """By pod and other pod, the ranks of that one that its messages go to or come from."""
        found = self.crossings
        return {PREFILL: {DECODE: found.to}, DECODE: {PREFILL: found.of}}


def lower_pods(options: JobOptions, watching: Mapping[str, Sequence[Hooks]] | None = None) -> Pods:
    """Compile both pods, each with its further instruments. Raises `DiagnosticError`.

    Each is compiled up to where caches cross, then further, since who sends what to whom takes the
    placements of both.
    """
    from stagec.program.crossings import crossings
    from stagec.text.printer import print_module

    builders: dict[str, JobBuilder] = {}
    running: dict[str, Iterator[str]] = {}
    with tempfile.TemporaryDirectory() as folder, reports_once():
        texts = {pod: Path(folder) / f"{pod}.stg" for pod in PODS}
        for pod, way, other in ((PREFILL, "to", DECODE), (DECODE, "source", PREFILL)):
            with about_pod(pod):
                builder = builders[pod] = JobBuilder(options_of_pod(pod, options))
                text = _with_crossing(builder.pipeline_text(), way, other, texts[other])
                seen = (watching or {}).get(pod, ())
                running[pod] = builder.passes(watching=seen, text=text)
                next(name for name in running[pod] if name == _PLACED)
            texts[pod].write_text(print_module(builder.module), encoding="utf-8")
        placed = crossings(builders[PREFILL].module, builders[DECODE].module)
        for pod in PODS:
            with about_pod(pod):
                for _ in running[pod]:
                    pass
    return Pods(builders, {pod: each.module for pod, each in builders.items()}, placed)


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
    return options.changed(pipeline=_with_crossing(text, "to", DECODE, to))


def _with_crossing(passes: str, way: str, other: str, text: Path) -> str:
    return f"{passes},+before({_BEHIND}):hand-over{{{way}={other},module={text}}}"


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


def strategies(options: JobOptions) -> str:
    """The texts of mesh and strategy of both pods. Raises `DiagnosticError`."""
    with reports_once():
        texts = [f"// {p}\n{JobBuilder(options_of_pod(p, options)).strategy()}" for p in PODS]
    return "".join(texts)


def options_of_pod(pod: str, options: JobOptions) -> JobOptions:
    """The options of a pod: those of the job, with the strategy that --prefill or --decode gives.

    Raises `DiagnosticError`.
    """
    if options.prompt is None:
        raise error(
            "--serve disaggregated expects --prompt: the tokens of each sequence that are handed "
            "over",
            remedy="give --prompt 4096",
        )
    if options.chunk is not None:
        raise error(
            "--chunk is one step of several, and caches are handed over behind the last one",
            remedy="give the last one: --prompt with its tokens, --context with those before it",
        )
    if options.pipeline is not None or options.strategy is not None or options.preset:
        raise error(
            "--serve disaggregated has a strategy for each pod",
            remedy="give flags: --prefill 'tp=4' --decode 'dp=8,tp=2'",
        )
    past = options.context or 0
    steps: Mapping[str, Mapping[str, Any]] = {
        PREFILL: {"serve": PREFILL, "speculative": None, "context": past},
        DECODE: {"serve": DECODE, "prompt": None, "context": past + options.prompt},
    }
    dumps = options.dump_dir and options.dump_dir / pod
    found = options.changed(prefill=None, decode=None, dump_dir=dumps, **steps[pod])
    given = read_flags(f"--{pod}", getattr(options, pod) or "")
    named = given.explicit | {n for n in _OF_MESH if getattr(given, n) is not None}
    found = found.changed(explicit=found.explicit | given.explicit)
    return found.changed(**{name: getattr(given, name) for name in named})


@click.command()
@job_options
def _given(**given: Any) -> JobOptions:
    return take_options(given)


def read_flags(option: str, text: str) -> JobOptions:
    """The flags of `tp=4,sp`, or of `--tp 4 --sp`, which an option gives a pod. Raises
    `DiagnosticError`."""
    words = _words(option, text)
    try:
        with _given.make_context(option, words) as context:
            found: JobOptions = _given.invoke(context)
    except click.UsageError as problem:
        raise error(
            f"{option} '{text}': {problem.format_message()}", remedy="as in 'tp=4,sp'"
        ) from None
    if found.model:  # what belongs to no flag
        raise _no_flag(option, text, found.model)
    return found


def _no_flag(option: str, text: str, name: str) -> DiagnosticError:
    options = {f.option.removeprefix("--") for f in FLAGS.values()}
    return error(
        f"{option} '{text}': no flag '{name}' of a strategy",
        remedy=did_you_mean(name, options) or "as in 'tp=4,sp'",
    )


def _words(option: str, text: str) -> list[str]:
    """The words of a command line: what is no flag belongs to the value before it."""
    found: list[str] = []
    for part in text.replace("--", " ").replace(",", " ").split():
        name, _, value = part.partition("=")
        known = name.replace("-", "_")
        if value and known not in FLAGS and known not in _OF_MESH:
            raise _no_flag(option, text, name)
        if value or known in FLAGS or known in _OF_MESH:
            found += [f"--{name}", *([value] if value else [])]
        elif found and not found[-1].startswith("--"):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found
