"""Steps that were measured and published, each with the job that it was: a model, sizes, flags and
a machine.

One convention for each source, that of its framework, maps all of its rows; a row adds its sizes
and its mesh only. Nothing here is fitted. docs/accuracy.md shows how far predictions are off.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

Row = Mapping[str, str]
Source = Callable[[], Iterator["MeasuredStep"]]
SUFFIX = ".stg"


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step of `seconds` on `ranks` GPUs, and the job as `stagec time` takes it.

    `model` is a model of the library, or a text of this folder. `changes` are figures of the
    machine that the source states. `sweep` names the steps that compare configurations of one
    model on as many GPUs and with one batch; it is empty where a source has no such steps.
    Constants of the machine were fitted on rows that are `fitted`. Errors are told for rows that
    are `judged`.
    """

    source: str
    row: str
    seconds: float
    ranks: int
    machine: str
    model: str
    sizes: Mapping[str, int]
    flags: Mapping[str, Any]
    sweep: str = ""
    changes: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    overlap: bool = True
    judged: bool = True
    fitted: bool = False


def read(name: str) -> Iterator[Row]:
    """The rows of a file of this folder; lines that start with # tell where they are from."""
    text = (files(__name__) / f"{name}.csv").read_text(encoding="utf-8")
    yield from csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))


def model_of(step: MeasuredStep) -> str:
    """The name of the model as a job takes it: of the library, or the path of a text."""
    if not step.model.endswith(SUFFIX):
        return step.model
    with as_file(files(__name__) / step.model) as path:
        return str(Path(path))


def measured_steps() -> dict[str, list[MeasuredStep]]:
    """All measured steps by their source."""
    from stagec.analysis.measured.published import PUBLISHED
    from stagec.analysis.measured.sweeps import SWEEPS

    return {name: list(_split(steps())) for name, steps in {**PUBLISHED, **SWEEPS}.items()}


def _split(steps: Iterator[MeasuredStep]) -> Iterator[MeasuredStep]:
    """Every second row that is judged is fitted, the first one among them."""
    from dataclasses import replace

    fits = True
    for step in steps:
        yield replace(step, fitted=fits and step.judged)
        fits = fits != step.judged
