"""From a model and a strategy to one execution trace per rank, or to an archive."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.driver.job.builder import JobBuilder
from stagec.driver.job.planned import Planned
from stagec.driver.job.pod_options import has_pods
from stagec.driver.job.pods import strategy_of
from stagec.driver.job.provenance import provenance
from stagec.driver.job.verdict import verdict_on
from stagec.driver.job.written import (
    check_name,
    check_targets,
    formats_asked,
    write_formats,
    write_one_archive,
)
from stagec.driver.request.emission import EMISSION
from stagec.driver.request.machine import GRAPHS, USED_RANKS, machine_of
from stagec.driver.request.measurements import MEASURED, measurements
from stagec.driver.request.option import File, OneOf, Option, Text, switch
from stagec.driver.request.options import JobOptions
from stagec.driver.request.rates import rate_options, rated_machine
from stagec.driver.request.steps import STEPS, has_steps
from stagec.driver.request.units import on_machine
from stagec.driver.verbs.analyze import JobAnalysis
from stagec.driver.verbs.compiled import CompileAnswer, times_text
from stagec.driver.verbs.pods import compile_pods
from stagec.formats.registry import BUILTIN
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.analysis.model_flops import ModelFlops
    from stagec.formats.base import Format
    from stagec.ir.module import Module
    from stagec.pipeline.instrument import Hooks
    from stagec.time.costs.durations import Durations
    from stagec.traces.emit import Annotate, EmittedJob
    from stagec.traces.writer import Written

#: The options of a compile, beside those of its job.
COMPILE = (
    Option(
        "output",
        File(),
        "The folder to write (it must be new or empty).",
        metavar="DIR",
        spelling="-o --output",
    ),
    Option(
        "granularity",
        OneOf(["op", "block", "layer"]),
        "One node for each op, each matrix product and what follows it, or as much of a "
        "layer as communication lets be one. FLOPs and bytes of a merged node are sums, and a cost "
        "model over sums is too fast: with --machine its duration is the sum of its parts'.",
        "op",
        rare=True,
    ),
    Option(
        "format",
        Text(),
        f"Format of the files: {', '.join(BUILTIN)} (default: chakra), or one of a plug-in, "
        "with options as NAME{option=value}. Several formats get a folder each, DIR/NAME.",
        "chakra",
        metavar="NAME[,NAME]",
    ),
    Option(
        "names",
        OneOf(["full", "short", "none", "chakra"]),
        "Names of nodes: with phase, microbatch and layer, without, none (smaller files), or "
        "full ones after the type of their record (chakra), for Chakra's timeline tool.",
        "full",
        rare=True,
    ),
    switch(
        "memory_events",
        "Say of every node how many bytes it adds while it runs, and gives back at its end.",
        rare=True,
    ),
    switch(
        "tensor_names",
        "Name the tensors that every node reads and writes, with their bytes: what "
        "ASTRA-sim's replay of memory wants. Says what --memory-events does, too.",
        rare=True,
    ),
    Option(
        "archive",
        File(),
        "Write one compact file instead, for stagec materialize and check.",
        metavar="FILE",
    ),
    *EMISSION,
    *STEPS,
    Option("name", Text(), "Name of the files (default: the model's).", metavar="NAME"),
    switch("dry_run", "Compile and print the summary, write nothing."),
    Option(
        "machine",
        Text("machines"),
        "Write durations of computations on this machine, see 'stagec machines'.",
        metavar="NAME|FILE",
    ),
    GRAPHS,
    USED_RANKS,
    *MEASURED,
    *rate_options("the machine is a roofline"),
)


def strategy_to_compile(options: JobOptions, given: Mapping[str, Any]) -> str:
    """The text of mesh and strategy of a job, also of one of many steps. Raises
    `DiagnosticError`."""
    if has_steps(options, given) and not has_pods(options):
        from stagec.driver.job.step_modules import StepModules

        return StepModules(options).builder.strategy()
    return strategy_of(options)


def compile_job(options: JobOptions, given: Mapping[str, Any]) -> CompileAnswer:
    """Compile a job and write its traces, as `given` says: the values of `COMPILE`. Raises
    `DiagnosticError`, before anything is written."""
    if given["machine"] is not None:
        options = on_machine(options, machine_of(given["machine"], given["used_ranks"]))
    _check_outputs(given["output"], given["archive"], given)
    if has_pods(options):
        return compile_pods(options, given, _durations(given))
    if has_steps(options, given):
        from stagec.driver.verbs.compile_steps import compile_steps

        return compile_steps(options, given, _durations(given))
    return _compile_one(options, given)


def _compile_one(options: JobOptions, given: Mapping[str, Any]) -> CompileAnswer:
    """Compile one step, of training or of serving."""
    output: Path | None = given["output"]
    archive: Path | None = given["archive"]
    durations = _durations(given)
    began = time.perf_counter()
    builder = JobBuilder(options)
    strategy = builder.strategy()
    from stagec.analysis.footprint import peak_bytes
    from stagec.analysis.model_flops import model_flops
    from stagec.pipeline.instrument import STATED

    formats = formats_asked(given["format"], builder.module.registry, given)
    if given["tensor_names"]:
        formats = [each.with_options({"tensor-names": "true"}) for each in formats]
    events = given["memory_events"] or any(getattr(f, "tensor_names", False) for f in formats)
    if output is not None and not given["dry_run"]:
        check_targets(formats, output, given)
    flops = Planned(model_flops, *STATED)
    watching: list[Hooks] = [flops] if any(each.wants_flops for each in formats) else []
    peak = Planned(peak_bytes)
    watching += [peak] if given["machine"] is not None else []
    module, annotate = _lower(builder, watching, memory_events=events)
    from stagec.analysis.report import analysis

    result = analysis(module, builder.model_name)
    if durations is not None and given["machine"] is not None:
        result |= verdict_on(durations.machine, result["mesh"], peak.found)
    compiled = time.perf_counter() - began
    written: list[Written] = []
    if not given["dry_run"]:
        job = _job(builder, given, durations, annotate, formats[0])
        job = replace(job, flops=_step_flops(flops.found, module))
        about = provenance(builder, strategy, given)
        if output is not None:
            written = write_formats(
                lambda each: replace(job, format=each), formats, output, about, given
            )
        if archive is not None:
            write_one_archive(job, archive, about, quiet=given["quiet"])
    wrote = time.perf_counter() - began - compiled
    return CompileAnswer(
        result, JobAnalysis(result).print, output, written, times_text(compiled, wrote)
    )


def _check_outputs(output: Path | None, archive: Path | None, given: Mapping[str, Any]) -> None:
    if output is not None and archive is not None:
        raise error(
            "--output and --archive are two places",
            remedy="give a folder, -o DIR, or --archive FILE",
        )
    if (output or archive) is None and not given["dry_run"]:
        raise error(
            "a compile needs a folder for the traces",
            remedy="give -o DIR (or --archive FILE, or --dry-run)",
        )
    if archive is not None:
        check_archive_options(given)


def check_archive_options(given: Mapping[str, Any]) -> None:
    """Refuse what an archive has no use for, and a file that is there. Raises `DiagnosticError`."""
    path: Path = given["archive"]
    if given["only_ranks"] is not None or given["resume"] or given["scheduler"] is not None:
        raise error(
            "an archive holds all ranks and is written at once",
            remedy="leave out --only-ranks, --resume and --scheduler; stagec materialize has them",
        )
    if path.is_dir():
        raise error(f"'{path}' is a folder, expected a file", remedy="choose another --archive")
    if path.exists() and not given["force"]:
        raise error(
            f"'{path}' is there already", remedy="choose another --archive, or give --force"
        )


def _lower(
    builder: JobBuilder, watching: Sequence[Hooks], *, memory_events: bool
) -> tuple[Module, Annotate | None]:
    """The lowered module, and what adds memory events to its programs."""
    if not memory_events:
        return builder.lower(watching=watching), None
    from stagec.analysis.memory_events import EventPlans

    plans = Planned(EventPlans)
    return builder.lower(watching=[*watching, plans]), plans.needed("--memory-events").annotate


def _step_flops(flops: ModelFlops | None, module: Module) -> int | None:
    """FLOPs of a step by the model's text, of all ranks."""
    from stagec.analysis.model_flops import step_flops
    from stagec.ir.expr import evaluate

    return None if flops is None else evaluate(step_flops(flops, module.graphs), module.env)


def _durations(given: Mapping[str, Any]) -> Durations | None:
    """The times of computations on the machine that is asked for. Raises `DiagnosticError`."""
    machine = rated_machine(given)
    if given["machine"] is not None:
        if machine is not None:
            raise error(
                "--machine and --peak-tflops both say how fast a device is",
                remedy="give a machine, or two rates",
            )
        machine = machine_of(given["machine"], given["used_ranks"])
    if machine is None:
        if given["measured"] or given["kernels_from"]:
            raise error("measured times need a machine", remedy="add --machine h100-sxm")
        return None
    from stagec.time.costs.durations import Durations

    return Durations(machine, measurements(given["measured"], given["kernels_from"], machine))


def _job(
    builder: JobBuilder,
    given: Mapping[str, Any],
    durations: Durations | None,
    annotate: Annotate | None,
    format_: Format,
) -> EmittedJob:
    from stagec.traces.emit import make_job

    name = given["name"] or builder.model_name
    check_name(name)
    how = durations, given["names"], given["granularity"], annotate
    machine = durations.machine if durations is not None else None
    measured = durations.measured if durations is not None else None
    job = make_job(builder.module, name, *how, format_, machine)
    return replace(job, measured=measured, graphs=given["graphs"])
