"""From a lowered module to files: the programs of its rank classes as a source of traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from stagec.formats.base import Durations, Format, Layout, ModelJob
from stagec.formats.chakra.format import CHAKRA
from stagec.ir.module import Module
from stagec.program.classes import RankClass, rank_classes
from stagec.program.fuse import Granularity, fused
from stagec.program.groups import Groups, number_groups
from stagec.program.nodes import Ints, Names, Program
from stagec.traces.writer import OfOneMesh, entry_of

if TYPE_CHECKING:
    from stagec.machines import Machine
    from stagec.time.costs.nodes import Measurements

#: Adds to a program what is asked for.
Annotate = Callable[[RankClass, Program], Program]
#: Programs that a job holds at a time.
_KEPT = 4


@dataclass(frozen=True)
class EmittedJob(OfOneMesh):
    """The rank classes and the mesh that runs them."""

    name: str
    classes: Sequence[RankClass]
    mesh: Mapping[str, int]
    durations: Durations | None = None
    names: Names = "full"
    granularity: Granularity = "op"
    annotate: Annotate | None = None
    format: Format = CHAKRA
    machine: Machine | None = None
    module: Module | None = None
    flops: int | None = None
    measured: Measurements | None = None
    graphs: bool = True
    _programs: dict[int, Program] = field(default_factory=dict[int, Program], repr=False)

    @property
    def members(self) -> list[Ints]:
        """The ranks of each class."""
        return self._members

    @cached_property
    def _members(self) -> list[Ints]:
        return [c.members(self.mesh) for c in self.classes]

    @property
    def groups(self) -> Groups:
        """The numbered communicator groups."""
        return self._groups

    @cached_property
    def _groups(self) -> Groups:
        used = zip((c.groups for c in self.classes), self.members, strict=True)
        return number_groups(self.mesh, used)

    @property
    def layout(self) -> Layout:
        """Who talks to whom."""
        if self.module is None:
            return Layout(self.mesh, self.groups)
        return Layout(self.mesh, self.groups, sizes=self.module.env)

    @property
    def model(self) -> ModelJob | None:
        """What it was compiled from."""
        if self.module is None:
            return None
        return ModelJob(self.module, self.classes, self.flops, self.measured, self.graphs)

    @property
    def models(self) -> Sequence[ModelJob]:
        """The same, of one pod."""
        return [] if self.model is None else [self.model]

    def program(self, number: int) -> Program:
        """The program of a class; the latest few are kept."""
        while len(self._programs) >= _KEPT and number not in self._programs:
            del self._programs[next(iter(self._programs))]
        if number not in self._programs:
            each = self.classes[number]
            program = each.program()
            if self.annotate is not None:
                program = self.annotate(each, program)
            self._programs[number] = fused(program, self.granularity).named(self.names)
        return self._programs[number]

    def entry(self, number: int) -> dict[str, object]:
        """What the manifest says of a class."""
        each, events = self.classes[number], self.program(number).events
        memory = {"static_bytes": events.static, "peak_bytes": events.peak} if events else None
        return entry_of(self, number, each.name, each.coords, memory)


def make_job(
    module: Module,
    name: str,
    durations: Durations | None = None,
    names: Names = "full",
    granularity: Granularity = "op",
    annotate: Annotate | None = None,
    format_: Format = CHAKRA,
    machine: Machine | None = None,
) -> EmittedJob:
    """The job of a lowered module whose sizes are known. Raises `DiagnosticError`."""
    classes = rank_classes(module)
    how = durations, names, granularity, annotate, format_, machine
    return EmittedJob(name, classes, module.axis_sizes, *how, module=module)
