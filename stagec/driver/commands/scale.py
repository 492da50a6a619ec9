"""`stagec scale`: the traces of a job with more replicas from those of a small job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagec.driver.shell.click_options import takes
from stagec.driver.shell.options import take_machine
from stagec.driver.shell.session import the_session
from stagec.formats.base import Format
from stagec.ir.opdef import Registry
from stagec.ir_spec.strategy.pipeline import PipelineRule
from stagec.jobs.request.emission import EMISSION
from stagec.jobs.request.machine import machine_options
from stagec.jobs.request.option import PLUGIN, CommandOption, SizesType
from stagec.jobs.written import formats_asked, log_written, write_formats
from stagec.pipeline.plugins import load_plugins
from stagec.schedule.attached import schedule_of
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import error
from stagec.support.json_values import is_list, is_object, object_in
from stagec.support.source import Source
from stagec.text.build import parse_module

if TYPE_CHECKING:
    from stagec.traces.recorded import Microbatches, RecordedJob, Recording


@click.command("scale")
@click.argument("traces", metavar="DIR", type=Path)
@takes(
    CommandOption(
        "old",
        SizesType(),
        "The mesh of the traces, the axis of neighbouring ranks last (default: the manifest's).",
        metavar="AXIS=N,...",
        spelling="--from",
    ),
    CommandOption(
        "new",
        SizesType(),
        "The mesh to write (default: that of the traces).",
        metavar="AXIS=N,...",
        spelling="--to",
    ),
)
@click.option(
    "--microbatches",
    type=click.IntRange(min=1),
    metavar="N",
    help="Microbatches of each rank to write, as large as the recorded ones (default: the "
    "recorded number).",
)
@click.option(
    "--schedule",
    metavar="NAME",
    help="The pipeline schedule of the traces (default: the manifest's).",
)
@click.option(
    "-o", "--output", type=Path, metavar="DIR", required=True, help="The folder to write."
)
@click.option("--format", default="chakra", metavar="NAME[,NAME]", help="Formats of the files.")
@takes(*machine_options("The machine that a format describes."), *EMISSION, PLUGIN)
def command(traces: Path, output: Path, **given: Any) -> int:
    """Extend the traces of a job to more ranks along axes that replicate, such as data parallelism,
    and to more microbatches.

    Every rank keeps its program, and its batch or the size of its microbatches, so the batch of the
    job grows. The files are those of 'stagec compile' for the larger job, byte for byte; if that is
    not possible, the error says why.
    """
    from dataclasses import replace

    from stagec.traces.recorded import scaled

    given["machine"] = take_machine(given)
    if given["scheduler"] is not None:
        raise error(
            "'stagec scale' does not take --scheduler: it works in local processes",
            remedy="leave --scheduler out",
        )
    if given["new"] is None and given["microbatches"] is None:
        raise error(
            "neither --to nor --microbatches is given, so nothing would be scaled",
            remedy="give the mesh to write, --to dp=8,tp=4, or --microbatches 16",
        )
    registry = load_plugins(given["plugin"]).registry
    formats = formats_asked(given["format"], registry, given)
    began = time.perf_counter()
    recording, manifest = _recording(traces, given["old"])
    more = _microbatches(given["microbatches"], given["schedule"], recording, manifest, registry)
    job = scaled(recording, given["new"] or recording.mesh, more)
    about = {"scaled_from": {"traces": str(traces), "mesh": dict(job.recording.mesh)}}
    job = replace(job, machine=given["machine"])

    def in_format(each: Format) -> RecordedJob:
        return replace(job, format=each)

    written = write_formats(in_format, formats, output, about, given, the_session())
    if not given["quiet"]:
        log_written(written, output, f"in {time.perf_counter() - began:.2f} s", the_session())
    return 0


def _recording(folder: Path, mesh: Mapping[str, int] | None) -> tuple[Recording, Mapping[str, Any]]:
    """The traces of a folder, and its manifest, empty if there is none. Raises
    `DiagnosticError`."""
    from stagec.check.findings import CheckReport
    from stagec.check.trace_files import discover, read_groups
    from stagec.traces.folder import MANIFEST
    from stagec.traces.recorded import Recording

    report = CheckReport()
    name, paths = discover(folder, report)
    groups = read_groups(folder, name, report) if paths else None
    if report.errors:
        raise report.as_error()
    manifest = object_in(folder / MANIFEST)
    if mesh is None:
        mesh = manifest.get("mesh")
        if not is_object(mesh) or not all(type(n) is int and n > 0 for n in mesh.values()):
            raise error(
                f"'{folder}' has no manifest with the mesh of its traces",
                remedy="give the mesh, with the axis of adjacent ranks last: --from dp=2,tp=4",
            )
    members = dict(groups.members) if groups is not None else dict[int, tuple[int, ...]]()
    return Recording(name, paths, members, mesh, _entries(manifest, mesh)), manifest


def _microbatches(
    count: int | None,
    schedule: str | None,
    recording: Recording,
    manifest: Mapping[str, Any],
    registry: Registry,
) -> Microbatches | None:
    """The requested microbatches; None if they stay. Raises `DiagnosticError`."""
    from stagec.traces.recorded import Microbatches
    from stagec.traces.turns import Pipelining

    if count is None:
        if schedule is not None:
            raise error("--schedule needs --microbatches", remedy="add --microbatches N")
        return None
    rule = _pipeline(manifest, registry)
    if rule is None and schedule is None:
        return Microbatches(count)
    axis = rule.over if rule is not None else "pp"
    if axis not in recording.mesh:
        raise error(
            f"the mesh of the traces has no axis '{axis}' for pipeline stages",
            remedy="name the axis of the stages 'pp': --from pp=2,dp=4",
        )
    name = schedule or (rule.schedule if rule is not None else "")
    return Microbatches(count, Pipelining(axis, schedule_of(registry, name)))


def _pipeline(manifest: Mapping[str, Any], registry: Registry) -> PipelineRule | None:
    """The pipeline rule of the strategy in a manifest; None without one. Raises
    `DiagnosticError`."""

    text = manifest.get("strategy")
    if not isinstance(text, str) or not text:
        return None
    return read_strategy(
        parse_module(Source("the strategy in the manifest", text), registry)
    ).pipeline


def _entries(manifest: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[int, Mapping[str, Any]]:
    """The entry of the class of each rank in the manifest."""
    from stagec.traces.recorded import coordinates

    entries: dict[int, Mapping[str, Any]] = {}
    classes = manifest.get("classes")
    for entry in filter(is_object, classes if is_list(classes) else ()):
        if not is_object(entry.get("coords")):
            continue
        for rank in range(prod(mesh.values())):
            if entry["coords"].items() <= coordinates(mesh, rank).items():
                entries[rank] = entry
    return entries
