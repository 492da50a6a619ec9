"""Steps that were measured and published, each with the job that it was: a model, sizes, flags and
a machine.

One convention for each source, that of its framework, maps all of its rows; a row adds its sizes
and its mesh only. Nothing here is fitted.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A published step: `seconds`, and the job as `stagec time` takes it.

    `sweep` names the steps that compare configurations of one model. `changes` are figures of the
    machine that the source states. Of rows that constants were fitted on, `fitted` is true.
    """

    source: str
    row: str
    sweep: str
    seconds: float
    ranks: int
    machine: str
    model: str
    sizes: Mapping[str, int]
    flags: Mapping[str, Any]
    changes: Mapping[str, str]
    overlap: bool = True
    fitted: bool = False


def read(name: str) -> Iterator[Row]:
    """The rows of a file of this folder; lines that start with # tell where it is from."""
    text = (files(__name__) / f"{name}.csv").read_text(encoding="utf-8")
    yield from csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
