"""`--serve disaggregated`: one pod prefills, another one decodes, and caches go from the first to
the second."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagec.driver.flags import FLAGS
from stagec.driver.job import JobBuilder
from stagec.driver.options import JobOptions, job_options, take_options
from stagec.ir.module import Module
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.program.handover import Crossing

PREFILL, DECODE = "prefill", "decode"
PODS = (PREFILL, DECODE)
#: The mode of both.
DISAGGREGATED = "disaggregated"
#: The last pass before caches cross, and the one behind it.
_PLACED, _BEHIND = "eliminate-dead-code", "offload-to-host"
_OF_MESH = ("mesh", "ranks")


@dataclass(frozen=True)
class Pods:
    """The builder and the lowered module of each pod, and how the caches cross."""

    builders: Mapping[str, JobBuilder]
    modules: Mapping[str, Module]
    crossings: Mapping[str, Crossing]

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.builders[PREFILL].model_name


def lower_pods(options: JobOptions) -> Pods:
    """Compile both pods. Raises `DiagnosticError`."""
    from stagec.program.handover import crossings
    from stagec.text.printer import print_module

    asked = {pod: _options_of(pod, options) for pod in PODS}
    placed = {pod: JobBuilder(each).lower(until=_PLACED) for pod, each in asked.items()}
    builders: dict[str, JobBuilder] = {}
    with tempfile.TemporaryDirectory() as folder:
        texts = {pod: Path(folder) / f"{pod}.stg" for pod in PODS}
        for pod, module in placed.items():
            texts[pod].write_text(print_module(module), encoding="utf-8")
        for pod, way, other in ((PREFILL, "to", DECODE), (DECODE, "source", PREFILL)):
            passes = JobBuilder(asked[pod]).pipeline_text()
            crossing = f"hand-over{{{way}={other},module={texts[other]}}}"
            text = f"{passes},+before({_BEHIND}):{crossing}"
            builders[pod] = JobBuilder(asked[pod].changed(pipeline=text))
        modules = {pod: builder.lower() for pod, builder in builders.items()}
    return Pods(builders, modules, crossings(placed[PREFILL], placed[DECODE]))


def _options_of(pod: str, options: JobOptions) -> JobOptions:
    """The options of a pod: those of the job, with the strategy that --prefill or --decode gives.

    Raises `DiagnosticError`.
    """
    if options.prompt is None:
        raise error(
            "--serve disaggregated expects --prompt: the tokens of each sequence that are handed "
            "over",
            remedy="give --prompt 4096",
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
    found = options.changed(prefill=None, decode=None, **steps[pod])
    given = _read(pod, getattr(options, pod) or "")
    named = given.explicit | {n for n in _OF_MESH if getattr(given, n) is not None}
    found = found.changed(explicit=found.explicit | given.explicit)
    found = found.changed(**{name: getattr(given, name) for name in named})
    if found.pp > 1 or found.microbatches > 1:
        raise error(
            f"--{pod}: caches are handed over by pods without pipeline stages and microbatches",
            remedy="leave out pp and microbatches",
        )
    return found


@click.command()
@job_options
def _given(**given: Any) -> JobOptions:
    return take_options(given)


def _read(pod: str, text: str) -> JobOptions:
    """The flags of `tp=4,sp`, or of `--tp 4 --sp`. Raises `DiagnosticError`."""
    words = list(_words(pod, text))
    try:
        with _given.make_context(pod, words) as context:
            found: JobOptions = _given.invoke(context)
            return found
    except click.UsageError as problem:
        raise error(
            f"--{pod} '{text}': {problem.format_message()}", remedy="as in --prefill 'tp=4,sp'"
        ) from None


def _words(pod: str, text: str) -> Iterator[str]:
    for part in text.replace("--", " ").replace(",", " ").split():
        name, _, value = part.partition("=")
        known = name.replace("-", "_")
        if value or known in FLAGS or known in _OF_MESH:
            if known not in FLAGS and known not in _OF_MESH:
                options = {f.option.removeprefix("--") for f in FLAGS.values()}
                raise error(
                    f"--{pod} '{text}': no flag '{name}' of a strategy",
                    remedy=did_you_mean(name, options) or "as in --prefill 'tp=4,sp'",
                )
            yield f"--{name}"
        if value or known not in FLAGS:
            yield value or part
