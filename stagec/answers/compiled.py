"""The answer of `stagec compile`: the summary of the job, and the files that were written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stagec.output.report import Report

if TYPE_CHECKING:
    from stagec.traces.writer import Written


@dataclass(frozen=True)
class CompileAnswer(Report):
    """A compiled job: `data` are its counts, in the form of `analyze`, or the composition of many
    steps. `times` is a text with the seconds of compiling and writing."""

    data: Mapping[str, Any]
    summary: Callable[[TextIO], None] = field(repr=False, compare=False)
    output: Path | None = None
    written: Sequence[Written] = ()
    times: str = ""

    @property
    def files(self) -> list[str]:
        """The names of the files that were written."""
        return [name for each in self.written for name in each.files]

    @property
    def bytes(self) -> int:
        """The bytes of these files."""
        return sum(each.bytes for each in self.written)

    def as_json(self) -> dict[str, Any]:
        output = None if self.output is None else str(self.output)
        sizes = {"files": len(self.files), "bytes": self.bytes}
        return {"schema": 1, "job": dict(self.data), "output": output, **sizes}

    @property
    def title(self) -> str:
        return str(self.data.get("model", "stagec"))

    def print(self, stream: TextIO) -> None:
        self.summary(stream)


def times_text(compiled: float, wrote: float) -> str:
    """`(compiled in 1.23 s, wrote in 0.45 s)`, from seconds."""
    return f"(compiled in {compiled:.2f} s, wrote in {wrote:.2f} s)"
