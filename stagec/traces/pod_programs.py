"""A job of several pods: meshes with programs of their own, whose ranks follow each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from stagec.formats.base import Durations, Format, Layout, ModelJob, RankBytes
from stagec.program.classes import RankClass
from stagec.program.groups import GroupAxes, Groups
from stagec.program.nodes import Ints, Program
from stagec.support.diagnostics import DiagnosticError, error
from stagec.traces.emit import EmittedJob

if TYPE_CHECKING:
    from stagec.machines import Machine


@dataclass(frozen=True)
class Pod:
    """A pod: its name, its job with ranks from 0, and the ranks of other pods, from 0 there, that
    its ranks exchange values with: by the name of that pod and the number of the message."""

    name: str
    job: EmittedJob
    other_pods: Mapping[str, Sequence[Ints]]


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
        """Seconds of computations on that machine, of the first pod."""
        return self.pods[0].job.durations

    def durations_of(self, number: int) -> Durations | None:
        """Those of the pod of a class."""
        return self._of(number)[0].job.durations

    @property
    def model(self) -> ModelJob | None:
        """None: there are several modules."""
        return None

    @property
    def models(self) -> Sequence[ModelJob]:
        """What each pod was compiled from."""
        return [replace(m, pod=pod.name) for pod in self.pods for m in pod.job.models]

    @property
    def mesh(self) -> Mapping[str, int]:
        """The axes of all pods."""
        return {f"{pod.name}/{a}": n for pod in self.pods for a, n in pod.job.mesh.items()}

    @cached_property
    def starts(self) -> Mapping[str, int]:
        """The first rank of each pod."""
        starts: dict[str, int] = {}
        for pod in self.pods:
            starts[pod.name] = sum(p.job.groups.ranks for p in self.pods[: len(starts)])
        return starts

    @property
    def members(self) -> list[Ints]:
        """The ranks of each class."""
        return [ranks + self.starts[pod.name] for pod in self.pods for ranks in pod.job.members]

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """The layout of each pod."""
        layouts: list[Layout] = []
        for pod in self.pods:
            other_pods = {
                n: [r + self.starts[n] for r in ranks] for n, ranks in pod.other_pods.items()
            }
            layouts.append(replace(pod.job.layout, other_pods=other_pods, pod=pod.name))
        return dict(zip(self.starts, one_behind_the_other(layouts), strict=True))

    @property
    def groups(self) -> Groups:
        """The groups of all pods."""
        return self._groups

    @cached_property
    def _groups(self) -> Groups:
        return groups_of(self.layouts)

    @property
    def classes(self) -> list[RankClass]:
        """The classes of all pods."""
        return [each for pod in self.pods for each in pod.job.classes]

    def layout_of(self, number: int) -> Layout:
        """That of the ranks of a class."""
        return self.layouts[self.pod_of(number)]

    def pod_of(self, number: int) -> str:
        """The name of the pod of a class."""
        return self._of(number)[0].name

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
        return self.format.encoder(program, self.layouts[pod.name], pod.job.durations)

    def entry(self, number: int) -> dict[str, object]:
        """What the manifest says of a class."""
        pod, local = self._of(number)
        entry = pod.job.entry(local)
        example = int(self.members[number][0])
        return {**entry, "pod": pod.name, "name": f"{pod.name}/{entry['name']}"} | {
            "example_rank": example
        }


def one_behind_the_other(pods: Sequence[Layout]) -> list[Layout]:
    """The layouts of pods whose ranks and groups follow each other, from those with ranks and
    groups of their own; what is `other_pods` has ranks of the job."""
    total = sum(each.groups.ranks for each in pods)
    placed: list[Layout] = []
    start = first = 0
    for each in pods:
        groups = each.groups.moved(start, first, total)
        placed.append(replace(each, groups=groups, start=start))
        start, first = start + each.groups.ranks, first + len(each.groups.ids)
    return placed


def groups_of(pods: Mapping[str, Layout]) -> Groups:
    """The groups of all pods by name, each over axes named after its pod."""
    every = [
        (GroupAxes((f"{name}/", *axes.axes), axes.mirrored), axes, layout.groups)
        for name, layout in pods.items()
        for axes in layout.groups.members
    ]
    return Groups(
        next(iter(pods.values())).groups.ranks,
        {new: groups.first[axes] for new, axes, groups in every},
        {new: groups.members[axes] for new, axes, groups in every},
        {new: groups.number[axes] for new, axes, groups in every},
    )


def of_one_mesh(format_: Format) -> DiagnosticError:
    """The error for a format that does not take jobs of several pods."""
    return error(
        f"the format '{format_.name}' {format_.one_pod}, and the job has several pods",
        remedy="write --format chakra",
    )
