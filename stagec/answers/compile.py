"""From a model and a strategy to one execution trace per rank, or to an archive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.answers.analyze import JobAnalysis, analysis_of, verdict_on
from stagec.answers.compiled import CompileAnswer, times_text
from stagec.formats.base import Format
from stagec.formats.registry import BUILTIN
from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.jobs.idle_flags import unscheduled, written_without_graphs
from stagec.jobs.planned import Looks, Planned
from stagec.jobs.pod_options import has_pods
from stagec.jobs.pods import Pods
from stagec.jobs.request.emission import EMISSION
from stagec.jobs.request.machine import (
    GRAPHS,
    USED_RANKS,
    machine_of,
    on_machine,
    own_machine,
    rate_options,
    rated_machine,
)
from stagec.jobs.request.measurements import MEASURED, measurements
from stagec.jobs.request.option import AnyText, CommandOption, File, OneOf, rare_option, switch
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.steps import STEPS, has_steps
from stagec.jobs.session import Session
from stagec.jobs.written import (
    check_name,
    check_targets,
    command_of,
    formats_asked,
    provenance,
    write_formats,
    write_one_archive,
)
from stagec.support.diagnostics import Diagnostic, error

if TYPE_CHECKING:
    from stagec.analysis.memory_events import EventPlans
    from stagec.analysis.model_flops import ModelFlops
    from stagec.time.costs.durations import Durations
    from stagec.traces.emit import EmittedJob
    from stagec.traces.pod_programs import PodsJob
    from stagec.traces.writer import Written

#: The options of `stagec compile` in addition to those of its job.
COMPILE = (
    CommandOption(
        "output",
        File(),
        "The folder to write (it must be new or empty).",
        metavar="DIR",
        spelling="-o --output",
    ),
    rare_option(
        "granularity",
        OneOf(["op", "block", "layer"]),
        "One node for each op, for each matrix product with what follows it, or for as much of a "
        "layer as communication allows. A merged node has the sum of FLOPs and bytes, for which "
        "a cost model is too fast; with --machine it also has the sum of durations.",
        "op",
    ),
    CommandOption(
        "format",
        AnyText(),
        f"Format of the files: {', '.join(BUILTIN)} (default: chakra), or one of a plug-in, "
        "with options as NAME{option=value}. Several formats get a folder each, DIR/NAME.",
        "chakra",
        metavar="NAME[,NAME]",
    ),
    rare_option(
        "names",
        OneOf(["full", "short", "none", "chakra"]),
        "Names of nodes: with phase, microbatch and layer; without them; none (smaller files); "
        "or full names after the type of the record (chakra), for Chakra's timeline tool.",
        "full",
    ),
    switch(
        "memory_events",
        "Write for every node how many bytes it adds while it runs, and frees at its end.",
        rare=True,
    ),
    switch(
        "tensor_names",
        "Name the tensors that every node reads and writes, with their bytes, for ASTRA-sim's "
        "replay of memory. Includes --memory-events.",
        rare=True,
    ),
    CommandOption(
        "archive",
        File(),
        "Write one compact file instead, for stagec materialize and check.",
        metavar="FILE",
    ),
    *EMISSION,
    *STEPS,
    CommandOption("name", AnyText(), "Name of the files (default: the model's).", metavar="NAME"),
    switch("dry_run", "Compile and print the summary, write nothing."),
    CommandOption(
        "machine",
        AnyText("machines"),
        "Write durations of computations on this machine, see 'stagec machines'.",
        metavar="NAME|FILE",
    ),
    GRAPHS,
    USED_RANKS,
    *MEASURED,
    *rate_options("the machine is a roofline"),
)


def strategy_to_compile(options: JobOptions, given: Mapping[str, Any], session: Session) -> str:
    """The text of the mesh and strategy of a job, of one step or many. Raises
    `DiagnosticError`."""
    if has_steps(options, given) and not has_pods(options):
        from stagec.jobs.step_modules import StepModules

        return StepModules(options, session).builder.strategy()
    return Pods.of(options, session).strategy()


def compile_job(options: JobOptions, given: Mapping[str, Any], session: Session) -> CompileAnswer:
    """Compile a job and write its traces; `given` has the values of `COMPILE`. Raises
    `DiagnosticError` before anything is written."""
    if given["machine"] is not None:
        options = on_machine(options, machine_of(given["machine"], session, given["used_ranks"]))
    _check_outputs(given["output"], given["archive"], given)
    if has_pods(options):
        _refuse_steps(given)
    if has_steps(options, given):
        from stagec.answers.compile_steps import compile_steps

        return compile_steps(options, given, _durations(given, session), session)
    return _compile_step(options, given, session)


def _compile_step(options: JobOptions, given: Mapping[str, Any], session: Session) -> CompileAnswer:
    """Compile one step of all pods, of training or of serving, and write their traces as one
    job."""
    output: Path | None = None if given["dry_run"] else given["output"]
    archive: Path | None = None if given["dry_run"] else given["archive"]
    session.report(*unscheduled(options))
    durations = _durations(given, session)
    began = time.perf_counter()
    pods = Pods.of(options, session)
    strategies = {pod: builder.strategy() for pod, builder in pods.builders.items()}
    if not pods.several:
        strategies = {pod: pods.strategy() for pod in pods.builders}
    name = given["name"] or pods.name
    check_name(name)
    from stagec.analysis.report import analysis

    formats = formats_asked(given["format"], pods.first.module.registry, given)
    _check_formats(formats, pods)
    if given["tensor_names"]:
        formats = [each.with_options({"tensor-names": "true"}) for each in formats]
    if output is not None:
        check_targets(formats, output, given)
    events = given["memory_events"] or any(getattr(f, "tensor_names", False) for f in formats)
    flops, looks = any(f.wants_flops for f in formats), {pod: Looks() for pod in pods.every}
    asked = {"flops": flops, "peak": given["machine"] is not None, "events": events}
    pods = pods.lower({pod: look.watching(**asked) for pod, look in looks.items()})
    for pod in pods.builders if events else ():
        looks[pod].events.needed("--memory-events")
    session.report(*_without_graphs(given, formats, pods))
    session.remark(*(() if given["quiet"] else _without_hosts(pods)))
    each = {pod: analysis(module, pods.titles[pod]) for pod, module in pods.modules.items()}
    if durations is not None and given["machine"] is not None:
        for pod, counts in each.items():
            peak = looks[pod].peak.result
            own = own_machine(pods.builders[pod].options, durations.machine)
            counts.update(verdict_on(own, counts["mesh"], peak, session))
    result = analysis_of(options, each, each)
    compiled = time.perf_counter() - began
    written: list[Written] = []
    if output is not None or archive is not None:
        about = _about(pods, strategies, options, given, result)
        jobs = {
            pod: _job(module, name, given, durations, pods.flops([pod], looks), looks[pod].events)
            for pod, module in pods.modules.items()
        }
        if output is not None:
            written = write_formats(_as_format(jobs, pods), formats, output, about, given, session)
        if archive is not None:
            job = _as_format(jobs, pods)(formats[0])
            write_one_archive(job, archive, about, session, quiet=given["quiet"])
    wrote = time.perf_counter() - began - compiled
    times = times_text(compiled, wrote)
    return CompileAnswer(result.as_json(), result.print, given["output"], written, times)


def _check_formats(formats: Sequence[Format], pods: Pods) -> None:
    """Refuse formats that support a single mesh for several pods. Raises `DiagnosticError`."""
    from stagec.traces.pod_programs import of_one_mesh

    for each in formats:
        if pods.several and not each.pods:
            raise of_one_mesh(each)


def _about(
    pods: Pods,
    strategies: Mapping[str, str],
    options: JobOptions,
    given: Mapping[str, Any],
    result: JobAnalysis,
) -> dict[str, object]:
    """The entries of the manifest about the origin of the traces."""
    each = {p: provenance(b, strategies[p], given) for p, b in pods.builders.items()}
    first = next(iter(each.values()))
    if not pods.several:
        return first
    by_pod = {p: {n: manifest[n] for n in ("symbols", "strategy")} for p, manifest in each.items()}
    shared = {"command": command_of(options, given), "symbols": None, "strategy": None}
    names = {"handover": "serving", "crossings": "crossings"}
    crossed = {names[n]: result.data[n] for n in names if n in result.data}
    return {**first, **shared, "pods": by_pod, **crossed}


def _without_graphs(
    given: Mapping[str, Any], formats: Sequence[Format], pods: Pods
) -> Iterator[Diagnostic]:
    """A warning of `--no-graphs` where no file has the time of the step, or the step no graph."""
    if not given["graphs"]:
        from stagec.time.costs.software import Software

        software = (Software.of(module) for module in pods.modules.values())
        yield from written_without_graphs(formats, software)


def _without_hosts(pods: Pods) -> Iterator[str]:
    """A remark on the time of hosts behind a step, which no node has."""
    from stagec.answers.time.table import seconds_text
    from stagec.time.costs.software import Software

    each = (Software.of(module).waiting_seconds(inf) for module in pods.modules.values())
    if longest := max(each):
        yield (
            f"files end with the last node of a step: they do not have the {seconds_text(longest)} "
            "for which devices then wait for hosts, and which 'stagec time' counts"
        )


def _refuse_steps(given: Mapping[str, Any]) -> None:
    """Refuse sequences of steps for several pods: the composition of a step of one pod depends on
    the time at which another one ends. Raises `DiagnosticError`."""
    for name in ("steps", "requests"):
        if given[name]:
            raise error(
                f"--{name} compiles steps of one server, but the job has several pods",
                remedy="leave it out: a job of several pods compiles one step of each",
            )


def _check_outputs(output: Path | None, archive: Path | None, given: Mapping[str, Any]) -> None:
    if output is not None and archive is not None:
        raise error(
            "--output and --archive cannot be used together",
            remedy="give -o DIR to write a folder, or --archive FILE to write one file",
        )
    if (output or archive) is None and not given["dry_run"]:
        raise error(
            "no output is given for the traces",
            remedy="give -o DIR, --archive FILE, or --dry-run to write nothing",
        )
    if archive is not None:
        check_archive_options(given)


def check_archive_options(given: Mapping[str, Any]) -> None:
    """Refuse options that do not apply to an archive, and an existing file. Raises
    `DiagnosticError`."""
    path: Path = given["archive"]
    if given["only_ranks"] is not None or given["resume"] or given["scheduler"] is not None:
        raise error(
            "--archive cannot be used with --only-ranks, --resume or --scheduler: an archive has "
            "all ranks and is written in one run",
            remedy="leave these options out, and give them to 'stagec materialize'",
        )
    if path.is_dir():
        raise error(f"'{path}' is a folder, expected a file", remedy="choose another --archive")
    if path.exists() and not given["force"]:
        raise error(
            f"'{path}' already exists",
            remedy="choose another --archive, or add --force to replace the file",
        )


def _step_flops(flops: ModelFlops | None, module: Module) -> int | None:
    """FLOPs of a step by the model's text, over all ranks."""
    from stagec.analysis.model_flops import step_flops

    return None if flops is None else evaluate(step_flops(flops, module.graphs), module.env)


