"""The errors of predicted steps: by row, by source, and in the ranking of a sweep."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagec.validation.steps import MeasuredStep

#: The smallest number of steps of a sweep whose ranking counts.
_SWEEP = 4


@dataclass(frozen=True, slots=True)
class StepError:
    """A measured step, and its predicted seconds or the reason for their absence."""

    step: MeasuredStep
    result: float | str

    @property
    def predicted(self) -> float | None:
        """The predicted seconds."""
        return None if isinstance(self.result, str) else self.result

    @property
    def problem(self) -> str:
        """The reason for the absence of seconds."""
        return self.result if isinstance(self.result, str) else ""

    @property
    def error(self) -> float:
        """The relative error; NaN without a prediction."""
        return float("nan") if self.predicted is None else self.predicted / self.step.seconds - 1


@dataclass(frozen=True, slots=True)
class Summary:
    """The errors of a source. `median` and `p90` are those of absolute errors of all judged rows,
    `left_out` is the median of rows that were not used in a fit, and `bias` that of signed errors.

    `spearman` and `regret` are medians over its sweeps: the rank correlation, and the relative
    slowdown of the step with the best prediction against the fastest one. None if no sweep has
    enough steps.
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
    """The errors of each source, over judged rows with a prediction."""
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
    """The rank correlation of measured and predicted seconds of a sweep (C. Spearman, "The proof
    and measurement of association between two things", 1904)."""
    measured = _ranks([each.step.seconds for each in rows])
    ours = _ranks([each.predicted or 0.0 for each in rows])
    spread = float(measured.std() * ours.std())
    return float(np.cov(measured, ours, bias=True)[0, 1]) / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """The rank of each value; equal values have the mean of their ranks."""
    array = np.array(values)
    below = (array[:, None] > array[None, :]).sum(axis=1)
    equal = (array[:, None] == array[None, :]).sum(axis=1)
    places: NDArray[np.float64] = below + (equal - 1) / 2
    return places


def regret(rows: Sequence[StepError]) -> float:
    """The relative slowdown of the step with the best prediction against the fastest step: 0 if
    they are the same, 0.05 if it takes 5% longer."""
    ours = min(rows, key=lambda each: each.predicted or 0.0)
    return ours.step.seconds / min(each.step.seconds for each in rows) - 1
