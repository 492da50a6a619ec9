"""What was measured, and wins over the models of a time: `--measured`, `--kernels-from`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagec.machines import Machine
    from stagec.time.costs import Measurements
    from stagec.time.tables import Table


def measurements(
    files: Sequence[Path], package: str | None, machine: Machine
) -> Measurements | None:
    """What was measured: files of users, and the tables of a package for a machine. Raises
    `DiagnosticError`."""
    if not files and package is None:
        return None
    from stagec.time.costs import Measurements
    from stagec.time.measured import read_measured

    others: list[Table] = []
    if package is not None:
        from stagec.time.aiconfigurator import read_tables

        others = read_tables(machine.name)
    return Measurements([table for file in files for table in read_measured(file)], others)
