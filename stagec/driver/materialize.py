"""`stagec materialize`: from an archive to the traces of any ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from stagec.driver.emission import emission_options, emit
from stagec.driver.streams import tell


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
@emission_options
@click.option("--plugin", multiple=True, type=Path, metavar="FILE", help="Load a plug-in file.")
def command(archive: Path, output: Path, **given: Any) -> int:
    """Write the traces of ranks from an archive of stagec compile --archive.

    Files, groups file and manifest are those that stagec compile -o would have written.
    """
    from stagec.driver.tables import bytes_text
    from stagec.formats.registry import formats_of
    from stagec.job.archive import Archive
    from stagec.pipeline.plugins import load_plugins

    source = Archive.open(archive, formats_of(load_plugins(given["plugin"]).registry))
    began = time.perf_counter()
    written = emit(source, output, source.about, given)
    for warning in written.warnings:
        tell(f"warning: {warning}")
    if not given["quiet"]:
        tell(
            f"wrote {len(written.files)} files, {bytes_text(written.bytes)}, to {output} "
            f"in {time.perf_counter() - began:.2f} s"
        )
    return 0
