"""`stagec materialize`: the traces of any ranks from an archive."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagec.driver.shell.click_options import takes
from stagec.driver.shell.options import take_machine
from stagec.driver.shell.session import the_session
from stagec.formats.base import Format
from stagec.formats.registry import formats_of
from stagec.jobs.request.emission import EMISSION
from stagec.jobs.request.machine import machine_options
from stagec.jobs.request.option import PLUGIN
from stagec.jobs.written import formats_asked, log_written, write_formats
from stagec.pipeline.plugins import load_plugins
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.traces.archive import Archive


@click.command("materialize")
@click.argument("archive", type=Path)
@click.option(
    "-o",
    "--output",
    type=Path,
    metavar="DIR",
    required=True,
    help="The folder to write (it must be new or empty).",
)
@takes(*EMISSION)
@click.option(
    "--format",
    metavar="NAME[,NAME]",
    help="Formats of the files (default: that of the archive). Formats other than Chakra's "
    "are made from its records: operations, bytes, partners and order.",
)
@takes(*machine_options("The machine that a format such as astra-sim describes."), PLUGIN)
def command(archive: Path, output: Path, **given: Any) -> int:
    """Write the traces of ranks from an archive of stagec compile --archive.

    Files, groups file and manifest are those that stagec compile -o would have written.
    """
    from stagec.traces.archive import Archive

    given["machine"] = take_machine(given)
    registry = load_plugins(given["plugin"]).registry
    source = Archive.open(archive, formats_of(registry))
    names = given["format"]
    formats = [source.format] if names is None else formats_asked(names, registry, given)
    began = time.perf_counter()
    in_format = partial(_source, source, given=given)
    written = write_formats(in_format, formats, output, source.about, given, the_session())
    if not given["quiet"]:
        log_written(written, output, f"in {time.perf_counter() - began:.2f} s", the_session())
    return 0


def _source(archive: Archive, format_: Format, given: dict[str, Any]) -> Archive:
    """The job in a format. Raises `DiagnosticError` if a cluster would have to convert it."""
    source = archive.as_format(format_, given["machine"])
    if given["scheduler"] is not None and source is not archive:
        raise error(
            "--format cannot be used with --scheduler: a cluster writes the format of the "
            f"archive, '{archive.format.name}'",
            remedy="leave out --format or --scheduler",
        )
    return source