def _durations(given: Mapping[str, Any], session: Session) -> Durations | None:
    """The times of computations on the chosen machine; None without one. Raises
    `DiagnosticError`."""
    machine = rated_machine(given)
    if given["machine"] is not None:
        if machine is not None:
            raise error(
                "--machine and --peak-tflops cannot be used together: both give the speed of a "
                "device",
                remedy="give --machine, or --peak-tflops and --memory-gbps",
            )
        machine = machine_of(given["machine"], session, given["used_ranks"])
    if machine is None:
        if given["measured"] or given["kernels_from"]:
            raise error(
                "--measured and --kernels-from need --machine", remedy="add --machine h100-sxm"
            )
        return None
    from stagec.time.costs.durations import Durations

    return Durations(machine, measurements(given["measured"], given["kernels_from"], machine))


def _job(
    module: Module,
    name: str,
    given: Mapping[str, Any],
    durations: Durations | None,
    flops: ModelFlops | None,
    events: Planned[EventPlans],
) -> EmittedJob:
    from stagec.traces.emit import make_job

    annotate = None if events.result is None else events.result.annotate
    durations = durations.of(module) if durations is not None else None
    how = durations, given["names"], given["granularity"], annotate
    machine = durations.machine if durations is not None else None
    measured = durations.measured if durations is not None else None
    job = make_job(module, name, *how, machine=machine)
    count = _step_flops(flops, module)
    return replace(job, measured=measured, graphs=given["graphs"], flops=count)


def _as_format(
    jobs: Mapping[str, EmittedJob], pods: Pods
) -> Callable[[Format], EmittedJob | PodsJob]:
    """A function from a format to the job of all pods in it."""
    from stagec.traces.pod_programs import Pod, PodsJob

    first = next(iter(jobs.values()))
    if not pods.several:
        return lambda each: replace(first, format=each)
    return PodsJob(
        first.name, [Pod(p, job, pods.peers_in_other_pod[p]) for p, job in jobs.items()]
    ).as_format
