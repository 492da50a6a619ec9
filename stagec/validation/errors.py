"""How far predicted steps are from measured ones: by row, by source, in the order of a sweep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagec.validation.steps import MeasuredStep

#: Sweeps of fewer steps have no order worth telling.
_SWEEP = 4


@dataclass(frozen=True, slots=True)
class StepError:
    """A measured step, and the seconds that we predict or why there are none."""

    step: MeasuredStep
    result: float | str

    @property
    def predicted(self) -> float | None:
        """Seconds."""
        return None if isinstance(self.result, str) else self.result

    @property
    def problem(self) -> str:
        """Why there are no seconds."""
        return self.result if isinstance(self.result, str) else ""

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less 1; not a number without prediction."""
        return float("nan") if self.predicted is None else self.predicted / self.step.seconds - 1


@dataclass(frozen=True, slots=True)
class Summary:
    """The errors of a source. `median` and `p90` are of sizes of errors of all judged rows,
    `left_out` is the median of those that nothing was fitted on, `bias` that of signed errors.

    `spearman` and `regret` are medians over its sweeps: the correlation of ranks, and how much
    longer the step takes that is fastest by prediction than the one that is fastest. None where no
    sweep has enough steps.
    """

    source: str
    rows: int
    median: float
    p90: float
    left_out: float | None
    bias: float
    spearman: float | None
    regret: float | None


def summaries(errors: Iterable[StepError]) -> list[Summary]:
    """The errors of each source, of rows that are judged and have a prediction."""
    groups: defaultdict[str, list[StepError]] = defaultdict(list)
    for each in errors:
        if each.step.judged and each.predicted is not None:
            groups[each.step.source].append(each)
    return [_summary(source, rows) for source, rows in groups.items()]


def _summary(source: str, rows: Sequence[StepError]) -> Summary:
    errors = np.array([each.error for each in rows])
    others = np.array([each.error for each in rows if not each.step.fitted])
    sweeps: defaultdict[str, list[StepError]] = defaultdict(list)
    for each in rows:
        if each.step.sweep:
            sweeps[each.step.sweep].append(each)
    long = [each for each in sweeps.values() if len(each) >= _SWEEP]
    return Summary(
        source,
        len(rows),
        float(np.median(np.abs(errors))),
        float(np.quantile(np.abs(errors), 0.9)),
        float(np.median(np.abs(others))) if len(others) else None,
        float(np.median(errors)),
        float(np.median([spearman(each) for each in long])) if long else None,
        float(np.median([regret(each) for each in long])) if long else None,
    )


def spearman(rows: Sequence[StepError]) -> float:
    """The correlation of the ranks of measured and predicted seconds of a sweep (C. Spearman,
    "The proof and measurement of association between two things", 1904)."""
    measured = _ranks([each.step.seconds for each in rows])
    ours = _ranks([each.predicted or 0.0 for each in rows])
    spread = float(measured.std() * ours.std())
    return float(np.cov(measured, ours, bias=True)[0, 1]) / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """The place of each value in their order; equal ones have the mean of their places."""
    array = np.array(values)
    below = (array[:, None] > array[None, :]).sum(axis=1)
    equal = (array[:, None] == array[None, :]).sum(axis=1)
    places: NDArray[np.float64] = below + (equal - 1) / 2
    return places


def regret(rows: Sequence[StepError]) -> float:
    """How much longer the step takes that we call the fastest than the fastest: 0 if they are one,
    0.05 if 5% longer."""
    ours = min(rows, key=lambda each: each.predicted or 0.0)
    return ours.step.seconds / min(each.step.seconds for each in rows) - 1
