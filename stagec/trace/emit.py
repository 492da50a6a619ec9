"""From a lowered module to files: unrolls the programs of its rank classes and writes the job."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

from stagec.ir.module import Module
from stagec.support.diagnostics import error
from stagec.trace.classes import rank_classes
from stagec.trace.encode import Roofline
from stagec.trace.writer import Job, Progress, Written, write_job

#: More ranks than this are a mistake: no cluster has them.
MOST_RANKS = 1 << 22


def make_job(module: Module, name: str, roofline: Roofline | None = None) -> Job:
    """The job of a lowered module whose sizes are known. Raises `DiagnosticError`."""
    mesh = module.mesh
    sizes = {a: n or 1 for a, n in mesh.sizes.items()} if mesh else {}
    if prod(sizes.values()) > MOST_RANKS:
        raise error(
            f"the mesh has {prod(sizes.values()):,} ranks, expected at most {MOST_RANKS:,}",
            module.root.loc,
            remedy="choose smaller axes",
        )
    return Job(name, rank_classes(module), sizes, roofline)


def emit_module(
    module: Module,
    name: str,
    directory: Path,
    about: Mapping[str, object],
    *,
    force: bool = False,
    roofline: Roofline | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write the traces of a lowered module. Raises `DiagnosticError`."""
    return write_job(
        make_job(module, name, roofline), directory, about, force=force, progress=progress
    )
