"""The options of measured times, which replace those of models: `--measured`, `--kernels-from`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.jobs.request.option import CommandOption, File, OneOf, rare_option
from stagec.jobs.session import Session
from stagec.support.diagnostics import Diagnostic
from stagec.support.source import UNKNOWN

if TYPE_CHECKING:
    from stagec.machines import Machine
    from stagec.time.costs.nodes import Measurements
    from stagec.time.measured.tables import Table


#: The options of `measurements`.
MEASURED = (
    CommandOption(
        "measured",
        File(),
        "Measured times (CSV or JSON, see docs/measured.md), which replace those of the models.",
        metavar="FILE",
        multiple=True,
    ),
    rare_option(
        "kernels_from",
        OneOf(["aiconfigurator"]),
        "Measured tables of a package: pip install 'stagec[kernels]'.",
    ),
)


def measurements(
    files: Sequence[Path], package: str | None, machine: Machine
) -> Measurements | None:
    """The measurements in files of users, and in the tables of a package for a machine; None
    without both. A process reads each of them once. Raises `DiagnosticError`."""
    if not files and package is None:
        return None
    return _read(tuple((file, _version(file)) for file in files), package, machine.name)


def remark_unused(
    costed_by: Mapping[str, int], measured: object, session: Session, steps: str = "this step"
) -> None:
    """Report a remark if no kernel or collective of `steps` (a text) has a measured time.
    `costed_by` counts them as in `TimeReport`."""
    if measured is None or costed_by["modelled"] < sum(costed_by.values()):
        return
    text = f"no kernel or collective of {steps} was measured: all times are modelled"
    remedy = "compare kinds, types and extents of the table with docs/measured.md"
    session.report(Diagnostic(text, UNKNOWN, "remark", remedy))


def _version(file: Path) -> tuple[int, int] | None:
    """The time of change and the size of a file, which differ once it is written again; None if it
    cannot be read."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=16)
def _read(
    files: tuple[tuple[Path, tuple[int, int] | None], ...], package: str | None, machine: str
) -> Measurements:
    from stagec.time.costs.nodes import Measurements
    from stagec.time.measured.kernel_tables import read_measured

    others: list[Table] = []
    if package is not None:
        from stagec.time.measured.aiconfigurator import read_tables

        others = read_tables(machine)
    return Measurements([table for file, _ in files for table in read_measured(file)], others)
