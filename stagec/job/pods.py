"""A job of several pods: meshes with programs of their own, whose ranks follow each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from stagec.formats.base import Durations, Format, Layout, ModelJob, RankBytes
from stagec.job.emit import Job
from stagec.machines import Machine
from stagec.program.groups import GroupAxes, Groups
from stagec.program.nodes import Ints, Program


@dataclass(frozen=True)
class Pod:
    """A pod: its name, its job with ranks from 0, and the ranks of other pods, from 0 there, that
    its ranks exchange values with: by the name of that pod and the number of the message."""

    name: str
    job: Job
    far: Mapping[str, Sequence[Ints]]


@dataclass(frozen=True)
class PodsJob:
    """The pods of a job as one. Classes, groups and axes are named after their pods:
    `prefill/stage0`."""

    name: str
    pods: Sequence[Pod]

    def as_format(self, format_: Format) -> PodsJob:
        """The same job for files of another format."""
        pods = [replace(pod, job=replace(pod.job, format=format_)) for pod in self.pods]
        return replace(self, pods=pods)

    @property
    def format(self) -> Format:
        """The format of its files."""
        return self.pods[0].job.format

    @property
    def machine(self) -> Machine | None:
        """That of all pods."""
        return self.pods[0].job.machine

    @property
    def durations(self) -> Durations | None:
        """Seconds of computations on that machine."""
        return self.pods[0].job.durations

    @property
    def model(self) -> ModelJob | None:
        """None: there are several modules."""
        return None

    @property
    def mesh(self) -> Mapping[str, int]:
        """The axes of all pods."""
        return {f"{pod.name}/{a}": n for pod in self.pods for a, n in pod.job.mesh.items()}

    @cached_property
    def starts(self) -> Mapping[str, int]:
        """The first rank of each pod."""
        found: dict[str, int] = {}
        for pod in self.pods:
            found[pod.name] = sum(p.job.groups.ranks for p in self.pods[: len(found)])
        return found

    @property
    def members(self) -> list[Ints]:
        """The ranks of each class."""
        return [ranks + self.starts[pod.name] for pod in self.pods for ranks in pod.job.members]

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """The layout of each pod."""
        total = sum(pod.job.groups.ranks for pod in self.pods)
        found: dict[str, Layout] = {}
        first = 0
        for pod in self.pods:
            start = self.starts[pod.name]
            far = {n: [r + self.starts[n] for r in ranks] for n, ranks in pod.far.items()}
            groups = pod.job.groups.moved(start, first, total)
            found[pod.name] = Layout(pod.job.mesh, groups, start, far)
            first += len(pod.job.groups.ids)
        return found

    @property
    def groups(self) -> Groups:
        """The groups of all pods."""
        return self._groups

    @cached_property
    def _groups(self) -> Groups:
        every = [
            (GroupAxes((f"{name}/", *axes.axes), axes.mirrored), axes, layout.groups)
            for name, layout in self.layouts.items()
            for axes in layout.groups.members
        ]
        return Groups(
            sum(pod.job.groups.ranks for pod in self.pods),
            {new: groups.first[axes] for new, axes, groups in every},
            {new: groups.members[axes] for new, axes, groups in every},
            {new: groups.number[axes] for new, axes, groups in every},
        )

    @property
    def layout(self) -> Layout:
        """The mesh and the groups of all pods; who talks to whom is in `layouts`."""
        return Layout(self.mesh, self.groups)

    def _of(self, number: int) -> tuple[Pod, int]:
        """The pod of a class, and the number of the class there."""
        for pod in self.pods:
            if number < len(pod.job.classes):
                return pod, number
            number -= len(pod.job.classes)
        raise IndexError(number)

    def program(self, number: int) -> Program:
        """The program of a class."""
        pod, local = self._of(number)
        return pod.job.program(local)

    def encoder(self, number: int) -> RankBytes:
        """The program of a class as bytes."""
        pod, local = self._of(number)
        program = pod.job.program(local)
        return self.format.encoder(program, self.layouts[pod.name], self.durations)

    def entry(self, number: int) -> dict[str, object]:
        """What the manifest says of a class."""
        pod, local = self._of(number)
        entry = pod.job.entry(local)
        example = int(self.members[number][0])
        return {**entry, "pod": pod.name, "name": f"{pod.name}/{entry['name']}"} | {
            "example_rank": example
        }
