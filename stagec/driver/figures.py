"""What a job costs, in a few numbers: rows of sweeps and steps of searches are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from stagec.analysis.count import copied_bytes
from stagec.analysis.report import analysis
from stagec.driver.job import JobBuilder
from stagec.driver.options import JobOptions
from stagec.driver.planned import Planned
from stagec.ir.module import Module
from stagec.memory.timeline import STATIC
from stagec.schedule.attached import idle_share

#: What is there for a time, as far as it is there at the peak.
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Figures:
    """The most that any rank has of everything, in one training step.

    `memory` says what is held at the peak by the rank whose peak it is, `copied` are bytes between
    host and device, `idle` is the share of the step in which the schedule leaves a rank without
    work, on a clock on which backward takes twice as long as forward.
    """

    model: str
    ranks: int
    mesh: Mapping[str, int]
    parameters: int
    flops: int
    sent: int
    copied: int
    host: int
    idle: Fraction
    memory: Mapping[str, int]

    @property
    def peak(self) -> int:
        """Bytes on the device at the worst moment."""
        return sum(self.memory.values())


def figures(options: JobOptions, *, verify: bool = True) -> Figures:
    """The figures of a job. Raises `DiagnosticError`.

    Without `verify` the module is not verified after each pass, which takes half of the time.
    """
    builder = JobBuilder(options)
    copied = Planned(copied_bytes)
    module = builder.lower(watching=[copied], verify=verify)
    result = analysis(module, builder.model_name)
    classes: list[dict[str, Any]] = result["classes"]
    return Figures(
        result["model"],
        result["ranks"],
        result["mesh"],
        result["parameters"],
        flops=max(sum(c["flops"].values()) for c in classes),
        sent=max(_sent(c) for c in classes),
        copied=copied.found or 0,
        host=max(c["memory"]["host"] for c in classes),
        idle=_idle(module),
        memory=_at_peak(max((c["memory"] for c in classes), key=lambda m: m["peak"])),
    )


def _sent(entry: Mapping[str, Any]) -> int:
    sent: list[int] = [c["wire_bytes"] for c in entry["collectives"]]
    return sum(sent + [m["bytes"] for m in entry["p2p"] if m["dir"] == "send"])


def _at_peak(memory: Mapping[str, int]) -> dict[str, int]:
    static = {name: memory[name] for name in STATIC}
    return {**static, OTHERS: memory["peak"] - sum(static.values())}


def _idle(module: Module) -> Fraction:
    graphs = module.graphs
    return max((idle_share(module, graph) for graph in graphs), default=Fraction(0))
