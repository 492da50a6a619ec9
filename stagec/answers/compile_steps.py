"""`stagec compile` of several steps of serving: from their list to traces and a summary."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from stagec.answers.compiled import CompileAnswer, times_text
from stagec.answers.time.table import TITLES, seconds_text, spreads_table
from stagec.formats.base import Format
from stagec.ir_spec.strategy.scheduler import SchedulerRule
from stagec.jobs.admission import Room, cache_room
from stagec.jobs.idle_flags import written_without_graphs
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import STEP
from stagec.jobs.request.steps import TICK
from stagec.jobs.serve_steps import StepList, StepsAsked, places
from stagec.jobs.session import Session
from stagec.jobs.step_modules import StepModules, step_times
from stagec.jobs.written import (
    check_name,
    check_targets,
    formats_asked,
    provenance,
    write_formats,
    write_one_archive,
)
from stagec.program.steps import Sequel, SteppedClass, stepped_classes
from stagec.serving.latency import latencies
from stagec.serving.requests import seconds_text as seconds_of
from stagec.serving.simulate import NANOSECOND
from stagec.serving.step import Step
from stagec.serving.step_times import SECOND
from stagec.serving.stepped import StepTime
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import Diagnostic, error
from stagec.time.costs.durations import Durations
from stagec.time.costs.replay_options import ReplayOptions
from stagec.traces.emit import EmittedJob

#: The number of first and last steps that are printed if there are many.
_SHOWN = 4


def compile_steps(
    options: JobOptions, given: Mapping[str, Any], durations: Durations | None, session: Session
) -> CompileAnswer:
    """Compile the requested steps and write their traces. Raises `DiagnosticError`."""
    began = time.perf_counter()
    modules = StepModules(options, session)
    builder = modules.builder
    strategy = builder.strategy()
    formats = formats_asked(given["format"], builder.module.registry, given)
    _refuse_one_step(formats)
    steps = _asked(options, given, session, modules, durations).steps()
    if not given["graphs"]:
        session.report(*_without_graphs(formats, given, modules, steps))
    if given["memory_events"] or given["tensor_names"]:
        raise error(
            "--memory-events and --tensor-names cannot be used with several steps",
            remedy="leave out --steps and --requests to write one step",
        )
    folder: Path | None = given["output"]
    if folder is not None and not given["dry_run"]:
        check_targets(formats, folder, given)
    job = _job(modules, _classes(modules, steps), given, durations)
    compiled = time.perf_counter() - began
    manifest = {"serving": steps.manifest()}
    summary = partial(print_steps, steps, modules.compiles)
    if given["dry_run"]:
        return CompileAnswer(manifest, summary)
    asked = {n: getattr(options, n) for n in ("serve", "microbatches", *STEP)}
    builder.options = builder.options.changed(**asked)  # those of the command, not of one step
    about = {**provenance(builder, strategy, given), **manifest}
    if given["archive"] is not None:
        archived = replace(job, format=formats[0])
        write_one_archive(archived, given["archive"], about, session, quiet=given["quiet"])
        return CompileAnswer(manifest, summary)
    output: Path = given["output"]
    written = write_formats(
        lambda each: replace(job, format=each), formats, output, about, given, session
    )
    wrote = time.perf_counter() - began - compiled
    return CompileAnswer(manifest, summary, output, written, times_text(compiled, wrote))


def _refuse_one_step(formats: Sequence[Format]) -> None:
    """Refuse formats that show the one step of a module. Raises `DiagnosticError`."""
    for each in formats:
        if "model" in each.needs:
            raise error(
                f"the format '{each.name}' has one step, --steps and --requests compile several",
                remedy="leave them out and choose a step with --step, or choose another format",
            )


def _without_graphs(
    formats: Sequence[Format], given: Mapping[str, Any], modules: StepModules, steps: StepList
) -> Iterator[Diagnostic]:
    """A warning of `--no-graphs` where no time of a step decides what runs, or no step is a
    graph."""
    timed = given["machine"] is not None and given["requests"] is not None
    issued = (modules.compiled(step.together()).issued[""] for step in steps.distinct)
    software = (job.software for each in issued for job in each.jobs)
    yield from written_without_graphs(formats, software, timed=timed)


def _asked(
    options: JobOptions,
    given: Mapping[str, Any],
    session: Session,
    modules: StepModules,
    durations: Durations | None,
) -> StepsAsked:
    if options.afd:
        raise error(
            "--afd cannot be used with several steps of a job: its microbatches take turns in one",
            remedy="leave it out, or compile one step with --step",
        )
    module = modules.builder.module
    strategy, mesh = read_strategy(module), module.mesh
    axis = strategy.pipeline.over if strategy.pipeline is not None else ""
    depth = (dict(mesh.sizes).get(axis) if mesh else None) or 1
    groups = modules.groups
    coupled = groups // len(modules.replicas) if given["requests"] is not None else groups
    tick, room, machine = given["tick"] or TICK, None, None
    times, clock = _ticks(tick, depth), {"tick_seconds": seconds_of(tick)}
    if given["machine"] is not None and durations is not None:
        machine = durations.machine
        room = partial(cache_room, [modules], machine)
        if given["tick"] is None:
            replay = ReplayOptions(graphs=given["graphs"], measured=durations.measured)
            times = step_times(modules, machine, replay, depth)
            clock = {"machine": str(given["machine"])}
    about = strategy.one(SchedulerRule), depth, groups, coupled, times, clock, room, machine
    return StepsAsked(options, given, session, modules, *about)


def _classes(modules: StepModules, steps: StepList) -> list[SteppedClass]:
    """The classes of ranks; each replica has its own steps."""
    alone: Sequence[Mapping[str, int]] = [{}]
    replicas = modules.replicas if len(steps.runs) > 1 else alone
    stepped: list[SteppedClass] = []
    for run, coords in zip(steps.runs, replicas, strict=True):
        distinct = places(run)
        sampled = [modules.local_groups * step.sampled for step in distinct]
        order = [distinct[each.step] for each in run]
        sequel = Sequel(order, [each.after for each in run], sampled)
        own = stepped_classes([modules.classes(step) for step in distinct], sequel)
        stepped += (replace(each, coords={**each.coords, **coords}) for each in own)
    return stepped


def _job(
    modules: StepModules,
    classes: Sequence[SteppedClass],
    given: Mapping[str, Any],
    durations: Durations | None,
) -> EmittedJob:
    name = given["name"] or modules.builder.model_name
    check_name(name)
    sizes = modules.builder.module.axis_sizes
    machine = durations.machine if durations is not None else None
    durations = durations.of(modules.builder.module) if durations is not None else None
    how = durations, given["names"], given["granularity"]
    return EmittedJob(name, classes, sizes, *how, machine=machine)


# -- tables ----------------------------------------------------------------------------------------


def print_steps(steps: StepList, compiles: int, stream: TextIO) -> None:
    """Print the composition of the first and the last steps, and the tokens of all."""
    from stagec.output.tables import console, table

    out = console(stream)
    count, distinct = sum(map(len, steps.runs)), len(steps.distinct)
    about = ", ".join(f"{name} {value}" for name, value in steps.about.items())
    out.print(f"{count:,} steps, {distinct:,} distinct, {compiles} compiled ({about})")
    replicas = len(steps.runs)
    title = "Steps" if replicas == 1 else f"Steps of the first of {replicas} replicas"
    shown = table(title, "step", "composition", "tokens", "sampled", text_columns=2)
    for number in _shown(len(steps.runs[0])):
        if number is None:
            shown.add_row("...", "", "", "")
            continue
        step = steps.runs[0][number].step
        shown.add_row(str(number), _text(step), f"{step.tokens:,}", f"{step.sampled:,}")
    out.print(shown)
    tokens = ", ".join(f"{n:,} of {kind}" for kind, n in sorted(steps.tokens.items()))
    whose = "each of the steps of one group of sequences"
    if steps.served:
        whose = f"of all {steps.groups} groups of ranks" if steps.groups > 1 else "in all"
    out.print(f"Tokens: {tokens}; {steps.sampled:,} sampled; {whose}")
    if steps.room is not None:
        out.print(_room(steps.room, int(str(steps.about["block"]))))
    if steps.served:
        print_times(steps, out)


def print_times(steps: StepList, out: Console) -> None:
    """Print the latencies of requests, and tokens per second of a group."""

    spreads = latencies(steps.served).items()
    out.print(spreads_table({TITLES[name]: spread.as_json() for name, spread in spreads}))
    tokens = sum(job.request.output for job in steps.served)
    seconds = max(run[-1].end for run in steps.runs) / SECOND
    out.print(
        f"{len(steps.served):,} requests with {tokens:,} output tokens in "
        f"{seconds_text(seconds)}: {tokens / seconds:,.1f} tokens/s"
    )


def _room(room: Room, block: int) -> str:
    """A sentence about the memory of a rank: used without caches, and left for them."""
    from stagec.output.tables import bytes_text

    return (
        f"Memory of a rank: weights and the activations of the largest step take "
        f"{bytes_text(room.taken)} of {bytes_text(room.room)}; the rest is {room.blocks:,} blocks "
        f"of {block} tokens of a group"
    )


def _shown(count: int) -> list[int | None]:
    if count <= 2 * _SHOWN + 1:
        return list(range(count))
    return [*range(_SHOWN), None, *range(count - _SHOWN, count)]


def _text(step: Step) -> str:
    """The classes of a step; if there are many, the first ones and the number of others."""
    texts = [str(c) for c in step.classes]
    if len(texts) <= _SHOWN + 1:
        return " ".join(texts)
    return " ".join([*texts[:_SHOWN], f"and {len(texts) - _SHOWN} more classes"])


def _ticks(tick: int, depth: int) -> StepTime:
    """Steps of `tick` nanoseconds on each of `depth` pipeline stages."""
    times = depth * tick * NANOSECOND, tick * NANOSECOND
    return lambda step: times
