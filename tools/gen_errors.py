"""Write the prediction intervals of stacks: `python -m tools.gen_errors`, which takes some minutes.

Predicts the rows of `stagec validate --time` of up to 1,024 ranks with a stack, and all rows of
`--serve`, with times to the first token up to the largest judged batch. Writes the 10th and 90th
percentile of measured over predicted seconds by stack, family of devices and kind of seconds: of
the rows that were not used in a fit if there are ten, else of all judged ones. Groups of fewer than
five rows are left out.

Rows without a stack are for software and devices without measurements. On a family of devices each
step is predicted with the shares that other stacks sustain there (`stg.sustained`), and without a
family with the default constants of kernels, as on a device of which only a data sheet is known.
Each source has the same number of rows there.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np

from stagec.answers.intervals import STEP, TPOT, TTFT
from stagec.ir_spec.strategy.sustained import SustainedRule
from stagec.jobs.request.options import IDEAL
from stagec.jobs.session import Session
from stagec.machines import Machine, load_machine
from stagec.machines.changes import with_tiles
from stagec.machines.efficiency import Sustained
from stagec.machines.kernel_efficiency import (
    AttentionEfficiency,
    MatmulEfficiency,
    MemoryEfficiency,
)
from stagec.support.files import write_file
from stagec.time.step import Issued, step_time
from stagec.validation.measured_servers import SMALL, measured_servers
from stagec.validation.steps import MeasuredStep, chosen, measured_steps, predictions, sample

TABLE = Path(__file__).parents[1] / "stagec" / "models" / "stacks" / "errors.csv"
_LEFT_OUT, _FEWEST, _MOST = 10, 5, 1024
_PERCENTILES = 10, 90
#: Rows of a source that are predicted without its own constants.
_EACH = 12

#: Stack, family of devices and kind of seconds; measured over predicted; and whether it was fitted.
Row = tuple[tuple[str, str, str], float, bool]


def _used(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    return [s for s in steps if s.judged and s.options().stack != IDEAL and s.ranks <= _MOST]


def _steps() -> Iterator[Row]:
    steps = _used(chosen(None, everything=False))
    for step, predicted in zip(steps, predictions(steps, Session(), "steps"), strict=True):
        if not isinstance(predicted, str):
            key = step.options().stack, step.on_machine().family, STEP
            yield key, step.seconds / predicted, step.fitted


def _servers() -> Iterator[Row]:
    servers = [s for s in measured_servers(None) if s.judged]
    for server, times in zip(servers, predictions(servers, Session(), "servers"), strict=True):
        if not isinstance(times, str):
            family = load_machine(server.machine).family
            measured = {TTFT: server.ttft, TPOT: server.tpot}
            for (kind, seconds), predicted in zip(measured.items(), times, strict=True):
                if kind == TPOT or server.batch <= SMALL:
                    yield (server.stack, family, kind), seconds / predicted, server.fitted


#: Family of devices, measured over predicted, and the place of the row.
Other = tuple[str, float, int]


def _without_own() -> Iterator[Other]:
    """Steps by what other stacks sustain on the family, and, without a family, by a data sheet."""
    rows: list[tuple[MeasuredStep, Issued, Machine]] = []
    rules: dict[str, dict[str, SustainedRule]] = defaultdict(dict)
    for steps in measured_steps().values():
        for step in sample(_used(steps), _EACH):
            issued, machine = step.issued(), step.on_machine()
            rules[machine.family][step.options().stack] = issued.software.sustained
            rows.append((step, issued, machine))
    for place, (step, issued, machine) in enumerate(rows):
        for other, rule in rules[machine.family].items():
            if other != step.options().stack:
                yield machine.family, step.seconds / _seconds(issued, machine, rule), place
        ratio = step.seconds / _seconds(issued, _by_data_sheet(machine), SustainedRule())
        yield "", ratio, place


def _by_data_sheet(machine: Machine) -> Machine:
    """A machine with the default constants of kernels."""
    kernels = {
        "matmul": MatmulEfficiency(),
        "attention": AttentionEfficiency(),
        "memory": MemoryEfficiency(),
        "sustained": Sustained(),
    }
    efficiency = machine.efficiency.model_copy(update=kernels)
    return with_tiles(machine.model_copy(update={"efficiency": efficiency}))


def _seconds(issued: Issued, machine: Machine, rule: SustainedRule) -> float:
    """The seconds of a step in which products sustain what this rule says of the machine."""
    rule = replace(rule, experts=issued.software.sustained.experts)
    return step_time(issued.run_by(replace(issued.software, sustained=rule)), machine).seconds


def errors_text() -> str:
    """The table."""
    others: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for family, ratio, place in _without_own():
        others[family].append((ratio, place))
    every: dict[tuple[str, str, str], list[tuple[float, bool]]] = defaultdict(list)
    for rows in (_steps(), _servers()):
        for key, ratio, fitted in rows:
            every[key].append((ratio, fitted))
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["stack", "family", "kind", "rows", "low", "high"])
    for family, placed in sorted(others.items()):
        low, high = np.percentile([ratio for ratio, _ in placed], _PERCENTILES)
        count = len({place for _, place in placed})
        writer.writerow(["", family, STEP, count, f"{low:.3f}", f"{high:.3f}"])
    for key, ratios in sorted(every.items()):
        left_out = [ratio for ratio, fitted in ratios if not fitted]
        used = left_out if len(left_out) >= _LEFT_OUT else [ratio for ratio, _ in ratios]
        if len(used) >= _FEWEST and key[1]:
            low, high = np.percentile(used, _PERCENTILES)
            writer.writerow([*key, len(used), f"{low:.3f}", f"{high:.3f}"])
    return text.getvalue()


if __name__ == "__main__":
    text = errors_text()
    write_file(TABLE, text)
    sys.stdout.write(text)
