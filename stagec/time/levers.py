"""Levers: the time of a step on machines that are better in one respect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from stagec.machines import Machine
from stagec.machines.placement import straddling
from stagec.time.costs.replay_options import USUAL, ReplayOptions
from stagec.time.step import IssuedStep, StepTime, step_time


class Lever(NamedTuple):
    """The respect in which a machine is better, and the step on it."""

    name: str
    step: StepTime


def levers(issued: IssuedStep, machine: Machine, replay: ReplayOptions = USUAL) -> Iterator[Lever]:
    """Steps with groups that do not cross a level without need, twice each rate, no latency, no
    launch gaps, and all communication hidden. Such machines were never measured: measured times are
    scaled by the ratio of the models on both machines."""
    if replay.measured is not None:
        replay = replace(replay, measured=replay.measured.of(machine))
    for name, changed in [*_placed(issued, machine), *_changed(machine)]:
        yield Lever(name, step_time(issued, changed, replay))
    at_once = machine.changed({"compute.launch": 0.0})
    yield Lever("no launch gaps", step_time(issued, at_once, replay, hosts=False))
    hidden = step_time(issued, machine, replay, communicates=False)
    yield Lever("communication all hidden", hidden)


def _placed(issued: IssuedStep, machine: Machine) -> Iterator[tuple[str, Machine]]:
    groups = (each for job in issued.jobs for each in straddling(machine, job.mesh))
    for each in dict.fromkeys(groups):
        used = {f"network.{each.level}.used": each.better}
        yield f"{each.better} ranks of each {each.level}", machine.changed(used)


def _changed(machine: Machine) -> Iterator[tuple[str, Machine]]:
    yield "2 x matrix rate", machine.scaled("compute.matrix", 2)
    yield "2 x memory bandwidth", machine.scaled("memory.bandwidth", 2)
    for level in machine.network:
        yield f"2 x {level.name}", machine.scaled(f"network.{level.name}.bandwidth", 2)
    yield "no latency", machine.changed({"network.latency": 0.0, "host.latency": 0.0})
