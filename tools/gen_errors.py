"""Write the prediction intervals of stacks: `python -m tools.gen_errors`, which takes some minutes.

Predicts the rows of `stagec validate --time` of up to 1,024 ranks with a stack, and all rows of
`--serve`, with times to the first token up to the largest judged batch. Writes the 10th and 90th
percentile of measured over predicted seconds by stack, family of devices and kind of seconds: of
the rows that were not used in a fit if there are ten, else of all judged ones. Groups of fewer than
five rows are left out.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np

from stagec.answers.intervals import STEP, TPOT, TTFT
from stagec.jobs.request.options import IDEAL
from stagec.jobs.session import Session
from stagec.machines import load_machine
from stagec.support.files import write_file
from stagec.validation.measured_servers import SMALL, measured_servers
from stagec.validation.steps import chosen, predictions

TABLE = Path(__file__).parents[1] / "stagec" / "models" / "stacks" / "errors.csv"
_LEFT_OUT, _FEWEST, _MOST = 10, 5, 1024
_PERCENTILES = 10, 90

#: Stack, family of devices and kind of seconds; measured over predicted; and whether it was fitted.
Row = tuple[tuple[str, str, str], float, bool]


def _steps() -> Iterator[Row]:
    every = chosen(None, everything=False)
    steps = [s for s in every if s.judged and s.options().stack != IDEAL and s.ranks <= _MOST]
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


def errors_text() -> str:
    """The table."""
    every: dict[tuple[str, str, str], list[tuple[float, bool]]] = defaultdict(list)
    for rows in (_steps(), _servers()):
        for key, ratio, fitted in rows:
            every[key].append((ratio, fitted))
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["stack", "family", "kind", "rows", "low", "high"])
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
