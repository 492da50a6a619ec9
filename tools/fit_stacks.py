"""Fit the sustained speed of stacks to measured steps: `python -m tools.fit_stacks nemo.hopper`.

A stack states the share of their speed that products sustain, by family of devices
(`stg.sustained`), and the share of that for grouped products of experts. Each constant is fitted to
all sources with rows of that stack on such a device, each model of a source with the same weight;
then again without each source on each machine, which is the test set. With a single source, every
second row is fitted, and the others are the test set. Prints the record of docs/accuracy.md; the
text of the stack is written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import click
import numpy as np

from stagec.ir.expr import Expr, const
from stagec.ir_spec.strategy.sustained import SustainedRule
from stagec.time.costs.software import Software
from stagec.time.step import Issued, step_time
from stagec.validation.steps import MeasuredStep, measured_steps, sample
from tools.fitting import StepErrors

#: By stack and family: whether the share of experts is fitted too.
FITS: Final[Mapping[str, bool]] = {
    "llm-foundry.ampere": False,
    "llm-foundry.hopper": False,
    "megatron-core@0.9.0.hopper": False,
    "nanotron.hopper": False,
    "nemo.hopper": False,
    "nemo.blackwell": True,
}
_MOST: Final = 40
_GRID: Final = [n / 100 for n in range(30, 101)]


def _error(step: MeasuredStep, issued: Issued, shares: tuple[float, float]) -> float:
    """The logarithm of the ratio of predicted to measured seconds with these shares of products and
    of those of experts."""
    machine = step.on_machine()
    family: dict[str, Any] = {machine.family: _ratio(shares[0])}
    rule = replace(SustainedRule(experts=_ratio(shares[1])), **family)
    software: Software = replace(issued.software, sustained=rule)
    seconds = step_time(issued.run_by(software), machine).seconds
    return float(np.log(seconds / step.seconds))


def _ratio(value: float) -> Expr:
    return const(round(value * 100)) / const(100)


class Fit(StepErrors[tuple[float, float]]):
    """The errors of steps by shares."""

    def loss(self, chosen: Sequence[int], share: float, experts: float) -> float:
        """The mean absolute error, with the same weight for each model of a source."""
        error = np.abs(self.errors(chosen, (share, experts)))
        models = np.array([f"{self.rows[i].source} {self.rows[i].model}" for i in chosen])
        return float(np.mean([error[models == m].mean() for m in dict.fromkeys(models)]))


def _least(of: Callable[[float], float]) -> float:
    """The minimum of a unimodal function on the grid, by ternary search."""
    low, high = 0, len(_GRID) - 1
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if of(_GRID[left]) <= of(_GRID[right]):
            high = right
        else:
            low = left
    return min(_GRID[low : high + 1], key=of)


def fitted(fit: Fit, chosen: Sequence[int], *, experts: bool) -> tuple[float, float]:
    """The share of products, by rows without experts if there are any; then that of experts."""
    dense = [i for i in chosen if not _routes(fit.rows[i])] or list(chosen)
    share = _least(lambda x: fit.loss(dense, x, 1.0))
    routed = [i for i in chosen if _routes(fit.rows[i])]
    if not experts or not routed:
        return share, 1.0
    return share, _least(lambda x: fit.loss(routed, share, x))


def _routes(step: MeasuredStep) -> bool:
    return "ep" in step.flags


def rows_of(name: str) -> list[MeasuredStep]:
    """The judged steps of a stack on a family of devices; of long sources a sample."""
    stack, _, family = name.rpartition(".")
    every = ([s for s in steps if s.judged] for steps in measured_steps().values())
    own = [[s for s in steps if s.flags.get("stack") == stack] for steps in every]
    mine = [[s for s in steps if s.on_machine().family == family] for steps in own]
    return [s for steps in mine for s in sample(steps, _MOST)]


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(FITS)))
def main(names: Sequence[str]) -> None:
    """Fit the constants of stacks."""
    for name in names or FITS:
        fit, experts = Fit(rows := rows_of(name), _error), FITS[name]
        titles = [f"{row.source} on {row.machine}" for row in rows]
        sources = list(dict.fromkeys(titles))
        every = range(len(rows))
        constants = fitted(fit, every, experts=experts)
        print(f"{name}: products {constants[0]:g}, experts {constants[1]:g}", flush=True)
        half = list(every[1::2])
        halves = {f"{sources[0]}, every second row": half} if len(sources) == 1 else {}
        parts = halves or {s: [i for i in every if titles[i] == s] for s in sources}
        for title, left_out in parts.items():
            rest = [i for i in every if i not in left_out]
            without = fitted(fit, rest, experts=experts)
            print(f"  {title}: {fit.described(left_out, constants)}")
            judged = fit.described(left_out, without)
            print(f"    left out ({without[0]:g}, {without[1]:g}): {judged}", flush=True)


if __name__ == "__main__":
    main()
