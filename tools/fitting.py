"""Shared parts of the programs that fit constants: errors of rows in words and by two processes,
the tables of aiconfigurator-core, and the texts of machines."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from stagec.machines.efficiency import NetworkEfficiency
from stagec.machines.writing import network_section, rounded_network, with_sections
from stagec.time.step import Issued
from stagec.validation.steps import MeasuredStep

Floats: TypeAlias = NDArray[np.float64]
Constants = TypeVar("Constants", bound=Hashable)


def described(errors: Floats) -> str:
    """`median 3.4%, p90 12.0%`: absolute relative errors, given as logarithms."""
    size = np.abs(np.expm1(errors))
    return f"median {np.median(size):.1%}, p90 {np.quantile(size, 0.9):.1%}"


# -- steps -----------------------------------------------------------------------------------------

#: The error of each row as a function of constants; forked processes inherit it.
_ROWS: list[Callable[[Any], float]] = []


def _error(task: tuple[int, Any]) -> float:
    number, constants = task
    return _ROWS[number](constants)


class StepErrors(Generic[Constants]):
    """The errors of measured steps, computed once each by two processes. `error` is the logarithm
    of the ratio of predicted to measured seconds of a compiled step with some constants."""

    def __init__(
        self,
        rows: Sequence[MeasuredStep],
        error: Callable[[MeasuredStep, Issued, Constants], float],
    ) -> None:
        _ROWS[:] = [partial(error, row, row.issued()) for row in rows]
        self._pool = get_context("fork").Pool(2)
        self.rows = rows
        self._known: dict[tuple[int, Constants], float] = {}

    def errors(self, chosen: Sequence[int], constants: Constants) -> Floats:
        """The errors of some rows."""
        tasks = [(i, constants) for i in chosen]
        new = [task for task in tasks if task not in self._known]
        self._known.update(zip(new, self._pool.map(_error, new, chunksize=1), strict=True))
        return np.array([self._known[task] for task in tasks])

    def described(self, chosen: Sequence[int], constants: Constants) -> str:
        """The errors of some rows in words, and their number."""
        return f"{described(self.errors(chosen, constants))} of {len(chosen)}"


# -- networks --------------------------------------------------------------------------------------


def systems(given: Path | None) -> Path:
    """The folder `systems` of aiconfigurator-core: the given one, or that of the package."""
    if given is not None:
        return given
    return Path(importlib.import_module("aiconfigurator_core").__path__[0]) / "systems"


def collectives(folder: Path, device: str, table: str) -> list[dict[str, Any]]:
    """The rows of a table of collectives: `nccl/2.27.3/nccl_perf`."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    path = folder / "data" / device / "comm" / f"{table}.parquet"
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def write_network(name: str, level: str, constants: NetworkEfficiency) -> None:
    """Write the rounded constants of a level to the text of a machine."""
    path = Path(f"stagec/machines/{name}.toml")
    section = network_section(level, rounded_network(constants))
    sections = {f"efficiency.network.{level}": section}
    path.write_text(with_sections(path.read_text("utf-8"), sections), "utf-8")
