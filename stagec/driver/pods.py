"""`--serve disaggregated`: one pod prefills, another one decodes, and caches go from the first to
the second."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from stagec.driver.command_line import job_words
from stagec.driver.common import write_output
from stagec.driver.flags import FLAGS
from stagec.driver.job import JobBuilder
from stagec.driver.options import JobOptions, job_options, take_options
from stagec.ir.module import Module
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.formats.base import Format
    from stagec.job.pods import PodsJob
    from stagec.job.writer import Written
    from stagec.program.handover import Crossing

PREFILL, DECODE = "prefill", "decode"
PODS = (PREFILL, DECODE)
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

    asked = {pod: options_of_pod(pod, options) for pod in PODS}
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


# -- commands --------------------------------------------------------------------------------------


def analyze_pods(options: JobOptions, given: Mapping[str, Any]) -> int:
    """`analyze`: both pods, and what goes from one to the other."""
    for name in ("symbolic", "limit"):
        if given[name]:
            raise error(
                f"--{name} is of one pod", remedy="look at one: --serve prefill, or --serve decode"
            )
    result = _analysis(lower_pods(options))
    if given["as_json"]:
        write_output(json.dumps(result, indent=1) + "\n", given["output"])
        return 0
    table = StringIO()
    _print(result, table)
    write_output(table.getvalue(), given["output"])
    return 0


def compile_pods(options: JobOptions, given: Mapping[str, Any]) -> int:
    """`compile`: the traces of both pods as one job."""
    from stagec.driver.written import formats_asked, tell_written, write_formats

    for name in ("archive", "only_ranks", "memory_events", "tensor_names", "scheduler", "machine"):
        if given[name]:
            option = "--" + name.replace("_", "-")
            raise error(f"{option} is not there for several pods", remedy=f"leave out {option}")
    began = time.perf_counter()
    pods = lower_pods(options)
    result = _analysis(pods)
    compiled = time.perf_counter() - began
    written: list[Written] = []
    output: Path | None = given["output"]
    if output is not None and not given["dry_run"]:
        formats = formats_asked(given["format"], pods.builders[PREFILL].module.registry, given)
        about = {**_provenance(pods, options, given), "serving": result["handover"]}
        written = write_formats(lambda each: _job(pods, given, each), formats, output, about, given)
    if not given["quiet"]:
        _print(result, sys.stdout)
        if output is not None and written:
            wrote = time.perf_counter() - began - compiled
            tell_written(written, output, f"(compiled in {compiled:.2f} s, wrote in {wrote:.2f} s)")
    return 0


def _job(pods: Pods, given: Mapping[str, Any], format_: Format) -> PodsJob:
    from stagec.job.emit import make_job
    from stagec.job.pods import Pod, PodsJob
    from stagec.program.handover import peers

    name = given["name"] or pods.name
    ways = pods.crossings.values()
    far = {
        PREFILL: {DECODE: peers(ways, sends=True)},
        DECODE: {PREFILL: peers(ways, sends=False)},
    }
    how: tuple[Any, ...] = (None, given["names"], given["granularity"], None, format_)
    made = [Pod(p, make_job(pods.modules[p], name, *how), far[p]) for p in PODS]
    return PodsJob(name, made)


def _provenance(pods: Pods, options: JobOptions, given: Mapping[str, Any]) -> dict[str, object]:
    """What a manifest says of both pods."""
    from stagec.driver.provenance import provenance

    each = {p: provenance(pods.builders[p], pods.builders[p].strategy(), given) for p in PODS}
    same = each[PREFILL]
    command = shlex.join(["stagec", "compile", *job_words(options)])
    apart = {p: {n: each[p][n] for n in ("symbols", "strategy")} for p in PODS}
    return {**same, "command": command, **dict.fromkeys(("symbols", "strategy")), "pods": apart}


def _analysis(pods: Pods) -> dict[str, Any]:
    """What `analyze` says of each pod, and of what goes from one to the other."""
    from stagec.analysis.report import analysis

    each = {p: analysis(pods.modules[p], f"{pods.name} ({p})") for p in PODS}
    sent = [
        (c["count"] * row["count"], c["count"] * row["bytes"])
        for c in each[PREFILL]["classes"]
        for row in c["p2p"]
        if row["over"] == DECODE
    ]
    crossed = {"messages": sum(n for n, _ in sent), "bytes": sum(size for _, size in sent)}
    return {"schema": 1, "model": pods.name, "pods": each, "handover": crossed}


def _print(result: Mapping[str, Any], out: TextIO) -> None:
    from stagec.driver.tables import bytes_text, print_analysis

    for pod in PODS:
        print_analysis(result["pods"][pod], out)
    crossed = result["handover"]
    size = bytes_text(crossed["bytes"])
    out.write(f"From prefill to decode: {size} of caches in {crossed['messages']:,} messages\n")
