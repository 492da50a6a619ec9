"""`stagec scale`: from the traces of a small job to those of one with more replicas."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from stagec.driver.emission import emission_options
from stagec.driver.machine import MachineType
from stagec.driver.options import Sizes
from stagec.driver.written import formats_asked, tell_written, write_formats
from stagec.support.diagnostics import Diagnostic, DiagnosticError, error

if TYPE_CHECKING:
    from stagec.job.recorded import Recording


@click.command("scale")
@click.argument("traces", metavar="DIR", type=Path)
@click.option(
    "--from",
    "old",
    type=Sizes(),
    metavar="AXIS=N,...",
    help="The mesh of the traces, the axis of neighbouring ranks last (default: the manifest's).",
)
@click.option(
    "--to", "new", type=Sizes(), metavar="AXIS=N,...", required=True, help="The mesh to write."
)
@click.option(
    "-o", "--output", type=Path, metavar="DIR", required=True, help="The folder to write."
)
@click.option("--format", default="chakra", metavar="NAME[,NAME]", help="Formats of the files.")
@click.option("--machine", type=MachineType(), help="The machine that a format describes.")
@emission_options
@click.option("--plugin", multiple=True, type=Path, metavar="FILE", help="Load a plug-in file.")
def command(traces: Path, output: Path, **given: Any) -> int:
    """Extend the traces of a job to more ranks along axes that replicate, such as data parallelism.

    Every rank keeps its program and its batch, so the batch of the job grows. What compile would
    write for the larger job is written, byte for byte, or refused with the reason.
    """
    from dataclasses import replace

    from stagec.job.recorded import scaled
    from stagec.pipeline.plugins import load_plugins

    if given["scheduler"] is not None:
        raise error("traces are scaled by processes here", remedy="drop --scheduler")
    registry = load_plugins(given["plugin"]).registry
    formats = formats_asked(given["format"], registry, given)
    began = time.perf_counter()
    job = scaled(_recording(traces, given["old"]), given["new"])
    about = {"scaled_from": {"traces": str(traces), "mesh": dict(job.recording.mesh)}}
    written = write_formats(
        lambda each: replace(job, format=each, machine=given["machine"]),
        formats,
        output,
        about,
        given,
    )
    if not given["quiet"]:
        tell_written(written, output, f"in {time.perf_counter() - began:.2f} s")
    return 0


def _recording(folder: Path, mesh: Mapping[str, int] | None) -> Recording:
    """The traces of a folder. Raises `DiagnosticError`."""
    from stagec.check.files import discover, read_groups
    from stagec.check.findings import CheckReport
    from stagec.job.recorded import Recording

    report = CheckReport()
    name, paths = discover(folder, report)
    groups = read_groups(folder, name, report)
    if report.errors:
        raise DiagnosticError(
            *(Diagnostic(f"{f.path}: {f.message}", remedy=f.remedy) for f in report.errors)
        )
    manifest = _manifest(folder)
    if mesh is None:
        found: Any = manifest.get("mesh")
        if not isinstance(found, dict) or not all(
            type(n) is int and n > 0 for n in cast("dict[str, object]", found).values()
        ):
            raise error(
                f"'{folder}' has no manifest that says its mesh",
                remedy="give it, the axis of neighbouring ranks last: --from dp=2,tp=4",
            )
        mesh = cast("dict[str, int]", found)
    members = dict(groups.members) if groups is not None else dict[int, tuple[int, ...]]()
    return Recording(name, paths, members, mesh, _entries(manifest, mesh))


def _manifest(folder: Path) -> Mapping[str, Any]:
    from stagec.job.folder import MANIFEST

    try:
        found: Any = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _entries(manifest: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[int, Mapping[str, Any]]:
    """What the manifest says of each rank's class."""
    from stagec.job.recorded import coordinates

    found: dict[int, Mapping[str, Any]] = {}
    classes: Any = manifest.get("classes")
    for entry in filter(_is_object, classes if _is_list(classes) else ()):
        if not _is_object(entry.get("coords")):
            continue
        for rank in range(prod(mesh.values())):
            if entry["coords"].items() <= coordinates(mesh, rank).items():
                found[rank] = entry
    return found


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
