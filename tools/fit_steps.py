"""Fit the remaining constants of a device to measured steps: `python -m tools.fit_steps b200`.

Kernels and collectives are fitted to their own tables (`fit_machines.py`, `fit_network.py`); whole
steps determine the others: the sustained speed of products in a step, and the speed of the backward
of attention. Times of hosts are those of the stacks of the rows: no row depends on
`efficiency.host.issue` of a machine. Every second row of a source is fitted, and the others are the
test set; with `--all` every row is fitted, and left-out sources are the test set. `--write` writes
the constants with this record to the text of the machine. No constant belongs to a single row,
model or source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import click
import numpy as np

import stagec.machines
from stagec.machines import Machine
from stagec.machines.writing import with_sections
from stagec.time.step import Issued, step_time
from stagec.validation.steps import MeasuredStep, measured_steps, sample
from tools.fitting import Floats, StepErrors

Values: TypeAlias = dict[str, float]
#: The names of constants with their values.
Point: TypeAlias = tuple[tuple[str, float], ...]

PRODUCTS = "efficiency.sustained.products"
ATTENTION = "efficiency.attention.rate.bf16"
#: The constants of a device with their bounds; they are fitted to the sources of its steps.
DEVICES: Final[Mapping[str, Mapping[str, tuple[float, float]]]] = {
    "a100-80g": {PRODUCTS: (0.5, 1.0)},
    "h100-p5": {PRODUCTS: (0.5, 1.0)},
    "h100-500w": {PRODUCTS: (0.3, 1.0), ATTENTION: (0.2, 0.9)},
    "b200": {PRODUCTS: (0.4, 1.0)},
}
#: Device -> devices without measured steps that have the same processors.
ALIKE: Final[Mapping[str, Sequence[str]]] = {
    "a100-80g": ("a100-40g",),
    "b200": ("b300", "gb200-nvl72", "gb300-nvl72"),
}
#: The largest number of rows that counts for the weight of a source.
_MOST: Final = 24
#: Errors beyond this have a linear loss in place of a quadratic one.
_OUTLIER: Final = 0.1
_STEPS, _NUDGE = 8, 0.02


def _error(step: MeasuredStep, issued: Issued, constants: Point) -> float:
    """The logarithm of the ratio of predicted to measured seconds on the machine with these
    constants."""
    machine: Machine = step.on_machine().changed(dict(constants))
    return float(np.log(step_time(issued, machine).seconds / step.seconds))


class Fit(StepErrors[Point]):
    """The errors of steps by constants of their device."""

    def fit(self, chosen: Sequence[int], bounds: Mapping[str, tuple[float, float]]) -> Values:
        """The constants with the least loss for these rows, by Gauss-Newton steps on logarithms, in
        which each source has the same weight and outliers count less."""
        names = list(bounds)
        low, high = np.log(np.array(list(bounds.values()))).T

        def errors(point: Floats) -> Floats:
            return self.errors(chosen, tuple(zip(names, np.exp(point).tolist(), strict=True)))

        rows = [self.rows[i].source for i in chosen]
        share = np.array([1 / rows.count(source) for source in rows])
        point = (low + high) / 2
        for _ in range(_STEPS):
            error = errors(point)
            slopes = [(errors(point + d) - error) / _NUDGE for d in _NUDGE * np.eye(len(names))]
            slope = np.array(slopes).T
            weight = share / np.sqrt(1 + (error / _OUTLIER) ** 2)
            square = (slope.T * weight) @ slope + 1e-4 * np.eye(len(names))
            step = np.linalg.solve(square, (slope.T * weight) @ error)
            before, point = point, np.clip(point - np.clip(step, -0.5, 0.5), low, high)
            if np.abs(point - before).max() < _NUDGE / 10:
                break
        return {n: float(f"{v:.3g}") for n, v in zip(names, np.exp(point).tolist(), strict=True)}


def rows_of(device: str) -> list[MeasuredStep]:
    """The steps of a device; of long sources those at equal distances."""
    judged = ([s for s in steps if s.judged] for steps in measured_steps().values())
    own = [steps for steps in judged if steps and steps[0].machine == device]
    return [step for steps in own for step in sample(steps, _MOST)]


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(DEVICES)))
@click.option("--all", "every", is_flag=True, help="Fit all rows, not every second one.")
@click.option("--write", is_flag=True, help="Put the constants into the machines' texts.")
def main(names: Sequence[str], every: bool, write: bool) -> None:
    """Fit the constants of steps."""
    for name in names or DEVICES:
        bounds, rows = DEVICES[name], rows_of(name)
        sources = list(dict.fromkeys(row.source for row in rows))
        fit = Fit(rows, _error)
        fitted = [i for i, row in enumerate(rows) if every or row.fitted]
        others = [] if every else [i for i, row in enumerate(rows) if not row.fitted]
        judged = "fitted" if every else "left out"
        values = fit.fit(fitted, bounds)
        print(f"{name}: {', '.join(f'{n} = {v:g}' for n, v in values.items())}", flush=True)
        record: list[str] = []
        for source in sources:
            for title, chosen in (("fitted", fitted), ("left out", others)):
                mine = [i for i in chosen if rows[i].source == source]
                if mine:
                    text = fit.described(mine, tuple(values.items()))
                    print(f"  {source}, {title}: {text}", flush=True)
                    if title == judged:
                        record.append(f"{source} {text}")
        for source in sources if len(sources) > 1 else ():
            rest = [i for i in fitted if rows[i].source != source]
            mine = [i for i, row in enumerate(rows) if row.source == source]
            without = fit.fit(rest, bounds)
            shown = ", ".join(f"{n.split('.')[-1]} {v:g}" for n, v in without.items())
            print(
                f"  without {source} ({shown}): {fit.described(mine, tuple(without.items()))}",
                flush=True,
            )
        if write:
            some = "all rows of measured steps" if every else "every second row of measured steps"
            write_constants(name, values, f"{some}; {judged}: {'; '.join(record)}")
            for other in ALIKE.get(name, ()):
                same = {PRODUCTS: values[PRODUCTS]}
                write_constants(other, same, f"no steps of its own, constants of {name}")


def write_constants(name: str, values: Values, record: str) -> None:
    """Write constants to the text of a machine, with the record of the fit in each section."""
    path = Path(str(stagec.machines.__file__)).parent / f"{name}.toml"
    text = path.read_text(encoding="utf-8")
    for constant, value in values.items():
        _, section, key, *_ = constant.split(".")
        if constant == PRODUCTS:
            title = f"efficiency.{section}"
            body = f'[{title}]\n{key} = {value:g}\nfitted = "{record}"\n'
            text = with_sections(text, {title: body})
            continue
        head, heading, tail = text.partition(f"[efficiency.{section}]\n")
        own, rest = re.split(r"(?m)^(?=\[)|\Z", tail, maxsplit=1)
        if constant == ATTENTION:
            own = re.sub(r"\bbf16 = [0-9.]+", f"bf16 = {value:g}", own, count=1)
        else:
            own = f"{key} = {value:g}\n" + re.sub(rf"(?m)^{key} = .*\n", "", own)
        own = re.sub(
            r'(?m)^(fitted = ".*?)(; .* on measured steps)?"$',
            rf'\1; {key} on measured steps"',
            own,
        )
        text = head + heading + own + rest
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
