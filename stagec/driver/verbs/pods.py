"""`compile` and `analyze` of several pods, those of `--serve disaggregated`, `--part` or `--draft`:
each of them, and what goes from one to another."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stagec.driver.job.builder import model_name
from stagec.driver.job.planned import Planned
from stagec.driver.job.pod_options import pod_names
from stagec.driver.job.pods import Pods, lower_pods
from stagec.driver.job.verdict import verdict_on
from stagec.driver.output.report import Report
from stagec.driver.request.options import JobOptions
from stagec.driver.request.serving import DISAGGREGATED
from stagec.driver.verbs.compiled import CompileAnswer, times_text
from stagec.ir.serving import DECODE, PREFILL
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.analysis.memory_events import EventPlans
    from stagec.formats.base import Format
    from stagec.ir.opdef import Registry
    from stagec.time.costs.durations import Durations
    from stagec.traces.pods import PodsJob
    from stagec.traces.writer import Written

#: Options of `compile` and `analyze` that say nothing of several pods, and why.
_REFUSED: Mapping[str, tuple[str, str]] = {
    "steps": ("writes steps of one server", "leave it out: a job of pods is one step of each"),
    "requests": ("writes steps of one server", "leave it out: a job of pods is one step of each"),
    "symbolic": ("is of one mesh", "leave it out, or look at one pod as a job of its own"),
    "limit": ("is of one mesh", "leave it out, or look at one pod as a job of its own"),
}


@dataclass(frozen=True)
class PodsAnalysis(Report):
    """The counts of each pod, and of what goes from one to another."""

    data: Mapping[str, Any]

    @property
    def pods(self) -> Mapping[str, Mapping[str, Any]]:
        """The counts of each pod, as those of a job of one."""
        pods: Mapping[str, Mapping[str, Any]] = self.data["pods"]
        return pods

    def as_json(self) -> dict[str, Any]:
        return dict(self.data)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class of ranks of each pod."""
        each = self.pods.items()
        return [{"pod": pod, **dict(c)} for pod, found in each for c in found["classes"]]

    def print(self, stream: TextIO) -> None:
        _print(self.data, stream)


def analyze_pods(options: JobOptions, **given: Any) -> PodsAnalysis:
    """`analyze`: each pod, and what goes from one to another. Raises `DiagnosticError`."""
    _refuse(given)
    return PodsAnalysis(_analysis(options, _lowered(options)))


def compile_pods(
    options: JobOptions, given: Mapping[str, Any], durations: Durations | None
) -> CompileAnswer:
    """`compile`: the traces of all pods as one job. Raises `DiagnosticError`."""
    from stagec.analysis.footprint import peak_bytes
    from stagec.driver.job.written import (
        check_name,
        check_targets,
        formats_asked,
        write_formats,
        write_one_archive,
    )

    _refuse(given)
    began = time.perf_counter()
    formats = formats_asked(given["format"], _registry(options), given)
    _check_formats(formats)
    if given["tensor_names"]:
        formats = [each.with_options({"tensor-names": "true"}) for each in formats]
    output: Path | None = given["output"]
    if output is not None and not given["dry_run"]:
        check_targets(formats, output, given)
    name = given["name"] or model_name(options)
    check_name(name)
    events = given["memory_events"] or any(getattr(f, "tensor_names", False) for f in formats)
    plans = _event_plans(pod_names(options) if events else ())
    machine = durations.machine if durations is not None and given["machine"] else None
    peaks = {pod: Planned(peak_bytes) for pod in (pod_names(options) if machine else ())}
    pods = _lowered(options, plans, peaks)
    result = _analysis(options, pods)
    if machine is not None:
        for pod, found in result["pods"].items():
            found.update(verdict_on(machine, found["mesh"], peaks[pod].found))
    compiled = time.perf_counter() - began
    crossed = {"serving": result["handover"]} if "handover" in result else {}
    crossed |= {"crossings": result["crossings"]} if "crossings" in result else {}
    about = {**_provenance(pods, options, given), **crossed}
    job = _job(pods, name, given, durations, plans)
    written: list[Written] = []
    if output is not None and not given["dry_run"]:
        written = write_formats(job.as_format, formats, output, about, given)
    archive: Path | None = given["archive"]
    if archive is not None and not given["dry_run"]:
        write_one_archive(job.as_format(formats[0]), archive, about, quiet=given["quiet"])
    wrote = time.perf_counter() - began - compiled
    return CompileAnswer(
        result, PodsAnalysis(result).print, output, written, times_text(compiled, wrote)
    )


