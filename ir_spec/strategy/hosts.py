"""How the program that launches kernels keeps up with its device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stagec.ir.core import Operation
from stagec.ir_spec.strategy.statement import (
    Flag,
    FlagValues,
    Record,
    Section,
    Statement,
    parameter,
)


@dataclass(frozen=True)
class HostsRule(Record):
    """How the program that launches kernels keeps up with its device."""

    issue: str = parameter(
        "str",
        'from one computation to the next, such as "9 us" (default: that of the machine)',
        flag=Flag(
            "host_issue",
            "The time that a host takes from one computation to the next, such as '9 us', where "
            "devices wait for it: of the machine if it is left out.",
            default="",
            metavar="TIME",
            rare=True,
        ),
    )
    graphs: bool = parameter(
        "flag",
        "steps are captured as graphs, which hosts launch as a whole",
        flag=Flag(
            "host_graphs",
            "Steps of training are captured as graphs, which hosts launch as a whole, as those of "
            "serving are.",
            rare=True,
        ),
    )

    @property
    def seconds(self) -> float | None:
        """The time from one computation to the next; None if it is not said."""
        from stagec.machines.figures import quantity

        return float(quantity("time", self.issue)) if self.issue else None


class HostsOp(Statement):
    """How the program that launches kernels keeps up with its device.

    A host takes `issue` from one computation to the next: the code of a framework between two
    launches. Where that is longer than what they compute, devices wait for it. With `graphs` a step
    is captured once and launched as a whole, so no device waits. Steps of serving are captured
    without it.
    """

    name, record = "stg.hosts", HostsRule
    section = Section.KERNELS
    example = 'stg.hosts[issue = "9 us"]'

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        yield from _misfits(op.text("issue"))

    def problems(self, request: FlagValues) -> Iterator[tuple[str, str]]:
        for problem in _misfits(request["host_issue"] or ""):
            yield f"--host-issue {problem}", "give a time with its unit, such as '9 us'"


def _misfits(issue: str) -> Iterator[str]:
    from stagec.machines.figures import quantity

    try:
        _ = issue and quantity("time", issue)
    except ValueError as e:
        yield f"'issue' {e}"
