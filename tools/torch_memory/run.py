"""Which step a row of a validation source is, as PyTorch has to run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from stagec.ir_spec.strategy.axes import DATA_AXES
from stagec.models import library
from stagec.validation.formula import sizes_of
from stagec.validation.sources import ValidationSource, filled, validation_sources


@dataclass(frozen=True)
class TorchRun:
    """A step: the text of the model with all of its sizes (B and S are those of one rank), the
    flags of the job, as `stagec memory` takes them, and the pipeline rank that is recorded. A part
    that knows a flag takes it; what is left is an error."""

    title: str
    text: str
    sizes: Mapping[str, int]
    flags: Mapping[str, Any]
    stage: int = 0
    _taken: set[str] = field(default_factory=set[str])

    def flag(self, name: str, default: Any) -> Any:
        """The value of a flag, in the type of its default."""
        self._taken.add(name)
        value = self.flags.get(name, default)
        return type(default)(value if value != "off" else "")

    def check(self) -> None:
        """Raise `ValueError` for flags that nobody took."""
        if left := sorted(self.flags.keys() - self._taken):
            raise ValueError(f"{self.title}: no layout or model knows the flags {', '.join(left)}")


def runs_of(source: str) -> list[TorchRun]:
    """The steps of the rows of a source. Raises `DiagnosticError`."""
    return [run for each in validation_sources(source, kind="memory") for run in _runs(each)]


def _runs(source: ValidationSource) -> list[TorchRun]:
    runs: list[TorchRun] = []
    for row in source.rows():
        given, model = row.given, library()[row.given["model"]]
        sizes, flags = sizes_of(given.get("sizes", {})), dict(given.get("flags", {}))
        replicas = prod(int(flags.get(axis, 1)) for axis in DATA_AXES)
        title = filled(given["row"], {**sizes, **flags, **given.get("notes", {})})
        every = {**model.values, **sizes}
        if every["B"] % replicas:
            raise ValueError(f"{title}: {every['B']} sequences do not divide over {replicas} ranks")
        every["B"] //= replicas
        every["S"] //= int(flags.get("cp", 1))
        stage = int(given.get("stage") or 0)
        runs.append(TorchRun(title, model.text_name, every, flags, stage))
    return runs