def _lowered(options: JobOptions, *plans: Mapping[str, Planned[Any]]) -> Pods:
    names = {pod for each in plans for pod in each}
    return lower_pods(options, {n: [each[n] for each in plans if n in each] for n in names})


def _refuse(given: Mapping[str, Any]) -> None:
    for name, (why, remedy) in _REFUSED.items():
        if given.get(name):
            option = "--" + name.replace("_", "-")
            raise error(f"{option} {why}, and the job has several pods", remedy=remedy)


def _check_formats(formats: Sequence[Format]) -> None:
    """Refuse formats of one mesh. Raises `DiagnosticError`."""
    from stagec.traces.pods import of_one_mesh

    for each in formats:
        if not each.pods:
            raise of_one_mesh(each)


def _registry(options: JobOptions) -> Registry:
    from stagec.pipeline.plugins import load_plugins

    return load_plugins(options.plugin).registry


def _event_plans(pods: Iterable[str]) -> Mapping[str, Planned[EventPlans]]:
    from stagec.analysis.memory_events import EventPlans

    return {pod: Planned(EventPlans) for pod in pods}


def _job(
    pods: Pods,
    name: str,
    given: Mapping[str, Any],
    durations: Durations | None,
    plans: Mapping[str, Planned[EventPlans]],
) -> PodsJob:
    from stagec.traces.emit import make_job
    from stagec.traces.pods import Pod, PodsJob

    machine = durations.machine if durations is not None else None
    measured = durations.measured if durations is not None else None
    each: list[Pod] = []
    for pod, module in pods.modules.items():
        annotate = plans[pod].needed("--memory-events").annotate if plans else None
        how = durations, given["names"], given["granularity"], annotate
        job = make_job(module, name, *how, machine=machine)
        job = replace(job, measured=measured, graphs=given["graphs"])
        each.append(Pod(pod, job, pods.far[pod]))
    return PodsJob(name, each)


def _provenance(pods: Pods, options: JobOptions, given: Mapping[str, Any]) -> dict[str, object]:
    """What a manifest says of all pods."""
    from stagec.driver.job.provenance import command_of, provenance

    each = {p: provenance(b, b.strategy(), given) for p, b in pods.builders.items()}
    apart = {p: {n: found[n] for n in ("symbols", "strategy")} for p, found in each.items()}
    alike = {"command": command_of(options, given), "symbols": None, "strategy": None}
    return {**next(iter(each.values())), **alike, "pods": apart}


def _analysis(options: JobOptions, pods: Pods) -> dict[str, Any]:
    """What `analyze` says of each pod, and of what goes from one to another."""
    from stagec.analysis.report import analysis

    names = {pod: f"{builder.model_name} ({pod})" for pod, builder in pods.builders.items()}
    each = {pod: analysis(module, names[pod]) for pod, module in pods.modules.items()}
    result: dict[str, Any] = {"schema": 1, "model": pods.name, "pods": each}
    if options.serve == DISAGGREGATED:
        result["handover"] = asdict(_sent(each[PREFILL], DECODE))
    if options.part or options.draft:
        ways = ((a, b, _sent(each[a], b)) for a in each for b in each if DECODE not in (a, b))
        sent = [{"source": a, "to": b, **asdict(sent)} for a, b, sent in ways if sent.messages]
        result["crossings"] = sent
    return result


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What goes from one pod to the other: messages and bytes of all ranks."""

    messages: int
    bytes: int


def _sent(pod: Mapping[str, Any], to: str) -> HandedOver:
    """What the ranks of a pod send to those of another one."""
    messages = total = 0
    for each in pod["classes"]:
        rows = [row for row in each["p2p"] if row["over"] == to and row["dir"] == "send"]
        messages += each["count"] * sum(row["count"] for row in rows)
        total += each["count"] * sum(row["bytes"] for row in rows)
    return HandedOver(messages, total)


def _print(result: Mapping[str, Any], out: TextIO) -> None:
    from stagec.driver.output.analysis_table import print_analysis
    from stagec.driver.output.tables import bytes_text

    for found in result["pods"].values():
        print_analysis(found, out)
    if "handover" in result:
        crossed = result["handover"]
        size, count = bytes_text(crossed["bytes"]), f"{crossed['messages']:,}"
        out.write(f"From prefill to decode: {size} of caches and tokens in {count} messages\n")
    for each in result.get("crossings", ()):
        size, count = bytes_text(each["bytes"]), f"{each['messages']:,}"
        out.write(f"From {each['source']} to {each['to']}: {size} in {count} messages\n")
